"""What a segment could keep: the values that it makes, each with its copy in the backward pass.

Of the graph of a step with every segment recomputed and nothing kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.cost.memory import Rules, buffers
from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import FORWARD, Op, OpGraph
from jaxscaler.rewrite.changes import Segment

Results = Mapping[Segment, Sequence[tuple[str, Sequence[tuple[tuple[int, ...], str]]]]]


@dataclass(frozen=True)
class Pair:
    """A value that a segment makes, and its copy of the backward pass."""

    segment: int
    equation: int  # in the segment's body
    result: int
    first: int  # value ids
    again: int


def pairs_of(
    graph: OpGraph, segments: Sequence[Segment], results: Results, rules: Rules
) -> tuple[Pair, ...]:
    """Values that could be kept, of a step with all `segments` recomputed.

    `results`: per segment and equation of it the primitive, and shape and dtype of each result.
    `rules`: the compiler's, as to what has a buffer.
    """
    at = equations_of(segments)
    spots: tuple[dict, dict] = defaultdict(list), defaultdict(list)
    for op in graph.ops:
        n, origin = _direct(at, op), op.origin
        if n is None or origin is None or (op.phase != FORWARD and not origin.again):
            continue
        for r, v in enumerate(op.outputs):
            if v >= 0 and prod(graph.values[v].shape) > 1 and not _is_key(graph.values[v].dtype):
                spots[origin.again][n, origin.key, op.kind, r].append(v)
    leaves = _read_elsewhere(graph)
    has = lives_of(graph, rules).has
    found: dict[tuple[int, tuple[int, ...], int], list] = defaultdict(list)
    for (n, key, kind, r), agains in spots[True].items():
        firsts = spots[False].get((n, key, kind, r), ())
        if len(firsts) != len(agains):
            continue
        segment, value = segments[n], graph.values[agains[0]]
        name, made = results[segment][key[-1] - segment.first]
        alike = [i for i, form in enumerate(made) if form == (value.shape, value.dtype)]
        if name == graph.kinds[kind].primitive and len(made) == len(
            graph.kinds[kind].result_shapes
        ):
            alike = [r]
        if len(alike) == 1 and all(v in leaves for v in firsts):
            found[n, key, alike[0]].append((firsts, agains))
    return tuple(
        Pair(n, key[-1], r, v, w)
        for (n, key, r), groups in found.items()
        if len(groups) == 1
        for v, w in zip(*groups[0])
        if has[v] or has[w]
    )


def _is_key(dtype: str) -> bool:
    return dtype.startswith("key<")


def equations_of(segments: Sequence[Segment]) -> dict[tuple, int]:
    """(loss, key of the body, equation) -> segment."""
    return {
        (s.loss, s.inside, i): n for n, s in enumerate(segments) for i in range(s.first, s.last + 1)
    }


def segment_of(at: Mapping[tuple, int], op: Op) -> int | None:
    """The segment that an op came from, if from any."""
    if op.origin is None:
        return None
    loss, key, _ = op.origin
    around = ((loss, key[:n], key[n]) for n in range(0, len(key), 2))
    return next((at[equation] for equation in around if equation in at), None)


def _direct(at: Mapping[tuple, int], op: Op) -> int | None:
    """The segment whose body has the equation itself that an op came from."""
    return (
        None if op.origin is None else at.get((op.origin[0], op.origin[1][:-1], op.origin[1][-1]))
    )


def _read_elsewhere(graph: OpGraph) -> set[int]:
    """Values of the forward pass that ops of another equation read, or that are results."""
    maker = graph.makers[:, 0]
    found = {v for v in graph.outputs if v >= 0}
    for op, _, v in graph.reads.tolist():
        reader = graph.ops[op]
        if reader.phase == FORWARD and maker[v] >= 0:
            made = graph.ops[maker[v]]
            if reader.origin is None or made.origin is None or reader.origin != made.origin:
                found.add(v)
    return found


class Lifetimes(NamedTuple):
    """Per value: first and last op of its life, and whether it has a buffer."""

    start: np.ndarray
    end: np.ndarray
    has: np.ndarray


def lives_of(graph: OpGraph, rules: Rules) -> Lifetimes:
    """When values live, in program order; one without a buffer as long as its readers' results."""
    found = buffers(graph, rules._replace(late=None))
    has = np.zeros(len(graph.values), bool)
    has[found.value] = True
    start, end = np.maximum(graph.makers[:, 0], 0), np.zeros(len(graph.values), np.int64)
    np.maximum.at(end, found.value, found.hi)
    last = end.copy()
    for op in reversed(graph.ops):
        made = [v for v in op.outputs if v >= 0]
        fused = "fusable" in graph.kinds[op.kind].traits and not has[made].any()
        at = max((int(last[v]) for v in made), default=op.id) if fused else op.id
        for v in op.inputs:
            if v >= 0:
                last[v] = max(last[v], at)
    return Lifetimes(start, np.where(has, end, last), has)


def shared(folded: Folded, pairs: Sequence[Pair]) -> frozenset[int]:
    """Value classes that need a layout of their own (a use node), which `kept` compares."""
    values = [v for pair in pairs for v in (pair.first, pair.again)]
    return frozenset(folded.value_class[values].tolist()) if values else frozenset()
