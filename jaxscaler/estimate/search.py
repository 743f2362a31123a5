"""Which way to spread a model over so many devices, and how many devices to take.

Ways are enumerated, those that do not fit are left out by closed forms (memory.py), and the most
promising are priced; a closed form of work and traffic says which those are, and prices nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.devices import Device, find_device
from jaxscaler.cluster.links import Link
from jaxscaler.errors import ConfigError, InfeasibleError
from jaxscaler.estimate.compression import compression_of
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import constants_for
from jaxscaler.estimate.memory import (
    GB,
    leaves_of,
    overhead_bytes,
    saved_per_layer,
    states_of,
    training_memory,
)
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig, check, cluster_of
from jaxscaler.estimate.price import Priced, attention_for, dtype_for, price, trained_states
from jaxscaler.estimate.ranking import rough_seconds, schedules_for
from jaxscaler.estimate.step import Job

BODIES = 5  # micro-batches (see Key) that are priced anew for a cluster, each with all its pp, ZeRO
MICRO = (1, 2, 4, 8)
LONG = 16384  # tokens from which context parallelism is looked at
GAIN = 0.8  # a doubling of devices that brings less than this share of twice the speed is too much
# A batch in tokens by parameters: Brown et al. 2020, table 2.1.
BATCHES = ((2e9, 2**19), (5e9, 2**20), (5e10, 2**21), (math.inf, 2**22))


class Way(NamedTuple):
    """A candidate."""

    parallel: ParallelConfig
    micro: int
    recompute: str


class Key(NamedTuple):
    """What a micro-batch's price depends on."""

    tp: int
    cp: int
    ep: int
    micro: int
    recompute: str


def usual_batch(model: ModelConfig, seq: int) -> int:
    """Samples per step as models of this size are trained with; a power of 2."""
    tokens = next(tokens for size, tokens in BATCHES if model.parameters < size)
    return max(1, 2 ** round(math.log2(tokens / seq)))


