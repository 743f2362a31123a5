"""Pipelines: a marked step cut into stages, each planned on devices of its own, in one order.

`plan_pipeline` is given the cut, the devices per stage, the number of micro-batches and the order,
and plans each stage with the ordinary planner. The search over all of these stands on it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxscaler import planner, program
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.links import Link
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.cluster.parts import link_between, sub_clusters
from jaxscaler.errors import (
    ConstraintError,
    InfeasibleError,
    PlanError,
    RewriteError,
    ScheduleError,
)
from jaxscaler.exchange import exchanged
from jaxscaler.graph.build import build
from jaxscaler.loops.planner import batch_of
from jaxscaler.pipeline.chimera import check_copies, excess, has_copies, in_both_directions
from jaxscaler.pipeline.dispatch import LIMIT, with_dispatch
from jaxscaler.pipeline.memo import Axes, Memo, Room, alike, less_room, named
from jaxscaler.pipeline.plan import Parts, PipelinePlan
from jaxscaler.pipeline.prices import pipeline_of, rounded, under_way, work_of
from jaxscaler.plan import Plan
from jaxscaler.program import ALL, Statement
from jaxscaler.rewrite.changes import Accumulate, Change, Stages
from jaxscaler.rewrite.cuts import cut_by_lines, even_cut, is_stage_line, units_of
from jaxscaler.rewrite.stage_step import StageStep, stage_step
from jaxscaler.rewrite.stages import Staged, staged
from jaxscaler.schedule.check import check
from jaxscaler.schedule.families import family
from jaxscaler.schedule.tasks import NO_MICRO, UPDATE, Order, Pipeline, StageWork, Task, task_graph
from jaxscaler.space.annotations import Author
from jaxscaler.trace import Traced

ALIKE = 1.5  # times as many micro-batches under way as another group: about as many


def plan_pipeline(
    traced: Traced,
    cluster: Cluster | Mixed,
    *,
    stages: int | Stages | None = None,
    micro: int,
    order: str | Callable[[Pipeline], Order] | Sequence[Sequence[Task]] = "1f1b",
    submeshes: Sequence[int | Cluster | str] | None = None,
    constraints: Any = (),
    changes: Sequence[Change] = (),
    lanes: int = 1,
    memory: float = planner.MEMORY,
    time_limit: float = planner.TIME_LIMIT,
    loss: int = 0,
    progress: planner.Progress | None = None,
    memo: Memo | None = None,
    dispatch_limit: float | None = LIMIT,
    dispatch: bool = True,
) -> PipelinePlan:
    """Plan a step, whose loss `jaxscaler.value_and_grad` marks, as a pipeline on a cluster.

    `stages`: how many, of about equal work, or the cut; None: as lines `op_assign(..., Stage(k))`
    among the `constraints` say. `micro`: micro-batches of a step. `order`: the name of a family
    (`schedule.families.FAMILIES`), a function from the pipeline, or the tasks per device group
    ("chimera", or tasks of stages behind the last: every stage has a copy, `pipeline.chimera`);
    lines `op_order(task, task)` change it. `submeshes`: devices per stage, clusters, or ALL for a
    stage on the devices of all others; by default equal parts of `cluster`. Other constraints hold
    in each stage. `changes`: other ones of the loss (recomputation). `lanes`: gradients are kept
    that many times and added once a step (as `Accumulate` has it); 1: a stage that splits the batch
    reduces them in every micro-batch. `memo`: of this step and these constraints, for many calls;
    stages then may have plans with the names of equal ones (`memo.named`). `dispatch`: whether one
    thread dispatches all tasks, as the stage executor's does; without, none waits for its host, as
    where every rank has a process of its own.

    Raises RewriteError where the loss does not divide into micro-batches or stages, naming the
    operation; ScheduleError for an order that can not run, naming tasks; ClusterError for parts
    that are none; InfeasibleError where a stage does not fit, or the host's thread would make the
    step longer by more than `dispatch_limit` of it (None: any); InfeasibleError or ConstraintError
    as the planner does for a stage.
    """
    say = progress or (lambda phase, detail: None)
    traced, lines = exchanged(traced, planner.listed(constraints))
    assigned = [line for line in lines if is_stage_line(line)]
    pairs = [line for line in lines if isinstance(line, program.Order) and is_task_order(line)]
    rest = [line for line in lines if not is_stage_line(line) and not is_task_order(line)]
    cut, batch = _cut(traced, stages, assigned, loss)
    places = 1 + max(place for _, _, place in cut.points)
    sites = _sites(cluster, submeshes, places)
    clusters, groups = [site.cluster for site in sites], [site.groups for site in sites]
    twice = has_copies(order, cut)
    if twice:
        check_copies(cut, clusters, groups)
    given = (*changes, cut, Accumulate(loss, micro, batch, lanes))
    say("stages", f"cut into {places}")
    alone = memo is None
    memo = Memo(traced, rest) if memo is None else memo
    whole, step, steps = memo.cut(given)
    if empty := [s.place for s in steps if not s.body]:
        raise RewriteError(
            f"stage {empty[0]} of {cut} has no op that depends on the batch: begin it elsewhere"
        )
    plan = functools.partial(_planned, memo, given, steps, clusters, rest, time_limit, say, alone)
    split = order in ("zero-bubble", "zero-bubble-2") or _has_weights(order)
    links = _links(cluster, sites)
    price = in_both_directions if twice else pipeline_of
    rooms = [Room(memory, _under_way_anyhow(order, step, groups, split))] * places
    narrow = {site.groups[0]: p for p, site in enumerate(sites) if len(site.groups) == 1}
    limits = [clusters[p].device.hbm_bytes * memory for _, p in sorted(narrow.items())]
    try:
        planned = plan(rooms, range(places), {})
    except InfeasibleError:
        if rooms[0].under_way == 1:
            raise
        rooms = [Room(memory)] * places  # not all of them hold the most
        planned = plan(rooms, range(places), {})
    for attempt in range(4):
        made = functools.partial(price, step, steps, planned, groups, links, (), split)
        sessions = tuple(p.plan.session for p in planned)
        pipeline = memo.pipeline((given, split, twice, *((s.first, s.cluster.name) for s in sites)),
                                 sessions, made)  # fmt: skip
        tasks = _obeying(_order(order, pipeline), pairs, pipeline)
        peaks = check(pipeline, tasks).peak
        over = [g for g, limit in enumerate(limits) if peaks[g].bytes > limit]
        if not over:
            break
        less = excess([peak.bytes for peak in peaks], limits, twice)
        again = [narrow[g] for g in less]
        ways = rounded([under_way(pipeline, g, tasks[g]) for g in less])
        for g, p, way in zip(less, again, ways):
            # what it keeps counts as often as it is kept
            if attempt == 0 and way > rooms[p].under_way:
                rooms[p] = Room(memory, way)
            else:
                rooms[p] = less_room(rooms[p], planned[p], less[g])
        rooms = alike(rooms, again)
        if attempt == 3 or min(room.memory for room in rooms) <= 0:
            error = InfeasibleError(_too_much(over, peaks, limits))
            error.need = max(peaks[g].bytes for g in over)
            raise error
        planned = plan(rooms, again, dict(enumerate(planned)))
    if alone:
        planned = tuple(map(named, planned))
    found = PipelinePlan(
        cluster=cluster.to_dict(),
        changes=whole.changes,
        clusters=tuple(c.to_dict() for c in clusters),
        first=tuple(site.first for site in sites),
        plans=tuple(p.plan for p in planned),
        order=tasks,
        pipeline=replace(pipeline, limits=tuple(limits)),
        notes=tuple(dict.fromkeys(note for p in planned for note in p.plan.notes)),
        parts=Parts(whole, step, steps, planned),
    )
    return with_dispatch(found, cluster, dispatch_limit) if dispatch else found


def with_step(plan: PipelinePlan, traced: Traced) -> PipelinePlan:
    """A plan that was read from a file, with the step that it was made for: it can run again.

    No search. Raises PlanError where the step is another one.
    """
    whole = traced.rewritten(plan.changes)
    step = staged(whole)
    steps = tuple(stage_step(step, place) for place in range(len(plan.plans)))
    planned = tuple(planner.follow_plan(s.traced, each) for s, each in zip(steps, plan.plans))
    return replace(plan, parts=Parts(whole, step, steps, planned))


def price_stage(
    traced: Traced,
    cluster: Cluster,
    *,
    begin: tuple[int, int],
    end: tuple[int, int] | None,
    micro: int,
    batch: Sequence[tuple[int, int]],
    loss: int = 0,
    constraints: Any = (),
    changes: Sequence[Change] = (),
    memory: float = planner.MEMORY,
    time_limit: float = planner.TIME_LIMIT,
    split: bool = False,
) -> tuple[StageWork, planner.Planned]:
    """What one stage costs on a cluster of its own, whatever the others are, and its plan.

    begin, end: (equation, iteration) of the loss, end exclusive; None: to its end. batch: the
    loss's arguments that hold the batch (`coshard.batch_of`). split: weight gradients apart.
    Raises as `plan_pipeline`.
    """
    points = [(0, 0, 0)] if begin > (0, 0) else []
    for at in (begin, end):
        if at is not None:
            points.append((*at, len(points)))
    cut = Stages(loss, tuple(points))
    step = staged(traced.changed((*changes, cut, Accumulate(loss, micro, tuple(batch)))))
    place = 1 if begin > (0, 0) else 0
    mine = stage_step(step, place)
    planned = planner.plan_step(
        mine.traced, cluster, constraints=planner.listed(constraints), memory=memory,
        time_limit=time_limit,
    )  # fmt: skip
    return work_of(step, place, mine, planned, split), planned


def _cut(
    traced: Traced, stages: int | Stages | None, lines: Sequence[Any], loss: int
) -> tuple[Stages, tuple[tuple[int, int], ...]]:
    """(the cut, the loss's arguments that hold the batch)."""
    if not traced.losses:
        raise PlanError(
            "a pipeline needs to know the loss of the step: use jaxscaler.value_and_grad (or grad) "
            "in place of JAX's"
        )
    if lines and stages is not None:
        raise ConstraintError("stages= says the cut, and so do lines with Stage(k): leave one out")
    graph = build(traced)
    batch = batch_of(graph, loss, traced.losses[loss])
    if isinstance(stages, Stages):
        return stages, batch
    units = units_of(traced, graph, loss, dict(batch))
    if lines:
        return cut_by_lines(traced, graph, units, loss, lines), batch
    if stages is None:
        raise ConstraintError(
            "a pipeline needs its stages: stages=, or lines op_assign(region(...), Stage(k))"
        )
    return even_cut(units, loss, stages), batch


class _Site(NamedTuple):
    """Where a place is: its devices from `first` on, as a cluster, and its device groups."""

    first: int
    cluster: Cluster
    groups: tuple[int, ...]


def _sites(
    cluster: Cluster | Mixed, submeshes: Sequence[int | Cluster | str] | None, places: int
) -> list[_Site]:
    if submeshes is None and isinstance(cluster, Mixed) and len(cluster.parts) == places:
        submeshes = [part.num_devices for part in cluster.parts]
    elif submeshes is None:
        submeshes = [cluster.num_devices // places] * places
    if len(submeshes) != places:
        raise ConstraintError(f"submeshes for {len(submeshes)} stages, and there are {places}")
    narrow = [s for s in submeshes if not isinstance(s, str)]
    if any(s != ALL for s in submeshes if isinstance(s, str)) or not narrow:
        raise ConstraintError(f"submeshes={submeshes}: numbers, clusters or ALL, and not all ALL")
    sizes = [s if isinstance(s, int) else s.num_devices for s in narrow]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    given = [s for s in narrow if isinstance(s, Cluster)]
    parts = given if len(given) == len(narrow) else sub_clusters(cluster, sizes)
    whole = sub_clusters(cluster, [sum(sizes)])[0] if len(narrow) < places else None
    found, rank = [], 0
    for s in submeshes:
        if isinstance(s, str):
            assert whole is not None
            found.append(_Site(0, whole, tuple(range(len(narrow)))))
        else:
            own = s if isinstance(s, Cluster) else parts[rank]
            found.append(_Site(starts[rank], own, (rank,)))
            rank += 1
    return found


def _links(cluster: Cluster | Mixed, sites: Sequence[_Site]) -> dict[tuple[int, int], Link]:
    """What connects two places; if one is part of the other, the slowest link."""
    return {
        (i, j): cluster.levels[0].link
        if isinstance(cluster, Cluster) and (len(a.groups) > 1 or len(b.groups) > 1)
        else link_between(cluster, a.first, b.first)
        for i, a in enumerate(sites)
        for j, b in enumerate(sites)
        if i != j
    }


def _planned(
    memo: Memo,
    changes: tuple[Change, ...],
    steps: Sequence[StageStep],
    clusters: Sequence[Cluster],
    constraints: Sequence[Statement | Plan],
    time_limit: float,
    say: planner.Progress,
    explained: bool,
    rooms: Sequence[Room],
    places: Sequence[int],
    known: dict[int, planner.Planned],
) -> tuple[planner.Planned, ...]:
    """[place]: its step planned; those of `places` anew."""
    unmatched: list[set[str]] = []

    def search(p: int, axes: Axes | None) -> planner.Planned:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = planner.plan_step(
                replace(steps[p].traced, under_way=rooms[p].under_way), clusters[p],
                constraints=constraints, memory=rooms[p].memory,
                time_limit=time_limit / len(steps), progress=say, explained=explained,
                author=Author(axes),
            )  # fmt: skip
        unmatched.append({str(w.message) for w in caught})
        return found

    for p in places:
        say("stage", f"{p} of {len(steps)} on {clusters[p].name}")
        try:
            known[p] = memo.plan(
                changes, steps[p], clusters[p], rooms[p], functools.partial(search, p)
            )
        except InfeasibleError as cause:
            error = type(cause)(f"stage {p} on {clusters[p].name}: {cause}")
            error.need = cause.need
            raise error from cause
    for text in set.intersection(*unmatched) if unmatched else ():  # of a line for some stage
        warnings.warn(text, stacklevel=3)
    return tuple(known[p] for p in range(len(steps)))


def _under_way_anyhow(
    order: Any, step: Staged, groups: Sequence[tuple[int, ...]], split: bool
) -> float:
    """Micro-batches under way at most, where a family has all groups hold about as many, whatever
    stages take; else 1."""
    if not isinstance(order, str):
        return 1.0
    works = (StageWork(groups[p], 1.0, 2.0, 1.0 if split else None) for p in step.places)
    pipeline = Pipeline(tuple(works), step.loop.micro)
    try:
        ways = [under_way(pipeline, g, mine) for g, mine in enumerate(family(order, pipeline))]
    except ScheduleError:  # it does not apply to stages like these
        return 1.0
    return max(ways) if max(ways) < ALIKE * min(ways) else 1.0


def _order(order: Any, pipeline: Pipeline) -> Order:
    if isinstance(order, str):
        return family(order, pipeline)
    given = order(pipeline) if callable(order) else order
    found = [[Task(*task) for task in mine] for mine in given]
    for g, mine in enumerate(found):  # updates come last
        updates = [Task(s, NO_MICRO, UPDATE) for s in pipeline.stages_of(g)
                   if pipeline.stages[s].update is not None]  # fmt: skip
        mine += [task for task in updates if task not in mine]
    return tuple(map(tuple, found))


def is_task_order(line: Any) -> bool:
    return isinstance(line, program.Order) and isinstance(line.first, tuple)


def _obeying(order: Order, pairs: Sequence[program.Order], pipeline: Pipeline) -> Order:
    """The order with `op_order(task, task)` lines kept: what has to wait comes later, all else as
    it was. Raises ScheduleError where a task is none of the pipeline, or waits in a circle."""
    if not pairs:
        return order
    graph = task_graph(pipeline)
    waits: dict[Task, set[Task]] = {
        task: {graph.tasks[need.task] for need in needs}
        for task, needs in zip(graph.tasks, graph.needs)
    }
    for line in pairs:
        assert isinstance(line.first, tuple) and isinstance(line.then, tuple)
        first, then = Task(*line.first), Task(*line.then)
        if unknown := [task for task in (first, then) if task not in waits]:
            raise ScheduleError(f"{line} ({line.source}): there is no {unknown[0]}")
        if not {*pipeline.stages[first.stage].groups} & {*pipeline.stages[then.stage].groups}:
            raise ScheduleError(
                f"{line} ({line.source}): the two run on different devices, which nothing but data "
                "flow puts in order"
            )
        waits[then].add(first)
    left, found = [list(mine) for mine in order], [[] for _ in order]
    done: set[Task] = set()
    while any(left):
        ready = [next((t for t in mine if waits[t] <= done), None) for mine in left]
        ready = [
            t if t is not None and all(ready[g] == t for g in pipeline.stages[t.stage].groups)
            else None for t in ready
        ]  # fmt: skip
        if not any(t is not None for t in ready):
            stuck = "; ".join(str(mine[0]) for mine in left if mine)
            raise ScheduleError(
                f"with {'; '.join(map(str, pairs))} tasks wait in a circle: {stuck}"
            )
        for g, task in enumerate(ready):
            if task is not None:
                left[g].remove(task)
                found[g].append(task)
        done.update(t for t in ready if t is not None)
    return tuple(map(tuple, found))


def _has_weights(order: Any) -> bool:
    explicit = not isinstance(order, str) and not callable(order)
    return explicit and any(task[2] == "W" for mine in order for task in mine)


def _too_much(over: Sequence[int], peaks: Sequence[Any], limits: Sequence[float]) -> str:
    texts = [
        f"device group {g} holds {peaks[g].bytes / 1e9:.3g} GB with the micro-batches under way, "
        f"and may {limits[g] / 1e9:.3g}"
        for g in over
    ]
    return (
        f"{'; '.join(texts)}: take more micro-batches, an order with fewer of them under way (1f1b)"
        ", more devices, or recomputation (changes=)"
    )
