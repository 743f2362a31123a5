"""What the stages of a pipeline cost, as the planner's own prices say: `schedule.Pipeline`s.

A stage step is planned and priced whole (`rewrite/stage_step.py`). Here its price is told apart by
task: the cost of each node goes to the tasks whose equations it decides, that of an edge to the
later of its two nodes, equations inside of the loop to micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import Any

import numpy as np

from jaxscaler.cluster.links import Link
from jaxscaler.cluster.mesh import Mesh
from jaxscaler.cost.reshard import reshard_time
from jaxscaler.lower.layouts import Spec
from jaxscaler.lower.sites import Places, Planned, parts_of
from jaxscaler.rewrite.parts import Part, nbytes
from jaxscaler.rewrite.stage_step import StageStep
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.tasks import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Edge,
    Pipeline,
    StageWork,
    Task,
)
from jaxscaler.space.strategies import UNUSED

OUTSIDE = (-1, "U")  # of the loop: preparation and update


def task_seconds(staged: Staged, step: StageStep, planned: Any) -> dict[tuple[int, str], float]:
    """(run, phase) -> seconds of its work for one micro-batch; OUTSIDE: of what runs once a step.

    `planned`: the `planner.Planned` of the stage step.
    """
    best = planned.plan.session.best
    priced, choice = best.priced, best.choice
    nodes, problem = priced.model.space.nodes, priced.problem
    shares = _shares(staged, step, planned)
    found: dict[tuple[int, str], float] = defaultdict(float)

    def add(node: int, cost: float) -> None:
        counts: Mapping = Counter()
        for c in nodes[node].members:
            counts = shares[c]
            break
        total = sum(counts.values())
        for where, n in counts.items():
            found[where] += cost * priced.unit * n / total
        if not total:
            found[OUTSIDE] += cost * priced.unit

    for node, cost in enumerate(problem.node_costs[problem.node_ptr[:-1] + choice].tolist()):
        add(node, cost)
    if len(problem.edge_nodes):
        i, j = problem.edge_nodes[:, 0], problem.edge_nodes[:, 1]
        width = problem.node_ptr[j + 1] - problem.node_ptr[j]
        costs = problem.edge_costs[problem.edge_ptr[:-1] + choice[i] * width + choice[j]]
        first = [min(node.members, default=-1) for node in nodes]
        for a, b, cost in zip(i.tolist(), j.tolist(), costs.tolist()):
            add(a if first[a] > first[b] else b, cost)
    micro = staged.loop.micro
    return {where: s if where == OUTSIDE else s / micro for where, s in found.items()}


def _shares(staged: Staged, step: StageStep, planned: Any) -> dict[int, Counter]:
    """Op class -> how many of its ops each task has."""
    whole = {n: i for i, n in step.body.items()}
    found: dict[int, Counter] = defaultdict(Counter)
    for op, c in zip(planned.graph.ops, planned.folded.op_class.tolist()):
        where: Any = OUTSIDE
        if op.key[:2] == (step.at, 0) and len(op.key) > 2:
            where = staged.body[whole[op.key[2]]] or OUTSIDE
        found[c][where] += op.repeat
    return found


def pipeline_of(
    staged: Staged,
    steps: Sequence[StageStep],
    planned: Sequence[Any],
    groups: Sequence[tuple[int, ...]],
    links: Mapping[tuple[int, int], Link],
    limits: Sequence[float],
    split: bool = False,
) -> Pipeline:
    """The stages of a step with their seconds and bytes, for `schedule`.

    steps, planned: [place]. groups: [place] -> device groups. links: (place, place) -> what
    connects them. limits: bytes per group. split: weight gradients as tasks of their own.
    """
    sites = [Planned(step, plan, _Axes(plan.plan.axes)) for step, plan in zip(steps, planned)]
    parts = _parts(staged, split)
    places = Places(staged, sites, parts)
    works, seen = [], set()
    kept = _kept(staged, parts, places)
    seconds = [task_seconds(staged, step, plan) for step, plan in zip(steps, planned)]
    static = [_static(staged, place, places) for place in range(len(steps))]
    for run in staged.runs:
        p = staged.places[run]
        work = _work(run, staged, parts, planned[p], groups[p], kept, seconds[p], static[p])
        if p in seen:
            work = replace(work, update=None, static=0.0)
        seen.add(p)
        works.append(work)
    meshes = [plan.plan.session.best.priced.mesh for plan in planned]
    edges = _edges(staged, parts, places, links, meshes)
    barrier = 0.0 if len(staged.update) > 2 else None
    return Pipeline(tuple(works), staged.loop.micro, edges, tuple(limits), barrier)


def work_of(
    staged: Staged, run: int, step: StageStep, planned: Any, split: bool = False
) -> StageWork:
    """One stage alone, on group 0, as if its neighbours laid values out as it does."""
    site = Planned(step, planned, _Axes(planned.plan.axes))
    parts = _parts(staged, split)
    places = Places(staged, [_Like(site)] * (1 + max(staged.places)), parts)
    return _work(
        run, staged, parts, planned, (0,), _kept(staged, parts, places),
        task_seconds(staged, step, planned), _static(staged, staged.places[run], places),
    )  # fmt: skip


def _parts(staged: Staged, split: bool) -> dict[tuple[int, str], Part]:
    phases = ("F", "B", "W") if split else ("F", "BW")
    return {(run, p[0]): staged.part(run, p) for run in staged.runs for p in phases}


def _work(
    run: int,
    staged: Staged,
    parts: Mapping[tuple[int, str], Part],
    planned: Any,
    groups: tuple[int, ...],
    kept: Mapping[tuple[int, str], float],
    seconds: Mapping[tuple[int, str], float],
    static: float,
) -> StageWork:
    """seconds: of the tasks of the run's place. static: bytes of the place."""
    place, split = staged.places[run], (run, "W") in parts
    back, weight = seconds.get((run, "B"), 0.0), seconds.get((run, "W"), 0.0)
    differentiated = any(parts[run, p].eqns for p in ("BW" if split else "B"))
    kept_weight = kept.get((run, "W"), 0.0)
    # the place's step holds what all of its runs keep of one micro-batch
    most = {r: max(kept[r, "B"], kept.get((r, "W"), 0.0)) for r in staged.runs}
    own = sum(n for r, n in most.items() if staged.places[r] == place)
    peak = planned.plan.predicted.peak_bytes
    return StageWork(
        groups=groups,
        forward=seconds.get((run, "F"), 0.0),
        backward=(back if split else back + weight) if differentiated else None,
        weight=weight if split and differentiated else None,
        update=seconds.get(OUTSIDE, 0.0),
        kept=most[run],
        kept_weight=kept_weight,
        working=max(0.0, peak - static - own),
        static=static,
    )


