"""From steps to op graphs: structure, phases, roles, loops, repeated layers, names of factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscaler.cost.memory import live_buffers
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import BACKWARD, CARRY, FORWARD, JOIN, SLICE, STACK, UPDATE
from jaxscaler.graph.labels import factor_labels
from jaxscaler.trace import trace
from models import gpt, llama, mlp

WORKLOADS = {
    "mlp": lambda: mlp.workload(),
    "gpt": lambda: gpt.workload(),
    "gpt-remat-dropout": lambda: gpt.workload(remat=True, dropout=0.1),
    "llama": lambda: llama.workload(scan=False),
    "llama-scan": lambda: llama.workload(scan=True),
    "llama-scan-remat": lambda: llama.workload(scan=True, remat=True),
}


@pytest.fixture(scope="module", params=WORKLOADS, name="graph")
def graph_of_a_workload(request):
    w = WORKLOADS[request.param]()
    return build(trace(w.step, w.state, w.batch))


def graph_of(step, *args):
    graph = build(trace(step, *args))
    graph.verify()
    return graph


def primitives(graph):
    return [graph.kinds[op.kind].primitive for op in graph.ops]


def test_graph_is_well_formed(graph):
    graph.verify()
    assert not graph.notes


def test_phases_follow_each_other(graph):
    heavy = [op.phase for op in graph.ops if "heavy" in graph.kinds[op.kind].traits]
    assert set(heavy) == {FORWARD, BACKWARD}
    assert heavy.index(BACKWARD) == heavy.count(FORWARD)  # every forward product comes first
    phases = [op.phase for op in graph.ops]
    assert set(phases[len(phases) - phases[::-1].index(BACKWARD) :]) == {UPDATE}


def test_roles(graph):
    roles = {}
    for v in graph.inputs:
        value = graph.values[v]
        roles.setdefault(value.role, []).append(value.path)
    assert all(p.startswith("state/params/") for p in roles["parameter"])
    assert all(
        "/mu/" in p or "/nu/" in p or p.endswith(("count", "step")) for p in roles["optimizer"]
    )
    assert sorted(roles["batch"]) == ["batch/inputs", "batch/targets"]
    assert 2 * len(roles["parameter"]) == len(
        [p for p in roles["optimizer"] if "/mu/" in p or "/nu/" in p]
    )


def test_new_state_is_written_in_place_of_the_old(graph):
    made = {v for op in graph.ops for v in op.outputs}
    new = {graph.outputs[o] for _, o in graph.state}
    assert {graph.values[v].role for v in new & made} == {"donated"}
    rest = {v for o, v in enumerate(graph.outputs) if o not in {o for _, o in graph.state}}
    assert {graph.values[v].role for v in rest & made} == {"output"}


def test_rematerialised_regions_are_marked():
    w = gpt.workload(remat=True)
    graph = build(trace(w.step, w.state, w.batch))
    assert len(graph.regions) >= 2
    for region in graph.regions:
        phases = {op.phase for op in graph.ops[region.first : region.last + 1]}
        assert region.what == "remat" and phases <= {FORWARD, BACKWARD}


def test_scopes_are_module_paths():
    w = gpt.workload()
    graph = build(trace(w.step, w.state, w.batch))
    scopes = {op.scope for op in graph.ops if op.phase == BACKWARD}
    assert any(s.endswith("h_1/attn/qkv") for s in scopes)
    assert not any("jvp" in s or "transpose" in s for s in scopes)
    assert all("gpt.py" in op.source or "workload.py" in op.source for op in graph.ops
               if "heavy" in graph.kinds[op.kind].traits)  # fmt: skip


def test_scan_becomes_markers():
    def step(w, x):
        def body(c, wi):
            c = jnp.tanh(c @ wi)
            return c, c.sum()

        return jax.lax.scan(body, x, w)

    graph = graph_of(step, jnp.zeros((5, 4, 4)), jnp.zeros((3, 4)))
    names = primitives(graph)
    assert names.count(CARRY) == names.count(SLICE) == names.count(STACK) == 1
    assert [loop.trips for loop in graph.loops] == [5]
    dot = next(op for op in graph.ops if graph.kinds[op.kind].primitive == "dot_general")
    assert dot.repeat == 5
    carry = next(op for op in graph.ops if graph.kinds[op.kind].primitive == CARRY)
    tanh = next(op for op in graph.ops if graph.kinds[op.kind].primitive == "tanh")
    assert carry.inputs[1] == tanh.outputs[0]  # what the body makes is the next carry


def test_cond_joins_its_branches():
    def step(p, x):
        return jax.lax.cond(p, lambda x: x * 2, lambda x: x + 1, x)

    graph = graph_of(step, True, jnp.zeros((4,)))
    join = next(op for op in graph.ops if graph.kinds[op.kind].primitive == JOIN)
    assert len(join.inputs) == 2


def test_while_is_priced_once_and_says_so():
    def step(x):
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, x)

    graph = graph_of(step, jnp.zeros((4,)))
    assert any("while" in note for note in graph.notes)


@pytest.mark.parametrize("layers", [6, 9])
def test_equal_layers_fold_to_three(layers):
    """First, inner and last layer have classes of their own; more layers add none."""

    def classes(n):
        w = gpt.workload(layers=n)
        graph = build(trace(w.step, w.state, w.batch))
        return graph, fold(graph)

    graph, folded = classes(layers)
    assert folded.num_classes == classes(5)[1].num_classes
    for c, o in enumerate(folded.representatives):
        members = np.flatnonzero(folded.op_class == c)
        assert {graph.ops[m].kind for m in members} == {graph.ops[o].kind}
        assert {graph.ops[m].phase for m in members} == {graph.ops[o].phase}
        assert len(members) == folded.multiplicity[c]


def test_state_of_equal_layers_folds_with_its_layer():
    w = gpt.workload(layers=6)
    graph = build(trace(w.step, w.state, w.batch))
    folded = fold(graph)
    groups = {}
    for v in graph.inputs:
        groups.setdefault(int(folded.value_class[v]), []).append(graph.values[v].path)
    inner = [sorted(g) for g in groups.values() if any("params/h_2/up/kernel" in p for p in g)]
    (members,) = inner
    assert all("/up/kernel" in p for p in members) and len(members) == 4
    with_mu = [g for g in groups.values() if any("mu/h_2/attn/out/kernel" in p for p in g)]
    assert all("/mu/" in p and "/attn/out/kernel" in p for p in with_mu[0])


def test_unmerged_keeps_every_op():
    w = gpt.workload()
    graph = build(trace(w.step, w.state, w.batch))
    assert fold(graph, merge=False).num_classes == len(graph.ops)


def test_batch_factor_is_named_everywhere():
    w = gpt.workload()
    graph = build(trace(w.step, w.state, w.batch))
    folded = fold(graph)
    labels = factor_labels(graph, folded)
    for c, o in enumerate(folded.representatives):
        op = graph.ops[o]
        kind = graph.kinds[op.kind]
        if kind.primitive == "dot_general":
            assert "batch" in labels[c].values(), op
            f = next(f for f, name in labels[c].items() if name == "batch")
            assert kind.rule.factors[f].size == w.batch["inputs"].shape[0]


def test_buffers_of_a_plain_product():
    """The products have buffers; the sum before the second has one because that reads it."""

    def step(w1, w2, x):
        return (jnp.tanh(x @ w1) + 1.0) @ w2

    graph = graph_of(step, jnp.zeros((8, 16)), jnp.zeros((16, 4)), jnp.zeros((2, 8)))
    lives = live_buffers(graph, fold(graph))
    shapes = [graph.values[v].shape for v in lives.value]
    makers = {v: graph.kinds[op.kind].primitive for op in graph.ops for v in op.outputs}
    assert [makers[v] for v in lives.value] == ["dot_general", "add", "dot_general"]
    assert shapes == [(2, 16), (2, 16), (2, 4)]


def test_stacked_residuals_live_through_the_loop():
    w = llama.workload(scan=True)
    graph = build(trace(w.step, w.state, w.batch))
    lives = live_buffers(graph, fold(graph))
    stacks = {op.outputs[0]: op for op in graph.ops if graph.kinds[op.kind].primitive == STACK}
    alive = dict(zip(lives.value.tolist(), zip(lives.lo.tolist(), lives.hi.tolist())))
    residuals = [v for v in alive if v in stacks and stacks[v].phase == FORWARD]
    assert residuals
    for v in residuals:
        assert alive[v][1] - alive[v][0] > 1


def test_dead_code_is_no_op():
    """The derivative of a maximum that is stopped: traced, and left out, as XLA does."""
    x = jax.ShapeDtypeStruct((8, 16), "float32")
    traced = trace(lambda x: jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2))(x), x)
    graph = build(traced)
    read = {v for op in graph.ops for v in op.inputs} | set(graph.outputs)
    assert all(any(v in read for v in op.outputs) for op in graph.ops)
    assert sum(graph.kinds[op.kind].primitive == "reduce_max" for op in graph.ops) == 1
