"""What it takes to change the layout of a tensor: which collectives, of how many bytes, how long.

A layout of a tensor of rank r on a mesh of k axes is k integers, one per axis: -1, the axis is not
used and its devices hold the same; d in 0..r-1, it cuts dim d; r, each of its devices holds a
summand (a partial sum). Axes that cut the same dim are ordered as in the mesh, major first.

One walk serves all pairs of layouts at once, fewest bytes first:

1. slice: unused -> dim, free;
2. reduce_scatter: summand -> dim, the axes of one dim together;
3. all_to_all: dim -> other dim, the axes that go the same way together; after 6 if it comes to a
   dim that a gathered axis leaves;
4. collective_permute, at most once, where the blocks of a dim must change owners: an axis comes or
   goes outside one that stays, one comes by slice as another goes, or axes come in the wrong order;
   over the most major axis concerned. Where the size of the one that comes is a multiple of that
   of the one that goes, this is all that it takes;
5. all_reduce: summand -> unused, all axes together;
6. all_gather: dim -> unused, the axes of one dim together. XLA also gathers, and slices again,
   where axes of one dim part (to different dims, or one to a dim and one to unused), and where axes
   of different dims would meet on a third.

This is what XLA's partitioner does with most changes, and a test says with how many. Nothing makes
summands: unused or dim -> summand is impossible (inf). Shards are taken as equal: bytes are divided
by the sizes of the axes that cut, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxscaler.cluster import Axis, Mesh, join_axes
from jaxscaler.cost.collective import collective_time
from jaxscaler.errors import JaxscalerError

_KINDS = ("reduce_scatter", "all_to_all", "collective_permute", "all_reduce", "all_gather")


class _Step(NamedTuple):
    """A step of the walk; `axes` and `cut` are [m, n] bit sets of mesh axes, bit i for axis i.

    `axes` take part (none: no such step for that pair). `cut` divide the tensor's bytes to those
    that `collective_time` wants for the kind.
    """

    kind: str
    axes: np.ndarray
    cut: np.ndarray


def _walk(rank: int, sizes: Sequence[int], src: np.ndarray, dst: np.ndarray) -> Iterator[_Step]:
    """The steps from each of `src` [m, k] to each of `dst` [n, k], in order of execution."""
    k = len(sizes)
    a = [src[:, None, i] for i in range(k)]
    b = [dst[None, :, i] for i in range(k)]
    none = np.zeros((len(src), len(dst)), np.int64)
    on_dim = [(a[i] >= 0) & (a[i] < rank) for i in range(k)]
    to_dim = [(b[i] >= 0) & (b[i] < rank) for i in range(k)]
    slices = [(a[i] == -1) & to_dim[i] for i in range(k)]
    scatters = [(a[i] == rank) & to_dim[i] for i in range(k)]
    goes = [on_dim[i] & (a[i] != b[i]) for i in range(k)]

    def others(condition: Callable[[int, int], np.ndarray], i: int) -> np.ndarray:
        return np.any([none, *(none | condition(i, j) for j in range(k) if j != i)], axis=0)

    # i goes as j, a multiple of its size, comes: the permute of 4 does both
    swapped = [
        goes[i] & others(lambda i, j: slices[j] & (b[j] == a[i]) & (sizes[j] % sizes[i] == 0), i)
        for i in range(k)
    ]
    moves = [goes[i] & to_dim[i] & ~swapped[i] for i in range(k)]
    gathers = [goes[i] & (b[i] == -1) & ~swapped[i] for i in range(k)]
    parts = [
        moves[i]
        & others(
            lambda i, j: (
                goes[j] & ((a[i] == a[j]) & (b[i] != b[j]))
                | moves[j] & (a[i] != a[j]) & (b[i] == b[j])
            ),
            i,
        )
        for i in range(k)
    ]
    moves = [moves[i] & ~parts[i] for i in range(k)]
    gathers = [gathers[i] | parts[i] for i in range(k)]
    late = [moves[i] & others(lambda i, j: gathers[j] & (a[j] == b[i]), i) for i in range(k)]

    def bits(conditions: Sequence[np.ndarray]) -> np.ndarray:
        return sum((c.astype(np.int64) << i for i, c in enumerate(conditions)), none)

    def together(
        kind: str, moving: Sequence[np.ndarray], ways: Sequence[np.ndarray], cut: np.ndarray
    ) -> Iterator[_Step]:
        """A step per way that axes move; `cut` is kept up to date."""
        for i in range(k):
            same = bits([moving[i] & moving[j] & (ways[i] == ways[j]) for j in range(k)])
            axes = np.where(same & ((1 << i) - 1), 0, same)  # once, at the first of them
            if kind == "all_gather":
                cut &= ~axes
            yield _Step(kind, axes, cut.copy())
            if kind == "reduce_scatter":
                cut |= axes

    ways = [a[i] * (rank + 2) + b[i] for i in range(k)]
    cut = bits([on_dim[i] | slices[i] for i in range(k)])
    yield from together("reduce_scatter", scatters, b, cut)
    early = [moves[i] & ~late[i] for i in range(k)]
    yield from together("all_to_all", early, ways, cut)
    cut &= ~bits([swapped[i] & (b[i] == -1) for i in range(k)])
    yield _Step("collective_permute", none | _misplaced(a, b, on_dim, slices, moves), cut.copy())
    yield _Step("all_reduce", bits([(a[i] == rank) & (b[i] == -1) for i in range(k)]), cut.copy())
    yield from together("all_gather", gathers, a, cut)
    yield from together("all_to_all", late, ways, cut)


def _misplaced(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    on_dim: Sequence[np.ndarray],
    slices: Sequence[np.ndarray],
    moves: Sequence[np.ndarray],
) -> np.ndarray:
    """The most major axis (as a bit) on a dim whose blocks must change owners, or 0."""

    def wrong(i: int, j: int) -> np.ndarray:
        comes, stays = a[j] != b[j], a[i] == b[i]
        # i was on the dim, j will be: j comes outside an i that stays, or i goes from outside a j
        # that stays, or as j comes before it has gone
        swap = moves[i] & moves[j] & (a[j] == b[i])
        outside = np.where(stays, comes & (j < i), np.where(comes, slices[j] | swap, i < j))
        # both come, the minor first
        return (on_dim[i] & (a[i] == b[j]) & outside) | (
            slices[i] & moves[j] & (b[i] == b[j]) & (j < i)
        )

    axis = np.zeros((), np.int64)
    for major in reversed(range(len(a))):
        for minor in range(major + 1, len(a)):
            axis = np.where(wrong(major, minor) | wrong(minor, major), 1 << major, axis)
    return axis


class _Program(NamedTuple):
    """The walk of all pairs, packed: each distinct collective once.

    `collectives`: (kind, axes, cuts [c]), numbered from 1 in this order; `slots` [s, m, n]: the
    numbers of those that a pair needs, 0 for nothing; `impossible` [m, n].
    """

    collectives: tuple[tuple[str, int, np.ndarray], ...]
    slots: np.ndarray
    impossible: np.ndarray


@lru_cache(maxsize=4096)
def _program(rank: int, sizes: tuple[int, ...], src: bytes, dst: bytes) -> _Program:
    """Bytes and links play no part in the walk, so all tensors of a rank share it."""
    k = len(sizes)
    source, target = (np.frombuffer(x, np.int64).reshape(-1, k) for x in (src, dst))
    codes = [
        np.where(axes, 1 + ((_KINDS.index(kind) << k | axes) << k | cut), 0)
        for kind, axes, cut in _walk(rank, sizes, source, target)
    ]
    packed = np.sort(np.stack(codes), axis=0)[::-1]  # few pairs need more than one or two
    packed = packed[packed.any(axis=(1, 2))]
    used = np.unique(packed)
    used = used[used > 0]
    heads = (used - 1) >> k
    collectives = tuple(
        (_KINDS[head >> k], int(head & ((1 << k) - 1)), (used[heads == head] - 1) & ((1 << k) - 1))
        for head in np.unique(heads)
    )
    slots = np.where(packed, 1 + np.searchsorted(used, packed), 0).astype(np.int32)
    impossible = ((target[None] == rank) & (source[:, None] != rank)).any(-1)
    return _Program(collectives, slots, impossible)


@lru_cache(maxsize=1024)
def _group(mesh: Mesh, axes: int) -> Axis:
    """The mesh axes of a bit set, as one."""
    chosen = [axis for i, axis in enumerate(mesh.axes) if axes >> i & 1]
    return chosen[0] if len(chosen) == 1 else join_axes(chosen)


@lru_cache(maxsize=256)
def _parts(mesh: Mesh) -> np.ndarray:
    """[2**k]: into how many parts each bit set of axes cuts a tensor."""
    sizes = np.ones(1)
    for size in mesh.shape:
        sizes = np.concatenate([sizes, sizes * size])
    return sizes


@lru_cache(maxsize=4096)
def _prices(mesh: Mesh, kind: str, axes: int, nbytes: float) -> np.ndarray:
    """[2**k]: seconds of a collective over a set of axes, by the set that cuts the tensor."""
    return collective_time(kind, _group(mesh, axes), nbytes / _parts(mesh))


def _layouts(mesh: Mesh, shape: Sequence[int], layouts: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray(layouts, np.int64)
    k, rank = len(mesh.axes), len(shape)
    if (
        rows.ndim != 2
        or rows.shape[1] != k
        or (rows.size and not -1 <= rows.min() <= rows.max() <= rank)
    ):
        raise JaxscalerError(
            f"layouts of a tensor of shape {tuple(shape)} on mesh {mesh} must be an array [m, {k}] "
            f"of -1..{rank}; given: shape {rows.shape}, values {np.unique(rows).tolist()}"
        )
    return rows


def reshard_time(
    mesh: Mesh, shape: Sequence[int], nbytes: float, src: np.ndarray, dst: np.ndarray
) -> np.ndarray:
    """Seconds [m, n] to bring a tensor from each layout of `src` [m, k] to each of `dst` [n, k].

    `shape` is that of the whole tensor and `nbytes` its bytes. inf where there is no way (see the
    module's text). Equals the sum of `collective_time` over `reshard_collectives`.
    """
    src, dst = _layouts(mesh, shape, src), _layouts(mesh, shape, dst)
    if not (mesh.axes and len(src) and len(dst)):
        return np.zeros((len(src), len(dst)))
    program = _program(len(shape), mesh.shape, src.tobytes(), dst.tobytes())
    prices = [np.zeros(1)]
    for kind, axes, cuts in program.collectives:
        prices.append(_prices(mesh, kind, axes, nbytes)[cuts])
    seconds = np.concatenate(prices)[program.slots].sum(axis=0)
    seconds[program.impossible] = np.inf
    return seconds


def reshard_collectives(
    mesh: Mesh, shape: Sequence[int], nbytes: float, src: Sequence[int], dst: Sequence[int]
) -> tuple[tuple[str, str, float], ...]:
    """The collectives, in order, that bring a tensor from layout `src` [k] to `dst` [k].

    Each is (kind, axis, bytes): arguments of `collective_time`, with `mesh.axis(axis)`; several
    axes in one collective are named with commas between. JaxscalerError if there is no way.
    """
    return _collectives(mesh, tuple(shape), nbytes, tuple(map(int, src)), tuple(map(int, dst)))


@lru_cache(maxsize=4096)
def _collectives(
    mesh: Mesh, shape: tuple[int, ...], nbytes: float, src: tuple[int, ...], dst: tuple[int, ...]
) -> tuple[tuple[str, str, float], ...]:
    source, target = _layouts(mesh, shape, np.array([src])), _layouts(mesh, shape, np.array([dst]))
    if ((target == len(shape)) & (source != len(shape))).any():
        raise JaxscalerError(
            f"no collective turns layout {tuple(src)} into {tuple(dst)} on mesh {mesh}: the latter "
            "wants summands that the former does not have"
        )
    return tuple(
        (kind, _group(mesh, axes).name, float(nbytes / _parts(mesh)[cut]))
        for kind, axes, cut in _way(len(shape), mesh.shape, src, dst)
    )


@lru_cache(maxsize=4096)
def _way(
    rank: int, sizes: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]
) -> tuple[tuple[str, int, int], ...]:
    """The walk of one pair: (kind, axes, cut) of its collectives."""
    source, target = np.array([src], np.int64), np.array([dst], np.int64)
    return tuple(
        (kind, int(axes[0, 0]), int(cut[0, 0]))
        for kind, axes, cut in _walk(rank, sizes, source, target)
        if axes[0, 0]
    )


def local_bytes(mesh: Mesh, shape: Sequence[int], nbytes: float, layouts: np.ndarray) -> np.ndarray:
    """Bytes [m] that one device holds of a tensor in each of `layouts` [m, k].

    Summands count whole.
    """
    rows = _layouts(mesh, shape, layouts)
    cuts = (rows >= 0) & (rows < len(shape))
    return nbytes / np.where(cuts, np.array(mesh.shape, float), 1.0).prod(axis=1)
