"""Exact reductions, in rounds until nothing changes; each step gives a way back for a choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from jaxscaler.solve.kernel import UNCHANGED, Kernel, Way, chain, restrict
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

    late: asked before each step whether to leave it at that. Raises NoSolution when nothing is
    feasible.
    """
    steps = (
        consistent, merge, consistent, separated, within_memory,
        partial(without_dominated, late=late), eliminated,
    )  # fmt: skip
    ways: list[Way] = []
    for _ in range(MOST_ROUNDS):
        before = _size(kernel)
        for step in steps:
            if late():
                break
            kernel, way = step(kernel)
            ways.append(way)
        if late() or all(
            now >= _WORTH * then for now, then in zip(_size(kernel), before, strict=True)
        ):
            break
    kernel, way = consistent(kernel)
    return normalise(kernel), chain([*ways, way])


def consistent(kernel: Kernel) -> tuple[Kernel, Way]:
    """Without strategies that some edge forbids beside every one of its other end."""
    return restrict(kernel, supported(kernel))


def separated(kernel: Kernel) -> tuple[Kernel, Way]:
    """The same choices: what nodes can pay is in nodes, memory rows that say nothing are gone."""
    return tidy_memory(normalise(kernel)), UNCHANGED


def within_memory(kernel: Kernel) -> tuple[Kernel, Way]:
    """Without strategies that fit beside no choice of the other nodes."""
    kernel, first = restrict(kernel, affordable(kernel))
    kernel, second = consistent(kernel)
    return normalise(kernel), chain([first, second])


def without_dominated(
    kernel: Kernel, late: Callable[[], bool] = lambda: False
) -> tuple[Kernel, Way]:
    """Without strategies that another one of the node replaces at no cost."""
    instead = dominated(kernel, late)
    return restrict(kernel, instead == np.arange(len(instead)), instead)


def eliminated(kernel: Kernel) -> tuple[Kernel, Way]:
    """Without nodes that take no memory and have few neighbours."""
    return eliminate(tidy_memory(kernel))


def _size(kernel: Kernel) -> tuple[int, ...]:
    return kernel.num_nodes, len(kernel.costs), len(kernel.edge_nodes), len(kernel.usages)
