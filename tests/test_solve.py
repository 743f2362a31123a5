"""The whole solver against enumeration, and its promises on limits, bounds and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from solve_problems import all_choices, hard_problem, least, random_problem

from jaxscaler.errors import SolveError
from jaxscaler.solve import INFINITY, Use, evaluate, least_memory, make_problem, solve


@pytest.mark.parametrize("memory", [True, False])
def test_optimal_or_proved_infeasible(memory: bool) -> None:
    infeasible = 0
    for seed in range(300):
        problem = random_problem(np.random.default_rng(10_000 + seed), memory)
        solution, expected = solve(problem, seed=seed), least(problem)
        if expected is None:
            infeasible += 1
            assert solution.status == "infeasible" and solution.choice is None, seed
            assert solution.statistics["reason"]
        else:
            assert solution.status == "optimal", seed
            assert solution.cost == solution.bound == expected, seed
            assert solution.gap == 0
            cost, peak, feasible = evaluate(problem, solution.choice)
            assert feasible and cost == expected and peak == solution.peak_usage
    assert infeasible > 20


def test_optimal_where_a_kernel_is_left() -> None:
    """Problems that presolve does not finish: the rest of the search agrees with the truth."""
    kernels = infeasible = 0
    for seed in range(120):
        problem = hard_problem(np.random.default_rng(seed))
        solution, expected = solve(problem, seed=seed), least(problem)
        kernels += solution.statistics.get("kernel_nodes", 0) > 0
        if expected is None:
            infeasible += 1
            assert solution.status == "infeasible", seed
        else:
            assert solution.status == "optimal", seed
            assert solution.cost == solution.bound == expected, seed
            assert evaluate(problem, solution.choice)[2]
    assert kernels > 30 and infeasible > 5


def test_bounds_and_fixing_alone_are_sound() -> None:
    """Without CP-SAT every proof rests on the multipliers' exact bounds."""
    proved = 0
    for seed in range(60):
        problem = hard_problem(np.random.default_rng(1000 + seed))
        expected = least(problem)
        solution = solve(problem, work_limit=0.05, use=Use(cpsat=False))
        proved += solution.status in ("optimal", "infeasible")
        assert expected is None or solution.bound <= expected, seed
        if solution.status == "optimal":
            assert solution.cost == expected, seed
        elif solution.status == "infeasible":
            assert expected is None, seed
        elif solution.choice is not None:
            assert evaluate(problem, solution.choice)[2] and solution.cost >= expected
    assert proved > 15


def test_upper_bound_and_hint() -> None:
    seen = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng) if seed % 4 else hard_problem(rng)
        expected = least(problem)
        if expected is None:
            continue
        seen += 1
        assert solve(problem, upper_bound=expected).status == "bounded"
        assert solve(problem, upper_bound=expected).choice is None
        assert solve(problem, upper_bound=expected + 1).cost == expected
        for choice in all_choices(np.diff(problem.node_ptr))[::7][:6]:
            solution = solve(problem, hint=choice)
            assert solution.status == "optimal" and solution.cost == expected
    assert seen > 20


def test_least_memory() -> None:
    seen = 0
    for seed in range(100):
        problem = random_problem(np.random.default_rng(seed))
        peaks = [
            evaluate(problem, choice)[1]
            for choice in all_choices(np.diff(problem.node_ptr))
            if evaluate(problem, choice)[0] < INFINITY
        ]
        answer = least_memory(problem)
        if not peaks:
            assert answer is None
            continue
        seen += 1
        peak, choice = answer
        assert peak == min(peaks) == evaluate(problem, choice)[1]
        assert evaluate(problem, choice)[0] < INFINITY
    assert seen > 50


