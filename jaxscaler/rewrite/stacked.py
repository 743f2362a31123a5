"""State that is stacked over the layers of a scan, in pieces where the scan is cut into stages.

A scan over layers has its parameters in one array, [layers, ...]. Where `Stages` cuts it, each
stage has its rows; so must the state, and the update of each row runs where the row is. Scans that
share it may be cut elsewhere: its pieces are those of all cuts together. The update of a leaf works
row by row (what does not is done on all rows, joined), so equations are followed along the first
dim, and written once for every piece. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.graph import kinds
from jaxscaler.rewrite.parts import Leaf, variables
from jaxscaler.trace import Traced

Sizes = tuple[int, ...]  # rows of each piece
_ADDS_UP = {"reduce_sum": jnp.add, "reduce_max": jnp.maximum, "reduce_min": jnp.minimum}
_WITH_SHAPE = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}


class Pieces(NamedTuple):
    """A step whose stacked state is in pieces. inputs, results: what each is of the step before."""

    traced: Traced
    inputs: tuple[Leaf, ...]
    results: tuple[Leaf, ...]


def in_pieces(traced: Traced, at: int) -> Pieces:
    """A flat step with a loop over micro-batches at equation `at`, its stacked state in pieces."""
    jaxpr = traced.jaxpr.jaxpr
    cuts = _cuts(traced, at)
    inputs = [leaf for i, v in enumerate(jaxpr.invars) for leaf in _leaves(i, cuts.get(v))]
    becomes = {o: i for i, o in traced.state_pairs}
    sizes = [cuts.get(jaxpr.invars[becomes[o]]) if o in becomes else None
             for o in range(len(jaxpr.outvars))]  # fmt: skip
    results = [leaf for o, rows in enumerate(sizes) for leaf in _leaves(o, rows)]
    if not cuts:
        return Pieces(traced, tuple(inputs), tuple(results))

    def run(*args: Any) -> list:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.jaxpr.consts))
        given = iter(args)
        for v in jaxpr.invars:
            env[v] = [next(given) for _ in cuts[v]] if v in cuts else next(given)
        for eqn in jaxpr.eqns:
            _run(eqn, env, cuts)
        made = []
        for v, rows in zip(jaxpr.outvars, sizes):
            made += [_whole(v, env)] if rows is None else _pieces(v, env, rows)
        return made

    avals = [_part_of(jaxpr.invars[leaf.position].aval, leaf) for leaf in inputs]
    closed = jax.make_jaxpr(run)(*avals)
    place = {leaf: n for n, leaf in enumerate(results)}
    pairs = tuple(
        (n, place[Leaf(o, leaf.rows)])
        for n, leaf in enumerate(inputs)
        for i, o in traced.state_pairs
        if i == leaf.position
    )
    return Pieces(
        replace(
            traced,
            jaxpr=_compat.without_dead_code(closed),
            in_paths=tuple(leaf.path(traced.in_paths) for leaf in inputs),
            in_avals=tuple(closed.in_avals),
            out_paths=tuple(leaf.path(traced.out_paths) for leaf in results),
            out_avals=tuple(closed.out_avals),
            state_pairs=pairs,
            arg_of_input=tuple(traced.arg_of_input[leaf.position] for leaf in inputs),
        ),
        tuple(inputs),
        tuple(results),
    )


def _leaves(index: int, rows: Sizes | None) -> list[Leaf]:
    if rows is None:
        return [Leaf(index)]
    ends = list(accumulate(rows))
    return [Leaf(index, (end - n, end)) for n, end in zip(rows, ends)]


def _part_of(aval: Any, leaf: Leaf) -> jax.ShapeDtypeStruct:
    shape = tuple(aval.shape)
    if leaf.rows is not None:
        shape = (leaf.rows[1] - leaf.rows[0], *shape[1:])
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


# -- what is in pieces -----------------------------------------------------------------------------


def _cuts(traced: Traced, at: int) -> dict[Any, Sizes]:
    """Variables outside of the loop that are in pieces, as the state that a cut scan reads is."""
    jaxpr = traced.jaxpr.jaxpr
    state = {jaxpr.invars[i] for i, _ in traced.state_pairs}
    found: dict[Any, frozenset[int]] = {}  # where its pieces end
    rows_of_state = set(state)  # and what is made of it row by row, such as casts
    for eqn in jaxpr.eqns[:at]:
        if eqn.primitive.name == "split" and eqn.params["axis"] == 0:
            (v,) = eqn.invars
            if v in rows_of_state:
                found[v] = found.get(v, frozenset()) | {*accumulate(eqn.params["sizes"])}
        elif not rows_of_state.isdisjoint(_row_by_row(eqn)):
            rows_of_state.update(eqn.outvars)
    count = 0
    while count < (more := sum(map(len, found.values()))):
        count = more
        for i, o in traced.state_pairs:
            _tie(found, (jaxpr.invars[i], jaxpr.outvars[o]))
        for eqn in jaxpr.eqns:
            _tie(found, _row_by_row(eqn))
    inside = set(jaxpr.eqns[at].outvars)
    ours = state | {v for e in jaxpr.eqns for v in e.outvars}
    return {
        v: tuple(b - a for a, b in pairwise((0, *sorted(ends))))
        for v, ends in found.items()
        if v in ours and v not in inside
    }


def _tie(found: dict[Any, frozenset[int]], atoms: Sequence) -> None:
    """All of `atoms` are in pieces if one of them is, and in the same ones."""
    tied = variables(atoms)
    if ends := frozenset().union(*(found.get(v, ()) for v in tied)):
        found.update(dict.fromkeys(tied, ends))


def _row_by_row(eqn: Any) -> list:
    """Operands and results of an equation whose rows are made row by row; [] if none are."""
    name, (out, *_) = eqn.primitive.name, eqn.outvars or [None]
    if out is None or not eqn.invars:
        return []
    first = eqn.invars[0]
    rows = getattr(out.aval, "shape", ())[:1]
    if kinds.is_elementwise(eqn):
        return [v for v in (*eqn.invars, *eqn.outvars) if v.aval.shape == out.aval.shape and rows]
    kept = (
        (name == "broadcast_in_dim" and eqn.params["broadcast_dimensions"][:1] == (0,))
        or (name.startswith("reduce_") and 0 not in eqn.params.get("axes", (0,)))
        or (name == "transpose" and eqn.params["permutation"][:1] == (0,))
        or (name == "reshape" and eqn.params["dimensions"] is None)
    )
    same = rows and first.aval.shape[:1] == rows and len(eqn.invars) == 1
    return [first, out] if kept and same else []


# -- the same, piece by piece ----------------------------------------------------------------------


def _run(eqn: Any, env: dict, cuts: dict[Any, Sizes]) -> None:
    name = eqn.primitive.name
    rows = next((cuts[v] for v in (*eqn.invars, *eqn.outvars) if _is_cut(v, cuts)), None)
    tied = _row_by_row(eqn)
    from_one = name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
    if rows is None:
        pass
    elif name == "split" and eqn.params["axis"] == 0 and _is_cut(eqn.invars[0], cuts):
        if finer := _finer(eqn.params["sizes"], rows):
            pieces = iter(_pieces(eqn.invars[0], env, rows))
            made = [_joined([next(pieces) for _ in sizes]) for sizes in finer]
            env.update(zip(eqn.outvars, made, strict=True))
            return
    elif name == "concatenate" and _is_cut(eqn.outvars[0], cuts):
        own = [v.aval.shape[0] for v in eqn.invars]
        if eqn.params["dimension"] == 0 and (finer := _finer(own, rows)):
            each = zip(eqn.invars, finer)
            env[eqn.outvars[0]] = [x for v, sizes in each for x in _pieces(v, env, sizes)]
            return
    elif (tied or from_one) and _is_cut(eqn.outvars[0], cuts):
        made = []
        for k, n in enumerate(rows):
            args = [_pieces(v, env, rows)[k] if v in tied else _whole(v, env) for v in eqn.invars]
            params = dict(eqn.params)
            if name in _WITH_SHAPE:
                shape = eqn.outvars[0].aval.shape
                params[_WITH_SHAPE[name]] = (n, *shape[1:])
            made.append(_compat.bind_where_it_stands(eqn.replace(params=params), args))
        env.update(zip(eqn.outvars, map(list, zip(*made))))
        return
    elif name in _ADDS_UP and isinstance(env.get(eqn.invars[0]), list):
        parts = [_compat.bind_where_it_stands(eqn, [x])[0] for x in env[eqn.invars[0]]]
        total = parts[0]
        for part in parts[1:]:
            total = _ADDS_UP[name](total, part)
        env[eqn.outvars[0]] = total
        return
    made = _compat.bind_where_it_stands(eqn, [_whole(v, env) for v in eqn.invars])
    env.update(zip(eqn.outvars, made))


def _is_cut(v: Any, cuts: dict[Any, Sizes]) -> bool:
    return not _compat.is_literal(v) and v in cuts


def _whole(v: Any, env: dict) -> Any:
    value = v.val if _compat.is_literal(v) else env[v]
    return _joined(value) if isinstance(value, list) else value


def _joined(pieces: list) -> Any:
    return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _pieces(v: Any, env: dict, rows: Sizes) -> list:
    value = v.val if _compat.is_literal(v) else env[v]
    if isinstance(value, list):
        return value
    return list(jax.lax.split(value, rows)) if len(rows) > 1 else [value]


def _finer(coarse: Sequence[int], rows: Sizes) -> list[Sizes]:
    """Of which of the pieces each of coarser ones is made; [] if they end elsewhere."""
    ends = list(accumulate(rows))
    if not {*accumulate(coarse)} <= {*ends}:
        return []
    return [
        tuple(n for n, end in zip(rows, ends) if a < end <= b)
        for a, b in pairwise((0, *accumulate(coarse)))
    ]
