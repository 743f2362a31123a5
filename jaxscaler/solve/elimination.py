"""The cheapest plan of a problem that is nearly decided: what a program leaves open of it.

Nodes are eliminated one after the other (Bertelè and Brioschi, "Nonserial Dynamic Programming",
1972): one that few others touch becomes a table of what it costs at best, given these. Costs are
those of the planner's problem; no search, no compiled code, so that the first answer takes
milliseconds. Where the tables grow too large it is a problem for `solve`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from jaxscaler.solve.problem import INFINITY
from jaxscaler.solve.shared import Shared

LARGE = 2**11  # entries from which it is worth looking for strategies that no one needs,
MORE = 8  # and how many times as many until the next look
MOST = 2**22  # entries of a table


class Table(NamedTuple):
    """Costs [strategies of each of `nodes`]."""

    nodes: tuple[int, ...]
    costs: np.ndarray


class _Best(NamedTuple):
    """The best strategy of a node by those of others."""

    node: int
    given: tuple[int, ...]
    strategy: np.ndarray

    def undo(self, choice: np.ndarray) -> None:
        choice[self.node] = self.strategy[tuple(choice[j] for j in self.given)]


class _Narrowed(NamedTuple):
    """The strategies that were left of nodes."""

    left: dict[int, np.ndarray]

    def undo(self, choice: np.ndarray) -> None:
        for i, strategies in self.left.items():
            choice[i] = strategies[choice[i]]


def cheapest(shared: Shared) -> np.ndarray | None:
    """A cheapest choice, [nodes] strategies, proved; memory is not limited.

    None where a table would have more than `MOST` entries, or nothing is allowed.
    """
    tables = _tables(shared)
    sizes = shared.sizes.tolist()
    around: list[set[int]] = [set() for _ in sizes]  # of each node: its tables, by number
    for n, table in enumerate(tables):
        for i in table.nodes:
            around[i].add(n)

    def scope_of(i: int) -> tuple[int, ...]:
        """The nodes that share a table with i, itself last."""
        return (*sorted({j for n in around[i] for j in tables[n].nodes} - {i}), i)

    def entries(i: int) -> int:
        return prod(sizes[j] for j in scope_of(i))

    open_, large = set(range(len(sizes))), LARGE
    steps: list[_Best | _Narrowed] = []
    queue = [(entries(i), i) for i in open_]
    heapq.heapify(queue)
    while queue:
        size, i = heapq.heappop(queue)
        if i not in open_:
            continue
        if (now := entries(i)) > size:  # it has grown since it was queued
            heapq.heappush(queue, (now, i))
            continue
        if now > large:
            large *= MORE
            steps.append(_narrow(open_, tables, around, sizes))
            queue = [(entries(j), j) for j in open_]
            heapq.heapify(queue)
            continue
        if now > MOST:
            return None
        scope = scope_of(i)
        total = np.zeros(tuple(sizes[j] for j in scope))
        for n in sorted(around[i]):
            total += _spread(tables[n], scope)
            for j in tables[n].nodes:
                around[j].discard(n)
        open_.discard(i)
        steps.append(_Best(i, scope[:-1], total.argmin(-1)))
        tables.append(Table(scope[:-1], total.min(-1)))
        for j in scope[:-1]:
            around[j].add(len(tables) - 1)
            heapq.heappush(queue, (entries(j), j))
        if len(scope) == 1 and not np.isfinite(tables[-1].costs):
            return None
    choice = np.zeros(len(sizes), np.int64)
    for step in reversed(steps):
        step.undo(choice)
    return choice


def _tables(shared: Shared) -> list[Table]:
    """Of nodes, and of edges between two that are open."""
    rest = shared.rest
    costs = np.where(rest.node_costs >= INFINITY, np.inf, rest.node_costs.astype(np.float64))
    edges = np.where(shared.tables >= INFINITY, np.inf, shared.tables.astype(np.float64))
    own = np.split(costs, rest.node_ptr[1:-1])
    sizes = shared.sizes.tolist()
    found = []
    for (i, j), at in zip(rest.edge_nodes.tolist(), shared.edge_at.tolist()):
        table = edges[at : at + sizes[i] * sizes[j]].reshape(sizes[i], sizes[j])
        if sizes[i] == 1:
            own[j] = own[j] + table[0]
        elif sizes[j] == 1:
            own[i] = own[i] + table[:, 0]
        else:
            found.append(Table((i, j), table))
    return [*(Table((i,), cost) for i, cost in enumerate(own)), *found]


def _spread(table: Table, scope: tuple[int, ...]) -> np.ndarray:
    """A table's costs with the dims of `scope`, which its nodes are among."""
    places = [scope.index(j) for j in table.nodes]
    shape = [1] * len(scope)
    for place, size in zip(places, table.costs.shape):
        shape[place] = size
    return table.costs.transpose(np.argsort(places)).reshape(shape)


def _narrow(
    nodes: set[int], tables: list[Table], around: Sequence[set[int]], sizes: list[int]
) -> _Narrowed:
    """Leave nodes the strategies that they need, in their tables and sizes."""
    left = {}
    for i in sorted(nodes):
        left[i] = _needed(i, [tables[n] for n in sorted(around[i])], sizes[i])
        sizes[i] = len(left[i])
        for n in around[i]:
            table = tables[n]
            tables[n] = Table(table.nodes, table.costs.take(left[i], table.nodes.index(i)))
    return _Narrowed(left)


def _needed(i: int, tables: Sequence[Table], count: int) -> np.ndarray:
    """Strategies of a node but those that another one replaces at no cost, whatever its neighbours
    do: dead-end elimination (Goldstein 1994)."""
    more = np.zeros((count, count))  # what [a] costs beyond [b], at least
    for table in tables:
        rows = np.moveaxis(table.costs, table.nodes.index(i), 0).reshape(count, -1)
        both = np.isinf(rows)[:, None] & np.isinf(rows)[None]
        with np.errstate(invalid="ignore"):  # what has no answer replaces nothing
            more += np.where(both, 0.0, rows[:, None] - rows[None]).min(-1)
    left = list(range(count))
    for a in range(count):
        if any(more[a, b] >= 0 for b in left if b != a):
            left.remove(a)
    return np.array(left)