def test_infeasible_is_explained_by_name() -> None:
    problem = make_problem([[1, 2], [INFINITY, INFINITY]])
    assert "node 1" in solve(problem).statistics["reason"]
    problem = make_problem([[1, 2]], usages=[(0, 3, 9, [7, 8])], usage_limit=6)
    reason = solve(problem).statistics["reason"]
    assert "time 3" in reason and "7" in reason and "limit 6" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edge_nodes": np.array([[0, 5]])}, "edge 0: joins a node outside"),
        ({"edge_nodes": np.array([[1, 1]])}, "edge 0: joins a node to itself"),
        ({"edge_ptr": np.array([0, 3])}, "edge 0: needs k_i"),
        ({"usage_node": np.array([2])}, "usage entry 0"),
        ({"usage_hi": np.array([-1])}, "usage entry 0: its interval"),
        ({"usages": np.array([1, -2])}, "usages must not be negative"),
        ({"usages": np.array([2**59, 1])}, "could add up"),
        ({"node_costs": np.array([-(10**18), 1, 2, 3])}, "below -10"),
    ],
)
def test_malformed_problems_are_named(change: dict, words: str) -> None:
    good = make_problem([[1, 2], [3, 4]], [(0, 1, [[1, 2], [3, 4]])], [(0, 0, 1, [1, 2])], 5)
    with pytest.raises(SolveError, match=words):
        solve(replace(good, **change))


def wide_problem(seed: int, n: int = 80, k: int = 5):
    """A ring with chords, wide enough that presolve leaves a kernel, memory tight."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 1000, (n, k)).tolist()
    edges = [
        (i, j, rng.integers(0, 400, (k, k)))
        for i in range(n)
        for j in {(i + 1) % n, (i + 11) % n, (i + 29) % n}
    ]
    usages = [(i, i, i + 15, rng.integers(1, 100, k)) for i in range(n)]
    return make_problem(costs, edges, usages, 500)


def test_same_seed_and_work_give_the_same_run() -> None:
    problem = wide_problem(0)
    runs = [solve(problem, seed=seed, work_limit=0.3) for seed in (5, 5, 6)]
    traces = [[point[1:] for point in run.trace] for run in runs]
    assert runs[0].choice.tolist() == runs[1].choice.tolist()
    assert traces[0] == traces[1] and runs[0].statistics["work"] == runs[1].statistics["work"]
    assert len(traces[0]) > 3 and traces[0] != traces[2]


@pytest.mark.parametrize("left_out", ["cpsat", "multipliers", "moves"])
def test_each_part_alone_is_honest(left_out: str) -> None:
    """Without a part the answer may be worse, but bound <= best known <= cost stays true."""
    problem = wide_problem(1, n=30, k=4)
    whole = solve(problem)
    part = solve(problem, work_limit=0.3, use=Use(**{left_out: False}))
    assert whole.status == "optimal"
    assert part.bound <= whole.cost <= part.cost
    assert evaluate(problem, part.choice)[2]


def test_progress_only_gets_better() -> None:
    seen: list[tuple[float, int | None, int]] = []
    solution = solve(wide_problem(2), work_limit=0.3, progress=lambda *point: seen.append(point))
    assert tuple(seen) == solution.trace
    costs = [cost for _, cost, _ in seen if cost is not None]
    bounds = [bound for _, _, bound in seen]
    assert costs == sorted(costs, reverse=True) and bounds == sorted(bounds)
    assert costs[-1] == solution.cost and bounds[-1] == solution.bound
    assert all(bound <= cost for _, cost, bound in seen if cost is not None)


def test_huge_and_negative_costs_keep_exact_bounds() -> None:
    for seed in range(25):
        rng = np.random.default_rng(seed)
        k = 3
        costs = rng.integers(-(10**15), 10**15, (5, k)).tolist()
        edges = [(i, (i + 1) % 5, rng.integers(-(10**14), 10**14, (k, k))) for i in range(5)]
        edges += [(0, 2, rng.integers(0, 9, (k, k)))]
        usages = [(i, 0, 3, rng.integers(0, 10**9, k)) for i in range(5)]
        problem = make_problem(costs, edges, usages, 2 * 10**9)
        solution, expected = solve(problem), least(problem)
        if expected is None:
            assert solution.status == "infeasible"
        else:
            assert solution.status == "optimal" and solution.cost == solution.bound == expected
