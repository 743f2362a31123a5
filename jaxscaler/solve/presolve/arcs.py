"""Arc consistency: a strategy stays only while each edge offers it a partner of finite cost."""

from __future__ import annotations

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import FORBIDDEN, Kernel, adjacency


def supported(kernel: Kernel) -> np.ndarray:
    """Mask [S] of the strategies that survive."""
    alive = kernel.costs < FORBIDDEN
    ptr, edge, _ = adjacency(kernel.edge_nodes, kernel.num_nodes)
    _propagate(
        kernel.node_ptr, kernel.edge_nodes, kernel.edge_ptr, kernel.edge_costs, ptr, edge, alive
    )
    return alive


@njit(cache=True)
def _propagate(node_ptr, nodes, edge_ptr, costs, adj_ptr, adj_edge, alive):
    num = len(nodes)
    widest = 0
    for i in range(len(node_ptr) - 1):
        widest = max(widest, node_ptr[i + 1] - node_ptr[i])
    row_ok, column_ok = np.empty(widest, np.bool_), np.empty(widest, np.bool_)
    ring, queued = np.arange(num), np.ones(num, np.bool_)
    head, waiting = 0, num
    while waiting:
        e = ring[head]
        head = (head + 1) % num
        waiting -= 1
        queued[e] = False
        i, j = nodes[e]
        ki, kj = node_ptr[i + 1] - node_ptr[i], node_ptr[j + 1] - node_ptr[j]
        row_ok[:ki] = False
        column_ok[:kj] = False
        for a in range(ki):
            if alive[node_ptr[i] + a]:
                at = edge_ptr[e] + a * kj
                for b in range(kj):
                    if costs[at + b] < FORBIDDEN and alive[node_ptr[j] + b]:
                        row_ok[a] = True
                        column_ok[b] = True
        for node, size, good in ((i, ki, row_ok), (j, kj, column_ok)):
            changed = False
            for a in range(size):
                if alive[node_ptr[node] + a] and not good[a]:
                    alive[node_ptr[node] + a] = False
                    changed = True
            if changed:
                for q in range(adj_ptr[node], adj_ptr[node + 1]):
                    other = adj_edge[q]
                    if not queued[other] and other != e:
                        queued[other] = True
                        ring[(head + waiting) % num] = other
                        waiting += 1
