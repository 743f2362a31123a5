"""Make a StrategyProblem from Python lists, and say by name what is wrong with one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxscaler.errors import SolveError
from jaxscaler.solve.problem import INFINITY, StrategyProblem
from jaxscaler.solve.scale import LARGEST, sum_of_maxima


def make_problem(
    costs: Sequence[Sequence[int]],
    edges: Sequence[tuple[int, int, ArrayLike]] = (),
    usages: Sequence[tuple[int, int, int, ArrayLike]] = (),
    usage_limit: int | None = None,
    name: str = "problem",
) -> StrategyProblem:
    """A checked StrategyProblem.

    costs: one list per node; edges: (i, j, table of shape [k_i, k_j]); usages: (node, lo, hi, one
    number per strategy). Raises SolveError as `validate` does.
    """

    def joined(lists: Sequence) -> np.ndarray:
        rows = [np.asarray(row, np.int64).ravel() for row in lists]
        return np.concatenate(rows) if rows else np.zeros(0, np.int64)

    def pointers(lists: Sequence) -> np.ndarray:
        return np.cumsum([0, *(np.size(row) for row in lists)], dtype=np.int64)

    tables = [table for _, _, table in edges]
    taken = [numbers for _, _, _, numbers in usages]
    problem = StrategyProblem(
        name=name,
        node_ptr=pointers(costs),
        node_costs=joined(costs),
        edge_nodes=np.array([(i, j) for i, j, _ in edges], np.int64).reshape(-1, 2),
        edge_ptr=pointers(tables),
        edge_costs=joined(tables),
        usage_node=np.array([entry[0] for entry in usages], np.int64),
        usage_lo=np.array([entry[1] for entry in usages], np.int64),
        usage_hi=np.array([entry[2] for entry in usages], np.int64),
        usage_ptr=pointers(taken),
        usages=joined(taken),
        usage_limit=usage_limit,
    )
    validate(problem)
    return problem


def validate(problem: StrategyProblem) -> None:
    """Raise SolveError, naming the node, edge or usage entry, where the arrays break the format."""

    def check(good: np.ndarray | np.bool, what: str, rule: str) -> None:
        if not np.all(good):
            where = int(np.argmin(good))
            raise SolveError(f"{problem.name}: {what} {where}: {rule}")

    n, ptr = problem.num_nodes, problem.node_ptr
    sizes = np.diff(ptr)
    check(sizes > 0, "node", "needs at least one strategy")
    inside = ((problem.edge_nodes >= 0) & (problem.edge_nodes < n)).all(axis=1)
    check(inside, "edge", f"joins a node outside 0..{n - 1}")
    check(problem.edge_nodes[:, 0] != problem.edge_nodes[:, 1], "edge", "joins a node to itself")
    table = sizes[problem.edge_nodes[:, 0]] * sizes[problem.edge_nodes[:, 1]]
    check(np.diff(problem.edge_ptr) == table, "edge", "needs k_i * k_j costs")
    check((problem.usage_node >= 0) & (problem.usage_node < n), "usage entry", "has no such node")
    check(
        np.diff(problem.usage_ptr) == sizes[problem.usage_node],
        "usage entry",
        "needs one usage per strategy of its node",
    )
    check(problem.usage_lo <= problem.usage_hi, "usage entry", "its interval ends before it starts")
    entry = np.repeat(np.arange(len(problem.usage_node)), np.diff(problem.usage_ptr))
    if len(entry) and problem.usages.min() < 0:
        where = entry[np.argmin(problem.usages)]
        raise SolveError(f"{problem.name}: usage entry {where}: usages must not be negative")
    for label, numbers in (("node", problem.node_costs), ("edge", problem.edge_costs)):
        if len(numbers) and numbers.min() <= -INFINITY:
            raise SolveError(f"{problem.name}: a cost of {label}s is at or below -10**18")
    total = sum_of_maxima(problem.usages, problem.usage_ptr)
    if total > LARGEST:
        raise SolveError(
            f"{problem.name}: the usages could add up to {total:.3g}, above 2**58: divide them and "
            "the limit by a power of ten"
        )
