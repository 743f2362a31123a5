"""The search finds the loop that arithmetic says must win, and looks for none that can not help.

One device: layouts do not matter, so what fits is known by hand. Nothing is run.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler.cluster import Cluster
from jaxscaler.errors import InfeasibleError
from jaxscaler.loops import planner as loops
from jaxscaler.loops.asked import PARTS
from jaxscaler.loops.estimate import estimated
from jaxscaler.loops.options import Option, Pick
from jaxscaler.planner import plan_step
from jaxscaler.program import SAME_DEVICE, forbid, op_assign, ops, region
from jaxscaler.rewrite.changes import Accumulate, CoShard, Fission, Recompute
from jaxscaler.search import promising
from jaxscaler.trace import trace

DEVICE = Cluster.parse("v100-32:1")
GB = 1e9


def planned(loss, params, batch, gigabytes, loops=True, cluster=DEVICE, **options):
    """The plan of gradient descent on a loss, in so much memory a device."""

    def step(params, batch):
        value, grads = js.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    traced = trace(step, params, batch)
    memory = gigabytes * GB / cluster.device.hbm_bytes
    return plan_step(traced, cluster, memory=memory, time_limit=5, loops=loops, **options).plan


def of_kind(plan, kind):
    return [change for change in plan.changes if isinstance(change, kind)]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# -- cross entropy over a large vocabulary -----------------------------------------------------

TOKENS, WIDTH, WORDS = 8192, 256, 131072  # logits: 4.3 GB; the head's weights: 0.13 GB


def cross_entropy(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    logits = hidden @ params["head"]
    best = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, batch["y"][:, None], axis=-1)[:, 0]
    return (best - right).mean()


HEAD = {"up": floats(WIDTH, WIDTH), "head": floats(WIDTH, WORDS)}
WORDS_IN = {"x": floats(TOKENS, WIDTH), "y": jax.ShapeDtypeStruct((TOKENS,), jnp.int32)}


def test_cross_entropy_that_is_larger_than_the_memory():
    with pytest.raises(InfeasibleError):
        planned(cross_entropy, HEAD, WORDS_IN, 3.0, loops=False)
    plan = planned(cross_entropy, HEAD, WORDS_IN, 3.0)
    (loop,) = [c for c in plan.changes if not isinstance(c, Recompute)]
    assert loop.parts in PARTS and plan.predicted.peak_bytes <= 3.0 * GB
    assert any("loops over parts: " in note for note in plan.notes)


def test_nothing_is_looked_for_where_memory_costs_nothing():
    said = []
    plan = planned(
        cross_entropy, HEAD, WORDS_IN, 30.0, progress=lambda *words: said.append(words[0])
    )
    assert plan.changes == () and "loops" not in said


def test_cross_entropy_of_one_long_text():
    """One sample: only its tokens can be divided, so the head and the loss are made twice."""
    text = {"x": floats(1, TOKENS, WIDTH), "y": jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)}

    def loss(params, batch):
        logits = jnp.tanh(batch["x"] @ params["up"]) @ params["head"]
        right = jnp.take_along_axis(logits, batch["y"][..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - right).mean()

    plan = planned(loss, HEAD, text, 3.0)
    assert len(of_kind(plan, CoShard)) == 1
    assert not of_kind(plan, Accumulate) and plan.predicted.peak_bytes <= 3.0 * GB
    assert any("one sample has no parts" in note for note in plan.notes)
    whole = planned(loss, HEAD, text, 30.0)
    product = 2 * TOKENS * WIDTH * WORDS / (15.7e12 * DEVICE.device.achievable)
    more = plan.predicted.seconds - whole.predicted.seconds
    assert 0.8 * product < more < 1.5 * product  # the logits, once more


@pytest.mark.parametrize(
    ("line", "accumulates"),
    [
        (forbid(op_assign(ops(phase=("forward", "backward")), SAME_DEVICE)), False),
        (forbid(op_assign(region(phase="forward"), SAME_DEVICE)), True),
    ],
)
def test_whichever_kind_of_loop_is_forbidden_the_other_is_taken(line, accumulates):
    plan = planned(cross_entropy, HEAD, WORDS_IN, 3.0, constraints=[line])
    assert bool(of_kind(plan, Accumulate)) == accumulates == (not of_kind(plan, CoShard))
    assert plan.constraints == (str(line),)


# -- layers ------------------------------------------------------------------------------------

LONG, NARROW, WIDE, LAYERS = 2**20, 256, 1024, 8  # tokens; between layers 1.07 GB, inside 4.3


def mlps(params, batch):
    x = batch["x"]
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return (x * x).mean()


STACK = [(floats(NARROW, WIDE), floats(WIDE, NARROW))] * LAYERS


def test_only_the_last_layers_are_looped():
    """What flows between layers adds up, so that the backward pass of the last ones, at once three
    times what a layer has inside, does not fit 18 GB; that of the first ones does."""
    sample = {"x": floats(1, LONG, NARROW)}
    with pytest.raises(InfeasibleError):
        planned(mlps, STACK, sample, 18.0, loops=False)
    plan = planned(mlps, STACK, sample, 18.0)
    starts = sorted(change.segment.first for change in of_kind(plan, CoShard))
    again = [change.segment for change in of_kind(plan, Recompute)]
    assert starts and again and plan.predicted.peak_bytes <= 18.0 * GB
    assert all(segment.last < starts[0] for segment in again)


def test_accumulation_where_what_flows_between_layers_does_not_fit():
    """Eight times 1.07 GB stay in memory between layers however much is made again."""
    with pytest.raises(InfeasibleError):
        planned(mlps, STACK, {"x": floats(16, LONG // 16, NARROW)}, 8.0, loops=False)
    plan = planned(mlps, STACK, {"x": floats(16, LONG // 16, NARROW)}, 8.0)
    (loop,) = of_kind(plan, Accumulate)
    assert loop.parts > 2 and plan.predicted.peak_bytes <= 8.0 * GB


def test_accumulation_where_the_whole_batch_takes_many_times_the_memory():
    """Sixteen times 7.5 GB between layers; the batch itself is small."""

    def loss(params, batch):
        first, *layers = params
        return mlps(layers, {"x": batch["x"] * first})

    batch = {"x": floats(7 * 16, LONG // 16, 1)}
    plan = planned(loss, (floats(NARROW), *STACK, *STACK), batch, 11.0)
    (loop,) = of_kind(plan, Accumulate)
    assert loop.parts == 16 and plan.predicted.peak_bytes <= 11.0 * GB


def test_accumulation_in_more_parts_where_no_usual_number_fits():
    """Sixteen times 7.5 GB between layers, of which a sixteenth part does not fit either."""

    def loss(params, batch):
        first, *layers = params
        return mlps(layers, {"x": batch["x"] * first})

    batch = {"x": floats(7 * 16, LONG // 16, 1)}
    params = (floats(NARROW), *STACK, *STACK)
    with pytest.raises(InfeasibleError) as refused:
        planned(loss, params, batch, 3.0)
    assert "the least that one is estimated to take" in str(refused.value)
    assert refused.value.need > 3.0 * GB
    batch = {"x": floats(7 * 32, LONG // 16, 1)}
    (loop,) = of_kind(planned(loss, params, batch, 11.0), Accumulate)
    assert loop.parts == 32


def test_a_wide_problem_is_estimated_from_the_plan_on_a_coarser_mesh(monkeypatch):
    """Which is a plan there too, whatever else is promising."""
    seen = {}

    def alone(shared, floor, alive, hint=None):
        if hint is None:
            return promising(shared, floor, alive)
        mask = np.zeros(len(alive), bool)
        mask[shared.rest.node_ptr[:-1] + hint] = True
        seen["hint"] = True
        return mask

    def watched(view, mesh, picks, *rest, begin=None):
        estimate = estimated(view, mesh, picks, *rest, begin=begin)
        if begin is not None:
            seen[mesh.shape] = begin.level, estimate.level
        return estimate

    monkeypatch.setattr("jaxscaler.loops.estimate.WIDE", 0)
    monkeypatch.setattr("jaxscaler.loops.estimate.promising", alone)
    monkeypatch.setattr("jaxscaler.loops.planner.estimated", watched)
    four = Cluster.parse("v100-32:4")
    plan = planned(mlps, STACK, {"x": floats(16, LONG // 16, NARROW)}, 2.0, cluster=four)
    assert of_kind(plan, Accumulate) or of_kind(plan, CoShard)
    before, now = seen[2, 2]
    assert seen["hint"] and before == 1 and now < float("inf")


def test_a_scan_is_made_again_only_as_far_as_it_must_be():
    """Of eight layers of a scan that have 4.3 GB inside each, some can be kept in 31 GB."""

    def scanned(params, batch):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights[0]) @ weights[1], None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return (x * x).mean()

    stack = (floats(LAYERS, NARROW, WIDE), floats(LAYERS, WIDE, NARROW))
    sample = {"x": floats(1, LONG, NARROW)}
    whole = planned(scanned, stack, sample, 31.0, loops=False)
    plan = planned(scanned, stack, sample, 31.0)
    (cut,) = of_kind(plan, Fission)
    assert of_kind(plan, Recompute) and sum(cut.trips) == LAYERS and cut.only == (0,)
    assert plan.predicted.peak_bytes <= 31.0 * GB
    product = 2 * LONG * NARROW * WIDE / (15.7e12 * DEVICE.device.achievable)
    assert whole.predicted.seconds - plan.predicted.seconds > 0.5 * product  # of a layer at least


def test_a_scan_that_is_not_differentiated_is_not_cut():
    """A first visit of the same layers has no backward pass, and nothing to make again in one."""

    def twice(params, batch):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights[0]) @ weights[1], None

        x = jax.lax.stop_gradient(jax.lax.scan(layer, batch["x"], params)[0])
        x, _ = jax.lax.scan(layer, x, params)
        return (x * x).mean()

    stack = (floats(LAYERS, NARROW, WIDE), floats(LAYERS, WIDE, NARROW))
    plan = planned(twice, stack, {"x": floats(1, LONG, NARROW)}, 31.0)
    tried = {scan for note in plan.notes for scan in re.findall(r"scan (\d+) in two", note)}
    (cut,) = of_kind(plan, Fission)
    assert tried == {str(cut.scan)}


# -- attention -------------------------------------------------------------------------------------

TEXT, FEATURES = 16384, 64  # scores: 1.07 GB


def attentions(params, batch):
    """One text, one head, twice; a roll after each, which only whole texts can take."""
    x = batch["x"]
    for wq, wk, wv, wo in params:
        q, k, v = x @ wq, x @ wk, x @ wv
        x = x + jnp.roll(jax.nn.softmax(q @ k.T) @ v @ wo, 3, axis=0)
    return (x * x).mean()


def test_attention_by_its_queries_alone():
    """Two of different widths, so that either alone leaves a peak; no other factor divides them."""
    layers = [(*[floats(FEATURES, n)] * 3, floats(n, FEATURES)) for n in (FEATURES, FEATURES // 2)]
    text = {"x": floats(TEXT, FEATURES)}
    with pytest.raises(InfeasibleError):
        planned(attentions, layers, text, 2.0, loops=False)
    plan = planned(attentions, layers, text, 2.0)
    loops = of_kind(plan, CoShard)
    assert len(loops) == 2 and plan.predicted.peak_bytes <= 2.0 * GB
    (tried,) = [note for note in plan.notes if note.startswith("loops over parts that were tried")]
    true, guess = map(float, re.findall(r"([\d.]+) s\b", tried)[-2:])
    assert abs(true - guess) <= 0.1 * true


@pytest.mark.parametrize(("seconds", "kept"), [(11.4, 32), (11.6, None)])
def test_an_accumulation_alone_is_traced_beside_the_same_with_co_shards(seconds, kept, monkeypatch):
    """In the fewest parts that fit, unless it is estimated to be far slower than the best."""
    sums = Pick(Option("sums", "sums", 64, lambda *_: (), (), again=False), 16)
    shards = Pick(Option("shards", "shards", 64, lambda *_: (), (), again=True), 2)

    def guess(view, mesh, picks):
        return SimpleNamespace(seconds=seconds if picks[0].parts >= 32 else None)

    monkeypatch.setattr(loops, "estimated", guess)
    monkeypatch.setattr(loops, "_cost", lambda best: 10.0)
    some = object.__new__(loops._Search)
    some.best = object()
    monkeypatch.setattr(loops._Search, "take", lambda self, view, mesh, picks, priced: True)
    found = some.accumulated(None, None, (sums, shards))
    assert [pick.parts for pick in found] == ([] if kept is None else [kept])
    assert some.accumulated(None, None, (sums,)) == ()  # it has been traced already
