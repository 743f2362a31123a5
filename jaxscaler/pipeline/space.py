"""The pipelines of a step that a search looks at: where the loss may be cut, on how many devices,
in how many micro-batches, with what recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from jaxscaler import _compat
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import Device
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.cluster.parts import part_at
from jaxscaler.errors import ClusterError, ConstraintError, PlanError
from jaxscaler.graph.build import build
from jaxscaler.loops.options import batch_of
from jaxscaler.pipeline.again import cheap_again, layers_again
from jaxscaler.program import ALL, Line
from jaxscaler.rewrite.changes import Change, Recompute, Stages
from jaxscaler.rewrite.cuts import Unit, cut_by_lines, units_of
from jaxscaler.rewrite.parts import nbytes, variables
from jaxscaler.trace import Traced

CHAIN = ("1f1b", "gpipe", "zero-bubble", "zero-bubble-2")
SCHEDULES = (*CHAIN, "interleaved", "interlaced")  # that a search looks at, unless told
VISITS = "nf1b"  # of a cut that is said, and comes to places again
TWICE = "chimera"  # where it is told: it takes twice the state
KEPT, CHEAP, AGAIN = "kept", "all but products again", "layers again"
PLANNED = "again what the plan without stages makes again"
SMALL = 1e-3  # of work or parameters: operations with less are no reason for a cut between them
FEW = 16  # places to cut, all of which are looked at
CHUNKS = 4  # of the model on one device group, at most, where nothing says how many pay
MOST_MICRO = 512

Point = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """A kind of pipeline, but for where it is cut.

    sizes: devices per stage; of an interleaved one per device group. turns: chunks per group. wide:
    the first and the last block are on all devices. again: which changes (`Space.again`).
    """

    micro: int
    sizes: tuple[int, ...]
    again: str = KEPT
    lanes: int = 1
    turns: int = 1
    wide: bool = False

    @property
    def stages(self) -> int:
        """Stages on device groups of their own, or chunks of the model."""
        return len(self.sizes) * self.turns

    def __str__(self) -> str:
        sizes = {*self.sizes}
        devices = f"{self.sizes[0]}" if len(sizes) == 1 else "+".join(map(str, self.sizes))
        text = f"{len(self.sizes)} stages of {devices}"
        text += f" in {self.turns} chunks" if self.turns > 1 else ""
        text += ", ends on all" if self.wide else ""
        text += f", {self.micro} micro-batches"
        text += "" if self.again == KEPT else f", {self.again}"
        return text + (f", gradients in {self.lanes} lanes" if self.lanes > 1 else "")


@dataclass(frozen=True)
class Candidate:
    """A pipeline that can be priced. ends: numbers of the blocks before which stages begin."""

    shape: Shape
    ends: tuple[int, ...]
    schedule: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.schedule}"


@dataclass(frozen=True)
class Space:
    """What follows from a step, its cluster and what the user fixed.

    blocks: the units of the loss between places where it may be cut, in order: (unit, kind); equal
    kinds are equal work. fixed: the cut that the user said.
    """

    cluster: Cluster | Mixed
    loss: int
    batch: tuple[tuple[int, int], ...]
    samples: int
    units: tuple[Unit, ...]
    starts: tuple[int, ...]  # [block] -> its first unit
    kinds: tuple[int, ...]  # [block]
    state_bytes: float
    micro: tuple[int, ...]
    counts: tuple[int, ...]
    again: dict[str, tuple[Change, ...]]
    fixed: Stages | None = None

    @property
    def blocks(self) -> int:
        return len(self.starts)

    def flops(self, first: int, last: int) -> float:
        """Of blocks `first` to `last` (exclusive)."""
        ends = (*self.starts, len(self.units))
        return sum(u.flops for u in self.units[ends[first] : ends[last]])

    def cut(self, candidate: Candidate) -> Stages:
        """The cut of a candidate, as a change of the loss."""
        if self.fixed is not None:
            return self.fixed
        shape, count = candidate.shape, len(candidate.shape.sizes)
        points = []
        for n, block in enumerate((0, *candidate.ends)):
            unit = self.units[self.starts[block]]
            at = (0, 0) if n == 0 else (unit.equation, unit.trip)
            if shape.wide:
                last = n == len(candidate.ends)
                points.append((*at, 0 if n == 0 or last else n))
            else:
                points.append((*at, n % count))
        return Stages(self.loss, tuple(points))

    def device_at(self, first: int) -> Device:
        """The kind of a device by its number."""
        cluster = self.cluster
        return (cluster.first_of(first)[1] if isinstance(cluster, Mixed) else cluster).device

    @property
    def inner(self) -> int:
        """Devices of a node, or what is joined best."""
        parts = self.cluster.parts if isinstance(self.cluster, Mixed) else (self.cluster,)
        return min(part.levels[-1].size for part in parts)

    def submeshes(self, shape: Shape) -> tuple[int | str, ...]:
        return (ALL, *shape.sizes) if shape.wide else shape.sizes

    def changes(self, candidate: Candidate) -> tuple[Change, ...]:
        """The recomputation of a candidate, its segments cut where stages begin."""
        cut = [e for e, _, _ in self.cut(candidate).points if e]
        found: list[Change] = []
        for change in self.again[candidate.shape.again]:
            found += _at(change, cut) if isinstance(change, Recompute) else [change]
        return tuple(found)

    def lanes(self, micro: int, size: int) -> tuple[int, ...]:
        """Into how many parts a stage may split a micro-batch, the most first; 1 is the last."""
        inner = self.inner
        each = self.samples // micro
        ways = {gcd(size // t, each) for t in range(1, inner + 1) if size % t == 0}
        return (*sorted(ways - {1}, reverse=True), 1)

    def even(self, count: int) -> tuple[int, ...] | None:
        """Equal sizes of `count` stages; None where the cluster has no such parts."""
        total = self.cluster.num_devices
        size = total // count
        if total % count or not all(is_part(self.cluster, n * size, size) for n in range(count)):
            return None
        return (size,) * count


def space_of(
    traced: Traced,
    cluster: Cluster | Mixed,
    *,
    stages: int | Sequence[int] | Stages | None = None,
    lines: Sequence[Line] = (),
    micro: int | Sequence[int] | None = None,
    again: dict[str, tuple[Change, ...]] | None = None,
    loss: int = 0,
    every: bool = False,
) -> Space:
    """The space of a step. `lines`: those that say stages. `every`: all operations may begin a
    stage, and not only those where little flows.

    Raises PlanError without a marked loss, ConstraintError for numbers that can not be.
    """
    if not traced.losses:
        raise PlanError(
            "a pipeline needs to know the loss of the step: use jaxscaler.value_and_grad (or grad) "
            "in place of JAX's"
        )
    graph = build(traced)
    batch = batch_of(graph, loss, traced.losses[loss])
    inner, _ = _compat.open_jaxpr(traced.losses[loss])
    arguments = (*inner.constvars, *inner.invars)
    samples = gcd(*(arguments[i].aval.shape[d] for i, d in batch)) if batch else 1
    units = tuple(units_of(traced, graph, loss, dict(batch)))
    fixed = stages if isinstance(stages, Stages) else None
    if lines:
        fixed = cut_by_lines(traced, graph, units, loss, lines)
    if fixed is not None:
        counts: tuple[int, ...] = (1 + max(p for _, _, p in fixed.points),)
    else:
        counts = _numbers("stages", stages, range(2, cluster.num_devices + 1))
    micros = _numbers("micro", micro, [m for m in range(2, MOST_MICRO + 1) if samples % m == 0])
    starts = tuple(range(len(units)))
    if not every:
        starts = places_to_cut(units, _parameter_bytes(inner, {arguments[i] for i, _ in batch}))
    state = [traced.in_avals[i] for i, _ in traced.state_pairs]
    if again is None:
        again = {KEPT: ()}
        for name, changes in (
            (CHEAP, cheap_again(graph, loss)),
            (AGAIN, layers_again(graph, loss)),
        ):
            if changes and changes not in again.values():
                again[name] = changes
    return Space(
        cluster, loss, batch, samples, units, starts, _kinds(inner, units, starts),
        float(sum(a.size * a.dtype.itemsize for a in state if hasattr(a.dtype, "itemsize"))),
        micros, counts, again, fixed,
    )  # fmt: skip


def places_to_cut(units: Sequence[Unit], held: Sequence[float]) -> tuple[int, ...]:
    """The first units of blocks: between two with work, or much of the parameters, where least
    flows; of many such places those where it is less than at their neighbours. Iterations of a scan
    are blocks.

    held: [equation] -> bytes of parameters that it reads.
    """
    work, all_held = sum(u.flops for u in units), sum(held)
    heavy = [
        n
        for n, u in enumerate(units)
        if u.flops > SMALL * work or held[u.equation] > SMALL * all_held or _is_trip(units, n)
    ]
    gaps = [min(range(a + 1, b + 1), key=lambda n: units[n].crossing)
            for a, b in itertools.pairwise(heavy)]  # fmt: skip
    if len(gaps) <= FEW:
        return (0, *gaps)
    width = [units[n].crossing for n in gaps]
    narrow = [n for i, n in enumerate(gaps) if width[i] <= min(width[max(0, i - 1) : i + 2])]
    return (0, *narrow)


def _parameter_bytes(jaxpr, batch: set) -> list[float]:
    """[equation] -> bytes that it reads of what does not depend on the batch, if it does itself."""
    varying, found = set(batch), []
    for eqn in jaxpr.eqns:
        read = variables(eqn.invars)
        found.append(0.0)
        if not varying.isdisjoint(read):
            varying.update(eqn.outvars)
            found[-1] = float(sum(nbytes(v) for v in read if v not in varying))
    return found


def compositions(cluster: Cluster | Mixed, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to give `count` stages whole parts of a cluster, no device left over."""
    total = cluster.num_devices
    for bars in itertools.combinations(range(1, total), count - 1):
        parts = list(itertools.pairwise((0, *bars, total)))
        if all(is_part(cluster, a, b - a) for a, b in parts):
            yield tuple(b - a for a, b in parts)


