"""From a choice that overfills memory to one that fits: raise the price of the worst rows, move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxscaler.solve.kernel import FORBIDDEN, Kernel
from jaxscaler.solve.moves import View, Walk, start_walk, tree_moves
from jaxscaler.solve.multipliers import Multipliers

ROUNDS = 40
_RAISE = 1.3
_SIZE = 100


def peaks(excess: np.ndarray) -> np.ndarray:
    """The worst row of every stretch of rows with a positive excess [R]."""
    above = np.concatenate([[False], excess > 0, [False]])
    ends = np.flatnonzero(above[1:] != above[:-1]).reshape(-1, 2)
    return np.array([a + int(np.argmax(excess[a:b])) for a, b in ends], np.int64)


def repaired(
    kernel: Kernel,
    view: View,
    state: Multipliers,
    choice: np.ndarray,
    seed: int,
    late: Callable[[], bool],
) -> tuple[Walk | None, int]:
    """(a feasible walk near `choice`, or None when the rounds run out or it is late; work done)."""
    walk = start_walk(kernel, choice)
    lam = state.lam.copy()
    usual = lam[lam > 0].mean() if (lam > 0).any() else _first_price(state, walk)
    trees = 1 + 4 * kernel.num_nodes // _SIZE
    work = 0
    for n in range(ROUNDS):
        excess = walk.usage - kernel.caps
        if (excess <= 0).all() and kernel.cost(walk.choice) < FORBIDDEN:
            return start_walk(kernel, walk.choice), work
        if late():
            break
        worst = peaks(excess)
        lam[worst] = np.floor(np.maximum(lam[worst], 0.2 * usual) * _RAISE)
        _, _, done = tree_moves(
            view, walk, state.prices(lam), moves=trees, size=_SIZE, noise=0.0, temperature=0.0,
            seed=seed + n, repair=True,
        )  # fmt: skip
        work += done
    return None, work


def _first_price(state: Multipliers, walk: Walk) -> float:
    """A multiplier to begin with where none is known: 1 % of the cost over the largest limit."""
    cost = walk.cost if walk.cost < FORBIDDEN else float(state.kernel.costs.sum())
    scaled = np.ldexp(max(abs(cost), 1.0), state.messages.shift + state.grain)
    return max(np.floor(0.01 * scaled / max(int(state.kernel.caps.max(initial=1)), 1)), 1.0)
