"""The models are what they claim to be, and their steps are ordinary functions of their inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import gpt, llama, mlp
from models.workload import causal_softmax, cross_entropy, make_workload, mean_squared_error

TINY = {
    "mlp": mlp.workload,
    "gpt": gpt.workload,
    "gpt-remat-dropout": lambda **kw: gpt.workload(remat=True, dropout=0.1, **kw),
    "llama": llama.workload,
    "llama-scan": lambda **kw: llama.workload(scan=True, **kw),
    "llama-scan-remat": lambda **kw: llama.workload(scan=True, remat=True, **kw),
}


def apply(work, params, inputs):
    return jax.jit(work.state.apply_fn)({"params": params}, inputs)


def random_params(work):
    """Parameters with nothing of the initialiser's regularity, and no program to compile."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: 0.2 * rng.standard_normal(leaf.shape).astype(leaf.dtype), work.state.params
    )


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


# Totals of the released checkpoints for GPT-2 and Llama 3; for GPT-3, which was not released, the
# totals of the paper's table D.1 to the digits that it gives.
@pytest.mark.parametrize(
    ("model", "size", "total", "digits"),
    [
        (gpt, "small", 124_439_808, 0),
        (gpt, "medium", 354_823_168, 0),
        (gpt, "large", 774_030_080, 0),
        (gpt, "xl", 1_557_611_200, 0),
        (gpt, "6.7b", 6_660_000_000, -7),
        (gpt, "13b", 12_850_000_000, -7),
        (gpt, "175b", 174_600_000_000, -8),
        (llama, "8b", 8_030_261_248, 0),
        (llama, "70b", 70_553_706_496, 0),
        (llama, "405b", 405_853_388_800, 0),
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(model, size, total, digits):
    options = {"scan": True} if model is llama else {}
    assert round(model.workload(size, **options).parameters, digits) == total


def test_stacked_and_unrolled_layers_hold_the_same_parameters():
    assert llama.workload("8b").parameters == llama.workload("8b", scan=True).parameters


def test_mlp_sizes_are_the_two_ends_of_activations_against_weights():
    wide, huge = mlp.workload("wide"), mlp.workload("huge")
    assert wide.batch["inputs"].size > wide.parameters
    assert huge.batch["inputs"].size < huge.parameters / 1000


@pytest.mark.parametrize("name", ["mlp", "gpt-remat-dropout", "llama", "llama-scan-remat"])
def test_steps_run_and_the_loss_falls(name, key):
    def described(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    work = TINY[name](dtype="float32", tx=optax.sgd(0.1, momentum=0.9))
    batch, step = work.make_batch(0), jax.jit(work.step)
    state = jax.jit(work.init)(key)
    assert described(state) == described(work.state)
    assert described(batch) == described(dict(work.batch))
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert described(state) == described(work.state)
    assert losses[-1] < losses[0] - 0.1
    assert int(state.step) == 8


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_compute_dtype_is_the_one_asked_for(make):
    def dtypes(dtype):
        work = make(dtype=dtype)
        text = str(jax.make_jaxpr(work.step)(work.state, work.batch))
        return {name for name in ("bf16", "f32", "f64") if f":{name}[" in text}

    assert dtypes("bfloat16") == {"bf16", "f32"}
    assert dtypes("float32") == {"f32"}
    with jax.enable_x64(True):
        assert dtypes("float64") == {"f64"}


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_models_carry_no_sharding(make):
    work = make()
    text = str(jax.make_jaxpr(work.step)(work.state, work.batch))
    assert "sharding_constraint" not in text and "shard_map" not in text
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(work.state))


def test_batches_repeat_by_seed_and_stay_below_the_vocabulary():
    work = gpt.workload(vocab=11)
    first, again, other = work.make_batch(3), work.make_batch(3), work.make_batch(4)
    np.testing.assert_array_equal(first["inputs"], again["inputs"])
    assert (first["inputs"] != other["inputs"]).any()
    assert (first["inputs"] != first["targets"]).any()
    assert first["inputs"].min() >= 0 and first["inputs"].max() < 11


@pytest.mark.parametrize("make", [gpt.workload, llama.workload])
def test_no_position_sees_a_later_one(make):
    work = make(dtype="float32", layers=1)
    params = random_params(work)
    tokens = work.make_batch(0)["inputs"]
    changed = tokens.copy()
    changed[:, 20:] = (changed[:, 20:] + 1) % work.vocab

    def logits(tokens):
        return apply(work, params, tokens)

    before, after = logits(tokens), logits(changed)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert (jnp.abs(before[:, 20:] - after[:, 20:]).max(axis=(0, 2)) > 1e-4).all()


def test_llama_scan_computes_what_the_unrolled_layers_do():
    with jax.enable_x64(True):
        unrolled = llama.workload(dtype="float64", layers=2)
        scanned = llama.workload(dtype="float64", layers=2, scan=True)
        params = dict(random_params(unrolled))
        layers = [params.pop(f"layers_{i}") for i in range(2)]
        stacked = params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
        tokens = unrolled.make_batch(0)["inputs"]
        one = apply(unrolled, params | named(layers), tokens)
        two = apply(scanned, stacked, tokens)
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


def named(layers):
    return {f"layers_{i}": layer for i, layer in enumerate(layers)}


@pytest.mark.parametrize("model", [gpt, llama])
def test_remat_changes_no_gradient(model):
    with jax.enable_x64(True):
        plain, remat = (
            model.workload(dtype="float64", layers=1, remat=remat) for remat in (False, True)
        )
        params, batch = random_params(plain), plain.make_batch(0)

        def gradients(work):
            def loss(params):
                outputs = work.state.apply_fn({"params": params}, batch["inputs"])
                return cross_entropy(outputs, batch["targets"])

            assert ("remat" in str(jax.make_jaxpr(loss)(params))) == (work is remat)
            return jax.jit(jax.grad(loss))(params)

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
            gradients(plain),
            gradients(remat),
        )


def test_dropout_is_drawn_from_the_step_counter(key):
    work = gpt.workload(dropout=0.5, dtype="float32", layers=1)
    state, batch, step = jax.jit(work.init)(key), work.make_batch(0), jax.jit(work.step)
    first, again = step(state, batch)[1]["loss"], step(state, batch)[1]["loss"]
    later = step(state.replace(step=state.step + 1), batch)[1]["loss"]
    assert first == again
    assert first != later


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values():
    with jax.enable_x64(True):
        shared = llama.workload(dtype="float64", layers=1, kv_heads=2)
        full = llama.workload(dtype="float64", layers=1, kv_heads=4)
        params = random_params(shared)
        repeated = jax.tree.map(lambda leaf: leaf, params)
        for name in "kv":
            kernel = params["layers_0"]["attn"][name]["kernel"].reshape(64, 2, 16)
            wide = jnp.repeat(kernel, 2, axis=1).reshape(64, 64)
            repeated["layers_0"]["attn"][name]["kernel"] = wide
        tokens = shared.make_batch(0)["inputs"]
        np.testing.assert_allclose(
            apply(shared, params, tokens),
            apply(full, repeated, tokens),
            rtol=1e-10,
            atol=1e-12,
        )


def test_rotary_scores_depend_on_the_distance_alone(key):
    q, k = jax.random.normal(key, (2, 16))
    cos, sin = llama.rotary_angles(12, 16, 500.0, jnp.float32)
    q, k = (llama.rotate(jnp.broadcast_to(x, (1, 12, 1, 16)), (cos, sin))[0, :, 0] for x in (q, k))
    scores = q @ k.T
    for offset in range(-5, 6):
        diagonal = jnp.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert jnp.abs(scores[0, 0] - scores[0, 5]) > 1e-3


def test_causal_softmax_is_the_softmax_of_the_visible_keys():
    scores = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)
    weights = causal_softmax(jnp.asarray(scores))
    for row in range(4):
        visible = np.exp(scores[:, row, : row + 1])
        np.testing.assert_allclose(
            weights[:, row, : row + 1], visible / visible.sum(-1, keepdims=True), rtol=1e-5
        )
        np.testing.assert_array_equal(weights[:, row, row + 1 :], 0)


