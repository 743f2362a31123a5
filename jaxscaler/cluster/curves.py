"""How fast kernels of one kind run, by their size: points that were measured, and between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxscaler.errors import ClusterError

# What kernels are told apart by (a "conv_reduce" reduces what a convolution makes); which curves
# stand in for what has none of its own: `cost.compute.curves`.
MATMUL, BATCH_MATMUL, CONV, ELEMENTWISE = "matmul", "batch_matmul", "conv", "elementwise"
REDUCE, CONV_REDUCE, GATHER, SCATTER = "reduce", "conv_reduce", "gather", "scatter"
OPS = (MATMUL, BATCH_MATMUL, CONV, ELEMENTWISE, REDUCE, CONV_REDUCE, GATHER, SCATTER)
BYTES = ""  # the dtype of curves over bytes


@dataclass(frozen=True)
class Curve:
    """Rates of kernels `op` by size: FLOP/s over FLOP of `dtype`, or bytes/s over bytes (`BYTES`).

    `sizes` go up; a larger size never takes less time. Between two of them the rate is a straight
    line in logarithms; above the last it is the last; what is smaller than the first takes as long
    as the first does.
    """

    op: str
    dtype: str
    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, rates = np.array(self.sizes, float), np.array(self.rates, float)
        where = f"curve of {self.op} {self.dtype or 'bytes'}"
        if self.op not in OPS:
            raise ClusterError(f"{where}: `op` must be one of {', '.join(OPS)}")
        if len(sizes) != len(rates) or not len(sizes) or not (np.diff(sizes) > 0).all():
            raise ClusterError(f"{where}: `sizes` must go up, with a rate each; {self.sizes}")
        good = np.isfinite(sizes) & np.isfinite(rates) & (sizes > 0) & (rates > 0)
        if not good.all() or (np.diff(sizes / rates) < -1e-9 * (sizes / rates)[1:]).any():
            raise ClusterError(
                f"{where}: sizes and `rates` must be above 0, and a larger size take no less time"
            )

    def seconds(self, size: np.ndarray | float) -> np.ndarray:
        """Seconds of one kernel of each size; none of size 0."""
        size = np.asarray(size, float)
        sizes, times = np.array(self.sizes), np.array(self.sizes) / np.array(self.rates)
        some = np.where(size > 0, size, sizes[0])
        inside = np.exp(np.interp(np.log(some), np.log(sizes), np.log(times)))
        found = np.where(some > sizes[-1], some / self.rates[-1], inside)
        return np.where(size > 0, found, 0.0)

    @property
    def fastest(self) -> float:
        """The rate of the largest size: of what starts no kernel of its own."""
        return self.rates[-1]


def curve_of(op: str, dtype: str, sizes: np.ndarray, seconds: np.ndarray) -> Curve:
    """The curve through measured seconds, in any order; where a larger size took less time than a
    smaller one (noise), it takes as long.
    """
    order = np.argsort(sizes)
    sizes, seconds = np.asarray(sizes, float)[order], np.asarray(seconds, float)[order]
    seconds = np.maximum.accumulate(seconds)
    return Curve(op, dtype, tuple(sizes.tolist()), tuple((sizes / seconds).tolist()))
