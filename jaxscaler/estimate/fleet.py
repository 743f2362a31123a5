"""Two kinds of devices that train one model: what the slower kind costs, and a split that helps.

An even split runs at the pace of the slowest device. An uneven one gives each kind as many whole
micro-batches as it has time for, in a way of its own; no split is faster than the sum of what the
kinds do a second. Every share is priced by `price` on a cluster of its kind:

- "together": all devices split the optimizer's state (ZeRO-1), in the same tp, cp and pp.
- "apart": each kind holds all of the state, and gradients are summed up between the kinds, over the
  slower one's network (as hybrid sharding does it between groups).
- "alone": one of the kinds does it all.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.devices import find_device
from jaxscaler.cluster.links import Link
from jaxscaler.cluster.mesh import Axis, Part
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.cost.collective import collective_time
from jaxscaler.errors import ClusterError, ConfigError, InfeasibleError
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.memory import BYTES
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig
from jaxscaler.estimate.price import Priced, price
from jaxscaler.estimate.search import best_ways

SCHEDULES = ("1f1b", "zero-bubble")  # which have closed forms for any number of micro-batches
WAYS = 6  # of each kind that are combined
NOT_BUSY = ("dp", "update", "compress", "bubble")  # parts of a step that no micro-batch takes


@dataclass(frozen=True)
class Share:
    """What one kind does of a step. `samples` of the batch in `micro_batches` of `micro` on each of
    `parallel.dp` replicas; seconds, memory: of its devices, what is common to both kinds included.
    """

    cluster: Cluster
    parallel: ParallelConfig
    micro: int
    micro_batches: int
    recompute: str
    samples: int
    priced: Priced

    @property
    def seconds(self) -> float:
        return self.priced.seconds


@dataclass(frozen=True)
class Split:
    """Shares of the kinds that do something; a step ends with the slowest."""

    name: str
    shares: tuple[Share, ...]

    @property
    def seconds(self) -> float:
        return max(share.seconds for share in self.shares)

    @property
    def fits(self) -> bool:
        return all(share.priced.fits for share in self.shares)


@dataclass(frozen=True)
class Fleet:
    """What training takes on two kinds of devices.

    rates: samples that each kind computes a second in its best way, reductions and updates left
    out. bound: seconds of a step at the sum of them: no split of the batch takes less. even: the
    fastest equal split, None where none fits. best: the fastest of all. others: the best of each
    name. slowest: the kind whose pace the even split keeps.
    """

    model: ModelConfig
    cluster: Mixed
    options: Options
    tokens: float
    rates: tuple[float, ...]
    bound: float
    even: Split | None
    best: Split
    others: tuple[Split, ...] = field(default=())

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        return self.cluster.parts

    @property
    def slowest(self) -> str | None:
        if self.even is None:
            return None
        return max(self.even.shares, key=lambda share: share.seconds).cluster.name

    @property
    def days(self) -> float:
        """Of the run, failures left out."""
        return self.tokens / (self.options.batch * self.options.seq) * self.best.seconds / 86400

    def explain(self) -> list[Any]:
        """Each number with formula, values and source: `explain.Line`s."""
        from jaxscaler.estimate.show_fleet import lines

        return lines(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from jaxscaler.estimate.show_fleet import fleet_data

        return fleet_data(self)

    def show(self) -> None:
        """Print tables."""
        from jaxscaler.estimate.show_fleet import show_fleet

        show_fleet(self)


def mixed_of(text: str, cluster_of: Callable[[str], Cluster] = Cluster.parse) -> Mixed:
    """The clusters of "h100:8x4+a100:8x4", as `cluster_of` reads each."""
    kinds = tuple(cluster_of(part) for part in text.split("+"))
    return Mixed(kinds, network_between(kinds))


def fleet(model: ModelConfig, cluster: Mixed, options: Options, tokens: float) -> Fleet:
    """Price splits of `options.batch` over two kinds. InfeasibleError where none fits, ConfigError
    unless the clusters are two of different devices."""
    kinds = cluster.parts
    if len(kinds) != 2 or kinds[0].device == kinds[1].device:
        raise ConfigError(
            f"cluster={cluster.name!r}: a fleet is two clusters of different devices, as "
            "h100:8x4+a100:8x4"
        )
    search = _Search(model, cluster, options)
    even = min(search.even(), key=lambda split: split.seconds, default=None)
    groups = (
        search.uneven("together", search.together),
        search.uneven("apart", search.apart),
        *(search.alone(k) for k in range(len(kinds))),
    )
    found = [min(group, key=lambda split: split.seconds) for group in map(list, groups) if group]
    if even is not None:
        found.append(even)
    if not found:
        raise InfeasibleError(
            f"{model.name}: no split of batch={options.batch} over "
            f"{' and '.join(kind.name for kind in kinds)} fits: take more or larger devices"
        )
    rates = search.rates()
    found.sort(key=lambda split: split.seconds)
    return Fleet(
        model, cluster, options, tokens, rates, options.batch / sum(rates), even, found[0],
        tuple(found),
    )  # fmt: skip


def network_between(kinds: Sequence[Cluster]) -> Link:
    """The slowest of the kinds' networks: that of their nodes, or that which such nodes have."""
    links = []
    for kind in kinds:
        if kind.levels[0].link.kind == "network":
            links.append(kind.levels[0].link)
            continue
        try:
            links.append(find_device(kind.device.name)[1].inter)
        except ClusterError as error:
            raise ConfigError(
                f"cluster {kind.name}: no level of it is a network, and its device is in no table: "
                "add a level of size 1 with the network's link"
            ) from error
    return min(links, key=lambda link: link.bandwidth)


