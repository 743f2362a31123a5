"""The breadth models are what they claim to be: published sizes, routing, statistics, tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.accumulate import batch_division
from models import alphafold2, clip, dlrm, moe, resnet, swin, t5, unet, vit, vlm
from models.workload import cross_entropy

MODELS = {"resnet": resnet, "vit": vit, "unet": unet, "moe": moe, "dlrm": dlrm, "swin": swin,
          "t5": t5, "clip": clip, "vlm": vlm, "alphafold2": alphafold2}  # fmt: skip
ONE_LAYER = {
    "t5": {"layers": 1},
    "clip": {"vision": clip.Tower(1, 32, 4), "text": clip.Tower(1, 16, 2)},
    "vlm": {"layers": 1, "vision": clip.Tower(1, 16, 2)},
    "alphafold2": {"blocks": 1},
}


def tiny(name, **options):
    return MODELS[name].workload(**ONE_LAYER.get(name, {}), **options)


# Totals of torchvision's ResNets and ViTs; of the papers for the U-Nets and Mixtral, to the digits
# that they give; of DLRM the rows of the data set times their size, and the MLPs; of the released
# checkpoints for T5, mT5 and CLIP, and for LLaVA less the layer and norm that it does not use. Of
# AlphaFold's 93 million, what the supplement's algorithms 6 to 15 have in 48 blocks, and the
# embeddings, norms of recycling and head here.
@pytest.mark.parametrize(
    ("model", "size", "total", "digits"),
    [
        (resnet, "50", 25_557_032, 0),
        (resnet, "101", 44_549_160, 0),
        (resnet, "152", 60_192_808, 0),
        (vit, "base", 86_567_656, 0),
        (vit, "large", 304_326_632, 0),
        (vit, "huge", 632_045_800, 0),
        (unet, "cifar", 35_700_000, -5),
        (unet, "256", 114_000_000, -6),
        (moe, "8x7b", 46_700_000_000, -8),
        (dlrm, "kaggle", 33_762_577 * 16 + 475_985, 0),
        (dlrm, "mlperf", 187_767_399 * 128 + 2_368_897, 0),
        (t5, "small", 60_506_624, 0),
        (t5, "11b", 11_307_321_344, 0),
        (t5, "mt5-small", 300_176_768, 0),
        (t5, "mt5-xxl", 12_921_057_280, 0),
        (clip, "b32", 151_277_313, 0),
        (clip, "l14", 427_616_513, 0),
        (vlm, "7b", 7_063_427_072 - 12_596_224 - 2_048, 0),
        (alphafold2, "initial", 48 * 1_829_952 + 35_008, 0),
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(model, size, total, digits):
    options = {"scan": True} if model in (moe, t5, clip, vlm, alphafold2) else {}
    options |= {"seq": 64} if model in (moe, t5, vlm) else {}
    assert round(model.workload(size, **options).parameters, digits) == total


def test_resnext_50_has_its_published_number_of_parameters():
    """Xie et al. 2017, table 1: 32 groups of width 4 in 25.0 million; torchvision's exact total."""
    inner = {"width": 128, "groups": 32, "expansion": 2, "stem": 64}
    assert resnet.workload("50", **inner).parameters == 25_028_904


