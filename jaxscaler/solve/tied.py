"""Repeated parts tied to one strategy first, then untied and refined from there."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from jaxscaler.errors import SolveError
from jaxscaler.solve.evaluate import evaluate
from jaxscaler.solve.kernel import take_groups
from jaxscaler.solve.problem import INFINITY, Solution, StrategyProblem
from jaxscaler.solve.solver import Progress, solve

_TIED = 0.3  # of the time and work go to the tied problem, at most


def solve_tied(
    problem: StrategyProblem,
    groups: np.ndarray,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    work_limit: float | None = None,
    progress: Progress | None = None,
) -> Solution:
    """As `solve`, but from the best choice found that is equal within each group.

    groups [num_nodes]: nodes of one number belong together; they need as many strategies each,
    in the same order. The answer is of the problem as given, and never dearer than the tied one;
    statistics["tied_cost"] has that (None: none was found). With neither limit the tied problem is
    solved to its proof first. Raises SolveError where nodes of a group differ in their number of
    strategies.
    """
    start = time.perf_counter()
    small, label = tied(problem, groups)
    first = solve(
        small,
        time_limit=None if time_limit is None else _TIED * time_limit,
        seed=seed,
        work_limit=None if work_limit is None else _TIED * work_limit,
    )
    hint = None if first.choice is None else first.choice[label]
    before = time.perf_counter() - start
    second = solve(
        problem,
        time_limit=None if time_limit is None else max(time_limit - before, 0.01),
        seed=seed,
        work_limit=None if work_limit is None else work_limit - first.statistics.get("work", 0.0),
        hint=hint,
        progress=progress and (lambda at, cost, bound: progress(before + at, cost, bound)),
    )
    cost = None if hint is None else evaluate(problem, hint)[0]
    return replace(
        second,
        seconds=time.perf_counter() - start,
        trace=tuple((before + at, cost, bound) for at, cost, bound in second.trace),
        statistics=second.statistics | {"tied_cost": cost, "tied_seconds": before},
    )


def tied(problem: StrategyProblem, groups: np.ndarray) -> tuple[StrategyProblem, np.ndarray]:
    """(the problem with one node per group, the new node of each old one [num_nodes]).

    A choice c of the smaller one costs and takes what c[label] does in the larger one.
    """
    groups = np.asarray(groups)
    if groups.shape != (problem.num_nodes,):
        raise SolveError(
            f"{problem.name}: groups has shape {groups.shape}; it needs one number for each of the "
            f"{problem.num_nodes} nodes"
        )
    _, first, label = np.unique(groups, return_index=True, return_inverse=True)
    k = np.diff(problem.node_ptr)
    if (k != k[first][label]).any():
        node = int(np.argmax(k != k[first][label]))
        raise SolveError(
            f"{problem.name}: node {node} has {k[node]} strategies, node {first[label][node]} of "
            f"its group {k[first][label][node]}: nodes of a group need as many each"
        )
    node_ptr = np.concatenate([[0], np.cumsum(k[first])]).astype(np.int64)
    costs = np.zeros(node_ptr[-1], np.int64)

    def add(nodes: np.ndarray, more: np.ndarray) -> None:
        """Add `more`, one number per strategy of each of `nodes` in turn, to their groups."""
        at = np.arange(k[nodes].sum()) - np.repeat(np.cumsum(k[nodes]) - k[nodes], k[nodes])
        at += np.repeat(node_ptr[:-1][label[nodes]], k[nodes])
        forbidden = more >= INFINITY
        np.add.at(costs, at[~forbidden], more[~forbidden])
        banned[at[forbidden]] = True

    banned = np.zeros(len(costs), bool)
    add(np.arange(problem.num_nodes), problem.node_costs)
    ends = label[problem.edge_nodes].reshape(-1, 2)
    inner = np.flatnonzero(ends[:, 0] == ends[:, 1])
    nodes = problem.edge_nodes[inner, 0]
    size = k[nodes]
    diagonal = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    diagonal = diagonal * (np.repeat(size, size) + 1) + np.repeat(
        problem.edge_ptr[:-1][inner], size
    )
    add(nodes, problem.edge_costs[diagonal])
    outer = np.flatnonzero(ends[:, 0] != ends[:, 1])
    edge_ptr, edge_costs = take_groups(problem.edge_ptr, problem.edge_costs, outer)
    small = replace(
        problem,
        node_ptr=node_ptr,
        node_costs=np.where(banned, INFINITY, costs),
        edge_nodes=ends[outer],
        edge_ptr=edge_ptr,
        edge_costs=edge_costs,
        usage_node=label[problem.usage_node],
    )
    return small, label
