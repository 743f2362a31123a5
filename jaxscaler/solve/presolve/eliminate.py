"""Nodes without memory and with at most two neighbours: minimised out, exactly.

What is left of node v between i and j is the edge c'(a, b) = min over s of
c_iv(a, s) + cost_v(s) + c_vj(s, b): one step of bucket elimination (Dechter 1999).
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import UNCHANGED, Kernel, Way, take_groups
from jaxscaler.solve.problem import INFINITY

LARGEST_TABLE = 10**6
_MOST_WORK = 2 * 10**9  # additions per call
_MOST_GROWTH = 10**7  # entries that the tables may gain per call


def eliminate(kernel: Kernel) -> tuple[Kernel, Way]:
    """The kernel without those nodes (cheapest first), and how to choose for them afterwards."""
    n, sizes = kernel.num_nodes, kernel.sizes
    free = np.ones(n, bool)
    free[kernel.use_node] = False
    degree = np.bincount(kernel.edge_nodes.ravel(), minlength=n)
    if not (free & (degree <= 2)).any():
        return kernel, UNCHANGED
    tables: list[dict[int, np.ndarray]] = [{} for _ in range(n)]  # tables[i][j]: shape [k_i, k_j]
    for e, (i, j) in enumerate(kernel.edge_nodes.tolist()):
        table = kernel.edge_costs[kernel.edge_ptr[e] : kernel.edge_ptr[e + 1]]
        table = table.reshape(sizes[i], sizes[j])
        if j in tables[i]:
            table = np.minimum(table + tables[i][j], INFINITY)
        tables[i][j], tables[j][i] = table, table.T
    own = [kernel.costs[a:b] for a, b in zip(kernel.node_ptr[:-1], kernel.node_ptr[1:])]
    offset = kernel.offset
    gone: list[tuple[int, np.ndarray, list[tuple[int, np.ndarray]]]] = []

    def price(v: int) -> int | None:
        """Work to eliminate v; None: not allowed."""
        around = [int(sizes[w]) for w in tables[v]]
        if len(around) > 2 or (len(around) == 2 and around[0] * around[1] > LARGEST_TABLE):
            return None
        return int(np.prod(around, dtype=np.int64)) * int(sizes[v])

    heap = [(cost, v) for v in np.flatnonzero(free).tolist() if (cost := price(v)) is not None]
    heapq.heapify(heap)
    done = np.zeros(n, bool)
    work, growth = _MOST_WORK, _MOST_GROWTH
    while heap:
        cost, v = heapq.heappop(heap)
        if done[v]:
            continue
        if cost > work or growth < 0:  # the cheapest goes first, so the others are no better
            break
        now = price(v)
        if now != cost:  # the neighbourhood has changed since
            if now is not None:
                heapq.heappush(heap, (now, v))
            continue
        done[v] = True
        work -= cost
        around = sorted(tables[v].items())
        gone.append((v, own[v], around))
        for w, _ in around:
            del tables[w][v]
        if not around:
            offset += int(own[v].min())
        elif len(around) == 1:
            w, table = around[0]
            least = np.minimum(table + own[v][:, None], INFINITY).min(axis=0)
            own[w] = np.minimum(own[w] + least, INFINITY)
        else:
            (i, to_i), (j, to_j) = around
            table = _min_plus(np.ascontiguousarray(to_i.T), own[v], np.ascontiguousarray(to_j))
            growth -= table.size - to_i.size - to_j.size
            if j in tables[i]:
                growth += table.size
                table = np.minimum(table + tables[i][j], INFINITY)
            tables[i][j], tables[j][i] = table, table.T
        for w, _ in around:
            if free[w] and (again := price(w)) is not None:
                heapq.heappush(heap, (again, w))
    if not gone:
        return kernel, UNCHANGED
    return _rebuild(kernel, done, own, tables, offset), _back(done, gone)


def _rebuild(
    kernel: Kernel,
    done: np.ndarray,
    own: list[np.ndarray],
    tables: list[dict[int, np.ndarray]],
    offset: int,
) -> Kernel:
    left = np.flatnonzero(~done)
    name = np.cumsum(~done) - 1
    edges = [(i, j, table) for i in left.tolist() for j, table in tables[i].items() if i < j]
    flat = [table.ravel() for _, _, table in edges]
    empty = [np.zeros(0, np.int64)]
    node_ptr, _ = take_groups(kernel.node_ptr, kernel.costs, left)
    return replace(
        kernel,
        node_ptr=node_ptr,
        costs=np.concatenate([own[i] for i in left.tolist()] or empty),
        edge_nodes=name[np.array([(i, j) for i, j, _ in edges], np.int64).reshape(-1, 2)],
        edge_ptr=np.cumsum([0, *(table.size for table in flat)], dtype=np.int64),
        edge_costs=np.concatenate(flat or empty),
        use_node=name[kernel.use_node],
        offset=offset,
    )


def _back(done: np.ndarray, gone: list) -> Way:
    def lift(choice: np.ndarray) -> np.ndarray:
        full = np.zeros(len(done), np.int64)
        full[~done] = choice
        for v, own, around in reversed(gone):
            total = own
            for w, table in around:
                total = np.minimum(total + table[:, full[w]], INFINITY)
            full[v] = int(np.argmin(total))
        return full

    return Way(lift, lambda choice: choice[~done])


@njit(cache=True)
def _min_plus(left, middle, right):
    """out[a, b] = min over s of left[a, s] + middle[s] + right[s, b], capped at INFINITY."""
    out = np.full((left.shape[0], right.shape[1]), INFINITY)
    for a in range(left.shape[0]):
        for s in range(left.shape[1]):
            base = left[a, s] + middle[s]
            if base < INFINITY:
                for b in range(right.shape[1]):
                    out[a, b] = min(out[a, b], base + right[s, b])
    return out
