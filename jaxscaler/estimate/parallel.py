"""How a model is spread: degrees of parallelism, and the links that each of them gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.mesh import Axis, Part
from jaxscaler.cost.pipeline import CLOSED_FORMS
from jaxscaler.errors import ConfigError
from jaxscaler.estimate.config import ModelConfig

SCHEDULES = tuple(name for name in CLOSED_FORMS if name != "inference")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism; tp * cp * dp * pp is the number of devices.

    tp: tensor parallel. sp: what lies between its products is split on tokens. cp: context
    parallel. ep: expert parallel, a factor of dp. dp: replicas of the batch. zero: 1 splits
    optimizer state, 2 gradients too, 3 parameters too, among `shard` devices (0: all dp * cp). pp:
    pipeline stages, run by `schedule`, each of `chunks` pieces.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sp: bool = True
    shard: int = 0
    schedule: str = "1f1b"
    chunks: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("zero", "shard") else 1
            if field.type == "int" and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ConfigError(f"{field.name}={value!r}: a whole number, {least} or more")
        if self.zero > 3:
            raise ConfigError(f"zero={self.zero}: a stage from 0 to 3")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r}: one of {', '.join(SCHEDULES)}")
        if self.dp % self.ep:
            raise ConfigError(
                f"ep={self.ep} does not divide dp={self.dp}: experts share its devices"
            )
        if self.shard and (self.dp * self.cp) % self.shard:
            raise ConfigError(
                f"shard={self.shard} does not divide dp={self.dp} * cp={self.cp}: state is split "
                "among some of the devices that hold the same"
            )
        if self.chunks > 1 and self.schedule != "interleaved":
            raise ConfigError(
                f"chunks={self.chunks} needs schedule='interleaved', not {self.schedule!r}"
            )

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def shards(self) -> int:
        """Devices among which ZeRO splits."""
        return self.shard or self.dp * self.cp

    def __str__(self) -> str:
        said = [f"{k}={getattr(self, k)}" for k in ("tp", "cp", "ep", "pp", "dp")]
        said = [text for text in said if not text.endswith("=1")] or ["one device"]
        if self.zero:
            among = f"/{self.shard}" if self.shard else ""
            said.append(f"zero={self.zero}{among}")
        if self.pp > 1:
            said.append(f"{self.schedule}{f'x{self.chunks}' if self.chunks > 1 else ''}")
        return " ".join(said)


def check(
    model: ModelConfig, parallel: ParallelConfig, devices: int, batch: int, seq: int, micro: int
) -> int:
    """Micro-batches of a step. ConfigError, naming the fields, for what can not be divided so."""
    p = parallel
    for name, value in (("batch", batch), ("seq", seq), ("micro_batch", micro)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r}: a whole number, 1 or more")
    rules = (
        (p.devices == devices,
         f"tp={p.tp} * cp={p.cp} * pp={p.pp} * dp={p.dp} is {p.devices}, not "
         f"the {devices} devices"),
        (model.heads % p.tp == 0, f"tp={p.tp} does not divide heads={model.heads}"),
        (max(p.tp, model.kv_heads) % min(p.tp, model.kv_heads) == 0,
         f"tp={p.tp} neither divides kv_heads={model.kv_heads} nor is a multiple of it"),
        (model.ffn % p.tp == 0, f"tp={p.tp} does not divide ffn={model.ffn}"),
        (seq % (p.cp * (p.tp if p.sp else 1)) == 0,
         f"cp={p.cp}{f' * tp={p.tp} (sp)' if p.sp else ''} does not divide seq={seq}"),
        (p.ep == 1 or (model.experts and model.experts % p.ep == 0),
         f"ep={p.ep} does not divide experts={model.experts}"),
        (p.pp * p.chunks <= model.layers,
         f"pp={p.pp} * chunks={p.chunks} are more than layers={model.layers}"),
        (batch % (p.dp * micro) == 0,
         f"dp={p.dp} * micro_batch={micro} does not divide batch={batch}"),
    )  # fmt: skip
    for holds, wrong in rules:
        if not holds:
            raise ConfigError(f"{model.name}: {wrong}")
    return batch // (p.dp * micro)


def axes_of(cluster: Cluster, sizes: dict[str, int]) -> dict[str, Axis]:
    """Mesh axes of these sizes, major first, in the order of the cluster's levels.

    An axis that does not fit what is left of a level is taken from the next one out, whose link it
    has to pass: 3 devices of nodes of 4 are on the network. The axes of a torus may be taken in any
    order.
    """
    levels = [(level, level.size) for level in cluster.levels if level.size > 1]
    found = {}
    for name, size in reversed(sizes.items()):
        parts: list[Part] = []
        left = size
        while left > 1:
            if not levels:
                parts.insert(0, Part(_wide(cluster.levels[0], left), left))
                break
            at = _fitting(levels, left)
            level, rest = levels.pop(at)
            taken = math.gcd(left, rest)
            if taken == 1 or taken not in (left, rest):
                if levels:  # what is left of this level is passed over
                    outer, more = levels.pop()
                    levels.append((_wide(outer, more * rest), more * rest))
                    continue
                parts.insert(0, Part(_wide(level, left), left))
                break
            parts.insert(0, Part(level, taken, max(level.size // rest, 1)))
            left //= taken
            if taken < rest:
                levels.insert(at, (level, rest // taken))
        found[name] = Axis(name, tuple(parts))
    return dict(reversed(found.items()))


def _fitting(levels: list[tuple[Level, int]], size: int) -> int:
    """The innermost level; of a torus, whose axes are alike, the innermost that fits a size."""
    last = len(levels) - 1
    if levels[last][0].link.kind != "torus":
        return last
    fits = (
        at
        for at, (level, rest) in reversed([*enumerate(levels)])
        if level.link.kind == "torus" and math.gcd(size, rest) in (size, rest)
    )
    return next(fits, last)


def _wide(level: Level, size: int) -> Level:
    return level if level.size == size else replace(level, size=size)


def level_of(axis: Axis) -> str:
    """ "network" if the axis leaves a node or slice, else "fabric"."""
    return "network" if any(part.link.kind == "network" for part in axis.parts) else "fabric"


def over_trees(axis: Axis) -> float:
    """Seconds of an all-reduce beside those of a ring through all nodes.

    NCCL reduces over trees of nodes (Jeaugey 2019, "Massively Scale Your Deep Learning Training
    with NCCL 2.4"): the network passes (N - 1) / N of the bytes with N nodes, not devices. That is
    about half for two nodes, and as much as a ring for many.
    """
    nodes = math.prod(part.size for part in axis.parts if part.link.kind == "network")
    return (1 - 1 / nodes) / (1 - 1 / axis.size) if nodes > 1 else 1.0


def cluster_of(device: str, devices: int) -> Cluster:
    """The cluster of so many devices of a kind: whole nodes, or the squarest torus.

    A name such as "h100"; a number that fills no nodes of the usual size is taken as nodes of a
    size that does divide it. Raises ClusterError for an unknown device.
    """
    from jaxscaler.cluster.devices import find_device

    kind, fabric = find_device(device)
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices={devices!r}: a whole number, 1 or more")
    if fabric.torus_rank:
        if devices % fabric.chip_devices:
            raise ConfigError(
                f"devices={devices}: {kind.name} has {fabric.chip_devices} devices per chip"
            )
        chips = devices // fabric.chip_devices
        slices = -(-chips // fabric.max_chips) if fabric.max_chips else 1
        while chips % slices:
            slices += 1
        dims = _box(chips // slices, fabric.torus_rank)
        return Cluster.parse(
            f"{kind.name}:" + "x".join(map(str, dims + ([slices] if slices > 1 else [])))
        )
    node = kind.devices_per_node or 1
    node = max(n for n in range(1, node + 1) if devices % n == 0 or n >= devices)
    if devices <= node:
        return Cluster.parse(f"{kind.name}:{devices}")
    return Cluster.parse(f"{kind.name}:{node}x{devices // node}")


def _box(count: int, rank: int) -> list[int]:
    """`rank` factors of `count`, as near to each other as there are, the smallest first."""
    if rank == 1:
        return [count]
    root = round(count ** (1 / rank))
    first = max(n for n in range(1, root + 1) if count % n == 0)
    return [first, *_box(count // first, rank - 1)]
