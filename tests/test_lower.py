"""Layouts put into steps by hand: same numbers as plain jit in float64, constraints in the program.

Every case is a whole train step, constrained at random results, operands and borders of bodies: of
loops, branches, remat and custom calls.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.lower import (
    Layouts,
    MismatchError,
    PlannedStep,
    achieved,
    apply_layouts,
    bytes_per_device,
    compile_step,
    constrain,
    init_state,
    shardings_tree,
)
from jaxscaler.trace import trace

AXES = (("d", 2), ("t", 4))
AUTO = jax.sharding.AxisType.Auto


@pytest.fixture(scope="module")
def mesh(devices):
    return jax.make_mesh((2, 4), ("d", "t"), axis_types=(AUTO, AUTO))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# --- layouts by hand --------------------------------------------------------------------------


def equations(jaxpr, key=()):
    """(key, equation) of a jaxpr and all bodies in it."""
    for i, eqn in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
        yield (*key, i), eqn
        for s, body in enumerate(_compat.subjaxprs(eqn)):
            yield from equations(body, (*key, i, s))


def bodies(jaxpr, key=()):
    """(key, jaxpr) of all bodies."""
    for here, eqn in equations(jaxpr, key):
        for s, body in enumerate(_compat.subjaxprs(eqn)):
            yield (*here, s), _compat.open_jaxpr(body)[0]


def specs(shape):
    """Every way to cut `shape` evenly by each axis at most once, in a fixed order."""
    sizes = dict(AXES)
    choices = [(), ("d",), ("t",), ("d", "t"), ("t", "d")]
    for spec in itertools.product(choices, repeat=len(shape)):
        used = [axis for axes in spec for axis in axes]
        even = all(
            n % np.prod([sizes[a] for a in axes], dtype=int) == 0 for n, axes in zip(shape, spec)
        )
        if len(used) == len(set(used)) and even:
            yield spec


def border(traced):
    """Storage layouts: the most finely cut spec for every input and the state it becomes."""
    finest = lambda shape: max(specs(shape), key=lambda s: sum(map(len, s)))  # noqa: E731
    inputs = [finest(_logical(a)) for a in traced.in_avals]
    outputs = [((),) * len(_logical(a)) for a in traced.out_avals]
    for i, o in traced.state_pairs:
        outputs[o] = inputs[i]
    return tuple(inputs), tuple(outputs)


def _logical(aval):
    return aval.shape if "key<" not in str(aval.dtype) else (1,) * aval.ndim


def constrain_many(traced, seed):
    """Layouts with random specs on a quarter of the values of rank 2 or more, anywhere."""
    rng = np.random.default_rng(seed)

    def pick(aval):
        options = list(specs(aval.shape))
        return tuple(options[rng.integers(len(options))] for _ in range(rng.integers(1, 3)))

    def table(variables):
        return {
            n: pick(v.aval) for n, v in enumerate(variables) if _wide(v) and rng.random() < 0.25
        }

    def entries(items):
        return {key: found for key, variables in items if (found := table(variables))}

    inputs, outputs = border(traced)
    return Layouts(
        AXES,
        inputs,
        outputs,
        results=entries((key, eqn.outvars) for key, eqn in equations(traced.jaxpr)),
        operands=entries((key, eqn.invars) for key, eqn in equations(traced.jaxpr)),
        body_inputs=entries((key, body.invars) for key, body in bodies(traced.jaxpr)),
        body_outputs=entries((key, body.outvars) for key, body in bodies(traced.jaxpr)),
    )


def _wide(var):
    return not isinstance(var, _compat.Literal) and getattr(var.aval, "ndim", 0) >= 2


# --- steps ------------------------------------------------------------------------------------


def normal(*shape, seed=0, scale=0.3):
    return np.random.default_rng([seed, *shape]).normal(size=shape) * scale


def sgd(loss):
    """A train step with momentum on (params, velocity)."""

    def step(state, batch):
        params, velocity = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return (jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity), value

    return step


def mlp(p, batch):
    return jnp.mean((jax.nn.gelu(batch @ p["up"]) @ p["down"] - batch) ** 2)


def attention(p, batch):
    x = batch.reshape(8, 4, 16)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[n]) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k), axis=-1)
    out = jnp.einsum("bhst,bthk->bshk", weights, v)
    return jnp.mean((x + jnp.einsum("bshk,hkd->bsd", out, p["o"])) ** 2)


def scanned(p, batch):
    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(jax.nn.silu(x @ w)), None

    return jnp.mean(jax.lax.scan(layer, batch, p["w"])[0] ** 2)


def branched(p, batch):
    h = jax.lax.cond(
        jnp.sum(batch) > 0, lambda x: jnp.sin(x @ p["up"]), lambda x: x @ p["up"] * 2, batch
    )
    h = jax.lax.switch(1, [jnp.cos, jax.checkpoint(jnp.tanh)], h)
    return jnp.mean((h @ p["down"]) ** 2)


def looped(p, batch):
    """The while loop is not differentiated: it makes a target."""

    def more(carry):
        return carry[0] < 3

    def body(carry):
        return carry[0] + 1, jnp.sin(carry[1] @ carry[1].T @ carry[1])

    target = jax.lax.while_loop(more, body, (0, batch))[1]
    return jnp.mean((batch @ p["w"] - target) ** 2)


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.clip(g, -0.01, 0.01) * jnp.cos(x),))


def custom(p, batch):
    """A custom_vjp whose rule is not the derivative, and a call that is not differentiated."""
    return jnp.mean(clipped(jax.nn.relu(batch @ p["w"])) ** 2) + jnp.mean(
        jax.lax.stop_gradient(clipped(batch)) * batch
    )


def dropout_step(state, batch):
    params, velocity, key = state
    key, now = jax.random.split(key)

    def loss(params, batch):
        keep = jax.random.bernoulli(now, 0.7, (32, 32))
        return jnp.mean((jnp.where(keep, batch @ params["up"], 0) @ params["down"]) ** 2)

    (params, velocity), value = sgd(loss)((params, velocity), batch)
    return (params, velocity, key), value


UP_DOWN = {"up": normal(16, 32), "down": normal(32, 16)}
HEADS = {**{n: normal(16, 4, 4, seed=i) for i, n in enumerate("qkv")}, "o": normal(4, 4, 16)}
CASES = {
    "mlp": (sgd(mlp), UP_DOWN),
    "attention": (sgd(attention), HEADS),
    "scan_remat": (sgd(scanned), {"w": normal(3, 16, 16)}),
    "cond": (sgd(branched), UP_DOWN),
    "while": (sgd(looped), {"w": normal(16, 16)}),
    "custom_vjp": (sgd(custom), {"w": normal(16, 16)}),
    "dropout": (dropout_step, UP_DOWN),
}


def start(name):
    step, params = CASES[name]
    params = jax.tree.map(jnp.asarray, params)
    state = (params, jax.tree.map(jnp.zeros_like, params))
    return (
        step,
        (*state, jax.random.key(3)) if name == "dropout" else state,
        normal(32, 16, scale=1),
    )


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


# --- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seed"), [*((name, 1) for name in CASES), ("cond", 2), ("while", 2)]
)
def test_three_steps_equal_plain_jit(name, seed, mesh, x64):
    step, state, batch = start(name)
    traced = trace(step, state, batch)
    assert all(a.dtype != jnp.float32 for a in traced.in_avals)
    layouts = constrain_many(traced, seed)
    planned = compile_step(traced, layouts, mesh)
    assert isinstance(planned, PlannedStep)

    plain, want = jax.jit(step), state
    for _ in range(3):
        want, want_loss = plain(want, batch)
    got = jax.tree.map(lambda x: x.copy(), state)
    for _ in range(3):
        got, got_loss = planned(got, batch)
    close((got, got_loss), (want, want_loss))
    assert achieved(planned.compiled, planned) == ()
    for leaf, i in zip(jax.tree.leaves(got), range(len(traced.in_avals))):
        assert leaf.sharding.is_equivalent_to(planned.in_shardings[i], leaf.ndim)


@pytest.mark.parametrize("name", CASES)
def test_constraints_arrive_where_they_stand(name, mesh):
    """Each constrained result gives one sdy.sharding_constraint in the body it stands in."""
    step, state, batch = start(name)
    traced = trace(step, jax.tree.map(_f32, state), _f32(batch))
    inputs, outputs = border(traced)
    results = {
        key: {0: (((("d",),) + ((),) * (eqn.outvars[0].aval.ndim - 1)),)}
        for key, eqn in equations(traced.jaxpr)
        if eqn.primitive.name in ("dot_general", "tanh", "sin", "random_bits")
        and not isinstance(eqn.outvars[0], _compat.DropVar)
    }
    layouts = Layouts(AXES, inputs, outputs, results=results)
    text = compile_step(traced, layouts, mesh).lower().as_text()
    rebuilt = constrain(traced.jaxpr, layouts, mesh)
    placed = [key for key, eqn in equations(rebuilt) if eqn.primitive.name == "sharding_constraint"]
    assert len(placed) == len(results) > 0
    assert text.count("sdy.sharding_constraint") >= len({len(k) for k in placed})
    if name in ("scan_remat", "cond", "while"):
        assert any(len(key) > 1 for key in placed)
        regions = re.findall(r"(?s)(?:cond \{|do \{|case.*?\{|func.func private).*?\n  *\}", text)
        assert any("sdy.sharding_constraint" in region for region in regions)


def _f32(x):
    return x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.astype(np.float32)


def test_equal_constraints_on_one_value_are_one_equation(mesh):
    def step(w, x):
        return w - x.sum(), (x @ w + x @ w.T).sum()

    traced = trace(step, jnp.ones((8, 8)), jnp.ones((8, 8)))
    dots = [key for key, eqn in equations(traced.jaxpr) if eqn.primitive.name == "dot_general"]
    gather = ((("d",), ()), ((), ()))
    whole = (("d", "t"), ())
    layouts = Layouts(
        AXES,
        ((("d",), ()), ((), ())),
        ((("d",), ()), ()),
        operands={dots[0]: {1: gather, 0: (whole,)}, dots[1]: {0: (whole,)}},
    )
    rebuilt = constrain(traced.jaxpr, layouts, mesh)
    placed = [eqn for _, eqn in equations(rebuilt) if eqn.primitive.name == "sharding_constraint"]
    # w is stored as `gather` begins, so only its second spec; x is constrained once for both dots.
    assert [eqn.params["sharding"].spec for eqn in placed] == [
        jax.P(("d", "t"), None),
        jax.P(None, None),
    ]


def test_jit_calls_are_written_out_and_names_stay(mesh):
    @jax.jit
    def inner(x):
        with jax.named_scope("inside"):
            return jnp.sin(x) * 2

    def step(x):
        with jax.named_scope("outside"):
            return inner(x) + inner(x + 1)

    traced = trace(step, jnp.ones((8, 8)))
    keys = {eqn.primitive.name: key for key, eqn in equations(traced.jaxpr)}
    assert len(keys["sin"]) == 3
    spec = (("d",), ("t",))
    layouts = Layouts(AXES, (spec,), (spec,), results={keys["sin"]: {0: (spec,)}})
    rebuilt = constrain(traced.jaxpr, layouts, mesh)
    names = [eqn.primitive.name for eqn in rebuilt.jaxpr.eqns]
    assert "jit" not in names and names.count("sin") == 2
    assert names.count("sharding_constraint") == 1
    text = jax.jit(apply_layouts(traced.jaxpr, layouts, mesh)).lower(jnp.ones((8, 8)))
    assert "outside/inside/sin" in text.compile().as_text()
    assert __file__.rsplit("/", 1)[-1] in text.as_text(debug_info=True)


def test_untouched_bodies_are_not_rebuilt(mesh):
    step, state, batch = start("scan_remat")
    traced = trace(step, state, batch)
    inputs, outputs = border(traced)
    rebuilt = constrain(traced.jaxpr, Layouts(AXES, inputs, outputs, body_inputs={(): {}}), mesh)
    before = [b for eqn in traced.jaxpr.jaxpr.eqns for b in _compat.subjaxprs(eqn)]
    after = [b for eqn in rebuilt.jaxpr.eqns for b in _compat.subjaxprs(eqn)]
    assert [id(b) for b in after] == [id(b) for b in before if b in after] and after


# --- calling ----------------------------------------------------------------------------------


@pytest.fixture
def planned(mesh):
    step, params = CASES["mlp"]
    state = jax.eval_shape(lambda p: (p, p), jax.tree.map(np.float32, params))
    traced = trace(step, state, jax.ShapeDtypeStruct((32, 16), jnp.float32))
    return compile_step(traced, Layouts(AXES, *border(traced)), mesh)


def fresh_state():
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), UP_DOWN)
    return params, jax.tree.map(jnp.zeros_like, params)


BATCH = normal(32, 16, scale=1).astype(np.float32)


def test_one_compilation_whatever_carries_the_values(planned, devices, caplog):
    jax.config.update("jax_log_compiles", True)
    try:
        state = fresh_state()
        on_mesh = jax.device_put(BATCH, planned.in_shardings[-1])
        for batch in (BATCH, jnp.asarray(BATCH), on_mesh, jax.device_put(BATCH, devices[5])):
            state, _ = planned(state, batch)
        assert planned.compiled is planned._run
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [
        r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()
    ]
    assert sum("jit(step)" in message for message in compiled) == 1


def test_state_is_donated_and_the_batch_is_not(planned):
    state, batch = fresh_state(), jax.device_put(BATCH, planned.in_shardings[-1])
    state, _ = planned(state, batch)
    following, _ = planned(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not batch.is_deleted()
    assert planned.compiled.memory_analysis().alias_size_in_bytes == max(
        bytes_per_device(following).values()
    )


def test_arrays_committed_elsewhere_are_moved(planned, mesh, devices):
    want, want_loss = planned(fresh_state(), BATCH)
    other = jax.make_mesh((8,), ("x",), axis_types=(AUTO,))
    for sharding in (
        jax.sharding.SingleDeviceSharding(devices[3]),
        jax.NamedSharding(other, jax.P(None, "x")),
        jax.NamedSharding(mesh, jax.P()),
    ):
        state = jax.device_put(fresh_state(), sharding)
        got, loss = planned(state, jax.device_put(BATCH, devices[1]))
        close((got, loss), (want, want_loss))
        again, _ = planned(got, BATCH)
        assert again[0]["up"].sharding == planned.out_shardings[1]


def test_one_buffer_given_twice_is_not_given_up_twice(planned):
    params = jax.device_put(fresh_state()[0], dict(zip(("down", "up"), planned.in_shardings)))
    want, _ = planned((fresh_state()[0], fresh_state()[0]), BATCH)
    got, _ = planned((params, params), BATCH)
    close(got, want)


def test_other_shapes_and_trees_are_named(planned):
    state = fresh_state()
    with pytest.raises(MismatchError, match=r"batch is float32\[8, 16\], planned for float32\[32"):
        planned(state, BATCH[:8])
    with pytest.raises(MismatchError, match="another pytree"):
        planned((state[0], state[1], 1), BATCH)
    with pytest.raises(MismatchError, match=r"batch is int32"):
        planned(state, BATCH.astype(np.int32))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    planned(state, batch=BATCH)


def test_weak_types_do_not_recompile(mesh):
    """A Python counter comes back as an array; both are the same program."""
    traced = trace(lambda s, x: ({"n": s["n"] + 1, "w": s["w"] * x.sum()}, s["n"]), *_counter())
    planned = compile_step(traced, Layouts(AXES, *border(traced)), mesh)
    state, x = _counter()
    state, _ = planned(state, x)
    compiled = planned.compiled
    state, _ = planned(state, x)
    state, n = planned({**state, "n": jnp.int32(7)}, x)
    assert int(n) == 7 and planned.compiled is compiled and planned._run is compiled


def _counter():
    return {"n": 0, "w": jnp.ones((8, 8))}, np.ones(8, np.float32)


def test_inside_other_transformations(planned):
    state = fresh_state()
    want, _ = planned(jax.tree.map(lambda x: x.copy(), state), BATCH)
    got, _ = jax.jit(lambda s: planned(s, BATCH))(state)
    close(got, want)


def test_static_and_keyword_arguments(mesh):
    def step(w, mode, *, scale):
        return w * scale if mode == "times" else w + scale

    traced = trace(step, jnp.ones((8, 8)), "times", static_argnums=1, scale=jnp.ones(()))
    planned = compile_step(traced, Layouts(AXES, *border(traced)), mesh)
    out = planned(jnp.ones((8, 8)), "times", scale=3.0)
    np.testing.assert_array_equal(out, np.full((8, 8), 3.0))
    with pytest.raises(PlanError, match="mode"):
        planned(jnp.ones((8, 8)), "plus", scale=3.0)


def test_without_layouts_it_is_jit():
    step, state, batch = start("mlp")
    state = jax.tree.map(_f32, state)
    traced = trace(step, state, _f32(batch))
    plain = compile_step(traced, None, None)
    assert type(plain) is type(jax.jit(step))
    want = jax.jit(step)(state, batch)
    got = plain(jax.tree.map(jnp.copy, state), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    held = jax.tree.map(jnp.copy, state)
    plain(held, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held))
    one = jax.make_mesh((1, 1), ("d", "t"), axis_types=(AUTO, AUTO))
    layouts = Layouts((("d", 1), ("t", 1)), *border(traced))
    assert type(compile_step(traced, layouts, one)) is type(plain)


def test_donation_follows_the_user_and_the_layouts(mesh):
    step, state, batch = start("mlp")
    inputs, outputs = border(trace(step, state, batch))
    moved = Layouts(AXES, inputs, (((), ()),) + outputs[1:])
    traced = trace(step, state, batch)
    assert compile_step(traced, Layouts(AXES, inputs, outputs), mesh).donate == (0,)
    assert compile_step(traced, moved, mesh).donate == ()
    jitted = trace(jax.jit(step), state, batch)
    assert compile_step(jitted, Layouts(AXES, inputs, outputs), mesh).donate == ()
    jitted = trace(jax.jit(step, donate_argnums=(0, 1)), state, batch)
    assert compile_step(jitted, Layouts(AXES, inputs, outputs), mesh).donate == (0, 1)


# --- plans that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(inputs=()), r"0 input layouts, the step 3 inputs"),
        (dict(inputs=((("t",),), ((), ()), ((), ()))), r"w of shape \(6, 4\) has 2 dims"),
        (
            dict(inputs=((("t",), ()), ((), ()), ())),
            r"w .*dim 0 of size 6 .* 4 equal parts.*pad it to 8",
        ),
        (dict(inputs=((("z",), ()), ((), ()), ())), r"w: .*no mesh axis 'z'"),
        (dict(inputs=((("d",), ("d",)), ((), ()), ())), r"w: layout .* uses a mesh axis twice"),
        (dict(results={(99,): {0: ((),)}}), r"\[\(99,\)\].*another step"),
        (dict(results={(0, 0, 0): {0: ((),)}}), r"\(0, 0, 0\).*another step"),
        (
            dict(operands={(0,): {0: ((("d",),),)}}),
            r"1 dims on a value of shape .* at equation \(0,\)",
        ),
        (dict(operands={(0,): {7: ((("d",),),)}}), r"no position 7 at equation \(0,\)"),
        (dict(operands={(0,): {0: ((("z",), ()),)}}), r"no mesh axis 'z'"),
        (dict(axes=(("d", 4), ("t", 2))), r"mesh .*'d': 4.*'d': 2"),
    ],
)
def test_plans_that_do_not_fit(change, words, mesh):
    traced = trace(lambda w, x, n: (x @ w).sum() * n, jnp.ones((6, 4)), jnp.ones((8, 6)), 1.0)
    whole = dict(axes=AXES, inputs=(((), ()), ((), ()), ()), outputs=((),))
    compile_step(traced, Layouts(**whole), mesh)
    with pytest.raises(PlanError, match=words):
        compile_step(traced, Layouts(**{**whole, **change}), mesh)


def test_achieved_names_what_differs(planned, mesh):
    traced = planned.traced
    inputs, outputs = border(traced)
    inputs = (((), ()),) + inputs[1:]
    other = PlannedStep(traced, Layouts(AXES, inputs, outputs), mesh, (), None)
    (difference,) = achieved(planned.compiled, other)
    assert difference.path == "state/0/down"
    assert difference.planned.spec == jax.P(None, None)
    assert difference.achieved == planned.in_shardings[0]


# --- state ------------------------------------------------------------------------------------


def init(key, scale):
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (64, 128)) * scale,
        "down": jax.random.truncated_normal(down, -2, 2, (128, 64)),
    }
    return {"params": params, "mu": jax.tree.map(jnp.zeros_like, params), "step": 0, "none": None}


def test_state_is_made_where_it_lives(mesh, devices):
    specs = ((("d", "t"), ()), ((), ("t",)), ((), ("d", "t")), (("d",), ("t",)), ())
    key = jax.device_put(jax.random.key(0), devices[2])
    state = init_state(init, (key, 0.5), specs, mesh)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(init(key, 0.5)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    shardings = shardings_tree(jax.tree.structure(state), specs, mesh)
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings)
    assert all(jax.tree.leaves(same))
    n = 64 * 128 * 4
    assert set(bytes_per_device(state).values()) == {n // 8 + n // 4 + n // 8 + n // 8 + 4}


def test_init_state_names_the_leaf(mesh):
    with pytest.raises(PlanError, match=r"makes 5 arrays, the plan lays out 1.*mu/down"):
        init_state(init, (jax.random.key(0), 1.0), ((),), mesh)
    bad = ((("d", "t"), ()), ((), ()), ((), ()), ((), ()), (("d",),))
    with pytest.raises(PlanError, match=r"step of shape \(\)"):
        init_state(init, (jax.random.key(0), 1.0), bad, mesh)
