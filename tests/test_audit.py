"""What Shardy says a step's collectives are: textbook plans, and the CPU compiler beside it."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir, passmanager
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscaler.errors import PlanError
from jaxscaler.verify import audit as audit_module
from jaxscaler.verify.audit import audit, partition, read
from jaxscaler.verify.hlo import hlo_collectives
from jaxscaler.verify.normal_form import as_written, normal_form, totals

AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"
A2A, CP = "all_to_all", "collective_permute"
constrain = jax.lax.with_sharding_constraint


def abstract_mesh(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def device_mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(step, in_shardings, *args, out_shardings=None):
    jitted = jax.jit(step, in_shardings=in_shardings, out_shardings=out_shardings)
    return jitted.trace(*args).lower(lowering_platforms=("cpu",))


# --- small steps ------------------------------------------------------------------------------
# Each takes a mesh and returns what `lower` gives; shapes divide by 8.

WIDTHS = {"a": (32, 64), "b": (64, 16)}
WEIGHTS = 32 * 64 + 64 * 16


def mlp_step(mesh, storage, weight=lambda w: w, data=("d",)):
    """An SGD step of a two-layer MLP over batch 128, its weights stored as `storage`."""

    def step(p, x, y):
        def loss(p):
            a, b = weight(p["a"]), weight(p["b"])
            h = jnp.tanh(x.astype(a.dtype) @ a)
            return jnp.mean(jnp.square((h @ b).astype(y.dtype) - y))

        return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))

    params = {name: struct(*shape) for name, shape in WIDTHS.items()}
    stored = dict.fromkeys(params, NamedSharding(mesh, storage))
    batch = NamedSharding(mesh, P(*data))
    args = params, struct(128, 32), struct(128, 16)
    return lower(step, (stored, batch, batch), *args, out_shardings=stored)


def megatron_step(mesh, inside=None, seq=None):
    """Gradients of a column/row split pair over axis t: B=8, S=16, D=32, hidden 64.

    `seq`: axis that cuts the sequence outside the pair (sequence parallelism).
    """

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(p, x):
        def loss(p, x):
            x = constrain(constrain(x * 2, at(None, seq, None)), at(None, None, None))
            h = constrain(jnp.tanh(x @ p["a"]), at(None, None, "t"))
            out = constrain(h @ p["b"], at(None, seq, None))
            return jnp.sum(out * out)

        return jax.grad(loss, argnums=(0, 1))(p, x)

    params = {"a": struct(32, 64), "b": struct(64, 32)}
    stored = {"a": at(None, "t"), "b": at("t", None)}
    data = at(None, seq, None)
    return lower(step, (stored, data), params, struct(8, 16, 32), out_shardings=(stored, data))


ACTIVATION = 8 * 16 * 32 * 4  # B * S * D bytes


# --- what the partitioner does ----------------------------------------------------------------


def test_data_parallel_reduces_gradient_bytes_once():
    found = totals(audit(mlp_step(abstract_mesh(d=8), P())))
    assert found == {(AR, ("d",)): (2, 4 * WEIGHTS)}


def test_data_parallel_agrees_with_compiled_cpu_hlo():
    mesh = device_mesh(d=8)
    lowered = mlp_step(mesh, P())
    assert totals(audit(lowered)) == totals(hlo_collectives(lowered.compile().as_text(), mesh))


def test_megatron_pair_is_one_all_reduce_each_way():
    found = totals(audit(megatron_step(abstract_mesh(t=8))))
    assert found == {(AR, ("t",)): (2, 2 * ACTIVATION)}


def test_megatron_pair_agrees_with_compiled_cpu_hlo():
    mesh = device_mesh(t=8)
    lowered = megatron_step(mesh)
    text = lowered.compile().as_text()
    assert totals(audit(lowered)) == totals(hlo_collectives(text, mesh))
    forward, backward = hlo_collectives(text, mesh)
    assert "transpose" not in forward.scope
    assert "transpose(jvp" in backward.scope
    assert "test_audit.py" in forward.source


def test_scope_and_source_say_which_op():
    forward, backward = audit(megatron_step(abstract_mesh(t=8)))
    assert forward.scope == "jit(step)/jvp()/dot_general"
    assert "transpose(jvp" in backward.scope
    assert "test_audit.py:" in forward.source
    assert forward.source.endswith("(megatron_step.<locals>.step.<locals>.loss)")


def zero3_step(mesh):
    def weight(w):
        stored = constrain(w.astype(jnp.bfloat16), NamedSharding(mesh, P("d")))
        return constrain(stored, NamedSharding(mesh, P()))

    return mlp_step(mesh, P("d"), weight)


def test_zero3_gathers_and_scatters_every_weight_once():
    nodes = read(partition(zero3_step(abstract_mesh(d=8))))
    assert totals(as_written(nodes)) == {
        (AG, ("d",)): (2, 2 * WEIGHTS),
        (AR, ("d",)): (2, 2 * WEIGHTS),
    }
    assert totals(normal_form(nodes)) == {
        (AG, ("d",)): (2, 2 * WEIGHTS),
        (RS, ("d",)): (2, 2 * WEIGHTS),
    }
    assert {c.dtype for c in normal_form(nodes)} == {"bfloat16"}


def test_zero3_has_the_same_normal_form_in_cpu_hlo_upcast():
    mesh = device_mesh(d=8)
    text = zero3_step(mesh).compile().as_text()
    assert " reduce-scatter(" not in text  # the CPU compiler writes all-reduce and slice
    assert totals(hlo_collectives(text, mesh)) == {
        (AG, ("d",)): (2, 4 * WEIGHTS),
        (RS, ("d",)): (2, 4 * WEIGHTS),
    }


def test_sequence_parallel_pair_gathers_and_scatters():
    found = totals(audit(megatron_step(abstract_mesh(t=8), seq="t")))
    assert found == {(AG, ("t",)): (2, 2 * ACTIVATION), (RS, ("t",)): (2, 2 * ACTIVATION)}


def qkv_step(mesh):
    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(p, x):
        def loss(p, x):
            x = constrain(x * 2, at("d"))
            q, k, v = (constrain(x @ p[n], at("d", None, "t")) for n in "qkv")
            out = constrain(jnp.tanh(q * k + v) @ p["o"], at("d"))
            return jnp.sum(out * out)

        return jax.grad(loss, argnums=(0, 1))(p, x)

    params = {**{n: struct(32, 64) for n in "qkv"}, "o": struct(64, 32)}
    stored = {**{n: at(None, "t") for n in "qkv"}, "o": at("t")}
    shardings = stored, at("d")
    return lower(step, shardings, params, struct(8, 16, 32), out_shardings=shardings)


def test_input_cotangents_of_q_k_v_are_one_all_reduce():
    nodes = read(partition(qkv_step(abstract_mesh(d=2, t=4))))
    key = (AR, ("t",))
    assert totals(as_written(nodes))[key][0] == 4
    assert totals(normal_form(nodes))[key] == (2, 2 * ACTIVATION // 2)


def test_q_k_v_agree_with_compiled_cpu_hlo():
    mesh = device_mesh(d=2, t=4)
    lowered = qkv_step(mesh)
    text = lowered.compile().as_text()
    assert totals(audit(lowered)) == totals(hlo_collectives(text, mesh, merge=True))
    assert totals(hlo_collectives(text, mesh))[AR, ("t",)][0] == 4  # what the CPU really does


# --- ops that Shardy has no rule for ----------------------------------------------------------


@pytest.mark.parametrize("op", [jnp.square, jax.lax.erf_inv, jax.lax.lgamma, jax.lax.digamma])
def test_elementwise_ops_pass_a_split_on(op):
    mesh = abstract_mesh(t=8)

    def step(x, w):
        return op(constrain(x, NamedSharding(mesh, P(None, "t")))) @ w

    whole = NamedSharding(mesh, P())
    lowered = lower(
        step,
        (None, NamedSharding(mesh, P("t"))),
        struct(16, 64),
        struct(64, 8),
        out_shardings=whole,
    )
    assert f"chlo.{op.__name__}" in lowered.as_text()
    assert totals(audit(lowered)) == {(AR, ("t",)): (1, 16 * 8 * 4)}


def test_top_k_over_a_split_dim_gathers_it():
    mesh = abstract_mesh(d=2, t=4)

    def step(x):
        values, _ = jax.lax.top_k(constrain(x, NamedSharding(mesh, P("d", "t"))), 4)
        return values

    assert totals(audit(lower(step, None, struct(16, 64)))) == {(AG, ("t",)): (1, 8 * 64 * 4)}


UNKNOWN = """
module @m {
  sdy.mesh @mesh = <["d"=2, "t"=4]>
  func.func public @main(%x: tensor<16x64xf32>
      {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {"t"}]>}) -> tensor<16x64xf32> {
    %0 = stablehlo.custom_call @nobody_knows(%x) RULE : (tensor<16x64xf32>) -> tensor<16x64xf32>
    return %0 : tensor<16x64xf32>
  }
}
"""
CUSTOM = (
    "{sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, k]) {i=16, j=64, k=64}"
    " need_replication={j}, custom>}"
)


def parse(text):
    context = lower(lambda x: x, None, struct(8)).compiler_ir("stablehlo").context
    with context:
        return ir.Module.parse(text)


def test_unknown_custom_call_needs_its_operand_whole():
    found = totals(audit(parse(UNKNOWN.replace("RULE", ""))))
    assert found == {(AG, ("d", "t")): (1, 16 * 64 * 4)}


def test_custom_rule_is_kept_and_makes_its_gather_visible():
    found = totals(audit(parse(UNKNOWN.replace("RULE", CUSTOM))))
    assert found == {(AG, ("t",)): (1, 8 * 64 * 4)}


def test_tokens_need_no_rule():
    token = """%t = stablehlo.create_token : !stablehlo.token
    %u = stablehlo.custom_call @effect(%t) : (!stablehlo.token) -> !stablehlo.token
    %0 ="""
    found = totals(audit(parse(UNKNOWN.replace("RULE", "").replace("%0 =", token))))
    assert found == {(AG, ("d", "t")): (1, 16 * 64 * 4)}


def test_audit_leaves_the_step_as_it_was():
    lowered = qkv_step(abstract_mesh(d=2, t=4))
    before = lowered.as_text()
    assert audit(lowered) == audit(lowered.compiler_ir("stablehlo"))
    assert lowered.as_text() == before


@pytest.mark.parametrize(
    "name", ["POPULATE_RULES", "PROPAGATE", "RESHARD", "COLLECTIVES", "CLEAN_UP"]
)
def test_pipelines_parse(name):
    with ir.Context():
        passmanager.PassManager.parse(getattr(audit_module, name))


def test_pass_failure_is_a_plan_error():
    module = scan_step(abstract_mesh(d=2, t=4)).compiler_ir("stablehlo")
    global_to_local = "builtin.module(sdy-convert-global-to-local)"  # refuses open constraints
    with module.context, pytest.raises(PlanError, match="sdy-convert-global-to-local"):
        audit_module._run(global_to_local, module.operation.clone())


def test_mesh_of_any_size():
    lowered = mlp_step(abstract_mesh(d=2048, t=8), P(), data=())
    assert audit(lowered) == ()
    wide = abstract_mesh(d=2048, t=8)

    def step(x, w):
        return constrain(x @ w, NamedSharding(wide, P("d")))

    shardings = NamedSharding(wide, P("d", "t")), NamedSharding(wide, P("t"))
    lowered = lower(step, shardings, struct(4096, 64), struct(64, 8))
    assert totals(audit(lowered)) == {(AR, ("t",)): (1, 2 * 8 * 4)}


# --- loops, calls, shard_map ------------------------------------------------------------------


def scan_step(mesh, layers=5):
    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(p, x):
        def loss(p, x):
            @jax.checkpoint
            def body(h, w):
                a = constrain(jnp.tanh(h @ w["a"]), at("d", "t"))
                return constrain(a @ w["b"], at("d")), None

            h, _ = jax.lax.scan(body, x, p)
            return jnp.sum(h * h)

        return jax.grad(loss)(p, x)

    params = {"a": struct(layers, 32, 64), "b": struct(layers, 64, 32)}
    stored = {"a": at(None, None, "t"), "b": at(None, "t", None)}
    return lower(step, (stored, at("d")), params, struct(16, 32), out_shardings=stored)


def test_scan_counts_every_trip():
    found = totals(audit(scan_step(abstract_mesh(d=2, t=4))))
    assert found == {
        (AR, ("t",)): (10, 10 * 8 * 32 * 4),
        (AR, ("d",)): (10, 10 * 32 * 16 * 4),
    }


def test_scan_agrees_with_compiled_cpu_hlo():
    mesh = device_mesh(d=2, t=4)
    lowered = scan_step(mesh)
    assert totals(audit(lowered)) == totals(hlo_collectives(lowered.compile().as_text(), mesh))


def loop_step(mesh, loop):
    row = NamedSharding(mesh, P(None, "t"))

    def step(x, w):
        def body(h):
            h = constrain(constrain(h, whole), row)
            return constrain(h @ constrain(w, NamedSharding(mesh, P("t"))), whole)

        return loop(body, x)

    whole = NamedSharding(mesh, P())
    return lower(step, None, struct(16, 64), struct(64, 64))


def test_while_loop_with_constant_bounds_and_step():
    lowered = loop_step(
        abstract_mesh(t=8),
        lambda body, x: jax.lax.while_loop(
            lambda s: s[0] < 11, lambda s: (s[0] + 3, body(s[1])), (2, x)
        ),
    )
    assert totals(audit(lowered)) == {(AR, ("t",)): (3, 3 * 16 * 64 * 4)}


def test_loop_of_unknown_length_warns_and_can_be_told():
    lowered = loop_step(
        abstract_mesh(t=8),
        lambda body, x: jax.lax.while_loop(lambda h: jnp.sum(h) < 0, body, x),
    )
    with pytest.warns(UserWarning, match="jit\\(step\\)/while"):
        assert totals(audit(lowered))[AR, ("t",)][0] == 1
    told = audit(lowered, trip_counts={"jit(step)/while": 7})
    assert totals(told)[AR, ("t",)][0] == 7


def test_calls_of_one_function_count_each():
    mesh = abstract_mesh(t=8)

    @jax.jit
    def block(x, w):
        return constrain(constrain(x, NamedSharding(mesh, P(None, "t"))) @ w, whole)

    whole = NamedSharding(mesh, P())
    lowered = lower(
        lambda x, w: block(block(x, w), w),
        (whole, NamedSharding(mesh, P("t"))),
        struct(16, 64),
        struct(64, 64),
    )
    first, second = audit(lowered)
    assert first.kind == second.kind == AR
    assert first.scope == "jit(<lambda>)/jit(block)/dot_general"


def test_both_branches_of_a_conditional_count():
    mesh = abstract_mesh(t=8)
    whole, row = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "t"))

    def step(i, x, w):
        def product(x):
            return constrain(x @ w, whole)

        return jax.lax.cond(i > 0, product, lambda x: product(jnp.sin(x)), constrain(x, row))

    shardings = None, None, NamedSharding(mesh, P("t"))
    lowered = lower(step, shardings, struct(dtype=jnp.int32), struct(16, 64), struct(64, 64))
    assert totals(audit(lowered))[AR, ("t",)] == (2, 2 * 16 * 64 * 4)


def shard_map_step(mesh):
    def inner(x):
        y = jax.lax.ppermute(x, "t", [(i, (i + 1) % 4) for i in range(4)])
        z = jax.lax.all_to_all(y, "t", 0, 1, tiled=True)
        s = jax.lax.psum(jax.lax.psum(z, "d") * 2, "d")
        g = jax.lax.all_gather(s, "t", axis=1, tiled=True)
        return jax.lax.psum_scatter(g, ("d", "t"), scatter_dimension=1, tiled=True)

    mapped = jax.shard_map(inner, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return lower(mapped, NamedSharding(mesh, P("d")), struct(64, 32))


def test_collectives_of_shard_map_agree_with_compiled_cpu_hlo():
    size = 32 * 32 * 4
    expected = {
        (CP, ("t",)): (1, size),
        (A2A, ("t",)): (1, size),
        (AR, ("d",)): (2, 2 * size),
        (AG, ("t",)): (1, 4 * size),
        (RS, ("d", "t")): (1, 4 * size),
    }
    mesh = device_mesh(d=2, t=4)
    lowered = shard_map_step(mesh)
    assert totals(audit(lowered)) == expected
    assert totals(hlo_collectives(lowered.compile().as_text(), mesh)) == expected
    assert all(c.scope.startswith("jit(inner)/shard_map/") for c in audit(lowered))


def test_shard_map_over_some_axes_knows_the_split_of_the_others():
    mesh = abstract_mesh(d=2, t=4)

    def step(x, w):
        mapped = jax.shard_map(
            lambda x: jax.lax.psum(jnp.sin(x), "d"),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P(),
            axis_names={"d"},
        )
        return mapped(x @ w)

    shardings = NamedSharding(mesh, P("d")), NamedSharding(mesh, P(None, "t"))
    lowered = lower(step, shardings, struct(16, 32), struct(32, 64))
    assert totals(audit(lowered)) == {(AR, ("d",)): (1, 8 * 16 * 4)}
