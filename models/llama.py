"""Llama 3: RMSNorm, rotary positions, grouped-query attention, gated MLP, untied head.

The layers are unrolled (`layers_0`, `layers_1`, ...) or, with `scan`, one loop over stacked
parameters (`layers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.attention import KERNELS, check_attention
from models.workload import (
    Workload,
    at_least_f32,
    causal_softmax,
    configure,
    cross_entropy,
    make_workload,
    token_batch,
)


@dataclass(frozen=True)
class Config:
    """Shape of a Llama: each of `kv_heads` serves heads / kv_heads query heads.

    Heads are `head_width` wide, hidden / heads unless given. Options of its relatives: a plain
    MLP with GELU in place of the gated one, biases of q, k and v, a head tied to the table.
    `remat_attention`: scores and their softmax are made again in the backward pass.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    context: int = 8192
    vocab: int = 128256
    theta: float = 500000.0
    head_width: int | None = None
    gated: bool = True
    qkv_bias: bool = False
    tied: bool = False
    scan: bool = False
    remat: bool = False
    remat_attention: bool = False
    attention: str = "xla"  # products and a softmax, or a kernel: models/attention.py
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        check_attention(self.attention)
        whole = self.head_width or self.hidden % self.heads == 0
        if not whole or self.head_size % 2 or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: heads must be"
                " of one even size, and shared evenly by the kv heads"
            )

    @property
    def head_size(self) -> int:
        return self.head_width or self.hidden // self.heads


# Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3; vocabulary and context from 3.2.
# The frequency scaling that 3.1 adds for long contexts changes no shape and is left out.
SIZES = {
    "tiny": Config(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, context=32, vocab=256),
    "8b": Config(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    "70b": Config(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    "405b": Config(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248),
}

INIT = nn.initializers.normal(0.02)


def rotary_angles(seq: int, size: int, theta: float, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each [seq, 1, size / 2]: position p turns pair i by p * theta ** (-2 i / size).

    Su et al. 2021, "RoFormer", equation 15; the axis of one is for the heads.
    """
    pairs = jnp.arange(size // 2, dtype=dtype)
    angles = jnp.arange(seq, dtype=dtype)[:, None, None] * theta ** (-2 * pairs / size)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn [batch, seq, heads, size], where entry i is paired with entry i + size / 2."""
    cos, sin = angles
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention, [batch, seq, hidden] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        c = self.config
        dense = dense_of(c)
        batch, seq, _ = x.shape
        size = c.head_size

        def project(heads: int, name: str) -> jax.Array:
            made = dense(heads * size, use_bias=c.qkv_bias, name=name)(x)
            return made.reshape(batch, seq, heads, size)

        q = rotate(project(c.heads, "q"), angles) * size**-0.5
        q = q.reshape(batch, seq, c.kv_heads, c.heads // c.kv_heads, size)
        k, v = rotate(project(c.kv_heads, "k"), angles), project(c.kv_heads, "v")
        if c.attention == "xla" or self.is_initializing():  # parameters need no kernel
            attend = jax.checkpoint(_attend) if c.remat_attention else _attend
        else:
            attend = KERNELS[c.attention]
        y = attend(q, k, v)
        return dense(c.hidden, name="out")(y.reshape(batch, seq, c.heads * size))


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = causal_softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)


class Block(nn.Module):
    """[batch, seq, hidden] -> (the same, nothing): the pair is what `nn.scan` wants."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        c = self.config
        dense, norm = dense_of(c), norm_of(c)
        x = x + Attention(c, name="attn")(norm(name="attn_norm")(x), angles)
        y = norm(name="mlp_norm")(x)
        if c.gated:
            y = nn.silu(dense(c.ffn, name="gate")(y)) * dense(c.ffn, name="up")(y)
        else:
            y = nn.gelu(dense(c.ffn, name="up")(y))
        return x + dense(c.hidden, name="down")(y), None


class Llama(nn.Module):
    """[batch, seq] tokens -> [batch, seq, vocab] logits."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        wide = at_least_f32(c.dtype)
        embed = partial(nn.Embed, dtype=c.dtype, param_dtype=wide, embedding_init=INIT)
        table = embed(c.vocab, c.hidden, name="embed")
        x = table(tokens)
        angles = rotary_angles(tokens.shape[1], c.head_size, c.theta, wide)
        # A loop's body can not be merged with its recomputation, so it needs no barrier.
        block = nn.remat(Block, prevent_cse=not c.scan) if c.remat else Block
        if c.scan:
            block = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.layers,
            )
            x, _ = block(c, name="layers")(x, angles)
        else:
            for i in range(c.layers):
                x, _ = block(c, name=f"layers_{i}")(x, angles)
        x = norm_of(c)(name="norm")(x)
        return table.attend(x) if c.tied else dense_of(c)(c.vocab, name="head")(x)


def dense_of(c: Config) -> Any:
    """Dense layers of a model: no bias."""
    wide = at_least_f32(c.dtype)
    return partial(nn.Dense, use_bias=False, dtype=c.dtype, param_dtype=wide, kernel_init=INIT)


def norm_of(c: Config) -> Any:
    """Normalisations of a model."""
    return partial(nn.RMSNorm, epsilon=1e-5, dtype=c.dtype, param_dtype=at_least_f32(c.dtype))


def workload(
    size: str = "tiny",
    batch: int = 8,
    seq: int | None = None,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Next-token training of a Llama of a size in `SIZES`; `overrides` are fields of `Config`.

    `seq` is the size's whole context unless given.
    """
    config = configure(SIZES, size, dtype, **overrides)
    return make_workload(
        f"llama-{size}",
        Llama(config),
        cross_entropy,
        token_batch(batch, config.context if seq is None else seq),
        vocab=config.vocab,
        tx=tx,
    )
