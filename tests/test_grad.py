"""`jaxscaler.value_and_grad` and `grad`: JAX's numbers, anywhere, and marks in a planned step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscaler as js
from jaxscaler import _compat
from jaxscaler.graph.build import build
from jaxscaler.graph.ir import BACKWARD, FORWARD
from jaxscaler.trace import trace


@jax.custom_vjp
def scaled(x):
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, d: (10.0 * d * jnp.cos(x),))  # not the true one


def loss(w, x):
    return jnp.mean(scaled(jnp.tanh(x @ w)) ** 2)


def as_traced(step, *args):
    """Results of a step as the planner traces it."""
    traced = trace(step, *args)
    leaves = jax.tree.leaves(args)
    flat = jax.jit(lambda *leaves: _compat.emit(traced.jaxpr, leaves))(*leaves)
    return jax.tree.unflatten(traced.out_tree, flat), traced


def plain(w, x, tools):
    return tools.value_and_grad(loss)(w, x)


def two_arguments(w, x, tools):
    return tools.grad(loss, argnums=(0, 1))(w, x)


def with_aux(w, x, tools):
    def fun(w, *, x, scale):
        y = x @ w
        return jnp.sum(y) * scale, {"y": y, "what": 3}

    (value, aux), grads = tools.value_and_grad(fun, has_aux=True)(w, x=x, scale=2.0)
    return value, aux["y"], grads * aux["what"]


def twice(w, x, tools):
    fun = tools.value_and_grad(loss)
    value, grads = fun(w, x)
    return value, fun(w - grads, x)


def nested(w, x, tools):
    inner = tools.grad(loss)
    return tools.grad(lambda w: jnp.sum(inner(w, x) ** 2))(w)


def under_scan(w, x, tools):
    def body(w, part):
        value, grads = tools.value_and_grad(loss)(w, part)
        return w - grads, value

    return jax.lax.scan(body, w, x.reshape(2, -1, x.shape[1]))


def under_vmap(w, x, tools):
    return jax.vmap(tools.grad(loss), in_axes=(None, 0))(w, x.reshape(2, -1, x.shape[1]))


def inside_jit(w, x, tools):
    return jax.jit(tools.value_and_grad(loss))(w, x)


def static_and_closed_over(w, x, tools):
    def fun(w, activation, power):
        return jnp.sum(activation(x @ w) ** power)

    return tools.value_and_grad(fun)(w, jnp.tanh, 3)


def loops_and_branches(w, x, tools):
    def fun(w):
        y, ys = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), jnp.sum(c)), x, None, length=3)
        y = jax.lax.cond(jnp.sum(y) > 0, jnp.sin, lambda y: y * w[0], y)
        return jnp.sum(y) + jnp.sum(ys) + jnp.sum(jax.checkpoint(jnp.cos)(y))

    return tools.grad(fun)(w)


CASES = [plain, two_arguments, with_aux, twice, nested, under_scan, under_vmap, inside_jit,
         static_and_closed_over, loops_and_branches]  # fmt: skip


@pytest.fixture(scope="module")
def arrays():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        yield jnp.array(rng.standard_normal((4, 4))), jnp.array(rng.standard_normal((8, 4)))


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_same_as_jax(case, arrays):
    """Outside of a plan the very numbers of JAX; in a planned step the same to rounding."""
    expected = jax.tree.leaves(case(*arrays, jax))
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(case(*arrays, js)), expected, strict=True)
    )
    found, traced = as_traced(lambda w, x: case(w, x, js), *arrays)
    assert traced.losses
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_what_jax_refuses_is_refused_alike(arrays):
    w, x = arrays
    with pytest.raises(TypeError, match="argnums=7"):
        trace(js.grad(loss, argnums=7), w, x)
    with pytest.raises(TypeError, match="aux"):
        trace(js.grad(loss, has_aux=True), w, x)
    with pytest.raises(TypeError, match="scalar"):
        trace(lambda w, x: js.grad(lambda w: x @ w)(w), w, x)  # not a scalar
    made = as_traced(
        lambda w: js.grad(lambda n: 1.0 * jnp.sum(n), allow_int=True)(w), jnp.arange(3)
    )[0]
    assert made.dtype == jax.dtypes.float0
    z = jnp.array(1.0 + 2.0j)
    made = as_traced(lambda z: js.grad(lambda z: z**3, holomorphic=True)(z), z)[0]
    np.testing.assert_allclose(made, jax.grad(lambda z: z**3, holomorphic=True)(z))


def test_every_op_tells_its_forward_equation(arrays):
    def step(tools):
        def run(w, x):
            def fun(w):
                with jax.named_scope("layer"):
                    y = jax.nn.gelu(x @ w)
                return jnp.sum(scaled(y))

            return tools.value_and_grad(fun)(w)

        return run

    graph = build(trace(step(js), *arrays))
    same = build(trace(step(jax), *arrays))

    def names(g):
        return sorted((op.phase, op.scope, g.kinds[op.kind].primitive) for op in g.ops)

    assert names(graph) == names(same)  # reports and constraints read as without the drop-in
    assert all(op.origin is None for op in same.ops)
    assert all(op.origin is not None for op in graph.ops)
    dots = [op for op in graph.ops if graph.kinds[op.kind].primitive == "dot_general"]
    assert [op.phase for op in dots] == [FORWARD, BACKWARD]
    assert dots[0].origin == dots[1].origin


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.b = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


@pytest.mark.parametrize("argnums", [0, nnx.DiffState(0, nnx.PathContains("b"))], ids=str)
def test_same_as_nnx(argnums):
    """Gradients, batch statistics and random counters; in a planned step and outside."""
    x = jnp.ones((6, 4)) * jnp.arange(6)[:, None]

    def step(tools):
        def fun(model, x):
            y = model(x)
            return jnp.mean(y**2), y

        def run(model, x):
            (value, y), grads = tools.value_and_grad(fun, argnums=argnums, has_aux=True)(model, x)
            return value, y, grads

        return run

    def state(model):
        return nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))

    expected_model = Net(nnx.Rngs(0))
    expected = step(nnx)(expected_model, x)
    outside = Net(nnx.Rngs(0))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), step(js)(outside, x),
                                     expected))  # fmt: skip
    planned = js.parallelize(step(js), cluster="cpu:2", time_limit=5)
    model = Net(nnx.Rngs(0))
    found = planned(model, x)
    for a, b in zip(jax.tree.leaves((found, state(model))),
                    jax.tree.leaves((expected, state(expected_model))), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert planned.planned.traced.losses
