"""A repeating pattern: each task of a micro-batch at an offset, the next one's a period later.

A modulo schedule (Rau, Iterative Modulo Scheduling, 1994): tasks at offsets o, micro-batch m at
o + m * period; on each group the tasks of one period, taken modulo it, do not overlap. What it
costs to find does not depend on the number of micro-batches. Tessel (Lin et al., 2024) searches the
orders of pipelines this way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from jaxscaler import cp_model
from jaxscaler.schedule.bound import topological, waits_of
from jaxscaler.schedule.simulate import holdings
from jaxscaler.schedule.tasks import NO_MICRO, UPDATE, Order, Pipeline, Task, task_graph
from jaxscaler.schedule.window import Ticks, solver_of

AHEAD = 4  # periods beyond the longest way that an offset may lie


@dataclass(frozen=True)
class Pattern:
    """period: seconds between repeats. offsets: seconds of each task of the first `micro` ones."""

    period: float
    micro: int
    offsets: dict[Task, float]

    def order(self, pipeline: Pipeline) -> Order:
        """The pattern repeated until all micro-batches have run; updates at the end."""
        graph, when = task_graph(pipeline), {}
        for i in topological(waits_of(pipeline)):  # of tasks shorter than a tick, what comes first
            task = graph.tasks[i]
            if task.phase != UPDATE:
                repeat, first = divmod(task.micro, self.micro)
                when[task] = self.offsets[task._replace(micro=first)] + repeat * self.period
        lines = []
        for g in range(pipeline.groups):
            mine = [t for t in when if g in pipeline.stages[t.stage].groups]
            updates = [
                Task(s, NO_MICRO, UPDATE)
                for s in pipeline.stages_of(g)
                if pipeline.stages[s].update is not None
            ]
            lines.append((*sorted(mine, key=when.__getitem__), *updates))
        return tuple(lines)


def repeats(pipeline: Pipeline) -> int:
    """Micro-batches of one pattern: 1, or as many as have ways of their own (Chimera: 2)."""
    return lcm(*(stage.micros[1] for stage in pipeline.stages))


def one_repeat(pipeline: Pipeline) -> Pipeline:
    """The micro-batches of one pattern alone, without updates."""
    stages = tuple(replace(stage, update=None) for stage in pipeline.stages)
    return replace(pipeline, stages=stages, micro=repeats(pipeline), barrier=None)


def least_period(pipeline: Pipeline) -> float:
    """No pattern repeats sooner: each group has its work to do, and room for so much in flight."""
    one = one_repeat(pipeline)
    graph = task_graph(one)
    after = _ways(one)
    work, held = [0.0] * one.groups, [0.0] * one.groups
    for i in range(len(graph.tasks)):
        for g in graph.groups(one, i):
            work[g] += graph.seconds[i]
    for h in holdings(one):
        (first, a), (last, b) = h.since, h.until
        way = graph.seconds[first] if first == last else after[first].get(last, 0.0)
        seconds = way - a * graph.seconds[first] + (b * graph.seconds[last] if first != last else 0)
        for g in h.groups:
            held[g] += h.bytes * max(0.0, seconds)
    least = max(work)
    for g, limit in enumerate(one.limits):
        room = limit - sum(one.stages[s].static for s in one.stages_of(g))
        if held[g] > 0:
            least = max(least, held[g] / room if room > 0 else float("inf"))
    return least


def _ways(pipeline: Pipeline) -> list[dict[int, float]]:
    """[task]: for each task that waits for it, the least seconds from its start to that one's."""
    graph = task_graph(pipeline)
    readers: list[list[tuple[int, float]]] = [[] for _ in graph.tasks]
    for i, needs in enumerate(graph.needs):
        for n in needs:
            readers[n.task].append((i, graph.seconds[n.task] + n.seconds))
    ways: list[dict[int, float] | None] = [None] * len(readers)

    def way(i: int) -> dict[int, float]:
        if (known := ways[i]) is None:
            known = {}
            for r, seconds in readers[i]:
                known[r] = max(known.get(r, 0.0), seconds)
                for far, more in way(r).items():
                    known[far] = max(known.get(far, 0.0), seconds + more)
            ways[i] = known
        return known

    return [way(i) for i in range(len(readers))]


def find_pattern(
    pipeline: Pipeline, period: float, tick: Ticks, *, work: float, seed: int = 0
) -> tuple[Pattern | None, float]:
    """A pattern of at most `period` seconds, its micro-batches as short as possible in flight.

    Returns it, None if there is none or none was found, and the deterministic seconds spent.
    """
    one = one_repeat(pipeline)
    graph, model = task_graph(one), cp_model.CpModel()
    length = [tick.of(s) for s in graph.seconds]
    p = max(1, tick.of(period))
    deepest = sum(length) + sum(tick.of(n.seconds) for needs in graph.needs for n in needs)
    turns = deepest // p + AHEAD
    phase = [model.new_int_var(0, p - 1, "") for _ in graph.tasks]
    turn = [model.new_int_var(0, turns, "") for _ in graph.tasks]
    at = [r + p * k for r, k in zip(phase, turn)]
    for i, needs in enumerate(graph.needs):
        for n in needs:
            model.add(at[i] >= at[n.task] + length[n.task] + tick.of(n.seconds))
    for g in range(one.groups):
        line = []
        for i in range(len(graph.tasks)):
            if g in graph.groups(one, i) and length[i]:
                if length[i] > p:
                    return None, 0.0
                line.append(model.new_fixed_size_interval_var(phase[i], length[i], ""))
                line.append(model.new_fixed_size_interval_var(phase[i] + p, length[i], ""))
        model.add_no_overlap(line)
    held = []
    room = [limit - sum(one.stages[s].static for s in one.stages_of(g))
            for g, limit in enumerate(one.limits)]  # fmt: skip
    used: list[list] = [[] for _ in room]
    for h in holdings(one):
        (first, a), (last, b) = h.since, h.until
        count = model.new_int_var(first == last, turns + 1, "")  # of them at once
        if first != last:
            model.add(p * count >= at[last] + b * length[last] - at[first] - a * length[first])
        held.append(count)
        for g in h.groups if room else ():
            used[g].append((h.bytes, count))
    for g, items in enumerate(used):
        unit = one.limits[g] * 1e-9
        model.add(sum(int(b / unit) * n for b, n in items) <= int(room[g] / unit) + len(items))
    end = model.new_int_var(0, (turns + 1) * p, "")
    for i, task in enumerate(graph.tasks):
        if task.phase != "W":
            model.add(end >= at[i] + length[i])
    model.minimize((len(held) + 1) * end + sum(held))
    solver = solver_of(work, seed)
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, spent
    offsets = {t: solver.value(at[i]) * tick.seconds for i, t in enumerate(graph.tasks)}
    return Pattern(p * tick.seconds, one.micro, offsets), spent
