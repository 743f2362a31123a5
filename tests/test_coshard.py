"""Loops over parts in whole plans: found where memory binds, priced, and with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler.cluster import Cluster
from jaxscaler.graph.build import build
from jaxscaler.loops.options import batch_of
from jaxscaler.planner import plan_step
from jaxscaler.rewrite.candidates import candidates
from jaxscaler.rewrite.changes import Accumulate, CoShard, Segment, overlap
from jaxscaler.trace import trace
from models import gpt
from models.workload import cross_entropy


def marked(work):
    """The workload's step, its loss marked for the planner."""

    def step(state, batch):
        def loss(params):
            outputs = state.apply_fn({"params": params}, batch["inputs"])
            return cross_entropy(outputs, batch["targets"])

        value, grads = js.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


@pytest.fixture(scope="module")
def traced():
    work = gpt.workload(layers=3, batch=32, seq=32)
    return trace(marked(work), work.state, work.batch)


def test_candidates(traced):
    """The head by its tokens, and each of the layers by heads, tokens and samples."""
    (loss,) = traced.losses
    found = candidates(traced.losses, [])
    assert {c.size for c in found} >= {32}
    graph = build(traced)
    positions = [i for i, _ in batch_of(graph, 0, loss)]
    arguments = (*loss.constvars, *loss.invars)
    assert [arguments[i].aval.shape for i in positions] == [(32, 32), (32, 32)]


def test_less_memory(traced):
    """Gradients in four parts of the batch: fewer activations at once."""
    cluster = Cluster.parse("v100-32:2")
    loops = (Accumulate(0, 4, batch_of(build(traced), 0, traced.losses[0]), 2),)
    plain = plan_step(traced, cluster).plan
    taken = plan_step(traced, cluster, loops=loops).plan
    assert (plain.changes, taken.changes) == ((), loops)
    activations = [dict(p.predicted.memory)["activation"] for p in (plain, taken)]
    assert activations[1] < 0.7 * activations[0]


def test_same_numbers_on_eight_devices(tmp_path, devices):
    with jax.enable_x64(True):
        work = gpt.workload(layers=1, batch=16, seq=16, dtype="float64")
        step = marked(work)
        traced = trace(step, work.state, work.batch)
        (loss,) = traced.losses
        head = max(
            i
            for i, e in enumerate(loss.eqns)
            if e.primitive.name == "dot_general" and e.outvars[0].aval.shape == (16, 16, 256)
        )
        batch = batch_of(build(traced), 0, loss)
        loops = (
            CoShard(Segment(0, head, len(loss.eqns) - 1), (head, 0, 1), 4),
            Accumulate(0, 2, batch, 8),
        )
        plan = plan_step(traced, Cluster.parse("cpu:8"), loops=loops).plan
        assert set(loops) <= set(plan.changes)
        plan.save(tmp_path / "plan.json")
        planned = js.parallelize(step, cluster="cpu:8", plan=tmp_path / "plan.json")
        state = planned.init(work.init, jax.random.key(0), batch=work.batch)
        got, metrics = planned(state, work.make_batch(0))
        want, expected = jax.jit(work.step)(
            jax.jit(work.init)(jax.random.key(0)), work.make_batch(0)
        )
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-9, atol=1e-12)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(jnp.asarray(a), b, rtol=1e-9, atol=1e-12)


def test_overlap():
    layer, body = Segment(0, 2, 5), Segment(0, 0, 9, (4, 0))
    assert overlap(layer, body) and overlap(body, layer)
    assert overlap(layer, Segment(0, 5, 6)) and not overlap(layer, Segment(0, 6, 7))
    assert not overlap(body, Segment(0, 0, 9, (5, 0))) and not overlap(layer, Segment(1, 2, 5))
