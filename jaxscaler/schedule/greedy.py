"""List scheduling: always the task that can start first; of several, the most urgent one.

One engine for orders of every shape: a family is what its tasks wait for beside their data, and
which of them goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.tasks import BACKWARD, FORWARD, Order, Pipeline, Task, task_graph

Rank = Callable[[Task], tuple]
After = Callable[[Task], Iterable[Task]]

_URGENCY = {"B": 0, "F": 1, "W": 2, "U": 3}


def urgent(task: Task) -> tuple:
    """Backward first, then what is further on its way, then older micro-batches."""
    return (_URGENCY[task.phase], -task.stage, task.micro)


def heights(pipeline: Pipeline) -> list[int]:
    """[stage]: stages on the longest way from it to an end of the pipeline, itself included.

    In a 1F1B order a stage holds so many micro-batches: one for each stage on the way, and its own.
    """
    height = [1] * len(pipeline.stages)
    for s in reversed(pipeline.each):
        for e in pipeline.feeds[s]:
            height[s] = max(height[s], height[e.target] + 1)
    return height


def capped(pipeline: Pipeline, caps: Sequence[int]) -> After:
    """At most caps[stage] micro-batches of a stage between F and B.

    A stage without B counts up to the B of the next stage on a group of its own, if there is one:
    the visits of a micro-batch that are not differentiated do not run ahead of the last one.
    """
    back = [_returns(pipeline, s) for s in pipeline.each]

    def after(task: Task) -> Iterable[Task]:
        s, m, phase = task
        b = back[s]
        if phase == FORWARD and b is not None:
            yield Task(b, m - caps[s] * pipeline.stages[s].micros[1], BACKWARD)

    return after


def _returns(pipeline: Pipeline, stage: int) -> int | None:
    """The first stage from `stage` on whose B runs on a group of `stage`."""
    groups = {*pipeline.stages[stage].groups}
    for s in range(stage, len(pipeline.stages)):
        if pipeline.stages[s].backward is not None and groups & {*pipeline.stages[s].groups}:
            return s
    return None


def greedy(
    pipeline: Pipeline,
    after: After = lambda task: (),
    rank: Rank = urgent,
    timed: bool = False,
) -> Order:
    """An order by list scheduling; a stage takes its micro-batches in their order.

    after: further tasks that a task waits for; those that do not exist do not count. rank: the
    least goes first where several can start at one moment. timed: by the pipeline's seconds, else
    each task takes one and a transfer none, so that the order does not depend on times.
    ScheduleError: tasks wait for each other.
    """
    graph = task_graph(pipeline)
    length = graph.seconds if timed else [1.0] * len(graph.tasks)
    waits = [[(n.task, n.seconds if timed else 0.0) for n in needs] for needs in graph.needs]
    for i, task in enumerate(graph.tasks):
        before = task._replace(micro=task.micro - pipeline.stages[task.stage].micros[1])
        for other in (before, *after(task)):
            if (n := graph.index.get(other)) is not None:
                waits[i].append((n, 0.0))
    readers: list[list[int]] = [[] for _ in waits]
    for i, needed in enumerate(waits):
        for n, _ in needed:
            readers[n].append(i)
    left = [len(needed) for needed in waits]
    ranks = [rank(t) for t in graph.tasks]
    groups = [graph.groups(pipeline, i) for i in range(len(waits))]
    free = [0.0] * pipeline.groups
    end = [0.0] * len(waits)
    ready = {i: 0.0 for i, count in enumerate(left) if not count}
    order: list[list[Task]] = [[] for _ in free]
    for _ in waits:
        if not ready:
            raise ScheduleError("no order: every task that is left waits for another one")
        begin, _, i = min(
            (max(at, *(free[g] for g in groups[i])), ranks[i], i) for i, at in ready.items()
        )
        del ready[i]
        end[i] = begin + length[i]
        for g in groups[i]:
            free[g] = end[i]
            order[g].append(graph.tasks[i])
        for r in readers[i]:
            left[r] -= 1
            if not left[r]:
                ready[r] = max(end[n] + delay for n, delay in waits[r])
    return tuple(map(tuple, order))
