"""The kernel that the cost model expects to be fastest, and the rules by which XLA is faster.

outlines -> cost -> candidates in its order -> legal -> cost
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..gemm.dtypes import DTYPES
from ..gemm.epilogue_graph import ROW_REDUCTIONS
from ..gemm.grid import ceil_div
from ..gemm.problem import TMA_ALIGNMENT, GemmProblem, MatrixLayout
from ..gemm.simt import VECTOR
from ..gemm.spec import GemmSpec
from .candidates import considered_specs, filled_spec, worthwhile
from .config_sets import is_medium
from .cost import LAUNCH_NS, Estimate, copying_ns, expected_times, roofline_ns, rough_estimate
from .device import MEMORY_BYTES_PER_NS, Device
from .expected_tiles import mean_rows
from .legality import extent_violations, limit_violations, split_violations
from .outlines import outlined
from .several import Several, where
from .xla import LINE, Fit, compared, features, fit_for

# Rows or columns of D, not stored along K, up to which XLA won all measurements, by 2 to 30 %. Of
# those along K a box holds no more than there are (`GemmSpec.short_boxes`).
THIN = 16
THIN_IN_TF32 = 8  # the same of products in TF32
# Of expected costs of kernels that share all tiles: these err by 5 % (rms). With it the kernel of
# least cost was within 2 % of the fastest of `benchmarks/split_k.py`, on each of 17 products.
SPLIT_K_DOUBT = 1.07
ROUNDING = 1e-9  # of costs in arrays, which are only compared with others
COUNTED = 2**52  # multiplications, of more of which arrays would not hold all that is counted
# K from which XLA won, by 3 to 16 %, all measurements in which our best kernel shared all tiles.
SPLIT_K_LOST = 16384
# XLA's expected time over ours from which a kernel runs: so high that of products that the fit had
# not seen 5 in 1,000 were slower than 0.97 of XLA's speed. With few rows XLA is seldom much faster
# than expected, nor is it with products that move much; it never was where reading a matrix of
# whole lines is what takes the time.
LEAD, LEAD_OF_FEW, LEAD_OF_LARGE, LEAD_OF_STREAMS = 1.45, 1.3, 1.25, 1.03
# The same in TF32, beside what kernel and transposes are expected to take, and from a time on of
# which the fit errs by 4 %. Where few rows, or columns, along K stream the other operand, XLA was
# faster by 2 % at most, of 22 products.
LEAD_OF_TF32, LEAD_OF_LONG_TF32, LONG_NS = 1.2, 1.05, 200e3
# The same of batches: of products that the fit had not seen 8 in 100 were slower than 0.97.
LEAD_OF_BATCHES = 1.1
# The same of medium products: 7 in 1,000 of 890 that the fit had not seen.
LEAD_OF_MEDIUM = 1.2
FEW_ROWS, STREAMED_K, LARGE_BYTES = 64, 4096, 20e6
LOOSE_LEAD = 1.05  # of loose lines, beside the expected ratio of `LOOSE_LINES`
# Times as long as with whole lines that XLA takes, but for a latency, where both operands lie along
# K, or else an operand's line is a multiple of 1, 2 or 4 elements of 16 bits, no more: the expected
# ratio, and one that nine of ten exceed. Fitted to 18, 39, 23 and 5 products.
LOOSE_ALONG_K = 3.55, 2.6
LOOSE_LINES = {1: (2.8, 1.5), 2: (2.4, 1.3), 4: (2.45, 1.9)}
LOOSE_LATENCY_NS = 3000.0  # of XLA's time, the part that is the same for such lines
LOOSE_STORES = 1.2  # passes over D that it takes longer where D's rows are so; measured 1.2 to 2.1
# Of IEEE float32: M and N, K, and the share of the SMs' slots of all waves that hold a tile, from
# which our kernels run.
FMA_SIDE, FMA_K, FMA_FILLED = 2048, 1024, 0.93
WAITING_K = 4096  # K from which SMs without a tile cost more than XLA loses by splitting it
WAITING_RATIO = 1.8  # times the roofline


class Best(NamedTuple):
    """The kernel of least expected cost."""

    spec: GemmSpec
    cost: Estimate


def best_kernel(
    problem: GemmProblem, device: Device, candidates: Iterable[GemmSpec] | None = None
) -> tuple[Best | None, list[str]]:
    """Returns the candidate of least expected cost, or None and the reasons against the last one.

    Candidates are kernels of the problem's type, or that of its transpose; None: all of these that
    the model may choose.
    """
    if candidates is None:
        return _best_of_all(problem, device)
    legal, reasons = _legal(problem, device, candidates)
    if not legal:
        return None, reasons
    fitting = [spec for spec in legal if not _is_unlikely(problem, spec)]
    costs = (Best(spec, rough_estimate(problem, spec, device)) for spec in fitting or legal)
    return min(costs, key=lambda x: _doubtful_ns(x.spec, x.cost.ns, x.cost.waves)), reasons


@lru_cache(maxsize=4096)
def _best_of_all(problem: GemmProblem, device: Device) -> tuple[Best | None, list[str]]:
    p = problem
    if p.l * p.m * p.n * p.k < COUNTED and (best := _least_outlined(problem, device)):
        return best, []
    return best_kernel(problem, device, considered_specs(problem))


def _least_outlined(problem: GemmProblem, device: Device) -> Best | None:
    """Returns the best of `considered_specs` but unlikely ones, most of which are never made.

    Kernels are made in the order of their outlines' costs, until one costs less than any outline
    that is left. Of equals it is the first that is considered.
    """
    waiting = []
    for number, (kind, configs, kernels) in enumerate(outlined(problem)):
        costs = np.broadcast_to(_outlined_ns(problem, kernels, device), len(configs)).tolist()
        waiting += [(ns, (number, i), kind, configs[i]) for i, ns in enumerate(costs)]
    found: list[tuple[float, tuple[int, int], Best]] = []
    for ns, place, kind, config in sorted(waiting):
        if math.isinf(ns) or (found and ns * (1 - ROUNDING) > min(found)[0]):
            break
        spec = filled_spec(config, kind)
        if spec and worthwhile(spec) and _legal(problem, device, [spec])[0]:
            best = Best(spec, rough_estimate(problem, spec, device))
            found.append((_doubtful_ns(spec, best.cost.ns, best.cost.waves), place, best))
    return min(found)[-1] if found else None


def _outlined_ns(problem: GemmProblem, kernels: Several, device: Device) -> Any:
    """Returns costs of outlines, infinite where their kernels would not be considered."""
    ns, *_, waves = expected_times(problem, kernels, device)
    ns = _doubtful_ns(kernels, ns, waves.number)
    left_out = kernels.split_k > waves.shared.gains
    left_out |= (kernels.cluster_k > 1) & (waves.number > 1)
    left_out |= _is_unlikely(problem, kernels)
    return where(worthwhile(kernels), where(left_out, math.inf, ns), math.inf)


def _doubtful_ns(spec: GemmSpec | Several, ns: Any, waves: Any) -> Any:
    return ns * where(spec.split_k & (waves == 1), SPLIT_K_DOUBT, 1.0)


def _legal(
    problem: GemmProblem, device: Device, candidates: Iterable[GemmSpec]
) -> tuple[list[GemmSpec], list[str]]:
    """Returns the kernels that can run a problem, and why the last other one cannot."""
    reasons = ["no kernel has the registers and shared memory that the epilogue needs"]
    legal = []
    for spec in candidates:
        against = extent_violations(problem, spec) or limit_violations(problem, spec, device)
        against = against or split_violations(problem, spec, device)
        if against:
            reasons = against
        else:
            legal.append(spec)
    return legal, reasons


def _is_unlikely(problem: GemmProblem, spec: GemmSpec | Several) -> Any:
    """Whether a kernel is considered only where all others are as unlikely to be fast.

    It is one for one row or column of tiles that would run several of both; or most rows of a tile
    are expected to be past the end of a group: reading B is then what takes time, and rows that are
    not there leave less of it in flight. Or tiles are claimed that are all alike, one for a group.
    """
    p, rows = problem.as_stored(spec.d_major), mean_rows(problem)
    unlikely = spec.short_boxes & (p.m > spec.tile_m) & (p.n > spec.d_tile_n)
    if rows is None:
        return unlikely
    return unlikely | (spec.tile_m > max(64, 2 * rows)) | spec.dynamic & (spec.tile_m >= 4 * rows)


def xla_is_faster(problem: GemmProblem, cost: Estimate, device: Device) -> str | None:
    """Returns why XLA is expected to be faster than our best kernel, of this cost, if it is."""
    if problem.rounds_operands:
        return slower_than_in_tf32(problem, cost.ns, device)
    copied_ns = copying_ns(problem)
    ns = cost.ns + copied_ns
    if fit_for(with_whole_rows(without_epilogue(problem)), device):
        what = "copies and our best kernel are" if copied_ns else "our best kernel is"
        reason = _lags(problem, ns, device, what)
    else:
        reason = next(filter(None, (rule(problem, cost, device) for rule in RULES)), None)
    if reason:
        return reason + ("; the epilogue goes there with it" if problem.epilogue else "")
    return _slower_than_two_steps(problem, ns, device) if problem.epilogue else None


def without_epilogue(problem: GemmProblem) -> GemmProblem:
    """Returns the plain product of the same arithmetic: a gated one has twice its columns."""
    p = problem
    columns = p.n * p.graph.accumulators
    return replace(p, n=columns, epilogue=None, operands=(), up_offset=None)


def _lags(problem: GemmProblem, ns: float, device: Device, what: str) -> str | None:
    """Returns why a product may well be slower by our best kernel, by the fit."""
    xla = xla_time(problem, device)
    if xla is None or xla.limit_ns >= ns:
        return None
    return f"{what} expected to take {ns / 1e3:.1f} us, {beside_xla(problem, ns, device)}"


def beside_xla(problem: GemmProblem, ns: float, device: Device) -> str:
    """Returns what the fit expects of XLA, beside an expected time of ours; "" without a fit."""
    if (xla := xla_time(problem, device)) is None:
        return ""
    return (
        f"XLA {xla.ns / ns:.2f} times that, {xla.least_ns / ns:.2f} where we are unlucky "
        f"({xla.fit.products} products measured; of others that ratio errs by {xla.fit.error:.0%})"
    )


@dataclass(frozen=True)
class XlaTime:
    """What a fit says of XLA's time."""

    fit: Fit
    ns: float  # expected
    least_ns: float  # than which it is hardly ever shorter
    limit_ns: float  # up to which a kernel may be expected to take


