"""A proved lower bound of the step: no order of these tasks ends sooner."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from jaxscaler.schedule.simulate import ROUNDING
from jaxscaler.schedule.tasks import BACKWARD, FORWARD, Pipeline, Task, task_graph


def least_seconds(pipeline: Pipeline) -> float:
    """No order that fits into memory takes less.

    For each group the best preemptive schedule of its tasks, each between the longest way that
    leads to it (head) and the longest one from it to the end of the step (tail). Source: Jackson's
    preemptive schedule, Carlier, The one-machine sequencing problem, 1982.
    """
    graph = task_graph(pipeline)
    waits = waits_of(pipeline)
    order = topological(waits)
    head = [0.0] * len(waits)
    for i in order:
        for n, delay in waits[i]:
            head[i] = max(head[i], head[n] + graph.seconds[n] + delay)
    tail = [0.0] * len(waits)
    for i in reversed(order):
        for n, delay in waits[i]:
            tail[n] = max(tail[n], tail[i] + graph.seconds[i] + delay)
    least = 0.0
    for g in range(pipeline.groups):
        mine = [i for i in order if g in graph.groups(pipeline, i)]
        least = max(least, _preemptive([(head[i], graph.seconds[i], tail[i]) for i in mine]))
    return least


def critical(pipeline: Pipeline) -> float:
    """Seconds of the longest way through the tasks' data alone."""
    graph = task_graph(pipeline)
    waits = [[(n.task, n.seconds) for n in needs] for needs in graph.needs]
    end = [0.0] * len(waits)
    for i in topological(waits):
        end[i] = graph.seconds[i] + max((end[n] + delay for n, delay in waits[i]), default=0.0)
    return max(end)


def waits_of(pipeline: Pipeline) -> list[list[tuple[int, float]]]:
    """[task]: (task that must have ended, delay): its data, its turn, and its room.

    Turn: the same task of the micro-batch before. Micro-batches of a stage are alike: sorting each
    phase of each stage by time turns any order into one where they pass in turn, in the same time
    and bytes. Room: F waits for the B of the micro-batch that makes place for it.
    """
    graph = task_graph(pipeline)
    waits = [[(n.task, n.seconds) for n in needs] for needs in graph.needs]
    most = [_most(pipeline, s) for s in pipeline.each]
    for i, task in enumerate(graph.tasks):
        step = pipeline.stages[task.stage].micros[1]
        if (n := graph.index.get(task._replace(micro=task.micro - step))) is not None:
            waits[i].append((n, 0.0))
        if task.phase == FORWARD and (count := most[task.stage]) is not None:
            old = Task(task.stage, task.micro - count * step, BACKWARD)
            if (n := graph.index.get(old)) is not None:
                waits[i].append((n, 0.0))
    return waits


def _most(pipeline: Pipeline, s: int) -> int | None:
    """Micro-batches of a stage that fit into its groups, were it alone there; None: any number."""
    stage = pipeline.stages[s]
    if not pipeline.limits or not stage.kept or stage.backward is None:
        return None
    rooms = [
        pipeline.limits[g]
        - sum(pipeline.stages[t].static for t in pipeline.stages_of(g))
        - stage.working
        for g in stage.groups
    ]
    return max(1, int(min(rooms) / stage.kept * (1 + ROUNDING)))


def topological(waits: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
    """Positions so that each comes after what it waits for."""
    readers: list[list[int]] = [[] for _ in waits]
    for i, needed in enumerate(waits):
        for n, _ in needed:
            readers[n].append(i)
    left = [len(needed) for needed in waits]
    done = [i for i, count in enumerate(left) if not count]
    for i in done:
        for r in readers[i]:
            left[r] -= 1
            if not left[r]:
                done.append(r)
    return done


def _preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """Least max(end + tail) of interruptible jobs (head, seconds, tail) on one machine."""
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []  # (-tail, seconds left)
    now, least, k = 0.0, 0.0, 0
    while k < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[k][0])
        while k < len(jobs) and jobs[k][0] <= now:
            heapq.heappush(waiting, (-jobs[k][2], jobs[k][1]))
            k += 1
        tail, left = heapq.heappop(waiting)
        until = jobs[k][0] if k < len(jobs) else float("inf")
        if now + left <= until:
            now += left
            least = max(least, now - tail)
        else:
            heapq.heappush(waiting, (tail, left - (until - now)))
            now = until
    return least
