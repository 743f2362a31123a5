"""Moves that keep a choice feasible: the best change of a whole random tree of nodes at once.

A tree that the graph induces is drawn at random; dynamic programming finds its best strategies
against the rest held still, at cost + a random share of the multipliers' prices + a little noise.
The change is kept when the memory rows still hold and the true cost passes (Metropolis).
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
from numba import njit

from jaxscaler.solve.kernel import FORBIDDEN, Kernel, adjacency

_ENDLESS = 2**62  # visits, where only work counts
_ENOUGH = 2 * 10**8  # work per call: about a second
_WIDEST = 10**7  # table entries per tree
CLASH = 1e17  # what a forbidden pair costs here: above any sum of allowed ones

# node i's edges: slots adj_ptr[i]..; the table row tables[start + x_other * k_i :][:k_i] prices
# node i's strategies against the neighbour's. node i's memory entries: ent_ptr[i]..
View = namedtuple(
    "View",
    "node_ptr costs adj_ptr other start tables ent_ptr ent_lo ent_hi ent_start usages caps",
)


@dataclass
class Walk:
    """A choice with what it costs and takes, as the moves change it."""

    choice: np.ndarray
    usage: np.ndarray  # [R]
    cost: float


def view_of(kernel: Kernel) -> View:
    """A kernel as moves read it: costs as floats, tables both ways, usage by node."""
    ptr, edge, side = adjacency(kernel.edge_nodes, kernel.num_nodes)
    tables = _both_ways(kernel.edge_nodes, kernel.sizes, kernel.edge_ptr, kernel.edge_costs)
    order = np.argsort(kernel.use_node, kind="stable")
    counts = np.bincount(kernel.use_node, minlength=kernel.num_nodes)
    return View(
        node_ptr=kernel.node_ptr,
        costs=np.where(kernel.costs >= FORBIDDEN, CLASH, kernel.costs.astype(np.float64)),
        adj_ptr=ptr,
        other=kernel.edge_nodes.ravel()[2 * edge + 1 - side],
        start=kernel.edge_ptr[edge] + np.where(side == 1, 0, len(kernel.edge_costs)),
        tables=tables,
        ent_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ent_lo=kernel.use_lo[order],
        ent_hi=kernel.use_hi[order],
        ent_start=kernel.use_ptr[:-1][order],
        usages=kernel.usages,
        caps=kernel.caps,
    )


@njit(cache=True)
def _both_ways(nodes, sizes, ptr, costs):
    """All tables as floats, CLASH where forbidden, then all of them transposed."""
    half = len(costs)
    both = np.empty(2 * half)
    for e in range(len(nodes)):
        ki, kj = sizes[nodes[e, 0]], sizes[nodes[e, 1]]
        for a in range(ki):
            for b in range(kj):
                at = ptr[e] + a * kj + b
                cost = CLASH if costs[at] >= FORBIDDEN else np.float64(costs[at])
                both[at] = both[half + ptr[e] + b * ki + a] = cost
    return both


def start_walk(kernel: Kernel, choice: np.ndarray) -> Walk:
    """A walk that begins at `choice` [num_nodes], with its cost and the usage of each row."""
    cost = kernel.cost(choice)
    return Walk(choice.copy(), kernel.row_usage(choice), float(cost - kernel.offset))


def tree_moves(
    view: View,
    walk: Walk,
    prices: np.ndarray,
    *,
    size: int,
    noise: float,
    temperature: float,
    seed: int,
    visits: int = _ENDLESS,
    most: int = _ENOUGH,
    repair: bool = False,
) -> tuple[np.ndarray, float, int]:
    """Make moves on `walk`; returns (best choice seen, its cost, work done).

    visits, most: ends after trees of so many nodes in all, or so much work. size: nodes per tree.
    noise: largest random addition to a strategy's cost. repair: take every move at cost + prices,
    whether the memory rows hold or not.
    """
    best = walk.choice.copy()
    cost, best_cost, work = _tree_moves(
        view, walk.choice, walk.usage, walk.cost, prices, visits, most, size, noise, temperature,
        seed, repair, best,
    )  # fmt: skip
    walk.cost = cost
    return best, best_cost, work


@njit(cache=True, nogil=True)
def _tree_moves(
    view, choice, usage, cost, prices, visits, most, size, noise, temperature, seed, repair, best
):
    np.random.seed(seed)
    num = len(view.node_ptr) - 1
    widest = 1
    for i in range(num):
        widest = max(widest, view.node_ptr[i + 1] - view.node_ptr[i])
    size = min(size, num)
    mark = np.zeros(num, np.int64)  # neighbours in the tree
    place = np.full(num, -1, np.int64)  # position in the tree
    tree, parent, slot = (
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )
    front = np.empty(num + 1, np.int64)
    front_from, front_slot = np.empty(num + 1, np.int64), np.empty(num + 1, np.int64)
    touched = np.empty(num, np.int64)
    value = np.empty((size, widest))
    pick = np.empty((size, widest), np.int64)
    fresh = np.empty(size, np.int64)
    low = np.empty(widest)
    shift = np.zeros(len(view.caps) + 1, np.int64)
    best_cost, work = cost, 0
    share = 1.0
    move, visited = -1, 0
    while visited < visits and work < most:
        move += 1
        if move % 50 == 0 and not repair:
            share = np.random.random() * 1.3
        # grow a random induced tree
        count, ends, seen, entries = 0, 1, 0, 0
        front[0], front_from[0], front_slot[0] = np.random.randint(num), 0, 0
        while ends and count < size and entries < _WIDEST:
            at = np.random.randint(ends)
            v, origin, via = front[at], front_from[at], front_slot[at]
            ends -= 1
            front[at], front_from[at] = front[ends], front_from[ends]
            front_slot[at] = front_slot[ends]
            if mark[v] > 1:  # it would close a cycle
                continue
            place[v] = count
            tree[count], parent[count], slot[count] = v, origin, via
            count += 1
            k = view.node_ptr[v + 1] - view.node_ptr[v]
            entries += k * (view.node_ptr[tree[origin] + 1] - view.node_ptr[tree[origin]])
            for q in range(view.adj_ptr[v], view.adj_ptr[v + 1]):
                w = view.other[q]
                if place[w] >= 0:
                    continue
                if mark[w] == 0:
                    touched[seen] = w
                    seen += 1
                    front[ends], front_from[ends], front_slot[ends] = w, count - 1, q
                    ends += 1
                mark[w] += 1
        visited += count
        for n in range(seen):
            mark[touched[n]] = 0
        # node terms: own cost, prices, noise, and edges to the rest held still
        for n in range(count):
            v = tree[n]
            first = view.node_ptr[v]
            k = view.node_ptr[v + 1] - first
            term = value[n]
            for s in range(k):
                term[s] = view.costs[first + s] + share * prices[first + s]
                if noise > 0:
                    term[s] += noise * np.random.random()
            for q in range(view.adj_ptr[v], view.adj_ptr[v + 1]):
                w = view.other[q]
                if place[w] < 0:
                    row = view.tables[view.start[q] + choice[w] * k :][:k]
                    for s in range(k):
                        term[s] += row[s]
            work += k * (view.adj_ptr[v + 1] - view.adj_ptr[v] + 2)
        # leaves to root
        for n in range(count - 1, 0, -1):
            v, p = tree[n], tree[parent[n]]
            k = view.node_ptr[v + 1] - view.node_ptr[v]
            kp = view.node_ptr[p + 1] - view.node_ptr[p]
            q = slot[n]  # the parent's slot that looks at v
            table = view.tables[view.start[q] :][: k * kp].reshape((k, kp))
            for t in range(kp):
                low[t] = np.inf
                pick[n, t] = 0
            for s in range(k):
                base = value[n, s]
                for t in range(kp):
                    total = table[s, t] + base
                    if total < low[t]:
                        low[t] = total
                        pick[n, t] = s
            above = value[parent[n]]
            for t in range(kp):
                above[t] += low[t]
            work += k * kp
        # root to leaves
        k = view.node_ptr[tree[0] + 1] - view.node_ptr[tree[0]]
        fresh[0] = np.argmin(value[0, :k])
        for n in range(1, count):
            fresh[n] = pick[n, fresh[parent[n]]]
        # what changes, in true cost
        delta, length = 0.0, 0
        for n in range(count):
            v = tree[n]
            if fresh[n] == choice[v]:
                continue
            first = view.node_ptr[v]
            k = view.node_ptr[v + 1] - first
            delta += view.costs[first + fresh[n]] - view.costs[first + choice[v]]
            for q in range(view.adj_ptr[v], view.adj_ptr[v + 1]):
                w = view.other[q]
                now = choice[w]
                if place[w] >= 0:
                    now = fresh[place[w]]
                    if now != choice[w] and place[w] < n:
                        continue  # counted from the other end
                at = view.start[q]
                delta += (
                    view.tables[at + now * k + fresh[n]]
                    - view.tables[at + choice[w] * k + choice[v]]
                )
            for u in range(view.ent_ptr[v], view.ent_ptr[v + 1]):
                length += view.ent_hi[u] - view.ent_lo[u]
        keep = (
            repair
            or delta <= 0
            or (temperature > 0 and delta <= -temperature * np.log(1.0 - np.random.random()))
        )
        if keep and length > 3 * len(view.caps):
            keep = _shift_all(view, tree, fresh, count, choice, usage, shift, repair)
            work += 3 * len(view.caps)
        elif keep and length:
            fits = _shift_usage(view, tree, fresh, count, choice, usage, 1)
            if not fits and not repair:
                _shift_usage(view, tree, fresh, count, choice, usage, -1)
                keep = False
            work += length
        if keep:
            for n in range(count):
                choice[tree[n]] = fresh[n]
            cost += delta
            if cost < best_cost and not repair:
                best_cost = cost
                best[:] = choice
        for n in range(count):
            place[tree[n]] = -1
    return cost, best_cost, work


@njit(cache=True)
def _shift_usage(view, tree, fresh, count, choice, usage, sign):
    """Add (sign 1) or take back (-1) the changes of the tree; True when every row still holds."""
    fits = True
    for n in range(count):
        v = tree[n]
        if fresh[n] == choice[v]:
            continue
        for u in range(view.ent_ptr[v], view.ent_ptr[v + 1]):
            at = view.ent_start[u]
            change = sign * (view.usages[at + fresh[n]] - view.usages[at + choice[v]])
            if change:
                rows = usage[view.ent_lo[u] : view.ent_hi[u]]
                for r in range(len(rows)):
                    rows[r] += change
    if sign < 0:
        return True
    for n in range(count):
        v = tree[n]
        if fresh[n] == choice[v] or not fits:
            continue
        for u in range(view.ent_ptr[v], view.ent_ptr[v + 1]):
            at = view.ent_start[u]
            if view.usages[at + fresh[n]] > view.usages[at + choice[v]]:
                rows = usage[view.ent_lo[u] : view.ent_hi[u]]
                caps = view.caps[view.ent_lo[u] : view.ent_hi[u]]
                for r in range(len(rows)):
                    fits &= rows[r] <= caps[r]
    return fits


@njit(cache=True)
def _shift_all(view, tree, fresh, count, choice, usage, shift, always):
    """As `_shift_usage`, by one pass over all rows: for long intervals. True when it is done.

    Done when every row that grows still holds, or `always`. `shift` [R + 1] is zero, and left so.
    """
    for n in range(count):
        v = tree[n]
        if fresh[n] != choice[v]:
            for u in range(view.ent_ptr[v], view.ent_ptr[v + 1]):
                at = view.ent_start[u]
                change = view.usages[at + fresh[n]] - view.usages[at + choice[v]]
                shift[view.ent_lo[u]] += change
                shift[view.ent_hi[u]] -= change
    fits, change = True, 0
    for r in range(len(usage)):
        change += shift[r]
        fits &= change <= 0 or usage[r] + change <= view.caps[r]
    change = 0
    for r in range(len(usage)):
        change += shift[r]
        if fits or always:
            usage[r] += change
        shift[r] = 0
    shift[len(usage)] = 0
    return fits or always
