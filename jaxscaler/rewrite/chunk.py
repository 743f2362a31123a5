"""Co-sharding: a segment of the forward pass as a loop over parts of one factor, on one device.

Each part is made again in the backward pass, so that what lies between a segment's ends is in
memory for one part at a time. Weights are closed over (their gradients add up in the loop of the
backward pass); sums over the factor are carried, in f32 at least, and finished after the loop.
Chunked cross entropy, attention by chunks of queries, and an MLP by tokens or by its hidden dim are
loops of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.changes import CoShard
from jaxscaler.rewrite.divide import Division, divide, whole_or
from jaxscaler.rewrite.part import Share, on_part


def factors_of(closed: Any, change: CoShard) -> Division:
    """How the segment `closed` is divided by the factor at the change's seed.

    Raises RewriteError, naming the operation that stands in the way and why.
    """
    jaxpr, _ = _compat.open_jaxpr(closed)
    first, operand, dim = change.seed
    first -= change.segment.first
    if not 0 <= first < len(jaxpr.eqns) or not 0 <= operand < len(jaxpr.eqns[first].invars):
        raise RewriteError(f"{change}: there is no such operand in the segment")
    shape = getattr(jaxpr.eqns[first].invars[operand].aval, "shape", ())
    if not 0 <= dim < len(shape):
        raise RewriteError(f"{change}: an operand of shape {shape} has no dim {dim}")
    found = divide(jaxpr.eqns, jaxpr.outvars, [(first, operand, dim)], shape[dim])
    check_parts(found.size, change.parts, change.lanes, str(change))
    return found


def check_parts(size: int, parts: int, lanes: int, what: str) -> None:
    """Raise RewriteError unless a factor of `size` divides into parts and lanes."""
    if parts < 1 or lanes < 1 or size % (parts * lanes):
        raise RewriteError(
            f"{what}: a factor of {size} does not divide into {parts} parts in {lanes} lanes"
        )


def chunked(closed: Any, change: CoShard) -> Callable[..., list]:
    """The function of a segment as a loop over `change.parts` parts; the same arguments, results.

    With `lanes` the parts are cut once more, into that many lanes side by side, each with partial
    sums (and gradients of weights) of its own, added after the loop: a factor that a mesh axis cuts
    into as many is then reduced once, not once a part. Raises RewriteError as `factors_of`.
    """
    division = factors_of(closed, change)
    jaxpr, consts = _compat.open_jaxpr(closed)

    def run(*args: Any) -> list:
        env = Env(jaxpr, consts, args)
        env.run(division.before)
        loop(env, division, change.parts, change.lanes)
        env.run(division.after)
        return env.results()

    return run


class Env:
    """Values of the variables of a jaxpr while it is evaluated."""

    def __init__(self, jaxpr: Any, consts: Sequence, args: Sequence):
        self.jaxpr = jaxpr
        self.values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(self, atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else self.values[atom]

    def run(self, equations: Sequence[int]) -> None:
        """Evaluate these equations, whole."""
        for i in equations:
            eqn = self.jaxpr.eqns[i]
            made = _compat.bind_where_it_stands(eqn, [self.read(v) for v in eqn.invars])
            self.values.update(zip(eqn.outvars, made, strict=True))

    def results(self) -> list:
        return [self.read(v) for v in self.jaxpr.outvars]


def loop(env: Env, division: Division, parts: int, lanes: int) -> None:
    """Run a division's loop on the values in `env`, and add to them what it makes."""
    plain = {v: env.values[v] for v in whole_values(env, division)}
    per_lane = [v for v, x in plain.items() if lanes > 1 and jnp.issubdtype(x.dtype, jnp.inexact)]
    wide = [jnp.broadcast_to(plain[v], (lanes, *v.aval.shape)) for v in per_lane]
    sliced = slices(env, division, parts, lanes)

    def one(wide: list, sliced: list, lane: Any, part: Any) -> tuple[list, list, list]:
        share = share_of(division.size, parts, lanes, lane, part)
        whole = plain | dict(zip(per_lane, wide))
        return run_part(env.jaxpr, division, whole, sliced, share)

    def all_lanes(wide: list, sliced: list, part: Any) -> tuple[list, list, list]:
        if lanes == 1:
            return one(wide, sliced, 0, part)
        return jax.vmap(one, in_axes=(0, 0, 0, None))(wide, sliced, jnp.arange(lanes), part)

    again = jax.checkpoint(all_lanes, prevent_cse=False)

    def body(sums: list, at: tuple) -> tuple[list, tuple]:
        added, stacked, same = again(wide, *at)
        return [total + x.astype(total.dtype) for total, x in zip(sums, added)], (stacked, same)

    extra = (lanes,) if lanes > 1 else ()
    zeros = [jnp.zeros((*extra, *v.aval.shape), wider(v.aval.dtype)) for v in division.sums]
    sums, (stacked, same) = jax.lax.scan(body, zeros, (sliced, jnp.arange(parts)))
    finish(env, division, sums, stacked, same, lanes)


