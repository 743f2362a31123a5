"""The search over meshes: bounds before problems are written out, the same optimum with less work.

Each mesh searched alone, on its whole problem, is the oracle.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from solve_problems import all_choices, random_problem

from jaxscaler import planner, search
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.solve import INFINITY, evaluate, solve
from jaxscaler.solve.shared import Shared, screen
from jaxscaler.space.price import tabulate
from jaxscaler.trace import trace
from models import gpt, mlp

CASES = {  # workload, cluster, share of the memory that the plan with no limit takes
    "mlp, nodes": (lambda: mlp.workload(), "h100:8x4", 1.0),
    "mlp, torus": (lambda: mlp.workload(batch=64), "v5e:4x4", 1.0),
    "mlp, little memory": (lambda: mlp.workload(), "h100:4x2", 0.7),
    "gpt, torus": (lambda: gpt.workload(layers=1, hidden=32, vocab=64), "v5e:4x4", 1.0),
}


@cache
def session(case):
    """All that a search on a case is given."""
    make, cluster, share = CASES[case]
    workload = make()
    traced = trace(workload.step, workload.state, workload.batch)
    plan = planner.plan_step(traced, Cluster.parse(cluster)).plan
    return replace(plan.session, best=None, limit=share * plan.predicted.peak_bytes + 1)


def tables(case):
    """The problem of every mesh of a case."""
    s = session(case)
    for variant in s.variants(s.bind(s.program)):
        yield tabulate(s.model, variant.mesh, s.cluster.device, int(s.limit), variant.keep)


def count(monkeypatch, name):
    """How often the search calls a function."""
    calls, original = [], getattr(search, name)

    def counted(*args, **options):
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(search, name, counted)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_meshes_together_give_the_optimum_of_each_alone(case, monkeypatch):
    given = session(case)
    solved = count(monkeypatch, "solve")
    found = given.search()
    calls = len(solved)
    alone = [(solve(tabled.shared.whole()).cost, tabled.unit) for tabled in tables(case)]
    least = min(cost * unit for cost, unit in alone if cost is not None)
    assert found.best.seconds == pytest.approx(least, rel=1e-8)
    assert found.status == "optimal" and found.lower <= least * (1 + 1e-8)
    assert calls <= len(found.tried) == len(alone)
    if CASES[case][2] == 1.0:  # memory does not bind: bounds alone rule some out
        assert calls < len(alone)
    again = session(case).search()
    assert again.tried == found.tried and (again.best.choice == found.best.choice).all()


def test_wide_problems_are_searched_among_their_most_promising_strategies(monkeypatch):
    case = "gpt, torus"
    best = session(case).search().best
    monkeypatch.setattr(search, "WIDE", 2000)
    monkeypatch.setattr(search, "CLOSE", 0.0)
    solved = count(monkeypatch, "solve")
    found = session(case).search()
    assert found.status == "feasible"
    assert found.lower <= best.seconds * (1 + 1e-8)
    assert found.best.seconds >= best.seconds * (1 - 1e-8)
    assert all(len(problem.edge_costs) <= 2000 for problem, *_ in solved)


def test_a_wide_mesh_that_is_close_to_the_best_is_left_alone(monkeypatch):
    monkeypatch.setattr(search, "WIDE", 0)
    monkeypatch.setattr(search, "CLOSE", 1.0)
    tried = session("gpt, torus").search().tried
    assert {status for _, status, _ in tried[1:]} <= {"close", "bounded"}


def test_a_plan_is_one_of_a_finer_mesh_too():
    coarse, *finer = tables("mlp, nodes")
    found = solve(coarse.shared.whole())
    known = search.Best(coarse.priced(), found.choice, 0.0, None)
    assert (search.same_choice(known, coarse) == found.choice).all()
    for fine in finer:
        choice = search.same_choice(known, fine)
        owner = [0, 0, 1] if fine.mesh.names[0] == "node0" else [0, 1, 1]
        for rows, before, a, b in zip(fine.strategies, coarse.strategies, choice, found.choice):
            halves = before[b].reshape(-1, 2)
            assert (rows[a].reshape(-1, 3) == halves[:, owner]).all()
        assert evaluate(fine.shared.whole(), choice)[0] < INFINITY
        assert search.same_choice(search.Best(fine.priced(), choice, 0.0, None), coarse) is None


@pytest.mark.parametrize("seed", range(6))
def test_screening_proves_bounds_of_problems_and_strategies(seed):
    """On small problems, by enumeration: nothing is below a bound, and what is kept is enough."""
    rng = np.random.default_rng(seed)
    for _ in range(25):
        problem = random_problem(rng)
        shared = sharing(problem)
        sizes, whole = np.diff(problem.node_ptr), shared.whole()
        for field in ("node_costs", "edge_ptr", "edge_costs", "usages"):
            np.testing.assert_array_equal(getattr(whole, field), getattr(problem, field))
        screened = screen(shared, work=0.0005)
        choices = all_choices(sizes)
        valued = [(evaluate(problem, choice), choice) for choice in choices]
        feasible = [(cost, choice) for (cost, _, fits), choice in valued if fits]
        assert all(cost >= screened.bound for cost, _ in feasible)
        for cost, choice in feasible:
            assert cost >= screened.floor[problem.node_ptr[:-1] + choice].max()
        if not feasible:
            continue
        cost, choice = min(feasible, key=lambda item: item[0])
        alive = screened.alive(cost + 1)
        kept = np.flatnonzero(alive)
        part = shared.restricted(alive)
        local = np.searchsorted(kept, problem.node_ptr[:-1] + choice) - part.rest.node_ptr[:-1]
        assert evaluate(part.whole(), local) == evaluate(problem, choice)
        assert part.entries() == shared.entries(alive) == len(part.whole().edge_costs)


def sharing(problem):
    """A problem whose equal tables of one shape are one."""
    shared, at, tables, end = Shared.of(problem), {}, [], 0
    edge_at = []
    for (i, _), lo, hi in zip(problem.edge_nodes, problem.edge_ptr[:-1], problem.edge_ptr[1:]):
        table = problem.edge_costs[lo:hi]
        key = (problem.node_ptr[i + 1] - problem.node_ptr[i], table.tobytes())
        if key not in at:
            tables.append(table)
            at[key], end = end, end + len(table)
        edge_at.append(at[key])
    joined = np.concatenate(tables) if tables else np.zeros(0, np.int64)
    return Shared(shared.rest, np.array(edge_at, np.int64), joined)
