"""Multipliers for the memory rows that bind: a Lagrangian bound, prices, and choices to start from.

Row r's excess costs lam[r] each; the limits are then soft and message passing bounds the rest. One
sweep of warm messages per step, and a Polyak step along the excess of the choice it decodes.
Weights are rounded down and the limits' share up, so the bound stays exact (see messages.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import Kernel
from jaxscaler.solve.messages import EXACT, RESOLUTION, Messages, start_messages, sweep

_FINE = 30  # bits of a multiplier that would price the whole limit at the whole cost
_SHRINK = 0.7
_SMALLEST = 1e-3
_GAIN = 1e-5  # what counts as a better bound, relative
_WARM = 0.1  # first step from given multipliers
_LARGEST = 2.0**36  # of a multiplier: 64 times the whole cost for the whole limit
_TOO_FINE = 3  # bits: costs that a good choice pays could be cut off

Decoded = Callable[[np.ndarray, np.ndarray], int | None]  # (choice, row usage) -> new upper bound


@dataclass
class Multipliers:
    """State of the ascent on one kernel; `lam` in units of 2**-grain scaled cost per usage."""

    kernel: Kernel
    messages: Messages
    grain: int
    lam: np.ndarray  # [R], whole numbers
    weights: np.ndarray  # [S], what lam charges each strategy, scaled cost, rounded down
    best_lam: np.ndarray
    active: np.ndarray  # [R]
    floor: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [S]: bound per strategy
    bound: float = -np.inf  # scaled, without the offset
    theta: float = 1.0
    patience: int = 10  # steps without a better bound before the step shrinks
    stale: int = 0
    last: float = -np.inf  # value of the step before
    holding: bool = True  # the multipliers stay until the messages have caught up with them
    rounded: bool = False  # the numbers have outgrown exactness: start again, coarser

    @property
    def settled(self) -> bool:
        """The step has become too small to matter."""
        return self.theta < _SMALLEST

    def shift_for(self, upper: int) -> int | None:
        """The shift that suits costs below `upper`, where the present one is far too fine."""
        suits = RESOLUTION - max(upper - self.kernel.offset, 1).bit_length()
        return suits if self.messages.shift > suits + _TOO_FINE else None

    def warm_up(self) -> None:
        """Large steps again, from the best multipliers, and more patience."""
        self.theta, self.stale, self.patience = 0.2, 0, 2 * self.patience
        _charge(self, self.best_lam.copy())

    def cost_bound(self) -> int:
        """No feasible choice of the kernel costs less than this."""
        return self._whole(self.bound)

    def may_beat(self, upper: int) -> np.ndarray:
        """Mask [S] of the strategies that a choice cheaper than `upper` may still use.

        Compared in scaled whole numbers, exactly.
        """
        shift, room = self.messages.shift, upper - self.kernel.offset
        return self.floor < float(room << shift if shift >= 0 else -((-room) >> -shift))

    def _whole(self, value: float) -> int:
        if not np.isfinite(value):
            return self.kernel.offset
        shift = self.messages.shift
        number = int(value)  # whole and exact
        return self.kernel.offset + (-((-number) >> shift) if shift >= 0 else number << -shift)

    def prices(self, lam: np.ndarray | None = None) -> np.ndarray:
        """[S]: what the multipliers charge each strategy, in units of cost."""
        weights = self.weights if lam is None else _weights_of(self.kernel, lam, self.grain)
        return np.ldexp(weights, -self.messages.shift)


def start_multipliers(
    kernel: Kernel, lam_by_row: dict[int, float] | None = None, shift: int | None = None
) -> Multipliers:
    """Multipliers at 0, or as given per row name in cost per usage; `shift` as in Messages."""
    messages = start_messages(kernel, shift)
    rows = len(kernel.caps)
    reach = max(int(kernel.caps.max(initial=1)), 1).bit_length()
    grain = _FINE - 40 + reach
    lam = np.zeros(rows)
    if lam_by_row:
        given = np.array([lam_by_row.get(int(name), 0.0) for name in kernel.row_names])
        lam = np.minimum(np.floor(np.ldexp(given, messages.shift + grain)), _LARGEST)
    state = Multipliers(
        kernel=kernel,
        messages=messages,
        grain=grain,
        lam=np.zeros(rows),
        weights=np.zeros(len(kernel.costs)),
        best_lam=lam.copy(),
        active=lam > 0,
        theta=_WARM if lam_by_row else 1.0,
        floor=np.full(len(kernel.costs), -np.inf),
    )
    _charge(state, lam)
    return state


def by_row(state: Multipliers) -> dict[int, float]:
    """The best multipliers per row name, in cost per usage."""
    at = np.flatnonzero(state.best_lam)
    values = np.ldexp(state.best_lam[at], -state.messages.shift - state.grain)
    return dict(zip(state.kernel.row_names[at].tolist(), values.tolist(), strict=True))


def ascend(state: Multipliers, steps: int, upper: int | None, decoded: Decoded) -> None:
    """Up to `steps` sweeps, each followed by a step of the multipliers.

    upper: cost of the best feasible choice known (None: none). decoded: told of every decoded
    choice; may answer with a lower upper bound.
    """
    kernel, messages = state.kernel, state.messages
    choice = np.zeros(kernel.num_nodes, np.int64)
    for _ in range(steps):
        sweep(kernel, messages, choice)
        if not messages.exact or state.lam.sum() >= EXACT:
            state.rounded = True  # from here numbers would round; what is known stays proved
            return
        charged = _limit_share(kernel, state.lam, state.grain)
        value = messages.const - charged
        np.maximum(state.floor, messages.marginal - charged, out=state.floor)
        usage = _row_usage(
            kernel.use_node, kernel.use_lo, kernel.use_hi, kernel.use_ptr, kernel.usages, choice,
            len(kernel.caps),
        )  # fmt: skip
        better = decoded(choice, usage)
        upper = upper if better is None else better
        moves_on = _judge(state, value)
        if state.settled or (upper is not None and state.cost_bound() >= upper):
            return
        if moves_on:
            lam = _stepped(
                state.lam, usage, kernel.caps, state.active, state.theta,
                _scaled_upper(state, upper) - value, 2.0**-state.grain,
            )  # fmt: skip
            _charge(state, lam)


def _judge(state: Multipliers, value: float) -> bool:
    """Note a step's value; True when the multipliers should move on from where they are."""
    gained, state.last = value - state.last, value
    threshold = _GAIN * abs(state.bound) if np.isfinite(state.bound) else 0.0
    state.stale = 0 if value > state.bound + threshold else state.stale + 1
    if value > state.bound:
        state.bound = value
        state.best_lam[:] = state.lam
    if state.holding:
        state.holding = gained > 10 * _GAIN * abs(value)
        return not state.holding
    if state.stale > state.patience:
        state.theta *= _SHRINK if len(state.lam) else 0.0
        state.stale = 0
        _charge(state, state.best_lam.copy())
        return False
    return True