def whole_values(env: Env, division: Division) -> list:
    """The variables that a division's loop reads whole and does not make."""
    reads = (
        (var, dim)
        for i, placing in division.loop.items()
        for var, dim in zip(env.jaxpr.eqns[i].invars, placing.ins)
        if not _compat.is_literal(var)
    )
    return list(dict.fromkeys(v for v, dim in reads if whole_or(dim) is None and v in env.values))


def slices(env: Env, division: Division, parts: int, lanes: int) -> list:
    """What the loop reads in parts: [parts, (lanes,) ...]."""
    return [
        interleave(env.values[var], dim, division.size, parts, lanes)
        for var, dim in division.slices
    ]


def share_of(size: int, parts: int, lanes: int, lane: Any, part: Any) -> Share:
    """The part `part` of lane `lane`."""
    local = size // (parts * lanes)
    return Share(size, (lane * local + jnp.arange(local)) * parts + part)


def run_part(
    jaxpr: Any, division: Division, whole: Mapping[Any, Any], sliced: Sequence, share: Share
) -> tuple[list, list, list]:
    """A division's sums, stacked values and equal ones, of one part."""
    cut = dict(zip(division.slices, sliced, strict=True))
    made: dict = {}

    def read(atom: Any, dim: int | None) -> Any:
        if _compat.is_literal(atom):
            return atom.val
        dim = whole_or(dim)
        if (atom, dim) in made:
            return made[atom, dim]
        return whole[atom] if dim is None else cut[atom, dim]

    for i, placing in division.loop.items():
        eqn = jaxpr.eqns[i]
        args = [read(v, d) for v, d in zip(eqn.invars, placing.ins)]
        results = on_part(eqn, args, placing, share)
        made.update(zip(zip(eqn.outvars, map(whole_or, placing.outs)), results))
    return (
        [made[v, None] for v in division.sums],
        [made[v, d] for v, d in division.stacked.items()],
        [made[v, None] for v in division.same],
    )


def finish(env: Env, division: Division, sums: list, stacked: list, same: list, lanes: int) -> None:
    """Put what a loop made into `env`: sums over lanes, stacked parts joined."""
    for var, total in zip(division.sums, sums):
        total = total.astype(var.aval.dtype)
        env.values[var] = jax.lax.reduce_sum(total, (0,)) if lanes > 1 else total
    for (var, dim), value in zip(division.stacked.items(), stacked):
        env.values[var] = join(value, dim, division.size, lanes)
    for var, value in zip(division.same, same):
        env.values[var] = value[0, 0] if lanes > 1 else value[0]


def wider(dtype: Any) -> Any:
    """The dtype in which partial sums add up: f32 for narrower floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return dtype


def interleave(x: Any, dim: int, size: int, parts: int, lanes: int) -> Any:
    """[..., factor of size x rest, ...] -> [parts, (lanes,) ..., part of the factor x rest, ...].

    The part index is the minor one, so that what a mesh axis cuts into blocks stays where it is.
    """
    before, rest, after = x.shape[:dim], x.shape[dim] // size, x.shape[dim + 1 :]
    local = size // (parts * lanes)
    x = x.reshape(*before, lanes, local, parts, rest, *after)
    x = jnp.moveaxis(x, (dim + 2, dim), (0, 1))  # [parts, lanes, ..., local, rest, ...]
    extra = (lanes,) if lanes > 1 else ()
    return x.reshape(parts, *extra, *before, local * rest, *after)


def join(x: Any, dim: int, size: int, lanes: int) -> Any:
    """The inverse of `interleave`."""
    parts, shape = x.shape[0], x.shape[2 if lanes > 1 else 1 :]
    before, after, local = shape[:dim], shape[dim + 1 :], size // (parts * lanes)
    rest = shape[dim] // local
    x = x.reshape(parts, lanes, *before, local, rest, *after)
    x = jnp.moveaxis(x, (0, 1), (dim + 2, dim))
    return x.reshape(*before, size * rest, *after)
