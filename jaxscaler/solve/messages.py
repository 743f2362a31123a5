"""Sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006) as exact reparametrisation.

The cost of a kernel is kept as const + Σ unary + Σ (table + left + right) over nodes and edges, and
is moved about between the terms without changing any choice's sum. After a pass every term is at
least 0, so const is a lower bound; and const + unary(s), at the moment a node is visited, bounds
every choice that takes s. All numbers are whole and held in float64, which is exact below 2**53:
`peak` watches that, so that no proof rests on rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import FORBIDDEN, Kernel, adjacency

EXACT = 2.0**52
RESOLUTION = 40  # bits of a sensible choice's cost after scaling
_MOST = 2.0**46  # larger costs count as this; a bound stays one


@dataclass
class Messages:
    """The reparametrised kernel, in units of 2**-shift of its cost (negative shift: coarser).

    unary [S]; left, right: what an edge holds for the strategies of its first, second node, flat
    at left_ptr, right_ptr; tables and their transposes as floats, inf where forbidden.
    """

    shift: int
    unary: np.ndarray
    left_ptr: np.ndarray
    right_ptr: np.ndarray
    left: np.ndarray
    right: np.ndarray
    tables: np.ndarray
    transposed: np.ndarray
    adj_ptr: np.ndarray
    adj_edge: np.ndarray
    adj_side: np.ndarray
    const: float = 0.0
    peak: float = 0.0
    marginal: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def exact(self) -> bool:
        return self.peak < EXACT


def start_messages(kernel: Kernel, shift: int | None = None) -> Messages:
    """Messages of a normalised, arc-consistent kernel, nothing moved yet."""
    if shift is None:
        shift = RESOLUTION - int(_scale_of(kernel)).bit_length()
    ptr, edge, side = adjacency(kernel.edge_nodes, kernel.num_nodes)
    sizes = kernel.sizes
    i, j = kernel.edge_nodes[:, 0], kernel.edge_nodes[:, 1]
    left_ptr = np.concatenate([[0], np.cumsum(sizes[i])]).astype(np.int64)
    right_ptr = np.concatenate([[0], np.cumsum(sizes[j])]).astype(np.int64)
    tables = scaled(kernel.edge_costs, shift)
    _, first = np.unique(kernel.edge_ptr[:-1], return_index=True)  # edges may share a table
    return Messages(
        shift=shift,
        unary=scaled(kernel.costs, shift),
        left_ptr=left_ptr,
        right_ptr=right_ptr,
        left=np.zeros(left_ptr[-1]),
        right=np.zeros(right_ptr[-1]),
        tables=tables,
        transposed=_transpose(kernel.edge_nodes[first], sizes, kernel.edge_ptr[first], tables),
        adj_ptr=ptr,
        adj_edge=edge,
        adj_side=side,
        marginal=np.zeros(len(kernel.costs)),
    )


def _scale_of(kernel: Kernel) -> float:
    """A cost that a sensible choice stays below: node by node, the cheapest against its past."""
    choice = np.zeros(kernel.num_nodes, np.int64)
    ptr, edge, side = adjacency(kernel.edge_nodes, kernel.num_nodes)
    return max(
        _greedy(
            kernel.node_ptr, kernel.costs, kernel.edge_nodes, kernel.edge_ptr, kernel.edge_costs,
            ptr, edge, side, choice,
        ),
        1.0,
    )  # fmt: skip


@njit(cache=True)
def scaled(costs, shift):
    """floor(costs * 2**shift) as floats, at most _MOST; inf where forbidden. Exact."""
    out = np.empty(len(costs))
    largest = np.int64(_MOST) >> min(max(shift, 0), 62)
    for n in range(len(costs)):
        cost = costs[n]
        if cost >= FORBIDDEN:
            out[n] = np.inf
        elif shift < 0:
            out[n] = min(cost >> min(-shift, 62), np.int64(_MOST))
        elif cost > largest:
            out[n] = _MOST
        else:
            out[n] = cost << min(shift, 62)
    return out


def sweep(kernel: Kernel, messages: Messages, choice: np.ndarray) -> None:
    """One pass forth, which also decodes a `choice` [num_nodes] into the array, and one back.

    Afterwards `const` is the bound and `marginal` [S] the bound for every strategy.
    """
    m = messages
    args = (
        kernel.node_ptr, kernel.edge_nodes, kernel.edge_ptr, m.adj_ptr, m.adj_edge, m.adj_side,
        m.unary,
    )  # fmt: skip
    const, peak1 = _pass(
        *args, True, m.left_ptr, m.left, m.right_ptr, m.right, m.transposed, choice, m.marginal,
        m.const,
    )  # fmt: skip
    m.const, peak2 = _pass(
        *args, False, m.right_ptr, m.right, m.left_ptr, m.left, m.tables, choice, m.marginal, const,

    )  # fmt: skip
    m.peak = max(m.peak, peak1, peak2, abs(m.const))


@njit(cache=True)
def _transpose(nodes, sizes, ptr, tables):
    out = np.empty_like(tables)
    for e in range(len(nodes)):
        ki, kj = sizes[nodes[e, 0]], sizes[nodes[e, 1]]
        for a in range(ki):
            for b in range(kj):
                out[ptr[e] + b * ki + a] = tables[ptr[e] + a * kj + b]
    return out


@njit(cache=True)
def _greedy(node_ptr, costs, nodes, edge_ptr, tables, adj_ptr, adj_edge, adj_side, choice):
    total = 0.0
    for i in range(len(node_ptr) - 1):
        best = np.inf
        kj = node_ptr[i + 1] - node_ptr[i]
        for s in range(kj):
            cost = np.float64(costs[node_ptr[i] + s])
            for q in range(adj_ptr[i], adj_ptr[i + 1]):
                e = adj_edge[q]
                if adj_side[q] == 1:
                    more = tables[edge_ptr[e] + choice[nodes[e, 0]] * kj + s]
                    cost += 0 if more >= FORBIDDEN else more
            if cost < best:
                best = cost
                choice[i] = s
        total += best
    return total


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"}, error_model="numpy")
def _pass(
    node_ptr, nodes, edge_ptr, adj_ptr, adj_edge, adj_side, unary, forth,
    from_ptr, from_side, to_ptr, to_side, tables, choice, marginal, const,
):  # fmt: skip
    """Visit the nodes in order (`forth`) or in reverse: pull from edges behind, push ahead.

    `from_side` is what edges hold for the end that is visited first, `tables` are [second, first].
    Forth decodes `choice`, back fills `marginal`.
    """
    num = len(node_ptr) - 1
    widest, peak = 0, 0.0
    for i in range(num):
        widest = max(widest, node_ptr[i + 1] - node_ptr[i])
    pulled, score = np.empty(widest), np.empty(widest)
    behind_side = 1 if forth else 0
    for n in range(num):
        i = n if forth else num - 1 - n
        first = node_ptr[i]
        k = node_ptr[i + 1] - first
        own = unary[first : first + k]
        behind = 0
        if forth:
            for s in range(k):
                score[s] = own[s]
        for q in range(adj_ptr[i], adj_ptr[i + 1]):
            if adj_side[q] != behind_side:
                continue
            behind += 1
            e = adj_edge[q]
            h = nodes[e, 1 - behind_side]
            kh = node_ptr[h + 1] - node_ptr[h]
            mine = to_side[to_ptr[e] : to_ptr[e] + k]
            theirs = from_side[from_ptr[e] : from_ptr[e] + kh]
            table = tables[edge_ptr[e] : edge_ptr[e] + k * kh].reshape((k, kh))
            if forth:
                taken = choice[h]
                for s in range(k):
                    score[s] += table[s, taken] + theirs[taken] + mine[s]
            for s in range(k):
                least = np.inf
                for t in range(kh):
                    least = min(least, table[s, t] + theirs[t])
                pulled[s] = least
            for s in range(k):
                own[s] += pulled[s] + mine[s]
                mine[s] = -pulled[s]
                peak = max(peak, abs(pulled[s]), abs(own[s]))
        least = own[0]
        for s in range(1, k):
            least = min(least, own[s])
        const += least
        for s in range(k):
            own[s] -= least
            peak = max(peak, own[s])
        if forth:
            best = 0
            for s in range(1, k):
                if score[s] < score[best]:
                    best = s
            choice[i] = best
        else:
            for s in range(k):
                marginal[first + s] = const + own[s]
        ahead = adj_ptr[i + 1] - adj_ptr[i] - behind
        if ahead:
            share = 1.0 / max(ahead, behind)
            for s in range(k):
                pulled[s] = np.floor(own[s] * share)
                own[s] -= ahead * pulled[s]
                if own[s] < 0:  # the product was rounded up to a whole number
                    own[s] += ahead
                    pulled[s] -= 1
            for q in range(adj_ptr[i], adj_ptr[i + 1]):
                if adj_side[q] != behind_side:
                    at = from_ptr[adj_edge[q]]
                    for s in range(k):
                        from_side[at + s] += pulled[s]
    return const, peak
