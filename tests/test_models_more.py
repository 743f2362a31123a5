"""The breadth models are what they claim to be: published sizes, routing, statistics, tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import dlrm, moe, resnet, swin, unet, vit

MODELS = {"resnet": resnet, "vit": vit, "unet": unet, "moe": moe, "dlrm": dlrm, "swin": swin}


# Totals of torchvision's ResNets and ViTs; of the papers for the U-Nets and Mixtral, to the digits
# that they give; of DLRM the rows of the data set times their size, and the MLPs.
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
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(model, size, total, digits):
    options = {"scan": True, "seq": 64} if model is moe else {}
    assert round(model.workload(size, **options).parameters, digits) == total


def test_resnext_50_has_its_published_number_of_parameters():
    """Xie et al. 2017, table 1: 32 groups of width 4 in 25.0 million; torchvision's exact total."""
    inner = {"width": 128, "groups": 32, "expansion": 2, "stem": 64}
    assert resnet.workload("50", **inner).parameters == 25_028_904


@pytest.mark.parametrize("name", MODELS)
def test_steps_run_and_the_loss_falls(name):
    def described(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    work = MODELS[name].workload(dtype="float32", tx=optax.adam(3e-3))
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
        work = MODELS[name].workload(dtype=dtype)
        text = str(jax.make_jaxpr(work.step)(work.state, work.batch))
        return {name for name in ("bf16", "f32", "f64") if f":{name}[" in text}

    assert dtypes("bfloat16") == {"bf16", "f32"}
    assert dtypes("float32") == {"f32"}
    with jax.enable_x64(True):
        assert dtypes("float64") == {"f64"}


@pytest.mark.parametrize("name", MODELS)
def test_models_carry_no_sharding(name):
    work = MODELS[name].workload()
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
    ],
)
def test_bad_options_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()
