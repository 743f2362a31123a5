"""Tasks, orders, and what a pipeline is made of: stages, edges, micro-batches, seconds and bytes.

A *stage* is a part of the step's graph on one or several device groups. A *task* is one phase of
one stage for one micro-batch. An *order* says, per device group, which task runs after which. All
else (when tasks run, what they hold) follows from the order: `check.py`, `simulate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from jaxscaler.errors import ScheduleError

FORWARD, BACKWARD, WEIGHT, UPDATE = "F", "B", "W", "U"
NO_MICRO = -1  # of an update, which belongs to no micro-batch


class Task(NamedTuple):
    """One phase of a stage for one micro-batch.

    phase: "F" forward; "B" backward, both gradients, or only the inputs' where the stage has "W";
    "W" weight gradients; "U" update (its `micro` is `NO_MICRO`).
    """

    stage: int
    micro: int
    phase: str

    def __str__(self) -> str:
        at = "" if self.micro == NO_MICRO else f" of micro-batch {self.micro}"
        return f"{self.phase}{at} on stage {self.stage}"


Order = tuple[tuple[Task, ...], ...]  # [device group]: the tasks it runs, in order


@dataclass(frozen=True)
class StageWork:
    """What a stage does for one micro-batch, and where.

    groups: the device groups that run it; with several, all of them run each of its tasks
    together (an interlaced stage). Several stages may name one group: chunks of an interleaved
    pipeline, visits of a recycled one (a stage a visit), the two directions of Chimera.

    forward, backward, weight, update: seconds of a task of that phase; None: there is no such
    task. backward None: nothing is differentiated (inference, a frozen part, a visit without
    gradient). weight: with it `backward` is that of the inputs' gradients only.

    kept: bytes a group holds from the start of a micro-batch's F to the end of its B (without B:
    of F). kept_weight: bytes held from there to the end of W. working: bytes beside these while a
    task runs; updating: while the update does (gradients of another copy). static: bytes held all
    along; of stages that share parameters on a group, one has them.

    micros: (first, step): the stage takes micro-batches first, first + step, ... (Chimera: two
    directions take turns). shares: other stages whose gradients this stage's update needs as well:
    visits, copies, tied parameters.
    """

    groups: tuple[int, ...]
    forward: float
    backward: float | None = None
    weight: float | None = None
    update: float | None = None
    kept: float = 0.0
    kept_weight: float = 0.0
    working: float = 0.0
    static: float = 0.0
    micros: tuple[int, int] = (0, 1)
    shares: tuple[int, ...] = ()
    name: str = ""
    updating: float = 0.0

    def seconds(self, phase: str) -> float | None:
        """Seconds of a task of `phase`; None where the stage has none."""
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            WEIGHT: self.weight,
            UPDATE: self.update,
        }[phase]

    @property
    def phases(self) -> str:
        """The phases it has for every micro-batch, a substring of "FBW"."""
        return "".join(p for p in "FBW" if self.seconds(p) is not None)


class Edge(NamedTuple):
    """Stage `target` reads what stage `source` makes, and hands a gradient back.

    seconds: of the transfer, each way; 0 where both are on one group. bytes: what lies at the
    reader's groups from the end of the making task to the start of the reading one.
    """

    source: int
    target: int
    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """Stages in topological order, what flows between them, and the limits of the devices.

    micro: micro-batches of a step. edges: None is a chain without transfer time. limits: bytes
    that each group may hold (empty: no limit). barrier: seconds between the last gradient of all
    stages and the first update (clipping by the global norm); None: a stage updates when its own
    gradients are there.

    ScheduleError: a stage without a group, an edge against the order of stages, times below 0, a
    stage that is differentiated though nothing behind it is.
    """

    stages: tuple[StageWork, ...]
    micro: int
    edges: tuple[Edge, ...] | None = None
    limits: tuple[float, ...] = ()
    barrier: float | None = None

    def __post_init__(self) -> None:
        if self.edges is None:
            chained = tuple(Edge(s, s + 1) for s in range(len(self.stages) - 1))
            object.__setattr__(self, "edges", chained)
        _validate(self)

    @cached_property
    def groups(self) -> int:
        """How many device groups there are."""
        return 1 + max(g for stage in self.stages for g in stage.groups)

    @cached_property
    def reads(self) -> tuple[tuple[Edge, ...], ...]:
        """[stage]: the edges that end at it."""
        return tuple(tuple(e for e in self.edges or () if e.target == s) for s in self.each)

    @cached_property
    def feeds(self) -> tuple[tuple[Edge, ...], ...]:
        """[stage]: the edges that begin at it."""
        return tuple(tuple(e for e in self.edges or () if e.source == s) for s in self.each)

    @property
    def each(self) -> range:
        return range(len(self.stages))

    def micros(self, stage: int) -> range:
        """The micro-batches that a stage takes."""
        first, step = self.stages[stage].micros
        return range(first, self.micro, step)

    def stages_of(self, group: int) -> tuple[int, ...]:
        return tuple(s for s in self.each if group in self.stages[s].groups)

    def called(self, stage: int) -> str:
        """A stage as errors and pictures name it."""
        name = self.stages[stage].name
        return f"{stage} ({name})" if name else str(stage)


def _validate(pipeline: Pipeline) -> None:
    count = len(pipeline.stages)
    if not count or pipeline.micro < 1:
        raise ScheduleError(
            f"a pipeline needs a stage and a micro-batch; it has {count} and {pipeline.micro}"
        )
    for s, stage in enumerate(pipeline.stages):
        times = [t for p in "FBWU" if (t := stage.seconds(p)) is not None]
        held = (stage.kept, stage.kept_weight, stage.working, stage.updating, stage.static)
        if min(*times, *held, 0.0) < 0:
            raise ScheduleError(f"stage {pipeline.called(s)}: seconds and bytes may not be below 0")
        if not stage.groups or min(stage.groups) < 0 or len({*stage.groups}) < len(stage.groups):
            raise ScheduleError(
                f"stage {pipeline.called(s)} needs device groups, each once and from 0 on; "
                f"it has {stage.groups}"
            )
        if stage.weight is not None and stage.backward is None:
            raise ScheduleError(f"stage {pipeline.called(s)} has W tasks but no B tasks")
        first, step = stage.micros
        if not 0 <= first < step:
            raise ScheduleError(
                f"stage {pipeline.called(s)}: micros (first, step) need 0 <= first < step; "
                f"it has {stage.micros}"
            )
    for edge in pipeline.edges or ():
        if not 0 <= edge.source < edge.target < count or edge.seconds < 0 or edge.bytes < 0:
            raise ScheduleError(
                f"{edge} does not lead from a stage to a later one in a time of at least 0; number "
                "the stages so that each comes after what it reads"
            )
    for s, stage in enumerate(pipeline.stages):
        behind = [pipeline.stages[e.target].backward for e in pipeline.feeds[s]]
        if stage.backward is not None and behind and all(b is None for b in behind):
            raise ScheduleError(
                f"stage {pipeline.called(s)} has B tasks, but no stage that reads it hands a "
                "gradient back"
            )
        unknown = [t for t in stage.shares if not 0 <= t < count or t == s]
        if unknown:
            raise ScheduleError(f"stage {pipeline.called(s)} shares parameters with {unknown}")
    empty = set(range(pipeline.groups)) - {g for s in pipeline.stages for g in s.groups}
    if empty:
        raise ScheduleError(f"device groups {sorted(empty)} run no stage; number them from 0 on")
    if pipeline.limits and len(pipeline.limits) != pipeline.groups:
        raise ScheduleError(
            f"{len(pipeline.limits)} memory limits for {pipeline.groups} device groups"
        )


def tasks(pipeline: Pipeline) -> Iterator[Task]:
    """Every task of a step: stage by stage, micro-batch by micro-batch, phase by phase."""
    for s, stage in enumerate(pipeline.stages):
        for m in pipeline.micros(s):
            yield from (Task(s, m, phase) for phase in stage.phases)
        if stage.update is not None:
            yield Task(s, NO_MICRO, UPDATE)


class Need(NamedTuple):
    """A task must have ended and its result arrived, `seconds` later; `bytes` wait there."""

    task: int  # position in TaskGraph.tasks
    seconds: float
    bytes: float


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a step by position, and what each needs before it can start."""

    tasks: tuple[Task, ...]
    index: dict[Task, int]
    seconds: tuple[float, ...]
    needs: tuple[tuple[Need, ...], ...]

    def groups(self, pipeline: Pipeline, i: int) -> tuple[int, ...]:
        return pipeline.stages[self.tasks[i].stage].groups


