"""Edges: what is separable moves into nodes, determined nodes merge, parallel edges add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import FORBIDDEN, Kernel, Way, keep_edges
from jaxscaler.solve.problem import INFINITY


def normalise(kernel: Kernel) -> Kernel:
    """Move row, then column minima of each edge into its nodes, node minima into the offset.

    Edges that become zero (constant or separable ones, and all edges of one-strategy nodes) go.
    Needs an arc-consistent kernel. Costs of all choices stay what they were.
    """
    costs, tables = kernel.costs.copy(), kernel.edge_costs.copy()
    useful = np.zeros(len(kernel.edge_nodes), bool)
    _normalise(kernel.node_ptr, costs, kernel.edge_nodes, kernel.edge_ptr, tables, useful)
    least = np.minimum.reduceat(costs, kernel.node_ptr[:-1]) if len(costs) else costs
    costs = np.where(costs >= FORBIDDEN, INFINITY, costs - np.repeat(least, kernel.sizes))
    kernel = replace(
        kernel, costs=costs, edge_costs=tables, offset=kernel.offset + int(least.sum())
    )
    return kernel if useful.all() else keep_edges(kernel, np.flatnonzero(useful))


@njit(cache=True)
def _normalise(node_ptr, costs, nodes, edge_ptr, tables, useful):
    for e in range(len(nodes)):
        i, j = nodes[e]
        ki, kj = node_ptr[i + 1] - node_ptr[i], node_ptr[j + 1] - node_ptr[j]
        table = tables[edge_ptr[e] : edge_ptr[e + 1]].reshape((ki, kj))
        for a in range(ki):
            least = table[a].min()
            if least != 0:
                costs[node_ptr[i] + a] += least
                for b in range(kj):
                    if table[a, b] < FORBIDDEN:
                        table[a, b] -= least
        column = table[0].copy()
        for a in range(1, ki):
            for b in range(kj):
                column[b] = min(column[b], table[a, b])
        for b in range(kj):
            costs[node_ptr[j] + b] += column[b]
        for a in range(ki):
            for b in range(kj):
                if table[a, b] < FORBIDDEN:
                    table[a, b] -= column[b]
                if table[a, b] != 0:
                    useful[e] = True


def merge(kernel: Kernel) -> tuple[Kernel, Way]:
    """Merge each node that an edge makes a function of its neighbour, and sum parallel edges.

    An edge with one finite entry in every row (column) determines its second (first) node. Such
    edges, as far as they form a forest, tie every node to a root; everything is then expressed
    over the strategies of the roots at once.
    """
    nodes = kernel.edge_nodes
    by_row, by_column, partner = _functional(
        kernel.node_ptr, nodes, kernel.edge_ptr, kernel.edge_costs
    )
    parent, link = _forest(kernel.num_nodes, nodes, by_row, by_column)
    root, depth = _roots(parent)
    sizes = kernel.sizes[root]
    map_ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    maps = _compose(np.argsort(depth, kind="stable"), parent, link, nodes, map_ptr, *partner)
    is_root = root == np.arange(kernel.num_nodes)
    name = np.cumsum(is_root) - 1
    home = name[root]  # the new node of every old one

    roots = np.flatnonzero(is_root)
    node_ptr = np.concatenate([[0], np.cumsum(kernel.sizes[roots])]).astype(np.int64)
    costs = np.zeros(node_ptr[-1], np.int64)
    _add_nodes(kernel.node_ptr, kernel.costs, home, map_ptr, maps, node_ptr, costs)
    use_ptr = np.concatenate([[0], np.cumsum(sizes[kernel.use_node])]).astype(np.int64)
    usages = np.empty(use_ptr[-1], np.int64)
    _map_usages(kernel.use_node, kernel.use_ptr, kernel.usages, map_ptr, maps, use_ptr, usages)

    ends = np.sort(home[nodes].reshape(-1, 2), axis=1)
    inner = ends[:, 0] == ends[:, 1]
    _add_inner(
        np.flatnonzero(inner), nodes, kernel.edge_ptr, kernel.edge_costs, kernel.sizes,
        home, map_ptr, maps, node_ptr, costs,
    )  # fmt: skip
    outer = np.flatnonzero(~inner)
    pairs, group = np.unique(ends[outer, 0] * len(roots) + ends[outer, 1], return_inverse=True)
    edge_nodes = np.stack([pairs // max(len(roots), 1), pairs % max(len(roots), 1)], axis=1)
    k = np.diff(node_ptr)
    edge_ptr = np.concatenate([[0], np.cumsum(k[edge_nodes[:, 0]] * k[edge_nodes[:, 1]])])
    edge_ptr = edge_ptr.astype(np.int64)
    tables = np.zeros(edge_ptr[-1], np.int64)
    _add_outer(
        outer, group.astype(np.int64), nodes, kernel.edge_ptr, kernel.edge_costs, kernel.sizes,
        home, map_ptr, maps, edge_nodes, edge_ptr, k, tables,
    )  # fmt: skip
    merged = replace(
        kernel,
        node_ptr=node_ptr,
        costs=np.where(costs >= FORBIDDEN, INFINITY, costs),
        edge_nodes=edge_nodes,
        edge_ptr=edge_ptr,
        edge_costs=tables,
        use_node=home[kernel.use_node],
        use_ptr=use_ptr,
        usages=usages,
    )
    return merged, Way(
        lambda choice: maps[map_ptr[:-1] + choice[home]], lambda choice: choice[roots]
    )


@njit(cache=True)
def _functional(node_ptr, nodes, edge_ptr, costs):
    """Which edges have one finite entry per row / column, and that entry's partner strategy.

    partner = (row_ptr, row_partner, column_ptr, column_partner), flat per edge.
    """
    num = len(nodes)
    by_row, by_column = np.zeros(num, np.bool_), np.zeros(num, np.bool_)
    row_ptr, column_ptr = np.zeros(num + 1, np.int64), np.zeros(num + 1, np.int64)
    for e in range(num):
        i, j = nodes[e]
        row_ptr[e + 1] = row_ptr[e] + node_ptr[i + 1] - node_ptr[i]
        column_ptr[e + 1] = column_ptr[e] + node_ptr[j + 1] - node_ptr[j]
    row_partner = np.zeros(row_ptr[num], np.int64)
    column_partner = np.zeros(column_ptr[num], np.int64)
    for e in range(num):
        ki, kj = row_ptr[e + 1] - row_ptr[e], column_ptr[e + 1] - column_ptr[e]
        table = costs[edge_ptr[e] : edge_ptr[e + 1]].reshape((ki, kj))
        seen = np.zeros(kj, np.int64)
        by_row[e] = True
        for a in range(ki):
            finite = 0
            for b in range(kj):
                if table[a, b] < FORBIDDEN:
                    finite += 1
                    seen[b] += 1
                    row_partner[row_ptr[e] + a] = b
                    column_partner[column_ptr[e] + b] = a
            by_row[e] &= finite == 1
        by_column[e] = (seen == 1).all()
    return by_row, by_column, (row_ptr, row_partner, column_ptr, column_partner)


@njit(cache=True)
def _forest(num, nodes, by_row, by_column):
    """parent[i]: the node that determines i (itself: none); link[i]: the edge that says so."""
    parent, link = np.arange(num), np.full(num, -1, np.int64)
    top = np.arange(num)  # path-halving shortcut to the root
    for e in range(len(nodes)):
        i, j = nodes[e]
        for child, other, determined in ((j, i, by_row[e]), (i, j, by_column[e])):
            if determined and parent[child] == child:
                at = other
                while top[at] != at:
                    top[at] = top[top[at]]
                    at = top[at]
                if at != child:
                    parent[child], link[child], top[child] = other, e, at
                    break
    return parent, link


@njit(cache=True)
def _roots(parent):
    num = len(parent)
    root, depth = np.full(num, -1, np.int64), np.zeros(num, np.int64)
    stack = np.empty(num, np.int64)
    for i in range(num):
        height, at = 0, i
        while root[at] < 0 and parent[at] != at:
            stack[height] = at
            height += 1
            at = parent[at]
        if root[at] < 0:
            root[at] = at
        while height:
            height -= 1
            below = stack[height]
            root[below], depth[below] = root[at], depth[at] + 1
            at = below
    return root, depth


@njit(cache=True)
def _compose(order, parent, link, nodes, map_ptr, row_ptr, row_partner, column_ptr, column_partner):
    """maps[map_ptr[i] + s]: node i's strategy when its root takes strategy s."""
    maps = np.empty(map_ptr[-1], np.int64)
    for i in order:
        size = map_ptr[i + 1] - map_ptr[i]
        for s in range(size):
            if parent[i] == i:
                maps[map_ptr[i] + s] = s
            else:
                above = maps[map_ptr[parent[i]] + s]
                e = link[i]
                if nodes[e, 1] == i:
                    maps[map_ptr[i] + s] = row_partner[row_ptr[e] + above]
                else:
                    maps[map_ptr[i] + s] = column_partner[column_ptr[e] + above]
    return maps


