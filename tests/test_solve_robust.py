"""Shapes that solvers stumble over: many parts, large tables, dense rows, extreme costs."""

from __future__ import annotations

import numpy as np
import pytest
from solve_problems import FAMILIES, kernel_least, least, program_like

from jaxscaler.solve import INFINITY, StrategyProblem, evaluate, make_problem, solve
from jaxscaler.solve.kernel import from_problem
from jaxscaler.solve.messages import scaled
from jaxscaler.solve.moves import start_walk, tree_moves, view_of
from jaxscaler.solve.presolve import presolve
from jaxscaler.solve.repair import peaks
from jaxscaler.solve.scale import LARGEST, clipped, coarser, largest_total


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_within_memory_wherever_there_is_one(family: str) -> None:
    for seed in range(2):
        problem, lean = program_like(np.random.default_rng(seed), 250, **FAMILIES[family])
        known, _, feasible = evaluate(problem, lean)
        assert feasible
        solution = solve(problem, seed=seed, work_limit=0.1)
        cost, peak, feasible = evaluate(problem, solution.choice)
        assert feasible and (cost, peak) == (solution.cost, solution.peak_usage)
        assert solution.bound <= min(cost, known)
        if solution.status == "optimal":
            assert cost == solution.bound


@pytest.mark.parametrize("family", ["islands", "hub"])
def test_families_are_deterministic(family: str) -> None:
    problem, _ = program_like(np.random.default_rng(5), 250, **FAMILIES[family])
    runs = [solve(problem, seed=3, work_limit=0.05) for _ in range(2)]
    assert runs[0].choice.tolist() == runs[1].choice.tolist()
    assert [point[1:] for point in runs[0].trace] == [point[1:] for point in runs[1].trace]


def test_a_small_part_beside_a_large_one_gets_an_answer() -> None:
    """Time is shared by size, but no part goes without."""
    rng = np.random.default_rng(0)
    n = 12

    def clique(first: int, k: int) -> list:
        pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
        return [(first + a, first + b, rng.integers(0, 99, (k, k))) for a, b in pairs]

    costs = [[0] * 2] * n + [[0] * 25] * n
    problem = make_problem(costs, [*clique(0, 2), *clique(n, 25)])
    for hint in (None, np.zeros(2 * n, np.int64)):
        solution = solve(problem, work_limit=0.02, hint=hint)
        assert solution.choice is not None
        assert solution.bound <= solution.cost == evaluate(problem, solution.choice)[0]


def shelves(seed: int, n: int = 40, k: int = 60, rows: int = 8) -> StrategyProblem:
    """No edges, each node free at its cheapest, and memory that takes away half of that."""
    rng = np.random.default_rng(seed)
    costs = np.sort(rng.integers(1, 10**6, (n, k)), axis=1)
    costs[:, 0] = 0
    takes = np.sort(rng.integers(0, 1000, (n, k)), axis=1)[:, ::-1]
    usages = [(i, i, i + rows, takes[i]) for i in range(n)]
    return make_problem(costs.tolist(), (), usages, 450 * rows)


def test_memory_that_alone_makes_the_cost_still_has_a_bound() -> None:
    """Without memory everything is free, so the scale of the costs shows only afterwards."""
    solution = solve(shelves(0), work_limit=1.0)
    assert solution.status in ("optimal", "feasible") and solution.gap < 0.1


def test_one_row_of_long_intervals_moves_as_many_short_ones() -> None:
    """Usage and cost stay what they are counted to be, whichever way a move shifts the rows."""
    for resident in (0.0, 1.0):
        problem, lean = program_like(np.random.default_rng(1), 120, resident=resident, slack=1.3)
        kernel = from_problem(problem)
        walk = start_walk(kernel, lean)
        before = walk.cost
        best, cost, work = tree_moves(
            view_of(kernel), walk, np.zeros(len(kernel.costs)), visits=2000, size=20, noise=0.0,
            temperature=0.0, seed=0,
        )  # fmt: skip
        assert work > 0 and cost < before
        assert kernel.cost(best) == cost and kernel.fits(best)
        assert walk.usage.tolist() == kernel.row_usage(walk.choice).tolist()


