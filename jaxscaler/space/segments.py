"""Where a forward pass may be cut into segments: repeated layers, bodies of loops, narrow places.

Between forward and backward a segment keeps what flows into it, so good borders are where little
does. A *segmentation* is a set of disjoint segments; each op is recomputed, if at all, at the start
of the backward pass of its segment.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import CARRY, FORWARD, SLICE, Op, OpGraph
from jaxscaler.rewrite.changes import Segment

WIDE = 1.5  # a border may be this much wider than those between other layers


def segmentations(
    graph: OpGraph, folded: Folded, loops: Sequence[Segment] = ()
) -> list[tuple[Segment, ...]]:
    """The segmentations that are worth a search, the coarsest first; none without a marked loss.

    Bodies of loops are segments in all of them. What the author's own rematerialisation covers is
    left to it; that of `loops` over parts, which a plan adds, is none of the author's: a segment
    may be around them (`rewrite.changes.around`).
    """
    forward = _forward_ops(graph)
    own = _own_remat(graph, loops)
    heavy = {n: [_key(op)[0] for op in ops if _heavy(graph, op)] for n, ops in forward.items()}
    bodies = [s for loss, ops in forward.items() for s in _bodies(graph, loss, ops, own[loss])]
    found: list[tuple[Segment, ...]] = []
    flat: dict[int, list[tuple[int, int]]]
    for borders in (_layers, _valleys):
        flat = {loss: borders(graph, folded, ops) for loss, ops in forward.items()}
        segments = [
            Segment(loss, first, last)
            for loss, ranges in flat.items()
            for first, last in ranges
            if any(first <= i <= last for i in heavy[loss])
            and not any(first <= i <= last for i in own[loss])
            and not any(b.loss == loss and first <= b.inside[0] <= last for b in bodies)
        ]
        segmentation = tuple(sorted([*segments, *bodies]))
        if segmentation and segmentation not in found:
            found.append(segmentation)
    return found


def _forward_ops(graph: OpGraph) -> dict[int, list[Op]]:
    """Loss -> its forward ops, in program order."""
    found: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        if op.origin is not None and op.phase == FORWARD and not op.origin.again:
            found[op.origin.loss].append(op)
    return found


def _own_remat(graph: OpGraph, loops: Sequence[Segment]) -> dict[int, set[int]]:
    """Loss -> equations of its top level that the author rematerialises, or what is in them."""
    found: dict[int, set[int]] = defaultdict(set)
    added = {(s.loss, *s.inside, i) for s in loops for i in range(s.first, s.last + 1)}
    depths = {len(s.inside) + 1 for s in loops}
    for op in graph.ops:
        if op.origin is not None and op.origin.again:
            loss, key, _ = op.origin
            if not any((loss, *key[:n]) in added for n in depths):
                found[loss].add(key[0])
    return found


def _key(op: Op) -> tuple[int, ...]:
    """The forward equation of an op that has one."""
    assert op.origin is not None
    return op.origin.key


def _heavy(graph: OpGraph, op: Op) -> bool:
    return "heavy" in graph.kinds[op.kind].traits


def _bodies(graph: OpGraph, loss: int, ops: Sequence[Op], own: set[int]) -> list[Segment]:
    """The outermost loops over layers: bodies that do matrix work."""
    found = []
    ids = {op.id: op for op in ops}
    end = -1
    for loop in sorted(graph.loops):
        inside = [ids[i] for i in range(loop.first, loop.last + 1) if i in ids]
        if loop.first <= end or not inside:
            continue
        body = [op for op in inside if graph.kinds[op.kind].primitive not in (CARRY, SLICE)]
        keys = {_key(op) for op in inside}
        least = min(map(len, keys))
        shortest = sorted(key for key in keys if len(key) == least)
        # one: of the markers, the loop's own; else those of its body, whose markers have none
        prefix = shortest[0] if len(shortest) == 1 else shortest[0][:-2]
        if not prefix:
            continue
        in_body = [op for op in body if len(_key(op)) > len(prefix)]
        if not any(_heavy(graph, op) for op in in_body) or prefix[0] in own:
            continue
        where = (*prefix, 0)
        if any(_key(op)[: len(where)] != where for op in in_body):
            continue
        last = max(_key(op)[len(where)] for op in in_body)
        found.append(Segment(loss, 0, last, where))
        end = loop.last
    return found


# -- borders at the top level ------------------------------------------------------------------


def _crossing(graph: OpGraph, ops: Sequence[Op]) -> np.ndarray:
    """Per position p of the top level: bytes made by equations before p and read from p on."""
    count = 1 + max(_key(op)[0] for op in ops)
    made = {v: _key(op)[0] for op in ops for v in op.outputs if v >= 0}
    last: dict[int, int] = {}
    for op in ops:
        for v in op.inputs:
            if v in made:
                last[v] = max(last.get(v, 0), _key(op)[0])
    change = np.zeros(count + 2)
    for v, end in last.items():
        if end > made[v]:
            value = graph.values[v]
            change[made[v] + 1] += _nbytes(value)
            change[end + 1] -= _nbytes(value)
    return np.cumsum(change)[: count + 1]


def _nbytes(value) -> float:
    digits = "".join(c for c in value.dtype.split("_")[0] if c.isdigit())
    return float(np.prod(value.shape)) * (int(digits) / 8 if digits else 1.0)


def _layers(graph: OpGraph, folded: Folded, ops: Sequence[Op]) -> list[tuple[int, int]]:
    """Ranges of the repeated layers, shifted to where they hand on least."""
    first: dict[int, int] = {}  # block -> its first equation
    for op in ops:
        if folded.block[op.id] > 0:
            first.setdefault(int(folded.block[op.id]), _key(op)[0])
    starts = sorted(first.values())
    runs: list[list[int]] = []
    for a, b in itertools.pairwise(starts):
        if runs and runs[-1][-1] == a and b - a == runs[-1][1] - runs[-1][0]:
            runs[-1].append(b)
        elif b > a and not (runs and runs[-1][-1] > a):
            runs.append([a, b])
    crossing = _crossing(graph, ops)
    found: list[tuple[int, int]] = []
    for run in runs:
        if len(run) < 3:
            continue
        period = run[1] - run[0]
        shift = int(np.argmin(crossing[run[1] : run[2]]))
        borders = [start + shift for start in run if start + shift < len(crossing)]
        usual = WIDE * crossing[borders[1]]
        for extra in (borders[0] - period, borders[-1] + period):  # ends of the stack
            if 0 <= extra < len(crossing) and crossing[extra] <= usual:
                borders.append(extra)
        borders.sort()
        found += [(a, b - 1) for a, b in itertools.pairwise(borders)]
    return found


def _valleys(graph: OpGraph, folded: Folded, ops: Sequence[Op]) -> list[tuple[int, int]]:
    """Ranges between the narrowest places: each is narrower than its neighbours between two
    heavy ops. What comes after the last is read at once by the backward pass, and no segment."""
    heavy = sorted({_key(op)[0] for op in ops if _heavy(graph, op)})
    crossing = _crossing(graph, ops)
    gaps = [a + 1 + int(np.argmin(crossing[a + 1 : b + 1])) for a, b in itertools.pairwise(heavy)]
    width = [crossing[p] for p in gaps]
    borders = [0] + [
        p
        for i, p in enumerate(gaps)
        if width[i] <= min(width[i - 1] if i else width[i], *width[i + 1 : i + 2], width[i])
    ]
    return [(a, b - 1) for a, b in itertools.pairwise(borders) if b > a]
