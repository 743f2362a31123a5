"""The law: a planned step computes what plain `jit` computes, in float64, after three steps."""

import jax
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.lower.state import bytes_per_device
from jaxscaler.lower.step import achieved
from models import gpt, llama, mlp

WORKLOADS = {
    "mlp": lambda: mlp.workload(dtype="float64"),
    "gpt": lambda: gpt.workload(dtype="float64", seq=16),
    "llama": lambda: llama.workload(dtype="float64", seq=16, scan=False),
    "llama-scan-remat": lambda: llama.workload(dtype="float64", seq=16, scan=True, remat=True),
}
PLANS = {
    "searched": lambda: [],
    "data": recipes.data_parallel,
    "zero3": recipes.zero,
    "tensor": recipes.tensor_parallel,
}
STEPS = 3


@pytest.fixture(scope="module", params=WORKLOADS)
def reference(request):
    """(workload, its state and metrics after three plain steps), in float64."""
    with jax.enable_x64(True):
        w = WORKLOADS[request.param]()
        state = jax.jit(w.init)(jax.random.key(0))
        step, losses = jax.jit(w.step), []
        for i in range(STEPS):
            state, metrics = step(state, w.make_batch(i))
            losses.append(float(metrics["loss"]))
        yield w, jax.tree.map(np.asarray, state), losses


@pytest.mark.parametrize("plan", PLANS)
def test_same_numbers(reference, plan):
    w, expected, losses = reference
    step = js.parallelize(w.step, cluster="cpu:8", constraints=PLANS[plan](), time_limit=20)
    state = step.init(w.init, jax.random.key(0), batch=w.batch)
    assert_bytes_as_planned(step, state)
    for i in range(STEPS):
        state, metrics = step(state, w.make_batch(i))
        np.testing.assert_allclose(float(metrics["loss"]), losses[i], rtol=1e-9, atol=1e-12)
    assert_bytes_as_planned(step, state)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected)
    ):
        np.testing.assert_allclose(
            np.asarray(got), want, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path)
        )
    compiled = step.compiled()
    assert achieved(compiled.compiled, compiled) == ()


def assert_bytes_as_planned(step, state):
    """What the plan says that state takes on a device is what its shards take."""
    planned = sum(t.bytes_per_device for t in step.plan.tensors if t.path.startswith("state/"))
    held = bytes_per_device(state)
    assert len(held) == 8
    assert all(n == planned for n in held.values())


def test_second_call_does_not_compile():
    w = mlp.workload()
    step = js.parallelize(w.step, cluster="cpu:8", constraints=recipes.data_parallel())
    state = step.init(w.init, jax.random.key(0), batch=w.batch)
    state, _ = step(state, w.make_batch(0))
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled again"))
        state, _ = step(state, w.make_batch(1))
        step(state, w.make_batch(2))


def test_one_device_is_plain_jit():
    w = mlp.workload()
    step = js.parallelize(w.step, cluster="cpu:1")
    state = step.init(w.init, jax.random.key(0), batch=w.batch)
    got, metrics = step(state, w.make_batch(0))
    want, expected = jax.jit(w.step)(jax.jit(w.init)(jax.random.key(0)), w.make_batch(0))
    assert float(metrics["loss"]) == float(expected["loss"])
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)))


def test_state_made_on_one_device_is_moved():
    """A user who made the state eagerly, on device 0, gets it moved and not an error."""
    w = mlp.workload()
    state = jax.device_put(jax.jit(w.init)(jax.random.key(0)), jax.devices()[0])
    step = js.parallelize(w.step, cluster="cpu:8", constraints=recipes.zero())
    moved, _ = step(state, w.make_batch(0))
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(moved))
