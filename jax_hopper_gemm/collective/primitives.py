"""Primitives of the collective GEMMs: rings in which rows or sums move while GEMMs run.

`gathered_dot` multiplies the rows of all devices by this device's matrix. Rows move around the
ring; each device multiplies the rows that it has while the next ones arrive. `scattered_dot` adds
up the devices' products and keeps this device's part of the rows. Sums move around the ring; each
device's GEMM adds to a sum in its epilogue. Two sets of sums move in opposite directions: one
moves while a GEMM adds to the other.

Each is the other's transpose. Both are linear in each operand, so derivatives of any order consist
of them and of GEMMs on one device.

Letters: n devices along the mesh axis, each with m of the M = n * m rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad

from ..gemm.product import Options
from ..ops import contexts, dot_general, matmul
from ..primitives.define import Lowering, Rules, define_primitive
from ..primitives.dot import as_cotangent, entering


def gathered_dot(x: jax.Array, w: jax.Array, axis_name: Any, options: Options) -> jax.Array:
    """Returns the rows of all devices, in the devices' order, times this device's matrix.

    Args:
      x: (..., m, K), this device's rows.
      w: (K, N).
      axis_name: the mesh axis, or several.
      options: of the GEMM on each device.

    Returns:
      (..., M, N).
    """
    (product,) = gathered_dot_p.bind(x, w, axis_name=axis_name, options=options, with_rows=False)
    return product


def scattered_dot(x: jax.Array, w: jax.Array, axis_name: Any, options: Options) -> jax.Array:
    """Returns this device's rows of the sum of all devices' products.

    Args:
      x: (..., M, K).
      w: (K, N).
      others: as of `gathered_dot`.

    Returns:
      (..., m, N).
    """
    return scattered_dot_p.bind(x, w, axis_name=axis_name, options=options)


# Implementations.


def _gathered_dot(
    x: jax.Array, w: jax.Array, *, axis_name: Any, options: Options, with_rows: bool
) -> list[jax.Array]:
    """Returns the product, and with `with_rows` the gathered rows."""
    chunks = list(_chunks(x, axis_name))
    results = [_in_order([_by(options, matmul, chunk, w) for chunk in chunks], axis_name)]
    return [*results, _in_order(chunks, axis_name)] if with_rows else results


def _chunks(x: jax.Array, axis_name: Any) -> Iterator[jax.Array]:
    """Yields this device's rows, then those of each device before it around the ring."""
    for left in reversed(range(lax.axis_size(axis_name))):
        yield x
        if left:
            x = _shifted(x, axis_name, 1)


def _in_order(chunks: list[jax.Array], axis_name: Any) -> jax.Array:
    """Returns the chunks, in the order of `_chunks`, as one array in the order of the devices.

    The position of device 0's chunk depends on the device. So the result is a slice of a sequence
    of chunks that goes around the ring nearly twice. XLA makes one copy of all this.
    """
    count, rows = len(chunks), chunks[0].shape[-2]
    if count == 1:
        return chunks[0]
    ascending = chunks[::-1]
    twice = jnp.concatenate([*ascending, *ascending[:-1]], axis=-2)
    start = (count - 1 - lax.axis_index(axis_name)) * rows
    return lax.dynamic_slice_in_dim(twice, start, count * rows, axis=-2)


def _scattered_dot(x: jax.Array, w: jax.Array, *, axis_name: Any, options: Options) -> jax.Array:
    count, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    rows = x.shape[-2] // count
    if not rows:
        return _by(options, matmul, x, w)
    half = rows // 2 if count > 1 else 0
    streams = [x for x in ((0, half, 1), (half, rows - half, -1)) if x[1]]  # start, size, step
    sums: list[Any] = [None] * len(streams)
    for hop in range(1, count + 1):
        for i, (start, size, step) in enumerate(streams):
            # After one hop for every other device a sum is on the device that keeps it.
            of_device = (own - step * hop) % count
            part = _rows_of(x, of_device, start, size, count)
            before = None if hop == 1 else _shifted(sums[i], axis_name, step)
            sums[i] = _by(options, matmul, part, w, c=before)
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=-2)


