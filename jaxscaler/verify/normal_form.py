"""The normal form in which collectives of a plan, of Shardy's audit and of compiled HLO compare.

Partitioners and compilers write the same communication in different ways: an all-reduce of which
every device keeps a slice is a reduce-scatter; all-reduces that meet in an addition are one
all-reduce of the sum; a tensor that is gathered twice is gathered once; gathering a constant costs
nothing. `normal_form` applies these rules to a small graph of `Node`s, whoever made it, and returns
the collectives that remain. No MLIR and no HLO here: `audit.py` and `hlo.py` read those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from jaxscaler.errors import PlanError

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
ALL_TO_ALL, COLLECTIVE_PERMUTE = "all_to_all", "collective_permute"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE)

# The other ops that a rule looks at; whatever else a node is called, it only uses its inputs.
ALL_SLICE, ADD, CONSTANT, BROADCAST = "all_slice", "add", "constant", "broadcast_in_dim"
LINEAR = ("transpose", "reshape", "convert", "copy", "negate")  # a sum passes through

_OF_CONSTANT = frozenset((*LINEAR, BROADCAST, ALL_SLICE, *COLLECTIVES)) - {
    ALL_REDUCE,
    REDUCE_SCATTER,
}


@dataclass(frozen=True)
class Collective:
    """One collective of a step, as one device sees it.

    `bytes` is the size of the full buffer on one device: what an all-gather returns, a
    reduce-scatter takes, an all-reduce, all-to-all or collective-permute takes and returns.
    `count` is how often it runs per step; every branch of a conditional counts.
    `axes` are mesh axes in the mesh's order; part of an axis is written `name:(before)size`.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    dtype: str
    count: int = 1
    scope: str = ""  # the op's path in JAX's name stack
    source: str = ""  # file:line (function)


class Node(NamedTuple):
    """One value of a partitioned step; its place in the list is its name, inputs come first."""

    op: str
    inputs: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()  # of a collective or all_slice; () on an all_slice: not known
    bytes: int = 0  # as in `Collective`
    dtype: str = ""
    parts: int = 1  # devices of a group; into how many an all_slice cuts
    times: int = 1  # runs per step
    loop: int = 0  # which loop's body it stands in; 0 is none
    combiner: str = "sum"  # of an all_reduce or reduce_scatter
    params: str = ""  # in what else two equal collectives agree (dims, pairs)
    scope: str = ""
    source: str = ""


def normal_form(nodes: Sequence[Node], merge: bool = True) -> tuple[Collective, ...]:
    """The collectives of `nodes`, in order, under these rules (`merge` False: the last two only,
    for what comes from a compiler that merges by itself):

    - equal collectives (kind, operand, axes, dims) in one loop body are one;
    - all-reduces over the same axes whose values, but for casts, are only used in one sum are one
      all-reduce of that sum; the same for reduce-scatters (behind a transpose compilers miss it);
    - what moves a broadcast constant, or goes over no axis, is free;
    - an all-reduce of which only slices over all its axes are used, through transposes, reshapes
      and casts, is a reduce-scatter.
    """
    alias = _merge_equal(nodes, merge)
    sums = _sums(nodes, alias, merge)
    kept = []
    for i, node in enumerate(nodes):
        if alias[i] != i or node.op not in COLLECTIVES or not node.axes:
            continue
        if not _sums_up(node):
            kept.append(_collective(node, node.op))
        elif i in sums:
            kind, members = sums[i]
            kept.append(_collective(max((nodes[j] for j in members), key=lambda n: n.bytes), kind))
    return tuple(kept)


def as_written(nodes: Sequence[Node]) -> tuple[Collective, ...]:
    """Every collective of `nodes`, no rule applied."""
    return tuple(_collective(n, n.op) for n in nodes if n.op in COLLECTIVES)


