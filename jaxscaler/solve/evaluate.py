"""What a choice costs and takes, from the problem as it was given."""

from __future__ import annotations

import numpy as np

from jaxscaler.solve.problem import INFINITY, StrategyProblem


def evaluate(problem: StrategyProblem, choice: np.ndarray) -> tuple[int, int, bool]:
    """(cost, peak usage, feasible) of `choice` [num_nodes], in exact whole numbers.

    Feasible: every chosen cost is finite and the peak is within the usage limit.
    """
    choice = np.asarray(choice, np.int64)
    i, j = problem.edge_nodes[:, 0], problem.edge_nodes[:, 1]
    columns = np.diff(problem.node_ptr)[j]
    chosen = np.concatenate(
        [
            problem.node_costs[problem.node_ptr[:-1] + choice],
            problem.edge_costs[problem.edge_ptr[:-1] + choice[i] * columns + choice[j]],
        ]
    )
    forbidden = int((chosen >= INFINITY).sum())
    cost = exact_sum(chosen[chosen < INFINITY]) + forbidden * INFINITY
    _, profile = usage_profile(problem, choice)
    peak = int(profile.max(initial=0))
    fits = problem.usage_limit is None or peak <= problem.usage_limit
    return cost, peak, fits and not forbidden


def exact_sum(numbers: np.ndarray) -> int:
    """The sum of int64 numbers, however large it is."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def usage_profile(problem: StrategyProblem, choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(times, usage): usage[r] is what `choice` takes from times[r] to times[r + 1]."""
    used = problem.usages[problem.usage_ptr[:-1] + np.asarray(choice)[problem.usage_node]]
    return profile_of(problem.usage_lo, problem.usage_hi, used)


def profile_of(lo: np.ndarray, hi: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum of `used` over the intervals [lo, hi) at every moment where that sum can change."""
    times = np.unique(np.concatenate([lo, hi]))
    steps = np.zeros(len(times), np.int64)
    np.add.at(steps, np.searchsorted(times, lo), used)
    np.subtract.at(steps, np.searchsorted(times, hi), used)
    return times, np.cumsum(steps)
