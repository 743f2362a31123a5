"""Lines that exchange what ops compute with: products in another dtype, kernels of the user's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler import Cast, ConstraintError, Kernel, PlanError, Split, op_trans, ops, region
from jaxscaler.cluster import Cluster
from jaxscaler.plan import Plan
from jaxscaler.planner import follow_plan, plan_step
from jaxscaler.rewrite import changes, exchange
from jaxscaler.trace import trace

CLUSTER = Cluster.parse("h100:8")
LAYERS, WIDTH = 2, 64


def attend(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k), axis=-1)
    return jnp.einsum("bqk,bkd->bqd", p, v)


def summed_by_hand(q, k, v):
    scores = (q[:, :, None] * k[:, None]).sum(-1)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights[..., None] * v[:, None]).sum(2) / weights.sum(-1, keepdims=True)


def model(params, x, narrow=None, core=attend):
    """A model written by hand; `narrow`: dtype of the products of its `mlp`s."""

    def product(x, w):
        if narrow is None:
            return x @ w
        return (x.astype(narrow) @ w.astype(narrow)).astype(x.dtype)

    for i in range(LAYERS):
        with jax.named_scope(f"h_{i}"):
            with jax.named_scope("core"):
                x = x + core(x, x * 0.5, x)
            with jax.named_scope("mlp"):
                x = x + product(jnp.tanh(product(x, params[f"up_{i}"])), params[f"down_{i}"])
    return jnp.mean(x**2)


def step_of(grad=js.value_and_grad, **options):
    def step(params, x):
        value, grads = grad(lambda p: model(p, x, **options))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(dtype=jnp.float64):
    keys = iter(jax.random.split(jax.random.key(0), 9))
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {
        f"{name}_{i}": 0.1 * jax.random.normal(next(keys), shape, dtype)
        for i in range(LAYERS)
        for name, shape in shapes.items()
    }
    return params, jax.random.normal(next(keys), (16, 8, WIDTH), dtype)


def planned(*lines, given=None, **options):
    args = arguments() if given is None else given
    return plan_step(trace(step_of(**options), *args), CLUSTER, constraints=lines)


def same(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


MLP = op_trans(region("h_*/mlp"), Cast("float32"))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("more", [(), (op_trans(ops(), Split("batch"), js.ALL),)])
def test_cast_products_are_those_of_a_step_written_so(x64, more):
    args = arguments()
    step = js.parallelize(step_of(), cluster=CLUSTER, constraints=[MLP, *more])
    found = step(*arguments())
    same(found, jax.jit(step_of(jax.value_and_grad, narrow=jnp.float32))(*args), 1e-6)
    off = abs(np.asarray(found[1]) - np.asarray(jax.jit(step_of(jax.value_and_grad))(*args)[1]))
    assert off > 1e-12  # it did lose bits


def test_gathers_and_sums_travel_in_the_narrow_dtype():
    args = arguments(jnp.float32)
    lines = [op_trans(ops(phase=("forward", "backward")), Split("batch"), js.ALL)]
    plain = planned(*lines, given=args).plan
    narrow = planned(*lines, op_trans(region("h_*/mlp"), Cast("bfloat16")), given=args).plan
    moved = [sum(t.nbytes * t.count for t in p.traffic) for p in (plain, narrow)]
    assert moved[1] < 0.6 * moved[0]
    assert any("Cast('bfloat16')" in line for line in narrow.constraints)


@pytest.fixture
def by_hand():
    js.register_kernel("by hand", lambda x: x + summed_by_hand(x, x * 0.5, x))
    yield
    exchange._kernels.pop("by hand", None)


CORE = op_trans(region("h_*/core"), Kernel("by hand"))


def test_a_kernel_stands_in_the_place_of_a_region(x64, by_hand):
    args = arguments()
    step = js.parallelize(step_of(), cluster=CLUSTER, constraints=[CORE, MLP])
    found = step(*arguments())
    hand = step_of(jax.value_and_grad, narrow=jnp.float32, core=summed_by_hand)
    same(found, jax.jit(hand)(*args), 1e-6)


def test_exchanges_stay_with_every_other_change_and_in_the_file(x64, by_hand, tmp_path):
    """Accumulation counts the equations that they leave; a loaded plan needs the kernel again."""
    parts = js.op_assign(
        op_trans(ops(phase=("forward", "backward")), Split("batch"), 2), js.SAME_DEVICE
    )
    args = arguments()
    traced = trace(step_of(), *args)
    plan = plan_step(traced, CLUSTER, constraints=[CORE, parts]).plan
    kinds = [type(change).__name__ for change in plan.changes]
    assert kinds.count("Kernel") == LAYERS and kinds.count("Accumulate") == 1
    assert plan.constraints == (str(CORE), str(parts))
    plan.save(tmp_path / "plan.json")
    kept = Plan.load(tmp_path / "plan.json")
    assert kept == plan
    step = js.parallelize(step_of(), plan=kept)
    hand = step_of(jax.value_and_grad, core=summed_by_hand)
    same(step(*arguments()), jax.jit(hand)(*args), 1e-12)
    exchange._kernels.clear()
    with pytest.raises(PlanError, match="no kernel 'by hand' is registered"):
        follow_plan(traced, kept)


def test_a_scan_over_layers_is_cast_inside(x64):
    def loss(params, x, narrow):
        def layer(x, w):
            with jax.named_scope("mlp"):
                y = (x.astype(narrow) @ w.astype(narrow)).astype(x.dtype)
            return jnp.tanh(y), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(grad, narrow):
        return lambda p, x: jax.tree.map(
            lambda p, g: p - g, p, grad(lambda p: loss(p, x, narrow))(p)
        )

    keys = jax.random.split(jax.random.key(1))
    w, x = 0.1 * jax.random.normal(keys[0], (4, 64, 64)), jax.random.normal(keys[1], (32, 64))
    line = op_trans(region("mlp"), Cast("float32"))
    mine = js.parallelize(step(js.grad, jnp.float64), cluster=CLUSTER, constraints=line, donate=())
    same(mine(w, x), jax.jit(step(jax.grad, jnp.float32))(w, x), 1e-6)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([op_trans(js.values("up_0"), Cast("bfloat16"))], "values do not compute"),
        ([op_trans(region("h_*/mlp"), Cast("int8"))], "no floating-point dtype"),
        ([op_trans(region("h_*/mlp"), Cast("narrow"))], "no floating-point dtype"),
        ([op_trans(ops(primitive="tanh"), Cast("bfloat16"))], "no product"),
        ([op_trans(region("nowhere"), Cast("bfloat16"))], "selects no op of the forward pass"),
        ([js.forbid(MLP)], "no line asks for"),
        ([js.op_assign(MLP, "node")], "nothing to assign"),
        ([MLP, op_trans(region("h_0/mlp"), Cast("bfloat16"))], "both exchange equation"),
        ([op_trans(region("h_*/core"), Kernel("unknown"))], "no kernel 'unknown' is registered"),
        ([op_trans(region("h_*/mlp"), Kernel("by hand"))], r"reads float32\[16, 8, 64\], float32"),
    ],
)
def test_what_can_not_be_exchanged_is_refused_by_line(by_hand, lines, says):
    with pytest.raises(ConstraintError, match=says) as error:
        planned(*lines, given=arguments(jnp.float32))
    assert "test_exchange.py" in str(error.value) or "registered" in says or "reads" in says


def test_a_kernel_of_other_types_is_refused(by_hand):
    js.register_kernel("by hand", lambda x: x[0])
    with pytest.raises(ConstraintError, match=r"makes float32\[8, 64\] of float32\[16, 8, 64\]"):
        planned(CORE, given=arguments(jnp.float32))


def test_without_a_marked_loss_the_lines_are_refused():
    traced = trace(step_of(jax.value_and_grad), *arguments(jnp.float32))
    with pytest.raises(ConstraintError, match="marked by jaxscaler"):
        plan_step(traced, CLUSTER, constraints=[MLP])


def test_a_pipeline_has_the_exchanges_too(x64, tmp_path):
    """They are made before the cut; the plan, the pipeline that runs, and a saved one agree."""
    args = arguments()
    cut = [js.op_assign(region(f"h_{i}"), js.Stage(i)) for i in range(LAYERS)]
    options = dict(cluster="h100:8", micro_batches=2, dispatch_limit=None)
    step = js.parallelize(step_of(), constraints=[MLP, *cut], **options)
    wanted = jax.jit(step_of(jax.value_and_grad, narrow=jnp.float32))(*args)
    same(step(*arguments()), wanted, 1e-6)
    assert any(isinstance(change, changes.Cast) for change in step.plan.changes)
    step.plan.save(tmp_path / "plan.json")
    again = js.parallelize(step_of(), plan=tmp_path / "plan.json", **options)
    same(again(*arguments()), wanted, 1e-6)
