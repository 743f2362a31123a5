"""What lines select, as equations of the forward passes of marked losses."""

from __future__ import annotations

from collections import defaultdict

from jaxscaler.graph.ir import FORWARD, OpGraph
from jaxscaler.program import Ops
from jaxscaler.rewrite.changes import Segment
from jaxscaler.space.subjects import Subjects

Equations = frozenset[tuple[int, tuple[int, ...]]]  # (loss, key)


def equations(subjects: Subjects, subject: Ops) -> Equations:
    """Equations of the forward pass whose ops a subject selects."""
    found = set()
    for o in subjects.ops(subject):
        op = subjects.graph.ops[o]
        if op.phase == FORWARD and op.origin is not None and not op.origin.again:
            found.add((op.origin.loss, op.origin.key))
    return frozenset(found)


def runs(graph: OpGraph, selected: Equations) -> list[Segment]:
    """The stretches of selected equations without a gap, in program order."""
    bodies: dict[tuple, set[int]] = defaultdict(set)  # all equations of the forward pass
    for op in graph.ops:
        if op.origin is not None and op.phase == FORWARD and not op.origin.again:
            loss, key, _ = op.origin
            bodies[loss, key[:-1]].add(key[-1])
    found = []
    for (loss, inside), indices in sorted(bodies.items()):
        run: list[int] = []
        for i in (*sorted(indices), None):
            if i is not None and (loss, (*inside, i)) in selected:
                run.append(i)
            elif run:
                found.append(Segment(loss, run[0], run[-1], inside))
                run = []
    return found
