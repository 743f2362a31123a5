"""The one solver of the planner: checks, presolve, a search per independent part, an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jaxscaler.solve.build import validate
from jaxscaler.solve.evaluate import evaluate, profile_of
from jaxscaler.solve.kernel import Kernel, NoSolution, from_problem, parts
from jaxscaler.solve.presolve import presolve
from jaxscaler.solve.problem import INFINITY, Solution, StrategyProblem
from jaxscaler.solve.scale import LARGEST, clipped, coarser, largest_total
from jaxscaler.solve.search import EVERYTHING, Clock, Search, Use, run

Progress = Callable[[float, int | None, int], None]  # (seconds, incumbent, bound)
_PRESOLVE = 0.25  # of the time limit, at most
_TURN = 0.5  # of what is left goes to each turn of the independent parts
_COARSE = 0.3  # of time and work goes to the coarser problem where costs are too large
_WRAP_UP = 0.2  # seconds kept for the answer itself, or a tenth of the limit where that is less


def solve(
    problem: StrategyProblem,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    work_limit: float | None = None,
    hint: np.ndarray | None = None,
    upper_bound: int | None = None,
    progress: Progress | None = None,
    use: Use = EVERYTHING,
    gap: float = 0.0,
) -> Solution:
    """The cheapest choice of one strategy per node within the usage limit, with a lower bound.

    time_limit: wall-clock seconds. work_limit: about as many seconds of an idle core, counted, so
    that the answer depends on `seed` alone while the time limit does not bite. With neither the
    search ends with a proof. hint: a choice to start from. upper_bound: only a cost below it is
    of interest; status "bounded" says that there is none. progress: called with (seconds,
    incumbent, bound) when one of them changes. use: parts of the search to leave out. gap: the
    search may end with a choice proved to be so near to the least, relative ("feasible").
    statistics["reason"] explains "infeasible". Raises SolveError on a malformed problem.
    """
    start = time.perf_counter()
    clock = Clock()
    if time_limit is not None:
        clock.deadline = start + max(time_limit - _WRAP_UP, 0.9 * time_limit)
    if work_limit is not None:
        clock.limit = work_limit
    validate(problem)
    if largest_total(problem) > LARGEST:
        return _solve_large(
            problem,
            hint,
            upper_bound,
            progress,
            time_limit,
            work_limit,
            seed=seed,
            use=use,
            gap=gap,
        )
    report = _Report(problem, start, clock, progress)

    known, target = None, upper_bound  # a choice to beat, and the cost to beat
    if hint is not None:
        cost, _, feasible = evaluate(problem, hint)
        if feasible and (target is None or cost < target):
            known, target = np.asarray(hint, np.int64), cost

    reason = impossible(problem)
    if reason is None:
        try:
            kernel, way = presolve(from_problem(problem), clock.part(_PRESOLVE).late)
        except NoSolution as error:
            reason = str(error)
    if reason is not None:
        report.statistics["reason"] = reason
        return report.answer("infeasible", None, INFINITY)
    report.statistics |= {
        "kernel_nodes": kernel.num_nodes,
        "kernel_strategies": len(kernel.costs),
        "kernel_edges": len(kernel.edge_nodes),
        "kernel_rows": len(kernel.caps),
        "presolve_seconds": time.perf_counter() - start,
    }
    begin = None if known is None else way.lower(known)
    found, bound, proved = _search_parts(kernel, target, begin, seed, use, gap, clock, report)

    choice = known
    if found is not None:
        lifted = way.lift(found)
        if target is None or evaluate(problem, lifted)[0] < target:
            choice = lifted
    if choice is not None:
        return report.answer("optimal" if proved else "feasible", choice, bound)
    if not proved:
        return report.answer("unknown", None, bound)
    if target is not None:
        return report.answer("bounded", None, target)
    report.statistics["reason"] = "no choice satisfies the forbidden costs and the usage limit"
    return report.answer("infeasible", None, INFINITY)


def _solve_large(
    problem: StrategyProblem,
    hint: np.ndarray | None,
    upper_bound: int | None,
    progress: Progress | None,
    time_limit: float | None,
    work_limit: float | None,
    **rest: Any,
) -> Solution:
    """`solve` where the costs outgrow 64 bits: see scale.py.

    Where even the clipped costs do, the gap of the rounding stays.
    """
    start = time.perf_counter()
    small, bits = coarser(problem)
    first = solve(
        small,
        hint=hint,
        time_limit=time_limit and _COARSE * time_limit,
        work_limit=work_limit and _COARSE * work_limit,
        **rest,
    )
    if first.status == "infeasible":
        return first
    choices = [choice for choice in (first.choice, hint) if choice is not None]
    found = [(evaluate(problem, choice), choice) for choice in choices]
    (cost, peak, _), choice = min(
        (item for item in found if item[0][2]), key=lambda item: item[0][0],
        default=((None, None, False), None),
    )  # fmt: skip
    upper = min((u for u in (cost, upper_bound) if u is not None), default=None)
    exact = problem if upper is None else clipped(problem, upper)
    if largest_total(exact) <= LARGEST:
        spent = time.perf_counter() - start
        second = solve(
            exact,
            hint=choice,
            upper_bound=upper_bound,
            progress=progress,
            time_limit=time_limit and max(time_limit - spent, 0.01),
            work_limit=work_limit and max(work_limit - first.statistics["work"], 0.01),
            **rest,
        )
        return replace(second, seconds=time.perf_counter() - start)
    bound = first.bound << bits
    if cost is not None and (upper_bound is None or cost < upper_bound):
        status = "optimal" if bound >= cost else "feasible"
        bound = min(bound, cost)
    else:
        choice = cost = peak = None
        status = "bounded" if upper_bound is not None and bound >= upper_bound else "unknown"
    return replace(
        first,
        status=status,
        choice=choice,
        cost=cost,
        bound=bound,
        peak_usage=peak,
        seconds=time.perf_counter() - start,
        trace=((time.perf_counter() - start, cost, bound),),
    )


@dataclass
class _Report:
    """Trace and statistics of one call, and its answer."""

    problem: StrategyProblem
    start: float
    clock: Clock
    progress: Progress | None
    trace: list[tuple[float, int | None, int]] = field(default_factory=list)
    statistics: dict = field(default_factory=dict)

    def note(self, cost: int | None, bound: int) -> None:
        if not self.trace or self.trace[-1][1:] != (cost, bound):
            self.trace.append((time.perf_counter() - self.start, cost, bound))
            if self.progress is not None:
                self.progress(*self.trace[-1])

    def answer(self, status: str, choice: np.ndarray | None, bound: int) -> Solution:
        """A Solution whose cost and peak are recomputed on the problem as it was given."""
        cost = peak = None
        if choice is not None:
            cost, peak, feasible = evaluate(self.problem, choice)
            if not feasible:
                raise AssertionError("the search returned an infeasible choice")
            bound = cost if status == "optimal" else min(bound, cost)
        self.note(cost, bound)
        self.statistics["work"] = self.clock.spent
        return Solution(
            status=status,
            choice=choice,
            cost=cost,
            bound=bound,
            seconds=time.perf_counter() - self.start,
            peak_usage=peak,
            trace=tuple(self.trace),
            statistics=self.statistics,
        )


def _search_parts(
    kernel: Kernel,
    target: int | None,
    begin: np.ndarray | None,
    seed: int,
    use: Use,
    gap: float,
    clock: Clock,
    report: _Report,
) -> tuple[np.ndarray | None, int, bool]:
    """(choice or None, bound, proved) from a search in each independent part, small ones first.

    Proved with no choice: nothing costs less than `target`, or nothing is feasible.
    """
    pieces = sorted(parts(kernel), key=lambda part: len(part[0].edge_costs))
    bounds = [piece.offset for piece, _ in pieces]
    costs: list[int | None] = [None] * len(pieces)
    if begin is not None:
        costs = [piece.cost(begin[nodes]) for piece, nodes in pieces]

    def note(n: int, cost: int | None, bound: int) -> None:
        costs[n] = costs[n] if cost is None else cost
        bounds[n] = bound
        known = [cost for cost in costs if cost is not None]
        report.note(sum(known) if len(known) == len(costs) else None, sum(bounds))

    searches: dict[int, Search] = {}
    pending = list(range(len(pieces)))
    sizes = [1 + len(piece.edge_costs) for piece, _ in pieces]
    weights = [size / sum(sizes) + 1 / len(sizes) for size in sizes]
    while pending:
        turn = clock.part(1.0 if len(pending) == 1 else _TURN)
        for at, n in enumerate(pending):
            piece, nodes = pieces[n]
            upper = None if target is None else target - (sum(bounds) - bounds[n])
            if n not in searches:
                own = costs[n]
                searches[n] = Search(
                    piece,
                    upper=upper if own is None else own,
                    clock=turn,
                    seed=seed,
                    use=use,
                    gap=gap,
                    note=partial(note, n),
                    best=None if begin is None else begin[nodes],
                )
            search = searches[n]
            if search.best is None:
                search.upper = upper
            search.clock = turn.part(weights[n] / sum(weights[m] for m in pending[at:]))
            run(search)
            turn.spent += search.clock.spent
            clock.spent += search.clock.spent
            bounds[n] = search.bound
            if search.closed and search.best is None:
                return None, sum(bounds), True
        pending = [n for n in pending if not (searches[n].closed or searches[n].near)]
        pending.sort(key=lambda n: searches[n].best is not None)
        if clock.over():
            break
    whole = np.zeros(kernel.num_nodes, np.int64)
    for n, search in searches.items():
        if search.best is None:
            return begin, sum(bounds), False
        whole[pieces[n][1]] = search.best
    return whole, sum(bounds), all(search.closed for search in searches.values())


def impossible(problem: StrategyProblem) -> str | None:
    """Why no choice can be feasible, by name, where one look at each part tells; else None."""
    cheapest = np.minimum.reduceat(problem.node_costs, problem.node_ptr[:-1])
    if (cheapest >= INFINITY).any():
        return f"node {int(np.argmax(cheapest >= INFINITY))} has only infinite costs"
    if problem.usage_limit is not None and len(problem.usage_node):
        least = np.minimum.reduceat(problem.usages, problem.usage_ptr[:-1])
        times, profile = profile_of(problem.usage_lo, problem.usage_hi, least)
        if profile.max() > problem.usage_limit:
            return (
                f"the least possible usage at time {int(times[np.argmax(profile)])} is "
                f"{int(profile.max())}, above the limit {problem.usage_limit}"
            )
    return None


def least_memory(
    problem: StrategyProblem, *, tolerance: float = 1e-3, time_limit: float | None = None
) -> tuple[int, np.ndarray] | None:
    """(peak, choice): the least peak usage, within `tolerance`, of a choice of finite cost.

    The problem's own limit does not count. None: no choice has a finite cost, or none was found
    in `time_limit` seconds.
    """
    deadline = float("inf") if time_limit is None else time.perf_counter() + time_limit
    free = replace(
        problem,
        node_costs=np.where(problem.node_costs >= INFINITY, INFINITY, 0),
        edge_costs=np.where(problem.edge_costs >= INFINITY, INFINITY, 0),
    )

    def attempt(limit: int | None) -> np.ndarray | None:
        left = None if time_limit is None else max(deadline - time.perf_counter(), 0.01)
        return solve(replace(free, usage_limit=limit), time_limit=left).choice

    best = attempt(None)
    if best is None:
        return None
    peak = evaluate(problem, best)[1]
    low = 0
    if len(problem.usage_node):
        least = np.minimum.reduceat(problem.usages, problem.usage_ptr[:-1])
        low = int(profile_of(problem.usage_lo, problem.usage_hi, least)[1].max())
    limit = low  # often attained at once
    while peak > low + tolerance * low and time.perf_counter() < deadline:
        choice = attempt(limit)
        if choice is None:
            low = limit + 1
        else:
            best, peak = choice, evaluate(problem, choice)[1]
        limit = (low + peak) // 2
    return peak, best
