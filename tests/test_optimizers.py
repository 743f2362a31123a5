"""Optimizers need no special case: their state is planned by data flow, whatever optax makes of it.

Every one trains a small model for three steps under a plan and under plain `jit`, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.lower.state import bytes_per_device
from jaxscaler.lower.step import achieved
from jaxscaler.program import ALL, Split, op_trans, ops, values
from jaxscaler.verify.hlo import read_hlo
from jaxscaler.verify.normal_form import COLLECTIVES
from models import gpt

PLANS = {"searched": list, "zero3": recipes.zero, "tensor": recipes.tensor_parallel}
STEPS = 3
WIDTH, HIDDEN, BATCH = 16, 32, 8
DECAY = 0.9


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def schedule():
    return optax.linear_schedule(1e-2, 0.0, 10)


OPTIMIZERS = {
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), mask=matrices),
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule()),
    "inject_adafactor": lambda: optax.inject_hyperparams(
        optax.adafactor, static_args=("min_dim_size_to_factor", "factored")
    )(learning_rate=schedule(), min_dim_size_to_factor=8),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2)}, labels
    ),
    # eps: the rounding of a gradient that is exactly zero (attention's key bias) stays rounding
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9, eps=1e-16),
    "adafactor_unfactored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=1024),
    "lion": lambda: optax.lion(1e-3),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "muon": lambda: contrib.muon(1e-2),
}


def init_params(rng):
    up, down = jax.random.split(rng)
    return {
        "up": {"w": 0.2 * jax.random.normal(up, (WIDTH, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "down": {"w": 0.2 * jax.random.normal(down, (HIDDEN, WIDTH)), "b": jnp.zeros(WIDTH)},
    }


def loss_fn(params, batch):
    hidden = jax.nn.gelu(batch["x"] @ params["up"]["w"] + params["up"]["b"])
    out = hidden @ params["down"]["w"] + params["down"]["b"]
    return jnp.mean((out - batch["y"]) ** 2)


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((BATCH, WIDTH)) for k in ("x", "y")}


def trained_with(tx, init_params=init_params, loss_fn=loss_fn):
    """(init, step) of the small model, or of another."""

    def init(rng):
        params = init_params(rng)
        return {"params": params, "opt": tx.init(params)}

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return init, step


def trained_with_ema():
    """Adam, and beside it the moving average of the parameters."""
    init, step = trained_with(optax.adam(1e-2))

    def init_ema(rng):
        state = init(rng)
        return {"train": state, "ema": jax.tree.map(jnp.copy, state["params"])}

    def step_ema(state, batch):
        train, loss = step(state["train"], batch)
        ema = jax.tree.map(lambda e, p: DECAY * e + (1 - DECAY) * p, state["ema"], train["params"])
        return {"train": train, "ema": ema}, loss

    return init_ema, step_ema


def trained_with_loss_scale(branch):
    """Dynamic loss scaling: an update with a gradient that overflowed is skipped, the scale halved.

    The gradient of the second step overflows.
    """
    tx = optax.adam(1e-2)

    def init(rng):
        params = init_params(rng)
        state = {"params": params, "opt": tx.init(params)}
        return {**state, "scale": jnp.float64(2.0), "step": jnp.int32(0)}

    def step(state, batch):
        def scaled(params):
            loss = loss_fn(params, batch)
            blown = jnp.where(state["step"] == 1, jnp.inf, state["scale"])
            return loss * blown, loss

        grads, loss = jax.grad(scaled, has_aux=True)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        kept = state["params"], state["opt"]

        def updated():
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return optax.apply_updates(state["params"], updates), opt

        if branch == "cond":
            params, opt = jax.lax.cond(finite, updated, lambda: kept)
        else:
            params, opt = jax.tree.map(lambda a, b: jnp.where(finite, a, b), updated(), kept)
        scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
        return {"params": params, "opt": opt, "scale": scale, "step": state["step"] + 1}, loss

    return init, step


WAYS = {
    **{name: (lambda make=make: trained_with(make())) for name, make in OPTIMIZERS.items()},
    "ema": trained_with_ema,
    "loss_scale_where": lambda: trained_with_loss_scale("where"),
    "loss_scale_cond": lambda: trained_with_loss_scale("cond"),
}
# Each way under one plan, so that each kind of plan sees many kinds of state; the rest is slow.
QUICK = {
    "adamw": "zero3", "multi_steps": "zero3", "inject_hyperparams": "searched",
    "inject_adafactor": "zero3", "multi_transform": "zero3", "adafactor": "tensor",
    "adafactor_unfactored": "searched", "lion": "tensor", "sgd": "searched",
    "apply_if_finite": "tensor", "muon": "zero3", "ema": "zero3", "loss_scale_where": "searched",
    "loss_scale_cond": "zero3",
}  # fmt: skip
CASES = [
    pytest.param(
        way, plan, id=f"{way}-{plan}", marks=[] if QUICK[way] == plan else pytest.mark.slow
    )
    for way in WAYS
    for plan in PLANS
]


def expected(init, step):
    """(state, losses) of three plain steps."""
    state, losses, step = jax.jit(init)(jax.random.key(0)), [], jax.jit(step)
    for i in range(STEPS):
        state, loss = step(state, make_batch(i))
        losses.append(float(loss))
    return state, losses


def assert_same_numbers(init, step, want, losses, plan, make=make_batch):
    """Three planned steps give the numbers `want`; state takes the planned bytes on each device."""
    planned = js.parallelize(step, cluster="cpu:8", constraints=PLANS[plan](), time_limit=20)
    state = planned.init(init, jax.random.key(0), batch=make(0))
    size = sum(t.bytes_per_device for t in planned.plan.tensors if t.path.startswith("state/"))
    assert set(bytes_per_device(state).values()) == {size}
    for i in range(STEPS):
        state, loss = planned(state, make(i))
        np.testing.assert_allclose(float(loss), losses[i], rtol=1e-9, atol=1e-12)
    assert set(bytes_per_device(state).values()) == {size}
    for (path, got), leaf in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(got), leaf, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path)
        )
    compiled = planned.compiled()
    assert achieved(compiled.compiled, compiled) == ()
    return planned, state


@pytest.mark.parametrize(("way", "plan"), CASES)
def test_same_numbers(way, plan):
    init, step = WAYS[way]()
    planned, state = assert_same_numbers(init, step, *expected(init, step), plan)
    assert {t.role for t in planned.plan.tensors if "params" in t.path} >= {"parameter"}
    if plan == "zero3":  # all but what eight devices can not cut is cut: no moment is left whole
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert max(bytes_per_device(state).values()) < whole / 4
    if way.startswith("loss_scale"):
        assert float(state["scale"]) == 4.0  # doubled, halved, doubled


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", ["adamw", "multi_steps", "adafactor", "muon"])
def test_same_numbers_on_gpt(optimizer, plan):
    w = gpt.workload(dtype="float64", seq=16, layers=1, tx=OPTIMIZERS[optimizer]())

    def step(state, batch):
        state, metrics = w.step(state, batch)
        return state, metrics["loss"]

    state, losses, plain = jax.jit(w.init)(jax.random.key(0)), [], jax.jit(step)
    for i in range(STEPS):
        state, loss = plain(state, w.make_batch(i))
        losses.append(float(loss))
    assert_same_numbers(w.init, step, jax.device_get(state), losses, plan, w.make_batch)


def test_moments_lie_as_their_parameters():
    """By data flow alone: the moments' paths and types say nothing."""
    init, step = trained_with(
        optax.chain(optax.scale_by_adam(), optax.masked(optax.ema(0.9), matrices))
    )
    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.zero())
    planned.plan_for(init, jax.random.key(0), batch=make_batch())
    layouts = {t.path: t.spec for t in planned.plan.tensors}
    roles = {t.path: t.role for t in planned.plan.tensors}
    moments = [p for p in layouts if p.startswith("state/opt") and p.endswith("up/w")]
    assert len(moments) == 3
    for path in moments:
        assert layouts[path] == layouts["state/params/up/w"]
        assert roles[path] == "optimizer"