def under_way(pipeline: Pipeline, group: int, line: Sequence[Task]) -> float:
    """Micro-batches that a group's own stages hold for their backward passes at most, each stage's
    counted by its share of them. line: the group's tasks in order."""
    own = {s: work.weight is not None for s, work in enumerate(pipeline.stages)
           if work.groups == (group,) and work.backward is not None}  # fmt: skip
    now = most = 0
    for task in line:
        if task.stage in own:
            ends = WEIGHT if own[task.stage] else BACKWARD
            now += (task.phase == FORWARD) - (task.phase == ends)
            most = max(most, now)
    return most / max(1, len(own))


def rounded(ways: Sequence[float]) -> list[float]:
    """To powers of two, at most the largest: so fewer stages differ, and are planned apart."""
    return [min(2.0 ** ceil(log2(max(n, 1.0))), max(ways)) for n in ways]


class _Like:
    """A site that lays out all that another one knows as that does."""

    def __init__(self, site: Planned):
        self.site, self.mesh = site, site.mesh

    def spec(self, var: Any) -> Spec:
        known = self.site.step.received.get(var, var) in self.site.values
        return self.site.spec(var) if known else ((),) * len(var.aval.shape)


class _Axes:
    """The axes of a mesh that needs no devices."""

    def __init__(self, axes: Sequence[tuple[str, int]]):
        self.shape = dict(axes)


