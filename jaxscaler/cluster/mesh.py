"""Meshes: the levels of a cluster cut, and joined, into the named axes that a plan uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.links import Link
from jaxscaler.errors import ClusterError


@dataclass(frozen=True)
class Part:
    """`size` groups of a level, `stride` apart: all of it (stride 1), or a factor of its size."""

    level: Level
    size: int
    stride: int = 1

    @property
    def link(self) -> Link:
        """What a collective among these groups alone has of the level's link, all groups busy.

        A factor of a torus axis is no ring of its own: neighbours (stride 1) form a line, and
        groups `stride` apart share every wire with `stride - 1` others and are as many hops away.
        """
        link, whole = self.level.link, self.size * self.stride == self.level.size
        if link.kind == "torus":
            return replace(
                link,
                bandwidth=link.bandwidth / self.stride,
                latency=link.latency * self.stride,
                wrap=link.wrap and whole,
            )
        if link.kind == "full_mesh":
            share = (self.size - 1) / max(1, self.level.size - 1)
            return replace(link, bandwidth=link.bandwidth * share) if share else link
        return link


@dataclass(frozen=True)
class Axis:
    """A mesh axis: one part of one level, or several parts, outermost first, used as one."""

    name: str
    parts: tuple[Part, ...]

    def __hash__(self) -> int:  # a key of caches that are asked often: equality looks at the rest
        return hash((self.name, self.size))

    @cached_property
    def size(self) -> int:
        return math.prod(part.size for part in self.parts)

    @property
    def level(self) -> str:
        """Name of the level, of the outermost one if there are several."""
        return self.parts[0].level.name

    @property
    def link(self) -> Link:
        """The link of the outermost part."""
        return self.parts[0].link


def join_axes(axes: Sequence[Axis], name: str | None = None) -> Axis:
    """The axes, major first, as one; named after them, by commas, unless given a name.

    Adjacent factors of one level become one part again.
    """
    parts: list[Part] = []
    for part in (part for axis in axes for part in axis.parts):
        if parts and parts[-1].level == part.level and parts[-1].stride == part.size * part.stride:
            part = Part(part.level, parts.pop().size * part.size, part.stride)
        parts.append(part)
    return Axis(name or ",".join(axis.name for axis in axes), tuple(parts))


@dataclass(frozen=True)
class Mesh:
    """Named axes, major first. One device: no axes."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.axes):
            raise ClusterError(f"axes of a mesh must have distinct names; they are {self.names}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def axis(self, name: str) -> Axis:
        """The axis `name`, or for `a,b` these axes joined; ClusterError if there is none."""
        wanted = name.split(",")
        for part in wanted:
            if part not in self.names:
                raise ClusterError(f"mesh {self} has no axis {part!r}")
        axes = [self.axes[self.names.index(part)] for part in wanted]
        return axes[0] if len(axes) == 1 else join_axes(axes)

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one device"


def candidate_meshes(cluster: Cluster, max_axes: int = 3, limit: int = 24) -> list[Mesh]:
    """Meshes of `cluster` to search, those of fewest axes first, then by name.

    Each level becomes an axis, or two (`device0` the major, `device1` the minor), in every
    factorization of its size. Torus axes may also be joined (`x_y`: the bandwidth of both), and
    other neighbours if there are more levels than `max_axes`. Levels of size 1 are left out. At
    most `limit` are returned: those with whole levels, then those whose minor factors are small
    powers of two. Device order is the cluster's in all of them.
    """
    if max_axes < 1 or limit < 1:
        raise ClusterError(f"max_axes and limit must be above 0; they are {max_axes} and {limit}")
    whole = [Axis(level.name, (Part(level, level.size),)) for level in cluster.levels]
    whole = [axis for axis in whole if axis.size > 1]
    groupings = [g for g in _groupings(whole) if len(g) <= max_axes]
    # joining a torus loses nothing; joining node and device hides which of the two is the slow one
    natural = [g for g in groupings if all(len(run) == 1 or _is_torus(run) for run in g)]
    found = []
    for grouping in natural or groupings:
        choices = [_choices(run) for run in grouping]
        for pick in product(*choices):
            axes = tuple(axis for option, _ in pick for axis in option)
            if len(axes) <= max_axes:
                found.append((sum(rank for _, rank in pick), Mesh(axes)))
    found.sort(key=lambda item: (item[0], len(item[1].axes), str(item[1])))
    meshes = [mesh for _, mesh in found[:limit]]
    return sorted(meshes, key=lambda mesh: (len(mesh.axes), str(mesh)))


def named_mesh(cluster: Cluster, axes: Sequence[tuple[str, int]]) -> Mesh:
    """The cluster's levels cut, in their order, into axes (name, size) given major first.

    Axes of size 1 are left out. ClusterError unless the sizes multiply to the devices and each
    axis is made of whole levels and a factor of the next.
    """
    sizes = ", ".join(f"{name}={size}" for name, size in axes)
    levels = [(level, level.size) for level in cluster.levels if level.size > 1]
    have = ", ".join(f"{level.name}={level.size}" for level in cluster.levels)
    if math.prod(size for _, size in axes) != cluster.num_devices:
        raise ClusterError(
            f"mesh {sizes} is not of the {cluster.num_devices} devices of {cluster.name} ({have})"
        )
    found = []
    for name, size in reversed(axes):
        parts: list[Part] = []
        left = size
        while left > 1:
            level, rest = levels.pop()
            taken = math.gcd(left, rest)
            if taken not in (left, rest):
                raise ClusterError(
                    f"mesh {sizes}: axis {name!r} takes a part of level {level.name!r} that "
                    f"neither ends nor divides what is left of it; {cluster.name} has {have}"
                )
            parts.insert(0, Part(level, taken, level.size // rest))
            left //= taken
            if taken < rest:
                levels.append((level, rest // taken))
        if parts:
            found.insert(0, Axis(name, tuple(parts)))
    return Mesh(tuple(found))


def _groupings(axes: Sequence[Axis]) -> Iterator[list[list[Axis]]]:
    """Every way to cut the sequence into runs."""
    if not axes:
        yield []
    for i in range(1, len(axes) + 1):
        for rest in _groupings(axes[i:]):
            yield [list(axes[:i]), *rest]


def _is_torus(run: Sequence[Axis]) -> bool:
    return all(axis.link.kind == "torus" for axis in run)


def _choices(run: Sequence[Axis]) -> list[tuple[tuple[Axis, ...], int]]:
    """The ways to use a run of levels, each with a rank: 0 for whole, higher for odder splits."""
    if len(run) > 1:
        return [((join_axes(run, "_".join(axis.name for axis in run)),), 0)]
    (axis,) = run
    level = axis.parts[0].level
    choices: list[tuple[tuple[Axis, ...], int]] = [((axis,), 0)]
    for minor in range(2, level.size // 2 + 1):
        if level.size % minor == 0:
            major = Part(level, level.size // minor, stride=minor)
            split = (
                Axis(f"{level.name}0", (major,)),
                Axis(f"{level.name}1", (Part(level, minor),)),
            )
            power = minor & (minor - 1) == 0
            choices.append((split, minor.bit_length() + (0 if power else 100)))
    return choices


def device_grid(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """`devices` (JAX's, or any with their attributes) as an object array of a mesh's shape.

    Row-major in the order of the cluster's levels: slice, coordinates, core where devices have
    coordinates, else process and id. ClusterError unless there are as many as the mesh has.
    """
    size = math.prod(shape)
    if len(devices) != size:
        raise ClusterError(
            f"a mesh of shape {shape} needs {size} devices, but {len(devices)} are given; "
            "plan for the devices present, or pass devices= of that many"
        )
    grid = np.empty(size, object)
    grid[:] = sorted(devices, key=_location)
    return grid.reshape(shape)


def _location(device: Any) -> tuple[Any, ...]:
    group = getattr(device, "slice_index", None) or 0
    coords = getattr(device, "coords", None)
    if coords is not None:
        return (group, *coords, getattr(device, "core_on_chip", 0))
    return (group, device.process_index, device.id)