@lru_cache(maxsize=64)
def task_graph(pipeline: Pipeline) -> TaskGraph:
    """The tasks of a pipeline with their dependences.

    F(s, m) needs F of the stages it reads; B(s, m) needs F(s, m) and B of the stages that read it
    (those that have one); W(s, m) needs B(s, m); the update needs all gradients of its stage and
    of those that share parameters with it, with a barrier those of all stages.
    """
    every = tuple(tasks(pipeline))
    index = {task: i for i, task in enumerate(every)}
    seconds = tuple(pipeline.stages[t.stage].seconds(t.phase) or 0.0 for t in every)

    def needs(task: Task) -> Iterator[Need]:
        s, m, phase = task
        if phase == FORWARD:
            for e in pipeline.reads[s]:
                if (source := index.get(Task(e.source, m, FORWARD))) is not None:
                    yield Need(source, e.seconds, e.bytes)
        elif phase == BACKWARD:
            yield Need(index[Task(s, m, FORWARD)], 0.0, 0.0)
            for e in pipeline.feeds[s]:
                if (source := index.get(Task(e.target, m, BACKWARD))) is not None:
                    yield Need(source, e.seconds, e.bytes)
        elif phase == WEIGHT:
            yield Need(index[Task(s, m, BACKWARD)], 0.0, 0.0)
        else:
            awaited = (s, *pipeline.stages[s].shares)
            delay = pipeline.barrier
            for t in awaited if delay is None else pipeline.each:
                last = pipeline.stages[t].phases[-1]
                for n in pipeline.micros(t):
                    if last != FORWARD:
                        yield Need(index[Task(t, n, last)], delay or 0.0, 0.0)

    return TaskGraph(every, index, seconds, tuple(tuple(needs(t)) for t in every))