def _local(v: Any, place: int, places: Places) -> float:
    """Bytes of a value on a device of a place."""
    sizes = places.sites[place].mesh.shape
    return nbytes(v) / parts_of(places.spec(v, place), sizes)


def _kept(
    staged: Staged, parts: Mapping[tuple[int, str], Part], places: Places
) -> dict[tuple[int, str], float]:
    """Bytes that each backward task reads of what was there before backward began."""
    before = {
        v
        for e, w in zip(staged.loop.body.eqns, staged.body)
        if w is not None and w[1] == "F"
        for v in e.outvars
    }
    return {
        (run, phase): sum(_local(v, staged.places[run], places) for v in part.reads if v in before)
        for (run, phase), part in parts.items()
        if phase != "F"
    }


def _static(staged: Staged, place: int, places: Places) -> float:
    """Bytes of state, of what is prepared once a step, and of sums over micro-batches."""
    loop = staged.loop
    held = {v for v, p in staged.homes.items() if p == place}
    held |= {v for v, others in staged.sends.items() if place in others and v in places.wants}
    held |= set(staged.prepare[place].makes) - {c.first for c in loop.carries if _is_var(c.first)}
    held |= {c.last for c in loop.carries if places.source[c.last] == place}
    return sum(_local(v, place, places) for v in held)


def _anew(v: Any, place: int, places: Places, mesh: Mesh) -> float:
    """Seconds from how a value comes to a place to how that has it."""
    ways = []
    for spec in (places.spec(v, place), places.sites[place].spec(v)):
        at = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
        ways.append(np.array([[at.get(name, UNUSED) for name in mesh.names]]))
    return float(reshard_time(mesh, v.aval.shape, nbytes(v), *ways)[0, 0])


def _is_var(atom: Any) -> bool:
    return not hasattr(atom, "val")


def sums_of(staged: Staged, steps: Sequence[StageStep], planned: Sequence[Any]) -> list[float]:
    """[place]: bytes on a device of its sums over micro-batches."""
    sites = [Planned(step, plan, _Axes(plan.plan.axes)) for step, plan in zip(steps, planned)]
    places = Places(staged, sites, {})
    found = [0.0] * len(sites)
    for c in staged.loop.carries:
        place = places.source[c.last]
        found[place] += _local(c.last, place, places) if c.last.aval.shape else 0.0
    return found


def transfer_seconds(link: Link, size: float) -> float:
    """Of so many bytes over a link."""
    rate = link.bandwidth * float(link.efficiency(max(size, 1.0)))
    return link.launch + link.latency + size / rate


def _edges(
    staged: Staged,
    parts: Mapping[tuple[int, str], Part],
    places: Places,
    links: Mapping[tuple[int, int], Link],
    meshes: Sequence[Mesh],
) -> tuple[Edge, ...]:
    """What runs hand over: the time on the link, and of laying it out anew at the reader."""
    where = {v: w for e, w in zip(staged.loop.body.eqns, staged.body) if w for v in e.outvars}
    moved: dict[tuple[int, int], set] = defaultdict(set)
    for (run, phase), part in parts.items():
        for v in part.reads:
            made = where.get(v)
            if phase == "F" and made is not None and made[0] < run:
                moved[made[0], run].add(v)
    edges = []
    for (source, target), values in sorted(moved.items()):
        a, b = staged.places[source], staged.places[target]
        held = sum(_local(v, b, places) for v in values)
        seconds = 0.0
        if a != b:
            seconds = transfer_seconds(links[a, b], held)
            seconds += sum(_anew(v, b, places, meshes[b]) for v in values)
        edges.append(Edge(source, target, seconds, held))
    return tuple(edges)