def _rows_of(x: jax.Array, device: Any, start: int, size: int, count: int) -> jax.Array:
    """Returns `size` rows of one of `count` devices, from its row `start` on.

    If these are one matrix of a stack, a kernel reads it in place, without a copy.
    """
    rows = x.shape[-2] // count
    if x.ndim > 2 or rows % size or start % size:
        return lax.dynamic_slice_in_dim(x, device * rows + start, size, axis=-2)
    stack = x.reshape(x.shape[0] // size, size, x.shape[1])
    first = (device * rows + start) // size
    return lax.dynamic_slice_in_dim(stack, first, 1).reshape(size, x.shape[1])


def _shifted(x: jax.Array, axis_name: Any, step: int) -> jax.Array:
    """Returns the array of the device `step` places before this one."""
    count = lax.axis_size(axis_name)
    names, places = axis_name, range(count)
    if isinstance(axis_name, tuple):  # `ppermute` counts devices in the mesh's order of its axes
        of_mesh = jax.typeof(x).sharding.mesh.axis_names
        names = tuple(sorted(axis_name, key=[*of_mesh, *axis_name].index))
        devices = list(itertools.product(*(range(lax.axis_size(name)) for name in axis_name)))
        order = [axis_name.index(name) for name in names]
        in_mesh = sorted(devices, key=lambda device: [device[i] for i in order])
        places = [in_mesh.index(device) for device in devices]
    return lax.ppermute(x, names, [(places[i], places[(i + step) % count]) for i in range(count)])


def _scattered_dot_tangent(
    x_tangent: jax.Array, w_tangent: jax.Array, x: jax.Array, w: jax.Array, **params: Any
) -> jax.Array:
    return lax.add(scattered_dot(x_tangent, w, **params), scattered_dot(x, w_tangent, **params))


def _by(options: Options, product: Any, *arrays: Any, **named: Any) -> jax.Array:
    """Returns one of our products by options, of which `max_sms` is a context."""
    names = ("precision", "preferred_element_type", "cotangent_dtype", "implementation")
    with contexts.max_sms(options.max_sms):
        return product(*arrays, **{name: getattr(options, name) for name in names}, **named)


def _of_columns(x: jax.Array, y: jax.Array, options: Options) -> jax.Array:
    """Returns the product (K, N) of (..., M, K), transposed, and (..., M, N)."""
    rows = tuple(range(x.ndim - 1))
    return _by(options, dot_general, x, y, ((rows, rows), ((), ())))


# Rules for derivatives and `vmap`.


def _moves(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero


def _gathered_dot_jvp(
    primals: Any, tangents: Any, *, with_rows: bool, **params: Any
) -> tuple[Any, Any]:
    (x, w), (x_tangent, w_tangent) = primals, tangents
    wanted = with_rows or _moves(w_tangent)
    results = gathered_dot_p.bind(x, w, with_rows=wanted, **params)
    moved: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results[: 1 + with_rows]]
    if _moves(x_tangent):
        moved = gathered_dot_p.bind(x_tangent, w, with_rows=with_rows, **params)
    if _moves(w_tangent):
        term = _by(params["options"], matmul, results[1], w_tangent)
        moved[0] = ad.add_tangents(moved[0], term)
    return results[: 1 + with_rows], moved


def _gathered_dot_transpose(
    cotangents: Any, x: Any, w: Any, *, axis_name: Any, options: Options, with_rows: bool
) -> list[Any]:
    product = cotangents[0]
    if ad.is_undefined_primal(w):
        if not _moves(product):
            return [None, None]
        product, options = entering(w.aval, product, x, options)
        rows = _in_order(list(_chunks(x, axis_name)), axis_name)
        return [None, as_cotangent(w.aval, _of_columns(rows, product, options))]
    total: Any = ad.Zero(x.aval)
    if _moves(product):
        product, options = entering(x.aval, product, w, options)
        total = as_cotangent(x.aval, scattered_dot(product, w.T, axis_name, options))
    if with_rows and _moves(cotangents[1]):
        rows, axis = cotangents[1], cotangents[1].ndim - 2
        rows = lax.psum_scatter(rows, axis_name, scatter_dimension=axis, tiled=True)
        total = ad.add_tangents(total, rows)
    return [total, None]


def _scattered_dot_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    (x, w), (x_tangent, w_tangent) = primals, tangents
    product = scattered_dot(x, w, **params)
    if not _moves(w_tangent):
        return product, scattered_dot(x_tangent, w, **params)
    if not _moves(x_tangent):
        return product, scattered_dot(x, w_tangent, **params)
    return product, scattered_dot_tangent_p.bind(x_tangent, w_tangent, x, w, **params)


def _scattered_dot_transpose(
    cotangent: Any, x: Any, w: Any, *, axis_name: Any, options: Options
) -> list[Any]:
    if ad.is_undefined_primal(w):
        cotangent, options = entering(w.aval, cotangent, x, options)
        rows = _in_order(list(_chunks(cotangent, axis_name)), axis_name)
        return [None, as_cotangent(w.aval, _of_columns(x, rows, options))]
    cotangent, options = entering(x.aval, cotangent, w, options)
    return [as_cotangent(x.aval, gathered_dot(cotangent, w.T, axis_name, options)), None]


def _scattered_dot_tangent_transpose(
    cotangent: Any, x_tangent: Any, w_tangent: Any, x: Any, w: Any, *, axis_name: Any,
    options: Options,
) -> list[Any]:  # fmt: skip
    """Uses one ring for both gradients: dgrad gathers the rows that wgrad contracts."""
    _, of_columns = entering(w_tangent.aval, cotangent, x, options)
    cotangent, options = entering(x_tangent.aval, cotangent, w, options)
    of_x, rows = gathered_dot_p.bind(
        cotangent, w.T, axis_name=axis_name, options=options, with_rows=True
    )
    of_w = _of_columns(x, rows, of_columns)
    return [as_cotangent(x_tangent.aval, of_x), as_cotangent(w_tangent.aval, of_w), None, None]


def _batch(
    bind: Any, function: Any, axis_data: Any, args: Any, axes: Any, **params: Any
) -> tuple[Any, Any]:
    """A mapped x has one more axis in front; a mapped w is one ring for all."""
    if len(args) == 2 and axes[1] is None:
        found = bind(jnp.moveaxis(args[0], axes[0], 0), args[1], **params)
    else:
        found = jax.vmap(partial(function, **params), tuple(axes))(*args)
    return found, [0] * len(found) if isinstance(found, list) else 0


gathered_dot_p = define_primitive(
    "hopper_gathered_dot",
    _gathered_dot,
    multiple_results=True,
    rules=Rules(
        jvp=_gathered_dot_jvp,
        transpose=_gathered_dot_transpose,
        batch=lambda *x, **params: _batch(gathered_dot_p.bind, _gathered_dot, *x, **params),
    ),
    lowering=Lowering(shared=False),
)
scattered_dot_p = define_primitive(
    "hopper_scattered_dot",
    _scattered_dot,
    rules=Rules(
        jvp=_scattered_dot_jvp,
        transpose=_scattered_dot_transpose,
        batch=lambda *x, **params: _batch(scattered_dot_p.bind, _scattered_dot, *x, **params),
    ),
    lowering=Lowering(shared=False),
)
scattered_dot_tangent_p = define_primitive(
    "hopper_scattered_dot_tangent",
    _scattered_dot_tangent,
    rules=Rules(
        jvp="reference",
        transpose=_scattered_dot_tangent_transpose,
        batch=partial(_batch, None, _scattered_dot_tangent),
    ),
    lowering=Lowering(shared=False),
)
