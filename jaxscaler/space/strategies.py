"""Strategies of a node on a mesh: which factor each mesh axis cuts, and the layouts that follow.

A strategy is one row of an int array [strategies, axes]: the node's factor that the axis cuts, or
-1. A layout (cost/reshard.py) is one row of [strategies, axes]: the tensor's dim that the axis
cuts, -1 for whole, or the tensor's rank for a partial sum.
"""

from __future__ import annotations

import itertools

import numpy as np

from jaxscaler.graph.ir import FROZEN, REDUCE, SHIFT
from jaxscaler.space.nodes import PARTIAL, Node, Port

UNUSED = -1


def splittable(node: Node) -> list[int]:
    """Factors that may be cut: longer than 1, not frozen, the major factor wherever they stand."""
    minor = set()
    for port in node.ports:
        for dim in port.dims:
            real = [f for f in dim if node.factors[f].size > 1]
            minor.update(real[1:])
    return [
        f
        for f, factor in enumerate(node.factors)
        if factor.size > 1 and factor.kind != FROZEN and f not in minor
    ]


def strategies(node: Node, sizes: tuple[int, ...]) -> np.ndarray:
    """All strategies of a node on mesh axes of these sizes: [strategies, axes], whole first.

    A factor may be cut by several axes when their product divides it; one that is to be cut
    together is cut by all or none. A paired node has twice the columns: the layout at rest, then
    the layout it is read in, which keeps some of its cuts.
    """
    choices = [UNUSED, *splittable(node)]
    rows = _grid(choices, len(sizes))
    found = rows[_divides(node, rows, sizes)]
    if not node.paired:
        return found
    keep = _grid([False, True], len(sizes))
    kept = np.where(keep[None], found[:, None], UNUSED)
    before = np.broadcast_to(found[:, None], kept.shape)
    once = (keep[None] | (before != UNUSED)).all(axis=2)  # what is not cut is kept in one way
    return np.concatenate((before, kept), axis=2)[once]


def _grid(choices: list, axes: int) -> np.ndarray:
    """[rows, axes]: every way to choose for each axis, the last one fastest."""
    rows = list(itertools.product(choices, repeat=axes))
    return np.array(rows, type(choices[0])).reshape(len(rows), axes)


def _divides(node: Node, rows: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Mask of the rows that cut every factor evenly."""
    good = np.ones(len(rows), bool)
    alike = (rows == rows[:, :1]).all(axis=1)
    for f, factor in enumerate(node.factors):
        used = rows == f
        if factor.together:
            good &= alike | ~used.any(axis=1)
        if factor.kind != PARTIAL:
            good &= factor.size % np.where(used, sizes, 1).prod(axis=1) == 0
    return good


def layouts(node: Node, port: int, rows: np.ndarray) -> np.ndarray:
    """Layout of a port under each strategy: [strategies, axes]."""
    if node.paired:
        half = rows.shape[1] // 2
        rows = rows[:, half:] if port == 1 else rows[:, :half]
    table = _dim_of_factor(node, node.ports[port], _is_result(node, port))
    return table[rows]  # UNUSED = -1 reads the last entry, which is UNUSED


def _is_result(node: Node, port: int) -> bool:
    """Whether a port of an op node is one of its results."""
    return node.what == "op" and port >= len(node.ports) - node.num_results


def _dim_of_factor(node: Node, port: Port, result: bool) -> np.ndarray:
    """Factor -> dim that carries it, -1 where none does, the rank where that makes it partial."""
    table = np.full(len(node.factors) + 1, UNUSED, np.int64)
    for d, dim in enumerate(port.dims):
        for f in dim:
            table[f] = d
    rank = len(port.dims)
    for f, factor in enumerate(node.factors):
        if factor.kind == PARTIAL or (
            result and table[f] == UNUSED and factor.kind == REDUCE and factor.combiner == "sum"
        ):
            table[f] = rank
    return table


def parts(node: Node, rows: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Into how many parts each factor is cut: [strategies, factors]."""
    out = np.ones((len(rows), len(node.factors)), np.int64)
    for a, n in enumerate(sizes):
        used = rows[:, a] != UNUSED
        out[np.flatnonzero(used), rows[used, a]] *= n
    return out


def eager_reductions(node: Node, rows: np.ndarray) -> list[tuple[int, int]]:
    """(axis, factor) columns whose split needs a combine at once: contracted, but not by a sum."""
    return [
        (a, f)
        for a in range(rows.shape[1])
        for f, factor in enumerate(node.factors)
        if factor.kind == REDUCE and factor.combiner != "sum" and (rows[:, a] == f).any()
    ]


def shifts(node: Node, rows: np.ndarray) -> list[tuple[int, int]]:
    """(axis, factor) columns whose split makes devices hand an element to the next."""
    return [
        (a, f)
        for a in range(rows.shape[1])
        for f, factor in enumerate(node.factors)
        if factor.combiner == SHIFT and (rows[:, a] == f).any()
    ]