def test_losses_are_their_formulas():
    logits = np.array([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]], np.float32)
    targets = np.array([[2, 0]])
    expected = (np.log(np.exp([1, 2, 3]).sum()) - 3 + np.log(3)) / 2
    np.testing.assert_allclose(cross_entropy(logits, targets), expected, rtol=1e-6)
    np.testing.assert_allclose(
        mean_squared_error(jnp.array([1.0, 3.0]), jnp.array([0.0, 1.0])), 2.5, rtol=1e-6
    )


def test_padded_vocabulary_adds_rows_that_no_token_names():
    work = gpt.workload(vocab=250, padded_vocab=256)
    assert work.state.params["wte"]["embedding"].shape == (256, 64)
    assert work.make_batch(0)["inputs"].max() < 250


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gpt.workload("giant"), "unknown size 'giant'; there is tiny, small"),
        (lambda: gpt.workload(width=3), "unknown option width; there is layers, hidden"),
        (lambda: gpt.workload(seq=64), "longer than the context of 32"),
        (lambda: gpt.workload(heads=7), "64 does not divide into 7 heads"),
        (lambda: gpt.workload(padded_vocab=8), "below vocab 256"),
        (lambda: llama.workload(kv_heads=3), "shared evenly by the kv heads"),
        (lambda: mlp.workload(dtype="float64"), "set jax_enable_x64"),
    ],
)
def test_bad_options_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_optimizer_can_be_given(key):
    work = mlp.workload(dtype="float32", tx=optax.sgd(0.1))
    state, batch = jax.jit(work.init)(key), work.make_batch(0)

    def loss(params):
        outputs = state.apply_fn({"params": params}, batch["inputs"])
        return mean_squared_error(outputs, batch["targets"])

    after, _ = jax.jit(work.step)(state, batch)
    jax.tree.map(
        lambda new, old, grad: np.testing.assert_allclose(new, old - 0.1 * grad, atol=1e-6),
        after.params,
        state.params,
        jax.jit(jax.grad(loss))(state.params),
    )


def test_any_flax_module_makes_a_workload(key):
    import flax.linen as nn

    rows = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    specs = {"inputs": rows, "targets": rows}
    work = make_workload("dense", nn.Dense(8), mean_squared_error, specs)
    assert work.parameters == 8 * 8 + 8
    _, metrics = work.step(work.init(key), work.make_batch(0))
    assert jnp.isfinite(metrics["loss"])
