"""Steps as users of flax.linen and of plain pytrees write them; same numbers as plain `jit`."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.lower.state import bytes_per_device

PLANS = {"searched": list, "zero3": recipes.zero, "tensor": recipes.tensor_parallel}
STEPS = 3
WIDTH, HIDDEN, BATCH, LAYERS = 16, 32, 8, 4
Dense = partial(nn.Dense, param_dtype=jnp.float64)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((BATCH, WIDTH)) for k in ("x", "y")}


def squared_error(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def parallel(step, plan="zero3", **options):
    constraints = PLANS[plan]()
    return js.parallelize(step, cluster="cpu:8", constraints=constraints, time_limit=20, **options)


def run(step, *state):
    """State and losses after three steps that return (*state, loss)."""
    losses = []
    for i in range(STEPS):
        *state, loss = step(*state, make_batch(i))
        losses.append(float(loss))
    return state, losses


def assert_same(got, want):
    leaves, treedef = jax.tree.flatten_with_path(got)
    assert treedef.num_leaves == jax.tree.structure(want).num_leaves
    for (path, a), b in zip(leaves, jax.tree.leaves(want)):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path)
        )


def assert_planned_as_plain(init, step, plan="zero3"):
    """The numbers of plain `jit`; the planned step."""
    want, losses = run(jax.jit(step), jax.jit(init)(jax.random.key(0)))
    planned = parallel(step, plan)
    state = planned.init(init, jax.random.key(0), batch=make_batch())
    got, planned_losses = run(planned, state)
    np.testing.assert_allclose(planned_losses, losses, rtol=1e-9, atol=1e-12)
    assert_same(got, want)
    size = sum(t.bytes_per_device for t in planned.plan.tensors if t.path.startswith("state/"))
    assert set(bytes_per_device(got).values()) == {size}
    return planned


def roles(planned):
    graph = planned.planned.graph
    return {graph.values[v].path: graph.values[v].role for v in graph.inputs}


# --- flax.linen -------------------------------------------------------------------------------


class Normed(nn.Module):
    """No bias before the norm: its gradient is exactly zero, and Adam would amplify rounding."""

    @nn.compact
    def __call__(self, x):
        x = Dense(HIDDEN, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)(x)
        return Dense(WIDTH)(nn.Dropout(0.1, deterministic=False)(nn.gelu(x)))


class NormedState(TrainState):
    batch_stats: Any
    key: jax.Array


def init_normed(rng):
    variables = Normed().init(rng, jnp.zeros((1, WIDTH)))
    variables = jax.tree.map(jnp.float64, variables)  # linen keeps statistics in f32 at first
    return NormedState.create(
        apply_fn=Normed().apply, tx=optax.adamw(1e-2), key=jax.random.key(7), **variables
    )


def step_normed(state, batch):
    def loss_fn(params):
        out, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.fold_in(state.key, state.step)},
        )
        return squared_error(out, batch), updates["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@pytest.mark.parametrize("plan", ["zero3", *(pytest.param(p, marks=pytest.mark.slow) for p in
                                             ("searched", "tensor"))])  # fmt: skip
def test_batch_stats_and_dropout_in_the_train_state(plan):
    planned = assert_planned_as_plain(init_normed, step_normed, plan)
    found = roles(planned)
    assert found["state/key"] == "rng"
    assert found["state/params/Dense_0/kernel"] == "parameter"
    assert found["state/opt_state/0/mu/Dense_0/kernel"] == "optimizer"


def test_a_state_whose_types_the_step_changes():
    """The statistics come back in float64: `jit` compiles again for the second call, so do we."""

    def init(rng):
        state = init_normed(rng)
        return state.replace(batch_stats=jax.tree.map(jnp.float32, state.batch_stats))

    want, losses = run(jax.jit(step_normed), jax.jit(init)(jax.random.key(0)))
    planned = parallel(step_normed)
    got, planned_losses = run(planned, planned.init(init, jax.random.key(0), batch=make_batch()))
    np.testing.assert_allclose(planned_losses, losses, rtol=1e-9, atol=1e-12)
    assert_same(got, want)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        drop = nn.Dropout(0.1, deterministic=False)
        return x + drop(Dense(WIDTH)(nn.gelu(Dense(HIDDEN)(x)))), None


class Scanned(nn.Module):
    """`nn.scan` over `nn.remat` blocks: parameters [layers, ...], a random stream per layer."""

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return blocks(name="blocks")(x, None)[0]


def linen_step(state, batch):
    def loss_fn(params):
        rngs = {"dropout": jax.random.fold_in(jax.random.key(3), state.step)}
        return squared_error(state.apply_fn({"params": params}, batch["x"], rngs=rngs), batch)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def linen_init(model, rng):
    params = model.init(rng, jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


@pytest.mark.parametrize("plan", ["tensor", *(pytest.param(p, marks=pytest.mark.slow) for p in
                                              ("searched", "zero3"))])  # fmt: skip
def test_scan_and_remat(plan):
    planned = assert_planned_as_plain(partial(linen_init, Scanned()), linen_step, plan)
    kernel = next(t for t in planned.plan.tensors if t.path == "state/params/blocks/Dense_0/kernel")
    assert kernel.shape[0] == LAYERS
    assert kernel.spec[0] == ()  # every device runs every layer


class Boxed(nn.Module):
    """Logical axes on parameters and activations; no rules and no mesh are given."""

    @nn.compact
    def __call__(self, x):
        up = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        down = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        x = nn.gelu(Dense(HIDDEN, kernel_init=up)(x))
        x = nn.with_logical_constraint(x, ("batch", "mlp"))
        return Dense(WIDTH, kernel_init=down)(x)


def test_logical_axes_boxes():
    """The boxes stay on the leaves, in the state and in its moments."""
    init = partial(linen_init, Boxed())
    planned = assert_planned_as_plain(init, linen_step)
    found = roles(planned)
    assert found["state/params/Dense_0/kernel/value"] == "parameter"
    assert found["state/opt_state/0/mu/Dense_0/kernel/value"] == "optimizer"
    state = planned.init(init, jax.random.key(0))
    assert isinstance(state.params["Dense_0"]["kernel"], nn.LogicallyPartitioned)


# --- plain pytrees ----------------------------------------------------------------------------

TX = optax.adam(1e-2)


def init_params(rng):
    up, down = jax.random.split(rng)
    return {
        "up": 0.2 * jax.random.normal(up, (WIDTH, HIDDEN)),
        "down": 0.2 * jax.random.normal(down, (HIDDEN, WIDTH)),
    }


def init_apart(rng):
    params = init_params(rng)
    return params, TX.init(params)


def forward(params, batch):
    return jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"]


def step_apart(params, opt_state, batch):
    """Parameters and optimizer state are arguments of their own."""
    loss, grads = jax.value_and_grad(lambda p: squared_error(forward(p, batch), batch))(params)
    updates, opt_state = TX.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def test_state_in_several_arguments():
    want, losses = run(jax.jit(step_apart), *init_apart(jax.random.key(0)))
    planned = parallel(step_apart)
    state = planned.init(init_apart, jax.random.key(0), batch=make_batch())
    assert type(state) is tuple and len(state) == 2
    got, planned_losses = run(planned, *state)
    np.testing.assert_allclose(planned_losses, losses, rtol=1e-9, atol=1e-12)
    assert_same(got, want)
    assert planned.compiled().donate == (0, 1)
    assert roles(planned)["opt_state/0/mu/up"] == "optimizer"
    assert roles(planned)["params/up"] == "parameter"


def test_a_state_that_is_a_tuple_is_one_argument():
    def step(state, batch):
        *state, loss = step_apart(*state, batch)
        return tuple(state), loss

    planned = assert_planned_as_plain(init_apart, step)
    assert planned.planned.traced.arg_names == ("state", "batch")


def test_metrics_and_predictions_beside_the_state():
    """A prediction of the parameters' or the batch's type is not mistaken for them."""

    def step(params, batch):
        def loss_fn(params):
            out = forward(params, batch)
            return squared_error(out, batch), {"out": out, "norms": jax.tree.map(jnp.abs, params)}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return {"aux": aux, "loss": loss}, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = jax.jit(init_params)(jax.random.key(0))
    metrics, want = jax.jit(step)(params, make_batch())
    planned = parallel(step)
    got_metrics, got = planned(params, make_batch())
    assert_same((got_metrics, got), (metrics, want))
    graph = planned.planned.graph
    assert [graph.output_paths[o] for _, o in graph.state] == ["1/down", "1/up"]
    assert roles(planned)["batch/x"] == "batch"


def test_a_reconstruction_is_no_new_batch():
    """It has the batch's type, and stands where the batch stands among the arguments."""

    def step(params, x):
        def loss_fn(params):
            out = forward(params, {"x": x})
            return jnp.mean((out - x) ** 2), out

        grads, out = jax.grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), out

    planned = parallel(step)
    planned(jax.jit(init_params)(jax.random.key(0)), x := jnp.array(make_batch()["x"]))
    assert roles(planned)["x"] == "batch"
    assert not x.is_deleted()


