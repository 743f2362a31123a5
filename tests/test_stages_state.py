"""State in a pipeline's life, in both lowerings: init, checkpoints, averages, metrics, nnx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from test_ring import perceptron

import jaxscaler as js
from jaxscaler.errors import PlanError
from jaxscaler.pipeline.step import Rows

SIZE, LAYERS, BATCH = 8, 4, 16
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def init(key):
    """Parameters, an optimizer, a moving average of the parameters."""
    _, make, _ = perceptron(LAYERS, BATCH, SIZE)
    params = make(key)["params"]
    return {"params": params, "opt": TX.init(params), "ema": jax.tree.map(jnp.copy, params)}


def step(state, batch):
    def loss(params):
        x = batch["inputs"] @ params["in"]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        error = x @ params["out"] - batch["targets"]
        return jnp.mean(jnp.square(error)), {"worst": jnp.mean(jnp.abs(error))}

    (value, aux), grads = js.value_and_grad(loss, has_aux=True)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], params)
    metrics = {"loss": value, "norm": optax.tree.norm(grads), **aux}
    return {"params": params, "opt": opt, "ema": ema}, metrics


def batches(count):
    rng = np.random.default_rng(0)
    shapes = {"inputs": (BATCH, SIZE), "targets": (BATCH, 4)}
    return [{k: rng.standard_normal(s) for k, s in shapes.items()} for _ in range(count)]


@functools.cache
def pipelined(lowering):
    options = dict(cluster="cpu:4", stages=2, micro_batches=4, time_limit=10)
    if lowering == "one program":
        options |= dict(one_program=True, cache=False)
    run = js.parallelize(step, **options)
    run.plan_for(init, jax.random.key(0), batch=batches(1)[0])
    return run


def whole(x):
    return x.whole() if isinstance(x, Rows) else np.asarray(x)


def close(got, want):
    got = jax.tree.map(whole, got, is_leaf=lambda x: isinstance(x, Rows))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("lowering", ["executor", "one program"])
def test_a_life(lowering, devices, tmp_path):
    """Two steps, a checkpoint, one more step from what was restored; functions on the state."""
    run, given = pipelined(lowering), batches(3)
    state, want = run.init(init, jax.random.key(0)), jax.jit(init)(jax.random.key(0))
    close(state, want)
    for batch in given[:2]:
        state, metrics = run(state, batch)
        want, expected = jax.jit(step)(want, batch)
        close(metrics, expected)
    close(state, want)

    norm = run.jit(optax.tree.norm)
    close(norm(state["params"]), optax.tree.norm(want["params"]))
    averaged = run.jit(lambda s: jax.tree.map(lambda e, p: (e + p) / 2, s["ema"], s["params"]))
    ema = averaged(state)
    close(ema, jax.tree.map(lambda e, p: (e + p) / 2, want["ema"], want["params"]))
    for a, b in zip(jax.tree.leaves(ema), jax.tree.leaves(state["params"]), strict=True):
        assert a.sharding.device_set == b.sharding.device_set

    wanted = run.abstract_state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", wanted)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)
    state, metrics = run(restored, given[2])
    want, expected = jax.jit(step)(want, given[2])
    close(metrics, expected)
    close(state, want)


def test_from_one_lowering_to_the_other(devices):
    here, there = pipelined("executor"), pipelined("one program")
    (batch,) = batches(1)
    state, _ = here(here.init(init, jax.random.key(0)), batch)
    moved = there.place(jax.tree.map(jnp.asarray, here.gather(state)))
    back = here.place(jax.tree.map(np.asarray, moved))
    for made in (there(moved, batch), here(back, batch)):
        want = jax.jit(step)(jax.jit(step)(jax.jit(init)(jax.random.key(0)), batch)[0], batch)
        close(made, want)


def test_what_functions_on_the_state_take(devices):
    run = pipelined("executor")
    state = run.init(init, jax.random.key(0))
    strange = jax.device_put(jnp.zeros(4), jax.devices()[-1])
    with pytest.raises(PlanError, match="are of no stage: place it first"):
        run.jit(lambda s, x: optax.tree.norm(s) + x.sum())(state["params"], strange)
    scaled = run.jit(lambda s, c: jax.tree.map(lambda x: c * x, s))(state["params"], 2.0)
    close(scaled, jax.tree.map(lambda x: 2 * x, jax.jit(init)(jax.random.key(0))["params"]))


class Net(nnx.Module):
    def __init__(self, rngs):
        for n in range(LAYERS):
            setattr(self, f"layer_{n}", nnx.Linear(SIZE, SIZE, rngs=rngs, param_dtype=jnp.float64))

    def __call__(self, x):
        for n in range(LAYERS):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(getattr(self, f"layer_{n}")(x))
        return x


class Stacked(nnx.Module):
    """The same layers as rows of one array, and a scan over them."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def layers(rngs):
            return nnx.Linear(SIZE, SIZE, rngs=rngs, param_dtype=jnp.float64)

        self.layers = layers(rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.layers)
        one = jax.lax.scan(lambda x, s: (jnp.tanh(nnx.merge(graph, s)(x)), None), x, state)
        return one[0]


def train(model, optimizer, batch):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        found = nnx.merge(graph, params, rest)(batch["inputs"])
        return jnp.mean(jnp.square(found - batch["targets"]))

    value, grads = js.value_and_grad(loss)(params)
    optimizer.update(model, grads)
    return value


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Net, {}),
        pytest.param(Stacked, {}, marks=pytest.mark.slow),
        pytest.param(Stacked, {"one_program": True, "cache": False}, marks=pytest.mark.slow),
    ],
)
def test_a_step_on_objects(kind, options, devices):
    def made():
        model = kind(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    rng = np.random.default_rng(0)
    batch = {k: rng.standard_normal((BATCH, SIZE)) for k in ("inputs", "targets")}
    options = dict(cluster="cpu:2", micro_batches=2, stages=2, time_limit=10, **options)
    run = js.parallelize(train, **options)
    model, optimizer = run.init(made, batch=batch)
    plain, theirs = made()
    for _ in range(2):
        close(run(model, optimizer, batch), nnx.jit(train)(plain, theirs, batch))
    states = [jax.tree.leaves(nnx.state(x), is_leaf=lambda x: isinstance(x, Rows))
              for x in (model, plain)]  # fmt: skip
    close(*states)
    used = set().union(*(x.sharding.device_set for x in jax.tree.leaves(nnx.state(model))))
    assert len(used) == 2
