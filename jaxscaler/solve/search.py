"""The search on one kernel: multipliers, fixing, CP-SAT or tree moves, in growing rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxscaler.solve.cpsat import literals_needed, solve_exact
from jaxscaler.solve.kernel import FORBIDDEN, UNCHANGED, Kernel, NoSolution, Way, chain, restrict
from jaxscaler.solve.moves import View, Walk, start_walk, tree_moves, view_of
from jaxscaler.solve.multipliers import Multipliers, ascend, by_row, start_multipliers
from jaxscaler.solve.presolve import presolve
from jaxscaler.solve.repair import ROUNDS, peaks, repaired

# Work is counted, so that a run does not depend on the clock: about seconds of one idle core.
_SWEEP_COST = 6e-9  # per table entry
_STEP_COST = 1e-4  # per step of the multipliers
_MOVE_COST = 4.5e-9  # per unit of tree_moves
_SLICE = 0.1  # work between two looks at the clock
_ASCENT, _MOVES, _EXACT = 8.0, 4.0, 6.0  # work of the first round; doubles every round
_CPSAT_LITERALS = 3 * 10**6  # kernels with more are too wide for CP-SAT
_ALL_ROWS = 200  # rows that CP-SAT gets at once where no feasible choice is known
_WALKERS = 2  # walks that move at the same time
_PATIENT = 3  # times as many rounds of repair where no feasible choice is known
_HURRY = 600  # steps that the time allows; with fewer a first choice is due early
_POOL = 8  # starting points that are kept
_SIZES, _NOISES = (30, 100, 100, 300), (0.0, 1e-5, 1e-5)  # of moves; noise relative to the cost
_STUCK = 20  # slices without a gain before a walker starts elsewhere
_COARSER = 6  # bits given up when numbers outgrow exactness
# Seconds that what cannot be interrupted may take; not begun when less is left.
_PRESOLVE_SECONDS = 2e-6  # per table entry
_MODEL_SECONDS = 1e-6  # per literal


@dataclass
class Clock:
    """What is left of the time and work of one call."""

    deadline: float = float("inf")  # of time.perf_counter
    limit: float = float("inf")  # on `spent`
    spent: float = 0.0

    def seconds(self) -> float:
        return self.deadline - time.perf_counter()

    def part(self, share: float) -> Clock:
        """A clock that ends after `share` of what is left of this one."""
        now = time.perf_counter()
        return Clock(
            now + share * (self.deadline - now) if share < 1 else self.deadline,
            share * (self.limit - self.spent),
        )

    def late(self) -> bool:
        return self.seconds() <= 0

    def over(self) -> bool:
        return self.spent >= self.limit or self.late()


@dataclass(frozen=True)
class Use:
    """Which parts of the search are on (for ablations)."""

    cpsat: bool = True
    multipliers: bool = True
    moves: bool = True


EVERYTHING = Use()


@dataclass
class Start:
    """A feasible inner choice to walk from."""

    cost: int
    choice: np.ndarray
    walked: bool = False


@dataclass
class Walker:
    """A walk that is taken up again, slice by slice."""

    walk: Walk
    idle: int = 0  # slices without a gain


@dataclass
class Search:
    """State on one kernel.

    `best` is a choice of it; `inner` what presolve and fixing left of it.
    """

    kernel: Kernel
    upper: int | None  # only a cost below this is of interest
    clock: Clock
    seed: int
    use: Use = EVERYTHING
    gap: float = 0.0  # what is proved to be so near to the least, relative, is good enough
    note: Callable[[int | None, int], None] = lambda cost, bound: None
    best: np.ndarray | None = None
    bound: int = 0
    closed: bool = False  # nothing cheaper than `upper` exists
    inner: Kernel = field(init=False)
    way: Way = UNCHANGED
    view: View = field(init=False)
    multipliers: Multipliers = field(init=False)
    rows: set[int] = field(default_factory=set)  # names of rows that CP-SAT's answers broke
    pool: list[Start] = field(default_factory=list)
    walkers: list[Walker] = field(default_factory=list)
    draws: int = 0
    scale: float = 1.0  # of the next round

    def __post_init__(self) -> None:
        self.bound = self.kernel.offset
        self._enter(self.kernel, None)

    def _enter(self, inner: Kernel, lam: dict[int, float] | None) -> None:
        self.inner, self.view = inner, view_of(inner)
        self.multipliers = start_multipliers(inner, lam)
        self.pool, self.walkers = [], []
        if self.best is not None:
            kept = self.way.lower(self.best)
            self.pool = [Start(inner.cost(kept), kept)]
        if inner.num_nodes == 0:
            self.offer(np.zeros(0, np.int64), inner.offset)
            self.close()

    def next_seed(self) -> int:
        self.draws += 1
        return (self.seed * 1_000_003 + self.draws * 7919) % 2**31

    def spend(self, work: float) -> None:
        self.clock.spent += work

    def raise_bound(self, bound: int) -> None:
        """A proved bound on choices cheaper than `upper`."""
        if self.upper is not None and bound >= self.upper:
            self.closed, bound = True, self.upper
        if bound > self.bound:
            self.bound = bound
            self.note(self.upper if self.best is not None else None, self.bound)

    def close(self) -> None:
        """Proved: nothing is cheaper than `upper`, or feasible at all where there is none."""
        self.closed = True
        if self.upper is not None:
            self.raise_bound(self.upper)

    def offer(self, choice: np.ndarray, about: int) -> bool:
        """A feasible inner choice that costs `about` so much; True when it is the best so far."""
        if self.upper is not None and about >= self.upper:
            return False
        cost = self.inner.cost(choice)
        if cost >= FORBIDDEN or (self.upper is not None and cost >= self.upper):
            return False
        self.best, self.upper = self.way.lift(choice), cost
        self.note(self.upper, self.bound)
        self.raise_bound(self.bound)
        return True

    @property
    def near(self) -> bool:
        """Whether the best choice is proved to be within the gap that is good enough."""
        if self.gap <= 0 or self.best is None or self.upper is None:
            return False
        return self.upper - self.bound <= self.gap * abs(self.upper)

    @property
    def done(self) -> bool:
        return self.closed or self.near or self.clock.over()


def run(search: Search) -> None:
    """Until proved or out of time or work; with a new clock, called again, it goes on."""
    with ThreadPoolExecutor(_WALKERS) as threads:
        while not search.done:
            _round(search, threads, search.scale)
            search.multipliers.warm_up()
            search.spend(_STEP_COST)
            search.scale *= 2


def _round(search: Search, threads: ThreadPoolExecutor, scale: float) -> None:
    if search.use.multipliers:
        _climb(search, threads, _ASCENT * scale)
        while _fix(search):
            _climb(search, threads, _ASCENT * scale)
    elif not search.pool:
        _try(search, np.zeros(search.inner.num_nodes, np.int64))
    if search.use.cpsat and _narrow(search):
        _prove(search, _EXACT * scale)
    elif search.use.moves:
        _walk(search, threads, _MOVES * scale)
        while _fix(search):
            _climb(search, threads, _ASCENT * scale)


def _narrow(search: Search) -> bool:
    return literals_needed(search.inner) <= _CPSAT_LITERALS


def _climb(search: Search, threads: ThreadPoolExecutor, work: float) -> None:
    """Raise the multipliers; turn what they decode into feasible choices, and walk on those."""
    inner = search.inner
    last: list[np.ndarray] = []

    def decoded(choice: np.ndarray, usage: np.ndarray) -> int | None:
        last[:] = [choice]
        if (usage > inner.caps).any():
            return None
        return search.upper if search.offer(choice.copy(), -FORBIDDEN) else None

    one = _SWEEP_COST * len(inner.edge_costs) + _STEP_COST
    stop = search.clock.spent + work
    # a repair after 30 steps (3 where those are a good part of the time), then half as many again
    hurried = not search.pool and search.clock.seconds() < _HURRY * one
    steps, until = 0, 3 if hurried else 30
    while not search.done and search.clock.spent < stop and not search.multipliers.settled:
        state = search.multipliers
        now = max(1, min(int(_SLICE / one), until - steps))
        _recruit(search, 1)
        with _moving(search, threads, search.walkers[:1], now * one):
            ascend(state, now, search.upper, decoded)
        steps += now
        search.spend(now * one)
        search.raise_bound(state.cost_bound())
        shift = None if search.upper is None else state.shift_for(search.upper)
        if state.rounded:
            shift = state.messages.shift - _COARSER
        if shift is not None:
            search.multipliers = start_multipliers(inner, by_row(state), shift)
        if steps >= until:
            until += max(30, until // 2)
            _try(search, last[0])
    if last:
        _try(search, last[0])


def _try(search: Search, choice: np.ndarray) -> None:
    """Repair a decoded choice, descend a little, keep it as a starting point."""
    if search.done or not search.use.moves:
        return
    walk, work = repaired(
        search.inner, search.view, search.multipliers, choice, search.next_seed(),
        search.clock.late, ROUNDS if search.pool else _PATIENT * ROUNDS,
    )  # fmt: skip
    search.spend(work * _MOVE_COST)
    if walk is None:
        return
    prices = search.multipliers.prices(search.multipliers.best_lam)
    visits = 20_000 + 10 * search.inner.num_nodes
    best, cost, work = tree_moves(
        search.view, walk, prices, visits=visits, size=100, noise=0.0, temperature=0.0,
        seed=search.next_seed(),
    )  # fmt: skip
    search.spend(work * _MOVE_COST)
    start = Start(int(cost) + search.inner.offset, best)
    search.offer(best, start.cost)
    search.pool = sorted([*search.pool, start], key=lambda item: item.cost)[:_POOL]


def _fix(search: Search) -> bool:
    """Drop what cannot be part of a cheaper choice; when that is much, presolve what is left."""
    if search.upper is None or search.done or not search.use.multipliers:
        return False
    if search.clock.seconds() < _PRESOLVE_SECONDS * len(search.inner.edge_costs):
        return False
    alive = search.multipliers.may_beat(search.upper)
    if search.best is not None:
        alive[search.inner.node_ptr[:-1] + search.way.lower(search.best)] = True
    if alive.mean() > 0.85:
        return False
    lam = by_row(search.multipliers)
    try:
        narrowed, first = restrict(search.inner, alive)
        inner, second = presolve(narrowed)
    except NoSolution:
        search.close()
        return False
    search.way = chain([search.way, first, second])
    search._enter(inner, lam)
    return True


def _recruit(search: Search, most: int) -> None:
    """Up to `most` walkers; one that is stuck, or dearer than a new start, begins at that start."""
    for start in search.pool:
        if start.walked:
            continue
        place = len(search.walkers)
        if place >= most:
            place = max(range(most), key=lambda n: search.walkers[n].walk.cost)
            dearest = search.walkers[place]
            stuck = [n for n in range(most) if search.walkers[n].idle > _STUCK]
            if stuck:
                place = stuck[0]
            elif dearest.walk.cost + search.inner.offset <= start.cost:
                return
        start.walked = True
        search.walkers[place : place + 1] = [Walker(start_walk(search.inner, start.choice))]


@contextmanager
def _moving(
    search: Search, threads: ThreadPoolExecutor, walkers: list[Walker], work: float
) -> Iterator[None]:
    """While the body runs, each walker makes moves worth `work` in a thread of its own."""
    if not walkers or not search.use.moves:
        yield
        return
    prices = search.multipliers.prices(search.multipliers.best_lam)
    jobs = []
    for walker in walkers:
        rng = np.random.default_rng(search.next_seed())
        unit = max(walker.walk.cost, 1.0)
        job = threads.submit(
            tree_moves, search.view, walker.walk, prices, most=int(work / _MOVE_COST),
            temperature=0.0,
            size=int(rng.choice(_SIZES)), noise=unit * float(rng.choice(_NOISES)),
            seed=int(rng.integers(2**31)),
        )  # fmt: skip
        jobs.append((walker, walker.walk.cost, job))
    yield
    for walker, before, job in jobs:
        best, least, _ = job.result()
        walker.idle = 0 if least < before * (1 - 1e-6) - 0.5 else walker.idle + 1
        search.offer(best, int(least) + search.inner.offset)


def _walk(search: Search, threads: ThreadPoolExecutor, work: float) -> None:
    """Tree moves side by side, until all are stuck and there is no new start."""
    stop = search.clock.spent + work
    while not search.done and search.clock.spent < stop:
        _recruit(search, _WALKERS)
        if all(walker.idle > _STUCK for walker in search.walkers):
            return
        with _moving(search, threads, search.walkers, _SLICE):
            search.spend(_SLICE)


def _prove(search: Search, work: float) -> None:
    """CP-SAT on the inner kernel, with the memory rows that turn out to be needed."""
    inner = search.inner
    stop = search.clock.spent + work
    building = _MODEL_SECONDS * literals_needed(inner)
    while not search.done and search.clock.spent < stop and search.clock.seconds() > building:
        wanted = search.rows | set(by_row(search.multipliers))
        rows = np.flatnonzero(np.isin(inner.row_names, sorted(wanted)))
        if search.best is None and len(inner.caps) <= _ALL_ROWS:
            rows = np.arange(len(inner.caps))  # any feasible choice comes first
        hint = None if search.best is None else search.way.lower(search.best)
        outcome = solve_exact(
            inner,
            rows,
            upper=search.upper if search.best is None else None,
            hint=hint,
            seed=search.next_seed(),
            work=min(stop, search.clock.limit) - search.clock.spent,
            seconds=search.clock.seconds(),
            found=lambda choice: _found(search, inner, choice),
        )
        search.spend(outcome.work)
        search.raise_bound(outcome.bound)
        if outcome.choice is None:
            if outcome.closed:
                search.close()
            return
        excess = inner.row_usage(outcome.choice) - inner.caps
        if (excess <= 0).all():
            search.offer(outcome.choice, -FORBIDDEN)
            if outcome.closed:
                search.close()
            return
        search.rows.update(inner.row_names[peaks(excess)].tolist())
        _try(search, outcome.choice)


def _found(search: Search, inner: Kernel, choice: np.ndarray) -> None:
    if inner.fits(choice):
        search.offer(choice, -FORBIDDEN)
