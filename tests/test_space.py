"""The plan space: nodes, strategies, prices. Whatever is chosen, the parts add up to the price."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import candidate_meshes
from jaxscaler.cost.memory import live_buffers
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import PASS, Factor
from jaxscaler.graph.labels import factor_labels
from jaxscaler.report import describe
from jaxscaler.solve import evaluate, least_memory, solve
from jaxscaler.space import problem as spaces
from jaxscaler.space import strategies as st
from jaxscaler.space.build import build_space
from jaxscaler.space.nodes import Node, Port
from jaxscaler.space.price import price
from jaxscaler.trace import trace
from models import gpt, llama, mlp


def model_of(step, *args, merge=True):
    graph = build(trace(step, *args))
    folded = fold(graph, merge)
    space = build_space(graph, folded, factor_labels(graph, folded))
    return spaces.model(graph, folded, space, live_buffers(graph, folded))


def priced_on(model, cluster="cpu:8", mesh=-1, limit=None):
    cluster = Cluster.parse(cluster)
    mesh = candidate_meshes(cluster)[mesh]
    return price(model, mesh, cluster.device, limit), cluster


def test_strategies_are_all_divisible_assignments():
    node = Node("n", "op", (Factor(4, PASS), Factor(6, PASS), Factor(1, PASS)),
                (Port(((0,), (1,), (2,))),))  # fmt: skip
    rows = {tuple(r) for r in st.strategies(node, (2, 4))}
    expected = set()
    for a, b in itertools.product((-1, 0, 1), repeat=2):
        parts = {0: 1, 1: 1}
        for f, n in ((a, 2), (b, 4)):
            if f >= 0:
                parts[f] *= n
        if 4 % parts[0] == 0 and 6 % parts[1] == 0:
            expected.add((a, b))
    assert rows == expected


def test_a_minor_factor_is_never_cut():
    """[B, S, heads*dim]: cutting the merged dim 8 ways would cut 2 heads 4 ways each."""
    node = Node("reshape", "op", (Factor(8, PASS), Factor(2, PASS), Factor(16, PASS)),
                (Port(((0,), (1, 2))), Port(((0,), (1,), (2,)))))  # fmt: skip
    assert st.splittable(node) == [0, 1]
    assert all(2 not in row for row in st.strategies(node, (2, 4)))


def test_paired_state_is_read_in_a_coarser_layout():
    node = Node("w", "state", (Factor(8, PASS), Factor(8, PASS)),
                (Port(((0,), (1,))),) * 2, paired=True)  # fmt: skip
    for row in st.strategies(node, (2, 2)):
        rest, use = row[:2], row[2:]
        assert all(u in (-1, r) for r, u in zip(rest, use))


WORKLOADS = {
    "mlp": lambda: mlp.workload(),
    "gpt": lambda: gpt.workload(),
    "llama-scan": lambda: llama.workload(scan=True),
}


@pytest.fixture(scope="module", params=WORKLOADS, name="priced")
def priced_workload(request):
    w = WORKLOADS[request.param]()
    priced, cluster = priced_on(model_of(w.step, w.state, w.batch))
    return priced, cluster


@settings(max_examples=15)
@given(seed=hs.integers(0, 2**32 - 1))
def test_any_choice_is_priced_as_its_parts(priced, seed):
    """Compute + every collective = the problem's cost (simulated devices hide nothing)."""
    priced, cluster = priced
    rng = np.random.default_rng(seed)
    choice = np.array([rng.integers(len(r)) for r in priced.strategies])
    cost, peak, _ = evaluate(priced.problem, choice)
    if cost >= 10**18:
        return
    predicted = describe.prediction(priced, choice, cluster.device, 1e12)
    moved = sum(t.seconds for t in describe.traffic(priced, choice, cluster.device))
    n = len(priced.problem.node_costs) + len(priced.problem.edge_nodes)
    assert predicted.compute + moved == pytest.approx(predicted.seconds, abs=2 * n * priced.unit)
    rows, _ = describe.peak_memory(priced, choice)
    assert rows - priced.model.fixed_bytes == pytest.approx(peak, rel=1e-6, abs=1e3)


def test_replicated_choice_costs_no_communication(priced):
    priced, cluster = priced
    choice = np.zeros(len(priced.strategies), np.int64)  # strategy 0 is "whole"
    assert all((r[0] == st.UNUSED).all() for r in priced.strategies)
    assert {t.kind for t in describe.traffic(priced, choice, cluster.device)} == {"feed"}


def small_step(w1, w2, x):
    def loss(ws):
        return jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    grads = jax.grad(loss)((w1, w2))
    return jax.tree.map(lambda w, g: w - 0.1 * g, (w1, w2), grads)


def test_solution_is_the_brute_force_optimum():
    """A small step whose whole plan space can be enumerated."""

    def step(w, x):
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * g

    model = model_of(step, jnp.zeros((16, 64)), jnp.zeros((8, 16)))
    priced, _ = priced_on(model, mesh=0)
    sizes = [len(r) for r in priced.strategies]
    assert np.prod(sizes) < 3_000_000
    grids = np.array(np.meshgrid(*[np.arange(k) for k in sizes], indexing="ij")).reshape(
        len(sizes), -1
    )
    p = priced.problem
    total = p.node_costs[p.node_ptr[:-1, None] + grids].sum(axis=0)
    for e, (i, j) in enumerate(p.edge_nodes):
        width = p.node_ptr[j + 1] - p.node_ptr[j]
        total = total + p.edge_costs[p.edge_ptr[e] + grids[i] * width + grids[j]]
    found = solve(p)
    assert found.status == "optimal"
    assert found.cost == total.min()


def test_merging_layers_only_restricts():
    """A merged optimum is a plan of the unmerged space too: never cheaper, here within 1 %."""
    w = mlp.workload(pairs=5)
    costs = []
    for merge in (True, False):
        priced, _ = priced_on(model_of(w.step, w.state, w.batch, merge=merge), mesh=0)
        found = solve(priced.problem)
        assert found.status == "optimal"
        costs.append(found.cost * priced.unit)
    assert costs[1] <= costs[0] * (1 + 1e-6)
    assert costs[0] <= costs[1] * 1.01


def test_state_that_only_its_update_touches_lies_as_it_is_computed():
    w = mlp.workload(tx=optax.adam(1e-3))
    model = model_of(w.step, w.state, w.batch)
    names = [node.name for node in model.space.nodes if node.what == "state"]
    assert not any("kernel" in n and ("/mu/" in n or "/nu/" in n) for n in names)
    rests = {model.graph.values[v].path for v in model.graph.inputs
             if int(model.folded.value_class[v]) in model.space.rest}  # fmt: skip
    assert any("/mu/" in p for p in rests)  # but it has a layout: the update's


def test_memory_limit_is_respected_and_binds():
    w = mlp.workload(width=256, hidden=1024)
    model = model_of(w.step, w.state, w.batch)
    priced, _ = priced_on(model, mesh=0)
    free = solve(priced.problem)
    assert free.status == "optimal"
    least, _ = least_memory(priced.problem)
    assert least < free.peak_usage
    tight = replace(priced.problem, usage_limit=(least + free.peak_usage) // 2)
    found = solve(tight, time_limit=60)
    assert found.choice is not None and found.peak_usage <= tight.usage_limit
    assert found.cost >= free.cost
