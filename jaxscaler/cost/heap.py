"""How large a heap must be that holds given buffers: XLA's best fit, larger buffers first."""

from __future__ import annotations

import numpy as np


def heap_size(size: np.ndarray, lo: np.ndarray, hi: np.ndarray, enough: float = 0.0) -> float:
    """Bytes of a heap for buffers of `size` bytes, each live from moment `lo` to `hi` inclusive.

    As XLA's GlobalDecreasingSizeBestFitHeap: buffers in the order of their bytes, and once more in
    that of their time; each goes into the smallest hole among those it lives beside, or on top. The
    better of the two orders counts; the second is not tried where the first takes no more than
    `enough`. Never less than the bytes that are live at once.
    """
    if len(size) == 0:
        return 0.0
    longest = hi - lo
    orders = (np.lexsort((-longest, -size)), np.lexsort((-size, -longest)))
    least = np.inf
    for order in orders:
        if least > enough:
            least = min(least, _pack(size[order], lo[order], hi[order]))
    return float(least)


def _pack(size: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> float:
    offset = np.zeros(len(size))
    for i in range(len(size)):
        beside = np.flatnonzero((lo[:i] <= hi[i]) & (hi[:i] >= lo[i]))
        beside = beside[np.argsort(offset[beside], kind="stable")]
        begins = offset[beside]
        filled = np.concatenate(([0.0], np.maximum.accumulate(begins + size[beside])))
        holes = begins - filled[:-1]
        fits = np.flatnonzero(holes >= size[i])
        offset[i] = filled[fits[np.argmin(holes[fits])]] if len(fits) else filled[-1]
    return float((offset + size).max())


def live_bytes(size: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Bytes that are live at each moment, [last moment + 1]."""
    change = np.zeros(int(hi.max(initial=0)) + 2)
    np.add.at(change, lo, size)
    np.subtract.at(change, hi + 1, size)
    return np.cumsum(change)[:-1]