@pytest.mark.parametrize("name", MODELS)
def test_steps_run_and_the_loss_falls(name):
    def described(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    work = tiny(name, dtype="float32", tx=optax.adam(3e-3))
    batch, step = work.make_batch(0), jax.jit(work.step)
    state = jax.jit(work.init)(jax.random.key(0))
    assert described(state) == described(work.state)
    assert described(batch) == described(dict(work.batch))
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert described(state) == described(work.state)
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("name", MODELS)
def test_compute_dtype_is_the_one_asked_for(name):
    def dtypes(dtype):
        work = tiny(name, dtype=dtype)
        text = str(jax.make_jaxpr(work.step)(work.state, work.batch))
        return {name for name in ("bf16", "f32", "f64") if f":{name}[" in text}

    assert dtypes("bfloat16") == {"bf16", "f32"}
    assert dtypes("float32") == {"f32"}
    with jax.enable_x64(True):
        assert dtypes("float64") == {"f64"}


@pytest.mark.parametrize("name", MODELS)
def test_models_carry_no_sharding(name):
    work = tiny(name)
    text = str(jax.make_jaxpr(work.step)(work.state, work.batch))
    assert "sharding_constraint" not in text and "shard_map" not in text


def test_batch_norm_keeps_the_statistics_of_the_whole_batch():
    work = resnet.workload(dtype="float32", stages=(1,))
    state = jax.jit(work.init)(jax.random.key(0))
    batch = work.make_batch(0)
    images, kernel = batch["inputs"], state.params["stem"]["kernel"]
    made = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    before = state.variables["batch_stats"]["norm"]
    after = jax.jit(work.step)(state, batch)[0].variables["batch_stats"]["norm"]
    mean, var = made.mean((0, 1, 2)), made.var((0, 1, 2))
    np.testing.assert_allclose(after["mean"], 0.9 * before["mean"] + 0.1 * mean, atol=1e-6)
    np.testing.assert_allclose(after["var"], 0.9 * before["var"] + 0.1 * var, rtol=1e-5)


def test_router_sends_each_token_to_its_first_choices_until_they_are_full():
    gates = np.random.default_rng(0).dirichlet(np.ones(3), (2, 5)).astype(np.float32)
    capacity = 2
    dispatch, combine = moe.route(jnp.asarray(gates), 2, capacity)
    assert dispatch.shape == combine.shape == (2, 5, 3, capacity)
    dropped = 0
    for b in range(2):
        room = [capacity] * 3
        expected = np.zeros((5, 3))
        order = np.argsort(-gates[b], axis=1)[:, :2]
        for choice in range(2):
            for s in range(5):
                e = order[s, choice]
                share = gates[b, s, e] / gates[b, s, order[s]].sum()
                if room[e] > 0:
                    room[e] -= 1
                    expected[s, e] = share
                else:
                    dropped += 1
        np.testing.assert_allclose(combine[b].sum(-1), expected, rtol=1e-5)
        np.testing.assert_array_equal(dispatch[b].sum(-1), expected > 0)
    assert dropped > 0
    assert (dispatch.sum(1) <= 1).all()  # no place is taken twice


def test_with_room_for_all_the_experts_output_is_the_weighted_sum():
    config = moe.configure(moe.SIZES, "tiny", "float32", capacity_factor=4.0)
    layer = moe.Experts(config)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8, config.hidden)).astype(np.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    p = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    got, balance = jax.jit(layer.apply)({"params": p}, x)
    gates = np.asarray(jax.nn.softmax(x @ p["router"]["kernel"]))
    picks = np.argsort(-gates, axis=-1)[..., : config.chosen]
    want = np.zeros_like(x)
    for b, s in np.ndindex(2, 8):
        chosen = picks[b, s]
        for e in chosen:
            inner = jax.nn.silu(x[b, s] @ p["gate"][e]) * (x[b, s] @ p["up"][e])
            share = gates[b, s, e] / gates[b, s, chosen].sum()
            want[b, s] += share * np.asarray(inner @ p["down"][e])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    first = np.bincount(picks[..., 0].ravel(), minlength=config.experts) / 16
    np.testing.assert_allclose(balance, 8 * (first * gates.mean((0, 1))).sum(), rtol=1e-5)


def test_unet_predicts_zero_noise_at_first_and_depends_on_the_time():
    work = unet.workload(dtype="float32")
    state, batch = jax.jit(work.init)(jax.random.key(0)), work.make_batch(0)
    apply = jax.jit(state.apply_fn)
    np.testing.assert_array_equal(
        apply({"params": state.params}, batch["inputs"], batch["time"]), 0
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape), state.params)
    one = apply({"params": params}, batch["inputs"], batch["time"])
    two = apply({"params": params}, batch["inputs"], batch["time"] + 1)
    assert one.shape == batch["inputs"].shape
    assert jnp.abs(one - two).max() > 1e-4


