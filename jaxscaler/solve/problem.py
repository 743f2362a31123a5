"""The planner's optimisation problem as plain arrays: one strategy per node, least total cost.

The shape of the public IOPDDL benchmark (node costs, edge costs, a usage limit at every moment over
live intervals), a little wider: a node may have several usage entries, each with its own interval.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

INFINITY = 10**18  # a cost that forbids


@dataclass(frozen=True)
class StrategyProblem:
    """Choose one strategy per node.

    cost = Σ node_costs + Σ edge_costs; for every t: Σ of usages whose interval holds t is at most
    usage_limit.
    All arrays are int64. Strategies of node i are `node_ptr[i]:node_ptr[i+1]` of `node_costs`.
    Edge e joins `edge_nodes[e] = (i, j)`; its costs, row-major [k_i, k_j], are
    `edge_costs[edge_ptr[e]:edge_ptr[e+1]]`. Parallel edges add up. Usage entry u belongs to node
    `usage_node[u]`, is live in [`usage_lo[u]`, `usage_hi[u]`), and takes
    `usages[usage_ptr[u]:usage_ptr[u+1]]` (one number per strategy of its node).
    """

    name: str
    node_ptr: np.ndarray
    node_costs: np.ndarray
    edge_nodes: np.ndarray  # [E, 2]
    edge_ptr: np.ndarray
    edge_costs: np.ndarray
    usage_node: np.ndarray
    usage_lo: np.ndarray
    usage_hi: np.ndarray
    usage_ptr: np.ndarray
    usages: np.ndarray
    usage_limit: int | None = None  # None: no limit

    @property
    def num_nodes(self) -> int:
        return len(self.node_ptr) - 1


@dataclass(frozen=True)
class Solution:
    """An answer. `choice[i]` is node i's strategy, counted from 0.

    status: "optimal" (proved), "feasible" (a gap is left), "infeasible" (proved), "unknown" (no
    answer in time), "bounded" (proved: nothing is below the upper bound asked for). `bound` <= the
    least cost; gap = (cost - bound) / cost.
    """

    status: str
    choice: np.ndarray | None
    cost: int | None
    bound: int
    seconds: float
    peak_usage: int | None = None
    trace: tuple[tuple[float, int | None, int], ...] = ()  # (seconds, incumbent, bound)
    statistics: dict = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Relative gap between cost and bound; 0 when proved, inf with no answer."""
        if self.cost is None:
            return float("inf")
        return max(0.0, (self.cost - self.bound) / max(abs(self.cost), 1))