def is_part(cluster: Cluster | Mixed, first: int, size: int) -> bool:
    """Whether `size` devices from `first` on are a whole part of a cluster."""
    try:
        part_at(cluster, first, size)
    except ClusterError:
        return False
    return True


def every_candidate(space: Space, schedules: Sequence[str]) -> Iterator[Candidate]:
    """The whole space: all cuts, sub-meshes, micro-batches, recomputation, lanes, schedules."""
    for micro, again, count in itertools.product(space.micro, space.again, space.counts):
        for sizes in compositions(space.cluster, count):
            most = space.samples // micro
            lanes = {n for z in sizes for n in space.lanes(micro, z)} if most > 1 else {1}
            for ways in sorted(lanes):
                shape = Shape(micro, sizes, again, ways)
                yield from _of_shape(space, shape, of_chain(shape, schedules))
                if "interleaved" in schedules:
                    for turns in range(2, min(CHUNKS, space.blocks // count) + 1):
                        yield from _of_shape(space, replace(shape, turns=turns), ["interleaved"])
                if "interlaced" in schedules:
                    yield from _of_shape(space, replace(shape, wide=True), ["interlaced"])


def of_chain(shape: Shape, schedules: Sequence[str]) -> list[str]:
    """Those of the schedules that a chain of stages may have."""
    paired = len(shape.sizes) % 2 == 0 and shape.sizes == shape.sizes[::-1]
    return [name for name in schedules if name in CHAIN or (name == TWICE and paired)]


def _of_shape(space: Space, shape: Shape, schedules: Sequence[str]) -> Iterator[Candidate]:
    if space.fixed is not None:
        yield from (Candidate(shape, (), name) for name in schedules)
        return
    stages = shape.stages + (2 if shape.wide else 0)
    for ends in itertools.combinations(range(1, space.blocks), stages - 1):
        yield from (Candidate(shape, ends, name) for name in schedules)


def _numbers(name: str, given, default: Sequence[int]) -> tuple[int, ...]:
    numbers = default if given is None else (given,) if isinstance(given, int) else tuple(given)
    if any(not isinstance(n, int) or n < 1 for n in numbers):
        raise ConstraintError(f"{name}={given!r}: numbers from 1 on")
    return tuple(sorted({*numbers}))


def _kinds(jaxpr, units: Sequence[Unit], starts: Sequence[int]) -> tuple[int, ...]:
    """[block]: its kind; blocks of the same equations, by primitives and shapes, are of one."""
    texts = [
        (e.primitive.name, *(str(getattr(v, "aval", "")) for v in (*e.invars, *e.outvars)))
        for e in jaxpr.eqns
    ]
    known: dict = {}
    found = []
    for first, end in itertools.pairwise((*starts, len(units))):
        mine = tuple(
            (u.equation, texts[u.equation]) if _is_trip(units, n) else texts[u.equation]
            for n, u in enumerate(units[first:end], first)
        )
        found.append(known.setdefault(mine, len(known)))
    return tuple(found)


def _is_trip(units: Sequence[Unit], n: int) -> bool:
    """Whether a unit is an iteration of a scan of several."""
    return units[n].trip > 0 or units[min(n + 1, len(units) - 1)].trip == 1


def _at(change: Recompute, cut: Sequence[int]) -> list[Recompute]:
    """A segment of the top level in pieces that begin where stages do."""
    segment = change.segment
    if segment.inside:
        return [change]
    inner = sorted({e for e in cut if segment.first < e <= segment.last})
    pieces = [
        segment._replace(first=a, last=b - 1)
        for a, b in itertools.pairwise((segment.first, *inner, segment.last + 1))
    ]

    def named(names, piece):
        return tuple(x for x in names if piece.first <= x[0] <= piece.last)

    return [Recompute(p, named(change.kept, p), named(change.host, p)) for p in pieces]