# -- the search ------------------------------------------------------------------------------------

Run = Callable[[int], Priced]  # micro-batches of a replica -> what a step of them takes


@dataclass(frozen=True)
class _Candidate:
    """A way of one kind: `unit` samples in a micro-batch of all of its replicas."""

    way: Priced
    parallel: ParallelConfig
    unit: int
    run: Run


class _Search:
    def __init__(self, model: ModelConfig, cluster: Mixed, options: Options):
        asked = tuple(name for name in SCHEDULES if name in options.schedules)
        self.options = replace(options, schedules=asked)
        self.model, self.kinds, self.link = model, cluster.parts, cluster.link
        self.devices, kinds = cluster.num_devices, cluster.parts
        self.joint = [self.joined(k) for k in range(len(kinds))]
        self.together = [self.candidates(k, self.joint[k], own=False) for k in range(len(kinds))]
        self.apart = [self.candidates(k, kind, own=True) for k, kind in enumerate(kinds)]
        self.whole = [self.ways(kind, self.options.batch) for kind in kinds]

    def joined(self, k: int) -> Cluster | None:
        """All devices as if they were of kind k: its fabric in nodes of a common size, and the
        network between them. None where a kind is no nodes of switched devices."""
        nodes = [[x for x in kind.levels if x.link.kind != "network"] for kind in self.kinds]
        if any(len(inner) != 1 or inner[0].link.kind == "torus" for inner in nodes):
            return None
        size = math.gcd(*(inner[0].size for inner in nodes))
        inside = replace(nodes[k][0], size=size, link=Part(nodes[k][0], size).link)
        levels = (Level("node", self.devices // size, self.link), inside)
        return Cluster("+".join(kind.name for kind in self.kinds), self.kinds[k].device, levels)

    def candidates(self, k: int, cluster: Cluster | None, own: bool) -> list[_Candidate]:
        """The fastest ways of kind k on `cluster`: its own, or all devices together."""
        if cluster is None:
            return []
        n = cluster.num_devices
        share = max(1, self.options.batch * n // self.devices)
        share = n * (share // n) if share >= n else 2 ** int(math.log2(share))
        found = self.ways(cluster, share)
        made = (self.candidate(k, way, own) for way in found)
        return [candidate for candidate in made if candidate is not None]

    def ways(self, cluster: Cluster, batch: int) -> list[Priced]:
        """Those that fit, fastest first."""
        try:
            return best_ways(self.model, cluster, replace(self.options, batch=batch))
        except InfeasibleError:
            return []

    def candidate(self, k: int, way: Priced, own: bool) -> _Candidate | None:
        """A way as kind k runs it; None where it does not divide the kind's devices."""
        p, kind = way.parallel, self.kinds[k]
        inside = p.tp * p.pp * p.cp
        replicas = kind.num_devices // inside
        if kind.num_devices % inside or replicas % p.ep:
            return None
        mine = replace(p, dp=replicas)
        run = partial(self.on_own, k, way, mine) if own else partial(self.on_all, k, way)
        return _Candidate(way, mine, replicas * way.micro_batch, _remembered(run))

    def on_all(self, k: int, way: Priced, count: int) -> Priced:
        """On all devices as if they were of kind k, each replica with `count` micro-batches."""
        cluster = self.joint[k]
        assert cluster is not None
        return self.price(way, way.parallel, cluster, count)

    def on_own(self, k: int, way: Priced, p: ParallelConfig, count: int) -> Priced:
        """On kind k, and gradients summed up between kinds."""
        kind = self.kinds[k]
        if p.pp == 1:  # a hybrid of as many groups as kinds, each of which splits its own state
            levels = (Level("kind", len(self.kinds), self.link), *kind.levels)
            wide = replace(p, dp=p.dp * len(self.kinds), shard=p.dp * p.cp)
            return self.price(way, wide, replace(kind, levels=levels), count)
        found = self.price(way, p, kind, count)
        sizes = Axis("kind", (Part(Level("kind", len(self.kinds), self.link), len(self.kinds)),))
        nbytes = self.model.parameters / kind.num_devices * BYTES[self.options.gradient]
        more = float(collective_time("all_reduce", sizes, nbytes)) / found.constants.network
        parts = {**found.parts, "dp": found.parts.get("dp", 0.0) + more}
        return replace(found, seconds=found.seconds + more, parts=parts)

    def price(self, way: Priced, parallel: ParallelConfig, cluster: Cluster, count: int) -> Priced:
        options = replace(self.options, batch=parallel.dp * way.micro_batch * count)
        return price(
            self.model, parallel, cluster, micro_batch=way.micro_batch, recompute=way.recompute,
            **options.keywords(),
        )  # fmt: skip

    def rates(self) -> tuple[float, ...]:
        """Samples a second of each kind in its best way, 0 where it has none."""

        def rate(way: Priced, devices: int) -> float:
            busy = sum(s for what, s in way.parts.items() if what not in NOT_BUSY)
            return way.batch / busy * devices / way.parallel.devices

        found = []
        for kind, *groups, whole in zip(self.kinds, self.together, self.apart, self.whole):
            ways = [candidate.way for group in groups for candidate in group] + whole
            found.append(max((rate(way, kind.num_devices) for way in ways), default=0.0))
        return tuple(found)

    # -- splits

    def even(self) -> Iterator[Split]:
        """Equal splits: one way for all, each device with as much to do as any other."""
        for name, groups in (("together", self.together), ("apart", self.apart)):
            ways = {self.same(x): x.way for group in groups for x in group}
            for way in ways.values():
                made = [self.candidate(k, way, name == "apart") for k in range(len(self.kinds))]
                pair = [candidate for candidate in made if candidate is not None]
                if len(pair) < len(made):
                    continue
                count = -(-self.options.batch // sum(x.unit for x in pair))
                split = self.split(f"even, {name}", pair, [count] * len(pair))
                if split.fits:
                    yield split

    @staticmethod
    def same(x: _Candidate) -> tuple:
        p = x.way.parallel
        return (p.tp, p.cp, p.pp, p.ep, p.zero, p.schedule, x.way.micro_batch, x.way.recompute)

    def uneven(self, name: str, groups: list[list[_Candidate]]) -> Iterator[Split]:
        """Whole micro-batches by speed: of two ways, the counts at which neither waits for long."""
        if name == "together":  # the same parts of one state, reduced once a step
            groups = [[x for x in group if x.parallel.zero < 2] for group in groups]
        for a in groups[0][:WAYS]:
            for b in groups[1][:WAYS]:
                if name == "together" and _parts_of(a) != _parts_of(b):
                    continue
                counts = self.balanced(a, b)
                if counts is None:
                    continue
                split = self.split(f"uneven, {name}", (a, b), counts)
                if split.fits:
                    yield split

    def balanced(self, a: _Candidate, b: _Candidate) -> tuple[int, int] | None:
        """Micro-batches of each that make up the batch; None where no two do."""
        batch = self.options.batch
        counts = [
            (m, (batch - a.unit * m) // b.unit)
            for m in range(1, (batch - 1) // a.unit + 1)
            if (batch - a.unit * m) % b.unit == 0
        ]
        if not counts:
            return None

        def seconds(pair: tuple[int, int]) -> float:
            return max(a.run(pair[0]).seconds, b.run(pair[1]).seconds)

        # a takes longer the more it has, b the less: the best is where the two cross
        at = bisect.bisect_left(
            counts, True, key=lambda pair: a.run(pair[0]).seconds >= b.run(pair[1]).seconds
        )
        return min(counts[max(0, at - 1) : at + 1], key=seconds)

    def split(self, name: str, pair: Sequence[_Candidate], counts: Sequence[int]) -> Split:
        return Split(
            name,
            tuple(
                Share(kind, x.parallel, x.way.micro_batch, count, x.way.recompute, x.unit * count,
                      x.run(count))
                for kind, x, count in zip(self.kinds, pair, counts)
            ),
        )  # fmt: skip

    def alone(self, k: int) -> Iterator[Split]:
        """The whole batch on one kind."""
        kind = self.kinds[k]
        for way in self.whole[k][:1]:
            share = Share(kind, way.parallel, way.micro_batch, way.micro_batches, way.recompute,
                          way.batch, way)  # fmt: skip
            yield Split(f"{kind.name} alone", (share,))


def _parts_of(x: _Candidate) -> tuple[int, ...]:
    """What says which part of the state a device has."""
    p = x.parallel
    return p.tp, p.cp, p.pp, p.ep, p.zero


def _remembered(run: Callable[[int], Priced]) -> Callable[[int], Priced]:
    known: dict[int, Priced] = {}

    def again(count: int) -> Priced:
        if count not in known:
            known[count] = run(count)
        return known[count]

    return again
