"""A pipeline in one program: a scan over layers as stages that work at the same time.

The layers are cut into stages, the batch into micro-batches. In every tick each stage runs its
layers on the micro-batch that it holds and hands the result to the next one: stage s works on
micro-batch t - s in tick t, so there are micro + stages - 1 ticks. The stage is a dim of all that a
tick touches; where a mesh axis cuts it, a device holds its stages' layers only, and `shift` sends
to the neighbour. JAX differentiates the loop of ticks (Huang et al. 2019, "GPipe").

All is ordinary dims and one shift, so that the planner lays it out, and prices ticks, idle stages
(they work on what is thrown away) and transfers, as it does all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.changes import Ring
from jaxscaler.rewrite.chunk import check_parts, interleave, join
from jaxscaler.rewrite.factor import SUM, Flat, Placing, Regrain, place_scan, refuse
from jaxscaler.rewrite.part import Share, run_flat

_shift = _compat.new_shift_primitive()


def shift(x: jax.Array) -> jax.Array:
    """Row i of [stages, ...] is what row i - 1 was; row 0 what the last one was."""
    return _shift.bind(x, dim=0, by=1)


class Line(NamedTuple):
    """A scan as a pipeline: which dims of its operands carry the batch (`size` of them)."""

    size: int
    placing: Placing
    flat: Flat
    cuts: dict


def line_of(eqn: Any, change: Ring, other: Any = None) -> Line:
    """How the batch goes through the scan `eqn`, of body `other` if given.

    Raises RewriteError, naming the operation in the way, if layers can not run on micro-batches
    apart, or where stages or micro-batches do not divide.
    """
    if eqn.primitive.name != "scan":
        raise RewriteError(f"{change}: equation {change.scan} is a {eqn.primitive.name}, no scan")
    consts, carry, length = _compat.scan_sizes(eqn)
    if eqn.params["reverse"]:
        raise refuse(eqn, "it runs from the last layer to the first")
    if change.stages < 2 or length % change.stages:
        raise RewriteError(f"{change}: {length} layers do not divide into {change.stages} stages")
    position, dim = change.seed
    if not 0 <= position < carry:
        raise RewriteError(f"{change}: the scan at equation {change.scan} has {carry} carries")
    shape = eqn.invars[consts + position].aval.shape
    if not 0 <= dim < len(shape):
        raise RewriteError(f"{change}: a carry of shape {shape} has no dim {dim}")
    if other is not None:
        eqn = eqn.replace(params=_compat.with_subjaxprs(eqn, [other]))
    size = shape[dim]
    while True:
        try:
            placing, flat, cuts = place_scan(eqn, {(0, consts + position): dim}, size)
            break
        except Regrain as smaller:
            size = smaller.size
    check_parts(size, change.micro, change.lanes, str(change))
    if SUM in placing.ins or SUM in placing.outs:
        raise refuse(eqn, "a carry of it adds up over the batch")
    if any(d is not None for d in placing.ins[consts + carry :]):
        raise refuse(eqn, "a layer reads a part of the batch of its own")
    if len(eqn.outvars) > carry:
        raise refuse(eqn, "it stacks a result of every layer")
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars):
        raise refuse(eqn, "it carries what is no number, such as a random key")
    return Line(size, placing, flat, cuts)


def rings(loss: int, jaxpr: Any, stages: int, micro: int) -> tuple[list[Ring], list[str]]:
    """The scans of a loss (its forward jaxpr) that can be such a pipeline, and why others can not.

    Of each the first dim, outermost first, of a carry that its layers can be run along in parts.
    """
    found, refused = [], []
    for i, eqn in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
        if eqn.primitive.name != "scan":
            continue
        consts, carry, _ = _compat.scan_sizes(eqn)
        shapes = [v.aval.shape for v in eqn.invars[consts : consts + carry]]
        seeds = sorted(((n, d) for n, shape in enumerate(shapes) for d in range(len(shape))),
                       key=lambda seed: seed[::-1])  # fmt: skip
        why = [f"scan {i} carries nothing that has a batch"]
        for seed in seeds:
            try:
                line_of(eqn, change := Ring(loss, i, stages, micro, seed))
            except RewriteError as error:
                why.append(str(error))
            else:
                found.append(change)
                break
        else:
            refused.append(why[1 if seeds else 0])
    return found, refused


def ring(eqn: Any, change: Ring, other: Any = None) -> Callable[..., list]:
    """The function of the scan `eqn` as a pipeline; the same arguments, results and numbers.

    `other`: another body (closed jaxpr, same types) of its layers. Raises RewriteError as
    `line_of`.
    """
    line = line_of(eqn, change, other)
    consts, carry, length = _compat.scan_sizes(eqn)
    stages, micro, lanes = change.stages, change.micro, change.lanes
    ticks = micro + stages - 1
    rows = (stages, lanes) if lanes > 1 else (stages,)
    dims = line.placing.ins
    # what goes from stage to stage: the carries, and constants that carry the batch
    moving = [*range(consts, consts + carry), *(n for n in range(consts) if dims[n] is not None)]
    fixed = [n for n in range(consts) if dims[n] is None]

    def entering(x: Any, dim: int | None) -> Any:
        """[ticks, stages, (lanes,) ...]: what enters in each tick, the same for every stage.

        After the last micro-batch it comes again, for stages that would else work on zeros.
        """
        x = _in_parts(x, dim, line.size, micro, lanes)
        again = jnp.broadcast_to(jax.lax.stop_gradient(x[-1:]), (stages - 1, *x.shape[1:]))
        x = jnp.concatenate([x, again])
        return jnp.broadcast_to(x[:, None], (ticks, stages, *x.shape[1:]))

    def one(moved: list, held: list, sliced: list, index: Any) -> list:
        """A layer on a part of the batch."""
        args: list = [None] * len(dims)
        for n, x in zip((*moving, *fixed), (*moved, *held)):
            args[n] = x
        args[consts + carry :] = sliced
        share = Share(line.size, index)
        return [*run_flat(line.flat, args, line.cuts, share)[:carry], *moved[carry:]]

    def run(*args: Any) -> list:
        args = tuple(
            jnp.asarray(x, v.aval.dtype) if _compat.is_literal(v) else x
            for x, v in zip(args, eqn.invars)
        )
        held, axes = _per_row([args[n] for n in fixed], rows, 0)
        layers = [_by_stage(x, stages) for x in args[consts + carry :]]
        layers, layer_axes = _per_row(layers, rows, 2)
        everywhere = one
        for level in reversed(range(len(rows))):
            everywhere = jax.vmap(everywhere, (0, axes[level], layer_axes[level], 0))

        def stage(state: list, held: list, layers: list, index: Any) -> list:
            def layer(state: list, sliced: list) -> tuple[list, None]:
                return everywhere(state, held, sliced, index), None

            with _compat.where_it_stands(eqn):  # or its recomputation would not be known as such
                return jax.lax.scan(layer, state, layers, length=length // stages)[0]

        if change.again:
            stage = jax.checkpoint(stage, prevent_cse=False)

        def tick(state: list, at: tuple) -> tuple[list, list]:
            coming, t = at
            state = [_first(new, shift(x)) for new, x in zip(coming, state)]
            state = stage(state, held, layers, _elements(line.size, micro, rows, t))
            return state, state[:carry]

        coming = [entering(args[n], dims[n]) for n in moving]
        begin = [jax.lax.stop_gradient(x[0]) for x in coming]
        _, made = jax.lax.scan(tick, begin, (coming, jnp.arange(ticks)))
        return [
            _joined(_last(x[stages - 1 :]), dim, line.size, lanes)
            for x, dim in zip(made, line.placing.outs)
        ]

    def where_it_stands(*args: Any) -> list:
        with _compat.where_it_stands(eqn):
            return run(*args)

    return where_it_stands


def _in_parts(x: Any, dim: int | None, size: int, micro: int, lanes: int) -> Any:
    """[micro, (lanes,) ...]: a carry in micro-batches, or the same for all of them."""
    if dim is not None:
        return interleave(x, dim, size, micro, lanes)
    return jnp.broadcast_to(x, (micro, *((lanes,) if lanes > 1 else ()), *x.shape))


def _joined(x: Any, dim: int | None, size: int, lanes: int) -> Any:
    """The inverse of `_in_parts`."""
    if dim is not None:
        return join(x, dim, size, lanes)
    return x[-1, 0] if lanes > 1 else x[-1]


def _by_stage(x: Any, stages: int) -> Any:
    """[layers, ...] -> [layers of a stage, stages, ...]; what cuts the layers cuts the stages."""
    return x.reshape(stages, x.shape[0] // stages, *x.shape[1:]).swapaxes(0, 1)


def _per_row(arrays: Sequence, rows: tuple[int, ...], at: int) -> tuple[list, list[list]]:
    """Copies of floats for each stage and lane, so that their gradients add up in no loop.

    (the arrays; per level of `rows` which of their dims `vmap` maps). They are constants if `at`
    is 0, else stacked layers [layers of a stage, stages, ...].
    """
    out: list = []
    axes: list[list] = [[] for _ in rows]
    for x in arrays:
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        missing = rows[1:] if at else rows
        if is_float and missing:
            head, rest = x.shape[:at], x.shape[at:]
            x = x.reshape(*head, *(1,) * len(missing), *rest)
            x = jnp.broadcast_to(x, (*head, *missing, *rest))
        for level, axis in enumerate(axes):
            mapped = is_float or (at and level == 0)
            axis.append(0 if mapped else None)
        out.append(x)
    return out, axes


def _elements(size: int, micro: int, rows: tuple[int, ...], t: Any) -> Any:
    """[stages, (lanes,) of a part]: which elements of the batch each stage works on in tick t."""
    stages, lanes = rows[0], rows[1] if len(rows) > 1 else 1
    part = jnp.clip(t - jnp.arange(stages), 0, micro - 1)
    local = size // (micro * lanes)
    index = jnp.arange(lanes * local).reshape(lanes, local) * micro + part[:, None, None]
    return index if lanes > 1 else index[:, 0]


def _row(x: Any) -> Any:
    """[stages, 1, ...]: the number of each stage, beside the dims of `x`."""
    return jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], *(1,) * (x.ndim - 1)), 0)


def _first(new: Any, others: Any) -> Any:
    """The first stage takes what is new."""
    return jnp.where(_row(others) == 0, new, others)


def _last(x: Any) -> Any:
    """[micro, stages, ...] -> [micro, ...]: what the last stage made.

    As a sum, which a cut dim has the collective for.
    """
    stages = x.shape[1]
    own = _row(x.swapaxes(0, 1)).swapaxes(0, 1) == stages - 1
    if x.dtype == jnp.bool_:
        return jnp.any(own & x, axis=1)
    return jax.lax.reduce_sum(jnp.where(own, x, jnp.zeros((), x.dtype)), (1,))
