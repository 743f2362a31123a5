"""How long a device computes: roofline over floating-point work and memory traffic.

Time of a kernel = max(work / (peak * achievable), bytes / bandwidth) + start-up. The start-up of
`RAMP` seconds makes small matrix products inefficient the way measured curves show it: on A100
about 10 % of peak below 0.1 GFLOP, 60 % at 1, 95 % above 16 (Calculon's A100 curve).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RAMP = 2.5e-6  # seconds until a kernel runs at full speed: launch, fill, drain
MEMORY_EFFICIENCY = 0.85  # share of the nominal HBM bandwidth that streaming kernels reach


class Work(NamedTuple):
    """One kernel of a node: per-run work, the tensors it streams, and its runs per step."""

    flops: float
    dtype: str
    tensors: tuple[tuple[int, float], ...]  # (port, bytes of the whole tensor)
    factors: tuple[int, ...]  # the node's factors that divide the work
    runs: int
    kernel: bool  # starts a kernel of its own


def seconds(work: Work, parts: np.ndarray, local: dict[int, np.ndarray], device) -> np.ndarray:
    """Seconds per step of one kernel under each strategy: [strategies].

    `parts` [strategies, factors]: how many ways each factor is cut; `local[port]` [strategies]: the
    share of a port's tensor that one device holds.
    """
    share = 1.0 / np.prod(parts[:, list(work.factors)], axis=1, dtype=np.float64)
    compute = work.flops * share / (device.flops(work.dtype) * device.achievable)
    traffic = np.zeros(len(parts))
    for port, nbytes in work.tensors:
        traffic += nbytes * local[port]
    memory = traffic / (device.hbm_bandwidth * MEMORY_EFFICIENCY)
    start = RAMP if work.kernel else 0.0
    return work.runs * (np.maximum(compute, memory) + start)
