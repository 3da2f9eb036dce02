"""What the documents show is there: links, commands, environment variables, examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import script_at

import jax_hopper_gemm as jhg
from jax_hopper_gemm import moe, nn
from jax_hopper_gemm.cli import cli
from jax_hopper_gemm.nn import linen

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(ROOT / "docs").rglob("*.md"),
]
VARIABLE = re.compile(r"JAX_HOPPER_GEMM_[A-Z_]*[A-Z]")
COMMAND = re.compile(r"python -m jax_hopper_gemm([^#`\n]*)")

COMMANDS = [
    (path.name, match.strip())
    for path in DOCUMENTS
    for match in COMMAND.findall(path.read_text())
]  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(path: Path):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize(("document", "arguments"), COMMANDS)
def test_commands_in_documents_parse(document: str, arguments: str):
    words = shlex.split(arguments)
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        command = command.commands[words.pop(0)]
    if words or command.name not in ("explain", "tune"):  # named in a sentence without arguments
        command.make_context("", words)


def test_deployment_lists_exactly_the_variables_that_are_read():
    sources = [*(ROOT / "jax_hopper_gemm").rglob("*.py"), *(ROOT / "ffi").rglob("*.cc")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    assert set(VARIABLE.findall((ROOT / "docs/deployment.md").read_text())) == read


def run_examples(path: Path) -> dict:
    """Returns the names that the Python examples of a document define, run one after another."""
    names: dict = {}
    for example in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(example, str(path), "exec"), names)
    return names


@pytest.mark.slow
def test_readme_examples_run(capsys):
    names = run_examples(README)
    assert names["da"].shape == (512, 1024) and names["db"].shape == (1024, 768)
    assert names["dbias"].shape == (768,) and names["swiglu"].shape == names["y"].shape
    assert "1024" in capsys.readouterr().out


@pytest.mark.slow
def test_examples_of_epilogues_run(capsys):
    names = run_examples(ROOT / "docs" / "epilogues.md")
    assert names["weights"].shape == names["experts"].shape == (256, 4)
    expected = 2 * names["a"].astype("float32").T @ names["residual"].astype("float32")
    np.testing.assert_allclose(names["gradient"], expected, rtol=0, atol=1e-3)
    assert names["gradients"].shape == (3, 128, 512) and not names["gradients"][1].any()
    np.testing.assert_array_equal(names["swiglu"], names["same"])
    assert "sort" in capsys.readouterr().out


@pytest.mark.slow
def test_examples_of_sharding_run():
    names = run_examples(ROOT / "docs" / "sharding.md")
    x, up, down = names["x"], names["up"], names["down"]
    y, pull = jax.vjp(lambda x, up, down: jax.nn.gelu(x @ up) @ down, x, up, down)
    found = names["y"], names["dx"], names["dup"], names["ddown"], names["step"](x, up, down)
    for a, b in zip(found, (y, *pull(jnp.ones_like(y)), y), strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.max(np.abs(a - b)) < 0.02 * np.max(np.abs(b))


@pytest.mark.slow
def test_examples_of_mixtures_of_experts_run():
    names = run_examples(ROOT / "docs" / "moe.md")
    assert names["y"].shape == names["x"].shape
    np.testing.assert_allclose(names["by_parts"], names["y"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(names["spread"], names["y"], rtol=0, atol=1e-6)
    assert names["layer"].gate_up.shape == (8, 64, 2, 128)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, by Qwix
def test_examples_of_interoperability_run(capsys: pytest.CaptureFixture[str]):
    for name in ("equinox", "haiku", "qwix"):
        pytest.importorskip(name, reason="needs the extra `test`")
    names = run_examples(ROOT / "docs" / "interoperability.md")
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    np.testing.assert_array_equal(
        names["h"], names["same"].apply(names["variables"], names["x"]), strict=True
    )
    assert any(np.any(x) for x in names["gradients"].layers[0].weight)
    assert names["z"].shape == (1, 32, 32) and names["y8"].shape == names["y"].shape
    printed = capsys.readouterr().out
    assert "5 products: 4 on kernels" in printed and "2 products: 2 on kernels" in printed


def test_examples_of_float32_run():
    names = run_examples(ROOT / "docs" / "float32.md")
    exact = np.asarray(names["x"], np.float64) @ np.asarray(names["w"], np.float64)
    np.testing.assert_allclose(names["y"], exact, rtol=0, atol=1e-3)
    assert names["z"].shape == (256, 384) and names["v"].shape == (256, 383)


@pytest.mark.slow
def test_examples_of_8_bit_types_run():
    names = run_examples(ROOT / "docs" / "quantized.md")
    exact = np.asarray(names["x8"], np.float32) @ np.asarray(names["w8"], np.float32)
    np.testing.assert_allclose(np.float32(names["y"]), exact, rtol=2.0**-7, atol=1e-2)
    assert names["sums"].dtype == jnp.int32 and (names["sums"] == 512).all()
    assert names["gradient"].shape == names["w"].shape and np.any(names["gradient"])
    assert names["h8"].dtype == jnp.float8_e4m3fn and names["amax"].shape == ()
    near = jax.nn.silu(names["x"] @ names["w"])
    assert np.linalg.norm(names["z"] - near) < 0.05 * np.linalg.norm(near)
    near += names["x"] @ names["w"]
    assert np.linalg.norm(np.float32(names["y_weights"]) - near) < 0.15 * np.linalg.norm(near)


def test_examples_of_deployment_run():
    names = run_examples(ROOT / "docs" / "deployment.md")
    ones = [jnp.ones(shape, jnp.bfloat16) for shape in names["shapes"]]
    np.testing.assert_array_equal(names["y"], names["layer"](*ones))
    assert names["program"].has_vjp() and names["program"].platforms == ("cpu", "cuda")


def test_examples_of_transformations_run():
    block = run_examples(ROOT / "docs" / "transformations.md")["block"]
    arrays = [np.ones((8, 8), np.float32) for _ in range(3)]
    program = str(jax.make_jaxpr(jax.grad(lambda *x: block(*x).sum()))(*arrays))
    assert program.count("hopper_fused[") == 2  # the derivative of gelu wants its argument, too


@pytest.mark.slow
def test_examples_of_decoding_run():
    names = run_examples(ROOT / "docs" / "decode.md")
    expected = names["a"]
    for w in names["layers"]:
        expected = expected + jax.nn.silu(expected @ w)
    np.testing.assert_allclose(np.float32(names["h"]), np.float32(expected), rtol=0.05, atol=0.1)


def test_examples_of_the_choice_of_kernels_run(capsys):
    run_examples(ROOT / "docs" / "kernel_choice.md")
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["table", "model", "unsupported"]
    assert "A and B are int16: cast them" in said[2]


def test_every_document_with_examples_is_run_here():
    here = Path(__file__).read_text()
    documents = [path for path in DOCUMENTS if path.parent.name != "api" and path != README]
    with_examples = {path.name for path in documents if "```python\n" in path.read_text()}
    assert len(with_examples) > 8
    run = set(re.findall(r'run_examples\(ROOT / "docs" / "(.+?)"\)', here))
    assert with_examples == run


API = sorted((ROOT / "docs" / "api").glob("*.md"))
ENTRY = r"^::: ([\w.]+)\n(?:\n```python\n(.*?)```)?"
# A name that has an entry, and the example after it.
ENTRIES = [
    entry for path in API for entry in re.findall(ENTRY, path.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.slow
@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_examples_of_the_reference_run(path: Path):
    assert run_examples(path)


def is_ours(x) -> bool:
    return callable(x) and getattr(x, "__module__", "").startswith("jax_hopper_gemm")


def test_every_public_name_has_an_entry_and_an_example():
    layers = [x for x in vars(linen).values() if getattr(x, "__module__", "") == linen.__name__]
    names = {
        "": {*jhg.__all__} - {"moe", "recipes"},
        "moe.": {name for name, x in vars(moe).items() if is_ours(x)},
        "reports.": {"FoundProduct"},
        "nn.": {name for name, x in vars(nn).items() if is_ours(x)} - {"__getattr__"},
        "nn.linen.": {x.__name__ for x in layers if isinstance(x, type)},
        "recipes.": {x.__name__ for x in get_args(jhg.recipes.Recipe)} | {"DelayedScaling"},
    }
    public = {f"jax_hopper_gemm.{at}{name}" for at, found in names.items() for name in found}
    assert {name for name, _ in ENTRIES} == public
    assert [name for name, code in ENTRIES if name.rpartition(".")[2] not in code] == []


def test_pictures_are_those_of_the_tables():
    module = script_at(ROOT / "docs" / "pictures.py")
    drawn = module.pictures()
    assert {path.stem: path.read_text() for path in module.FOLDER.glob("*.svg")} == drawn
