"""A planned step without its repeated layers: the same collectives, in a program of a few layers.

Equations of one class (`graph/fold.py`) do the same in the same layout. Of layers, one after the
other, two of each class are kept: the first, which follows upon something else, and the second,
which stands for the rest. Of updates, which stand side by side, one is kept for each gradient that
is left. What read a value of a left-out equation reads that of the one that stands for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxscaler import _compat
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import UPDATE, OpGraph
from jaxscaler.lower.layouts import Key, Layouts
from jaxscaler.trace import Traced

REPEATED = "repeated"  # a scope `repeated<n>` says that an equation stands for n


def folded_step(
    traced: Traced, graph: OpGraph, folded: Folded, layouts: Layouts
) -> tuple[Traced, Layouts]:
    """The step with a few of each class of equations, for `lower`; it computes nothing sensible.

    Barriers are left out: `layouts` are those of the graph without them.

    Arguments and results are those of the whole step: a left-out layer's results are those of the
    layer that stands for it.
    """
    jaxpr, _ = _compat.open_jaxpr(traced.jaxpr)
    classes: list[list[int]] = [[] for _ in jaxpr.eqns]
    layered = [False] * len(jaxpr.eqns)
    for op in graph.ops:
        classes[op.key[0]].append(int(folded.op_class[op.id]))
        layered[op.key[0]] |= op.phase != UPDATE
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    met: Counter[tuple] = Counter()
    standing: dict[tuple, int] = {}  # by class, the equation that stands for others
    stands_for: Counter[int] = Counter()
    kept: dict[int, int] = {}  # where an equation stood -> where it stands
    renamed: dict = {}
    barriers = {barrier.key for barrier in graph.barriers}
    for i, eqn in enumerate(jaxpr.eqns):
        if (i,) in barriers:
            renamed.update(zip(eqn.outvars, (_of(renamed, v) for v in eqn.invars)))
            continue
        key, most = tuple(classes[i]), 2
        if key and not layered[i]:
            operands = (_of(renamed, v) for v in eqn.invars if not _compat.is_literal(v))
            key, most = (*key, *(v for v in operands if v in made)), 1
        met[key] += 1
        if key and met[key] > most and _same_types(eqn, jaxpr.eqns[standing[key]]):
            renamed.update(zip(eqn.outvars, jaxpr.eqns[standing[key]].outvars))
            stands_for[standing[key]] += 1
            continue
        if met[key] == most:
            standing[key] = i
        kept[i] = len(kept)
    eqns = []
    for i in kept:
        eqn = jaxpr.eqns[i].replace(invars=[_of(renamed, v) for v in jaxpr.eqns[i].invars])
        more = stands_for[i]
        eqns.append(_compat.in_scope(eqn, f"{REPEATED}{1 + more}") if more else eqn)
    outvars = [_of(renamed, v) for v in jaxpr.outvars]
    small = _compat.with_eqns(traced.jaxpr, eqns, outvars)
    return replace(traced, jaxpr=small), _at(layouts, kept)


def _of(renamed: dict, atom):
    return atom if _compat.is_literal(atom) else renamed.get(atom, atom)


def _same_types(eqn, other) -> bool:
    # a dropped result can stand for nothing
    pairs = list(zip(eqn.outvars, other.outvars))
    return len(eqn.outvars) == len(other.outvars) and all(
        a.aval == b.aval and (_compat.is_dropped(a) or not _compat.is_dropped(b)) for a, b in pairs
    )


def _at(layouts: Layouts, kept: dict[int, int]) -> Layouts:
    """The layouts of the equations that are left, at their new places."""

    def moved(table: Mapping[Key, Any]) -> dict[Key, Any]:
        return {(kept[k[0]], *k[1:]): v for k, v in table.items() if k and k[0] in kept}

    return replace(
        layouts,
        results=moved(layouts.results),
        operands=moved(layouts.operands),
        body_inputs=moved(layouts.body_inputs),
        body_outputs=moved(layouts.body_outputs),
        kernels=moved(layouts.kernels),
    )
