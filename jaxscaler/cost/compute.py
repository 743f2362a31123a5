"""How long a device computes: roofline over floating-point work and memory traffic.

Time of a kernel = max(work / (peak * achievable), bytes / bandwidth) + start-up. The start-up of
`RAMP` seconds makes small matrix products inefficient the way measured curves show it: on A100
about 10 % of peak below 0.1 GFLOP, 60 % at 1, 95 % above 16 (Calculon's A100 curve).

Where there are curves of how fast kernels run by kind and size, each side of the roofline is read
off them instead, start-up and all: those that `jaxscaler calibrate` measured on a device
(`Device.curves`), or of TPUs those in `tpu_rates.csv`, which `benchmarks/fit_cycles.py` fits to the
TPU compiler's own estimates.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache, lru_cache
from importlib import resources
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster.curves import (
    BATCH_MATMUL,
    BYTES,
    CONV,
    CONV_REDUCE,
    ELEMENTWISE,
    GATHER,
    MATMUL,
    REDUCE,
    SCATTER,
    Curve,
)
from jaxscaler.cluster.devices import Device, rate_names

RAMP = 2.5e-6  # seconds until a kernel runs at full speed: launch, fill, drain
MEMORY_EFFICIENCY = 0.85  # share of the nominal HBM bandwidth that streaming kernels reach

_OPS = {"dot_general": MATMUL, "ragged_dot": MATMUL, "ragged_dot_general": MATMUL,
        "conv_general_dilated": CONV, "gather": GATHER, "dynamic_slice": GATHER,
        "scatter": SCATTER, "dynamic_update_slice": SCATTER,
        "reduce_precision": ELEMENTWISE}  # fmt: skip
_STANDS_IN = {GATHER: (), SCATTER: (), CONV_REDUCE: (REDUCE, ELEMENTWISE)}  # for bytes
_REDUCES = ("reduce", "argm", "cum", "select_and")  # how the names of reductions begin


class Work(NamedTuple):
    """One kernel of a node: per-run work, the tensors it streams, and its runs per step."""

    flops: float
    dtype: str
    tensors: tuple[tuple[int, float], ...]  # (port, bytes of the whole tensor)
    factors: tuple[int, ...]  # the node's factors that divide the work
    runs: int
    kernel: bool  # starts a kernel of its own
    op: str = ELEMENTWISE  # what curves tell kernels apart by


def op_of(primitive: str, batched: bool = False, of_conv: bool = False) -> str:
    """The kind of kernel that a primitive is. `batched`: a product with a factor in all tensors;
    `of_conv`: its operand comes from a convolution, through elementwise ops at most.
    """
    reduce = CONV_REDUCE if of_conv else REDUCE
    other = reduce if primitive.startswith(_REDUCES) else ELEMENTWISE
    found = _OPS.get(primitive.split("-")[0], other)  # scatter-add
    return BATCH_MATMUL if found == MATMUL and batched else found


def seconds(
    work: Work, parts: np.ndarray, local: dict[int, np.ndarray], device: Device
) -> np.ndarray:
    """Seconds per step of one kernel under each strategy: [strategies].

    `parts` [strategies, factors]: how many ways each factor is cut; `local[port]` [strategies]: the
    share of a port's tensor that one device holds.
    """
    share = 1.0 / np.prod(parts[:, list(work.factors)], axis=1, dtype=np.float64)
    traffic = np.zeros(len(parts))
    for port, nbytes in work.tensors:
        traffic += nbytes * local[port]
    of_work, of_bytes = curves(device, work.op, work.dtype)
    if of_work is None:
        compute = work.flops * share / (device.flops(work.dtype) * device.achievable)
    else:
        compute = _read(of_work, work.flops * share, work.kernel)
    if of_bytes is None:
        memory = traffic / (device.hbm_bandwidth * MEMORY_EFFICIENCY)
    else:
        memory = _read(of_bytes, traffic, work.kernel)
    start = RAMP if work.kernel and of_work is None and of_bytes is None else 0.0
    return work.runs * (np.maximum(compute, memory) + start)


def _read(curve: Curve, size: np.ndarray, kernel: bool) -> np.ndarray:
    return curve.seconds(size) if kernel else size / curve.fastest


@lru_cache(maxsize=1024)
def curves(device: Device, op: str, dtype: str) -> tuple[Curve | None, Curve | None]:
    """The curves over work and over bytes by which a kernel is priced; None: the nominal rate.

    Work of a kind, or of a dtype, that has no curve runs as matmuls of the first of the dtype's
    rates that has one; elementwise work and reductions at the nominal rate: bytes bind them. Bytes
    are those of the kind, or elementwise; what gathers and scatters has a curve of its own or none;
    reductions after a convolution are reductions where nothing is known of them.
    """
    known = {(c.op, c.dtype): c for c in device.curves or _of_tpus().get(device.name, ())}
    if not known:
        return None, None
    products = (op, MATMUL) if op in (MATMUL, BATCH_MATMUL, CONV) else ()
    names = ((kind, name) for kind in products for name in rate_names(dtype))
    of_work = next((known[key] for key in names if key in known), None)
    streams = (op, *_STANDS_IN.get(op, (ELEMENTWISE,)))
    of_bytes = next((known[op, BYTES] for op in streams if (op, BYTES) in known), None)
    return of_work, of_bytes


@cache
def _of_tpus() -> dict[str, tuple[Curve, ...]]:
    """Device name -> its curves in `tpu_rates.csv`."""
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    text = resources.files("jaxscaler.cost").joinpath("tpu_rates.csv").read_text()
    rows = (line for line in text.splitlines() if not line.startswith("#"))
    for row in csv.DictReader(rows):
        key = row["device"], row["op"], row["dtype"]
        points[key].append((float(row["size"]), float(row["rate"])))
    found: dict[str, list[Curve]] = defaultdict(list)
    for (device, op, dtype), pairs in points.items():
        sizes, rates = zip(*pairs)
        found[device].append(Curve(op, dtype, sizes, rates))
    return {device: tuple(of_it) for device, of_it in found.items()}
