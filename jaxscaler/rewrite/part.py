"""An equation on a part of its factor: the same primitive, parameters of the part's shapes.

Parts are interleaved: element i of part c is element i * parts + c of the factor, so that a factor
that a mesh axis cuts into blocks stays where it is. `Share` says which part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxscaler import _compat
from jaxscaler.rewrite.factor import (
    SUM,
    Flat,
    Placing,
    flatten,
    place_call,
    place_scan,
    placing_of,
    refuse,
    spread,
)


class Share(NamedTuple):
    """One part of a factor of `size`: its elements are at `index` [size / number of parts]."""

    size: int
    index: Any

    @property
    def over(self) -> int:
        """The number of parts."""
        return self.size // self.index.shape[0]

    def shape(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """The shape of a part of a value that is cut along `dim`."""
        return tuple(n // self.over if d == dim else n for d, n in enumerate(shape))


def on_part(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    """Results of `eqn` on a part, cut as `placing` says; `args` are parts, or whole where it says.

    Raises RewriteError if the primitive does not work on the part's shapes.
    """
    if share.over == 1 or all(d is None for d in (*placing.ins, *placing.outs)):
        return _compat.bind_where_it_stands(eqn, args)
    run = _RUNS.get(eqn.primitive.name, _leaf)
    made = run(eqn, args, placing, share)
    for var, dim, value in zip(eqn.outvars, placing.outs, made):
        expected = share.shape(var.aval.shape, dim)
        if jnp.shape(value) != expected:
            raise refuse(eqn, f"a part of it has shape {jnp.shape(value)} in place of {expected}")
    return made


def run_flat(flat: Flat, args: Sequence, cuts: Mapping[Any, int], share: Share) -> list:
    """Results of a body on a part; `cuts`: what `spread` found."""
    env = {**dict(zip(flat.invars, args, strict=True)), **flat.consts}

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for eqn in flat.eqns:
        made = on_part(eqn, [read(v) for v in eqn.invars], placing_of(eqn, cuts), share)
        env.update(zip(eqn.outvars, made))
    return [read(v) for v in flat.outvars]


# --- single equations -----------------------------------------------------------------------------


def _leaf(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    change = _PARAMS.get(eqn.primitive.name)
    params = dict(eqn.params) if change is None else change(eqn, placing, share)
    try:
        return _compat.bind_where_it_stands(eqn.replace(params=params), args)
    except (TypeError, ValueError) as error:  # what a primitive says of shapes that do not fit
        raise refuse(eqn, f"it does not work on a part of its operands: {error}") from error


def _result_shape(eqn: Any, placing: Placing, share: Share) -> tuple[int, ...]:
    return share.shape(eqn.outvars[0].aval.shape, placing.outs[0])


def _new_shape(name: str) -> Callable[..., dict]:
    def change(eqn: Any, placing: Placing, share: Share) -> dict:
        return {**eqn.params, name: _result_shape(eqn, placing, share)}

    return change


def _limits(eqn: Any, placing: Placing, share: Share) -> dict:
    limits = share.shape(eqn.params["limit_indices"], placing.ins[0])
    return {**eqn.params, "limit_indices": limits}


def _window(eqn: Any, placing: Placing, share: Share) -> dict:
    """The slice that a lookup takes: all of a dim that is cut, or one element of a batch dim."""
    sizes, dim = eqn.params["slice_sizes"], placing.ins[0]
    if dim is not None and sizes[dim] != 1:
        sizes = share.shape(sizes, dim)
    return {**eqn.params, "slice_sizes": sizes}


_PARAMS: dict[str, Callable[..., dict]] = {
    "broadcast_in_dim": _new_shape("shape"),
    "reshape": _new_shape("new_sizes"),
    "empty2": _new_shape("shape"),
    "slice": _limits,
    "dynamic_slice": _window,
    "gather": _window,
}


def _iota(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    shape, dim = _result_shape(eqn, placing, share), placing.outs[0]
    dtype = eqn.params["dtype"]
    if dim is None or eqn.params["dimension"] != dim:
        return [jax.lax.broadcasted_iota(dtype, shape, eqn.params["dimension"])]
    behind = eqn.outvars[0].aval.shape[dim] // share.size  # elements of the dim per one of factor
    index = share.index[:, None] * behind + jnp.arange(behind)
    return [jax.lax.broadcast_in_dim(index.reshape(-1).astype(dtype), shape, (dim,))]


# --- bodies ---------------------------------------------------------------------------------------


def _jit(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    _, flat, cuts = place_call(eqn, _known(placing), share.size)
    return run_flat(flat, args, cuts, share)


def _remat(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    _, flat, cuts = place_call(eqn, _known(placing), share.size)

    def body(*args: Any) -> list:
        return run_flat(flat, args, cuts, share)

    kept = {k: eqn.params[k] for k in ("policy", "prevent_cse")}
    return jax.checkpoint(body, **kept)(*args)


def _scan(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    _, flat, cuts = place_scan(eqn, _known(placing), share.size)
    consts, carry, length = _compat.scan_sizes(eqn)

    def body(carried: list, sliced: list) -> tuple[list, list]:
        made = run_flat(flat, [*args[:consts], *carried, *sliced], cuts, share)
        return made[:carry], made[carry:]

    init, stacked = list(args[consts : consts + carry]), list(args[consts + carry :])
    how = {k: eqn.params[k] for k in ("reverse", "unroll")}
    last, made = jax.lax.scan(body, init, stacked, length=length, **how)
    return [*last, *made]


def _custom_jvp(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    """The function with its own derivative rule, both on the part."""
    _, flat, cuts = place_call(eqn, _known(placing), share.size)

    @jax.custom_jvp
    def call(*args: Any) -> list:
        return run_flat(flat, args, cuts, share)

    def rule(primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        zeros = tuple(isinstance(t, SymbolicZero) for t in tangents)
        jaxpr, out_zeros = _compat.custom_jvp_rule(eqn, zeros)
        below = flatten(jaxpr)
        ins = (*placing.ins, *(d for d, zero in zip(placing.ins, zeros) if not zero))
        known = {v: d for v, d in zip(below.invars, ins) if d is not None}
        moved = (t for t, zero in zip(tangents, zeros) if not zero)
        made = run_flat(below, [*primals, *moved], spread(below, known, share.size, eqn), share)
        values, rest = made[: len(out_zeros)], iter(made[len(out_zeros) :])
        return values, [jnp.zeros_like(v) if zero else next(rest)
                        for v, zero in zip(values, out_zeros)]  # fmt: skip

    call.defjvp(rule, symbolic_zeros=True)
    return call(*args)


def _custom_vjp(eqn: Any, args: Sequence, placing: Placing, share: Share) -> list:
    """The function with its own pull-back, both on the part."""
    _, flat, cuts = place_call(eqn, _known(placing), share.size)
    forward, backward, results = _compat.custom_vjp_rule(eqn)
    ahead, back = flatten(forward), flatten(backward)
    known = {v: d for v, d in zip(ahead.invars, placing.ins) if d is not None}
    ahead_cuts = spread(ahead, known, share.size, eqn)
    kept = [None if _compat.is_literal(v) else ahead_cuts.get(v) for v in ahead.outvars[results:]]
    # the cotangent of a part of a sum is that of the sum
    moved = [d for d, v in zip(placing.outs, eqn.outvars) if _compat.is_float(v.aval)]
    known = {v: d for v, d in zip(back.invars, (*kept, *moved)) if d not in (None, SUM)}
    back_cuts = spread(back, known, share.size, eqn)

    @jax.custom_vjp
    def call(*args: Any) -> list:
        return run_flat(flat, args, cuts, share)

    def run_forward(*args: Any) -> tuple[list, list]:
        with _compat.where_it_stands(eqn):
            made = run_flat(ahead, args, ahead_cuts, share)
        return made[:results], made[results:]

    def run_backward(kept: list, cts: list) -> tuple:
        cts = [ct for ct, v in zip(cts, eqn.outvars) if _compat.is_float(v.aval)]
        with _compat.where_it_stands(eqn):
            made = iter(run_flat(back, [*kept, *cts], back_cuts, share))
        return tuple(next(made) if _compat.is_float(v.aval) else None for v in eqn.invars)

    call.defvjp(run_forward, run_backward)
    return call(*args)


def _known(placing: Placing) -> dict:
    return {
        (side, n): d
        for side, dims in enumerate((placing.ins, placing.outs))
        for n, d in enumerate(dims)
        if d is not None
    }


_RUNS: dict[str, Callable[..., list]] = {
    "iota": _iota,
    "scan": _scan,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    **dict.fromkeys(_compat.REMAT, _remat),
    **dict.fromkeys(_compat.INLINED_CALLS, _jit),
}