def ways(model: ModelConfig, cluster: Cluster, options: Options) -> Iterator[Way]:
    """All candidates that divide; ZeRO-1 unless there is nothing to share."""
    n, seq = cluster.num_devices, options.seq
    fast = fast_domain(cluster)
    for tp in (t for t in _divisors(n) if t <= fast and model.heads % t == 0):
        for cp in (c for c in _divisors(n // tp) if c == 1 or (seq >= LONG and c <= 16)):
            for pp in _divisors(n // (tp * cp)):
                dp = n // (tp * cp * pp)
                if options.batch % dp or pp > model.layers:
                    continue
                experts = [e for e in _divisors(dp) if model.experts and model.experts % e == 0]
                for ep in experts or [1]:
                    if ep > fast:
                        continue
                    for zero in (1, 3) if dp * cp > 1 else (0,):
                        if zero == 3 and pp > 1:  # gathers for every micro-batch: never used
                            continue
                        parallel = ParallelConfig(tp, pp, dp, cp, ep, zero)
                        for micro in MICRO:
                            if options.batch // dp % micro:
                                break
                            for recompute in ("none", "full"):
                                try:
                                    check(model, parallel, n, options.batch, seq, micro)
                                except ConfigError:
                                    continue
                                yield Way(parallel, micro, recompute)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def fast_domain(cluster: Cluster) -> int:
    """Devices within which tensor parallelism stays: a node, or 16 of a torus."""
    inner = math.prod(level.size for level in cluster.levels if level.link.kind != "network")
    return min(inner, 16 if any(x.link.kind == "torus" for x in cluster.levels) else 8)


class Room:
    """The closed forms of memory, for many candidates."""

    def __init__(self, model: ModelConfig, device: Device, options: Options):
        self.model, self.device, self.options = model, device, options
        dtype = self.dtype = options.dtype or dtype_for(device)
        states = states_of(
            options.optimizer, dtype, options.master, options.gradient, options.stack
        )
        self.states, self.trained = trained_states(model, states, dtype, options.lora, options.base)
        constants = options.constants or constants_for(device, options.stack)
        self.overhead = overhead_bytes(constants.memory_gb, options.stack, device.name)
        self.attention = attention_for(model, options.attention)
        self.narrow = compression_of(options.compress, options.gradient)

    def holds(self, way: Way) -> bool:
        """Whether a candidate fits."""
        p, model, options = way.parallel, self.model, self.options
        saved = saved_per_layer(
            model, way.micro, options.seq, p, way.recompute, self.attention, options.dropout
        )
        if options.stack == "jax":
            saved *= _unfused(
                model, options.seq, way.recompute, self.dtype, self.attention, self.device
            )
        count = options.batch // (p.dp * way.micro)
        used = training_memory(
            model, _leaves(model, p.tp, p.ep), saved, p, self.states, micro=way.micro,
            seq=options.seq, micro_batches=count, recompute=way.recompute,
            attention=self.attention, dropout=options.dropout,
            overhead=self.overhead, trained=self.trained,
            late=options.stack == "jax" and count == 1, stack=options.stack,
            feedback=self.narrow.kept if self.narrow else 0.0,
        )  # fmt: skip
        return sum(used.values()) <= options.memory * self.device.hbm_bytes


@lru_cache(maxsize=256)
def _unfused(
    model: ModelConfig, seq: int, recompute: str, dtype: str, attention: str, device: Device
) -> float:
    """What a layer of the traced step keeps, over what it keeps where all that can be is fused."""
    one, alone = ParallelConfig(), Level("device", 1, Link("switch", 1.0))
    cluster = Cluster(device.name, device, (alone,))
    job = Job(model, one, cluster, 1, seq, recompute, dtype, attention, "jax")
    return job.body().saved / saved_per_layer(model, 1, seq, one, recompute, attention)


@lru_cache(maxsize=256)
def _leaves(model: ModelConfig, tp: int, ep: int):
    return leaves_of(model, tp, ep)


def family(parallel: ParallelConfig) -> str:
    """What is split besides the batch: "tensor", "tensor+pipeline", …; "data" if nothing is."""
    degrees = {"tensor": parallel.tp, "context": parallel.cp, "expert": parallel.ep,
               "pipeline": parallel.pp}  # fmt: skip
    return "+".join(name for name, degree in degrees.items() if degree > 1) or "data"


def best_ways(
    model: ModelConfig,
    cluster: Cluster,
    options: Options,
    bodies: int = BODIES,
    known: set[Key] | None = None,
    only: str | None = None,
) -> list[Priced]:
    """The priced candidates that fit, fastest first. InfeasibleError if none does.

    bodies: so many micro-batches are priced anew; `known`, which is added to, are those priced
    before. only: a family.
    """
    room = Room(model, cluster.device, options)
    known = set() if known is None else known
    fitting: dict[Key, list[Way]] = defaultdict(list)
    bare: set[tuple] = set()  # what fits without recomputation is not looked at with it
    for way in ways(model, cluster, options):
        p = way.parallel
        if only is not None and family(p) != only:
            continue
        same = (p, way.micro)
        if way.recompute != "none" and same in bare:
            continue
        if not room.holds(way):
            continue
        if way.recompute == "none":
            bare.add(same)
        fitting[Key(p.tp, p.cp, p.ep, way.micro, way.recompute)].append(way)
    scored = {
        key: min(rough_seconds(model, cluster, *way, options) for way in some)
        for key, some in fitting.items()
    }
    found: list[Priced] = []
    for key in sorted(scored, key=lambda key: scored[key]):
        if key not in known:
            if bodies <= 0 and found:
                continue
            bodies -= 1
            known.add(key)
        for way in fitting[key]:
            priced = price(
                model, way.parallel, cluster, micro_batch=way.micro, recompute=way.recompute,
                **options.keywords(),
            )  # fmt: skip
            if priced.fits:
                found.append(priced)
    if not found:
        raise InfeasibleError(
            f"{model.name}: no way to spread it over {cluster.name} fits "
            f"{options.memory * cluster.device.hbm_bytes / GB:.3g} GB per device with batch="
            f"{options.batch}, seq={options.seq}: take more or larger devices"
        )
    found += _with_other_schedules(model, cluster, options, found)
    return sorted(found, key=lambda priced: priced.seconds)


def _with_other_schedules(
    model: ModelConfig, cluster: Cluster, options: Options, found: Sequence[Priced]
) -> list[Priced]:
    """The pipelines among what was found under other schedules, those that may come out first.

    A schedule takes the bubble away at best, and no memory: what 1F1B does not fit none does, and
    what is slower than the best even without its bubble and transfers needs no look.
    """

    def least(priced: Priced) -> float:
        return priced.seconds - priced.parts.get("bubble", 0.0) - priced.parts.get("pp", 0.0)

    best = min(priced.seconds for priced in found)
    more: list[Priced] = []
    for plain in sorted((x for x in found if x.parallel.pp > 1), key=least):
        if least(plain) >= best:
            break
        for name, chunks in schedules_for(
            model.layers, plain.parallel.pp, plain.micro_batches, options.schedules
        ):
            priced = price(
                model, replace(plain.parallel, schedule=name, chunks=chunks), cluster,
                micro_batch=plain.micro_batch, recompute=plain.recompute, **options.keywords(),
            )  # fmt: skip
            if priced.fits:
                more.append(priced)
                best = min(best, priced.seconds)
    return more


# -- how many devices ------------------------------------------------------------------------------


Grow = Callable[[int], Cluster]


def grower(device: str | Cluster) -> tuple[Grow, Callable[[int], Iterator[int]]]:
    """(the cluster of so many devices, the numbers up to some that it may have).

    Of a device by name, or of a cluster whose outermost level, of nodes, may have any size.
    """
    if isinstance(device, str):
        return partial(cluster_of, device), partial(sizes_of, device)
    outer, *inner = device.levels
    node = math.prod(level.size for level in inner)
    if outer.link.kind != "network":
        raise ConfigError(
            f"{device.name}: its outermost level {outer.name!r} is no network, so it can not grow: "
            "give a device by name, or devices=0"
        )

    def grow(n: int) -> Cluster:
        if n % node:
            raise ConfigError(f"devices={n}: {device.name} has nodes of {node}")
        if n == device.num_devices:
            return device
        levels = (replace(outer, size=n // node), *inner)
        return replace(device, name=f"{device.name}, {n} devices", levels=levels)

    return grow, lambda most: (node * k for k in _counts(most // node, False))


def sizes_of(device: str, most: int) -> Iterator[int]:
    """Numbers of devices that a cluster may have: parts of a node, nodes, slices."""
    kind, fabric = find_device(device)
    node = fabric.chip_devices if fabric.torus_rank else min(kind.devices_per_node or 1, 8)
    n = fabric.chip_devices
    while n < node and n <= most:
        yield n
        n *= 2
    for count in _counts(most // node, bool(fabric.torus_rank)):
        yield count * node


def _counts(most: int, powers: bool) -> Iterator[int]:
    """1, 2, 3 … with four steps between two powers of 2, or powers of 2 alone."""
    count = 1
    while count <= most:
        yield count
        power = 2 ** int(math.log2(count))
        count += power if powers else max(1, power // 4)


def smallest(
    model: ModelConfig,
    device: str | Cluster,
    options: Options,
    most: int = 2**14,
    known: set[Key] | None = None,
    only: str | None = None,
) -> tuple[Cluster, list[Priced]]:
    """The smallest cluster of a device that a step fits, with its ways, fastest first.

    InfeasibleError if none of up to `most` devices does.
    """
    grow, sizes = grower(device)
    for n in sizes(most):
        cluster = grow(n)
        some = (
            way
            for way in ways(model, cluster, options)
            if way.micro == 1 and (only is None or family(way.parallel) == only)
        )
        if not any(map(Room(model, cluster.device, options).holds, some)):
            continue
        try:
            return cluster, best_ways(model, cluster, options, known=known, only=only)
        except InfeasibleError:
            continue
    name = device if isinstance(device, str) else device.name
    raise InfeasibleError(
        f"{model.name}: it fits no {most} {name}: take a smaller model or batch, larger "
        "devices, or a shorter seq"
    )


class Point(NamedTuple):
    """A cluster on the scaling curve: its best way, and the share of ideal speed-up over the
    smallest one."""

    devices: int
    best: Priced
    efficiency: float


def scaling(
    model: ModelConfig,
    device: str | Cluster,
    options: Options,
    first: Priced,
    most: int,
    bodies: int = 1,
    known: set[Key] | None = None,
    only: str | None = None,
) -> list[Point]:
    """From the smallest cluster on by doubling, up to `most` devices or what the batch divides."""
    grow, _ = grower(device)
    n = first.parallel.devices
    base = first.tokens_per_second / n
    found = [Point(n, first, 1.0)]
    known = set() if known is None else known
    while 2 * n <= most:
        n *= 2
        try:
            best = best_ways(model, grow(n), options, bodies, known, only)[0]
        except InfeasibleError:
            break
        found.append(Point(n, best, best.tokens_per_second / n / base))
    return found


def knee(points: Sequence[Point]) -> Point:
    """The last point of the curve before a doubling brings less than `GAIN` of twice the speed."""
    for now, then in pairwise(points):
        gain = then.best.tokens_per_second / now.best.tokens_per_second
        if gain < GAIN * then.devices / now.devices:
            return now
    return points[-1]