@lru_cache(maxsize=4096)
def xla_time(problem: GemmProblem, device: Device) -> XlaTime | None:
    """Returns XLA's time as the fit expects it; None without a fit, or a kernel to compare with.

    The fit is of products whose lines are multiples of 16 bytes. XLA is slower at others, by a
    ratio that varies so much that kernels need not be faster where it is least.
    """
    whole, stores = with_whole_rows(problem), 0.0
    if whole != problem:
        d_bytes = problem.m * problem.n * problem.element_bytes
        stores = LOOSE_STORES * d_bytes / MEMORY_BYTES_PER_NS
    fit = fit_for(whole, device)
    best, _ = best_kernel(compared(whole), device) if fit else (None, [])
    if not fit or not best:
        return None
    ns = fit.expected.ratio(features(whole, best.cost)) * best.cost.ns
    least_ns = ns / xla_lead(problem, best.cost)
    lines = [x.copied_line for x in (problem.a, problem.b) if x.copied_line]
    if not lines:
        return XlaTime(fit, ns + stores, least_ns + stores, least_ns + stores)
    unit = min(line & -line for line in lines)  # the power of 2 that divides all
    along_k = problem.a.major == problem.b.major == "k"
    times, least_times = LOOSE_ALONG_K if along_k else LOOSE_LINES[unit]
    ns = _on_loose_lines(ns, times) + stores
    return XlaTime(fit, ns, _on_loose_lines(least_ns, least_times) + stores, ns / LOOSE_LEAD)