@pytest.mark.parametrize("donated", [(), (1,), (0, 1)])
def test_jitted_step_keeps_its_options(donated):
    @partial(jax.jit, donate_argnums=donated, static_argnames=("halve", "power"))
    def step(params, opt_state, batch, halve=False, *, power):
        scale = 0.5**power if halve else 1.0
        return step_apart(params, opt_state, {**batch, "y": scale * batch["y"]})

    state = init_apart(jax.random.key(0))
    want = step(*jax.tree.map(jnp.copy, state), make_batch(), halve=True, power=2)
    planned = parallel(step)
    state = planned(*state, make_batch(), halve=True, power=2)[:2]
    assert_same(state, want[:2])
    assert planned.compiled().donate == donated
    planned(*state, make_batch(), halve=True, power=2)
    deleted = tuple(
        i for i in (0, 1) if all(leaf.is_deleted() for leaf in jax.tree.leaves(state[i]))
    )
    assert deleted == donated
    with pytest.raises(js.PlanError, match="static"):
        planned(*want[:2], make_batch(), halve=False, power=2)


def test_state_committed_to_devices_makes_no_other_program():
    """A step is traced on types: where the arrays lie today is not part of it."""

    def step(state, batch):
        key, noise = jax.random.split(state["key"])
        batch = {**batch, "x": batch["x"] + jax.random.normal(noise, (BATCH, WIDTH))}
        params, opt, loss = step_apart(state["params"], state["opt"], batch)
        return {"key": key, "params": params, "opt": opt}, loss

    def init(rng):
        params, opt = init_apart(rng)
        return {"key": jax.random.key(1), "params": params, "opt": opt}

    planned = parallel(step)
    state = planned.init(init, jax.random.key(0), batch=make_batch())
    again = parallel(step)
    again(jax.tree.map(jnp.copy, state), make_batch())
    assert again.plan.fingerprint == planned.plan.fingerprint