def uniform(
    stages: int,
    micro: int,
    forward: float = 1.0,
    backward: float | None = 2.0,
    weight: float | None = None,
    update: float | None = None,
    *,
    chunks: int = 1,
    transfer: float = 0.0,
    kept: float = 1.0,
    kept_weight: float = 0.0,
    limits: tuple[float, ...] = (),
) -> Pipeline:
    """A chain of stages * chunks equal stages on `stages` device groups, in turns.

    forward, backward, weight: seconds of a group for one micro-batch, so a chunk takes a
    `chunks`-th of each (and of `kept`, `kept_weight`). transfer: seconds between groups.
    """

    def part(value: float | None) -> float | None:
        return None if value is None else value / chunks

    count = stages * chunks
    work = tuple(
        StageWork(
            groups=(s % stages,),
            forward=forward / chunks,
            backward=part(backward),
            weight=part(weight),
            update=part(update),
            kept=kept / chunks,
            kept_weight=kept_weight / chunks,
        )
        for s in range(count)
    )
    moved = transfer if stages > 1 else 0.0
    edges = tuple(Edge(s, s + 1, moved) for s in range(count - 1))
    return Pipeline(work, micro, edges, limits)


def mirrored(pipeline: Pipeline, exchange: float = 0.0) -> Pipeline:
    """The same stages a second time in the other direction, as Chimera has them.

    Even micro-batches go through the stages as they are, odd ones through copies on the groups in
    reverse. Copies have parameters (`static`) of their own. exchange: seconds by which an update
    takes longer, as the gradients of both copies are added first.

    Source: Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with
    Bidirectional Pipelines, SC 2021.
    """
    count, last = len(pipeline.stages), pipeline.groups - 1

    def copy(s: int, way: int) -> StageWork:
        stage = pipeline.stages[s]
        return replace(
            stage,
            groups=tuple(sorted(last - g for g in stage.groups)) if way else stage.groups,
            update=None if stage.update is None else stage.update + exchange,
            micros=(way, 2),
            shares=tuple(
                sorted({t + d for t in (s, *stage.shares) for d in (0, count)} - {s + way * count})
            ),
        )

    if any(stage.micros != (0, 1) for stage in pipeline.stages):
        raise ScheduleError("only a pipeline whose stages take every micro-batch can be mirrored")
    both = tuple(copy(s, way) for way in (0, 1) for s in pipeline.each)
    back = tuple(Edge(e.source + count, e.target + count, *e[2:]) for e in pipeline.edges or ())
    return replace(pipeline, stages=both, edges=(*(pipeline.edges or ()), *back))
