"""The search over candidate meshes: price a space on each, solve, keep the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import Device
from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError, InfeasibleError, OutOfTimeError
from jaxscaler.report import describe
from jaxscaler.report.memory import device_memory
from jaxscaler.report.show import size_text
from jaxscaler.solve import Solution, least_memory, solve
from jaxscaler.solve.shared import Screened, Shared, screen
from jaxscaler.space.price import Filter, Tabled, tabulate
from jaxscaler.space.problem import Model, Priced

Progress = Callable[[str, str], None]  # (phase, detail)

WIDE = 4 * 10**6  # costs of edges that presolve and search take within seconds
LARGE, ENOUGH = 10**6, 0.001  # so near to the least is enough in a problem of so many costs
HELD = 4 * 10**7  # costs of a problem that is kept until its turn; a larger one is priced again
CLOSE = 0.02  # what a plan on a wide problem may be better by without being searched for
BRIEF, THOROUGH = (0.05, 0.1), (0.2, 2.5)  # work of bounding, at least and at most
NARROW_WORK = 4.0  # of a search among the promising strategies of a wide problem
EQUAL = 1e-9  # a bound so close, relative, to the best plan is the same: costs are rounded
CLASH = "constraints allow nothing"


@dataclass(frozen=True)
class Variant:
    """One problem of a search: a mesh, the numbers in named holes, and what a program leaves."""

    mesh: Mesh
    keep: Filter
    holes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join([str(self.mesh), *(f"{name} = {n}" for name, n in self.holes.items())])


@dataclass(frozen=True)
class Best:
    """The best plan found: a priced space, a strategy per node, seconds a step."""

    priced: Priced
    choice: np.ndarray
    seconds: float
    variant: Variant


class Clock:
    """Seconds by phase."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.spent: dict[str, float] = {}

    def add(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent[phase] = self.spent.get(phase, 0.0) + now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.start

    def phases(self) -> tuple[tuple[str, float], ...]:
        return tuple((k, round(v, 4)) for k, v in self.spent.items())


def search_meshes(
    model: Model,
    cluster: Cluster,
    variants: Sequence[Variant],
    limit: float,
    time_limit: float,
    seed: int,
    clock: Clock,
    say: Progress,
    known: Best | None = None,
    brief: bool = False,
) -> tuple[Best, tuple[tuple[str, str, float], ...], float, str]:
    """(best plan, (problem, what came of it, seconds) of each, seconds none is below, status).

    Problems are searched in their order until there is a plan. The others are bounded first; then
    they are searched, least bound first, while that is below the best plan. What a bound rules out
    is neither written out nor searched. A problem of more than `WIDE` costs even so is left alone
    ("close") where it could be better by the share `CLOSE` at most, and else searched among its
    most promising strategies. `known`: a plan of another program to begin from, where this one
    allows it. `brief`: where nothing fits, the error does not say what memory would do.
    """
    if known is not None:
        variants = sorted(variants, key=lambda v: v.mesh != known.priced.mesh)
    search = _Search(model, cluster, variants, limit, time_limit, seed, clock, say, known)
    search.brief = brief
    waiting = []

    def settle(n: int, tabled: Tabled, screening: Future[Screened]) -> None:
        screened = screening.result()
        clock.add("solve")
        if search.best is None:
            search.solve(n, tabled, screened, len(variants) - n)
        elif not search.left_alone(n, tabled, screened):
            held = tabled if len(tabled.shared.tables) <= HELD else None
            waiting.append((screened.bound * tabled.unit, n, held, screened))

    with ThreadPoolExecutor(1) as beside:  # a problem is bounded while the next one is priced
        ahead = None
        for n in range(len(variants)):
            if search.late(n) or (tabled := search.tabulate(n)) is None:
                continue
            if ahead is not None:
                settle(*ahead)
            ahead = n, tabled, beside.submit(search.screen, tabled)
            if search.best is None:
                settle(*ahead)
                ahead = None
        if ahead is not None:
            settle(*ahead)
    waiting.sort(key=lambda item: item[:2])
    for i, (bound, n, held, screened) in enumerate(waiting):
        if search.bounded(n, bound) or search.late(n, bound):
            continue
        if (tabled := held or search.tabulate(n)) is not None:
            search.solve(n, tabled, screened, len(waiting) - i)
    return search.answer()


@dataclass
class _Search:
    model: Model
    cluster: Cluster
    variants: Sequence[Variant]
    limit: float
    time_limit: float
    seed: int
    clock: Clock
    say: Progress
    known: Best | None
    best: Best | None = None
    tried: dict[int, tuple[str, float]] = field(default_factory=dict)  # status, seconds
    lowers: list[float] = field(default_factory=list)
    clashes: list[ConstraintError] = field(default_factory=list)
    misfits: list[Tabled] = field(default_factory=list)
    prices: Mapping[int, float] = field(default_factory=dict)  # the multipliers found last
    start: float = field(default_factory=time.perf_counter)
    brief: bool = False

    def note(self, n: int, status: str, seconds: float, lower: float | None = None) -> None:
        self.tried[n] = status, seconds
        if lower is not None:
            self.lowers.append(lower)

    def left(self) -> float:
        return self.time_limit - (time.perf_counter() - self.start)

    def late(self, n: int, bound: float | None = None) -> bool:
        """Whether the time is over: no more than its `bound` is known of problem n then."""
        if self.best is None or self.left() > 0:
            return False
        self.note(n, "not searched: out of time", bound or 0.0, bound)
        return True

    def bounded(self, n: int, bound: float) -> bool:
        """Whether problem n, none of whose plans is below `bound`, has none below the best."""
        if self.best is None or bound < self.best.seconds * (1 - EQUAL):
            return False
        self.note(n, "bounded", self.best.seconds, bound)
        return True

    def tabulate(self, n: int) -> Tabled | None:
        """Problem n, not yet written out; None where constraints leave nothing."""
        variant = self.variants[n]
        self.say("search", f"mesh {variant} ({n + 1} of {len(self.variants)})")
        device, limit = self.cluster.device, int(self.limit)
        try:
            return tabulate(self.model, variant.mesh, device, limit, variant.keep)
        except ConstraintError as error:
            self.clashes.append(error)
            self.note(n, CLASH, 0.0)
            return None
        finally:
            self.clock.add("price")

    def upper(self, tabled: Tabled) -> int | None:
        """Cost of the best plan in units of a problem."""
        return None if self.best is None else int(self.best.seconds / tabled.unit)

    def screen(self, tabled: Tabled) -> Screened:
        upper = self.upper(tabled)
        goal = None if upper is None else int((1 - CLOSE) * upper)
        work = BRIEF if upper is None else THOROUGH  # the first one serves the multipliers alone
        screened = screen(
            tabled.shared, upper=upper, goal=goal, work=work[0], most=work[1], prices=self.prices
        )
        self.prices = screened.prices
        return screened

    def left_alone(self, n: int, tabled: Tabled, screened: Screened) -> bool:
        """Whether problem n is too wide to be searched for the little that it can gain."""
        upper = self.upper(tabled)
        if upper is None or screened.bound < (1 - CLOSE) * upper:
            return False
        if tabled.shared.entries(screened.alive(upper)) <= WIDE:
            return False
        bound = screened.bound * tabled.unit
        self.note(n, "close", bound, bound)
        return True

    def solve(self, n: int, tabled: Tabled, screened: Screened, waiting: int) -> None:
        """Search problem n, one of `waiting`, among what can still be part of a better plan."""
        upper, unit, shared = self.upper(tabled), tabled.unit, tabled.shared
        alive = screened.alive(upper)
        hint = None
        if begin := self.best or self.known:
            hint = same_choice(begin, tabled)
        if hint is not None:
            alive[shared.rest.node_ptr[:-1] + hint] = True
        elif not np.logical_or.reduceat(alive, shared.rest.node_ptr[:-1]).all():
            if upper is None:
                self.misfits.append(tabled)
                self.note(n, "infeasible", 0.0, float("inf"))
            else:
                self.note(n, "bounded", upper * unit, upper * unit)
            return
        if self.left_alone(n, tabled, screened):
            return
        wide = shared.entries(alive) > WIDE
        share = max(self.left() / waiting, 1.0)
        if wide:
            some = promising(shared, screened.floor, alive, hint)
            found, choice = self.solve_part(tabled, some, hint, share, NARROW_WORK)
            if choice is not None or upper is not None:
                status = "unknown" if choice is None else "feasible"  # of the whole
                found = replace(found, status=status, bound=screened.bound)
            else:  # the promising ones alone do not fit
                wide = False
        if not wide:
            found, choice = self.solve_part(tabled, alive, hint, share, None)
            if found.status == "infeasible" and upper is not None:
                found = replace(found, status="bounded", bound=upper)
        bound = max(found.bound, screened.bound)
        seconds = (bound if found.cost is None else found.cost) * unit
        if found.status == "infeasible":
            self.misfits.append(tabled)
            self.note(n, "infeasible", 0.0, float("inf"))
        else:
            self.note(n, found.status, seconds, bound * unit)
        if choice is not None and (self.best is None or seconds < self.best.seconds):
            self.best = Best(tabled.priced(), choice, seconds, self.variants[n])
        self.clock.add("solve")

    def solve_part(
        self, tabled: Tabled, alive: np.ndarray, hint: np.ndarray | None, seconds: float,
        work: float | None,
    ) -> tuple[Solution, np.ndarray | None]:  # fmt: skip
        """(what the search among the `alive` strategies gives, its choice among all)."""
        upper, first = self.upper(tabled), tabled.shared.rest.node_ptr[:-1]
        part = tabled.shared.restricted(alive).whole()
        kept = np.flatnonzero(alive)
        if hint is not None:
            hint = np.searchsorted(kept, first + hint) - part.node_ptr[:-1]
            upper = None if upper is None else upper + 1  # the hint itself is one to begin from
        gap = ENOUGH if len(part.edge_costs) > LARGE else 0.0
        found = solve(
            part, time_limit=seconds, seed=self.seed, upper_bound=upper, hint=hint,
            work_limit=work, gap=gap,
        )  # fmt: skip
        if found.choice is None:
            return found, None
        return found, kept[part.node_ptr[:-1] + found.choice] - first

    def answer(self) -> tuple[Best, tuple[tuple[str, str, float], ...], float, str]:
        best, count = self.best, len(self.variants)
        if best is None:
            if len(self.clashes) == count:
                raise self.clashes[0]
            if len(self.misfits) + len(self.clashes) < count:
                raise OutOfTimeError(
                    f"no plan was found in {self.time_limit:g} s: give the search a longer "
                    "time_limit, or constraints that leave less to search"
                )
            if self.brief:
                raise InfeasibleError(_no_fit(self.cluster, self.limit))
            raise _infeasible(self.cluster, self.limit, [t.priced() for t in self.misfits])
        tried = tuple((str(self.variants[n]), *self.tried[n]) for n in sorted(self.tried))
        done = {"optimal", "bounded", "infeasible", CLASH}
        proved = all(status in done for status, _ in self.tried.values())
        lower = min([best.seconds, *self.lowers])
        return best, tried, lower, "optimal" if proved else "feasible"


def promising(
    shared: Shared, floor: np.ndarray, alive: np.ndarray, hint: np.ndarray | None = None
) -> np.ndarray:
    """Mask [S] of the strategies whose `floor` is least, as many as leave about `WIDE` costs."""
    ptr = shared.rest.node_ptr
    always = floor == np.repeat(np.minimum.reduceat(floor, ptr[:-1]), np.diff(ptr))
    if hint is not None:
        always[ptr[:-1] + hint] = True
    levels = np.unique(floor[alive])
    few, many = 0, len(levels)  # so many levels are within, beyond the limit
    while many - few > 1:
        half = (few + many) // 2
        fits = shared.entries(always | (alive & (floor < levels[half]))) <= WIDE
        few, many = (half, many) if fits else (few, half)
    return always | (alive & (floor < levels[few]))


def same_choice(known: Best, problem: Tabled | Priced) -> np.ndarray | None:
    """The strategies of a plan in another problem of its mesh, or of a finer one.

    A mesh is finer when its axes, major first, are parts of those of the other. None where it is
    not, or where a strategy is not there.
    """
    owner = _parts_of(known.priced.mesh.shape, problem.mesh.shape)
    if owner is None:
        return None
    out = []
    halves = len(known.priced.mesh.shape)
    for rows, before, chosen in zip(problem.strategies, known.priced.strategies, known.choice):
        row = before[chosen].reshape(-1, halves)[:, owner].ravel() if halves else before[chosen]
        at = np.flatnonzero((rows == row).all(axis=1))
        if not len(at):
            return None
        out.append(int(at[0]))
    return np.array(out, np.int64)


def _parts_of(coarse: Sequence[int], fine: Sequence[int]) -> list[int] | None:
    """For each axis of `fine` the axis of `coarse` that it is a part of; None where it is none."""
    owner, n, left = [], 0, 1
    for size in fine:
        if left == 1:
            if n == len(coarse):
                return None
            left, n = coarse[n], n + 1
        if left % size:
            return None
        left //= size
        owner.append(n - 1)
    return owner if n == len(coarse) and left == 1 else None


def distinct_meshes(meshes: Sequence[Mesh]) -> list[Mesh]:
    """Leave out meshes that differ from another only in the order of axes on equal links."""
    seen, out = set(), []
    for mesh in meshes:
        key = tuple(sorted(
            (part.level.name, 1 if part.level.link.kind != "torus" else part.stride, part.size)
            for axis in mesh.axes for part in axis.parts
        )) if all(len(axis.parts) == 1 for axis in mesh.axes) else str(mesh)  # fmt: skip
        if key not in seen:
            seen.add(key)
            out.append(mesh)
    return out


def _infeasible(cluster: Cluster, limit: float, misfits: Sequence[Priced]) -> InfeasibleError:
    """How much memory would do, and what dominates it, over the meshes that were tried."""
    head = _no_fit(cluster, limit)
    least = [(found, p) for p in misfits if (found := leanest(p, cluster.device))]
    if not least:
        return InfeasibleError(
            f"{head}, nor any other memory: the constraints leave no plan at all"
        )
    (need, choice), priced = min(least, key=lambda x: x[0][0])
    _, by_role = describe.peak_memory(priced, choice)
    roles = ", ".join(f"{role} {size_text(n)}" for role, n in by_role[:4])
    top = sorted(describe.tensors(priced, choice), key=lambda t: -t.bytes_per_device)[:5]
    names = "; ".join(f"{t.path} {t.shape} {t.dtype}: {size_text(t.bytes_per_device)}" for t in top)
    error = InfeasibleError(
        f"{head}: the least found for a plan is {size_text(need)}, on mesh {priced.mesh} "
        f"({roles}).\nthe largest tensors per device there: {names}\n"
        "use more devices or larger ones, a smaller batch, or drop constraints"
    )
    error.need = need
    return error


def _no_fit(cluster: Cluster, limit: float) -> str:
    return (
        f"no plan fits {size_text(limit)} per device ({cluster.device.name}, "
        f"{cluster.num_devices} devices)"
    )


def leanest(
    priced: Priced, device: Device, seconds: float = 5.0
) -> tuple[float, np.ndarray] | None:
    """(bytes on a device, choice) of the plan of least memory that is found; None: there is none.

    What the compiler adds to the rows of the search is mostly for changes of layout, so that of the
    plans whose rows are nearly least the fastest often takes less than the one whose rows are.
    """
    found = least_memory(priced.problem, time_limit=seconds)
    if found is None:
        return None
    choices = [np.asarray(found[1])]
    for slack in (1.0, 1.05, 1.2):
        tight = replace(priced.problem, usage_limit=int(found[0] * slack))
        fast = solve(tight, time_limit=seconds, hint=choices[0]).choice
        if fast is not None:
            choices.append(np.asarray(fast))
    rows = [describe.peak_memory(priced, choice)[0] for choice in choices]
    peaks = [device_memory(priced, choice, device).peak for choice in choices]
    return min(zip(map(max, rows, peaks), choices), key=lambda x: x[0])