def xla_lead(problem: GemmProblem, best: Estimate) -> float:
    """Returns how many times as long XLA must be expected to take for our best kernel to run."""
    p = problem
    if p.rounds_operands:
        few = min(p.m, p.n) <= FEW_ROWS and p.a.major == p.b.major == "k"
        if few and best.bound == "device memory":
            return 1.0
        return LEAD_OF_TF32 if best.ns < LONG_NS else LEAD_OF_LONG_TF32
    if p.loose_d or p.a.copied_line or p.b.copied_line:
        return LOOSE_LEAD
    if p.l > 1:
        return LEAD_OF_BATCHES
    if is_medium(p):
        return LEAD_OF_MEDIUM
    if p.m > FEW_ROWS:
        return LEAD_OF_LARGE if p.bytes >= LARGE_BYTES else LEAD
    whole_lines = p.n % LINE == 0 and p.k % LINE == 0 and p.k >= STREAMED_K
    streams = whole_lines and best.bound == "device memory" and not best.splits_k
    return LEAD_OF_STREAMS if streams else LEAD_OF_FEW


def _on_loose_lines(ns: float, times: float) -> float:
    return ns + (times - 1) * max(0.0, ns - LOOSE_LATENCY_NS)


def with_whole_rows(problem: GemmProblem) -> GemmProblem:
    """Returns a product with so many columns that rows of D are multiples of 16 bytes."""
    p = problem
    if not p.loose_d:
        return p
    step = TMA_ALIGNMENT // min(DTYPES[result.dtype].itemsize for result in p.graph.matrices)
    n = ceil_div(p.n, step) * step
    return replace(p, n=n, d=MatrixLayout("n", n, p.m * n))


