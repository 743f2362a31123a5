"""Where a forward pass may be cut into stages, and cuts that are asked for.

The equations at the top level of a marked loss are *units* in program order; a scan over layers is
a unit per iteration. A cut is before a unit: what it costs is what flows across.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscaler import _compat
from jaxscaler.errors import ConstraintError, RewriteError
from jaxscaler.graph.ir import FORWARD, OpGraph
from jaxscaler.program import Line, Ops, Stage, matches
from jaxscaler.rewrite.changes import Stages
from jaxscaler.rewrite.parts import nbytes, variables
from jaxscaler.space.subjects import at_source, layer_of
from jaxscaler.trace import Traced


class Unit(NamedTuple):
    """Equation `equation` of a loss, of a scan its iteration `trip`. flops: of all that came of it,
    forward and backward. crossing: bytes of the whole batch's values that flow over its front."""

    equation: int
    trip: int
    flops: float
    crossing: float


def units_of(traced: Traced, graph: OpGraph, loss: int, batch: Mapping[int, int]) -> list[Unit]:
    """The units of a loss. batch: its arguments (constants first) that hold the batch."""
    jaxpr, _ = _compat.open_jaxpr(traced.losses[loss])
    work = _flops(graph, loss)
    crossing = _crossing(jaxpr, batch)
    found = []
    for i, eqn in enumerate(jaxpr.eqns):
        trips = _trips(eqn)
        carried = _carried(eqn) if trips > 1 else 0.0
        for t in range(trips):
            found.append(Unit(i, t, work[i] / trips, crossing[i] if t == 0 else carried))
    return found


def even_cut(units: Sequence[Unit], loss: int, count: int) -> Stages:
    """`count` stages of about equal work, cut where least flows across.

    Raises RewriteError where there are not as many places to cut.
    """
    total = sum(unit.flops for unit in units) or 1.0
    points, done, last = [(0, 0, 0)], 0.0, 0
    before = []
    for unit in units:
        before.append(done / total)
        done += unit.flops
    for k in range(1, count):
        aim, room = k / count, 0.25 / count
        near = [n for n in range(last + 1, len(units)) if abs(before[n] - aim) <= room]
        if not near:  # as close as it gets, so that each later stage has some work
            levels = sorted({b for b in before[last + 1 :] if b > before[last]})
            levels = levels[: len(levels) - (count - 1 - k)]
            level = min(levels, key=lambda b: abs(b - aim), default=None)
            near = [n for n in range(last + 1, len(units)) if before[n] == level]
        if not near:
            raise RewriteError(
                f"the loss can not be cut into {count} stages: its work lies in too few operations"
            )
        last = min(near, key=lambda n: (units[n].crossing, abs(before[n] - aim)))
        points.append((units[last].equation, units[last].trip, k))
    return Stages(loss, tuple(points))


def cut_by_lines(
    traced: Traced, graph: OpGraph, units: Sequence[Unit], loss: int, lines: Sequence[Line]
) -> Stages:
    """The cut that `op_assign(ops or region, Stage(k))` lines say; what none selects stays with
    what is before it. `layers` are those of the path, or iterations of a scan over layers.

    Raises ConstraintError for a line that selects nothing, and a stage that is left out.
    """
    place: list[int | None] = [None] * len(units)
    at = {(unit.equation, unit.trip): n for n, unit in enumerate(units)}
    selected = _Selected(graph, loss)
    for line in lines:
        hit = [at[spot] for spot in selected.units(line.subject, traced) if spot in at]
        if not hit:
            raise ConstraintError(f"{line} ({line.source}): no op of the marked loss is selected")
        for n in hit:
            assert isinstance(line.place, Stage)
            place[n] = line.place.index
    named = [p for p in place if p is not None]
    if missing := sorted(set(range(max(named))) - set(named)):
        raise ConstraintError(f"no op is on Stage({missing[0]}): stages count from 0 without gaps")
    points: list[tuple[int, int, int]] = []
    here = named[0]
    for unit, p in zip(units, place):
        here = here if p is None else p
        if not points or points[-1][2] != here:
            points.append((unit.equation, unit.trip, here))
    return Stages(loss, ((0, 0, points[0][2]), *points[1:]))


def is_stage_line(line: Any) -> bool:
    return isinstance(line, Line) and isinstance(line.place, Stage)


class _Selected:
    """Ops of a graph -> units of a loss."""

    def __init__(self, graph: OpGraph, loss: int):
        self.graph = graph
        self.ops = [op for op in graph.ops if op.origin is not None and op.origin.loss == loss]

    def units(self, subject: Any, traced: Traced) -> Iterator[tuple[int, int]]:
        if not isinstance(subject, Ops) or subject.name is not None:
            raise ConstraintError(f"{subject}: stages are made of ops(...) or region(...)")
        for op in self.ops:
            kind = self.graph.kinds[op.kind].primitive
            wrong = (
                op.phase != FORWARD
                or FORWARD not in subject.phase
                or not matches(subject.path, op.scope)
                or not matches(subject.primitive, kind)
                or (subject.source is not None and not at_source(subject.source, op.source))
            )
            if wrong or op.origin is None:
                continue
            equation, inside = op.origin.key[0], len(op.origin.key) > 1
            layer = layer_of(op.scope)
            if subject.layers is None:
                trips = _trips(_compat.open_jaxpr(traced.losses[op.origin.loss])[0].eqns[equation])
                yield from ((equation, t) for t in range(trips))
            elif layer is not None and subject.layers[0] <= layer <= subject.layers[1]:
                yield equation, 0
            elif layer is None and inside:
                yield from ((equation, t) for t in range(subject.layers[0], subject.layers[1] + 1))


def _flops(graph: OpGraph, loss: int) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for op in graph.ops:
        if op.origin is not None and op.origin.loss == loss:
            found[op.origin.key[0]] += graph.kinds[op.kind].flops * op.repeat
    return found


def _trips(eqn: Any) -> int:
    scan = eqn.primitive.name == "scan" and not eqn.params["reverse"]
    return _compat.scan_sizes(eqn)[2] if scan else 1


def _carried(eqn: Any) -> float:
    consts, carry, _ = _compat.scan_sizes(eqn)
    return float(sum(nbytes(v) for v in variables(eqn.invars[consts : consts + carry])))


def _crossing(jaxpr: Any, batch: Mapping[int, int]) -> list[float]:
    """Per equation, bytes of values of the batch made before it and read from there on."""
    arguments = (*jaxpr.constvars, *jaxpr.invars)
    data = {arguments[i] for i in batch}
    varying, made = set(data), {}
    for i, eqn in enumerate(jaxpr.eqns):
        if not varying.isdisjoint(variables(eqn.invars)):
            varying.update(eqn.outvars)
            made.update((v, i) for v in eqn.outvars if _compat.dtype_name(v.aval)[:3] != "int")
    change = [0.0] * (len(jaxpr.eqns) + 1)
    for v, last in _compat.last_uses(jaxpr).items():
        if v in made:
            change[made[v] + 1] += nbytes(v)
            change[min(last, len(jaxpr.eqns) - 1) + 1] -= nbytes(v)
    found, now = [], 0.0
    for i in range(len(jaxpr.eqns)):
        now += change[i]
        found.append(now)
    return found
