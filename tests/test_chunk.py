"""Co-sharding: a loop over parts of a factor computes what the segment does, or says why not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rewriting import find, loss_of, plain, pull, random_changes, same, values_of

from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.apply import flat, segment_of
from jaxscaler.rewrite.changes import CoShard, Segment
from jaxscaler.rewrite.chunk import chunked, factors_of, interleave, join

MODELS = {
    "gpt": dict(layers=1, dropout=0.1, batch=2, seq=16),
    "llama": dict(layers=2, scan=True, remat=True, batch=2, seq=16),
    "moe": dict(layers=1, batch=2),
}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def of_function(function, *args):
    return flat(jax.make_jaxpr(lambda *args: [function(*args)])(*args))


def whole(closed, i, operand, dim, parts, lanes=1):
    """A change of all equations of a jaxpr."""
    return CoShard(Segment(0, 0, len(closed.jaxpr.eqns) - 1), (i, operand, dim), parts, lanes)


def shapes_in(function, args):
    """Shapes of all values that a function makes, in loops too."""
    text = str(jax.make_jaxpr(function)(*args))
    return {tuple(map(int, m.split(",")))
            for m in re.findall(r":f(?:32|64)\[([\d,]+)\]", text)}  # fmt: skip


def try_random(model, count, seed):
    closed, leaves, _ = loss_of(model, **MODELS[model])
    values = values_of(closed, leaves)
    legal, refused = 0, []
    for segment, reads, change in random_changes(closed, seed):
        args = [values[v] for v in reads]
        try:
            rewritten = chunked(segment, change)
        except RewriteError as error:
            refused.append(str(error))
            continue
        same(pull(plain(segment), args), pull(rewritten, args))
        legal += 1
        if legal == count:
            break
    assert all(re.search(r"`[\w-]+` at|does not divide", text) for text in refused), refused


@pytest.mark.parametrize("model", MODELS)
def test_random_segments(model):
    try_random(model, 1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("model", MODELS)
def test_more_random_segments(model, seed):
    try_random(model, 25, seed)


# --- what is well known falls out of it -------------------------------------------------------


def test_cross_entropy_by_tokens():
    closed, leaves, _ = loss_of("gpt", layers=1, batch=2, seq=16)
    head = find(closed, "dot_general", (2, 16, 256))
    last = len(closed.jaxpr.eqns) - 1
    segment, reads, _ = segment_of(closed.jaxpr, head, last)
    values = values_of(closed, leaves)
    args = [values[v] for v in reads]
    rewritten = chunked(segment, CoShard(Segment(0, head, last), (head, 0, 1), 4))
    same(pull(plain(segment), args), pull(rewritten, args))
    assert (2, 16, 256) in shapes_in(jax.grad(lambda *a: plain(segment)(*a)[0]), args)
    assert (2, 16, 256) not in shapes_in(jax.grad(lambda *a: rewritten(*a)[0]), args)


def attention(x, wq, wk, wv):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k)
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], d) for d in (0, 1))
    weights = jax.nn.softmax(jnp.where(keys <= queries, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhe->bqhe", weights, v)


def attention_case():
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s) for s in ((2, 16, 8), *[(8, 4, 2)] * 3)]
    closed = of_function(attention, *args)
    return closed, args, find(closed, "dot_general", (2, 4, 16, 16))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_attention_by_batch_queries_and_heads(dim):
    closed, args, scores = attention_case()
    change = whole(closed, scores, 0, dim, 2)
    rewritten = chunked(closed, change)
    same(pull(plain(closed), args), pull(rewritten, args))
    # keys and values are whole for each chunk of queries, not for each chunk of heads
    first = [closed.jaxpr.eqns[i].primitive.name for i in factors_of(closed, change).before]
    assert first.count("dot_general") == {1: 2, 2: 0, 0: 0}[dim]
    assert (2, 4, 16, 16) not in shapes_in(jax.grad(lambda *a: rewritten(*a)[0].sum()), args)


def test_attention_by_keys_is_refused():
    closed, _, scores = attention_case()
    with pytest.raises(RewriteError, match=r"`reduce_max` at .*do not add up"):
        chunked(closed, whole(closed, scores, 1, 1, 2))


def mlp(x, up, down, bias):
    return x + jax.nn.gelu(x @ up) @ down + bias


@pytest.mark.parametrize(("dim", "sums"), [(0, 0), (1, 1)])
def test_mlp_by_tokens_and_by_hidden(dim, sums):
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s) for s in ((8, 4), (4, 16), (16, 4), (4,))]
    closed = of_function(mlp, *args)
    down = find(closed, "dot_general", (8, 4))
    change = whole(closed, down, 0, dim, 4)
    division = factors_of(closed, change)
    assert len(division.sums) == sums
    assert all(closed.jaxpr.eqns[i].primitive.name != "dot_general" for i in division.before)
    assert bool(division.stacked) == (dim == 0)
    rewritten = chunked(closed, change)
    same(pull(plain(closed), args), pull(rewritten, args))
    assert (8, 16) not in shapes_in(jax.grad(lambda *a: rewritten(*a)[0].sum()), args)


def test_half_precision_sums_add_up_in_f32():
    args = [jnp.zeros(s, jnp.bfloat16) for s in ((8, 4), (4, 16), (16, 4), (4,))]
    closed = of_function(mlp, *args)
    down = find(closed, "dot_general", (8, 4))
    jaxpr = jax.make_jaxpr(chunked(closed, whole(closed, down, 0, 1, 4)))(*args)
    (loop,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert loop.outvars[0].aval.dtype == jnp.float32
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16


def test_a_rule_of_its_own_stays():
    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvp(lambda p, t: (square(*p), 7 * t[0]))  # wrong on purpose
    x = np.arange(8.0)
    closed = of_function(lambda x: square(jnp.sin(x)), x)
    i = next(i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive.name == "custom_jvp_call")
    same(pull(plain(closed), [x]), pull(chunked(closed, whole(closed, i, 0, 0, 4, 2)), [x]))


def test_a_pull_back_of_its_own_stays():
    @jax.custom_vjp
    def weighted(x, n, w):
        return (x * n) @ w

    def keep(x, n, w):
        return weighted(x, n, w), (x, n, w)

    def back(kept, ct):
        x, n, w = kept
        return 7 * n * (ct @ w.T), None, 5 * x.T @ ct  # wrong on purpose

    weighted.defvjp(keep, back)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 6)), rng.standard_normal((6, 4))
    closed = of_function(lambda x, w: weighted(jnp.sin(x), jnp.arange(8)[:, None], w), x, w)
    i = next(i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive.name == "custom_vjp_call")
    for dim, parts in ((0, 4), (1, 3)):  # samples; a factor that it sums over
        rewritten = chunked(closed, whole(closed, i, 0, dim, parts))
        same(pull(plain(closed), [x, w]), pull(rewritten, [x, w]))


@pytest.mark.parametrize(("parts", "lanes", "rest"), [(2, 1, 1), (2, 4, 3), (4, 2, 1)])
def test_parts_are_interleaved(parts, lanes, rest):
    x = jnp.arange(2 * 16 * rest * 3).reshape(2, 16 * rest, 3)
    split = interleave(x, 1, 16, parts, lanes)
    extra = (lanes,) if lanes > 1 else ()
    assert split.shape == (parts, *extra, 2, x.shape[1] // parts // lanes, 3)
    np.testing.assert_array_equal(join(split, 1, 16, lanes), x)


# --- refusals name the operation --------------------------------------------------------------


def centred(x):
    return x - x.mean(0)


def gram(x):
    return x @ x.T


@pytest.mark.parametrize(
    ("function", "primitive", "operand", "dim", "why"),
    [
        (lambda x: jnp.sin(x).T.reshape(-1), "sin", 0, 0, "`reshape` .*scattered"),
        (lambda x: jnp.cumsum(jnp.sin(x), 0), "sin", 0, 0, "`cumsum` "),
        (lambda x: x - jnp.sin(x).mean(0), "sub", 0, 0, None),  # the mean is made before
        (lambda x: centred(jnp.sin(x)), "sin", 0, 0, "`sub`.*what all parts make"),
        (lambda x: gram(jnp.sin(x)), "sin", 0, 0, "`dot_general`.*two of its factors|whole"),
        (lambda x: jnp.sin(x), "sin", 0, 1, "7 does not divide"),
    ],
)  # fmt: skip
def test_refusals(function, primitive, operand, dim, why):
    x = np.random.default_rng(0).standard_normal((8, 7))
    closed = of_function(function, x)
    i = next(i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive.name == primitive)
    change = whole(closed, i, operand, dim, 2)
    if why is None:
        same(pull(plain(closed), [x]), pull(chunked(closed, change), [x]))
        return
    with pytest.raises(RewriteError, match=f"(?s){why}"):
        chunked(closed, change)


def test_masks_are_those_of_the_whole():
    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x), 0)

    x, key = np.ones((8, 6)), jax.random.key(0)
    closed = of_function(drop, x, key)
    i = find(closed, "sin", (8, 6))
    change = whole(closed, i, 0, 0, 4)
    rewritten = chunked(closed, change)
    same(plain(closed)(x, key), rewritten(x, key))
    division = factors_of(closed, change)
    kept = {v.aval.dtype for v, _ in division.slices}
    assert kept == {np.dtype(bool), x.dtype}  # no bits are kept


# --- sharded by the same factor ---------------------------------------------------------------


def reductions(text):
    """All-reduces of compiled HLO: (in loops, elsewhere)."""
    bodies = set(re.findall(r"body=%([\w.-]+)", text))
    inside = outside = 0
    for name, body in re.findall(r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        count = len(re.findall(r" all-reduce(?:-start)?\(", body))
        inside, outside = (inside + count, outside) if name in bodies else (inside, outside + count)
    return inside, outside


@pytest.mark.parametrize("dim", [0, 1])
def test_reduced_once_after_the_loop(devices, dim):
    """Tokens (weight gradients are partial) and the hidden dim (results are)."""
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s) for s in ((64, 8), (8, 64), (64, 8), (8,))]
    closed = of_function(mlp, *args)
    down = find(closed, "dot_general", (64, 8))
    mesh = Mesh(np.array(devices), "d")
    specs = ([P("d"), P(), P(), P()], [P(), P(None, "d"), P("d"), P()])[dim]
    ways = [NamedSharding(mesh, s) for s in specs]

    def compiled(lanes):
        rewritten = chunked(closed, whole(closed, down, 0, dim, 2, lanes))

        def grads(*args):
            return jax.grad(lambda *a: jnp.square(rewritten(*a)[0]).sum(), argnums=(0, 1, 2))(*args)

        step = jax.jit(grads, in_shardings=ways, out_shardings=tuple(ways[:3]))
        return step.lower(*args).compile()

    once = compiled(8)
    inside, outside = reductions(once.as_text())
    assert inside == 0 and outside > 0
    assert reductions(compiled(1).as_text())[0] > 0  # what lanes are for
    placed = [jax.device_put(x, way) for x, way in zip(args, ways)]
    same(once(*placed), jax.grad(lambda *a: jnp.square(mlp(*a)).sum(), argnums=(0, 1, 2))(*args))
