"""Where to cut, from what priced stages took: a search proposes cuts, their true price decides.

Stages are stretches of blocks. What a block takes is fitted to all stages that were priced, by its
kind, with its floating-point work as the guess where nothing else is known. The cut of the least
slowest stage is found by dynamic programming over blocks and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import Device
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.pipeline.space import Shape, Space, is_part
from jaxscaler.schedule.tasks import StageWork

WAYS = 2  # forth and back
TIE = 1e-6  # weight of all work beside the slowest stage
TRUST = 1e-2  # weight of the guess beside what was priced
SIZES = 12  # sub-meshes that are tried at once
GRAINS = 32  # into which devices are grouped where there are more


class Seen(NamedTuple):
    """A priced stage: of blocks first to last (exclusive), on so many devices of a kind."""

    first: int
    last: int
    size: int
    device: Device
    work: StageWork


class Works:
    """What was priced, by micro-batches, recomputation and lanes."""

    def __init__(self, space: Space):
        self.space = space
        self.seen: dict[tuple[int, str, int], list[Seen]] = {}
        self.flops = np.array([space.flops(b, b + 1) for b in range(space.blocks)])
        self.flops += max(float(self.flops.sum()), 1.0) * 1e-6  # a stage is never free
        self.kinds = np.array(space.kinds)
        fronts = [space.units[n].crossing for n in space.starts]
        self.crossing = np.array([0.0, *fronts[1:], 0.0])  # [block]: bytes over its front

    def learn(self, shape: Shape, ends: Sequence[int], works: Sequence[StageWork]) -> None:
        """What the stages of a priced pipeline took."""
        if shape.wide or self.space.fixed is not None:
            return
        known = self.seen.setdefault(_key(shape), [])
        sites = sites_of(shape.sizes) * shape.turns
        for (a, b), (at, size), work in zip(
            pairwise((0, *ends, self.space.blocks)), sites, works, strict=True
        ):
            seen = Seen(a, b, size, self.space.device_at(at), work)
            if not any(s[:4] == seen[:4] for s in known):
                known.append(seen)

    def seconds(self, shape: Shape, first: int, size: int) -> np.ndarray:
        """[first block, last]: seconds of a micro-batch on a stage of these blocks, on `size`
        devices from `first` on, with what it receives and sends back; inf: none."""
        device = self.space.device_at(first)

        def taken(s: Seen) -> float:
            w = s.work
            seconds = w.forward + (w.backward or 0.0) + (w.weight or 0.0)
            return seconds * s.size * _speed(s.device) / size / _speed(device)

        cluster = self.space.cluster
        link = cluster.link if isinstance(cluster, Mixed) else cluster.levels[0].link
        sent = self.crossing / (shape.micro * size * link.bandwidth)
        return self._table(shape, size, device, taken) + WAYS * sent[:, None]

    def held(self, shape: Shape, first: int, size: int, in_flight: int) -> np.ndarray:
        """[first block, last]: bytes of a device; 0 where nothing is known."""
        if not self.seen.get(_key(shape)):
            return np.zeros((self.space.blocks + 1,) * 2)

        def held(s: Seen) -> float:
            return (s.work.static + s.work.working + in_flight * s.work.kept) * s.size / size

        return self._table(shape, size, self.space.device_at(first), held)

    def _table(
        self, shape: Shape, size: int, device: Device, measure: Callable[[Seen], float]
    ) -> np.ndarray:
        known = self.seen.get(_key(shape)) or self._like(shape)
        known = [s for s in known if s.device == device] or known
        if near := {abs(s.size - size) for s in known}:
            known = [s for s in known if abs(s.size - size) == min(near)]
        scaled = [(s, measure(s)) for s in known]
        rate = 1.0 / (size * _speed(device))
        if scaled:
            work = sum(self.flops[s.first : s.last].sum() for s, _ in scaled)
            rate = sum(value for _, value in scaled) / work
        sums = np.concatenate([[0.0], np.cumsum(self.blocks(scaled, rate))])
        found = sums[None, :] - sums[:, None]
        found[np.tril_indices_from(found)] = inf
        for s, value in scaled:
            if (s.size, s.device) == (size, device):
                found[s.first, s.last] = value
        return np.maximum(found, 0.0)

    def _like(self, shape: Shape) -> list[Seen]:
        """Of other micro-batches: where to cut depends on what blocks take beside each other."""
        same = (some for (_, again, _), some in self.seen.items() if again == shape.again)
        return next(same, [])

    def blocks(self, scaled: Sequence[tuple[Seen, float]], rate: float) -> np.ndarray:
        """What each block takes: a fit by kind, held to a guess."""
        guess = self.flops * rate
        if not scaled:
            return guess
        count = 1 + int(self.kinds.max())
        each = np.zeros(count)  # of a block of a kind, as guessed
        np.maximum.at(each, self.kinds, guess)
        rows = [np.bincount(self.kinds[s.first : s.last], minlength=count) for s, _ in scaled]
        unit = max(value for _, value in scaled) or 1.0
        hold = TRUST * np.eye(count)
        left = np.vstack([np.array(rows, float), hold])
        right = np.concatenate([[v / unit for _, v in scaled], TRUST * each / unit])
        fitted = np.linalg.lstsq(left, right, rcond=None)[0] * unit
        return np.maximum(fitted, 0.0)[self.kinds]


def even_ends(works: Works, shape: Shape, memory: float) -> tuple[int, ...] | None:
    """The cut of a shape whose slowest stage is fastest, and that fits into a share of the memory,
    as far as is known; None where there are too few blocks."""
    last = works.space.blocks
    first, stop = (1, last - 1) if shape.wide else (0, last)
    if stop - first < shape.stages:
        return None
    sites = sites_of(shape.sizes) * shape.turns
    best = np.full(last + 1, inf)
    best[first] = 0.0
    back = []
    tables: dict[tuple, np.ndarray] = {}
    for s, (at, size) in enumerate(sites):
        flight = min(shape.micro, len(sites) - s) if shape.turns == 1 else 0
        key = works.space.device_at(at), size, flight
        if key not in tables:
            tables[key] = _table(works, shape, at, size, flight, memory)
        reach = _reach(best, tables[key])
        back.append(np.argmin(reach, axis=0))
        best = np.min(reach, axis=0)
    if not np.isfinite(best[stop]):  # nothing seems to fit: the price will tell
        return even_ends(works, shape, inf) if memory < inf else None
    ends = [stop]
    for choice in reversed(back):
        ends.append(int(choice[ends[-1]]))
    ends.reverse()  # the first is where the first stage begins
    return tuple(ends) if shape.wide else tuple(ends[1:-1])


def uneven(
    works: Works, shape: Shape, count: int, memory: float
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(devices per stage, the cut) of `count` stages on parts of a cluster that need not be equal,
    with the fastest slowest stage; None where there are none."""
    cluster, blocks = works.space.cluster, works.space.blocks
    sizes = _sizes(cluster, count)
    if not sizes or blocks < count:
        return None
    grain = int(np.gcd.reduce([*sizes, cluster.num_devices]))
    total = cluster.num_devices // grain
    parts = [(at, z) for at in range(total) for z in sizes
             if at + z // grain <= total and is_part(cluster, at * grain, z)]  # fmt: skip
    best = np.full((total + 1, blocks + 1), inf)  # [devices used, blocks done]
    best[0, 0] = 0.0
    back: list[dict[tuple[int, int], tuple[int, int]]] = []
    for s in range(count):
        after = np.full_like(best, inf)
        chosen: dict[tuple[int, int], tuple[int, int]] = {}
        flight, tables = min(shape.micro, count - s), {}
        for at, z in parts:
            if not np.isfinite(best[at]).any():
                continue
            kind = works.space.device_at(at * grain), z
            if kind not in tables:
                tables[kind] = _table(works, shape, at * grain, z, flight, memory)
            reach = _reach(best[at], tables[kind])
            now, where, end = reach.min(axis=0), reach.argmin(axis=0), at + z // grain
            better = np.flatnonzero(now < after[end])
            after[end][better] = now[better]
            chosen.update(((end, int(j)), (z, int(where[j]))) for j in better)
        best = after
        back.append(chosen)
    if not np.isfinite(best[total, blocks]):
        return None
    at, done = total, blocks
    found: list[tuple[int, int]] = []
    for chosen in reversed(back):
        z, before = chosen[at, done]
        found.append((z, before))
        at, done = at - z // grain, before
    found.reverse()
    return tuple(z for z, _ in found), tuple(b for _, b in found[1:])


def sites_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first device, devices) of sub-meshes, one after another."""
    return list(zip(accumulate(sizes, initial=0), sizes))


def _table(
    works: Works, shape: Shape, first: int, size: int, in_flight: int, memory: float
) -> np.ndarray:
    """[first block, last]: seconds; inf where so many micro-batches under way would not fit."""
    seconds = works.seconds(shape, first, size)
    if memory < inf and in_flight:
        limit = memory * works.space.device_at(first).hbm_bytes
        seconds = np.where(works.held(shape, first, size, in_flight) > limit, inf, seconds)
    return seconds


def _reach(best: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[begin, end]: the slowest stage, if the next one is of these blocks; of equal ones the least
    work together."""
    return np.maximum(best[:, None], table) + TIE * table


def _sizes(cluster: Cluster | Mixed, count: int) -> list[int]:
    """Sizes of parts that stages may have, those near to an even share."""
    total = cluster.num_devices
    grain = max(1, total // GRAINS)
    sizes = [z for z in range(grain, total, grain)
             if any(is_part(cluster, at, z) for at in range(0, total, grain))]  # fmt: skip
    return sorted(sorted(sizes, key=lambda z: (abs(np.log(z * count / total)), z))[:SIZES])


def _speed(device: Device) -> float:
    return max(rate for _, rate in device.peak_flops)


def _key(shape: Shape) -> tuple[int, str, int]:
    return shape.micro, shape.again, shape.lanes