def outputs_of(work, *arrays, seed=0):
    """What a model makes of arrays, with random parameters."""
    rng = np.random.default_rng(seed)
    held = {**work.state.params, **getattr(work.state, "frozen", {})}
    params = jax.tree.map(
        lambda leaf: 0.3 * rng.standard_normal(leaf.shape).astype(leaf.dtype), held
    )
    return jax.jit(work.state.apply_fn)({"params": params}, *arrays)


def test_t5_buckets_of_distances():
    """Raffel et al. 2020: one each up to half of them, then by the logarithm of the distance."""
    config = t5.SIZES["base"]
    for both in (False, True):
        buckets = np.asarray(t5.bucket_of(200, 200, config, both=both))
        for query, key in ((199, 199), (150, 20), (190, 3), (40, 60), (10, 190), (100, 84)):
            away, count = query - key, 32
            shift = 0
            if both:
                count, shift = 16, 16 * (key > query)
                away = abs(away)
            away, exact = max(away, 0), count // 2
            wide = exact + np.log(max(away, 1) / exact) / np.log(128 / exact) * exact + 1e-9
            expected = away if away < exact else min(int(wide), count - 1)
            assert buckets[query, key] == shift + expected


def test_t5_reads_all_and_writes_one_after_another():
    work = t5.workload(dtype="float32")
    batch = work.make_batch(0)
    read, begun = batch["inputs"], batch["begun"]
    logits = outputs_of(work, read, begun)
    later, other = begun.copy(), read.copy()
    later[:, 10:] = (later[:, 10:] + 1) % work.vocab
    other[:, -1] = (other[:, -1] + 1) % work.vocab
    after = outputs_of(work, read, later)
    np.testing.assert_array_equal(logits[:, :10], after[:, :10])
    assert (jnp.abs(logits[:, 10:] - after[:, 10:]).max((0, 2)) > 1e-3).all()
    assert (jnp.abs(logits - outputs_of(work, other, begun)).max((0, 2)) > 1e-3).all()


def test_contrastive_loss_is_the_cross_entropy_of_both_choices():
    rng = np.random.default_rng(0)
    seen, read = (clip.unit(jnp.asarray(rng.standard_normal((5, 3)))) for _ in range(2))
    scores = 7 * seen @ read.T
    expected = (cross_entropy(scores, jnp.arange(5)) + cross_entropy(scores.T, jnp.arange(5))) / 2
    got = clip.contrastive((seen, read, jnp.log(7.0)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert clip.contrastive((seen, read, jnp.log(100.0))) == clip.contrastive((seen, read, 9.0))


def test_contrastive_loss_can_not_be_added_up_over_parts_of_the_batch():
    avals = [jax.ShapeDtypeStruct((4, 3), jnp.float32)] * 2
    loss = jax.make_jaxpr(lambda seen, read: clip.contrastive((seen, read, 1.0)))(*avals)
    with pytest.raises(RewriteError):
        batch_division(loss, {0: 0, 1: 0})


def test_clip_takes_what_the_last_token_has_seen():
    work = clip.workload(dtype="float32")
    batch = work.make_batch(0)
    texts = batch["texts"] % 60
    texts[:, 4] = 63  # the largest token ends a text
    texts[:, 5:] = 1
    changed = {i: texts.copy() for i in (3, 5)}
    for i, other in changed.items():
        other[:, i] = (other[:, i] + 7) % 60
    seen, read, _ = outputs_of(work, batch["inputs"], texts)
    np.testing.assert_array_equal(read, outputs_of(work, batch["inputs"], changed[5])[1])
    before = outputs_of(work, batch["inputs"], changed[3])[1]
    assert (jnp.abs(read - before).max(1) > 1e-4).all()
    np.testing.assert_allclose(jnp.square(seen).sum(1), 1, rtol=1e-5)


def test_a_frozen_encoder_is_read_and_never_written():
    work = vlm.workload(dtype="float32")
    step, state, batch = (
        jax.jit(work.step),
        jax.jit(work.init)(jax.random.key(0)),
        work.make_batch(),
    )
    after, _ = step(state, batch)
    assert {"vision"} == set(state.frozen) and "vision" not in state.params
    assert len(jax.tree.leaves(state.opt_state[0].mu)) == len(jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, state.frozen, after.frozen)
    logits = outputs_of(work, batch["inputs"], batch["texts"])
    assert logits.shape == (*batch["texts"].shape, work.vocab)
    other = outputs_of(work, -batch["inputs"], batch["texts"])
    assert (jnp.abs(logits - other).max((0, 2)) > 1e-4).all()


@pytest.mark.parametrize("outgoing", [True, False])
def test_triangles_go_over_the_third_corner(outgoing):
    config = alphafold2.configure(alphafold2.SIZES, "tiny", "float32", pair=3)
    layer = alphafold2.Triangle(config, outgoing)
    rng = np.random.default_rng(0)
    z = rng.standard_normal((1, 4, 4, 3)).astype(np.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), z)["params"]
    p = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    got = layer.apply({"params": p}, z)[0]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)
        return x * p[name]["scale"] + p[name]["bias"]

    def dense(x, name):
        return x @ p[name]["kernel"] + p[name]["bias"]

    def gate(x, name):
        return 1 / (1 + np.exp(-dense(x, name)))

    z = norm(z[0], "norm")
    a, b = (gate(z, f"{name}_gate") * dense(z, name) for name in ("left", "right"))
    y = np.zeros_like(z)
    for i, j, k in np.ndindex(4, 4, 4):
        y[i, j] += a[i, k] * b[j, k] if outgoing else a[k, i] * b[k, j]
    np.testing.assert_allclose(
        got, gate(z, "gate") * dense(norm(y, "norm_out"), "out"), rtol=1e-4, atol=1e-5
    )


