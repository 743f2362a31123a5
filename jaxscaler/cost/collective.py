"""Seconds that a collective takes on a mesh axis.

A ring of n devices moves (n-1)/n of the full bytes past each of them for an all-gather or a
reduce-scatter, and twice that for an all-reduce; an all-to-all sends (n-1)/n of what a device holds
(Thakur, Rabenseifner and Gropp, 2005; also the scaling book for TPU). To that comes a delay per
hop: log2(n) of them on switches and networks, where trees are used, and half the ring, or the whole
line, on a torus. Rates depend on the message size by `Link.efficiency`. Where a link was measured
(`Link.measured`), each kind of collective has its own latency and rate, in the same formulas.

An axis of several parts (or axes joined by `join_axes`) is one pipelined collective: an inner part
handles the full bytes, each outer one those divided by the sizes inside it, and the slowest part
sets the pace. A `network` part is a ring through all devices inside it, as NCCL's, and passes
(N-1)/N of its bytes with N the devices of the whole ring. Torus parts next to each other carry the
bytes together, on the wires of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np

from jaxscaler.cluster import Axis, Link, Part
from jaxscaler.errors import ClusterError


@dataclass(frozen=True)
class _Unit:
    """Parts that carry bytes together: one part, or a run of torus parts."""

    parts: tuple[Part, ...]
    inside: int  # devices of the axis inside one group of this unit

    @property
    def link(self) -> Link:
        return self.parts[0].link

    @property
    def size(self) -> int:
        return math.prod(part.size for part in self.parts)

    @property
    def rate(self) -> float:
        """Bytes/s that a device sends to its ring neighbours, over all its wires."""
        return sum(part.link.bandwidth * _wires(part.link) for part in self.parts)

    @property
    def delay(self) -> float:
        """Seconds for one byte to reach every device."""
        return sum(_hops(part) * part.link.latency for part in self.parts)


def _wires(link: Link) -> int:
    return 2 if link.wrap else 1


def _hops(part: Part) -> float:
    if part.link.kind != "torus":
        return math.log2(part.size)
    return part.size // 2 if part.link.wrap else part.size - 1


# For each kind: (delay in s, seconds per byte at full efficiency, bytes over the link per byte).


def _gather(unit: _Unit) -> tuple[float, float, float]:
    ring = unit.size * (unit.inside if unit.link.kind == "network" else 1)
    return unit.delay, (1 - 1 / ring) / unit.inside / unit.rate, 1 / unit.inside


def _all_reduce(unit: _Unit) -> tuple[float, float, float]:
    delay, seconds, share = _gather(unit)
    return 2 * delay, 2 * seconds / unit.link.all_reduce_gain, share


def _all_to_all(unit: _Unit) -> tuple[float, float, float]:
    if unit.link.kind != "torus":
        return unit.link.latency, (1 - 1 / unit.size) / unit.rate, 1.0
    # All that goes from one half of an axis of d to the other passes the wires in its middle.
    middle = (
        (p.size // 2) * (p.size - p.size // 2) / p.size / (p.link.bandwidth * _wires(p.link))
        for p in unit.parts
    )
    return unit.delay, max(middle), 1.0


def _permute(unit: _Unit) -> tuple[float, float, float]:
    slowest = min(unit.parts, key=lambda part: part.link.bandwidth).link
    return slowest.latency, 1 / slowest.bandwidth, 1.0


KINDS: dict[str, Callable[[_Unit], tuple[float, float, float]]] = {
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "collective_permute": _permute,
}


@lru_cache(maxsize=4096)
def _terms(kind: str, axis: Axis) -> tuple[float, tuple[tuple[float, float, Link], ...]]:
    """(fixed seconds, per unit: seconds per byte, bytes on the link per byte, its link)."""
    if kind not in KINDS:
        raise ClusterError(f"unknown collective {kind!r}; known: {', '.join(KINDS)}")
    units, inside = [], 1
    parts = [_seen_by(kind, part) for part in axis.parts if part.size > 1]
    runs = groupby(enumerate(parts), lambda item: -1 if _torus(item[1]) else item[0])
    for run in reversed([tuple(part for _, part in items) for _, items in runs]):
        units.append(_Unit(run, inside))
        inside *= units[-1].size
    priced = [(KINDS[kind](unit), unit.link) for unit in units]
    fixed = max((part.link.launch for part in parts), default=0.0)
    fixed += sum(delay for (delay, _, _), _ in priced)
    return fixed, tuple((seconds, share, link) for (_, seconds, share), link in priced)


def _seen_by(kind: str, part: Part) -> Part:
    link = part.level.link.of(kind)
    return part if link is part.level.link else replace(part, level=replace(part.level, link=link))


def _torus(part: Part) -> bool:
    return part.link.kind == "torus"


def collective_time(kind: str, axis: Axis, nbytes: np.ndarray | float) -> np.ndarray:
    """Seconds of one collective among the devices of `axis`, in the shape of `nbytes`.

    `nbytes` is, by `kind`: `all_gather` the full result on one device; `reduce_scatter` and
    `all_reduce` the full operand; `all_to_all` what one device holds; `collective_permute` what one
    device sends. Nothing to move, or one device, takes no time.
    """
    fixed, terms = _terms(kind, axis)
    nbytes = np.asarray(nbytes, float)
    moved = np.zeros(nbytes.shape)
    some = np.where(nbytes > 0, nbytes, 1.0)
    for seconds, share, link in terms:
        moved = np.maximum(moved, seconds * some / link.efficiency(share * some))
    return np.where(nbytes > 0, fixed + moved, 0.0)


def unit_times(kind: str, axis: Axis) -> tuple[float, float]:
    """(a, b) of a collective on an axis of one part, at full efficiency: its seconds are
    launch + a * latency + b * bytes / bandwidth.
    """
    (part,) = axis.parts
    unit = Link(part.level.link.kind, 1.0, latency=1.0, wrap=part.level.link.wrap)
    of_unit = replace(part, level=replace(part.level, link=unit))
    fixed, ((seconds, _, _),) = _terms(kind, Axis(axis.name, (of_unit,)))
    return fixed, seconds
