"""A cluster in parts: the sub-clusters of a pipeline's stages, and what connects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.links import Link
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import ClusterError


def sub_clusters(cluster: Cluster | Mixed, sizes: Sequence[int]) -> tuple[Cluster, ...]:
    """Parts of so many devices, one after another in the order of device ids.

    Each must be a box: some groups of one level, whole inside, and within one group of the level
    above. Raises ClusterError naming the part that is none, or if there are too few devices.
    """
    ends = list(accumulate(sizes))
    if not sizes or min(sizes) < 1 or ends[-1] > cluster.num_devices:
        raise ClusterError(
            f"stages of {list(sizes)} devices: each needs one at least, and {cluster.name} has "
            f"{cluster.num_devices}"
        )
    return tuple(part_at(cluster, end - n, n) for n, end in zip(sizes, ends))


def part_at(cluster: Cluster | Mixed, first: int, size: int) -> Cluster:
    """The part of `size` devices from number `first` on. Raises ClusterError if it is none."""
    if isinstance(cluster, Mixed):
        begin, kind = cluster.first_of(first)
        if first - begin + size > kind.num_devices:
            raise ClusterError(
                f"devices {first} to {first + size - 1} of {cluster.name} are of several kinds: a "
                "stage takes devices of one kind; change the sizes or their order"
            )
        return part_at(kind, first - begin, size)
    levels = cluster.levels
    for j in range(len(levels)):
        inner = prod(level.size for level in levels[j + 1 :])
        groups, around = size // inner, inner * levels[j].size
        whole = size % inner == 0 and first % inner == 0
        if groups and whole and first // around == (first + size - 1) // around:
            level = levels[j]
            link = level.link
            if link.wrap and groups < level.size:
                link = replace(link, wrap=False)
            name = f"{cluster.name}[{first}:{first + size}]"
            return Cluster(
                name, cluster.device, (Level(level.name, groups, link), *levels[j + 1 :])
            )
    shape = " x ".join(f"{level.size} {level.name}" for level in levels)
    raise ClusterError(
        f"devices {first} to {first + size - 1} of {cluster.name} ({shape}) are no whole part of "
        "it: a stage takes devices of one group, or whole groups; change the sizes or their order"
    )


def link_between(cluster: Cluster | Mixed, first: int, second: int) -> Link:
    """The link of the outermost level that tells two devices (ids) apart."""
    if isinstance(cluster, Mixed):
        (begin, kind), (other, _) = cluster.first_of(first), cluster.first_of(second)
        return cluster.link if begin != other else link_between(kind, first - begin, second - begin)
    for j, level in enumerate(cluster.levels):
        inner = prod(inside.size for inside in cluster.levels[j + 1 :])
        if first // inner != second // inner:
            return level.link
    raise ClusterError(f"device {first} of {cluster.name} needs no link to itself")
