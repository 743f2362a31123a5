"""What presolve works on and the search runs on: a StrategyProblem with memory rows.

Time has become rows 0..R-1, each with its own capacity; a constant part has gone to `offset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from jaxscaler.solve.problem import INFINITY, StrategyProblem

FORBIDDEN = INFINITY // 2  # a sum of costs at or above this holds a forbidden one


@dataclass(frozen=True)
class Way:
    """How choices pass between a kernel and a smaller one of the same least cost.

    lift: a choice of the smaller one -> one of the larger, as cheap. lower: a feasible choice of
    the larger one -> one of the smaller, at most as dear.
    """

    lift: Callable[[np.ndarray], np.ndarray]
    lower: Callable[[np.ndarray], np.ndarray]


UNCHANGED = Way(lambda choice: choice, lambda choice: choice)


def chain(ways: list[Way]) -> Way:
    """One way for several, largest kernel first."""

    def lift(choice: np.ndarray) -> np.ndarray:
        for way in reversed(ways):
            choice = way.lift(choice)
        return choice

    def lower(choice: np.ndarray) -> np.ndarray:
        for way in ways:
            choice = way.lower(choice)
        return choice

    return Way(lift, lower)


class NoSolution(Exception):
    """Presolve found that nothing satisfies the problem."""


@dataclass(frozen=True)
class Kernel:
    """cost(choice) = offset + Σ costs + Σ edge_costs; for each row r, Σ usages over it <= caps[r].

    Arrays as in StrategyProblem, int64; usage entry u lies on rows use_lo[u]..use_hi[u]-1.
    """

    node_ptr: np.ndarray
    costs: np.ndarray
    edge_nodes: np.ndarray
    edge_ptr: np.ndarray
    edge_costs: np.ndarray
    use_node: np.ndarray
    use_lo: np.ndarray
    use_hi: np.ndarray
    use_ptr: np.ndarray
    usages: np.ndarray
    caps: np.ndarray
    row_names: np.ndarray  # [R], the rows' numbers before any were dropped
    offset: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.node_ptr) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.node_ptr)

    def cost(self, choice: np.ndarray) -> int:
        """Cost of `choice`; at or above FORBIDDEN when one of its parts is forbidden."""
        i, j = self.edge_nodes[:, 0], self.edge_nodes[:, 1]
        at = self.edge_ptr[:-1] + choice[i] * self.sizes[j] + choice[j]
        parts = np.concatenate([self.costs[self.node_ptr[:-1] + choice], self.edge_costs[at]])
        if (parts >= FORBIDDEN).any():
            return INFINITY
        return int(parts.sum()) + self.offset

    def row_usage(self, choice: np.ndarray) -> np.ndarray:
        """Usage of every row, [R]."""
        used = self.usages[self.use_ptr[:-1] + choice[self.use_node]]
        return row_sums(self.use_lo, self.use_hi, used, len(self.caps))

    def fits(self, choice: np.ndarray) -> bool:
        return bool((self.row_usage(choice) <= self.caps).all())


def row_sums(lo: np.ndarray, hi: np.ndarray, amount: np.ndarray, rows: int) -> np.ndarray:
    """Σ of `amount` over the row intervals [lo, hi), for every row."""
    steps = np.zeros(rows + 1, np.int64)
    np.add.at(steps, lo, amount)
    np.subtract.at(steps, hi, amount)
    return np.cumsum(steps)[:-1]


def from_problem(problem: StrategyProblem) -> Kernel:
    """The kernel equal to the problem: a row per stretch of time where nothing begins or ends."""
    used = np.zeros(len(problem.usage_node), bool)
    if problem.usage_limit is not None:
        used = problem.usage_lo < problem.usage_hi
    lo, hi = problem.usage_lo[used], problem.usage_hi[used]
    times = np.unique(np.concatenate([lo, hi]))
    use_ptr, usages = take_groups(problem.usage_ptr, problem.usages, np.flatnonzero(used))
    limit = 0 if problem.usage_limit is None else problem.usage_limit
    return Kernel(
        node_ptr=_ints(problem.node_ptr),
        costs=np.where(problem.node_costs >= INFINITY, INFINITY, problem.node_costs),
        edge_nodes=_ints(problem.edge_nodes).reshape(-1, 2),
        edge_ptr=_ints(problem.edge_ptr),
        edge_costs=np.where(problem.edge_costs >= INFINITY, INFINITY, problem.edge_costs),
        use_node=_ints(problem.usage_node[used]),
        use_lo=np.searchsorted(times, lo).astype(np.int64),
        use_hi=np.searchsorted(times, hi).astype(np.int64),
        use_ptr=use_ptr,
        usages=usages,
        caps=np.full(max(len(times) - 1, 0), limit, np.int64),
        row_names=np.arange(max(len(times) - 1, 0)),
    )


def _ints(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.int64)


def take_groups(
    ptr: np.ndarray, values: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(ptr, values) of the chosen groups `values[ptr[g]:ptr[g + 1]]`, in their order."""
    sizes = np.diff(ptr)[groups]
    new_ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    at = np.arange(new_ptr[-1]) + np.repeat(ptr[:-1][groups] - new_ptr[:-1], sizes)
    return new_ptr, np.ascontiguousarray(values[at], np.int64)


