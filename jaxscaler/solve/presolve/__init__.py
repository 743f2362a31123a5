"""Exact reductions, in rounds until nothing changes; each step gives a way back for a choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxscaler.solve.kernel import Kernel, Way, chain, restrict
from jaxscaler.solve.presolve.arcs import supported
from jaxscaler.solve.presolve.dominance import dominated
from jaxscaler.solve.presolve.edges import merge, normalise
from jaxscaler.solve.presolve.eliminate import eliminate
from jaxscaler.solve.presolve.memory import affordable, tidy_memory

MOST_ROUNDS = 12
_WORTH = 0.995  # a round that leaves more than this of everything is the last

__all__ = ["presolve", "without_dominated"]


def presolve(kernel: Kernel, late: Callable[[], bool] = lambda: False) -> tuple[Kernel, Way]:
    """(smaller kernel of the same least cost, way between the two).

    late: asked after each round whether to leave it at that. Raises NoSolution when nothing is
    feasible.
    """
    ways: list[Way] = []

    def taken(step: tuple[Kernel, Way]) -> Kernel:
        ways.append(step[1])
        return step[0]

    for _ in range(MOST_ROUNDS):
        before = _size(kernel)
        kernel = taken(restrict(kernel, supported(kernel)))
        kernel = taken(merge(kernel))
        kernel = taken(restrict(kernel, supported(kernel)))
        kernel = tidy_memory(normalise(kernel))
        kernel = taken(restrict(kernel, affordable(kernel)))
        kernel = normalise(taken(restrict(kernel, supported(kernel))))
        kernel = taken(without_dominated(kernel))
        kernel = taken(eliminate(tidy_memory(kernel)))
        if all(now >= _WORTH * then for now, then in zip(_size(kernel), before, strict=True)):
            break
        if late():
            break
    return normalise(taken(restrict(kernel, supported(kernel)))), chain(ways)


def without_dominated(kernel: Kernel) -> tuple[Kernel, Way]:
    instead = dominated(kernel)
    return restrict(kernel, instead == np.arange(len(instead)), instead)


def _size(kernel: Kernel) -> tuple[int, ...]:
    return kernel.num_nodes, len(kernel.costs), len(kernel.edge_nodes), len(kernel.usages)
