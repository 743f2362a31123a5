"""T5: an encoder and a decoder with relative position biases, and vocabularies of any size.

The first version has a head tied to the table and a ReLU; mT5 has its own head and a gated GELU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.stack import stacked
from models.workload import (
    Workload,
    at_least_f32,
    causal_softmax,
    configure,
    cross_entropy,
    make_workload,
)


@dataclass(frozen=True)
class Config:
    """Shape of a T5: `layers` in the encoder, and as many in the decoder; heads `head_width` wide.

    `buckets` of distances have a bias each: half of them for one distance, half for ranges that
    widen up to `distance` (what is farther is in the last one).
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    head_width: int = 64
    context: int = 512
    vocab: int = 32128
    gated: bool = False
    tied: bool = True
    buckets: int = 32
    distance: int = 128
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.buckets % 4 or self.distance <= self.buckets // 2:
            raise ValueError(
                f"buckets {self.buckets}, distance {self.distance}: buckets must divide by 4, and"
                " half of them be less than the distance"
            )


mt5 = partial(Config, context=1024, vocab=250112, gated=True, tied=False)

# small .. 11b: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
# Text-to-Text Transformer", section 3.7. mt5-*: Xue et al. 2021, "mT5: A Massively Multilingual
# Pre-trained Text-to-Text Transformer", and its released configurations. vocab-*: (layers, heads,
# hidden) and vocabularies of the artifact of Lin et al. 2024, "nnScaler: Constraint-Guided
# Parallelization Plan Generation for Deep Learning Training" (OSDI); its layers are taken as those
# of each of the two stacks, the inner width as four times the hidden one, K as 1024.
SIZES = {
    "tiny": Config(2, hidden=32, heads=2, ffn=64, head_width=16, context=16, vocab=128,
                   buckets=8, distance=12),
    "small": Config(6, hidden=512, heads=8, ffn=2048),
    "base": Config(12, hidden=768, heads=12, ffn=3072),
    "large": Config(24, hidden=1024, heads=16, ffn=4096),
    "3b": Config(24, hidden=1024, heads=32, ffn=16384, head_width=128),
    "11b": Config(24, hidden=1024, heads=128, ffn=65536, head_width=128),
    "mt5-small": mt5(8, hidden=512, heads=6, ffn=1024),
    "mt5-base": mt5(12, hidden=768, heads=12, ffn=2048),
    "mt5-large": mt5(24, hidden=1024, heads=16, ffn=2816),
    "mt5-xl": mt5(24, hidden=2048, heads=32, ffn=5120),
    "mt5-xxl": mt5(24, hidden=4096, heads=64, ffn=10240),
    "vocab-512k": Config(24, hidden=2048, heads=32, ffn=8192, context=1024, vocab=512 * 2**10),
    "vocab-1m": Config(32, hidden=3072, heads=48, ffn=12288, context=1024, vocab=1024 * 2**10),
    "vocab-1.5m": Config(32, hidden=4096, heads=64, ffn=16384, context=1024, vocab=1536 * 2**10),
    "vocab-2m": Config(32, hidden=6144, heads=96, ffn=24576, context=1024, vocab=2048 * 2**10),
}  # fmt: skip


def bucket_starts(buckets: int, distance: int) -> list[int]:
    """The first distance of each bucket, of distances to one side: one each, then wider ones.

    With e = buckets / 2, bucket e + j starts at e * (distance / e) ** (j / e): Raffel et al. 2020,
    section 2.1. In whole numbers, so that no rounding decides.
    """
    exact = buckets // 2
    starts = list(range(exact))
    for j in range(exact):
        start = starts[-1] + 1 if j else exact
        while (start**exact) * exact**j < exact**exact * distance**j:
            start += 1
        starts.append(start)
    return starts


def bucket_of(queries: int, keys: int, c: Config, *, both: bool) -> jax.Array:
    """[query, key] -> the bucket of their distance; keys to the right have the upper half of the
    buckets with `both`, and else share that of distance 0.

    Made of iotas where it is used: nothing of size query x key is stored.
    """
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (queries, keys), d) for d in (0, 1))
    buckets = c.buckets // 2 if both else c.buckets
    away = jnp.abs(rows - columns) if both else jnp.maximum(rows - columns, 0)
    found = jnp.zeros_like(away)
    for start in bucket_starts(buckets, c.distance)[1:]:
        found += (away >= start).astype(jnp.int32)
    return found + jnp.where(columns > rows, buckets, 0) if both else found


class Bias(nn.Module):
    """[heads, query, key] biases of scores, which all layers of a stack share."""

    config: Config
    both: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        c = self.config
        init = nn.initializers.normal(c.hidden**-0.5)
        table = self.param("table", init, (c.buckets, c.heads), at_least_f32(c.dtype))
        bias = table.astype(c.dtype)[bucket_of(queries, keys, c, both=self.both)]
        return jnp.moveaxis(bias, -1, 0)