def keep_edges(kernel: Kernel, edges: np.ndarray) -> Kernel:
    """The kernel with only the edges listed."""
    ptr, costs = take_groups(kernel.edge_ptr, kernel.edge_costs, edges)
    nodes = kernel.edge_nodes[edges]
    return replace(kernel, edge_nodes=nodes, edge_ptr=ptr, edge_costs=costs)


def keep_entries(kernel: Kernel, entries: np.ndarray) -> Kernel:
    """The kernel with only the usage entries listed."""
    ptr, usages = take_groups(kernel.use_ptr, kernel.usages, entries)
    return replace(
        kernel,
        use_node=kernel.use_node[entries],
        use_lo=kernel.use_lo[entries],
        use_hi=kernel.use_hi[entries],
        use_ptr=ptr,
        usages=usages,
    )


def restrict(
    kernel: Kernel, alive: np.ndarray, instead: np.ndarray | None = None
) -> tuple[Kernel, Way]:
    """Drop the strategies that are not `alive` [S]; NoSolution when a node loses all of its own.

    instead [S]: for a dropped strategy the one (of the flat S) that can take its place.
    """
    if alive.all():
        return kernel, UNCHANGED
    below = np.concatenate([[0], np.cumsum(alive)]).astype(np.int64)
    node_ptr = below[kernel.node_ptr]
    sizes = np.diff(node_ptr)
    if (sizes == 0).any():
        raise NoSolution(f"node {int(np.argmin(sizes))} has no strategy left")
    local = np.flatnonzero(alive) - np.repeat(kernel.node_ptr[:-1], sizes)
    i, j = kernel.edge_nodes[:, 0], kernel.edge_nodes[:, 1]
    edge_ptr = np.concatenate([[0], np.cumsum(sizes[i] * sizes[j])]).astype(np.int64)
    edge_costs = np.empty(edge_ptr[-1], np.int64)
    _restrict_edges(
        kernel.edge_nodes, kernel.edge_ptr, kernel.edge_costs, kernel.sizes, node_ptr, local,
        edge_ptr, edge_costs,
    )  # fmt: skip
    use_ptr = np.concatenate([[0], np.cumsum(sizes[kernel.use_node])]).astype(np.int64)
    first = np.repeat(node_ptr[:-1][kernel.use_node] - use_ptr[:-1], np.diff(use_ptr))
    old_start = np.repeat(kernel.use_ptr[:-1], np.diff(use_ptr))
    usages = kernel.usages[old_start + local[np.arange(use_ptr[-1]) + first]]
    smaller = replace(
        kernel,
        node_ptr=node_ptr,
        costs=kernel.costs[alive],
        edge_ptr=edge_ptr,
        edge_costs=edge_costs,
        use_ptr=use_ptr,
        usages=usages,
    )
    old_ptr = kernel.node_ptr

    def lower(choice: np.ndarray) -> np.ndarray:
        at = old_ptr[:-1] + choice
        if instead is not None:
            at = instead[at]
        if not alive[at].all():
            raise ValueError("the choice uses a strategy that is gone")
        return below[at] - node_ptr[:-1]

    return smaller, Way(lambda choice: local[node_ptr[:-1] + choice], lower)