def totals(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, axes) -> (runs per step, bytes per step)."""
    found: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in collectives:
        count, size = found.get((c.kind, c.axes), (0, 0))
        found[c.kind, c.axes] = (count + c.count, size + c.count * c.bytes)
    return found


def _collective(node: Node, kind: str) -> Collective:
    return Collective(kind, node.axes, node.bytes, node.dtype, node.times, node.scope, node.source)


_FREE = -1  # alias of a value that is a broadcast constant


def _merge_equal(nodes: Sequence[Node], merge: bool) -> list[int]:
    """For each node the first node it equals, or `_FREE`."""
    alias: list[int] = []
    seen: dict[tuple, int] = {}
    for i, node in enumerate(nodes):
        inputs = tuple(alias[j] for j in node.inputs)
        if node.op == CONSTANT or (
            node.op in _OF_CONSTANT and inputs and all(j == _FREE for j in inputs)
        ):
            alias.append(_FREE)
        elif merge and node.op in COLLECTIVES:
            key = (node.op, inputs, node.axes, node.params, node.combiner, node.loop)
            alias.append(seen.setdefault(key, i))
        else:
            alias.append(i)
    return alias


def _users(nodes: Sequence[Node], alias: list[int]) -> list[set[int]]:
    users: list[set[int]] = [set() for _ in nodes]
    for i, node in enumerate(nodes):
        if alias[i] == i:
            for j in node.inputs:
                if alias[j] != _FREE:
                    users[alias[j]].add(i)
    return users


def _sums(nodes: Sequence[Node], alias: list[int], merge: bool) -> dict[int, tuple[str, list[int]]]:
    """The sums that all-reduces and reduce-scatters make: first member -> (kind, members)."""
    users = _users(nodes, alias)
    parent: dict[int, int] = {}  # a union-find forest of the all-reduces and reduce-scatters

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    sum_of: dict[int, int] = {}  # node -> a member of the sum that it is, but for layout and dtype
    alone: dict[int, bool] = {}  # only used as an addend, and a member but for additions and casts
    for i, node in enumerate(nodes):
        if alias[i] != i:
            continue
        inputs = [alias[j] for j in node.inputs]
        if _sums_up(node):
            parent[i] = sum_of[i] = i
            alone[i] = len(users[i]) == 1
            continue
        if node.op not in (*LINEAR, ADD) or not inputs or any(j not in sum_of for j in inputs):
            continue
        alike = {_what_adds(nodes[sum_of[j]]) for j in inputs}
        if len(alike) > 1 or nodes[sum_of[inputs[0]]].loop != node.loop:
            continue
        if node.op in LINEAR or (merge and all(alone[j] for j in inputs)):
            first, *others = sorted({root(sum_of[j]) for j in inputs})
            parent.update((other, first) for other in others)
            sum_of[i] = first
            plain = node.op in (ADD, "convert") and all(alone[j] for j in inputs)
            alone[i] = plain and len(users[i]) == 1

    members: dict[int, list[int]] = {}
    for i in parent:
        members.setdefault(root(i), []).append(i)
    ends: dict[int, list[Node]] = {first: [] for first in members}
    for i, member in sum_of.items():
        ends[root(member)] += [nodes[u] for u in users[i] if u in parent or u not in sum_of]
    return {
        first: (REDUCE_SCATTER if _is_scattered(nodes[first], ends[first]) else ALL_REDUCE, group)
        for first, group in members.items()
    }


def _sums_up(node: Node) -> bool:
    return node.op in (ALL_REDUCE, REDUCE_SCATTER) and node.combiner == "sum"


def _what_adds(node: Node) -> tuple:
    return (node.op, node.axes, node.loop)


def _is_scattered(reduce: Node, ends: list[Node]) -> bool:
    """Whether every device keeps only its slice of what `reduce` sums up."""
    return reduce.op == REDUCE_SCATTER or (
        bool(ends)
        and all(
            end.op == ALL_SLICE
            and end.loop == reduce.loop
            and (set(reduce.axes) <= set(end.axes) if end.axes else end.parts % reduce.parts == 0)
            for end in ends
        )
    )


# --- dtypes -----------------------------------------------------------------------------------

_DTYPES = {  # what MLIR and HLO call it -> (what NumPy calls it, bits)
    "i1": ("bool", 8),
    "pred": ("bool", 8),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
    "complex<f32>": ("complex64", 64),
    "complex<f64>": ("complex128", 128),
    "bf16": ("bfloat16", 16),
}
_NUMBER = re.compile(r"(f|i|s|u|ui)(\d+)(e\w+)?", re.IGNORECASE)
_WORDS = {"f": "float", "i": "int", "s": "int", "u": "uint", "ui": "uint"}


def element(name: str) -> tuple[str, int]:
    """(NumPy's name, bits) of an element type as MLIR (`ui32`) or HLO (`u32`) writes it."""
    name = name.lower()
    number = _NUMBER.fullmatch(name)
    if name in _DTYPES or number is None:
        return _DTYPES.get(name, (name, 0))  # tokens and the like have no size
    word, bits, format_ = number.groups()
    return f"{_WORDS[word]}{bits}{'_' + format_ if format_ else ''}", int(bits)


# --- mesh axes of device groups ---------------------------------------------------------------


def group_axes(group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `mesh` (name -> size, major first) over which `group`, one of several alike,
    reaches; devices are numbered row by row over the mesh. A group of one reaches over none.

    Raises PlanError when the group is not the product of (parts of) axes.
    """
    cells = _cells(mesh)
    moved = {c for c, (_, stride, n) in enumerate(cells) if _varies(group, stride, n)}
    if prod(cells[c][2] for c in moved) != len(group):
        raise PlanError(
            f"a collective over the device group {list(group)} does not run along axes of the "
            f"mesh {dict(mesh)}: read it with the mesh that the step was compiled for"
        )
    names = []
    for axis, full in mesh.items():
        before, run, at = 1, 1, 0  # size of the axis so far, of the moved part, before that part
        for c, n in [(c, n) for c, (name, _, n) in enumerate(cells) if name == axis] + [(-1, 1)]:
            if c in moved:
                run, at = run * n, at or before
            elif run > 1:
                names.append(axis if run == full else f"{axis}:({at}){run}")
                run, at = 1, 0
            before *= n
    return tuple(names)


def pair_axes(pairs: Iterable[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `mesh` along which the (source, target) pairs of a permute move data."""
    pairs = list(pairs)
    moved = (name for name, at, n in _cells(mesh) if any(_varies(p, at, n) for p in pairs))
    return tuple(dict.fromkeys(moved))


def _cells(mesh: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The mesh cut into prime parts: (axis, stride in devices, size), major first."""
    cells, stride = [], prod(mesh.values())
    for name, size in mesh.items():
        p = 2
        while size > 1:
            if size % p:
                p += 1
                continue
            size //= p
            stride //= p
            cells.append((name, stride, p))
    return cells


def _varies(group: Sequence[int], stride: int, size: int) -> bool:
    return len({d // stride % size for d in group}) > 1
