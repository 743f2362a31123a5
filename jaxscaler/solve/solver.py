"""The one solver of the planner: checks, presolve, a search per independent part, an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxscaler.solve.build import validate
from jaxscaler.solve.evaluate import evaluate, profile_of
from jaxscaler.solve.kernel import Kernel, NoSolution, from_problem, parts
from jaxscaler.solve.presolve import presolve
from jaxscaler.solve.problem import INFINITY, Solution, StrategyProblem
from jaxscaler.solve.search import EVERYTHING, Clock, Search, Use, run

Progress = Callable[[float, int | None, int], None]  # (seconds, incumbent, bound)
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
) -> Solution:
    """The cheapest choice of one strategy per node within the usage limit, with a lower bound.

    time_limit: wall-clock seconds. work_limit: about as many seconds of an idle core, counted, so
    that the answer depends on `seed` alone while the time limit does not bite. With neither the
    search ends with a proof. hint: a choice to start from. upper_bound: only a cost below it is
    of interest; status "bounded" says that there is none. progress: called with (seconds,
    incumbent, bound) when one of them changes. use: parts of the search to leave out.
    statistics["reason"] explains "infeasible". Raises SolveError on a malformed problem.
    """
    start = time.perf_counter()
    clock = Clock()
    if time_limit is not None:
        clock.deadline = start + max(time_limit - _WRAP_UP, 0.9 * time_limit)
    if work_limit is not None:
        clock.limit = work_limit
    validate(problem)
    report = _Report(problem, start, clock, progress)

    known, target = None, upper_bound  # a choice to beat, and the cost to beat
    if hint is not None:
        cost, _, feasible = evaluate(problem, hint)
        if feasible and (target is None or cost < target):
            known, target = np.asarray(hint, np.int64), cost

    reason = impossible(problem)
    if reason is None:
        try:
            kernel, way = presolve(from_problem(problem), clock.late)
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
    found, bound, proved = _search_parts(kernel, target, begin, seed, use, clock, report)

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
    clock: Clock,
    report: _Report,
) -> tuple[np.ndarray | None, int, bool]:
    """(choice or None, bound, proved) from a search in each independent part, small ones first.

    Proved with no choice: nothing costs less than `target`, or nothing is feasible.
    """
    pieces = sorted(parts(kernel), key=lambda part: len(part[0].edge_costs))
    bounds = [piece.offset for piece, _ in pieces]
    costs: list[int | None] = [None] * len(pieces)
    whole = np.zeros(kernel.num_nodes, np.int64)
    if begin is not None:
        whole = begin.copy()
        costs = [piece.cost(begin[nodes]) for piece, nodes in pieces]
    sizes = [1 + len(piece.edge_costs) for piece, _ in pieces]
    proved = True
    if clock.late():  # presolve has taken all the time
        return (None if begin is None else whole), sum(bounds), False
    for n, (piece, nodes) in enumerate(pieces):

        def note(cost: int | None, bound: int, n: int = n) -> None:
            costs[n] = costs[n] if cost is None else cost
            bounds[n] = bound
            known = [cost for cost in costs if cost is not None]
            report.note(sum(known) if len(known) == len(costs) else None, sum(bounds))

        upper = None if target is None else target - (sum(bounds) - bounds[n])
        own = costs[n]
        if own is not None:
            upper = own if upper is None else min(upper, own)
        search = Search(
            piece,
            upper=upper,
            clock=clock.part(sizes[n] / sum(sizes[n:])),
            seed=seed,
            use=use,
            note=note,
            best=None if begin is None else begin[nodes],
        )
        run(search)
        clock.spent += search.clock.spent
        bounds[n] = search.bound
        if search.best is None:
            return None, sum(bounds), search.closed
        proved &= search.closed
        whole[nodes] = search.best
        costs[n] = search.upper
    return whole, sum(bounds), proved


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
