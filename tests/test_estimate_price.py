"""The price of a spread model: agreement with the planner's own price of whole steps, with textbook
traffic and closed forms, and what changes it how."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscaler
from jaxscaler import ConfigError, recipes
from jaxscaler.cost.collective import collective_time
from jaxscaler.estimate import flops
from jaxscaler.estimate.body import AGAIN, LAYER, MATMUL, SCORES, body_of
from jaxscaler.estimate.config import ModelConfig, find_model
from jaxscaler.estimate.constants import Constants
from jaxscaler.estimate.inference import serve
from jaxscaler.estimate.memory import leaves_of
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig, axes_of, cluster_of
from jaxscaler.estimate.price import price
from jaxscaler.estimate.search import best_ways, family, ways
from jaxscaler.estimate.template import Task
from models import llama, moe

LLAMA = ModelConfig("llama", "llama", 1024, 6, 16, 8, ffn=4096, vocab=32000, context=2048,
                    gated=True)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "plain": ModelConfig("plain", "llama", 512, 2, 8, 4, 128, 1024, 4096, tied=True,
                         qkv_bias=True),
    "gpt": ModelConfig("gpt", "gpt", 512, 2, 8, vocab=4096, context=512, tied=True,
                       positions=True),
    "neox": ModelConfig("neox", "gpt", 512, 2, 8, vocab=4096, context=512),
    "moe": ModelConfig("moe", "moe", 512, 2, 8, 4, ffn=1024, vocab=4096, gated=True, experts=8,
                       chosen=2),
    "t5": ModelConfig("t5", "t5", 512, 2, 8, head_size=32, ffn=1024, vocab=4096, gated=True),
}  # fmt: skip
SEQ = 512
PLANNERS = Constants(hidden=0.6)


def body(model, micro=2, seq=SEQ, tp=1, cp=1, ep=1, sp=True, **task):
    cluster = cluster_of("h100", 8)
    axes = axes_of(cluster, {"dp": 8 // (tp * cp * ep), "ep": ep, "cp": cp, "tp": tp})
    given = Task(model, max(tp, model.kv_heads), model.vocab, seq, **task)
    inner = tuple(axes[name] for name in ("ep", "cp", "tp"))
    return body_of(given, micro, inner, sp and tp > 1, cluster.device)


def total(body, layers, kind, field="flops"):
    return sum(
        getattr(part, field) * (layers if part.where == LAYER else 1)
        for part in body.parts
        if part.kind == kind
    )


# -- the planner's own price -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "ways", "batch", "within"),
    [
        ([], {}, 2, 0.01),
        pytest.param(recipes.data_parallel(), {"dp": 8}, 16, 0.05, marks=pytest.mark.slow),
        (recipes.zero(3), {"dp": 8, "zero": 3}, 16, 0.05),
        (recipes.tensor_parallel(), {"tp": 8, "sp": False}, 8, 0.05),
        pytest.param(
            recipes.tensor_parallel(sequence=True), {"tp": 8}, 8, 0.1, marks=pytest.mark.slow
        ),
    ],
    ids=["one", "dp", "zero3", "tp", "sp"],
)
def test_a_step_costs_what_the_planner_says_of_it_under_the_same_recipe(
    recipe, ways, batch, within
):
    parallel = ParallelConfig(**ways)
    cluster = cluster_of("h100", parallel.devices)
    work = llama.workload(
        "tiny", batch=batch, seq=2048, layers=6, hidden=1024, heads=16, kv_heads=8, ffn=4096,
        vocab=32000, context=2048, attention="flash",
    )  # fmt: skip
    plan = jaxscaler.plan(
        work.step, work.state, work.batch, cluster=cluster, constraints=recipe, cache=False
    )
    found = price(
        LLAMA, parallel, cluster, batch=batch, seq=2048, micro_batch=batch // parallel.dp,
        constants=PLANNERS,
    )  # fmt: skip
    assert found.seconds == pytest.approx(plan.predicted.seconds, rel=within)


@pytest.mark.parametrize("remat", [False, True])
def test_memory_is_what_the_planner_says_of_a_loop_over_layers(remat):
    work = llama.workload(
        "tiny", batch=2, seq=2048, layers=6, hidden=1024, heads=16, kv_heads=8, ffn=4096,
        vocab=32000, context=2048, attention="flash", scan=True, remat=remat,
    )  # fmt: skip
    plan = jaxscaler.plan(work.step, work.state, work.batch, cluster="h100:1", cache=False)
    found = price(
        LLAMA, ParallelConfig(), cluster_of("h100", 1), batch=2, seq=2048, micro_batch=2,
        recompute="full" if remat else "none", constants=PLANNERS,
    )  # fmt: skip
    assert found.memory_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.05)


# -- what is in a micro-batch ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_traced_leaves_are_those_of_the_closed_forms(name):
    model = MODELS[name]
    for tp, ep in ((1, 1), (2, 4 if model.experts else 1)):
        found = body(model, tp=tp, ep=ep).leaves
        for where in {leaf.where for leaf in found}:
            for expert in (False, True):
                mine = [
                    x for x in leaves_of(model, tp, ep) if (x.where, x.expert) == (where, expert)
                ]
                theirs = [x for x in found if (x.where, x.expert) == (where, expert)]
                assert sum(x.local for x in mine) == sum(x.local for x in theirs)
    counts = {"layer": model.layers}
    whole = sum(leaf.size * counts.get(leaf.where, 1) for leaf in body(model).leaves)
    assert whole == model.parameters


@pytest.mark.parametrize("name", MODELS)
def test_the_traced_products_are_those_of_the_closed_form(name):
    model = MODELS[name]
    found = body(model, attention="unfused", dtype="bfloat16")
    work = flops.training(model, 2, SEQ)
    scores = total(found, model.layers, SCORES)
    assert scores == pytest.approx(work.scores, rel=1e-12)
    assert total(found, model.layers, MATMUL) == pytest.approx(work.total - work.scores, rel=1e-12)


def test_a_flash_kernel_works_on_half_of_the_scores_and_makes_them_again():
    work = flops.training(LLAMA, 2, SEQ, causal=True)
    assert total(body(LLAMA), 6, SCORES) == pytest.approx(work.scores * 7 / 6)


@pytest.mark.parametrize(("recompute", "kinds"), [("full", 2), ("selective", 1), ("none", 0)])
def test_recomputation_runs_the_forward_pass_again(recompute, kinds):
    found = body(MODELS["gpt"], attention="unfused", recompute=recompute)
    again = [part for part in found.parts if part.phase == AGAIN and part.flops]
    kinds_again = {part.kind for part in again} & {MATMUL, SCORES}
    assert kinds_again == {0: set(), 1: {SCORES}, 2: {SCORES, MATMUL}}[kinds]
    if recompute == "full":
        assert found.saved == 2 * SEQ * 512 * 2


def test_any_batch_is_the_traced_one_by_arithmetic():
    one, four = body(LLAMA, micro=1), body(LLAMA, micro=4)
    for few, many in zip(one.parts, four.parts):
        assert few[:3] == many[:3]
        assert many.runs == few.runs
        if few.kind in (MATMUL, SCORES):
            assert many.flops == 4 * few.flops


def collectives(found, axis):
    """(kind, phase) -> (times, bytes) within a layer, of tensors larger than a number per token."""
    return {
        (part.kind.split(":")[1], part.phase): (part.runs, part.nbytes)
        for part in found.parts
        if part.where == LAYER and part.kind.startswith(f"{axis}:")
    }


def test_tensor_parallelism_reduces_twice_each_way():
    activation = 2 * SEQ * 1024 * 2
    found = collectives(body(LLAMA, tp=4, sp=False), "tp")
    assert found == {
        ("all_reduce", "forward"): (2, 2 * activation),
        ("all_reduce", "backward"): (2, 2 * activation),
    }


def test_sequence_parallelism_gathers_and_scatters_as_much():
    activation = 16 * SEQ * 1024 * 2
    found = collectives(body(LLAMA, micro=16, tp=4), "tp")
    for kind in ("all_gather", "reduce_scatter"):
        for phase in ("forward", "backward"):
            times, nbytes = found[kind, phase]
            assert times >= 2
            assert nbytes == pytest.approx(2 * activation, rel=0.02)


def test_context_parallelism_gathers_keys_and_values():
    found = collectives(body(LLAMA, cp=4), "cp")
    keys_and_values = 2 * (2 * SEQ * 512 * 2)
    assert found["all_gather", "forward"] == (2, keys_and_values)
    assert found["reduce_scatter", "backward"] == (2, keys_and_values)


def test_experts_are_reached_by_two_exchanges_each_way():
    found = collectives(body(MODELS["moe"], ep=4), "ep")
    rows = 2 * (2 * SEQ) * 512 * 2  # chosen * tokens of a device * hidden * bytes
    for phase in ("forward", "backward"):
        times, nbytes = found["all_to_all", phase]
        assert (times, nbytes) == (2, 2 * rows)


def test_keys_are_copied_where_tensor_parallelism_is_wider():
    model = ModelConfig("wide", "llama", 512, 2, 8, 2, ffn=1024, vocab=4096, gated=True)
    found = price(model, ParallelConfig(tp=8), cluster_of("h100", 8), batch=2, seq=SEQ,
                  constants=PLANNERS)  # fmt: skip
    assert found.fits
    odd = ModelConfig("odd", "llama", 384, 2, 24, 3, ffn=1024, vocab=4096, gated=True)
    with pytest.raises(ConfigError, match=r"tp=8 .*kv_heads=3"):
        price(odd, ParallelConfig(tp=8), cluster_of("h100", 8), batch=2, seq=SEQ)


# -- the algebra of a step -------------------------------------------------------------------------


def step(model=LLAMA, batch=32, cluster="a100", **given):
    names = set(ParallelConfig.__dataclass_fields__)
    parallel = ParallelConfig(**{k: given.pop(k) for k in list(given) if k in names})
    options = {"seq": SEQ, "constants": PLANNERS, "micro_batch": 1} | given
    return price(model, parallel, cluster_of(cluster, parallel.devices), batch=batch, **options)


def test_accumulation_multiplies_everything_but_the_update_and_the_reduction():
    few, many = step(batch=16, dp=8), step(batch=64, dp=8)
    assert (few.micro_batches, many.micro_batches) == (2, 8)
    for kind in (MATMUL, SCORES, "vector", "launch"):
        assert many.parts[kind] == pytest.approx(4 * few.parts[kind])
    assert many.parts["update"] == few.parts["update"]
    assert many.shared["fabric"] == few.shared["fabric"]


def test_zero_3_gathers_for_every_micro_batch():
    few, many = step(batch=16, dp=8, zero=3), step(batch=64, dp=8, zero=3)
    assert many.shared["fabric"] == pytest.approx(4 * few.shared["fabric"])
    assert step(batch=64, dp=8, zero=1).shared["fabric"] < few.shared["fabric"] * 2


def test_replicas_reduce_their_gradients():
    found = step(dp=8, zero=0)
    axis = axes_of(cluster_of("a100", 8), {"all": 8})["all"]
    nbytes = 4 * LLAMA.parameters / LLAMA.layers
    assert found.shared["fabric"] == pytest.approx(
        LLAMA.layers * float(collective_time("all_reduce", axis, nbytes))
    )
    assert found.parts["dp"] + found.hidden == pytest.approx(found.shared["fabric"])


def test_state_split_inside_a_node_gathers_there():
    wide, inside = step(dp=32, zero=3), step(dp=32, zero=3, shard=8)
    assert inside.shared["fabric"] > 0 and inside.shared["network"] < wide.shared["network"]
    assert inside.memory["parameters"] == pytest.approx(4 * wide.memory["parameters"])


def test_a_pipeline_has_the_bubble_of_its_closed_form():
    model = ModelConfig("deep", "llama", 1024, 64, 16, 8, ffn=4096, vocab=1024, gated=True)
    found = step(model, batch=16, pp=4)
    busy = found.seconds - sum(found.parts[k] for k in ("bubble", "pp", "update"))
    assert found.parts["bubble"] == pytest.approx(busy * 3 / 16, rel=0.05)  # (p - 1) / m
    turns = step(model, batch=16, pp=4, schedule="interleaved", chunks=2)
    assert turns.parts["bubble"] == pytest.approx(found.parts["bubble"] / 2)
    assert (
        step(model, batch=16, pp=4, schedule="zero-bubble").parts["bubble"] < found.parts["bubble"]
    )


def test_constants_divide_what_they_are_of():
    slow = step(dp=8, constants=Constants(matmul=0.5, vector=0.25, fabric=0.5))
    fast = step(dp=8, constants=Constants())
    assert slow.parts[MATMUL] == pytest.approx(2 * fast.parts[MATMUL])
    assert slow.parts["vector"] == pytest.approx(4 * fast.parts["vector"])
    assert slow.parts["dp"] == pytest.approx(2 * fast.parts["dp"])
    assert slow.shared == fast.shared and slow.parts["launch"] == fast.parts["launch"]


def test_the_parts_are_the_step_and_mfu_is_its_flops():
    found = step(tp=2, pp=2, dp=2, zero=1)
    assert sum(found.parts.values()) == found.seconds
    peak = 8 * cluster_of("a100", 8).device.flops("bfloat16")
    assert found.mfu == pytest.approx(flops.training(LLAMA, 32, SEQ).total / found.seconds / peak)
    assert found.hfu == found.mfu
    assert step(recompute="full", dp=8).hfu > step(recompute="full", dp=8).mfu


def test_eight_bits_speed_up_products_with_weights_alone():
    wide, narrow = step(cluster="h100", dp=8), step(cluster="h100", dp=8, dtype="float8")
    assert narrow.parts[MATMUL] == pytest.approx(wide.parts[MATMUL] * 989 / 1979)
    assert narrow.parts[SCORES] == wide.parts[SCORES]


def test_adapters_leave_out_what_is_frozen():
    full, lean = step(dp=8, stack="pytorch"), step(dp=8, stack="pytorch", lora=8)
    assert lean.memory["optimizer"] < 0.05 * full.memory["optimizer"]
    assert lean.parts["dp"] < full.parts["dp"] and lean.parts[MATMUL] < full.parts[MATMUL]
    packed = step(dp=8, stack="pytorch", lora=8, base="int4")
    assert packed.memory["parameters"] < 0.5 * lean.memory["parameters"]
    with pytest.raises(ConfigError, match="base='int4' needs lora"):
        step(dp=8, base="int4")


# -- serving ---------------------------------------------------------------------------------------


def served(**given):
    options = {"batch": 1, "prompt": 512, "answer": 64, "constants": Constants()} | given
    return serve(find_model("llama3-8b"), ParallelConfig(), cluster_of("h100", 1), **options)


def test_decoding_reads_the_weights_once_a_token():
    found = served()
    device = cluster_of("h100", 1).device
    model = find_model("llama3-8b")
    read = 2 * (model.parameters - model.vocab * model.hidden) / (0.85 * device.hbm_bandwidth)
    assert found.parts[MATMUL] == pytest.approx(read, rel=0.02)
    assert found.memory["parameters"] == 2 * model.parameters
    assert served(weights="int8").parts[MATMUL] == pytest.approx(read / 2, rel=0.03)
    assert served(weights="int4").memory["parameters"] == model.parameters / 2


def test_a_batch_shares_the_weights_but_not_the_cache():
    one, many = served(), served(batch=32)
    assert many.decode < 2 * one.decode
    assert many.parts["cache"] == pytest.approx(32 * one.parts["cache"])
    assert many.memory["KV cache"] == 32 * one.memory["KV cache"]
    assert many.prefill > 10 * one.prefill
    assert served(cache="int8").memory["KV cache"] == one.memory["KV cache"] / 2


# -- the search ------------------------------------------------------------------------------------


def test_every_way_that_is_searched_divides():
    cluster = cluster_of("a100", 32)
    found = list(ways(LLAMA, cluster, Options(64, SEQ)))
    assert all(way.parallel.devices == 32 for way in found)
    families = {family(way.parallel) for way in found}
    assert {"data", "tensor", "pipeline", "tensor+pipeline"} <= families


def test_the_best_way_is_no_slower_than_any_that_was_priced():
    cluster = cluster_of("a100", 8)
    options = Options(32, SEQ, constants=PLANNERS)
    found = best_ways(LLAMA, cluster, options)
    assert found[0].seconds == min(way.seconds for way in found)
    data = price(LLAMA, ParallelConfig(dp=8, zero=1), cluster, micro_batch=4, **options.keywords())
    assert found[0].seconds <= data.seconds
    only = best_ways(LLAMA, cluster, options, only="tensor")
    assert {family(way.parallel) for way in only} == {"tensor"}


# -- any step, and the models' new options ---------------------------------------------------------


def test_any_step_is_estimated_by_its_plan():
    work = llama.workload("tiny", tx=optax.sgd(0.1))
    found = jaxscaler.estimate(
        work.step, work.state, work.batch, cluster="h100:2", price_per_hour=2.0
    )
    assert found.seconds == found.plan.predicted.seconds
    products = sum(work for name, work in found.flops.items() if name.endswith(": products"))
    tiny = ModelConfig("tiny", "llama", 64, 2, 4, 2, ffn=128, vocab=256, gated=True)
    assert products == pytest.approx(flops.training(tiny, 8, 32).total, rel=1e-9)
    assert found.cost_per_step > 0


def test_routing_by_indices_is_routing_by_one_hot_tensors():
    """Tokens, their way there and back, and gradients; places are too few for all."""
    batch, seq, hidden, experts, chosen, capacity = 2, 8, 3, 4, 2, 1

    def by_indices(x, gates):
        rows, back = moe.permute(x, gates, chosen, capacity)
        return back(jnp.sin(rows))

    def by_one_hot(x, gates):
        dispatch, combine = moe.route(gates, chosen, capacity)
        rows = jnp.einsum("bsec,bsh->ebch", dispatch, x)
        return jnp.einsum("bsec,ebch->bsh", combine, jnp.sin(rows))

    def both(x, gates):
        loss = [lambda *args, f=f: (f(*args) ** 2).sum() for f in (by_indices, by_one_hot)]
        grads = [jax.grad(f, argnums=(0, 1))(x, gates) for f in loss]
        return by_indices(x, gates), by_one_hot(x, gates), *grads

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch, seq, hidden))
        gates = jax.nn.softmax(rng.standard_normal((batch, seq, experts)))
        mine, theirs, my_grads, their_grads = jax.jit(both)(x, gates)
        assert (np.abs(mine).sum(-1) == 0).any(), "some token is dropped by both of its experts"
        for a, b in zip((mine, *my_grads), (theirs, *their_grads)):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
