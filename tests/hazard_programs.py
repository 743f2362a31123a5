"""Small programs that public bug reports say go wrong under sharding, by the ids of the reports.

Each is a function of what it trains (`w`) and of a batch (`x`), with the ids of its reports in
`tests/test_hazards.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning


class Program(NamedTuple):
    ids: str
    fn: Callable[[Any, Any], Any]
    w: Any
    x: Any


_rng = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape)


def ids(high: int, *shape: int) -> np.ndarray:
    return _rng.integers(0, high, shape, dtype=np.int32)


# -- lookups, vocabulary


def tied(w, x):
    return jnp.tanh(w["table"][x] @ w["mid"]) @ w["table"].T


def cross_entropy(w, x):
    logits = jnp.tanh(x["h"] @ w)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), x["label"][..., None], -1)


def two_indices(w, x):
    return (x["h"] @ w)[x["i"], x["j"]] * 2.0


def row_and_column(w, x):
    y = x @ w
    return y.at[:, 3].set(y[:, 1] ** 2), y[2].at[jnp.array([1, 5])].add(y[0, :2])


# -- experts, sorting, running sums


def router(w, x):
    scores, chosen = lax.top_k(jax.nn.softmax(x @ w), 2)
    return scores, jax.nn.one_hot(chosen, 8).sum(1) * scores.sum(-1, keepdims=True)


def capacity(w, x):
    mask = jax.nn.one_hot(jnp.argmax(x @ w, -1), 8)
    return jnp.cumsum(mask, 0) * (x @ w), jnp.cumsum(x @ w, 1)


def by_sorting(w, x):
    y = x @ w
    order = jnp.argsort(y[:, 0])
    return y[order], jnp.bincount(jnp.argmax(y, -1), length=8) * y[0]


def experts(w, x):
    return jnp.einsum("ecd,edf->ecf", jnp.einsum("td,tec->ecd", x["h"], x["to"]), w)


def ragged(w, x):
    return lax.ragged_dot(x, w, jnp.array([3, 5, 4, 4], jnp.int32))


# -- loops


def loops(w, x):
    def body(carry):
        i, y = carry
        return i + 1, jnp.tanh(y @ jnp.ones((8, 8)) / 8)

    _, y = lax.while_loop(lambda carry: carry[0] < 5, body, (0, x))
    return lax.fori_loop(0, 5, lambda i, y: jnp.tanh(y @ w), x) + y


def tuple_carry(w, x):
    def body(carry, _):
        i, y, v = carry
        keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), i), 0.7, y.shape)
        return (i + 1, jnp.where(keep, jnp.tanh(y @ v), 0.0), v * 0.9), y.sum()

    (_, y, _), sums = lax.scan(body, (0, x, w), None, length=4)
    return y, sums


def stacked(w, x):
    def body(carry, layer):
        y, kept, i = carry
        y = jnp.tanh(y @ layer)
        return (y, kept.at[i].set(y[:, 0]), i + 1), y.mean(0)

    (y, kept, _), means = lax.scan(body, (x, jnp.zeros((8, 8)), 0), w)
    return y, kept, means


def microbatches(w, x):
    def loss(w, part):
        return (jnp.tanh(part @ w) ** 2).mean()

    def body(total, part):
        return total + jax.grad(loss)(w, part), None

    parts = x.reshape(2, 8, 8)
    return lax.scan(body, jnp.zeros_like(w), parts)[0], parts * w.sum()


def remat(w, x):
    @jax.checkpoint
    def block(x, w):
        x = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x + jnp.tanh(x @ w)

    return block(block(x, w), w)


def custom_in_scan(w, x):
    return lax.scan(lambda y, _: (_doubled(y), y.sum()), x @ w, None, length=4)


@custom_partitioning
def _halved(x):
    return x / 2


def _parts(mesh, args, result):
    sharding = args[0].sharding
    return mesh, lambda x: x / 2, sharding, (sharding,)


_halved.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=_parts,
    sharding_rule="i j -> i j",
)
_doubled = jax.custom_vjp(lambda x: _halved(x) * 4)
_doubled.defvjp(lambda x: (_doubled(x), None), lambda _, g: (_halved(g) * 4,))


# -- shapes that do not divide, shapes that split and join


def fused_qkv(w, x):
    q, k, v = jnp.split(x @ w["qkv"], 3, -1)
    return q * k - v, (x @ w["five"]).reshape(8, 5, 8)


def two_heads(w, x):
    cache = jnp.zeros((8, 16, 2, 8))
    keys = (x @ w).reshape(8, 1, 2, 8)
    return lax.dynamic_update_slice(cache, keys, (0, 5, 0, 0)).sum(1) * keys[:, 0]


def minor_factor(w, x):
    return (x[:, None] * w).reshape(2, 5, 8), x.sum() * w.reshape(4, 2)


def odd_sizes(w, x):
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (6, 19))
    return jnp.where(mask, x @ w, 0.0) + jnp.arange(19)


def pad_and_join(w, x):
    y = x @ w
    small, large = y[:, :2], jnp.concatenate([y, y * 2], 1)
    return jnp.concatenate([small, large], 1), jnp.pad(y, ((0, 3), (5, 0))), jnp.roll(y, 3, 0)


# -- slices at places that are clamped


def clamped(w, x):
    y = x @ w
    late = lax.dynamic_update_slice(y, jnp.ones((8, 2)), (0, 7))
    return lax.dynamic_slice(y, (0, 7), (8, 8)) * 2, late, y.at[6:].set(1.0)


def vector_update(w, x):
    return lax.dynamic_update_slice(x["v"] * w, x["part"], (13,))


# -- convolutions, transforms, randomness, derivatives


def _conv(x, w, stride=1, groups=1):
    spec = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=spec, feature_group_count=groups
    )


def convolutions(w, x):
    y = _conv(x, w["strided"], stride=2)
    return y, _conv(jnp.tanh(y), w["grouped"], groups=4)


def conv_1d(w, x):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def fourier(w, x):
    return jnp.abs(jnp.fft.fft(jax.vmap(lambda row: row * w)(x)))


def cholesky(w, x):
    gram = jnp.einsum("bi,bj->bij", x, x) + 8 * jnp.eye(8)
    return jnp.linalg.cholesky(gram * (1 + w[0] ** 2))


def random_bits(w, x):
    key = jax.random.key(7)
    return x * jax.random.normal(key, (8, 496)) * w, jax.random.permutation(key, 8) * w[:8]


def forward_mode(w, x):
    return jax.jacfwd(lambda v: jnp.tanh(x @ v).sum(0))(w), jax.grad(lambda y: (y @ w).sum())(x)


PROGRAMS = {
    fn.__name__: Program(tags, fn, w, x)
    for tags, fn, w, x in (
        ("R4 R5 T3 T23 T29", tied, {"table": f(16, 8), "mid": f(8, 8)}, ids(16, 8, 4)),
        ("R3 R6", cross_entropy, f(8, 16), {"h": f(8, 4, 8), "label": ids(16, 8, 4)}),
        ("R3", two_indices, f(8, 8), {"h": f(8, 8), "i": ids(8, 16), "j": ids(8, 16)}),
        ("T22", row_and_column, f(8, 8), f(8, 8)),
        ("R7 T20", router, f(8, 8), f(16, 8)),
        ("R8", capacity, f(8, 8), f(16, 8)),
        ("R9 T21", by_sorting, f(8, 8), f(16, 8)),
        ("R10", experts, f(8, 8, 16), {"h": f(16, 8), "to": f(16, 8, 4)}),
        ("R10", ragged, f(4, 8, 8), f(16, 8)),
        ("T1", loops, f(8, 8), f(8, 8)),
        ("T2", tuple_carry, f(8, 8), f(8, 8)),
        ("R12 T30 T35 T42", stacked, f(8, 8, 8), f(8, 8)),
        ("R27 R28 T40", microbatches, f(8, 8), f(16, 8)),
        ("R16 T19", remat, f(8, 8), f(8, 8)),
        ("T32", custom_in_scan, f(8, 8), f(8, 8)),
        ("R20", fused_qkv, {"qkv": f(8, 24), "five": f(8, 40)}, f(8, 8)),
        ("R19 T41", two_heads, f(8, 16), f(8, 8)),
        ("T24", minor_factor, f(8), f(10)),
        ("R18 T4 T10 T11", odd_sizes, f(8, 19), f(6, 8)),
        ("R37 T5", pad_and_join, f(8, 8), f(8, 8)),
        ("T27", clamped, f(8, 8), f(8, 8)),
        ("T28", vector_update, f(16), {"v": f(16), "part": f(8)}),
        ("R37 T25 T26", convolutions, {"strided": f(3, 3, 8, 8), "grouped": f(3, 3, 2, 16)},
         f(8, 8, 8, 8)),
        ("T23", conv_1d, f(3, 8, 8), f(8, 16, 8)),
        ("R38 T33", fourier, f(8), f(16, 8)),
        ("T33", cholesky, f(8), f(16, 8)),
        ("R29 T31", random_bits, f(496), f(8, 496)),
        ("T34", forward_mode, f(8, 8), f(16, 8)),
    )
}  # fmt: skip


def step(names):
    """The train step of several programs at once: a gradient step each, and what they compute."""

    def loss(fn, w, x):
        made = fn(w, x)
        return sum((y.astype(float) ** 2).mean() for y in jax.tree.leaves(made)), made

    def together(state, batch):
        new, results = {}, {}
        for name in names:
            one = partial(loss, PROGRAMS[name].fn, x=batch[name])
            slope, results[name] = jax.grad(one, has_aux=True)(state[name])
            new[name] = jax.tree.map(lambda w, g: w - 0.1 * g, state[name], slope)
        return new, results

    return together
