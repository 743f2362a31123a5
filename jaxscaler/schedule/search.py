"""The shortest step: families and list schedules first, then patterns and windows by CP-SAT.

A pipeline of many micro-batches is searched with few: as many as fill it, run, and empty it. What
the middle repeats is then repeated further (`extend.py`), so that the work does not grow with them.
All work is counted, not timed: equal problems have equal answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from jaxscaler.errors import ScheduleError
from jaxscaler.schedule.bound import critical, least_seconds
from jaxscaler.schedule.extend import extended, few
from jaxscaler.schedule.families import FAMILIES
from jaxscaler.schedule.greedy import After, capped, greedy, heights, urgent
from jaxscaler.schedule.pattern import find_pattern, least_period, one_repeat
from jaxscaler.schedule.simulate import Timeline, fits, simulate
from jaxscaler.schedule.tasks import UPDATE, WEIGHT, Order, Pipeline, Task
from jaxscaler.schedule.window import Rearranged, Ticks, rearrange, ticks

WORK = 4.0  # deterministic seconds of CP-SAT
WHOLE = 200  # tasks of a pipeline that CP-SAT takes at once
WINDOW = 60  # tasks of a window of a larger one
CLOSE = 1e-9  # relative difference from the bound that counts as none
TRIES = 5  # periods that are tried
COARSE = 200  # ticks of a period
LEAST = 0.05  # deterministic seconds of one call of CP-SAT


@dataclass(frozen=True)
class Found:
    """timeline: the shortest step found. bound: no order that fits has a shorter one.

    family: the best family that fits, None if none does; family_seconds: its step (None alike).
    work: deterministic seconds of CP-SAT.
    """

    timeline: Timeline
    bound: float
    family: str | None
    family_seconds: float | None
    work: float

    @property
    def order(self) -> Order:
        return self.timeline.order

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def gap(self) -> float:
        """Relative to the bound; 0: proved the shortest."""
        return self.seconds / self.bound - 1.0 if self.bound else 0.0


def best_family(
    pipeline: Pipeline, names: Iterable[str] = tuple(FAMILIES)
) -> tuple[str, Timeline] | None:
    """The family of the shortest step among those that apply and fit; None if none does."""
    best = None
    for name, timeline in families_that_fit(pipeline, names):
        if best is None or timeline.seconds < best[1].seconds:
            best = name, timeline
    return best


def families_that_fit(
    pipeline: Pipeline, names: Iterable[str] = tuple(FAMILIES)
) -> Iterator[tuple[str, Timeline]]:
    for name in names:
        try:
            timeline = simulate(pipeline, FAMILIES[name](pipeline))
        except ScheduleError:  # it does not apply
            continue
        if fits(timeline):
            yield name, timeline


def search(pipeline: Pipeline, *, work: float = WORK, seed: int = 0) -> Found:
    """The order of the shortest step that fits into memory; never worse than the best family.

    work: deterministic seconds of CP-SAT, about as many as seconds on a core; the answer depends
    on it and on `seed` alone. ScheduleError: not even one micro-batch at a time fits.
    """
    family = best_family(pipeline)
    name, least = (family[0], family[1].seconds) if family else (None, None)
    bound = least_seconds(pipeline)
    if family and least is not None and least <= bound * (1 + CLOSE):
        return Found(family[1], min(bound, least), name, least, 0.0)
    small = replace(pipeline, micro=few(pipeline.micro, _filling(pipeline), pipeline))
    run = _Search(small, pipeline, work, seed, bound, family[1] if family else None)
    for phase in (run.guess, run.exact, run.repeat, run.improve):
        if not run.done():
            phase()
    if run.best is None:
        raise ScheduleError(_no_room(pipeline))
    return Found(run.best, min(run.least, run.best.seconds), name, least, run.spent)


def _filling(pipeline: Pipeline) -> int:
    """Micro-batches that fill a pipeline, and as many again to empty it."""
    one = one_repeat(pipeline)
    period = least_period(replace(one, limits=()))
    deep = ceil(critical(one) / period) if period else 1
    return 2 * deep * one.micro + 4


class _Search:
    """The best order so far: `start` of few micro-batches, `best` of all."""

    def __init__(self, small, pipeline, work: float, seed: int, least: float, best):
        self.small, self.pipeline, self.work, self.seed = small, pipeline, work, seed
        self.least, self.best = least, best
        self.start: Timeline | None = None
        self.reached = inf  # by what begins and ends as `start`
        self.spent = 0.0

    def done(self) -> bool:
        found = self.best is not None and self.best.seconds <= self.least * (1 + CLOSE)
        return found or self.spent >= self.work

    def take(self, timeline: Timeline) -> bool:
        """Whether a timeline of few micro-batches is better than the one so far."""
        whole = extended(timeline, self.pipeline) if fits(timeline) else None
        if whole is None or whole.seconds >= self.reached:
            return False
        self.start, self.reached = timeline, whole.seconds
        if self.best is None or whole.seconds < self.best.seconds:
            self.best = whole
        return True

    def guess(self) -> None:
        """Families and list schedules."""
        for _, timeline in families_that_fit(self.small):
            self.take(timeline)
        for after in _limits(self.small):
            for rank in (urgent, _older):
                if not self.done():
                    order = greedy(self.small, after, rank, timed=True)
                    self.take(simulate(self.small, order))

    def exact(self) -> None:
        """A small pipeline as a whole, which may prove that there is nothing shorter."""
        small = self.small.micro == self.pipeline.micro
        if self.start is not None and small and len(self.start.tasks) <= WHOLE:
            got = self.rearrange(0.0, inf, max(LEAST, self.work / 8))
            self.least = max(self.least, got.bound)

    def repeat(self) -> None:
        """Patterns: of the least period that there may be, then halfway to one that was found."""
        low, tick = least_period(self.small), ticks(self.small)
        if low == inf:
            return
        high = self.start.seconds / self.small.micro if self.start else 2 * low
        coarse = Ticks(low / COARSE, False)
        for n in range(TRIES):
            if self.done():
                return
            period = (low + high) / 2 if n else low
            pattern, spent = find_pattern(
                self.small,
                period,
                tick if tick.exact and tick.seconds > coarse.seconds else coarse,
                work=max(LEAST, self.work / 8 / TRIES),
                seed=self.seed,
            )
            self.spent += spent
            if pattern is None:
                low = period
            else:
                high = period
                self.take(simulate(self.small, pattern.order(self.small)))
                if not n:
                    return

    def improve(self) -> None:
        """Windows, from the ends to the middle, until none gets better."""
        better = True
        while better and self.start is not None:
            better = False
            for first, last in self.windows():
                if self.done():
                    return
                now = self.start
                self.rearrange(first, last, max(LEAST, self.work / 40))
                better |= self.start is not now

    def rearrange(self, first: float, last: float, work: float) -> Rearranged:
        assert self.start is not None
        got = rearrange(self.start, first, last, work=work, seed=self.seed)
        self.spent += got.work
        if got.timeline is not None:
            self.take(got.timeline)
        return got

    def windows(self) -> list[tuple[float, float]]:
        """Times in which about WINDOW tasks start, half of each in the next, the ends first.

        Where the middle is to be repeated it is left alone.
        """
        assert self.start is not None
        starts, middle = sorted(self.start.start), self.start.seconds / 2
        edges = [0.0, *starts[WINDOW // 2 :: WINDOW // 2], inf]
        spans = [(a, b) for a, b in zip(edges, edges[2:]) if a < b]
        if self.small.micro < self.pipeline.micro:
            spans = [(a, b) for a, b in spans if b < 0.9 * middle or a > 1.1 * middle]
        return sorted(spans, key=lambda w: min(w[0], max(0.0, 2 * middle - w[1])))


def _older(task: Task) -> tuple:
    """Older micro-batches first."""
    return (task.phase == UPDATE, task.phase == WEIGHT, task.micro, *urgent(task))


def _limits(pipeline: Pipeline) -> Iterator[After]:
    """How many micro-batches list schedules may have in flight: by 1F1B, by memory, between."""
    height = heights(pipeline)
    room = _affordable(pipeline, height)
    seen = set()
    for times in (1.0, 1.25, 1.5, 2.0, inf):
        caps = tuple(max(1, int(min(r, times * h, pipeline.micro))) for h, r in zip(height, room))
        if caps not in seen:
            seen.add(caps)
            yield capped(pipeline, caps)


def _affordable(pipeline: Pipeline, height: list[int]) -> list[float]:
    """[stage]: micro-batches in flight that all its groups have room for, shared by height."""
    room = [inf] * len(height)
    for g, limit in enumerate(pipeline.limits):
        mine = pipeline.stages_of(g)
        free = limit - sum(pipeline.stages[s].static for s in mine)
        free -= max(pipeline.stages[s].working for s in mine)
        each = {s: max(pipeline.stages[s].kept, pipeline.stages[s].kept_weight) for s in mine}
        whole = sum(size * height[s] for s, size in each.items())
        for s in mine:
            if each[s]:
                room[s] = min(room[s], free / whole * height[s] * (1 + CLOSE))
    return room


def _no_room(pipeline: Pipeline) -> str:
    """Why nothing fits: what one micro-batch at a time takes."""
    timeline = simulate(pipeline, greedy(pipeline, capped(pipeline, [1] * len(pipeline.stages))))
    short = [
        f"group {g} needs {peak.bytes:.4g} bytes and may hold {limit:.4g}"
        for g, (peak, limit) in enumerate(zip(timeline.peak, pipeline.limits))
        if peak.bytes > limit
    ]
    return (
        "no order was found that fits: "
        + ("one micro-batch at a time, " + "; ".join(short) if short else "give it more work")
        + "; use more stages or smaller micro-batches, or recompute"
    )