class Attention(nn.Module):
    """[batch, query, hidden] attends to [batch, key, hidden] -> [batch, query, hidden].

    Scores are not scaled: the initial queries are.
    """

    config: Config
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array | None) -> jax.Array:
        c = self.config

        def project(x: jax.Array, name: str, deviation: float) -> jax.Array:
            y = dense_of(c, deviation)(c.heads * c.head_width, name=name)(x)
            return y.reshape(*x.shape[:2], c.heads, c.head_width)

        q = project(x, "q", (c.hidden * c.head_width) ** -0.5)
        k, v = (project(memory, name, c.hidden**-0.5) for name in "kv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if bias is not None:
            scores = scores + bias
        if self.causal:
            weights = causal_softmax(scores)
        else:
            weights = nn.softmax(scores.astype(at_least_f32(c.dtype))).astype(c.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], c.heads * c.head_width)
        return dense_of(c, (c.heads * c.head_width) ** -0.5)(c.hidden, name="out")(y)


class FeedForward(nn.Module):
    """[batch, seq, hidden] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        inner: Any = partial(dense_of(c, c.hidden**-0.5), c.ffn)
        y = nn.gelu(inner(name="gate")(x)) * inner(name="up")(x) if c.gated else (
            nn.relu(inner(name="up")(x)))  # fmt: skip
        return dense_of(c, c.ffn**-0.5)(c.hidden, name="down")(y)


class Encoder(nn.Module):
    """A layer: [batch, seq, hidden] -> (the same, nothing)."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        c, norm = self.config, norm_of(self.config)
        y = norm(name="attn_norm")(x)
        x = x + Attention(c, name="attn")(y, y, bias)
        return x + FeedForward(c, name="mlp")(norm(name="mlp_norm")(x)), None


class Decoder(nn.Module):
    """A layer: [batch, seq, hidden], which also attends to `memory` -> (the same, nothing)."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        c, norm = self.config, norm_of(self.config)
        y = norm(name="attn_norm")(x)
        x = x + Attention(c, causal=True, name="attn")(y, y, bias)
        x = x + Attention(c, name="cross")(norm(name="cross_norm")(x), memory, None)
        return x + FeedForward(c, name="mlp")(norm(name="mlp_norm")(x)), None


class T5(nn.Module):
    """[batch, seq] tokens, and [batch, seq] tokens to go on from -> [batch, seq, vocab] logits."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, begun: jax.Array) -> jax.Array:
        c = self.config
        wide, norm = at_least_f32(c.dtype), norm_of(c)
        init = nn.initializers.normal(1.0)
        table = nn.Embed(c.vocab, c.hidden, dtype=c.dtype, param_dtype=wide, embedding_init=init,
                         name="embed")  # fmt: skip
        layers: Any = partial(stacked, layers=c.layers, scan=c.scan, remat=c.remat)
        bias = Bias(c, both=True, name="encoder_bias")(tokens.shape[1], tokens.shape[1])
        memory = layers(Encoder, c, name="encoder")(table(tokens), bias)
        memory = norm(name="encoder_norm")(memory)
        bias = Bias(c, both=False, name="decoder_bias")(begun.shape[1], begun.shape[1])
        x = layers(Decoder, c, name="decoder")(table(begun), memory, bias)
        x = norm(name="decoder_norm")(x)
        if c.tied:
            return table.attend(x * c.hidden**-0.5)
        return dense_of(c, c.hidden**-0.5)(c.vocab, name="head")(x)


def dense_of(c: Config, deviation: float) -> Any:
    """Dense layers of a model, of this standard deviation at first: no bias."""
    wide, init = at_least_f32(c.dtype), nn.initializers.normal(deviation)
    return partial(nn.Dense, use_bias=False, dtype=c.dtype, param_dtype=wide, kernel_init=init)


def norm_of(c: Config) -> Any:
    """Normalisations of a model."""
    return partial(nn.RMSNorm, epsilon=1e-6, dtype=c.dtype, param_dtype=at_least_f32(c.dtype))


def workload(
    size: str = "tiny",
    batch: int = 8,
    seq: int | None = None,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    target_seq: int | None = None,
    **overrides: Any,
) -> Workload:
    """Text-to-text training of a T5 of a size in `SIZES`; `overrides` are fields of `Config`.

    `seq` tokens are read, the size's context unless given, and `target_seq` are written (as many).
    """
    config = configure(SIZES, size, dtype, **overrides)
    seq = config.context if seq is None else seq
    read = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    written = jax.ShapeDtypeStruct((batch, seq if target_seq is None else target_seq), jnp.int32)
    return make_workload(
        f"t5-{size}",
        T5(config),
        cross_entropy,
        {"inputs": read, "begun": written, "targets": written},
        vocab=config.vocab,
        tx=tx,
    )
