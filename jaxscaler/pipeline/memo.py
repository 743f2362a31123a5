"""What pipelines of one step share: the step cut into stages, and the plans of equal stages.

Stages that differ in nothing but which iterations of a scan they have are planned once. A search
keeps a `Memo` for all that it prices, so that another order or another neighbour costs no search.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from jaxscaler import _compat, planner
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import ConstraintError, InfeasibleError, JaxscalerError
from jaxscaler.graph.build import build
from jaxscaler.plan import Plan
from jaxscaler.report.describe import peak_memory
from jaxscaler.rewrite.changes import Change, Recompute, Stages
from jaxscaler.rewrite.stage_step import StageStep, stage_step
from jaxscaler.rewrite.stages import Staged, staged
from jaxscaler.schedule.tasks import Pipeline
from jaxscaler.trace import Traced

KEPT = 64  # plans of stages, which hold their search spaces
CUTS = 8  # steps that are cut, which hold their equations
NEARLY = 1.01  # times the seconds of another plan: next to no more
_ROWS = re.compile(r"\[\d+:\d+\]")  # which iterations of a scan a piece of its state is of

T = TypeVar("T")
Axes = tuple[tuple[str, int], ...]


class Cut(NamedTuple):
    """A step with its changes, the same in tasks, and a step per place."""

    whole: Traced
    staged: Staged
    steps: tuple[StageStep, ...]


class Room(NamedTuple):
    """What a stage may fill: a share of its devices' memory, in which what a micro-batch keeps for
    its backward pass counts `under_way` times."""

    memory: float
    under_way: float = 1.0


def less_room(room: Room, planned: planner.Planned, excess: float) -> Room:
    """With so many bytes less than what the search thought that the plan takes."""
    session = planned.plan.session
    hbm = session.cluster.device.hbm_bytes
    rows, _ = peak_memory(session.best.priced, session.best.choice)
    return room._replace(memory=min(room.memory, rows / hbm) - 1.02 * excess / hbm)


def alike(rooms: Sequence[Room], places: Sequence[int]) -> list[Room]:
    """The least room of those of `places` that have as many micro-batches under way, for all of
    these: equal stages are planned once."""
    least: dict[float, float] = {}
    for p in places:
        way = rooms[p].under_way
        least[way] = min(rooms[p].memory, least.get(way, 1.0))
    return [
        room._replace(memory=least[room.under_way]) if p in places else room
        for p, room in enumerate(rooms)
    ]


class Memo:
    """Cuts of one traced step, plans of its stages under the same constraints, and what else is
    derived of both. What failed fails again with the same error.

    one_mesh: a stage on devices like those of another one, with as many micro-batches and the same
    changes, is planned on that one's mesh, if it has a plan there; and a plan of a stage that fits
    into less room and costs next to no more is taken for more. A search is that much faster.
    """

    def __init__(self, traced: Traced, constraints: Sequence[Any] = (), one_mesh: bool = False):
        self.traced = traced
        self.one_mesh = one_mesh
        self.meshes: dict[Hashable, Axes] = {}
        self.rooms: dict[Hashable, dict[Room, float]] = {}  # of a stage: its plans' seconds
        self.tracing = 0.0  # CPU seconds of tracing the step with its cuts
        self.cuts: OrderedDict = OrderedDict()
        self.plans: OrderedDict = OrderedDict()
        self.pipelines: OrderedDict = OrderedDict()
        # a line that knows layers apart keeps equal stages apart
        self.alike = not any(_tells_layers_apart(line) for line in constraints)

    def cut(self, changes: tuple[Change, ...]) -> Cut:
        """The step with these changes, `Stages` and `Accumulate` among them."""
        begin = time.process_time()
        try:
            return _once(self.cuts, CUTS, changes, lambda: _cut(self.traced, changes))
        finally:
            self.tracing += time.process_time() - begin

    def plan(
        self,
        changes: tuple[Change, ...],
        step: StageStep,
        cluster: Cluster,
        room: Room,
        search: Callable[[Axes | None], planner.Planned],
    ) -> planner.Planned:
        """What `search` (on a mesh, or all) finds for a stage; of an equal one it is known. See
        `named`."""
        at = (cluster.device, tuple((level.size, level.link) for level in cluster.levels))
        what = (_key(changes, step, self.alike), at)
        rest = (at, tuple(c for c in changes if not isinstance(c, Stages | Recompute)))

        def make() -> planner.Planned:
            if self.one_mesh and rest in self.meshes:
                try:
                    return search(self.meshes[rest])
                except (InfeasibleError, ConstraintError):
                    pass  # another mesh may do
            found = search(None)
            self.meshes[rest] = found.plan.axes
            return found

        known = self.rooms.setdefault(what, {})
        frugal = _frugal(known, room) if self.one_mesh else None
        if frugal is not None and (what, frugal) in self.plans:
            room = frugal
        found = _once(self.plans, KEPT, (what, room), make)
        known[room] = found.plan.predicted.seconds
        if found.traced is step.traced:
            return found
        return replace(
            found, traced=step.traced, plan=replace(found.plan, cluster=cluster.to_dict())
        )

    def pipeline(self, what: Hashable, sessions: tuple, make: Callable[[], Pipeline]) -> Pipeline:
        """The tasks of planned stages. sessions: of their plans, which tell them apart."""
        key = (what, *map(id, sessions))
        return _once(self.pipelines, CUTS, key, lambda: (sessions, make()))[1]


def _frugal(known: Mapping[Room, float], room: Room) -> Room | None:
    """Less room, for which a plan costs next to no more than for this or more."""

    def within(a: Room, b: Room) -> bool:
        return a.memory <= b.memory and a.under_way >= b.under_way

    least = min((s for r, s in known.items() if within(room, r)), default=0.0)
    some = (r for r, s in known.items() if within(r, room) and s <= NEARLY * least)
    return next(some, None)


def named(planned: planner.Planned) -> planner.Planned:
    """The plan of a stage, which may be that of an equal one, with the names of its own step."""
    known = planned.plan.session.best.priced.model
    if [known.graph.values[v].path for v in known.graph.inputs] == list(planned.traced.in_paths):
        return planned
    graph = build(planned.traced)
    like = (planner.skeleton_of(planned.traced, graph, merge) for merge in (True, False))
    own = next(s for s in like if len(s.space.nodes) == len(planned.space.nodes))
    names = {a.name: b.name for a, b in zip(planned.space.nodes, own.space.nodes, strict=True)}
    paths = dict(zip((known.graph.values[v].path for v in known.graph.inputs),
                     planned.traced.in_paths, strict=True))  # fmt: skip
    plan = planned.plan
    plan = replace(
        plan,
        decisions=tuple(replace(d, subject=names[d.subject]) for d in plan.decisions),
        tensors=tuple(replace(t, path=paths.get(t.path, t.path)) for t in plan.tensors),
        traffic=tuple(replace(t, value=paths.get(t.value, t.value)) for t in plan.traffic),
        fingerprint=own.fingerprint,
    )
    found = replace(planned, graph=graph, folded=own.folded, space=own.space, plan=plan)
    return replace(found, plan=replace(plan, step=found))


def _cut(traced: Traced, changes: tuple[Change, ...]) -> Cut:
    whole = traced.changed(changes)
    step = staged(whole)
    places = 1 + max(step.places)
    return Cut(whole, step, tuple(stage_step(step, place) for place in range(places)))


def _once(known: OrderedDict, most: int, key: Hashable, make: Callable[[], T]) -> T:
    if key not in known:
        try:
            known[key] = make()
        except JaxscalerError as error:
            known[key] = error
        while len(known) > most:
            known.popitem(last=False)
    known.move_to_end(key)
    if isinstance(known[key], JaxscalerError):
        raise known[key]
    return known[key]


def _tells_layers_apart(line: Any) -> bool:
    words = ("layers=", "name=", "[")
    return isinstance(line, Plan) or any(word in str(line) for word in words)


def _key(changes: tuple[Change, ...], step: StageStep, alike: bool) -> Hashable:
    """What the plan of a stage follows from, beside its devices."""
    rest = tuple(c for c in changes if not isinstance(c, Stages))
    (cut,) = (c for c in changes if isinstance(c, Stages))
    ends = (*cut.points[1:], None)
    runs = tuple(
        (_begin(a, alike), b and _end(a, b, alike))
        for a, b in zip(cut.points, ends)
        if a[2] == step.place
    )
    traced = step.traced
    paths = (*traced.in_paths, *traced.out_paths)
    types = tuple((a.shape, str(a.dtype)) for a in (*traced.in_avals, *traced.out_avals))
    names = tuple(_ROWS.sub("[:]", p) for p in paths) if alike else paths
    return rest, runs, names, types, hash(tuple(_shapes(traced.jaxpr.jaxpr)))


def _begin(point: tuple[int, int, int], alike: bool) -> tuple[int, int]:
    """Where a run begins; how far inside of a scan is in the shapes."""
    equation, trip, _ = point
    return equation, 0 if alike else trip


def _end(first: tuple[int, int, int], end: tuple[int, int, int], alike: bool) -> tuple[int, int]:
    """Where it ends; with the scan in which it begins is as good as in it."""
    within = alike and end[:2] == (first[0] + 1, 0)
    return _begin(first if within else end, alike)


def _shapes(jaxpr: Any) -> Iterator[Hashable]:
    """All equations of a jaxpr, as far as they may differ between equal stretches of a step."""
    for eqn in jaxpr.eqns:
        results = tuple((v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars
                        if hasattr(v.aval, "shape"))  # fmt: skip
        yield eqn.primitive.name, results, eqn.params.get("length")
        yield from chain.from_iterable(
            _shapes(_compat.open_jaxpr(body)[0]) for body in _compat.subjaxprs(eqn)
        )
