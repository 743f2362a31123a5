"""CP-SAT on a kernel: one Boolean per strategy, edges as clauses over cost levels.

An edge's costs (row and column minima are already in the nodes) have levels l_1 < l_2 < … above 0;
Boolean y_n says "at least l_n is paid", with price l_n - l_(n-1). For row a and a level that occurs
in it: x_a implies y_n or one of the columns that are cheaper. Forbidden pairs are such a clause
without y. This propagates like the table itself, with few variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit

from jaxscaler import cp_model
from jaxscaler.solve.kernel import FORBIDDEN, Kernel

WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """What one CP-SAT call learnt.

    choice: the best one found (None: none). bound: no choice that satisfies the rows given costs
    less. closed: the search ended by itself, so nothing cheaper than `choice` (or than the upper
    bound asked for) satisfies those rows.
    """

    choice: np.ndarray | None
    bound: int
    closed: bool
    work: float  # deterministic seconds


def solve_exact(
    kernel: Kernel,
    rows: np.ndarray,
    *,
    upper: int | None = None,
    hint: np.ndarray | None = None,
    seed: int = 0,
    work: float = float("inf"),
    seconds: float = float("inf"),
    found: Callable[[np.ndarray], None] | None = None,
) -> Outcome:
    """Least cost choice below `upper` of the kernel with only the memory `rows` listed.

    hint: a choice [num_nodes] to start from. work: limit in CP-SAT's deterministic seconds.
    found: called with each better choice.
    """
    model = _model(kernel, rows, upper, hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.interleave_search = True  # deterministic with several workers
    solver.parameters.symmetry_level = 0
    solver.parameters.random_seed = seed % 2**31
    if work < float("inf"):
        solver.parameters.max_deterministic_time = work
    if seconds < float("inf"):
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    watcher = _watcher(kernel, found) if found else None
    status = solver.solve(model, watcher)
    response = solver.response_proto
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(f"CP-SAT refused the model: {model.validate()}")
    none_left = status == cp_model.INFEASIBLE
    has = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    # costs of a normalised kernel are at least 0, whatever CP-SAT has found out
    bound = kernel.offset + max(int(response.inner_objective_lower_bound), 0)
    if none_left:
        bound = upper if upper is not None else FORBIDDEN
    return Outcome(
        choice=_choice(kernel, np.array(response.solution, np.int64)) if has else None,
        bound=bound,
        closed=none_left or status == cp_model.OPTIMAL,
        work=float(response.deterministic_time),
    )


def literals_needed(kernel: Kernel) -> int:
    """About how many literals the clauses of the model would hold."""
    columns = kernel.sizes[kernel.edge_nodes[:, 1]]
    return int((np.diff(kernel.edge_ptr) * (columns // 2 + 2)).sum())


def _watcher(
    kernel: Kernel, found: Callable[[np.ndarray], None]
) -> cp_model.CpSolverSolutionCallback:
    class Watcher(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            values = np.array(self.response_proto.solution, np.int64)
            found(_choice(kernel, values))

    return Watcher()


def _choice(kernel: Kernel, values: np.ndarray) -> np.ndarray:
    at = np.flatnonzero(values[: len(kernel.costs)])
    return at - kernel.node_ptr[:-1]


def _model(
    kernel: Kernel, rows: np.ndarray, upper: int | None, hint: np.ndarray | None
) -> cp_model.CpModel:
    level_ptr, prices, clause_ptr, literals, chosen_level = _clauses(
        kernel.node_ptr, kernel.edge_nodes, kernel.edge_ptr, kernel.edge_costs,
        np.zeros(kernel.num_nodes, np.int64) if hint is None else hint,
    )  # fmt: skip
    strategies, levels = len(kernel.costs), int(level_ptr[-1])
    model = cp_model.CpModel()
    proto = model.proto
    for _ in range(strategies + levels):
        proto.variables.add().domain.extend((0, 1))
    constraints = proto.constraints
    for a, b in zip(kernel.node_ptr[:-1].tolist(), kernel.node_ptr[1:].tolist()):
        constraints.add().exactly_one.literals.extend(range(a, b))
    ends, flat = clause_ptr.tolist(), literals.tolist()
    for a, b in pairwise(ends):
        constraints.add().bool_or.literals.extend(flat[a:b])
    coefficients = np.concatenate([kernel.costs, prices])
    priced = np.flatnonzero(coefficients)
    if (kernel.costs >= FORBIDDEN).any():
        raise AssertionError("the kernel must be arc consistent")
    for r in rows.tolist():
        entries = np.flatnonzero((kernel.use_lo <= r) & (r < kernel.use_hi))
        sizes = np.diff(kernel.use_ptr)[entries]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        usage = kernel.usages[np.repeat(kernel.use_ptr[:-1][entries], sizes) + within]
        variable = np.repeat(kernel.node_ptr[:-1][kernel.use_node[entries]], sizes) + within
        _at_most(proto, variable[usage > 0], usage[usage > 0], int(kernel.caps[r]))
    if upper is not None:
        _at_most(proto, priced, coefficients[priced], upper - 1 - kernel.offset)
    proto.objective.vars.extend(priced.tolist())
    proto.objective.coeffs.extend(coefficients[priced].tolist())
    if hint is not None:
        x = np.zeros(strategies, np.int64)
        x[kernel.node_ptr[:-1] + hint] = 1
        proto.solution_hint.vars.extend(range(strategies + levels))
        proto.solution_hint.values.extend(np.concatenate([x, chosen_level]).tolist())
    return model


def _at_most(proto, variables: np.ndarray, coefficients: np.ndarray, most: int) -> None:
    linear = proto.constraints.add().linear
    linear.vars.extend(variables.tolist())
    linear.coeffs.extend(coefficients.tolist())
    linear.domain.extend((-(2**62), most))


@njit(cache=True)
def _clauses(node_ptr, nodes, edge_ptr, tables, hint):
    """Level variables and clauses of all edges, flat.

    Variables: strategies first, then levels, edge after edge; literal -1 - v is "not v".
    Returns (level_ptr [E + 1], prices [levels], clause_ptr, literals, levels that `hint` pays).
    """
    strategies = node_ptr[-1]
    level_ptr = np.zeros(len(nodes) + 1, np.int64)
    prices = np.empty(len(tables), np.int64)
    paid = np.zeros(len(tables), np.int64)
    clause_ptr = np.zeros(2 * len(tables) + 1, np.int64)
    room = 0
    for e in range(len(nodes)):
        kj = node_ptr[nodes[e, 1] + 1] - node_ptr[nodes[e, 1]]
        room += (edge_ptr[e + 1] - edge_ptr[e]) * (kj + 3)
    literals = np.empty(room, np.int32)
    clauses, filled = 0, 0
    for e in range(len(nodes)):
        i, j = nodes[e]
        ki, kj = node_ptr[i + 1] - node_ptr[i], node_ptr[j + 1] - node_ptr[j]
        table = tables[edge_ptr[e] : edge_ptr[e + 1]].reshape((ki, kj))
        distinct = np.unique(table)
        levels = distinct[(distinct > 0) & (distinct < FORBIDDEN)]
        base = level_ptr[e]
        level_ptr[e + 1] = base + len(levels)
        below = 0
        for n in range(len(levels)):
            prices[base + n] = levels[n] - below
            below = levels[n]
            paid[base + n] = table[hint[i], hint[j]] >= levels[n]
            if n:  # a level is paid only on top of the one below
                literals[filled] = -1 - (strategies + base + n)
                literals[filled + 1] = strategies + base + n - 1
                filled += 2
                clauses += 1
                clause_ptr[clauses] = filled
        for a in range(ki):
            order = np.argsort(table[a])
            for q in range(kj):
                cost = table[a, order[q]]
                if cost == 0 or (q and table[a, order[q - 1]] == cost):
                    continue
                literals[filled] = -1 - (node_ptr[i] + a)
                filled += 1
                if cost < FORBIDDEN:
                    literals[filled] = strategies + base + np.searchsorted(levels, cost)
                    filled += 1
                for p in range(q):
                    literals[filled] = node_ptr[j] + order[p]
                    filled += 1
                clauses += 1
                clause_ptr[clauses] = filled
    total = level_ptr[-1]
    return (
        level_ptr, prices[:total].copy(), clause_ptr[: clauses + 1].copy(),
        literals[:filled].copy(), paid[:total].copy(),
    )  # fmt: skip
