"""From a choice that overfills memory to one that fits: raise the price of the worst rows, move."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from jaxscaler.solve.kernel import FORBIDDEN, Kernel
from jaxscaler.solve.moves import CLASH, View, Walk, start_walk, tree_moves
from jaxscaler.solve.multipliers import Multipliers

ROUNDS = 40
_RAISE, _STEEPEST = 1.3, 1e3  # factor on a price: at first, at most
_RESPONSE, _PATIENCE = 0.98, 4  # squared after 4 rounds that leave more than 98 % of the excess
_SPREAD, _PIECES = 5, 7  # rounds until twice as many rows are raised; at most 2**7
_DEAREST = CLASH / 10  # price of a strategy: a forbidden pair stays dearer
_TOP = 2.0**200  # of a multiplier, so that no product overflows
_SIZE = 100


def peaks(excess: np.ndarray, pieces: int = 1) -> np.ndarray:
    """The worst row of every stretch of rows with a positive excess [R], or of `pieces` of each."""
    above = np.concatenate([[False], excess > 0, [False]])
    ends = np.flatnonzero(above[1:] != above[:-1]).reshape(-1, 2)
    cuts = [np.linspace(a, b, min(pieces, b - a) + 1).astype(int).tolist() for a, b in ends]
    worst = [a + int(np.argmax(excess[a:b])) for cut in cuts for a, b in pairwise(cut)]
    return np.array(worst, np.int64)


def repaired(
    kernel: Kernel,
    view: View,
    state: Multipliers,
    choice: np.ndarray,
    seed: int,
    late: Callable[[], bool],
    rounds: int = ROUNDS,
) -> tuple[Walk | None, int]:
    """(a feasible walk near `choice`, or None when the rounds run out or it is late; work done)."""
    walk = start_walk(kernel, choice)
    lam = state.lam.copy()
    usual = lam[lam > 0].mean() if (lam > 0).any() else _first_price(state, walk)
    work, factor, least, stale = 0, _RAISE, np.inf, 0
    for n in range(rounds):
        excess = walk.usage - kernel.caps
        over = float(np.maximum(excess, 0).sum())
        if over == 0 and kernel.cost(walk.choice) < FORBIDDEN:
            return start_walk(kernel, walk.choice), work
        if late():
            break
        stale = 0 if over < _RESPONSE * least else stale + 1
        factor = _RAISE if stale < _PATIENCE else min(factor**2, _STEEPEST)
        least = min(least, over)
        worst = peaks(excess, 2 ** min(n // _SPREAD, _PIECES))
        lam[worst] = np.minimum(np.maximum(lam[worst], 0.2 * usual) * factor, _TOP)
        _, _, done = tree_moves(
            view, walk, np.minimum(state.prices(lam), _DEAREST), size=_SIZE, noise=0.0,
            visits=_SIZE + 4 * kernel.num_nodes, temperature=0.0, seed=seed + n, repair=True,
        )  # fmt: skip
        work += done
    return None, work


def _first_price(state: Multipliers, walk: Walk) -> float:
    """A multiplier to begin with where none is known: 1 % of the cost over the largest limit."""
    cost = walk.cost if walk.cost < FORBIDDEN else float(state.kernel.costs.sum())
    scaled = np.ldexp(max(abs(cost), 1.0), state.messages.shift + state.grain)
    return max(np.floor(0.01 * scaled / max(int(state.kernel.caps.max(initial=1)), 1)), 1.0)
