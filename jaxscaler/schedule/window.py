"""The tasks of a window of time rearranged by CP-SAT; what runs before and after keeps its order.

Interval variables, one task at a time on a group, data with its transfers, bytes as a cumulative
resource. A window over the whole step is the whole problem.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from jaxscaler import cp_model
from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.bound import waits_of
from jaxscaler.schedule.linear import sequence
from jaxscaler.schedule.simulate import Timeline, fits, holdings, simulate
from jaxscaler.schedule.tasks import Pipeline, task_graph

# Ticks of the busiest group's work for a micro-batch, where times are no multiples: finer ones make
# CP-SAT several times slower, and what counts is the order, which is simulated with the true times.
FINE = 1000


@dataclass(frozen=True)
class Ticks:
    """Whole numbers for seconds. exact: all seconds of the pipeline are multiples of a tick."""

    seconds: float
    exact: bool

    def of(self, seconds: float) -> int:
        return round(seconds / self.seconds)


def ticks(pipeline: Pipeline) -> Ticks:
    graph = task_graph(pipeline)
    times = {t for t in graph.seconds if t}
    times |= {n.seconds for needs in graph.needs for n in needs if n.seconds}
    if not times:
        return Ticks(1.0, True)
    least = min(times)
    ratios = [Fraction(t / least).limit_denominator(64) for t in sorted(times)]
    exact = all(abs(float(r) * least - t) <= 1e-12 * t for r, t in zip(ratios, sorted(times)))
    if exact:
        whole = lcm(*(r.denominator for r in ratios))
        if max(ratios) * whole <= 20 * FINE:
            return Ticks(least / whole, True)
    load = defaultdict(float)
    for i, task in enumerate(graph.tasks):
        for g in pipeline.stages[task.stage].groups:
            load[g] += graph.seconds[i]
    return Ticks(max(load.values()) / pipeline.micro / FINE, False)


def solver_of(work: float, seed: int) -> cp_model.CpSolver:
    """CP-SAT so that equal problems have equal answers, within `work` deterministic seconds.

    One worker: several, in turns, spend most of a short limit on starting, and CP-SAT 9.15 aborts
    the process at times when it gives hints to them (google/or-tools#5025).
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = work
    return solver


@dataclass(frozen=True)
class Rearranged:
    """timeline: a better one, None if none was found. closed: the window has no better one.

    bound: no order of the window gives a step of fewer seconds. work: deterministic seconds.
    """

    timeline: Timeline | None
    bound: float
    closed: bool
    work: float


def rearrange(
    timeline: Timeline, first: float, last: float, *, work: float, seed: int = 0
) -> Rearranged:
    """Look for a shorter step by reordering the tasks that start in [first, last).

    What starts before keeps its times; what starts after keeps its order, and the longest way from
    each of the window's tasks through it to the end of the step is what counts. work: limit in
    CP-SAT's deterministic seconds.
    """
    return _Window(timeline, first, last).solve(work, seed)


class _Window:
    def __init__(self, timeline: Timeline, first: float, last: float):
        self.timeline, self.pipeline = timeline, timeline.pipeline
        self.graph, self.tick = task_graph(self.pipeline), ticks(self.pipeline)
        self.first, self.start = first, timeline.start
        everything = range(len(self.start))
        steps = sequence(self.pipeline, timeline.order)
        self.position = {i: k for k, i in enumerate(steps)}
        self.inside = [i for i in everything if first <= self.start[i] < last]
        self.before = {i for i in everything if self.start[i] < first}
        self.after = {i for i in everything if self.start[i] >= last}
        self.model = cp_model.CpModel()
        self.horizon = self.ticks(timeline.seconds)

    def ticks(self, moment: float) -> int:
        return self.tick.of(moment - self.first)

    def solve(self, work: float, seed: int) -> Rearranged:
        model, whole = self.model, self.timeline.seconds
        if not self.inside:
            return Rearranged(None, whole, True, 0.0)
        self.variables()
        self.one_at_a_time()
        self.memory()
        step = self.objective()
        solver = solver_of(work, seed)
        status = solver.solve(model)
        spent = solver.response_proto.deterministic_time
        closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        # Where seconds were rounded to ticks, each task on the way may have lost half a tick.
        rounded = 0 if self.tick.exact else len(self.start)
        least = self.horizon if status == cp_model.INFEASIBLE else solver.best_objective_bound
        bound = min(whole, self.first + (least - rounded) * self.tick.seconds)
        better = None
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) and solver.value(step) < self.horizon:
            better = self.reordered({i: solver.value(v) for i, v in self.at.items()})
        return Rearranged(better, bound, closed, spent)

    def variables(self) -> None:
        """Starts, after what they wait for."""
        model, graph, start, end = self.model, self.graph, self.start, self.timeline.end
        self.at, self.length = {}, {}
        waits = waits_of(self.pipeline)
        free = [self.first] * self.pipeline.groups
        for i in self.before:
            for g in graph.groups(self.pipeline, i):
                free[g] = max(free[g], end[i])
        for i in self.inside:
            gone = [end[n] + delay for n, delay in waits[i] if n in self.before]
            soonest = max(self.first, *gone, *(free[g] for g in graph.groups(self.pipeline, i)))
            self.length[i] = self.tick.of(graph.seconds[i])
            self.at[i] = model.new_int_var(
                min(self.ticks(soonest), self.ticks(start[i])), self.horizon, ""
            )
            model.add_hint(self.at[i], self.ticks(start[i]))
        for i in self.inside:
            for n, delay in waits[i]:
                if n in self.at:
                    model.add(self.at[i] >= self.at[n] + self.length[n] + self.tick.of(delay))

    def one_at_a_time(self) -> None:
        lines = defaultdict(list)
        for i in self.inside:
            interval = self.model.new_fixed_size_interval_var(self.at[i], self.length[i], "")
            for g in self.graph.groups(self.pipeline, i):
                lines[g].append(interval)
        for line in lines.values():
            self.model.add_no_overlap(line)

    def memory(self) -> None:
        """What is held while the window runs, as intervals on each group with a limit."""
        model, pipeline = self.model, self.pipeline
        if not pipeline.limits:
            return
        free = list(pipeline.limits)
        for stage in pipeline.stages:
            for g in stage.groups:
                free[g] -= stage.static
        items = defaultdict(list)
        for held in holdings(pipeline):
            since, until = held.since, held.until
            if until[0] in self.before or since[0] in self.after:
                continue
            if since[0] in self.before and until[0] in self.after:
                for g in held.groups:
                    free[g] -= held.bytes
                continue
            size = model.new_int_var(0, self.horizon, "")
            interval = model.new_interval_var(self.moment(*since), size, self.moment(*until), "")
            for g in held.groups:
                items[g].append((interval, held.bytes))
        for g, held_here in items.items():
            unit = pipeline.limits[g] * 1e-12
            model.add_cumulative(
                [interval for interval, _ in held_here],
                [int(size / unit) for _, size in held_here],
                int(free[g] / unit) + len(held_here),
            )

    def moment(self, i: int, side: int) -> cp_model.LinearExprT:
        """When a task starts or ends; not before the window, nor after the horizon."""
        if i in self.before:
            return 0
        return self.horizon if i in self.after else self.at[i] + self.length[i] * side

    def objective(self) -> cp_model.IntVar:
        """The step: each task of the window, and what the longest way from it takes."""
        graph, model = self.graph, self.model
        tail: dict[int, float] = {}  # from the start of a task after the window to the end
        handed = [0.0] * self.pipeline.groups  # the tail of a group's first task after the window
        readers = defaultdict(list)
        for i in self.after:
            for need in graph.needs[i]:
                readers[need.task].append((i, need.seconds))

        def rest(i: int) -> float:
            """Seconds from the end of a task to that of the step, if nothing else waits."""
            ways = [tail[r] + delay for r, delay in readers[i]]
            return max(ways + [handed[g] for g in graph.groups(self.pipeline, i)])

        for i in sorted(self.after, key=self.place, reverse=True):
            tail[i] = graph.seconds[i] + rest(i)
            for g in graph.groups(self.pipeline, i):
                handed[g] = tail[i]
        least = max((self.timeline.end[i] + rest(i) for i in self.before), default=self.first)
        step = model.new_int_var(self.ticks(least), self.horizon, "")
        for i in self.inside:
            model.add(step >= self.at[i] + self.length[i] + self.tick.of(rest(i)))
        model.add_hint(step, self.horizon)
        model.minimize(step)
        return step

    def place(self, i: int) -> tuple[float, int]:
        """A key by which every task comes after what it waits for."""
        return self.start[i], self.position[i]

    def reordered(self, at: dict[int, int]) -> Timeline | None:
        old, index = self.timeline, self.graph.index
        lines = []
        for line in old.order:
            inside = [t for t in line if index[t] in at]
            moved = iter(sorted(inside, key=lambda t: (at[index[t]], self.place(index[t]))))
            lines.append(tuple(next(moved) if index[t] in at else t for t in line))
        try:
            found = simulate(self.pipeline, tuple(lines))
        except ScheduleError:  # tasks shorter than a tick changed places
            return None
        return found if found.seconds < old.seconds and fits(found) else None