def thin(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Products that are nearly matrix times vector: XLA has kernels without tensor cores."""
    p = problem
    scattered = [e for e, major in ((p.m, p.a.major), (p.n, p.b.major)) if major != "k"]
    if min(scattered, default=math.inf) > THIN:
        return None
    return (
        f"D is {p.m}x{p.n}: up to {THIN} rows or columns that do not lie along K in memory it is "
        "nearly a matrix-vector product"
    )


def split_by_xla(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Products that our best kernel shares among SMs, and XLA's kernels share with less loss.

    Measured on an H200: where K is long XLA won by 3 to 16 %, and by up to 4 % where a last wave
    of tiles is shared (but for one product of five). Shorter K over few tiles took from 0.82 to
    1.01 of XLA's time.
    """
    if not best.splits_k:
        return None
    if best.waves > 1 and best.bound == "tensor cores":
        return f"most SMs would wait for the last of {best.waves} waves of tiles, or share it"
    if best.waves > 1 or problem.k < SPLIT_K_LOST:
        return None
    return f"K={problem.k} over {best.tiles} tiles, which XLA splits with less loss"


def waits(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Long K over too few tiles to keep the SMs busy, which our kernels do not share."""
    ratio = best.ns / roofline_ns(problem)
    few = problem.k >= WAITING_K and best.tiles <= device.num_sms
    if best.splits_k or not few or ratio < WAITING_RATIO:
        return None
    return (
        f"K={problem.k} over {best.tiles} tiles keeps {device.num_sms} SMs waiting (expected "
        f"{ratio:.1f} times the least possible time), which XLA splits"
    )


def by_fma_units(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Products in IEEE float32, but large ones whose tiles fill the SMs.

    Measured on an H100: 22 of these took 0.94 to 1.004 times as long as by XLA, 14 others 0.93 to
    1.53 times.
    """
    p = problem
    large = p.l == 1 and min(p.m, p.n) >= FMA_SIDE and p.k >= FMA_K and p.simt_width == VECTOR
    if not p.simt or (large and best.occupancy >= FMA_FILLED):
        return None
    return "XLA's kernels for FMA units are about as fast, or faster"


def not_measured(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Products whose kernels have not been timed against XLA's."""
    p = problem
    if p.a.copied_line or p.b.copied_line:
        return (
            "an operand's lines are no multiples of 16 bytes, and of such products only plain ones "
            "of two matrices of 16 bits have been measured"
        )
    return None


def slower_than_in_tf32(problem: GemmProblem, ns: float, device: Device) -> str | None:
    """Returns why XLA should run a product in TF32, with its epilogue, that else takes `ns`.

    Measured: of groups of rows it took 2.3 to 29 times as long, of ten batches 0.73 to 1.03 times.
    """
    p = problem
    if p.groups:
        return None
    if p.l > 1:
        return "XLA's products of batches in TF32 are about as fast, or faster"
    if min(p.m, p.n) <= THIN_IN_TF32:
        return f"D is {p.m}x{p.n}, in TF32, and XLA has kernels without tensor cores"
    if p.epilogue:
        return _slower_than_two_steps(p, ns, device)
    if fit_for(p, device):
        return _lags(p, ns, device, "in TF32 our best kernel and the transposes that it reads are")
    if p.a.major == p.b.major == "k":
        return None
    return "XLA's time in TF32 has not been measured on such a GPU"


RULES = by_fma_units, not_measured, thin, split_by_xla, waits


def _slower_than_two_steps(problem: GemmProblem, ns: float, device: Device) -> str | None:
    """Returns why XLA's product and then its epilogue are expected to be faster, if they are."""
    two_steps = two_steps_ns(problem, device)
    if ns <= two_steps:
        return None
    return (
        f"with the epilogue our best kernel is expected to take {ns / 1e3:.1f} us, XLA's "
        f"product and a pass over its result {two_steps / 1e3:.1f} us"
    )


def two_steps_ns(problem: GemmProblem, device: Device) -> float:
    """Returns the expected time of XLA's product and its epilogue; infinite if not known.

    XLA's product is taken to be as fast as our plain one where there is no fit, its epilogue to
    move each byte once, with a kernel more for each reduction.
    """
    p = problem
    plain = without_epilogue(p)
    best, _ = best_kernel(compared(plain), device)
    xla = xla_time(plain, device)
    product_ns = xla.ns if xla else best.cost.ns if best else math.inf
    elements = p.l * p.m * p.n
    moved = elements * (p.element_bytes + p.graph.accumulators * DTYPES[p.d_dtype].itemsize)
    statistics = sum(node.op in ROW_REDUCTIONS for node in p.graph.nodes)
    kernels = 1 + statistics + len(p.graph.reductions)
    return product_ns + kernels * LAUNCH_NS + moved / MEMORY_BYTES_PER_NS
