"""Kernels of clusters: which elementwise ops run as one, and what they stream.

The compiler fuses elementwise ops that hand each other values. It does not fuse across a kernel of
another sort: a value that lies in memory anyway, and is read after such a kernel, is read anew. So
a cluster (ops that are split alike) may be several kernels, and what it takes does not depend on
how large clusters are, or on which layers are folded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxscaler.graph.fold import Folded, runs_again
from jaxscaler.graph.ir import OpGraph
from jaxscaler.space.nodes import Space


class Fused(NamedTuple):
    """The kernels of a cluster's ops, and how many values of each class they stream.

    streams: (port, value class) -> values, each as often as kernels read or make it.
    """

    number: int
    streams: Mapping[tuple[int, int], int]


def kernels(graph: OpGraph, folded: Folded, space: Space, buffered: np.ndarray) -> dict[int, Fused]:
    """Node -> its kernels, of every cluster. buffered: [values], what lies in memory."""
    nodes = [space.node_of.get(c, -1) for c in range(folded.num_classes)]
    is_cluster = np.array([*(node.what == "cluster" for node in space.nodes), False])
    of = np.array(nodes, np.int64)[folded.op_class]
    inside = is_cluster[of]
    reads = graph.reads[inside[graph.reads[:, 0]]]
    kernel = _pieces(len(graph.ops), *_joined(graph, folded, of, reads, buffered))
    stored = np.zeros(len(graph.ops), bool)
    stored[graph.makers[buffered & (graph.makers[:, 0] >= 0), 0]] = True
    counts = Counter(np.unique(np.stack((of, kernel))[:, inside & stored], axis=1)[0].tolist())
    streams: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    seen: set[tuple[int, int]] = set()
    op_class, value_class = folded.op_class.tolist(), folded.value_class.tolist()

    def note(op: int, v: int, port: int) -> None:
        if buffered[v] and (int(kernel[op]), v) not in seen:
            seen.add((int(kernel[op]), v))
            streams[int(of[op])][port, value_class[v]] += 1

    for op in np.flatnonzero(inside).tolist():
        for v in graph.ops[op].outputs:
            if v >= 0:
                note(op, v, space.made[value_class[v]][1])
    for op, slot, v in reads.tolist():
        note(op, v, space.read[op_class[op], slot][1])
    return {node: Fused(counts[node], streams[node]) for node in set(of[inside].tolist())}


def _joined(
    graph: OpGraph, folded: Folded, of: np.ndarray, reads: np.ndarray, buffered: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of ops of a cluster that are one kernel: what hands on values, or makes something again
    of one value that was kept."""
    again = np.array([runs_again(op) for op in graph.ops], bool)
    reader, _, value = reads.T
    maker = graph.makers[value, 0]
    place = np.stack((of, folded.block, again))
    near = (maker >= 0) & (place[:, maker] == place[:, reader]).all(axis=0)
    level = _levels(graph)
    least = np.full(len(graph.values), len(graph.ops))
    np.minimum.at(least, graph.reads[:, 2], level[graph.reads[:, 0]])
    anew = (level[reader] > level[maker]) & (buffered[value] | (least[value] < level[reader]))
    handed = near & ~anew
    beside = (maker >= 0) & ~near & again[reader] & ~again[maker]
    same = np.stack((value, of[reader], folded.block[reader]))[:, beside]
    _, first, where = np.unique(same, axis=1, return_index=True, return_inverse=True)
    siblings = reader[beside]
    a = np.concatenate((reader[handed], siblings))
    return a, np.concatenate((maker[handed], siblings[first[where.ravel()]]))


def _levels(graph: OpGraph) -> np.ndarray:
    """[ops]: how many kernels that are not fused come before an op, one after another, at most."""
    heavy = [not graph.kinds[op.kind].traits & {"fusable", "marker"} for op in graph.ops]
    maker = graph.makers[:, 0].tolist()
    level = [0] * len(graph.ops)
    for op, _, v in graph.reads.tolist():
        m = maker[v]
        if 0 <= m < op:
            level[op] = max(level[op], level[m] + heavy[m])
    return np.array(level, np.int64)


def _pieces(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The connected piece of each of `count` things, by its least one, where a[i] touches b[i]."""
    piece = np.arange(count)
    while True:
        least = np.minimum(piece[a], piece[b])
        joined = piece.copy()
        np.minimum.at(joined, piece[a], least)
        np.minimum.at(joined, piece[b], least)
        joined = joined[joined]
        if (joined == piece).all():
            return piece
        piece = joined
