"""Tracing: paths, state, static arguments, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.experimental import io_callback

from jaxscaler.errors import PlanError, TraceError
from jaxscaler.trace import trace


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="out")(nn.relu(nn.Dense(8, name="up")(x)))


def create_state(rng):
    model = Mlp()
    params = model.init(rng, jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


BATCH = {k: jax.ShapeDtypeStruct((16, 4), jnp.float32) for k in "xy"}


def abstract_state():
    return jax.eval_shape(create_state, jax.random.key(0))


def test_paths_and_state_of_a_flax_train_state():
    state = abstract_state()
    traced = trace(train_step, state, BATCH)
    leaves = len(jax.tree.leaves(state))
    assert "state/params/up/kernel" in traced.in_paths
    assert "state/opt_state/0/mu/up/kernel" in traced.in_paths
    assert traced.in_paths[-2:] == ("batch/x", "batch/y")
    assert "0/params/up/kernel" in traced.out_paths and traced.out_paths[-1] == "1/loss"
    assert traced.state_pairs == tuple((i, i) for i in range(leaves))
    assert traced.arg_of_input == (0,) * leaves + (1, 1)
    assert len(traced.in_paths) == len(traced.in_avals) == len(traced.jaxpr.in_avals)
    assert traced.donated == () and traced.seconds > 0


def test_concrete_abstract_and_jitted_steps_trace_alike():
    state = create_state(jax.random.key(0))
    batch = {k: np.ones((16, 4), np.float32) for k in "xy"}
    jitted = jax.jit(train_step, donate_argnums=0)
    first, *others = (
        trace(train_step, state, batch),
        trace(train_step, abstract_state(), batch=BATCH),
        trace(jitted, state, batch),
    )
    for other in others:
        assert (other.in_paths, other.out_paths) == (first.in_paths, first.out_paths)
        assert other.state_pairs == first.state_pairs
        assert [v.dtype for v in other.in_avals] == [v.dtype for v in first.in_avals]
    assert others[-1].donated == (True,) * (len(first.in_paths) - 2) + (False, False)


@pytest.mark.parametrize(
    ("step", "args", "pairs"),
    [
        (lambda w, x: (w - x.sum(), x.sum()), ((4, 4), (3,)), ((0, 0),)),
        (lambda w, b, x: (w, b, w @ x), ((4, 4), (4,), (4,)), ((0, 0), (1, 1))),  # x is the batch
        (lambda w, d: (w, {"y": d["x"]}), ((4, 4), {"x": (4,)}), ((0, 0),)),
        (lambda w, x, lr: (w, x.sum() * lr), ((4, 4), (3,), ()), ((0, 0),)),
        (lambda w, x, y: (w, y), ((4, 4), (3,), (5,)), ((0, 0),)),  # y follows a gap
        (lambda s, x: (s["a"], x.sum()), ({"a": (2,), "b": (3,)}, (5,)), ((0, 0),)),
        (lambda x: x.sum(), ((4,),), ()),
    ],
)
def test_state_pairs(step, args, pairs):
    avals = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), args, is_leaf=lambda s: _is_shape(s)
    )
    assert trace(step, *avals).state_pairs == pairs


def _is_shape(s):
    return isinstance(s, tuple) and all(isinstance(n, int) for n in s)


def test_whole_subtrees_are_state_wherever_they_stand():
    params = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32), "b": jax.ShapeDtypeStruct((4,), "f4")}
    traced = trace(
        lambda p, o, b: (b.sum(), {"opt": o, "params": p}),
        params,
        (params, jax.ShapeDtypeStruct((), "i4")),
        jax.ShapeDtypeStruct((7,), "f4"),
    )
    by_path = {traced.in_paths[i]: traced.out_paths[o] for i, o in traced.state_pairs}
    assert by_path == {
        "p/b": "1/params/b",
        "p/w": "1/params/w",
        "o/0/b": "1/opt/0/b",
        "o/0/w": "1/opt/0/w",
        "o/1": "1/opt/1",
    }


def test_static_arguments_are_part_of_the_program():
    def step(w, mode, x, *, scale):
        return (w * 2 if mode == "double" else w) * scale + x

    traced = trace(step, jnp.ones(4), "double", jnp.ones(4), static_argnums=1, scale=2.0)
    assert traced.arg_names == ("w", "x", "scale") and traced.keywords == ("scale",)
    assert traced.static == (("mode", "double"),)
    assert traced.arguments((1, "double", 2), {"scale": 3}) == (1, 2, 3)
    assert traced.arguments((), dict(x=2, w=1, mode="double", scale=3)) == (1, 2, 3)
    with pytest.raises(PlanError, match="mode"):
        traced.arguments((1, "single", 2), {"scale": 3})
    by_name = trace(
        jax.jit(step, static_argnames="mode"), jnp.ones(4), "double", jnp.ones(4), scale=2.0
    )
    assert by_name.static == traced.static and by_name.in_paths == traced.in_paths


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["text", print, object(), np.array(["a"]), np.array([None])])
def test_a_leaf_that_is_no_array(leaf):
    with pytest.raises(TraceError, match=r"batch/meta is a .*static"):
        trace(lambda state, batch: state, jnp.ones(3), {"x": jnp.ones(2), "meta": leaf})


def test_none_is_structure_and_scalars_are_arrays():
    traced = trace(lambda state, batch: state, jnp.ones(3), {"x": 1.0, "mask": None, "n": 2})
    assert traced.in_paths == ("state", "batch/n", "batch/x")
    small = trace(lambda x: x, jnp.ones(3, jnp.bfloat16))
    assert trace(lambda x: x, np.asarray(jnp.ones(3, jnp.bfloat16))).in_paths == small.in_paths
    assert trace(lambda k: k, jax.random.key(0)).in_paths == ("k",)


def test_explicit_meshes(devices):
    explicit = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    auto = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(explicit), pytest.raises(TraceError, match=r"set_mesh.*'x'.*Auto"):
        trace(lambda w: w, jnp.ones(8))
    with jax.set_mesh(auto):
        assert trace(lambda w: w, jnp.ones(8)).in_paths == ("w",)
    w = jax.device_put(np.ones(8), jax.NamedSharding(explicit, jax.P("x")))
    with pytest.raises(TraceError, match=r"w: axes.*Explicit"):
        trace(lambda w: w, w)


def test_axis_names_of_pmap():
    with pytest.raises(TraceError, match=r"unbound axis name: batch.*whole batch"):
        trace(lambda w: jax.lax.pmean(w, "batch"), jnp.ones(8))
    with pytest.raises(NameError, match="nonsense"):
        trace(lambda w: nonsense, jnp.ones(8))  # noqa: F821


def test_references():
    ref = jax.new_ref(jnp.ones((2, 3)))
    with pytest.raises(TraceError, match=r"params/w of shape \(2, 3\) is a mutable jax.Ref"):
        trace(lambda params: params["w"][...], {"w": ref})
    with pytest.raises(TraceError, match="closed-over value"):
        trace(lambda x: x + ref[...], jnp.ones((2, 3)))


def _print(x):
    jax.debug.print("{}", x, ordered=True)
    return x


def _callback(x):
    return io_callback(lambda v: np.asarray(v), x, x, ordered=True)


def _while(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, _print(c[1])), (0, x))[1]


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (_print, r"debug_callback|debug_print"),
        (_callback, "io_callback"),
        (_while, r"(debug_callback|debug_print) inside a while"),
        (
            lambda x: jax.lax.scan(lambda c, _: (jax.jit(_print)(c), None), x, length=3)[0],
            r"(debug_callback|debug_print) inside a scan",
        ),
    ],
)
def test_ordered_effects(fun, words):
    with pytest.raises(TraceError, match=rf"({words}).*test_lower_trace.*ordered=False"):
        trace(fun, jnp.ones(3))


def test_unordered_effects_pass_and_errors_of_the_step_come_out_as_they_are():
    trace(lambda x: (jax.debug.print("{}", x), x)[1], jnp.ones(3))
    with pytest.raises(TypeError, match="dot_general"):
        trace(lambda x: x @ jnp.ones((4, 5)), jnp.ones(3))


def test_a_step_with_its_own_shardings(devices):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(lambda w: w, out_shardings=jax.NamedSharding(mesh, jax.P("x")))
    with pytest.raises(TraceError, match="fixes its own shardings"):
        trace(step, jnp.ones(8))