def test_moves_end_with_their_work() -> None:
    problem, lean = program_like(np.random.default_rng(2), 100, slack=None)
    kernel = from_problem(problem)
    _, _, work = tree_moves(
        view_of(kernel), start_walk(kernel, lean), np.zeros(len(kernel.costs)), most=50_000,
        size=10, noise=0.0, temperature=0.0, seed=0,
    )  # fmt: skip
    assert 50_000 <= work < 100_000


def test_presolve_that_is_late_is_still_exact() -> None:
    """However many steps it gets, the kernel has the least cost and its choices lift."""
    for seed in range(3):
        problem, _ = program_like(np.random.default_rng(seed), 30, barrier=0.5)
        expected = solve(problem).cost
        for steps in range(0, 20, 3):
            left = iter(range(steps))
            kernel, way = presolve(from_problem(problem), lambda left=left: next(left, -1) < 0)
            free = np.flatnonzero(kernel.sizes > 1)
            if len(free) <= 8 and np.prod(kernel.sizes.astype(float)) < 20_000:
                assert kernel_least(kernel) == expected
            lowered = way.lower(solve(problem).choice)
            lifted = way.lift(lowered)
            assert evaluate(problem, lifted)[0] == expected == kernel.cost(lowered)


def test_peaks_of_pieces() -> None:
    excess = np.array([-1, 3, 5, 4, 0, 2, 2, 7, 1])
    assert peaks(excess).tolist() == [2, 7]
    assert peaks(excess, 2).tolist() == [1, 2, 5, 7]
    assert peaks(excess, 100).tolist() == [1, 2, 3, 5, 6, 7, 8]
    assert peaks(-excess - 9).tolist() == []


def test_scaled_costs_are_never_rounded_up() -> None:
    rng = np.random.default_rng(0)
    costs = np.concatenate([2 ** rng.integers(0, 59, 300) - rng.integers(0, 3, 300), [INFINITY]])
    costs = np.maximum(costs, 0).astype(np.int64)
    for shift in (-40, -9, -1, 0, 5, 39):
        got = scaled(costs, shift)
        exact = [c << shift if shift >= 0 else c >> -shift for c in costs.tolist()[:-1]]
        assert got[:-1].tolist() == [float(min(c, 2**46)) for c in exact]
        assert np.isinf(got[-1])


def large_problem(rng: np.random.Generator) -> StrategyProblem:
    """Costs from 0 to 9e17 with memory: no sum of them fits in 64 bits."""
    n, k = 5, 3

    def numbers(*shape: int) -> np.ndarray:
        return (10 ** rng.uniform(0, 17.95, shape)).astype(np.int64)

    costs = numbers(n, k) * rng.choice([1, -1, 1], (n, k))
    edges = [(i, j, numbers(k, k)) for i in range(n) for j in range(i + 1, n)]
    edges = [(i, j, np.where(rng.random((k, k)) < 0.1, INFINITY, t)) for i, j, t in edges]
    usages = [(i, 0, 3, rng.integers(0, 9, k)) for i in range(n)]
    return make_problem(costs.tolist(), edges, usages, int(rng.integers(8, 30)))


def test_costs_beyond_64_bits_are_answered_with_true_bounds() -> None:
    proved = infeasible = 0
    for seed in range(24):
        problem = large_problem(np.random.default_rng(seed))
        expected = least(problem)
        assert largest_total(problem) > LARGEST
        solution = solve(problem)
        if expected is None:
            infeasible += 1
            assert solution.status == "infeasible", seed
            continue
        assert solution.bound <= expected <= solution.cost, seed
        assert solution.cost == evaluate(problem, solution.choice)[0]
        assert solution.cost - expected <= 2**-20 * max(abs(expected), 2**59), seed
        proved += solution.status == "optimal"
        if solution.status == "optimal":
            assert solution.cost == expected, seed
        assert solve(problem, upper_bound=expected).choice is None, seed
    assert proved > 5 and infeasible > 0


def test_coarser_and_clipped_keep_what_they_promise() -> None:
    for seed in range(20):
        problem = large_problem(np.random.default_rng(seed))
        small, bits = coarser(problem)
        assert largest_total(small) <= LARGEST and bits > 0
        expected = least(problem)
        if expected is not None:
            assert least(small) << bits <= expected
            assert least(clipped(problem, expected)) == expected
