"""Which groups of a problem's demands cannot hold together: CP-SAT with an assumption per group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxscaler import cp_model
from jaxscaler.solve.kernel import FORBIDDEN, Kernel, from_problem
from jaxscaler.solve.problem import StrategyProblem

WORK = 20.0  # deterministic seconds of one answer
ROWS = 400  # moments of memory that are looked at: the fullest


def conflict(
    problem: StrategyProblem, groups: Sequence[np.ndarray], seed: int = 0
) -> tuple[int, ...] | None:
    """Indices of groups that no feasible choice satisfies together; None if all can hold.

    A group is a bool [strategies of all nodes]: what it allows. Costs count only where they forbid.
    The groups returned are enough for a conflict, not always the fewest; none of them: nothing is
    feasible whatever the groups. None too where no answer is found in `WORK`.
    """
    kernel = from_problem(problem)
    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in range(len(kernel.costs))]
    for a, b in zip(kernel.node_ptr[:-1].tolist(), kernel.node_ptr[1:].tolist()):
        model.add_exactly_one(chosen[a:b])
    for s in np.flatnonzero(kernel.costs >= FORBIDDEN).tolist():
        model.add(chosen[s] == 0)
    _forbid_pairs(model, chosen, kernel)
    _limit_memory(model, chosen, kernel)
    assumed = [model.new_bool_var("") for _ in groups]
    for literal, allowed in zip(assumed, groups, strict=True):
        for s in np.flatnonzero(~allowed).tolist():
            model.add_bool_or([literal.negated(), chosen[s].negated()])
    model.add_assumptions(assumed)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = WORK
    if solver.solve(model) != cp_model.INFEASIBLE:
        return None
    core = set(solver.sufficient_assumptions_for_infeasibility())
    return tuple(g for g, literal in enumerate(assumed) if literal.index in core)


def _forbid_pairs(model: cp_model.CpModel, chosen: list, kernel: Kernel) -> None:
    """A strategy implies one of those that an edge does not forbid beside it."""
    for e, (i, j) in enumerate(kernel.edge_nodes.tolist()):
        a, b = int(kernel.node_ptr[i]), int(kernel.node_ptr[j])
        width = int(kernel.node_ptr[j + 1]) - b
        first, height = int(kernel.edge_ptr[e]), int(kernel.node_ptr[i + 1]) - a
        table = kernel.edge_costs[first : first + height * width].reshape(height, width)
        bad = table >= FORBIDDEN
        for s in np.flatnonzero(bad.any(axis=1)).tolist():
            beside = [chosen[b + t] for t in np.flatnonzero(~bad[s]).tolist()]
            model.add_bool_or([chosen[a + s].negated(), *beside])


def _limit_memory(model: cp_model.CpModel, chosen: list, kernel: Kernel) -> None:
    """The memory rows that even the choice of most usage could break, the fullest ones first."""
    if not len(kernel.use_node):
        return
    most = np.zeros(len(kernel.caps) + 1, np.int64)
    largest = np.maximum.reduceat(kernel.usages, kernel.use_ptr[:-1])
    np.add.at(most, kernel.use_lo, largest)
    np.subtract.at(most, kernel.use_hi, largest)
    full = np.cumsum(most)[:-1]
    tight = np.flatnonzero(full > kernel.caps)
    for r in tight[np.argsort(-full[tight], kind="stable")][:ROWS].tolist():
        variables, amounts = [], []
        for u in np.flatnonzero((kernel.use_lo <= r) & (r < kernel.use_hi)).tolist():
            first = int(kernel.node_ptr[kernel.use_node[u]])
            used = kernel.usages[kernel.use_ptr[u] : kernel.use_ptr[u + 1]]
            for s in np.flatnonzero(used).tolist():
                variables.append(chosen[first + s])
                amounts.append(int(used[s]))
        model.add(cp_model.LinearExpr.weighted_sum(variables, amounts) <= int(kernel.caps[r]))
