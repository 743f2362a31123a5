"""Compile (or load from the cache) every compiled function of the solver, once per process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from jaxscaler.solve.build import make_problem
from jaxscaler.solve.iopddl import read_problem, write_problem
from jaxscaler.solve.problem import INFINITY, StrategyProblem
from jaxscaler.solve.solver import solve


@cache
def warm() -> None:
    """Run reader and solver on a small problem, so that no time limit pays for compiling."""
    problem = _small_problem()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "warm.json"
        write_problem(problem, path)
        solve(read_problem(path), work_limit=0.5)


def _small_problem() -> StrategyProblem:
    """A ring of rings with memory, forbidden pairs and a determined node: every step has work."""
    rng = np.random.default_rng(0)
    n, k = 24, 5
    costs = rng.integers(0, 100, (n, k)).tolist()
    edges = []
    for i in range(n):
        for j in {(i + 1) % n, (i + 7) % n}:
            table = rng.integers(0, 100, (k, k))
            table[rng.random((k, k)) < 0.1] = INFINITY
            edges.append((i, j, table))
    costs.append([0] * k)
    edges.append((0, n, np.where(np.eye(k, dtype=bool), 0, INFINITY)))
    usages = [(i, i, i + 4, rng.integers(1, 20, k)) for i in range(0, n + 1, 2)]
    return make_problem(costs, edges, usages, 30)
