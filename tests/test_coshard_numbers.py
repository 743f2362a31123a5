"""The same numbers on eight devices from loops over parts, together with all that may be beside
them: recomputation, accumulation, fission, and the factor itself cut by the mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler import ALL, Split, op_trans, ops
from jaxscaler.cluster import Cluster
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.loops.options import Pick, options
from jaxscaler.planner import plan_step
from jaxscaler.rewrite.changes import Accumulate, CoShard, Fission, Recompute, around
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import trace
from models import llama, moe, swin
from models.workload import cross_entropy

BY_SAMPLES = op_trans(ops(phase=("forward", "backward")), Split("batch"), ALL)
MODELS = {
    "swin": lambda: swin.workload(batch=16, dtype="float64"),
    "swin scan": lambda: swin.workload(batch=16, dtype="float64", scan=True, depths=(4, 2)),
    "llama scan": lambda: llama.workload(layers=4, batch=16, seq=16, dtype="float64", scan=True),
    "moe": lambda: moe.workload(layers=2, batch=16, dtype="float64"),
}


def marked(work, loss_of):
    """The workload's step, its loss marked for the planner."""

    def step(state, batch):
        def loss(params):
            outputs = state.apply_fn({"params": params}, batch["inputs"])
            return loss_of(outputs, batch["targets"])

        value, grads = js.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


def balanced(outputs, targets):
    """The loss of a mixture of experts: it reads what balances them too."""
    logits, balance = outputs
    return cross_entropy(logits, targets) + 0.01 * balance


def parts_of(traced, kind, parts, lanes=1):
    """The largest co-shards that do not overlap, in so many parts, and what they leave."""
    graph = build(traced)
    segments = segmentations(graph, fold(graph))[0]
    found, loops = [], []
    for option in options(traced, graph, segments, []):
        if isinstance(option.changes(2, 1, None)[0], kind) and option.size % (parts * lanes) == 0:
            made = Pick(option, parts).changes(lanes)
            if not any(around(a, [b]) != [a] for a in option.segments for b in loops):
                found += made
                loops += option.segments
    again = [Recompute(piece) for s in segments for piece in around(s, loops)]
    return found, again


def run(model, changes_in, constraints=()):
    """Plan a step with changes on eight devices, run it, compare it with plain `jit`."""
    with jax.enable_x64(True):
        work = MODELS[model]()
        step = marked(work, balanced if model == "moe" else cross_entropy)
        traced = trace(step, work.state, work.batch)
        assert traced.losses
        changes = changes_in(traced)
        cluster = Cluster.parse("cpu:8")
        plan = plan_step(traced, cluster, loops=changes, constraints=constraints).plan
        assert set(changes) <= set(plan.changes)
        planned = js.parallelize(step, cluster="cpu:8", plan=plan)
        state = planned.init(work.init, jax.random.key(0), batch=work.batch)
        got, metrics = planned(state, work.make_batch(0))
        plain = jax.jit(work.step)
        want, expected = plain(jax.jit(work.init)(jax.random.key(0)), work.make_batch(0))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-9, atol=1e-12)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(jnp.asarray(a), b, rtol=1e-8, atol=1e-11)


def with_recomputation(traced):
    loops, again = parts_of(traced, CoShard, 2)
    assert loops and again
    return [*loops, *again]


def by_the_sharded_factor(traced):
    """The batch of 16 on 8 devices: two parts, each in a lane per device."""
    loops, _ = parts_of(traced, CoShard, 2, lanes=8)
    assert loops
    return loops


def with_accumulation(traced):
    accumulation, _ = parts_of(traced, Accumulate, 2, lanes=4)
    loops, again = parts_of(traced, CoShard, 2)
    assert accumulation and loops
    return [*accumulation, *loops, *again]


def in_a_piece(traced):
    """A scan cut in two; the loop is in its second piece alone."""
    loops, again = parts_of(traced, CoShard, 2)
    inside = [c for c in (*loops, *again) if c.segment.inside]
    assert any(isinstance(c, CoShard) for c in inside)
    scan = inside[0].segment.inside[0]
    length = traced.losses[0].eqns[scan].params["length"]
    mine = [c for c in inside if c.segment.inside[0] == scan]
    return [Fission(0, scan, (1, length - 1), (1,)), *mine]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes", "constraints"),
    [
        ("swin", with_recomputation, ()),
        ("moe", with_recomputation, ()),
        ("swin", by_the_sharded_factor, [BY_SAMPLES]),
        ("moe", by_the_sharded_factor, [BY_SAMPLES]),
        ("swin", with_accumulation, ()),
        ("llama scan", with_accumulation, ()),
        ("llama scan", in_a_piece, ()),
        ("swin scan", in_a_piece, ()),
    ],
)
def test_same_numbers(model, changes, constraints, devices):
    run(model, changes, constraints)


def test_experts_share_a_batch():
    """What balances the experts couples the samples: no accumulation, for the op that does."""
    work = moe.workload(layers=1, batch=16)
    traced = trace(marked(work, balanced), work.state, work.batch)
    refused: list[str] = []
    found = list(options(traced, build(traced), (), refused))
    assert not [o for o in found if not o.again]
    assert any(re.search(r"no gradient accumulation: `\w+` at .*moe\.py", text) for text in refused)