@njit(cache=True)
def _add_nodes(old_ptr, old_costs, home, map_ptr, maps, node_ptr, costs):
    for i in range(len(home)):
        to = node_ptr[home[i]]
        for s in range(map_ptr[i + 1] - map_ptr[i]):
            more = old_costs[old_ptr[i] + maps[map_ptr[i] + s]]
            costs[to + s] = min(costs[to + s] + more, INFINITY)


@njit(cache=True)
def _map_usages(use_node, old_ptr, old, map_ptr, maps, new_ptr, new):
    for u in range(len(use_node)):
        first = map_ptr[use_node[u]]
        for s in range(new_ptr[u + 1] - new_ptr[u]):
            new[new_ptr[u] + s] = old[old_ptr[u] + maps[first + s]]


@njit(cache=True)
def _add_inner(edges, nodes, old_ptr, old, sizes, home, map_ptr, maps, node_ptr, costs):
    """Edges whose two ends have one root: a cost of that root's strategies."""
    for e in edges:
        i, j = nodes[e]
        to = node_ptr[home[i]]
        for s in range(map_ptr[i + 1] - map_ptr[i]):
            at = old_ptr[e] + maps[map_ptr[i] + s] * sizes[j] + maps[map_ptr[j] + s]
            costs[to + s] = min(costs[to + s] + old[at], INFINITY)


@njit(cache=True)
def _add_outer(
    edges, group, nodes, old_ptr, old, sizes, home, map_ptr, maps, new_nodes, new_ptr, k, new
):
    for n in range(len(edges)):
        e, g = edges[n], group[n]
        i, j = nodes[e]
        kr, kc = k[new_nodes[g, 0]], k[new_nodes[g, 1]]
        table = new[new_ptr[g] : new_ptr[g + 1]].reshape((kr, kc))
        straight = home[i] == new_nodes[g, 0]
        for s in range(kr):
            for t in range(kc):
                a, b = (s, t) if straight else (t, s)
                at = old_ptr[e] + maps[map_ptr[i] + a] * sizes[j] + maps[map_ptr[j] + b]
                table[s, t] = min(table[s, t] + old[at], INFINITY)
