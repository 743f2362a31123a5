"""An order as one sequence of tasks that respects it and all dependences, or the cycle in it.

Transfers are asynchronous and buffered: sending blocks nobody, so groups can wait for each other
for ever exactly if the tasks' dependences and the groups' orders together have a cycle. The
sequence is also what one thread, or each of several processes, can dispatch without a deadlock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.tasks import Order, Pipeline, Task, TaskGraph, task_graph

SHOWN = 12  # tasks that an error lists


def sequence(pipeline: Pipeline, order: Order) -> list[int]:
    """Positions in `task_graph(pipeline).tasks`, so that all runs after what it waits for.

    ScheduleError: a task is missing, twice, unknown or on a group that it does not belong to; or
    tasks wait for each other, and the error names the cycle.
    """
    graph = task_graph(pipeline)
    _complete(pipeline, order, graph)
    waits = [[n.task for n in needs] for needs in graph.needs]
    for line in order:
        for before, after in pairwise(line):
            waits[graph.index[after]].append(graph.index[before])
    readers: list[list[int]] = [[] for _ in waits]
    for i, needed in enumerate(waits):
        for n in needed:
            readers[n].append(i)
    left = [len(needed) for needed in waits]
    done = [i for i, count in enumerate(left) if not count]
    for i in done:
        for reader in readers[i]:
            left[reader] -= 1
            if not left[reader]:
                done.append(reader)
    if len(done) < len(waits):
        cycle = _cycle(waits, left)
        raise ScheduleError(
            "the order has tasks that wait for each other: "
            + " -> ".join(_link(pipeline, order, graph, a, b) for a, b in pairwise(cycle))
            + f" -> {graph.tasks[cycle[-1]]}"
        )
    return done


def _complete(pipeline: Pipeline, order: Order, graph: TaskGraph) -> None:
    if len(order) != pipeline.groups:
        raise ScheduleError(f"an order of {len(order)} device groups; there are {pipeline.groups}")
    wrong: dict[str, list[str]] = defaultdict(list)
    for g, line in enumerate(order):
        count = Counter(Task(*task) for task in line)
        for task, times in count.items():
            if task not in graph.index:
                wrong["are no task of the pipeline"].append(str(task))
            elif g not in pipeline.stages[task.stage].groups:
                wrong["do not belong there"].append(f"{task} (on group {g})")
            elif times > 1:
                wrong[f"are there more than once on group {g}"].append(str(task))
        for task in graph.tasks:
            if g in pipeline.stages[task.stage].groups and task not in count:
                wrong[f"are missing on group {g}"].append(str(task))
    if wrong:
        raise ScheduleError("tasks of the order " + "; ".join(
            f"{what}: {', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
            for what, names in wrong.items()
        ))  # fmt: skip


def _cycle(waits: list[list[int]], left: list[int]) -> list[int]:
    """A shortest cycle through some task that never ran, its first task again at the end."""
    stuck = {i for i, count in enumerate(left) if count}
    at, seen = min(stuck), []
    while at not in seen:  # back along what is waited for: from there on it is a cycle
        seen.append(at)
        at = next(n for n in waits[at] if n in stuck)
    came: dict[int, int] = {}
    layer = [at]
    while at not in came:
        following = []
        for i in layer:
            for n in waits[i]:
                if n in stuck and n not in came:
                    came[n] = i
                    following.append(n)
        layer = following
    path = [at]
    while len(path) == 1 or path[-1] != at:
        path.append(came[path[-1]])
    return path


def _link(pipeline: Pipeline, order: Order, graph: TaskGraph, first: int, then: int) -> str:
    """A task of a cycle and why the next one waits for it."""
    if any(n.task == first for n in graph.needs[then]):
        return f"{graph.tasks[first]} (whose result the next needs)"
    before, after = graph.tasks[first], graph.tasks[then]
    group = next(g for g, line in enumerate(order) if (before, after) in set(pairwise(line)))
    return f"{before} (ahead of the next on group {group})"