def test_only_the_last_visit_is_differentiated():
    def products(visits, part):
        work = alphafold2.workload(visits=visits, blocks=1)

        def forward(state, batch):
            return state.apply_fn({"params": state.params}, batch["inputs"])

        jaxpr = jax.make_jaxpr(work.step if part == "step" else forward)(work.state, work.batch)
        return str(jaxpr).count("dot_general[")

    once, twice, thrice = (products(visits, "step") for visits in (1, 2, 3))
    assert twice - once == thrice - twice == products(2, "forward") - products(1, "forward")
    assert once > 2.5 * (twice - once)


def test_dlrm_rows_wrap_and_tables_are_padded():
    work = dlrm.workload(multiple=8)
    tables = [work.state.params[f"table_{i}"]["embedding"].shape[0] for i in range(4)]
    assert tables == [64, 48, 8, 40]
    plain = dlrm.workload(dtype="float32")
    state, batch = jax.jit(plain.init)(jax.random.key(0)), plain.make_batch(0)
    apply = jax.jit(state.apply_fn)
    one = apply({"params": state.params}, batch["inputs"], batch["categories"])
    two = apply(
        {"params": state.params}, batch["inputs"], batch["categories"] + np.array([64, 48, 3, 40])
    )
    np.testing.assert_array_equal(one, two)
    assert set(np.unique(batch["targets"])) == {0, 1}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: vit.workload(heads=5), "32 does not divide into 5 heads"),
        (lambda: vit.workload(patch=4), "image 6 does not divide into patches of 4"),
        (lambda: unet.workload(groups=3), "width 16 does not divide into 3 groups"),
        (lambda: unet.workload(image=9), "image 9 can not be halved 1 times"),
        (lambda: dlrm.workload(bottom=(8,)), "bottom ends in 8, but the rows are of 16"),
        (lambda: resnet.workload("giant"), "unknown size 'giant'; there is tiny, 50"),
        (lambda: t5.workload(buckets=6), "buckets must divide by 4"),
        (lambda: clip.workload(patch=5), "image 12 does not divide into patches of 5"),
        (lambda: vlm.workload(image=9), "image 9 does not divide into patches of 4"),
        (lambda: clip.Tower(1, 10, 4), "hidden 10 does not divide into 4 heads"),
    ],
)
def test_bad_options_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()
