"""Dominated strategies: another of the node can always replace them at no more cost or memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import FORBIDDEN, Kernel, adjacency
from jaxscaler.solve.problem import INFINITY

SLICE, SLICES = 10**8, 10  # comparisons between two looks at the clock; slices per call


def dominated(kernel: Kernel, late: Callable[[], bool] = lambda: False) -> np.ndarray:
    """instead [S]: each strategy's replacement among those that stay; itself if it stays.

    t replaces s when usage(t) <= usage(s) in every entry and
    cost(t) - cost(s) + Σ over edges of max over the partner's strategies j of (c(t, j) - c(s, j))
    is at most 0. One strategy is removed at a time, so that chains of replacements are sound.
    Nodes that the slices do not reach, or that come when it is late, are only not reduced.
    """
    ptr, edge, side = adjacency(kernel.edge_nodes, kernel.num_nodes)
    order = np.argsort(kernel.use_node, kind="stable")
    counts = np.bincount(kernel.use_node, minlength=kernel.num_nodes)
    entry_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    alive = np.ones(len(kernel.costs), bool)
    instead = np.arange(len(kernel.costs))
    node = 0
    for _ in range(SLICES):
        if node == kernel.num_nodes or late():
            break
        node = _sweep(
            node, kernel.node_ptr, kernel.costs, kernel.edge_nodes, kernel.edge_ptr,
            kernel.edge_costs, ptr, edge, side, entry_ptr, order, kernel.use_ptr, kernel.usages,
            alive, instead, SLICE,
        )  # fmt: skip
    return instead


@njit(cache=True)
def _sweep(
    begin, node_ptr, costs, nodes, edge_ptr, tables, adj_ptr, adj_edge, adj_side,
    entry_ptr, entries, use_ptr, usages, alive, instead, work,
):  # fmt: skip
    """Treat the nodes from `begin` on until the work is done; returns the first one left."""
    for i in range(begin, len(node_ptr) - 1):
        if work < 0:
            return i
        k = node_ptr[i + 1] - node_ptr[i]
        if k == 1:
            continue
        # one row per strategy of i: its costs with every living partner, edge after edge
        degree = adj_ptr[i + 1] - adj_ptr[i]
        start = np.zeros(degree + 1, np.int64)
        for d in range(degree):
            other = nodes[adj_edge[adj_ptr[i] + d], 1 - adj_side[adj_ptr[i] + d]]
            living = 0
            for t in range(node_ptr[other], node_ptr[other + 1]):
                living += alive[t]
            start[d + 1] = start[d] + living
        own = costs[node_ptr[i] : node_ptr[i + 1]].copy()
        row = np.empty((k, start[degree]), np.int64)
        least_at = np.empty((k, degree), np.int64)
        work -= row.size
        for d in range(degree):
            e, side = adj_edge[adj_ptr[i] + d], adj_side[adj_ptr[i] + d]
            other = nodes[e, 1 - side]
            size = node_ptr[other + 1] - node_ptr[other]
            for a in range(k):
                to, best = start[d], start[d]
                for b in range(size):
                    if alive[node_ptr[other] + b]:
                        at = a * size + b if side == 0 else b * k + a
                        row[a, to] = tables[edge_ptr[e] + at]
                        if row[a, to] < row[a, best]:
                            best = to
                        to += 1
                least_at[a, d] = best
                least = row[a, best]
                if least >= FORBIDDEN:
                    own[a] = INFINITY
                elif least != 0:
                    own[a] = min(own[a] + least, INFINITY)
                    for q in range(start[d], start[d + 1]):
                        if row[a, q] < FORBIDDEN:
                            row[a, q] -= least
        first, last = entry_ptr[i], entry_ptr[i + 1]
        order = np.argsort(own, kind="mergesort")
        gone = np.zeros(k, np.bool_)
        for s in order:
            for t in order:
                if gone[s] or own[t] > own[s] or own[s] >= FORBIDDEN or work < 0:
                    break
                if t != s and not gone[t]:
                    work -= start[degree] // 8 + last - first + degree
                    gone[s] = _replaces(
                        t, s, own, row, start, least_at, first, last, entries, use_ptr, usages
                    )
                    if gone[s]:
                        instead[node_ptr[i] + s] = node_ptr[i] + t
        for a in range(k):
            if gone[a]:
                alive[node_ptr[i] + a] = False
                at = node_ptr[i] + a
                while instead[instead[at]] != instead[at]:  # its replacement went later
                    instead[at] = instead[instead[at]]
    return len(node_ptr) - 1


@njit(cache=True)
def _replaces(t, s, own, row, start, least_at, first, last, entries, use_ptr, usages):
    slack = own[s] - own[t]
    for q in range(first, last):
        at = use_ptr[entries[q]]
        if usages[at + t] > usages[at + s]:
            return False
    degree = len(start) - 1
    quick = slack  # each edge's maximum is at least its value where s is cheapest, itself >= 0
    for d in range(degree):
        quick -= row[t, least_at[s, d]]
        if quick < 0:
            return False
    for d in range(degree):
        worst = 0
        for j in range(start[d], start[d + 1]):
            if row[s, j] < FORBIDDEN:
                worst = max(worst, row[t, j] - row[s, j])
        slack -= worst
        if slack < 0:
            return False
    return True
