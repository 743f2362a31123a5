"""Random small strategy problems and their answers by enumeration, for the solver's tests."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from jaxscaler.solve import INFINITY, StrategyProblem, evaluate, make_problem
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


def program_like(
    rng: np.random.Generator,
    ops: int,
    *,
    widest: int = 6,
    hub: int = 0,
    follow: float = 0.4,
    barrier: float = 0.1,
    chords: float = 0.6,
    resident: float = 0.1,
    slack: float | None = 1.1,
    digits: tuple[float, float] = (3.0, 6.0),
    islands: int = 1,
) -> tuple[StrategyProblem, np.ndarray]:
    """(problem, a feasible choice): `ops` operations as automatic sharding sees them.

    A strategy assigns three mesh axes of size 4 to one of three dims or to none. Edges cost volume
    times axes that differ; an op that `follow`s takes its operand's strategies, and of `barrier`
    edges half is forbidden. Memory is volume over shards from an op to its last reader, or for
    `resident` ones throughout; the limit is `slack` times what the leanest choice takes (None: no
    limit). hub: strategies of one op. digits: range of log10 volume. islands: parts without edges
    between them.
    """
    shards = np.array([1, 4, 4, 4])
    volumes = np.array([int(10 ** rng.uniform(*digits)) for _ in range(ops)])
    span = -(-ops // islands)
    specs: list[np.ndarray] = []
    lean = np.zeros(ops, np.int64)
    last = np.arange(ops) + 1
    costs, edges = [], []
    for v in range(ops):
        first = v - v % span
        near = [v - 1 - int(rng.geometric(0.3) - 1)]
        if rng.random() < chords:
            near.append(v - 1 - int(rng.integers(0, 30)))
        operands = sorted({max(first, u) for u in near} if v > first else [])
        follows = bool(operands) and rng.random() < follow
        if follows:
            specs.append(specs[operands[0]])
            lean[v] = lean[operands[0]]
        else:
            k = hub if hub and v == ops // 2 else int(rng.integers(2, widest + 1))
            specs.append(rng.integers(0, 4, (k, 3)))
            lean[v] = np.argmax(np.prod(shards[specs[v]], axis=1))
        k = len(specs[v])
        free = follows or rng.random() < 0.1
        costs.append(np.zeros(k) if free else volumes[v] * 10 * rng.random(k))
        for u in operands:
            last[u] = v + 1
            away = (specs[u][:, None] != specs[v]).sum(axis=2)
            table = (volumes[u] * away * (1 + 0.01 * rng.random(away.shape))).astype(np.int64)
            if follows and u == operands[0]:
                table = np.where(np.eye(k, dtype=bool), 0, INFINITY)
            elif rng.random() < barrier:
                shut = rng.random(table.shape) < 0.5
                shut[lean[u], lean[v]] = False
                table[shut] = INFINITY
            edges.append((u, v, table))
    usages = []
    for v in range(ops):
        lo, hi = (0, ops) if rng.random() < resident else (v, int(last[v]))
        usages.append((v, lo, hi, 1 + volumes[v] // np.prod(shards[specs[v]], axis=1)))
    problem = make_problem([c.astype(np.int64).tolist() for c in costs], edges, usages)
    if slack is not None:
        peak = evaluate(problem, lean)[1]
        problem = replace(problem, usage_limit=int(peak * slack))
    return problem, lean


FAMILIES: dict[str, dict] = {
    "plain": {},
    "dense": dict(resident=0.9, follow=0.2),
    "tight": dict(slack=1.0, barrier=0.9, chords=1.0, follow=0.2),
    "hub": dict(hub=400, widest=10),
    "no limit": dict(slack=None, follow=0.1, chords=1.0),
    "islands": dict(islands=20),
    "islands without limit": dict(islands=20, slack=None, chords=1.0),
    "wide range": dict(digits=(0.0, 11.0)),
    "barriers": dict(barrier=0.9, follow=0.2),
}
