"""Causal attention that stores nothing of size query x key, as two kernels with rules.

Queries are taken a chunk at a time, against all keys; the backward pass makes the weights again
from the logarithm of their sums (Dao et al. 2022, "FlashAttention", algorithms 1 and 4, with whole
rows in place of the running maximum). The planner sees one op per pass, and splits it over samples
and key heads.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp

import jaxscaler
from models.workload import at_least_f32

CHUNK = 128  # queries at a time


@jax.custom_vjp
def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of [batch, seq, kv heads, group, size] scaled queries: of the queries' shape.

    Keys and values are [batch, seq, kv heads, size]; each serves a group of query heads.
    """
    return _forward(q, k, v)[0]


def _weights(q: jax.Array, k: jax.Array, start: jax.Array) -> jax.Array:
    """Masked scores of a chunk of queries from `start`, in f32 at least: [b, h, g, chunk, seq]."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(at_least_f32(q.dtype))
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], d) for d in (0, 1))
    return jnp.where(keys <= queries + start, scores, jnp.finfo(scores.dtype).min)


def _chunks(x: jax.Array) -> jax.Array:
    """[batch, seq, ...] -> [chunks, batch, seq / chunks, ...]."""
    batch, seq, *rest = x.shape
    chunk = gcd(seq, CHUNK)
    return jnp.moveaxis(x.reshape(batch, seq // chunk, chunk, *rest), 1, 0)


def _whole(x: jax.Array) -> jax.Array:
    """The inverse of `_chunks`."""
    chunks, batch, chunk, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * chunk, *rest)


def _starts(chunks: jax.Array) -> jax.Array:
    return jnp.arange(chunks.shape[0]) * chunks.shape[2]


def _run_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(attention, logarithm of the sum of its unnormalised weights [batch, seq, heads, group])."""

    def one(_: None, at: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        start, q = at
        scores = _weights(q, k, start)
        sums = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - sums[..., None]).astype(q.dtype)
        return None, (jnp.einsum("bhgqk,bkhd->bqhgd", weights, v), jnp.moveaxis(sums, 3, 1))

    chunks = _chunks(q)
    _, (out, sums) = jax.lax.scan(one, None, (_starts(chunks), chunks))
    return _whole(out), _whole(sums)


def _run_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, sums: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of q, k and v."""
    wide = at_least_f32(q.dtype)

    def one(carry: Any, at: Any) -> tuple[Any, jax.Array]:
        start, q, out, sums, g = at
        scores = _weights(q, k, start)
        weights = jnp.exp(scores - jnp.moveaxis(sums, 1, 3)[..., None])
        of_weights = jnp.einsum("bqhgd,bkhd->bhgqk", g, v).astype(wide)
        along = jnp.moveaxis((g.astype(wide) * out.astype(wide)).sum(-1), 1, 3)[..., None]
        of_scores = (weights * (of_weights - along)).astype(q.dtype)
        dk = jnp.einsum("bhgqk,bqhgd->bkhd", of_scores, q)
        dv = jnp.einsum("bhgqk,bqhgd->bkhd", weights.astype(g.dtype), g)
        carry = (carry[0] + dk.astype(wide), carry[1] + dv.astype(wide))
        return carry, jnp.einsum("bhgqk,bkhd->bqhgd", of_scores, k)

    chunks = _chunks(q)
    zero = jnp.zeros(k.shape, wide)
    (dk, dv), dq = jax.lax.scan(
        one, (zero, zero), (_starts(chunks), chunks, _chunks(out), _chunks(sums), _chunks(g))
    )
    return _whole(dq), dk.astype(k.dtype), dv.astype(v.dtype)


# Two products of 2 * b * h * g * q * k * d forward and five backward, half of each masked. The
# sequence stays whole: a query's position is its place; and so does a group: its keys are shared.
WHOLE = ("q", "k", "g", "d")
_forward = jaxscaler.register_rule(
    _run_forward, "b q h g d, b k h d, b k h d -> b q h g d, b q h g",
    need_replication_factors=WHOLE, flops=lambda q, k, v: 2 * q.size * k.shape[1],
)  # fmt: skip
_backward = jaxscaler.register_rule(
    _run_backward,
    "b q h g d, b k h d, b k h d, b q h g d, b q h g, b q h g d"
    " -> b q h g d, b k h d, b k h d",
    need_replication_factors=WHOLE, flops=lambda q, k, *rest: 5 * q.size * k.shape[1],
)  # fmt: skip


def _keep(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    out, sums = _forward(q, k, v)
    return out, (q, k, v, out, sums)


flash_attention.defvjp(_keep, lambda kept, g: _backward(*kept, g))


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by cuDNN: on GPUs, 16-bit numbers, heads of a size that divides by 8."""
    batch, seq, heads, group, size = q.shape
    y = jax.nn.dot_product_attention(
        q.reshape(batch, seq, heads * group, size), k, v,
        scale=1.0, is_causal=True, implementation="cudnn",
    )  # fmt: skip
    return y.reshape(q.shape)


KERNELS: dict[str, Callable[..., jax.Array]] = {
    "flash": flash_attention,
    "cudnn": cudnn_attention,
}
ATTENTION = ("xla", *KERNELS)  # "xla": products and a softmax, as the models have them


def check_attention(name: str) -> None:
    """ValueError unless `name` is a kind of attention."""
    if name not in ATTENTION:
        raise ValueError(f"attention {name!r}: there is {', '.join(ATTENTION)}")