# -- whole matrices ------------------------------------------------------------------------------

LAYERS = 8


def stacked_with_muon():
    """(init, step): eight layers of square matrices, stacked, under muon."""

    def init_params(rng):
        return {"layers": {"w": 0.2 * jax.random.normal(rng, (LAYERS, WIDTH, WIDTH))}}

    def loss_fn(params, batch):
        hidden, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"]["w"]
        )
        return jnp.mean((hidden - batch["y"]) ** 2)

    tx = contrib.muon(
        1e-2, muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda _: contrib.MuonDimensionNumbers(1, 2), params
        ),
    )  # fmt: skip
    return trained_with(tx, init_params, loss_fn)


def communicated_between_products(step):
    """Collectives that depend on one of the Newton-Schulz products, and on which another does."""
    compiled = step.compiled().compiled
    nodes = read_hlo(compiled.as_text(), step.mesh())
    products = {i for i, node in enumerate(nodes) if node.op == "dot" and not node.loop}
    assert len(products) == 15  # five iterations of three; those of the model stand in loops
    before, after = set(products), set(products)
    for i, node in enumerate(nodes):
        if not after.isdisjoint(node.inputs):
            after.add(i)
    for i, node in reversed(list(enumerate(nodes))):
        if i in before:
            before.update(node.inputs)
    return [nodes[i].op for i in sorted(before & after) if nodes[i].op in COLLECTIVES]


@pytest.mark.parametrize(
    "line",
    [op_trans(values("opt/*/mu/*"), Split(0), ALL),
     op_trans(ops(phase="update", primitive="dot_general"), Split("contraction"), ALL)],
    ids=["whole", "cut"],
)  # fmt: skip
def test_each_device_has_its_own_matrices(line, monkeypatch):
    """The layers of a stack are a batch to the Newton-Schulz iteration: to split them is to give
    each device whole matrices, and nothing is communicated from its first product to its last.
    """
    monkeypatch.setitem(PLANS, "line", lambda: [line])
    init, step = stacked_with_muon()
    planned, _ = assert_same_numbers(init, step, *expected(init, step), "line")
    whole = line.algo == Split(0)
    if whole:
        (moments,) = [t.spec for t in planned.plan.tensors if "/mu/" in t.path]
        assert moments[0] and not any(moments[1:])
    assert (communicated_between_products(planned) == []) == whole


def test_matrices_are_given_to_devices_where_that_pays(monkeypatch):
    monkeypatch.setitem(globals(), "WIDTH", 4096)
    init, step = stacked_with_muon()
    state = jax.eval_shape(init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float64) for k in ("x", "y")}
    plan = js.plan(step, state, batch, cluster="h100:8", time_limit=20)
    products = [d for d in plan.decisions if d.subject.startswith("update::dot_general")]
    assert products and all(
        {factor for _, factor in d.cuts} == {"f0"} and len(d.cuts) == len(plan.axes)
        for d in products
    )
