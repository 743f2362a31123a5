"""Pipelines in one program through the front door: found, followed, fitted into memory, refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ring import assert_same_numbers, perceptron

import jaxscaler as js
from jaxscaler.cluster import Cluster
from jaxscaler.errors import InfeasibleError, PlanError, RewriteError
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.pipeline.one_program import _body, _on_stages, _rings, plan_one_program
from jaxscaler.plan import Plan
from jaxscaler.planner import plan_step
from jaxscaler.rewrite.changes import Accumulate, Recompute, Ring
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import trace


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def pipelined(step, **options):
    options = {"cluster": "cpu:8", "micro_batches": 4, "stages": 2, "cache": False, **options}
    return js.parallelize(step, one_program=True, time_limit=10, **options)


def traced_of(**sizes):
    step, init, batch = perceptron(**sizes)
    return trace(step, jax.eval_shape(init, jax.random.key(0)), jax.eval_shape(lambda: batch))


def parts(plan, path):
    """Into how many parts each dim of an argument is cut at rest."""
    sizes = dict(plan.axes)
    (spec,) = (t.spec for t in plan.tensors if t.path == path)
    return [int(np.prod([sizes[a] for a in dim], initial=1)) for dim in spec]


def test_no_one_calls_rings(devices, tmp_path):
    step, init, batch = perceptron()
    run = pipelined(step)
    state = run.init(init, jax.random.key(0), batch=batch)
    want, plain = jax.jit(init)(jax.random.key(0)), jax.jit(step)
    for _ in range(2):
        state, metrics = run(state, batch)
        want, expected = plain(want, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-9)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-9, atol=1e-12)
    (change,) = (c for c in run.plan.changes if isinstance(c, Ring))
    assert (change.stages, change.micro) == (2, 4)
    assert parts(run.plan, "state/params/layers")[0] == 2
    run.plan.save(tmp_path / "plan.json")
    assert_same_numbers(step, init, batch, Plan.load(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    "numbers", [(4, 16, 2, 2), pytest.param((8, 64, 4, 6), marks=pytest.mark.slow)]
)
def test_more_is_made_again_where_memory_is_short(numbers):
    """Less memory, and still a plan: what the backward pass keeps shrinks, and rounds come in."""
    layers, batch, micro, count = numbers
    traced = traced_of(layers=layers, batch=batch, size=16)
    cluster, found = Cluster.parse("cpu:4"), []
    memory = 1.0
    for _ in range(count):
        try:
            options = dict(stages=2, micro=micro, memory=memory, time_limit=5)
            found.append(plan_one_program(traced, cluster, **options).plan)
        except InfeasibleError:
            break
        peak = found[-1].predicted.peak_bytes
        assert peak <= memory * cluster.device.hbm_bytes
        memory = 0.9 * peak / cluster.device.hbm_bytes
    assert len(found) > 1
    first, last = (
        [c for c in plan.changes if not isinstance(c, Ring) or c.again]
        for plan in (found[0], found[-1])
    )
    assert not first and {type(c) for c in last} <= {Recompute, Accumulate, Ring}
    assert last
    # with room for all nothing else is tried, though what is made again may be a little faster
    seconds = [plan.predicted.seconds for plan in found]
    assert all(b > 0.99 * a for a, b in itertools.pairwise(seconds))


def test_a_loss_without_parts_has_one_round():
    """One that is no sum over samples: layers are made again where memory is short, and no more."""
    _, init, batch = perceptron(4, 16, 16)

    def step(state, batch):
        def loss(params):
            x = batch["inputs"] @ params["in"]
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
            return jnp.log(jnp.sum(jnp.square(x @ params["out"] - batch["targets"])))

        value, grads = js.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    state = jax.eval_shape(init, jax.random.key(0))
    traced, cluster = trace(step, state, jax.eval_shape(lambda: batch)), Cluster.parse("cpu:4")
    options = dict(stages=2, micro=4, time_limit=5)
    peak = plan_one_program(traced, cluster, **options).plan.predicted.peak_bytes
    tight = plan_one_program(
        traced, cluster, memory=0.9 * peak / cluster.device.hbm_bytes, **options
    )
    assert any(isinstance(c, Recompute) for c in tight.plan.changes)
    assert not any(isinstance(c, Accumulate) for c in tight.plan.changes)


def test_layers_are_segments_in_rounds_too():
    """What a search may make again is the scan's body, whatever loops are around it."""
    traced = traced_of()
    scan = next(i for i, e in enumerate(traced.losses[0].eqns) if e.primitive.name == "scan")
    loss = traced.losses[0]
    batch = tuple((i, 0) for i, v in enumerate((*loss.constvars, *loss.invars))
                  if v.aval.shape[0] == 16)  # fmt: skip
    around = (Ring(0, scan, 2, 2, again=False), Accumulate(0, 2, batch))
    for changes in ((), around[:1], around[1:], around):
        graph = build(traced.changed(changes))
        (segments, *_) = segmentations(graph, fold(graph))
        assert [s.inside for s in segments if s.inside] == [(scan, 0)]


@pytest.mark.slow
def test_same_numbers_in_rounds(devices):
    """Accumulation around the pipeline, stages and their layers made again."""
    step, init, batch = perceptron()
    traced = traced_of()
    found = _rings(traced, 2, 4, 2, [])
    bodies = [_body(traced, c) for c in found if isinstance(c, Ring)]
    lines = [_on_stages(2)]
    plan = plan_step(
        traced, Cluster.parse("cpu:8"), loops=(*found, *bodies), constraints=lines, time_limit=10
    ).plan
    assert {type(c) for c in plan.changes} == {Ring, Accumulate, Recompute}
    assert_same_numbers(step, init, batch, plan)


def test_refusals():
    step, init, batch = perceptron()
    for options, says in (
        ({"schedule": "1f1b"}, "all forward ticks before all backward ticks"),
        ({"submeshes": (2, 6)}, "submeshes= is not for a pipeline in one program"),
        ({"loops": False}, "loops= is not for"),
        ({"stages": None}, "needs its number of stages"),
    ):
        with pytest.raises(PlanError, match=says):
            pipelined(step, **options)
    with pytest.raises(RewriteError, match=r"can be a pipeline.*4 layers do not divide into 3"):
        pipelined(step, stages=3).plan_for(init, jax.random.key(0), batch=batch)

    def unmarked(state, batch):
        return jax.tree.map(lambda x: x * batch["inputs"].sum(), state)

    with pytest.raises(PlanError, match=r"jaxscaler\.value_and_grad"):
        pipelined(unmarked).plan_for(init, jax.random.key(0), batch=batch)
