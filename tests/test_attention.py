"""Attention kernels: traced and planned where none of them runs, and models that use one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import jaxscaler as js
from jaxscaler import _compat, recipes
from jaxscaler.graph.build import build
from jaxscaler.trace import trace
from models import attention, gpt, llama
from models.workload import causal_softmax

B, T, N, H = 8, 256, 16, 64


def attention_step(implementation, causal=True, heads=N):
    """x W -> attention -> mean square, and a step of gradient descent, in bfloat16."""

    def step(w, x):
        def loss(w):
            q = (x @ w).reshape(B, T, N, H)
            k = q[:, :, :heads]
            y = jax.nn.dot_product_attention(
                q, k, k, is_causal=causal, implementation=implementation
            )
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return w - jax.grad(loss)(w)

    return step


ARGUMENTS = (
    jax.ShapeDtypeStruct((N * H, N * H), jnp.bfloat16),
    jax.ShapeDtypeStruct((B, T, N * H), jnp.bfloat16),
)


def kinds(graph, name):
    return [graph.kinds[op.kind] for op in graph.ops if name in graph.kinds[op.kind].primitive]


@pytest.mark.parametrize(("causal", "heads"), [(True, N), (False, N), (True, 4)])
def test_cudnn_on_a_host_without_it(causal, heads):
    graph = build(trace(attention_step("cudnn", causal, heads), *ARGUMENTS))
    (forward,), (backward,) = kinds(graph, "fwd_wrapper"), kinds(graph, "bwd_wrapper")
    assert forward.flops == 4 * B * N * T * T * H * (0.5 if causal else 1)
    assert backward.flops == 2.5 * forward.flops
    assert (B, N, T) in forward.result_shapes  # the statistics that the backward pass reads
    assert all(
        np.prod(s) < B * N * T * T
        for k in graph.kinds
        for s in (*k.operand_shapes, *k.result_shapes)
    )
    for kind in (forward, backward):
        dims = kind.rule.operands[0]
        free = [kind.rule.factors[f[0]].kind == "pass" for f in dims]
        assert free == [True, False, True, False]
        assert kind.rule.factors[dims[2][0]].size == heads


def test_the_host_is_asked_again_afterwards():
    trace(attention_step("cudnn"), *ARGUMENTS)
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.make_jaxpr(attention_step("cudnn"))(*ARGUMENTS)


def test_a_capability_is_compared():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    with _compat.cudnn_on_any_host("8.0"):
        assert fused.check_compute_capability("8.0")
        assert not fused.check_compute_capability("9.0")
        assert not fused.is_cuda_compute_capability_equal("10.3")


def test_the_clusters_gpu_is_asked():
    def wide(x):  # heads of 256: from Hopper on
        return jax.nn.dot_product_attention(x, x, x, implementation="cudnn").sum()

    x = jax.ShapeDtypeStruct((8, 64, 4, 256), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="256"):
        js.plan(wide, x, cluster="a100:8", cache=False)
    js.plan(wide, x, cluster="h100:8", cache=False)


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_attention_is_split_over_samples_or_heads(implementation):
    step = attention_step(implementation)
    plan = js.plan(step, *ARGUMENTS, cluster="h100:8", time_limit=20, cache=False)
    assert plan.predicted.compute > 0
    if implementation == "cudnn":
        cuts = [d.cuts for d in plan.decisions if "attention" in d.subject and d.what == "op"]
        assert len(cuts) == 2 and all(cuts)


def tpu_flash_step(w, x):
    """Like `attention_step`, on a TPU kernel with heads before the sequence."""

    def loss(w):
        q = (x @ w).reshape(2, 256, 4, 128).transpose(0, 2, 1, 3)
        return flash_attention(q, q, q, causal=True).mean()

    return w - jax.grad(loss)(w)


TPU = (
    jax.ShapeDtypeStruct((64, 4 * 128), jnp.float32),
    jax.ShapeDtypeStruct((2 * 256, 64), jnp.float32),
)


def test_pallas_flash_attention_is_split_over_samples_and_heads():
    graph = build(trace(tpu_flash_step, *TPU))
    forward, *backward = kinds(graph, "pallas_call")
    work = 4 * 2 * 4 * 256 * 256 * 128  # its author does not discount the mask
    assert work <= forward.flops < 1.01 * work and len(backward) == 2
    # the two backward kernels make scores and weights twice: seven products, not five
    assert 3.5 * work <= sum(kind.flops for kind in backward) < 3.7 * work
    for kind in (forward, *backward):
        for dims in (*kind.rule.operands, *kind.rule.results):
            assert [kind.rule.factors[f[0]].kind for f in dims] == ["pass"] * 2 + ["frozen"] * 2


@pytest.mark.parametrize("mesh", [None, {"data": 2, "model": 4}])
@pytest.mark.parametrize("lines", [[], [js.op_trans(js.ops(), js.Replicate())]])
def test_a_mosaic_kernel_lowers_on_many_devices(lines, mesh):
    refused = jax.jit(tpu_flash_step, in_shardings=replicated()).trace(*TPU)
    with pytest.raises(NotImplementedError, match="shard_map"):
        refused.lower(lowering_platforms=("tpu",))
    step = js.parallelize(tpu_flash_step, cluster="cpu:8", constraints=lines, mesh=mesh)
    step.plan_for(lambda: TPU[0], batch=TPU[1])
    assert len(step.planned.layouts().kernels) == 3
    assert step.compiled().lower("tpu").as_text().count("tpu_custom_call") >= 3


def replicated():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


MODELS = {"gpt": partial(gpt.workload), "llama": partial(llama.workload, scan=True)}


@pytest.mark.parametrize("name", MODELS)
def test_flash_on_eight_devices_is_xla_on_one(name):
    with jax.enable_x64(True):
        w = MODELS[name](dtype="float64", seq=16)
        expected = jax.jit(w.step)(jax.jit(w.init)(jax.random.key(0)), w.make_batch(0))
        w = MODELS[name](dtype="float64", seq=16, attention="flash")
        step = js.parallelize(w.step, cluster="cpu:8", constraints=recipes.zero(), time_limit=20)
        state = step.init(w.init, jax.random.key(0), batch=w.batch)
        got = step(state, w.make_batch(0))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)


def test_chunks_are_exact(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", 4)
    with jax.enable_x64(True):
        q, k, v = (jax.random.normal(jax.random.key(i), (2, 12, 2, 3, 5)) for i in range(3))
        k, v = k[:, :, :, 0], v[:, :, :, 0]

        def plain(q, k, v):
            weights = causal_softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k))
            return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)

        out, pull = jax.vjp(attention.flash_attention, q, k, v)
        expected, pull_plain = jax.vjp(plain, q, k, v)
        np.testing.assert_allclose(out, expected, rtol=1e-10)
        for a, b in zip(pull(out), pull_plain(out)):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_flash_holds_no_square():
    sizes = {}
    for kind in ("xla", "flash"):
        w = gpt.workload(seq=1024, batch=2, context=1024, attention=kind)
        state = jax.eval_shape(w.init, jax.random.key(0))
        graph = build(trace(w.step, state, w.batch))
        sizes[kind] = max(np.prod(v.shape) for v in graph.values)
    square = 2 * 4 * 1024 * 1024
    assert sizes["xla"] >= square > sizes["flash"]


@pytest.mark.parametrize("name", MODELS)
def test_models_with_cudnn_are_planned_where_it_is_not(name):
    """State is made without it; a GPU's part of the samples is all that it is given."""
    w = MODELS[name](seq=32, attention="cudnn")
    step = js.parallelize(w.step, cluster="h100:8", constraints=recipes.zero(), cache=False)
    step.plan_for(w.init, jax.random.key(0), batch=w.batch)
    kernels = [d for d in step.plan.decisions if "attention" in d.subject and d.what == "op"]
    assert len(kernels) >= 2
    assert all(d.cuts == (("device", "batch"),) for d in kernels)
    with _compat.cudnn_on_any_host():
        text = step.compiled().lower("cuda").as_text()
    assert text.count("@CustomSPMDPartitioning") >= 2


def test_an_unknown_attention():
    with pytest.raises(ValueError, match="xla, flash, cudnn"):
        gpt.workload(attention="ring")
