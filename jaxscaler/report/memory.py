"""What a device holds under a plan at the fullest moment, as its compiler would fill it."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from jaxscaler.cost.deep import Deep
from jaxscaler.cost.heap import heap_size, live_bytes
from jaxscaler.cost.memory import Rules, buffers, rules_for
from jaxscaler.graph.ir import OpGraph, dtype_bytes
from jaxscaler.graph.shorten import Short, shortest
from jaxscaler.lower.device import device_graph, device_short
from jaxscaler.space.problem import Model, Priced

PACKED = 1 / 2000  # of the peak: smaller buffers fit between the others
HOLES = "holes"  # role of what the heap loses between buffers


class DeviceMemory(NamedTuple):
    """Bytes on one device at the fullest moment, and by role."""

    peak: float
    by_role: tuple[tuple[str, float], ...]


# The last answer: a plan is asked for its memory once to see whether it fits, once to say it.
_LAST: list[tuple[Priced, np.ndarray, Any, DeviceMemory]] = []
_LAST_SHORT: list[tuple[Model, Short | None]] = []


def device_memory(priced: Priced, choice: np.ndarray, device) -> DeviceMemory:
    """Memory of a choice of strategies on `device`: arguments, and the heap of temporaries.

    A device's own program (`device_graph`) under the rules of its vendor's compiler
    (`cost/memory.py`, `cost/schedule.py`), its buffers packed as XLA packs them.
    """
    for known, its_choice, its_device, found in _LAST:
        if known is priced and its_device is device and np.array_equal(its_choice, choice):
            return found
    model, mesh = priced.model, priced.mesh
    axes = tuple(zip(mesh.names, mesh.shape))
    rows = tuple(r[c] for r, c in zip(priced.strategies, choice))
    rules = rules_for(device.vendor, device.name)
    short = _short(model)
    if short is None:
        graph = device_graph(model.graph, model.folded, model.space, axes, rows)
        found = graph_memory(graph, rules)
    else:
        short = device_short(short, model.space, axes, rows)
        found = graph_memory(short.graph, rules, Deep(short))
    _LAST[:] = [(priced, choice, device, found)]
    return found


def _short(model: Model) -> Short | None:
    """The model's graph without most of its equal layers; it serves all plans of the model."""
    for known, found in _LAST_SHORT:
        if known is model:
            return found
    found = shortest(model.graph, model.folded)
    _LAST_SHORT[:] = [(model, found)]
    return found


def graph_memory(graph: OpGraph, rules: Rules, deep: Deep | None = None) -> DeviceMemory:
    """Memory of a device's graph; with `deep`, that of the whole step of which it is a part."""
    arguments = _arguments(graph, rules, deep)
    lasting = sum(arguments.values())
    heap, temporaries = _temporaries(graph, rules, deep)
    by_role = defaultdict(float, arguments)
    for role, nbytes in temporaries.items():
        by_role[role] += nbytes
    parts = sorted(((r, n) for r, n in by_role.items() if n > 0), key=lambda part: -part[1])
    return DeviceMemory(lasting + heap, tuple(parts))


def _arguments(graph: OpGraph, rules: Rules, deep: Deep | None) -> dict[str, float]:
    by_role: dict[str, float] = defaultdict(float)
    for v in (*graph.inputs, *graph.constants):
        value = graph.values[v]
        nbytes = padded(value.shape, rules.tile) * dtype_bytes(value.dtype)
        by_role[value.role] += nbytes * (1 if deep is None else 1 + int(deep.more[v]))
    return by_role


@cache
def padded(shape: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements that an argument of `shape` takes in tiles of the two dims that lose least."""
    if len(shape) < 2 or tile == (1, 1):
        return prod(shape)
    return min(
        prod(-(-n // pad.get(d, 1)) * pad.get(d, 1) for d, n in enumerate(shape))
        for pair in permutations(range(len(shape)), 2)
        for pad in (dict(zip(pair, tile)),)
    )


def _temporaries(graph: OpGraph, rules: Rules, deep: Deep | None) -> tuple[float, dict[str, float]]:
    """(bytes of the heap, the same by role at the moment when most is live)."""
    value, share, lo, hi = buffers(graph, rules, deep)
    sizes = {v: _nbytes(graph, v) for v in set(value.tolist())}
    size = share * np.array([sizes[v] for v in value.tolist()])
    live = live_bytes(size, lo, hi)
    if not live.any():
        return 0.0, {}
    at, peak = int(np.argmax(live)), float(live.max())
    large = size > PACKED * peak
    heap = max(heap_size(size[large], lo[large], hi[large], enough=peak), peak)
    if any(region.what == "remat" for region in graph.regions):
        heap *= rules.recomputed
    by_role: dict[str, float] = defaultdict(float)
    for i in np.flatnonzero((lo <= at) & (hi >= at)).tolist():
        by_role[graph.values[value[i]].role] += float(size[i])
    by_role[HOLES] = heap - peak
    return heap, by_role


def _nbytes(graph: OpGraph, v: int) -> float:
    return prod(graph.values[v].shape) * dtype_bytes(graph.values[v].dtype)
