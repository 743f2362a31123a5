"""When the tasks of an order run, what idles, what is held: a simulation of one step.

Each group runs its tasks in order, each as soon as the group is free, what it needs has arrived,
and the host has dispatched it. Transfers take their time and no link is shared. Stages on several
groups start when all of them are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from jaxscaler.schedule.linear import sequence
from jaxscaler.schedule.tasks import (
    BACKWARD,
    FORWARD,
    UPDATE,
    WEIGHT,
    Order,
    Pipeline,
    Task,
    task_graph,
)

ROUNDING = 1e-9  # of a limit, by which sums of bytes may exceed it


@dataclass(frozen=True)
class Timeline:
    """A simulated step. start, end: seconds, by position in `tasks`. dispatch: seconds a task."""

    pipeline: Pipeline
    order: Order
    tasks: tuple[Task, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    dispatch: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the step, from its first task's start to its last one's end."""
        return max(self.end)

    @cached_property
    def when(self) -> dict[Task, tuple[float, float]]:
        return {t: (s, e) for t, s, e in zip(self.tasks, self.start, self.end)}

    @property
    def period(self) -> float:
        """Seconds between steps where a group begins the next one as soon as it is done with this.

        The longest time from a group's first task to its last: never more than `seconds`.
        """
        return max(self.when[line[-1]][1] - self.when[line[0]][0] for line in self.order if line)

    @property
    def busy(self) -> tuple[float, ...]:
        """[group]: seconds in which it computes."""
        return tuple(sum(self.when[t][1] - self.when[t][0] for t in line) for line in self.order)

    @property
    def bubble(self) -> tuple[float, ...]:
        """[group]: share of the step in which it idles."""
        return tuple(1 - b / self.seconds if self.seconds else 0.0 for b in self.busy)

    @property
    def peak(self) -> tuple[Peak, ...]:
        """[group]: the most it holds, and when."""
        return tuple(max(profile, key=lambda p: p.bytes) for profile in self.held)

    @cached_property
    def held(self) -> tuple[tuple[Peak, ...], ...]:
        """[group]: bytes held from a moment on, in the order of time."""
        pipeline = self.pipeline
        changes: list[list[tuple[float, bool, float]]] = [[] for _ in range(pipeline.groups)]
        times = (self.start, self.end)
        for held in holdings(pipeline):
            first, last = (times[side][i] for i, side in (held.since, held.until))
            if last > first:
                for g in held.groups:
                    changes[g] += [(first, True, held.bytes), (last, False, -held.bytes)]
        profiles = []
        for g, events in enumerate(changes):
            static = sum(pipeline.stages[s].static for s in pipeline.stages_of(g))
            events.sort()  # at one moment what is let go comes first
            sizes = accumulate((e[2] for e in events), initial=static)
            moments = (0.0, *(e[0] for e in events))
            profiles.append(tuple(Peak(b, at) for b, at in zip(sizes, moments)))
        return tuple(profiles)


class Peak(NamedTuple):
    """Bytes that a group holds at a moment (seconds)."""

    bytes: float
    seconds: float


def simulate(pipeline: Pipeline, order: Order, dispatch: float = 0.0) -> Timeline:
    """Run one step of an order.

    dispatch: seconds of the one host thread that dispatches the tasks of all groups, per task. It
    takes them in the order in which they would start if it took no time. ScheduleError: the order
    is incomplete or has a cycle.
    """
    graph = task_graph(pipeline)
    steps = sequence(pipeline, order)
    start, end = _times(pipeline, steps, [0.0] * len(steps))
    if dispatch:
        queued = sorted(range(len(steps)), key=lambda k: (start[steps[k]], k))
        ready = [0.0] * len(steps)
        for place, k in enumerate(queued, 1):
            ready[steps[k]] = place * dispatch
        start, end = _times(pipeline, steps, ready)
    return Timeline(pipeline, order, graph.tasks, tuple(start), tuple(end), dispatch)


def fits(timeline: Timeline) -> bool:
    """Whether no group holds more than its limit."""
    limits = timeline.pipeline.limits
    return not limits or all(
        peak.bytes <= limit * (1 + ROUNDING) for limit, peak in zip(limits, timeline.peak)
    )


def dispatch_order(pipeline: Pipeline, order: Order) -> tuple[Task, ...]:
    """All tasks as one thread dispatches them: by their simulated start, after all they wait for.

    Each group's part of it is its order, so processes that each run their part of this one
    sequence cannot wait for each other for ever.
    """
    graph, steps = task_graph(pipeline), sequence(pipeline, order)
    starts, _ = _times(pipeline, steps, [0.0] * len(steps))
    place = {i: k for k, i in enumerate(steps)}
    return tuple(graph.tasks[i] for i in sorted(steps, key=lambda i: (starts[i], place[i])))


def _times(
    pipeline: Pipeline, steps: list[int], ready: list[float]
) -> tuple[list[float], list[float]]:
    graph = task_graph(pipeline)
    free = [0.0] * pipeline.groups
    start, end = [0.0] * len(steps), [0.0] * len(steps)
    for i in steps:
        groups = graph.groups(pipeline, i)
        begin = max(ready[i], max(free[g] for g in groups))
        for need in graph.needs[i]:
            begin = max(begin, end[need.task] + need.seconds)
        start[i] = begin
        end[i] = stop = begin + graph.seconds[i]
        for g in groups:
            free[g] = stop
    return start, end


class Holding(NamedTuple):
    """Bytes that groups hold from one task's start or end (0, 1) to another's."""

    groups: tuple[int, ...]
    bytes: float
    since: tuple[int, int]
    until: tuple[int, int]


@lru_cache(maxsize=64)
def holdings(pipeline: Pipeline) -> tuple[Holding, ...]:
    """Everything that is held for a part of the step."""
    graph = task_graph(pipeline)
    found = []
    for i, task in enumerate(graph.tasks):
        stage = pipeline.stages[task.stage]
        if task.phase == FORWARD:
            last = i if stage.backward is None else graph.index[task._replace(phase=BACKWARD)]
            found.append(Holding(stage.groups, stage.kept, (i, 0), (last, 1)))
        elif task.phase == WEIGHT:
            first = graph.index[task._replace(phase=BACKWARD)]
            found.append(Holding(stage.groups, stage.kept_weight, (first, 1), (i, 1)))
        working = stage.updating if task.phase == UPDATE else stage.working
        found.append(Holding(stage.groups, working, (i, 0), (i, 1)))
        if task.phase != UPDATE:
            for need in graph.needs[i]:
                found.append(Holding(stage.groups, need.bytes, (need.task, 1), (i, 0)))
    return tuple(h for h in found if h.bytes)