def _scaled_upper(state: Multipliers, upper: int | None) -> float:
    if upper is None:  # a guess: twice the bound, over the whole cost
        whole = float(state.cost_bound())
        upper = int(whole + max(abs(whole), 1.0))
    return float(np.ldexp(float(upper - state.kernel.offset), state.messages.shift))


def _limit_share(kernel: Kernel, lam: np.ndarray, grain: int) -> float:
    """Σ lam * caps in scaled cost, rounded up to a whole number."""
    at = np.flatnonzero(lam)
    total = sum(int(a) * b for a, b in zip(lam[at].tolist(), kernel.caps[at].tolist(), strict=True))
    return float(-((-total) >> grain) if grain >= 0 else total << -grain)


def _charge(state: Multipliers, lam: np.ndarray) -> None:
    """Move to other multipliers: the difference goes into the messages' node terms."""
    weights = _weights_of(state.kernel, lam, state.grain)
    state.messages.unary += weights - state.weights
    state.weights, state.lam = weights, lam


def _weights_of(kernel: Kernel, lam: np.ndarray, grain: int) -> np.ndarray:
    before = np.concatenate([[0.0], np.cumsum(lam)])
    return _weights(
        kernel.node_ptr, kernel.use_node, kernel.use_lo, kernel.use_hi, kernel.use_ptr,
        kernel.usages, before, 2.0**-grain,
    )  # fmt: skip


@njit(cache=True)
def _weights(node_ptr, use_node, use_lo, use_hi, use_ptr, usages, before, unit):
    weights = np.zeros(node_ptr[-1])
    below = 1.0 - 2.0**-50  # so that rounding never makes a weight too large
    for u in range(len(use_node)):
        rate = (before[use_hi[u]] - before[use_lo[u]]) * unit
        if rate > 0:
            first = node_ptr[use_node[u]]
            for s in range(use_ptr[u + 1] - use_ptr[u]):
                weights[first + s] += np.floor(rate * usages[use_ptr[u] + s] * below)
    return weights


@njit(cache=True)
def _row_usage(use_node, use_lo, use_hi, use_ptr, usages, choice, rows):
    usage = np.zeros(rows + 1, np.int64)
    for u in range(len(use_node)):
        amount = usages[use_ptr[u] + choice[use_node[u]]]
        usage[use_lo[u]] += amount
        usage[use_hi[u]] -= amount
    for r in range(1, rows):
        usage[r] += usage[r - 1]
    return usage[:rows]


@njit(cache=True)
def _stepped(lam, usage, caps, active, theta, distance, unit):
    """lam + theta * distance / |g|^2 * g over the active rows, g = usage - caps, kept at least 0.

    The worst row of each stretch of overfull rows becomes active first.
    """
    worst = -1
    for r in range(len(caps) + 1):
        if r < len(caps) and usage[r] > caps[r]:
            if worst < 0 or usage[r] - caps[r] > usage[worst] - caps[worst]:
                worst = r
        elif worst >= 0:
            active[worst] = True
            worst = -1
    norm = 0.0
    for r in range(len(caps)):
        excess = np.float64(usage[r] - caps[r])
        if active[r] and (lam[r] > 0 or excess > 0):
            norm += excess * excess
    out = lam.copy()
    if norm > 0:
        step = theta * max(distance, 1.0) / norm / unit
        for r in range(len(caps)):
            if active[r]:
                excess = np.float64(usage[r] - caps[r])
                out[r] = min(_LARGEST, max(0.0, np.floor(lam[r] + step * excess)))
    return out
