"""Random small strategy problems and their answers by enumeration, for the solver's tests."""

from __future__ import annotations

import itertools

import numpy as np

from jaxscaler.solve import INFINITY, StrategyProblem, make_problem
from jaxscaler.solve.kernel import FORBIDDEN, Kernel


def random_problem(rng: np.random.Generator, memory: bool = True) -> StrategyProblem:
    """Up to 6 nodes of up to 4 strategies; functional, constant, separable and parallel edges."""
    n = int(rng.integers(1, 7))
    sizes = rng.integers(1, 5, n)
    top = int(rng.choice([3, 20, 1000]))
    forbid = rng.choice([0.0, 0.15, 0.4])

    def spoiled(table: np.ndarray) -> np.ndarray:
        return np.where(rng.random(table.shape) < forbid, INFINITY, table)

    costs = [spoiled(rng.integers(0, top, k)).tolist() for k in sizes]
    edges = []
    for _ in range(int(rng.integers(0, 2 * n + 1))):
        if n == 1:
            break
        i, j = rng.choice(n, 2, replace=False)
        shape = sizes[i], sizes[j]
        kind = rng.integers(0, 5)
        if kind == 0:  # one finite entry per row: j is a function of i
            table = np.full(shape, INFINITY)
            table[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = rng.integers(0, top)
        elif kind == 1:
            table = rng.integers(0, top, (shape[0], 1)) + rng.integers(0, top, (1, shape[1]))
        else:
            table = spoiled(rng.integers(0, top, shape))
        edges.append((int(i), int(j), table.tolist()))
    usages, limit = [], None
    if memory:
        for _ in range(int(rng.integers(0, 2 * n + 1))):
            i = int(rng.integers(0, n))
            lo = int(rng.integers(0, 8))
            usages.append((i, lo, lo + int(rng.integers(0, 6)), rng.integers(0, 9, sizes[i])))
        limit = int(rng.integers(0, 25))
    return make_problem(costs, edges, usages, limit)


def hard_problem(rng: np.random.Generator) -> StrategyProblem:
    """Up to 7 nodes of 3 strategies, well connected, cheap ones take memory: a kernel remains."""
    n = int(rng.integers(5, 8))
    sizes = np.full(n, 3)
    costs = [np.sort(rng.integers(0, 150, k)).tolist() for k in sizes]
    edges = []
    for i in range(n):
        for j in range(i + 1, n):
            if rng.random() < 0.7:
                table = rng.integers(0, 100, (sizes[i], sizes[j]))
                table[rng.random(table.shape) < rng.choice([0.0, 0.1])] = INFINITY
                edges.append((i, j, table))
    usages = []
    for i in range(n):
        for _ in range(int(rng.integers(1, 3))):
            lo = int(rng.integers(0, 6))
            usages.append(
                (i, lo, lo + int(rng.integers(2, 6)), np.sort(rng.integers(0, 9, 3))[::-1])
            )
    return make_problem(costs, edges, usages, int(rng.integers(4, 22)))


def least(problem: StrategyProblem) -> int | None:
    """The least cost by enumeration; None: nothing is feasible."""
    choices = all_choices(np.diff(problem.node_ptr))
    cost = problem.node_costs[problem.node_ptr[:-1] + choices].astype(object).sum(axis=1)
    for e, (i, j) in enumerate(problem.edge_nodes):
        k = problem.node_ptr[j + 1] - problem.node_ptr[j]
        cost = cost + problem.edge_costs[problem.edge_ptr[e] + choices[:, i] * k + choices[:, j]]
    feasible = cost < INFINITY
    if problem.usage_limit is not None:
        used = problem.usages[problem.usage_ptr[:-1] + choices[:, problem.usage_node]]
        for t in problem.usage_lo:
            live = (problem.usage_lo <= t) & (t < problem.usage_hi)
            feasible &= used[:, live].sum(axis=1) <= problem.usage_limit
    return min(cost[feasible], default=None)


def all_choices(sizes: np.ndarray) -> np.ndarray:
    choices = list(itertools.product(*(range(k) for k in sizes)))
    return np.array(choices, np.int64).reshape(len(choices), len(sizes))


def kernel_least(kernel: Kernel) -> int | None:
    """The least cost of a kernel by enumeration; None: nothing is feasible."""
    best = None
    for choice in all_choices(kernel.sizes):
        cost = kernel.cost(choice)
        if cost < FORBIDDEN and kernel.fits(choice) and (best is None or cost < best):
            best = cost
    return best
