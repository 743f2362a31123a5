"""Problems in which many edges share a table, and what bounds them before they are written out.

A graph without repeated layers has thousands of edges and a few hundred different tables. Message
passing (messages.py) reads tables in place, so a bound costs little even where the problem written
out would be too large to presolve; what the bound rules out is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxscaler.solve.problem import INFINITY, StrategyProblem

_SWEEP_COST = 1e-9  # work per table entry and sweep: about seconds of one idle core
_STEPS = 5  # sweeps between two looks at the bound
_FLAT = 1e-3  # a gain of the bound, over the last two looks, that is not worth going on for


@dataclass(frozen=True)
class Shared:
    """A StrategyProblem whose edge e has its costs at `edge_at[e]` of `tables`, row-major.

    `rest` is all but those: its own `edge_ptr` and `edge_costs` are empty.
    """

    rest: StrategyProblem
    edge_at: np.ndarray  # [E]
    tables: np.ndarray

    @classmethod
    def of(cls, problem: StrategyProblem) -> Shared:
        """A problem as it is, a table per edge."""
        none = np.zeros(0, np.int64)
        rest = replace(problem, edge_ptr=none, edge_costs=none)
        return cls(rest, problem.edge_ptr[:-1], problem.edge_costs)

    @property
    def sizes(self) -> np.ndarray:
        """[num_nodes]: strategies of each node."""
        return np.diff(self.rest.node_ptr)

    def entries(self, alive: np.ndarray | None = None) -> int:
        """How many costs the edges have, written out, with the `alive` [S] strategies alone."""
        sizes = self.sizes
        if alive is not None:
            sizes = np.add.reduceat(alive.astype(np.int64), self.rest.node_ptr[:-1])
        i, j = self.rest.edge_nodes[:, 0], self.rest.edge_nodes[:, 1]
        return int((sizes[i] * sizes[j]).sum())

    def whole(self) -> StrategyProblem:
        """The problem written out: a table of its own for every edge."""
        sizes = self.sizes
        i, j = self.rest.edge_nodes[:, 0], self.rest.edge_nodes[:, 1]
        ptr = np.concatenate([[0], np.cumsum(sizes[i] * sizes[j])]).astype(np.int64)
        costs = np.empty(ptr[-1], np.int64)
        for at, lo, hi in zip(self.edge_at.tolist(), ptr[:-1].tolist(), ptr[1:].tolist()):
            costs[lo:hi] = self.tables[at : at + hi - lo]
        return replace(self.rest, edge_ptr=ptr, edge_costs=costs)

    def restricted(self, alive: np.ndarray) -> Shared:
        """The problem of the `alive` [S] strategies alone, at least one per node.

        Edges that shared a table share one still, where their ends keep the same strategies.
        """
        if alive.all():
            return self
        rest, ptr = self.rest, self.rest.node_ptr
        masks = np.split(alive, ptr[1:-1])
        kept = [np.flatnonzero(mask) for mask in masks]
        kinds: dict[bytes, int] = {}
        kind = [kinds.setdefault(mask.tobytes(), len(kinds)) for mask in masks]
        found: dict[tuple[int, int, int], int] = {}
        edge_at, tables, end = [], [], 0
        for (i, j), at in zip(rest.edge_nodes.tolist(), self.edge_at.tolist()):
            key = (at, kind[i], kind[j])
            if key not in found:
                rows, columns = len(masks[i]), len(masks[j])
                table = self.tables[at : at + rows * columns].reshape(rows, columns)
                tables.append(table[np.ix_(kept[i], kept[j])].ravel())
                found[key], end = end, end + tables[-1].size
            edge_at.append(found[key])
        sizes = np.array([len(k) for k in kept], np.int64)
        spread = np.diff(rest.usage_ptr)  # which strategy each usage is of
        strategy = np.arange(rest.usage_ptr[-1]) if len(spread) else np.zeros(0, np.int64)
        strategy = strategy + np.repeat(ptr[:-1][rest.usage_node] - rest.usage_ptr[:-1], spread)
        smaller = replace(
            rest,
            node_ptr=np.concatenate([[0], np.cumsum(sizes)]),
            node_costs=rest.node_costs[alive],
            usage_ptr=np.concatenate([[0], np.cumsum(sizes[rest.usage_node])]).astype(np.int64),
            usages=rest.usages[alive[strategy]],
        )
        joined = np.concatenate(tables) if tables else np.zeros(0, np.int64)
        return Shared(smaller, np.array(edge_at, np.int64), joined)


@dataclass(frozen=True)
class Screened:
    """What a few sweeps prove: no choice costs less than `bound`, nor, with strategy s, `floor[s]`.

    `prices`: the multipliers, cost per usage, of the memory rows that bind, by row. They serve as a
    start for another problem with the same usage intervals.
    """

    bound: int
    floor: np.ndarray  # [S]
    prices: Mapping[int, float]

    def alive(self, upper: int | None) -> np.ndarray:
        """Mask [S] of the strategies that a choice cheaper than `upper` may use."""
        return self.floor < (INFINITY if upper is None else upper)


def screen(
    shared: Shared,
    *,
    upper: int | None = None,
    goal: int | None = None,
    work: float = 0.25,
    most: float = 2.5,
    prices: Mapping[int, float] | None = None,
) -> Screened:
    """Bound a problem by multipliers and message passing on its shared tables.

    Ends when the bound reaches `upper`, above which nothing is of interest; else after `work`,
    about seconds of an idle core but counted, when it has reached `goal` or hardly rises; else
    after `most`. `prices`: the multipliers to begin from.
    """
    # Imported where they are needed: compiled code, which a problem does without.
    from jaxscaler.solve.kernel import from_problem
    from jaxscaler.solve.multipliers import ascend, by_row, start_multipliers
    from jaxscaler.solve.presolve.arcs import supported

    size = len(shared.rest.node_costs)
    kernel = from_problem(
        replace(
            shared.rest,
            edge_ptr=np.append(shared.edge_at, len(shared.tables)),
            edge_costs=shared.tables,
        )
    )
    alive = supported(kernel)
    if not alive.all():  # what no choice can use, messages must not meet
        if not np.logical_or.reduceat(alive, kernel.node_ptr[:-1]).all():
            return Screened(INFINITY, np.full(size, INFINITY), {})
        inner = screen(shared.restricted(alive), upper=upper, goal=goal, work=work, most=most,
                       prices=prices)  # fmt: skip
        floor = np.full(size, INFINITY)
        floor[alive] = inner.floor
        return replace(inner, floor=floor)
    state = start_multipliers(kernel, dict(prices) if prices else None)
    one = _SWEEP_COST * 2 * shared.entries() + 1e-4
    spent, bounds = 0.0, [kernel.offset]
    while not (state.settled or state.rounded):
        ascend(state, _STEPS, upper, lambda choice, usage: None)
        spent += _STEPS * one
        bounds.append(state.cost_bound())
        if upper is not None and bounds[-1] >= upper:
            break
        flat = len(bounds) > 3 and bounds[-1] - bounds[-3] <= _FLAT * abs(bounds[-1])
        if spent >= most or (spent >= work and (flat or (goal is not None and bounds[-1] >= goal))):
            break
    shift, floor = state.messages.shift, state.floor
    known = np.where(np.isfinite(floor), np.ceil(np.ldexp(floor, -shift)), 0).astype(np.int64)
    floor = np.where(floor == np.inf, INFINITY, known + kernel.offset)
    return Screened(bounds[-1], floor, by_row(state))
