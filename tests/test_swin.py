"""Swin: the model against a reference of its own, and planned against plain `jit`, in float64."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscaler as js
from jaxscaler import planner, recipes
from jaxscaler.lower.step import achieved
from models import swin

STEPS = 2


# Totals of torchvision's swin_t, swin_s, swin_b; of the artifact's by its own count of the first.
@pytest.mark.parametrize(
    ("size", "total", "digits"),
    [
        ("t", 28_288_354, 0),
        ("s", 49_606_258, 0),
        ("b", 87_768_224, 0),
        ("1.8b", 1_800_000_000, -8),
        ("27b", 27_000_000_000, -8),
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(size, total, digits):
    scan = size.endswith("b") and size != "b"
    assert round(swin.workload(size, scan=scan).parameters, digits) == total


def test_depth_is_in_the_third_stage_and_the_width_doubles():
    shapes = swin.workload("5b", scan=True).state.params
    for stage, depth in enumerate((2, 2, 34, 2)):
        qkv = shapes[f"stage_{stage}"]["block_1"]["attn"]["qkv"]["kernel"]
        assert qkv.shape == (depth // 2, 768 * 2**stage, 3, 24 * 2**stage, 32)


@pytest.mark.parametrize("shifted", [False, True])
def test_attention_is_that_of_each_window_alone(shifted):
    """Token by token: who is in whose window, and was its neighbour before the shift."""
    c = swin.configure(swin.SIZES, "tiny", "float32", image=24, window=3, hidden=8)
    size, window = c.window_of(0)
    shift = window // 2 if shifted else 0
    model = swin.WindowAttention(c, 0, shifted)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, size, size, 8)).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    p = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)
    got = jax.jit(model.apply)({"params": p}, x)

    qkv = np.einsum("byxf,fshd->sbyxhd", x, p["qkv"]["kernel"])
    q, k, v = qkv + p["qkv"]["bias"][:, None, None, None]
    want = np.zeros_like(q)
    # windows begin at the shift and do not wrap: those at the rims are cut
    cuts = [0, *range(shift or window, size, window), size]
    table = p["bias"].reshape(2 * window - 1, 2 * window - 1, -1)
    for top, bottom in pairwise(cuts):
        for west, east in pairwise(cuts):
            tokens = [(y, x) for y in range(top, bottom) for x in range(west, east)]
            for y, x_ in tokens:
                scores = np.stack(
                    [
                        np.einsum("bhd,bhd->bh", q[:, y, x_], k[:, i, j]) * (8 // c.heads) ** -0.5
                        + table[y - i + window - 1, x_ - j + window - 1]
                        for i, j in tokens
                    ]
                )
                weights = np.exp(scores - scores.max(0))
                weights /= weights.sum(0)
                values = np.stack([v[:, i, j] for i, j in tokens])
                want[:, y, x_] = np.einsum("tbh,tbhd->bhd", weights, values)
    want = np.einsum("byxhd,hdf->byxf", want, p["out"]["kernel"]) + p["out"]["bias"]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_windows_go_there_and_back():
    x = jnp.arange(2 * 8 * 8 * 3).reshape(2, 8, 8, 3)
    cut = swin.windows_of(x, 4)
    np.testing.assert_array_equal(cut[1, 2].reshape(4, 4, 3), x[1, 4:, :4])
    np.testing.assert_array_equal(swin.map_of(cut, 8, 4), x)


def test_a_loop_over_pairs_and_recomputation_compute_the_same():
    small = {"dtype": "float32", "depths": (4,), "image": 16, "window": 2}
    plain = swin.workload(**small)
    params = jax.jit(plain.init)(jax.random.key(0)).params
    batch = plain.make_batch(0)
    pairs = [
        {f"block_{j}": params[f"stage_0_block_{i + j}"] for j in range(2)} for i in range(0, 4, 2)
    ]
    looped = {name: leaf for name, leaf in params.items() if not name.startswith("stage")}
    looped["stage_0"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    want = jax.jit(plain.state.apply_fn)({"params": params}, batch["inputs"])
    other = swin.workload(**small, scan=True, remat=True)
    assert jax.tree.map(jnp.shape, looped) == jax.tree.map(jnp.shape, dict(other.state.params))
    got = jax.jit(other.state.apply_fn)({"params": looped}, batch["inputs"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: swin.workload(heads=3), "16 does not divide into 3 heads"),
        (lambda: swin.workload(image=36), "image 36 does not divide by 8"),
        (lambda: swin.workload(window=3), "stage 0: a map of 8 does not divide into windows of 3"),
        (lambda: swin.workload(depths=(2, 3), scan=True), "takes the blocks of a stage in pairs"),
    ],
)
def test_bad_options_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


WORKLOADS = {
    "unrolled": partial(swin.workload, depths=(2, 1), image=16, window=2),
    "scan-remat": partial(swin.workload, image=16, window=2, scan=True, remat=True),
}
PLANS = {
    "searched": lambda: [],
    "zero3": recipes.zero,
    "tensor": recipes.tensor_parallel,
}
CASES = [("unrolled", p) for p in PLANS]
CASES += [pytest.param("scan-remat", p, marks=pytest.mark.slow) for p in PLANS]


@pytest.fixture(scope="module")
def reference(request):
    """(workload, its state and losses after plain steps), in float64."""
    with jax.enable_x64(True):
        w = WORKLOADS[request.param](dtype="float64", tx=optax.adam(1e-3))
        state = jax.jit(w.init)(jax.random.key(0))
        step, losses = jax.jit(w.step), []
        for i in range(STEPS):
            state, metrics = step(state, w.make_batch(i))
            losses.append(float(metrics["loss"]))
        yield w, jax.tree.map(np.asarray, state), losses


@pytest.mark.parametrize(("reference", "plan"), CASES, indirect=["reference"], scope="module")
def test_same_numbers(reference, plan):
    w, expected, losses = reference
    memory = planner.MEMORY
    if plan == "searched":  # a step this small is fastest whole: half the memory that takes
        free = js.plan(w.step, w.state, w.batch, cluster="cpu:8").predicted
        memory *= 0.5 * free.peak_bytes / free.limit_bytes
    step = js.parallelize(
        w.step, cluster="cpu:8", time_limit=4, memory=memory, constraints=PLANS[plan]()
    )
    state = step.init(w.init, jax.random.key(0), batch=w.batch)
    assert any(d.cuts for d in step.plan.decisions)
    for i in range(STEPS):
        state, metrics = step(state, w.make_batch(i))
        np.testing.assert_allclose(float(metrics["loss"]), losses[i], rtol=1e-9, atol=1e-12)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected)
    ):
        np.testing.assert_allclose(
            np.asarray(got), want, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path)
        )
    compiled = step.compiled()
    assert achieved(compiled.compiled, compiled) == ()
