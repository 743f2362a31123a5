"""Tied first, then untied: never worse than tied, feasible, and the truth on small problems."""

from __future__ import annotations

import numpy as np
import pytest
from solve_problems import all_choices, hard_problem, least, random_problem

from jaxscaler.errors import SolveError
from jaxscaler.solve import evaluate, make_problem, solve, solve_tied
from jaxscaler.solve.tied import tied


def random_groups(rng: np.random.Generator, sizes: np.ndarray) -> np.ndarray:
    """Nodes of as many strategies share a number now and then."""
    return np.array([1000 * k + rng.integers(0, 3) for k in sizes])


def test_the_tied_problem_is_the_problem_on_equal_choices() -> None:
    merged = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, memory=seed % 3 > 0)
        small, label = tied(problem, random_groups(rng, np.diff(problem.node_ptr)))
        merged += small.num_nodes < problem.num_nodes
        for choice in all_choices(np.diff(small.node_ptr))[:60]:
            cost, peak, feasible = evaluate(small, choice)
            whole = evaluate(problem, choice[label])
            assert (peak, feasible) == whole[1:], seed
            assert cost == whole[0] or not feasible, seed
    assert merged > 50


def test_never_worse_than_tied_and_the_truth() -> None:
    untied = 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        problem = hard_problem(rng) if seed % 2 else random_problem(rng)
        groups = random_groups(rng, np.diff(problem.node_ptr))
        solution, expected = solve_tied(problem, groups), least(problem)
        if expected is None:
            assert solution.status == "infeasible" and solution.choice is None, seed
            continue
        assert solution.status == "optimal" and solution.cost == expected, seed
        assert evaluate(problem, solution.choice)[2]
        cost = solution.statistics["tied_cost"]
        assert cost == least(tied(problem, groups)[0]), seed
        untied += cost is not None and cost > expected
    assert untied > 10


def layered_problem(seed: int, layers: int = 12, width: int = 8, k: int = 4):
    """(problem, groups): equal layers in a row; memory is short in the middle ones only."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 1000, (width, k))
    within = rng.integers(0, 400, (width, k, k))
    across = rng.integers(0, 400, (width, k, k))
    takes = rng.integers(1, 100, (width, k))
    nodes = [(layer, i) for layer in range(layers) for i in range(width)]
    edges = [(layer * width + i, layer * width + (i + 3) % width, within[i]) for layer, i in nodes]
    edges += [
        (layer * width + i, (layer + 1) * width + (i + 1) % width, across[i])
        for layer, i in nodes
        if layer + 1 < layers
    ]
    usages = [
        (layer * width + i, 0 if 4 <= layer < 8 else 8 * layer, 8 * layer + 8, takes[i])
        for layer, i in nodes
    ]
    problem = make_problem(np.tile(costs, (layers, 1)).tolist(), edges, usages, 1600)
    return problem, np.tile(np.arange(width), layers)


def test_never_worse_than_tied_under_a_work_limit() -> None:
    for seed in range(2):
        problem, groups = layered_problem(seed)
        runs = [solve_tied(problem, groups, seed=seed, work_limit=0.4) for _ in range(2)]
        assert runs[0].choice.tolist() == runs[1].choice.tolist()
        cost = runs[0].statistics["tied_cost"]
        assert cost == solve(tied(problem, groups)[0]).cost  # small, and solved in its share
        assert runs[0].bound <= runs[0].cost < cost
        assert evaluate(problem, runs[0].choice)[2]


@pytest.mark.parametrize(
    ("groups", "words"),
    [([0, 0], "needs one number for each"), ([5, 5, 1], "node 1 has 2 strategies, node 0 of its")],
)
def test_unfit_groups_are_named(groups: list[int], words: str) -> None:
    problem = make_problem([[1, 2, 3], [1, 2], [4]])
    with pytest.raises(SolveError, match=words):
        solve_tied(problem, np.array(groups))
