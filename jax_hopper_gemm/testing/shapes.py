"""The shapes that are tested and timed, named once.

Model dimensions are those of the published configurations. Every suite is a tuple of
`GemmProblem`s over compact operands; `operand_shape` and `dimension_numbers` turn one into a
call of `dot_general`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import log2
from random import Random
from typing import Literal

from ..gemm.problem import GemmProblem, Major
from ..gemm.subscripts import DimensionNumbers

Operand = Literal["a", "b", "d"]

_BARS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (4096, 11008, 4096), (8192, 28672, 8192), (8192, 8192, 28672), (3000, 5000, 4104),
    (4096, 14336, 4096), (8192, 1024, 8192), (2048, 8192, 1024),
)  # fmt: skip


def bars() -> Iterable[GemmProblem]:
    """What a kernel must not lose to XLA: B as (K, N) and (N, K), and gradients' layouts.

    The gradient of A reads B transposed, (M, K) x (N, K), which is already there; the gradient
    of B reads A transposed, (K, M) x (K, N).
    """
    for m, n, k in _BARS:
        yield GemmProblem.dense(m, n, k)
        yield GemmProblem.dense(m, n, k, b_major="k")
    for size in (4096, 8192):
        yield GemmProblem.dense(size, size, size, a_major="m")


def fallback() -> Iterable[GemmProblem]:
    """Few rows, or few tiles and a long K: where XLA may well be the better answer."""
    for n, k in ((4096, 4096), (28672, 8192), (8192, 28672)):
        for m in (1, 16, 64, 128, 256):
            yield GemmProblem.dense(m, n, k)
    yield GemmProblem.dense(512, 512, 16384)


def square() -> Iterable[GemmProblem]:
    for size in (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384):
        yield GemmProblem.dense(size, size, size)


def llama() -> Iterable[GemmProblem]:
    """Llama 3 8B and 70B over 4096 tokens: QKV, attention output, up, down."""
    for name in ("Llama 3 8B", "Llama 3 70B"):
        yield from _layer(4096, *_MODELS[name])


def gemma() -> Iterable[GemmProblem]:
    """Gemma 2 9B and Gemma 3 27B over 4096 tokens; heads do not fill the width."""
    for name in ("Gemma 2 9B", "Gemma 3 27B"):
        yield from _layer(4096, *_MODELS[name])


def vit() -> Iterable[GemmProblem]:
    """ViT-B/16, ViT-L/16 (64 images of 197 tokens) and SigLIP So400m (32 of 256)."""
    for tokens, width, hidden in ((12608, 768, 3072), (12608, 1024, 4096), (8192, 1152, 4304)):
        yield from _layer(tokens, width, 3 * width, width, hidden)


def decode() -> Iterable[GemmProblem]:
    """One token a sequence, through the projections of Llama 3 8B and 70B."""
    for n, k in ((6144, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)):
        for m in (1, 8, 16, 32, 64, 128):
            yield GemmProblem.dense(m, n, k)


def few_rows() -> Iterable[GemmProblem]:
    """Streams of weights, stored (K, N) and (N, K); and a router, whose columns are few."""
    for n, k in ((4096, 4096), (28672, 8192), (8192, 28672), (4096, 14336)):
        for m in (1, 8, 16, 17, 32, 48, 64):
            yield GemmProblem.dense(m, n, k)
            yield GemmProblem.dense(m, n, k, b_major="k")
    for experts in (8, 64):
        yield GemmProblem.dense(8192, experts, 4096, b_major="k")


def glu() -> Iterable[GemmProblem]:
    """Gated MLPs of Llama 3 8B over 4096 and 8192 tokens: gate and up as one product, gradients.

    Kernels with two right operands are chosen by the product of twice the columns.
    """
    width, hidden = 4096, 14336
    for tokens in (4096, 8192):
        for n, k in ((2 * hidden, width), (hidden, width), (width, hidden)):
            yield from _with_gradients(tokens, n, k)
    yield GemmProblem.dense(4096, 8192, 4096)


# Of steps of small and large models, as `benchmarks/models.py` has them: tokens, and the features
# of weights, of their inputs and results.
_STEPS = {
    4096: ((256, 2048), (2048, 2048), (3072, 4096), (16384, 2048), (24576, 3072)),
    8192: (
        (512, 2048), (768, 768), (768, 3072), (1024, 4096), (1600, 1600), (1600, 6400),
        (2048, 2048), (2048, 5120), (2048, 8192), (4096, 4096), (4096, 14336),
    ),
    16384: ((768, 768), (768, 3072)),
    25216: ((768, 768), (768, 3072), (1024, 1024), (1024, 4096)),
}  # fmt: skip
# Tokens, features and vocabulary, and how embeddings are stored.
_LOGITS: tuple[tuple[int, int, int, Major], ...] = (
    (4096, 2048, 256128, "n"), (4096, 3072, 256128, "n"), (8192, 1600, 50304, "n"),
    (16384, 768, 50304, "n"), (8192, 768, 32128, "k"), (8192, 2048, 32128, "k"),
    (8192, 2048, 32000, "k"), (8192, 4096, 32000, "k"),
)  # fmt: skip


def steps() -> Iterable[GemmProblem]:
    """Training steps of models: forwards, gradients of tokens, of weights; of logits the second."""
    for tokens, weights in _STEPS.items():
        for pair in weights:
            for n, k in dict.fromkeys((pair, pair[::-1])):
                yield from _with_gradients(tokens, n, k)
    for tokens, features, vocabulary, major in _LOGITS:
        yield GemmProblem.dense(tokens, features, vocabulary, b_major=major)


# Of layers of published models: the width, columns of Q, K and V, rows of the output projection,
# hidden features.
_MODELS = {
    "Llama 2 7B": (4096, 12288, 4096, 11008), "Llama 2 13B": (5120, 15360, 5120, 13824),
    "Llama 3 8B": (4096, 6144, 4096, 14336), "Llama 3 70B": (8192, 10240, 8192, 28672),
    "Llama 3.2 1B": (2048, 3072, 2048, 8192), "Llama 3.2 3B": (3072, 5120, 3072, 8192),
    "Qwen 2.5 1.5B": (1536, 2048, 1536, 8960), "Qwen 2.5 7B": (3584, 4608, 3584, 18944),
    "Qwen 2.5 32B": (5120, 7168, 5120, 27648), "Qwen 3 0.6B": (1024, 4096, 2048, 3072),
    "Qwen 3 1.7B": (2048, 4096, 2048, 6144), "Qwen 3 4B": (2560, 6144, 4096, 9728),
    "Qwen 3 8B": (4096, 6144, 4096, 12288), "Qwen 3 14B": (5120, 7168, 5120, 17408),
    "Qwen 3 32B": (5120, 10240, 8192, 25600), "Mistral Nemo 12B": (5120, 6144, 4096, 14336),
    "Mistral Small 24B": (5120, 6144, 4096, 32768), "Gemma 2 2B": (2304, 4096, 2048, 9216),
    "Gemma 2 9B": (3584, 8192, 4096, 14336), "Gemma 2 27B": (4608, 8192, 4096, 36864),
    "Gemma 3 1B": (1152, 1536, 1024, 6912), "Gemma 3 4B": (2560, 4096, 2048, 10240),
    "Gemma 3 12B": (3840, 8192, 4096, 15360), "Gemma 3 27B": (5376, 8192, 4096, 21504),
    "Phi 3 mini": (3072, 9216, 3072, 8192), "Phi 4": (5120, 7680, 5120, 17920),
    "ViT-H": (1280, 3840, 1280, 5120), "DiT-XL": (1152, 3456, 1152, 4608),
    "GPT-2 XL": (1600, 4800, 1600, 6400), "GPT-NeoX 20B": (6144, 18432, 6144, 24576),
}  # fmt: skip


def models() -> Iterable[GemmProblem]:
    """Training steps of published models over 4096 and 8192 tokens, with both gradients."""
    for tokens in (4096, 8192):
        for dimensions in _MODELS.values():
            for problem in _layer(tokens, *dimensions):
                yield from _with_gradients(tokens, problem.n, problem.k)


def heldout() -> Iterable[GemmProblem]:
    """Random products that nothing is tuned for: `benchmarks/survey.py` leaves them out."""
    return random_products(200, seed=20261125)


# Widths of published models: Llama, Gemma, Qwen, DeepSeek, GPT, T5 and ViT, and their vocabularies.
_WIDTHS = (
    768, 1024, 1152, 1280, 1408, 1536, 1600, 2048, 2304, 2560, 2816, 3072, 3584, 4096, 4304, 5120,
    5376, 6400, 6912, 7168, 8192, 10240, 11008, 12288, 14336, 16384, 18432, 21504, 28672, 32000,
    50304, 128256,
)  # fmt: skip
_MAX_FLOPS = 2**43


def random_products(count: int, seed: int) -> list[GemmProblem]:
    """Returns random products of bfloat16: M from 1 to 65536, all layouts.

    Half of them have the widths of published models, half are log-uniform in N and K. Rows are
    multiples of 16 bytes, which the kernels need.
    """
    random = Random(seed)
    problems: dict[GemmProblem, None] = {}
    extent = partial(random_extent, random)
    while len(problems) < count:
        m = extent(1, 65536, step=1)
        if random.random() < 0.5:
            n, k = random.choice(_WIDTHS), random.choice(_WIDTHS)
        else:
            n, k = extent(64, 32768), extent(64, 32768)
        a_major, b_major = random.choice(("k", "k", "k", "m")), random.choice(("n", "k"))
        if a_major == "m":  # as of a weight's gradient, whose rows are M
            m = extent(64, 16384)
        problem = GemmProblem.dense(m, n, k, a_major=a_major, b_major=b_major)
        if problem.flops <= _MAX_FLOPS:
            problems[problem] = None
    return list(problems)


def random_extent(random: Random, low: int, high: int, step: int = 8) -> int:
    """Returns a multiple of `step`, whose logarithm is as likely anywhere from `low` to `high`."""
    size = 2 ** random.uniform(log2(low), log2(high))
    return max(step, round(size / step) * step)


def _with_gradients(m: int, n: int, k: int) -> Iterable[GemmProblem]:
    """Yields a product of tokens and weights, then those of the gradients of each."""
    yield GemmProblem.dense(m, n, k)
    yield GemmProblem.dense(m, k, n, b_major="k")
    yield GemmProblem.dense(k, n, m, a_major="m")


def _layer(tokens: int, width: int, qkv: int, heads: int, hidden: int) -> tuple[GemmProblem, ...]:
    """Returns the four products of a transformer layer: QKV, attention output, up, down."""
    products = ((qkv, width), (width, heads), (hidden, width), (width, hidden))
    return tuple(GemmProblem.dense(tokens, n, k) for n, k in products)


SUITES: dict[str, Callable[[], Iterable[GemmProblem]]] = {
    "bars": bars, "fallback": fallback, "square": square, "llama": llama, "gemma": gemma,
    "vit": vit, "decode": decode, "few_rows": few_rows, "glu": glu, "steps": steps,
    "models": models, "heldout": heldout,
}  # fmt: skip


def suite(name: str) -> tuple[GemmProblem, ...]:
    """Returns the problems of a suite of `SUITES`, each once."""
    return tuple(dict.fromkeys(SUITES[name]()))


def layout_name(problem: GemmProblem) -> str:
    """Returns how A and B are stored: "MK,KN" when both are row-major as multiplied."""
    stored: dict[Major, str] = {"k": "MK", "m": "KM"}
    return f"{stored[problem.a.major]},{'KN' if problem.b.major == 'n' else 'NK'}"


def operand_shape(problem: GemmProblem, operand: Operand) -> tuple[int, ...]:
    """Returns the shape of the array that stores a compact operand; L leads when over 1."""
    batch = (problem.l,) if problem.l > 1 else ()
    m, n, k = problem.m, problem.n, problem.k
    if operand == "a":
        return batch + ((m, k) if problem.a.major == "k" else (k, m))
    if operand == "b":
        return batch + ((k, n) if problem.b.major == "n" else (n, k))
    return (*batch, m, n)


def dimension_numbers(problem: GemmProblem) -> DimensionNumbers:
    """Returns the `dot_general` dimension numbers of operands shaped by `operand_shape`."""
    lead = 1 if problem.l > 1 else 0
    a_k = lead + (1 if problem.a.major == "k" else 0)
    b_k = lead + (0 if problem.b.major == "n" else 1)
    batch = tuple(range(lead))
    return ((a_k,), (b_k,)), (batch, batch)