# --- roles ------------------------------------------------------------------------------------


def step_with_frozen(trained, frozen, batch):
    """Parameters that are only read are, by data flow, no state: a batch looks the same."""

    def loss_fn(trained):
        return squared_error(forward({**trained, **frozen}, batch), batch)

    loss, grads = jax.value_and_grad(loss_fn)(trained)
    return jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads), loss


def test_roles_can_be_said():
    params = jax.jit(init_params)(jax.random.key(0))
    trained, frozen = {"down": params["down"]}, {"up": params["up"]}
    want, _ = jax.jit(step_with_frozen)(trained, frozen, make_batch())

    found = parallel(step_with_frozen, "searched")
    found(trained, frozen, make_batch())
    assert roles(found)["frozen/up"] == "batch"

    trained = {"down": jnp.copy(jax.jit(init_params)(jax.random.key(0))["down"])}
    said = parallel(step_with_frozen, roles={"*": "batch", "frozen/*": "parameter",
                                             "trained/*": "parameter"})  # fmt: skip
    got, _ = said(trained, frozen, make_batch())
    assert roles(said) == {
        "trained/down": "parameter", "frozen/up": "parameter",
        "batch/x": "batch", "batch/y": "batch",
    }  # fmt: skip
    assert_same(got, want)
    up = next(t for t in said.plan.tensors if t.path == "frozen/up")
    assert up.role == "parameter"
    assert up.bytes_per_device * 8 == frozen["up"].nbytes  # ZeRO-3 splits it at rest


def test_roles_hold_for_a_plan_that_is_followed(tmp_path):
    said = {"frozen/*": "parameter"}
    params = jax.jit(init_params)(jax.random.key(0))
    args = {"down": params["down"]}, {"up": params["up"]}, make_batch()
    plan = js.plan(step_with_frozen, *args, cluster="cpu:8", constraints=recipes.zero(), roles=said)
    plan.save(tmp_path / "plan.json")
    follows = js.parallelize(step_with_frozen, plan=tmp_path / "plan.json", roles=said)
    follows(*args)
    assert follows.plan.digest() == plan.digest()
    assert roles(follows)["frozen/up"] == "parameter"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"frozen/*": "weights"}, "no role 'weights'.*parameter, optimizer, batch, rng"),
        ({"frosen/*": "parameter"}, r"'frosen/\*' matches no argument.*frozen/up"),
    ],
)
def test_roles_that_can_not_be_are_refused(wrong, message):
    params = init_params(jax.random.key(0))
    args = {"down": params["down"]}, {"up": params["up"]}, make_batch()
    with pytest.raises(js.ConstraintError, match=message):
        parallel(step_with_frozen, roles=wrong)(*args)
