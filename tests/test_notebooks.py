"""Every notebook runs top to bottom, and is committed without what it printed."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")
nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")

pytestmark = pytest.mark.pure

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def by_name(path: Path) -> str:
    return path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_notebook_runs_and_shows_a_plot(path: Path):
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()  # raises CellExecutionError at the first cell that fails
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not any(output.get("name") == "stderr" for output in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_notebook_is_committed_without_outputs(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    ran = [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert ran == []


def test_there_is_a_notebook():
    assert NOTEBOOKS
