"""Costs too large for the search's whole numbers: a coarser problem first, then without the excess.

The search adds costs in 64 bits. Where all of them together outgrow that, a rounded-down copy gives
a first choice and a bound; what alone costs more than that choice can then be forbidden, and what
is left is the same problem, in exact numbers, wherever it fits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxscaler.solve.evaluate import exact_sum
from jaxscaler.solve.problem import INFINITY, StrategyProblem

LARGEST = 2**58  # what all finite costs, or all usages, may add up to in the search


def largest_total(problem: StrategyProblem) -> float:
    """No choice of finite cost has a larger |cost| than this."""
    return sum(
        sum_of_maxima(np.where(numbers >= INFINITY, 0, np.abs(numbers)), ptr)
        for numbers, ptr in _tables(problem)
    )


def sum_of_maxima(numbers: np.ndarray, ptr: np.ndarray) -> float:
    """The largest of each group numbers[ptr[g] : ptr[g + 1]], added up."""
    if len(ptr) == 1:
        return 0.0
    return float(np.maximum.reduceat(numbers, ptr[:-1]).astype(np.float64).sum())


def coarser(problem: StrategyProblem) -> tuple[StrategyProblem, int]:
    """(the problem with every finite cost divided by 2**bits and rounded down, bits).

    bits is the least number that makes the costs fit. 2**bits times a bound of it is a bound.
    """
    bits = max(0, int(np.ceil(np.log2(largest_total(problem) / LARGEST))))
    while True:
        smaller = _with_costs(
            problem,
            *(
                np.where(costs >= INFINITY, INFINITY, costs >> bits)
                for costs, _ in _tables(problem)
            ),
        )
        if largest_total(smaller) <= LARGEST:
            return smaller, bits
        bits += 1


def clipped(problem: StrategyProblem, upper: int) -> StrategyProblem:
    """The problem without the entries that no choice of cost `upper` or less can hold.

    An entry goes when it and the least of all other nodes and edges are above `upper`.
    """
    least = [np.minimum.reduceat(c, ptr[:-1]) if len(ptr) > 1 else c for c, ptr in _tables(problem)]
    room = min(upper - sum(exact_sum(part) for part in least), 2 * INFINITY)
    excess = [
        costs - np.repeat(part, np.diff(ptr))
        for part, (costs, ptr) in zip(least, _tables(problem), strict=True)
    ]
    return _with_costs(
        problem,
        *(
            np.where(over > room, INFINITY, costs)
            for over, (costs, _) in zip(excess, _tables(problem), strict=True)
        ),
    )


def _tables(problem: StrategyProblem) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return (problem.node_costs, problem.node_ptr), (problem.edge_costs, problem.edge_ptr)


def _with_costs(problem: StrategyProblem, nodes: np.ndarray, edges: np.ndarray) -> StrategyProblem:
    return replace(problem, node_costs=nodes, edge_costs=edges)
