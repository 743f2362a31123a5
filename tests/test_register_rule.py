"""Kernels that the planner does not look into: rules that users state, numbers that stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend import core as jex
from jax.interpreters import mlir

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.graph import registry
from jaxscaler.graph.build import build
from jaxscaler.lower.step import achieved
from jaxscaler.trace import trace


def _scale_rows(x, w):
    """Pallas, interpreted: each block of 2 rows times w, plus its sum. [n, d], [d] -> [n, d]."""

    def kernel(x_ref, w_ref, out_ref):
        scaled = x_ref[...] * w_ref[...]
        out_ref[...] = scaled + scaled.sum(axis=1, keepdims=True)

    n, d = x.shape
    return pl.pallas_call(
        kernel,
        grid=(n // 2,),
        in_specs=[pl.BlockSpec((2, d), lambda i: (i, 0)), pl.BlockSpec((d,), lambda i: (0,))],
        out_specs=pl.BlockSpec((2, d), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x, w)


scale_rows = js.register_rule(
    _scale_rows, "n d, d -> n d", need_replication_factors=("d",),
    flops=lambda x, w: 3 * x.size, bytes=lambda x, w: 8 * x.size,
)  # fmt: skip


def _pull_back(x, w, g):
    _, pull = jax.vjp(lambda x, w: x * w + (x * w).sum(axis=1, keepdims=True), x, w)
    return pull(g)[0]


pull_back = js.register_rule(
    _pull_back, "n d, d, n d -> n d", need_replication_factors=("d",), flops=1e3
)


@jax.custom_vjp
def layer(x, w):
    return scale_rows(x, w)


layer.defvjp(
    lambda x, w: (scale_rows(x, w), (x, w)),
    lambda kept, g: (pull_back(*kept, g), jnp.zeros_like(kept[1])),
)


def step(params, x):
    def loss(params):
        y = layer(x @ params["a"], params["w"])
        return jnp.mean(jnp.tanh(y @ params["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "a": jax.random.normal(keys[0], (16, 32)),
        "b": jax.random.normal(keys[1], (32, 8)),
        "w": jax.random.normal(keys[2], (32,)),
    }
    return params, jax.random.normal(keys[3], (64, 16))


def kernels_of(graph):
    return [graph.kinds[op.kind] for op in graph.ops
            if graph.kinds[op.kind].primitive == registry.PRIMITIVE]  # fmt: skip


def test_a_kernel_is_one_op_with_its_price():
    forward, backward = kernels_of(build(trace(step, *arguments())))
    assert (forward.flops, forward.nbytes) == (3 * 64 * 32, 8 * 64 * 32)
    assert (backward.flops, backward.nbytes) == (1e3, None)
    (rows, features) = (forward.rule.factors[f[0]] for f in forward.rule.operands[0])
    assert (rows.kind, features.kind) == ("pass", "frozen")


@pytest.mark.parametrize("recipe", [list, recipes.data_parallel])
def test_same_numbers_on_eight_devices(recipe):
    expected, value = jax.jit(step)(*arguments())
    run = js.parallelize(step, cluster="cpu:8", constraints=recipe(), donate=())
    got, loss = run(*arguments())
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
    compiled = run.compiled()
    assert achieved(compiled.compiled, compiled) == ()


def test_each_device_runs_the_kernel_on_its_part():
    run = js.parallelize(step, cluster="cpu:8", constraints=recipes.data_parallel(), donate=())
    run.plan_for(lambda: arguments()[0], batch=arguments()[1])
    found = run.planned.layouts()
    (ins, outs), _ = found.kernels.values()
    assert ins == ((("device",), ()), ((),)) and outs == ((("device",), ()),)
    text = run.compiled().compiled.as_text()
    assert "all-gather" not in text


# --- Pallas kernels as they are -----------------------------------------------------------------


def attention(q, k, v):
    """Pallas, interpreted: one head of one sample at a time, queries by 8, keys summed up by 8."""

    def kernel(q_ref, k_ref, v_ref, out_ref, sums_ref):
        @pl.when(pl.program_id(3) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)
            sums_ref[...] = jnp.zeros_like(sums_ref)

        weights = jnp.exp(q_ref[0, 0] @ k_ref[0, 0].T)
        out_ref[0, 0] += weights @ v_ref[0, 0]
        sums_ref[0, 0] += weights.sum(axis=1)

    b, n, s, h = q.shape
    queries = pl.BlockSpec((1, 1, 8, h), lambda b, n, i, j: (b, n, i, 0))
    keys = pl.BlockSpec((1, 1, 8, h), lambda b, n, i, j: (b, n, j, 0))
    out, sums = pl.pallas_call(
        kernel,
        grid=(b, n, s // 8, s // 8),
        in_specs=[queries, keys, keys],
        out_specs=[queries, pl.BlockSpec((1, 1, 8), lambda b, n, i, j: (b, n, i))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((b, n, s), q.dtype),
        ],
        interpret=True,
        name="softly",
    )(q, k, v)
    return out / sums[..., None]


def heads_step(w, x):
    q = (x @ w).reshape(8, 16, 2, 4).transpose(0, 2, 1, 3)
    return w * 0.9, (attention(q, q, q) ** 2).sum()


HEADS = 0.1 * jax.random.normal(jax.random.key(1), (8, 8)), jnp.ones((128, 8))


def test_a_pallas_call_is_split_where_its_grid_walks():
    w, x = HEADS
    x = x + jnp.arange(128.0)[:, None] / 128
    q = (x @ w).reshape(8, 16, 2, 4).transpose(0, 2, 1, 3)
    plain = jax.nn.softmax(q @ q.transpose(0, 1, 3, 2), axis=-1) @ q
    lines = [js.op_trans(js.ops(primitive="pallas_call"), js.Split(js.ANY), js.ALL)]
    run = js.parallelize(heads_step, cluster="cpu:8", constraints=lines, donate=())
    _, total = run(w, x)
    np.testing.assert_allclose(total, (plain**2).sum(), rtol=1e-5)
    ((ins, outs),) = run.planned.layouts().kernels.values()
    assert sum(map(len, ins[0])) == len(run.plan.axes)
    assert ins[0] == ins[1] == ins[2] == outs[0] and not any(ins[0][2:])
    (kind,) = [k for k in run.planned.graph.kinds if k.primitive == "pallas_call"]
    assert kind.flops >= 4 * 8 * 2 * 16 * 16 * 4


def test_blocks_of_more_than_one_row_are_not_cut():
    graph = build(trace(lambda x, w: _scale_rows(x, w).sum(), jnp.ones((64, 32)), jnp.ones(32)))
    (kind,) = [k for k in graph.kinds if k.primitive == "pallas_call"]
    major, minor = (kind.rule.factors[f] for f in kind.rule.operands[0][0])
    assert (major.size, major.kind, minor.size, minor.kind) == (32, "pass", 2, "frozen")
    assert kind.rule.results[0][0] == kind.rule.operands[0][0]


def place_asking(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * pl.program_id(0)

    spec = pl.BlockSpec((1, 8), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, grid=(16,), in_specs=[spec], out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True,
    )(x)  # fmt: skip


def summing(x):
    def kernel(x_ref, out_ref):
        out_ref[...] += x_ref[...]

    return pl.pallas_call(
        kernel, grid=(16,), in_specs=[pl.BlockSpec((1, 8), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 8), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((1, 8), x.dtype), interpret=True,
    )(x)  # fmt: skip


def reversing(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return pl.pallas_call(
        kernel, grid=(16,), in_specs=[pl.BlockSpec((1, 8), lambda i: (15 - i, 0))],
        out_specs=pl.BlockSpec((1, 8), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True,
    )(x)  # fmt: skip


@pytest.mark.parametrize("kernel", [place_asking, summing, reversing])
def test_a_kernel_whose_runs_are_not_apart_is_whole_and_says_so(kernel):
    graph = build(trace(lambda x: kernel(x).sum(), jnp.ones((16, 8))))
    (kind,) = [k for k in graph.kinds if k.primitive == "pallas_call"]
    assert all(f.kind == "frozen" for f in kind.rule.factors)
    assert any("pallas_call" in note for note in graph.notes)


def test_a_whole_kernel_runs_on_every_device():
    def plain(w, x):
        return w * 0.9, place_asking(x @ w).sum()

    w, x = jnp.ones((8, 8)), jnp.arange(128.0).reshape(16, 8)
    run = js.parallelize(plain, cluster="cpu:8", donate=())
    np.testing.assert_allclose(run(w, x)[1], plain(w, x)[1], rtol=1e-5)
    assert list(run.planned.layouts().kernels.values()) == [((((), ()),), (((), ()),))]


def test_a_rule_for_a_pallas_kernel_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_named", {})
    js.register_rule(
        "softly", "b n q h, b n k h, b n k h -> b n q h, b n q",
        need_replication_factors=("n", "h"), flops=12.0,
    )  # fmt: skip
    graph = build(trace(heads_step, *HEADS))
    (kind,) = [k for k in graph.kinds if k.primitive == "pallas_call"]
    free = [kind.rule.factors[f[0]].kind == "pass" for f in kind.rule.operands[0]]
    assert kind.flops == 12.0 and free == [True, False, False, False]
    assert "its grid does not walk" in kind.rule.note  # q, which the rule frees


# --- rules that can not be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("n d, d", {}, "->"),
        ("n d, d -> n d", {"need_replication_factors": ("q",)}, "no factor 'q'"),
    ],
)
def test_a_rule_that_can_not_be_read(rule, options, said):
    with pytest.raises(js.ConstraintError, match=said):
        js.register_rule(_scale_rows, rule, **options)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("n d, n -> n d", "factor 'n' is 64 in operand 0 but 32 in operand 1"),
        ("n d e, d -> n d", "operand 0 has shape .* the rule gives it 3 dims"),
        ("n d -> n d", "has 1 operands and 1 results, the step gives it 2 and takes 1"),
    ],
)
def test_a_rule_that_does_not_fit(rule, said):
    bad = js.register_rule(_scale_rows, rule)
    with pytest.raises(js.ConstraintError, match=said):
        build(trace(lambda x, w: bad(x, w).sum(), jnp.ones((64, 32)), jnp.ones(32)))


def test_a_kernel_has_no_derivative_of_its_own():
    with pytest.raises(NotImplementedError, match="registered_kernel"):
        jax.grad(lambda x: scale_rows(x, jnp.ones(4)).sum())(jnp.ones((4, 4)))


def test_a_batched_kernel_has_a_factor_more():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 4, 3)), rng.standard_normal((5, 4))

    def twice(x, w):  # [rows, lane, d] and [other lane, d]
        return jax.vmap(jax.vmap(scale_rows, (1, None), 1), (None, 0))(x, w)

    x, w = jnp.asarray(x.transpose(0, 2, 1)), jnp.asarray(w)
    plain = jax.vmap(jax.vmap(_scale_rows, (1, None), 1), (None, 0))(x, w)
    np.testing.assert_allclose(jax.jit(twice)(x, w), plain, rtol=1e-6)
    graph = build(trace(lambda x, w: (twice(x, w).sum(), twice(x, w).max()), x, w))
    assert (
        len({op.kind for op in graph.ops} & {graph.kinds.index(k) for k in kernels_of(graph)}) == 1
    )
    kernel = kernels_of(graph)[0]
    assert (kernel.flops, kernel.nbytes) == (15 * 3 * 8 * 4, 15 * 8 * 8 * 4)
    kinds = [[kernel.rule.factors[f[0]].kind for f in dims] for dims in kernel.rule.results]
    assert kinds == [["pass", "pass", "pass", "frozen"]]
    with pytest.raises(js.ConstraintError, match="leading dims open"):
        jax.vmap(js.register_rule(_scale_rows, "... n d, ... d -> ... n d"), (0, None))(x, w)


def test_a_primitive_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_named", {})
    shift = jex.Primitive("shift_rows")
    shift.def_impl(lambda x: jnp.roll(x, 1, axis=1))
    shift.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        shift, mlir.lower_fun(lambda x: jnp.roll(x, 1, axis=1), multiple_results=False)
    )

    def rolled(w, x):
        return w * 0.9, (shift.bind(x @ w) * jnp.arange(8.0)).sum()

    js.register_rule("shift_rows", "n d -> n d", need_replication_factors=("d",), flops=5.0)
    w, x = jnp.eye(8), jnp.arange(128.0).reshape(16, 8)
    lines = [js.op_trans(js.ops(primitive="shift_rows"), js.Split(js.ANY), js.ALL)]
    run = js.parallelize(rolled, cluster="cpu:8", constraints=lines, donate=())
    np.testing.assert_allclose(run(w, x)[1], (jnp.roll(x, 1, axis=1) * jnp.arange(8.0)).sum())
    assert [k.flops for k in run.planned.graph.kinds if k.primitive == "shift_rows"] == [5.0]
    assert list(run.planned.layouts().kernels.values()) == [
        (((("device",), ()),), ((("device",), ()),))
    ]