@njit(cache=True)
def _restrict_edges(nodes, ptr, costs, sizes, node_ptr, local, new_ptr, out):
    for e in range(len(nodes)):
        i, j = nodes[e]
        to = new_ptr[e]
        for s in range(node_ptr[i], node_ptr[i + 1]):
            row = ptr[e] + local[s] * sizes[j]
            for t in range(node_ptr[j], node_ptr[j + 1]):
                out[to] = costs[row + local[t]]
                to += 1


def adjacency(edge_nodes: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ptr, edge, side): node i ends edges `edge[ptr[i]:ptr[i+1]]`, at column `side` of each."""
    ends = edge_nodes.ravel()
    order = np.argsort(ends, kind="stable")
    counts = np.bincount(ends, minlength=num_nodes)
    ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ptr, order // 2, order % 2


def parts(kernel: Kernel) -> list[tuple[Kernel, np.ndarray]]:
    """The kernel cut where neither an edge nor a memory row holds it together.

    Returns (kernel of its own, its nodes) for each part; only the first keeps the offset.
    """
    label = np.arange(kernel.num_nodes, dtype=np.int64)
    order = np.lexsort((kernel.use_hi, kernel.use_lo))
    _join(label, kernel.edge_nodes, kernel.use_node, kernel.use_lo, kernel.use_hi, order)
    names, label = np.unique(label, return_inverse=True)
    if len(names) <= 1:
        return [(kernel, np.arange(kernel.num_nodes))]
    found = []
    edge_label, use_label = label[kernel.edge_nodes[:, 0]], label[kernel.use_node]
    by_node, by_edge, by_use = (
        np.split(np.argsort(a, kind="stable"), np.cumsum(np.bincount(a, minlength=len(names)))[:-1])
        for a in (label, edge_label, use_label)
    )
    place = np.empty(kernel.num_nodes, np.int64)
    for nodes, edges, entries in zip(by_node, by_edge, by_use, strict=True):
        place[nodes] = np.arange(len(nodes))
        part = keep_entries(keep_edges(kernel, edges), entries)
        node_ptr, costs = take_groups(kernel.node_ptr, kernel.costs, nodes)
        part = replace(
            part,
            node_ptr=node_ptr,
            costs=costs,
            edge_nodes=place[part.edge_nodes].reshape(-1, 2),
            use_node=place[part.use_node],
            offset=0 if found else kernel.offset,
        )
        lo = int(part.use_lo.min()) if len(entries) else 0
        hi = int(part.use_hi.max(initial=0))
        part = replace(
            part,
            use_lo=part.use_lo - lo,
            use_hi=part.use_hi - lo,
            caps=kernel.caps[lo:hi].copy(),
            row_names=kernel.row_names[lo:hi],
        )
        found.append((part, nodes))
    return found


@njit(cache=True)
def _find(label, i):
    while label[i] != i:
        label[i] = label[label[i]]
        i = label[i]
    return i


@njit(cache=True)
def _join(label, edge_nodes, use_node, use_lo, use_hi, order):
    """Union-find over edges and over usage entries (sorted by lo) that share a row."""
    for e in range(len(edge_nodes)):
        a, b = _find(label, edge_nodes[e, 0]), _find(label, edge_nodes[e, 1])
        label[max(a, b)] = min(a, b)
    end, last = -1, -1
    for u in order:
        if use_lo[u] < end:
            a, b = _find(label, use_node[u]), _find(label, last)
            label[max(a, b)] = min(a, b)
        if use_hi[u] > end:
            end, last = use_hi[u], use_node[u]
    for i in range(len(label)):
        label[i] = _find(label, i)
