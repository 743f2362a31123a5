"""Gradient accumulation: a loss and its gradients as sums over parts of the batch.

Legal where the loss is affine in sums over the batch: the gradient by each sum is then known before
the loop, so that forward and backward pass of a part run one after the other and nothing is made
twice. What depends on the batch alone may be made of the whole batch first (the normaliser of a
masked mean). All else is refused with the operation that couples the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.graph import kinds
from jaxscaler.rewrite.changes import Accumulate
from jaxscaler.rewrite.chunk import (
    Env,
    check_parts,
    finish,
    loop,
    run_part,
    share_of,
    slices,
    whole_values,
    wider,
)
from jaxscaler.rewrite.divide import Division, divide
from jaxscaler.rewrite.factor import Placing, refuse


def batch_division(closed: Any, batch: Mapping[int, int]) -> Division:
    """How a loss is divided by the batch. `batch`: argument (constants first) -> its batch dim.

    The first result of `closed` is the loss. Raises RewriteError, naming the operation, where a
    part of the batch needs another one, or the loss is not affine in what the parts add up to.
    """
    jaxpr, _ = _compat.open_jaxpr(closed)
    arguments = (*jaxpr.constvars, *jaxpr.invars)
    dims = {arguments[position]: dim for position, dim in batch.items()}
    sizes = {var.aval.shape[dim] for var, dim in dims.items()}
    if len(sizes) != 1:
        raise RewriteError(f"batch arguments have {sorted(sizes)} samples: they must agree")
    if sizes == {1}:
        raise RewriteError("a batch of one sample has no parts")
    held = {v for v in arguments if v not in dims and _is_float(v.aval)}  # may be differentiated
    free = set()  # equations that depend on the batch, on keys and integers alone
    for i, eqn in enumerate(jaxpr.eqns):
        if held.isdisjoint(v for v in eqn.invars if not _compat.is_literal(v)):
            free.add(i)
        else:
            held.update(eqn.outvars)
    seeds = [
        (i, n, dims[v])
        for i, eqn in enumerate(jaxpr.eqns)
        for n, v in enumerate(eqn.invars)
        if not _compat.is_literal(v) and v in dims
    ]
    division = divide(jaxpr.eqns, jaxpr.outvars, seeds, sizes.pop(), free)
    _check_affine(jaxpr, division)
    return division


def accumulate(closed: Any, change: Accumulate) -> Callable[..., list]:
    """The function of a whole loss, which adds up its gradients over parts when differentiated.

    `change.batch` counts constants before arguments. Gradients add up in f32 at least, and are
    reduced over lanes once. Results beside the loss have no gradient. Raises RewriteError as
    `batch_division`.
    """
    jaxpr, consts = _compat.open_jaxpr(closed)
    jaxpr = _open_consts(jaxpr)
    if change.parts == change.lanes == 1:
        division = _undivided(jaxpr, dict(change.batch))
    else:
        division = batch_division(closed, dict(change.batch))
    check_parts(division.size, change.parts, change.lanes, str(change))

    @jax.custom_vjp
    def loss(*args: Any) -> list:
        env = Env(jaxpr, (), args)
        env.run(division.before)
        loop(env, division, change.parts, change.lanes)
        env.run(division.after)
        return env.results()

    def forward(*given: Any) -> tuple[list, list]:
        moved = [i for i, x in enumerate(given) if x.perturbed and _is_float(jnp.asarray(x.value))]
        if wrong := sorted({i for i, _ in change.batch}.intersection(moved)):
            raise RewriteError(f"{change}: the loss is differentiated by its batch {wrong}")
        args = [x.value for x in given]
        results, grads = _run(jaxpr, division, args, moved, change)
        kept = dict(zip(moved, grads))
        return results, [kept.get(i) for i in range(len(given))]

    def backward(grads: list, given: list) -> tuple:
        value, *rest = given
        if any(not isinstance(ct, SymbolicZero) and _is_float(ct) for ct in rest):
            raise RewriteError(f"{change}: another result than the loss is differentiated")
        if isinstance(value, SymbolicZero):
            return tuple(g if g is None else jnp.zeros_like(g) for g in grads)
        return tuple(g if g is None else (g * value).astype(g.dtype) for g in grads)

    loss.defvjp(forward, backward, symbolic_zeros=True)
    return lambda *args: loss(*consts, *args)


def _undivided(jaxpr: Any, batch: Mapping[int, int]) -> Division:
    """All of a loss in the only part, whatever couples its samples."""
    dims = {jaxpr.invars[position]: dim for position, dim in batch.items()}
    loop = {
        i: Placing(
            tuple(None if _compat.is_literal(v) else dims.get(v) for v in eqn.invars),
            (None,) * len(eqn.outvars),
        )
        for i, eqn in enumerate(jaxpr.eqns)
    }
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    results = (v for v in jaxpr.outvars if not _compat.is_literal(v) and v in made)
    loss, *others = dict.fromkeys(results)
    ((size, *_), *_) = ([v.aval.shape[d]] for v, d in dims.items())
    return Division(size, (), loop, (), tuple(dims.items()), {}, (loss,), tuple(others))


def _open_consts(jaxpr: Any) -> Any:
    """Constants as the first arguments."""
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return _compat.closed_over_nothing(jaxpr, invars, jaxpr.eqns, jaxpr.outvars).jaxpr


def _run(
    jaxpr: Any, division: Division, args: Sequence, moved: Sequence[int], change: Accumulate
) -> tuple[list, list]:
    """(results, gradients of the first by the arguments `moved`)."""
    parts, lanes, eqns = change.parts, change.lanes, jaxpr.eqns
    of_after = {v for i in division.after for v in eqns[i].outvars}
    of_loop = {*division.sums, *division.stacked, *division.same}
    late = [v for i in division.after for v in eqns[i].invars if not _compat.is_literal(v)]
    # made before the loop, read after it
    names = [v for v in dict.fromkeys(late) if v not in of_after and v not in of_loop]
    known: list = []

    def before(weights: list) -> tuple[tuple, list]:
        filled = list(args)
        for i, x in zip(moved, weights):
            filled[i] = x
        env = Env(jaxpr, (), filled)
        env.run(division.before)
        whole = [env.values[v] for v in whole_values(env, division)]
        found = (whole, slices(env, division, parts, lanes), [env.values[v] for v in names])
        known[:] = env.values
        return found, list(env.values.values())

    (whole, sliced, rest), back_before, values = _pull(before, [args[i] for i in moved])
    env = Env(jaxpr, (), args)
    env.values.update(zip(known, values))
    read_whole = whole_values(env, division)

    def after(sums: list, rest: list) -> Any:
        inner = Env(jaxpr, (), args)
        inner.values |= env.values | dict(zip(names, rest)) | dict(zip(division.sums, sums))
        inner.run(division.after)
        return inner.read(jaxpr.outvars[0])

    zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in division.sums]
    one = jnp.ones((), jaxpr.outvars[0].aval.dtype)
    (by_sum,) = jax.vjp(lambda sums: after(sums, rest), zeros)[1](one)

    def part_of_lane(sliced: list, lane: Any, part: Any) -> tuple:
        share = share_of(division.size, parts, lanes, lane, part)

        def run(whole: list, sliced: list) -> tuple:
            sums, *other = run_part(jaxpr, division, dict(zip(read_whole, whole)), sliced, share)
            return sums, other

        sums, back, other = _pull(run, whole, sliced)
        return (sums, *back(by_sum)), other

    def of_part(sliced: list, part: Any) -> tuple:
        if lanes == 1:
            return part_of_lane(sliced, 0, part)
        return jax.vmap(part_of_lane, in_axes=(0, 0, None))(sliced, jnp.arange(lanes), part)

    def body(totals: tuple, at: tuple) -> tuple[tuple, tuple]:
        (sums, by_whole, by_sliced), other = of_part(*at)
        added = jax.tree.map(lambda t, x: t + x.astype(t.dtype), totals, (sums, by_whole))
        return added, (by_sliced, other)

    extra = (lanes,) if lanes > 1 else ()

    def empty(x: Any) -> Any:
        return jnp.zeros((*extra, *x.shape), wider(x.dtype)) if x is not None else None

    totals = (list(map(empty, zeros)), [empty(x) if _is_float(x) else None for x in whole])
    totals, (by_sliced, (stacked, same)) = jax.lax.scan(body, totals, (sliced, jnp.arange(parts)))
    finish(env, division, totals[0], stacked, same, lanes)
    by_whole = [
        t if t is None else _over_lanes(t.astype(x.dtype), lanes) for t, x in zip(totals[1], whole)
    ]
    sums = [env.values[v] for v in division.sums]
    (by_rest,) = jax.vjp(lambda rest: after(sums, rest), rest)[1](one)
    env.run(division.after)
    (grads,) = back_before((by_whole, by_sliced, by_rest))
    return env.results(), grads


def _over_lanes(x: Any, lanes: int) -> Any:
    return jax.lax.reduce_sum(x, (0,)) if lanes > 1 else x


# --- the loss must be affine ----------------------------------------------------------------------

# Affine in all operands together, or in one where the others are constants.
_JOINT = kinds.names("add sub stack select_n") | kinds.LINEAR
_ONE_OF = {"mul": None, "div": 0, "dot_general": None}  # None: any one operand; else which


def _check_affine(jaxpr: Any, division: Division) -> None:
    loss = jaxpr.outvars[0]
    if loss not in division.sums and not any(loss in jaxpr.eqns[i].outvars for i in division.after):
        raise RewriteError("the loss does not depend on the batch")
    needed, eqns = {loss}, []
    for i in reversed(division.after):
        if needed.intersection(jaxpr.eqns[i].outvars):
            eqns.append(jaxpr.eqns[i])
            needed.update(v for v in jaxpr.eqns[i].invars if not _compat.is_literal(v))
    if wrong := [v for v in division.same if v in needed]:
        raise RewriteError(f"the loss reads {wrong[0].aval} of a loop as it is: not supported")
    varying = {v for v in division.sums if _is_float(v.aval)}
    for eqn in reversed(eqns):
        spots = [n for n, v in enumerate(eqn.invars) if not _compat.is_literal(v) and v in varying]
        if not spots:
            continue
        if not _affine(eqn, spots):
            raise refuse(eqn, "the loss is not affine in what the parts of the batch add up to")
        varying.update(eqn.outvars)


def _affine(eqn: Any, spots: Sequence[int]) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type":
        return _is_float(eqn.outvars[0].aval)
    if name == "select_n":
        return 0 not in spots
    if name in _JOINT:
        return True
    return name in _ONE_OF and len(spots) == 1 and _ONE_OF[name] in (None, spots[0])


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _pull(function: Callable, *args: Any) -> tuple[Any, Callable, Any]:
    """(results, pull-back, what else) of a function that returns (results, what else).

    Only floats are differentiated; the pull-back takes and gives None for the others' cotangents.
    """
    leaves, tree = jax.tree.flatten(args)
    floats = [i for i, x in enumerate(leaves) if _is_float(x)]
    kept: list = []

    def run(moving: list) -> tuple[list, tuple]:
        filled = list(leaves)
        for i, x in zip(floats, moving):
            filled[i] = x
        made, other = function(*jax.tree.unflatten(tree, filled))
        results, made_tree = jax.tree.flatten(made)
        kept[:] = [made_tree]
        return [x for x in results if _is_float(x)], (results, other)

    _, pull, (results, other) = jax.vjp(run, [leaves[i] for i in floats], has_aux=True)
    (made_tree,) = kept

    def back(given: Any) -> tuple:
        flat = made_tree.flatten_up_to(given)
        cts = [ct.astype(x.dtype) for x, ct in zip(results, flat) if _is_float(x)]
        found = dict(zip(floats, pull(cts)[0]))
        return jax.tree.unflatten(tree, [found.get(i) for i in range(len(leaves))])

    return jax.tree.unflatten(made_tree, results), back, other
