"""GPT-2 and GPT-3: learned positions, pre-norm blocks with GELU, output head tied to the table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.attention import KERNELS, check_attention
from models.stack import stacked
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
    """Shape of a GPT. `padded_vocab` rows of the table are more than `vocab` when that must divide;
    no token or target ever names a padding row. The MLP is `ffn` wide, 4 * hidden unless given.
    Options of its relatives: no learned positions (nothing in their place), a head of its own.
    `remat_attention`: scores and their softmax are made again in the backward pass."""

    layers: int
    hidden: int
    heads: int
    context: int = 1024
    vocab: int = 50257
    padded_vocab: int | None = None
    dropout: float = 0.0
    ffn: int | None = None
    positions: bool = True
    tied: bool = True
    scan: bool = False
    remat: bool = False
    remat_attention: bool = False
    attention: str = "xla"  # products and a softmax, or a kernel: models/attention.py
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        check_attention(self.attention)
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.heads} heads")
        if self.padded_vocab is not None and self.padded_vocab < self.vocab:
            raise ValueError(f"padded_vocab {self.padded_vocab} is below vocab {self.vocab}")


# small .. xl: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2,
# with the head count of the released checkpoints (head size 64).
# 6.7b .. 175b: Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1; its width of
# 5140 for 13B is taken as 40 heads x 128.
SIZES = {
    "tiny": Config(layers=2, hidden=64, heads=4, context=32, vocab=256),
    "small": Config(layers=12, hidden=768, heads=12),
    "medium": Config(layers=24, hidden=1024, heads=16),
    "large": Config(layers=36, hidden=1280, heads=20),
    "xl": Config(layers=48, hidden=1600, heads=25),
    "6.7b": Config(layers=32, hidden=4096, heads=32, context=2048),
    "13b": Config(layers=40, hidden=5120, heads=40, context=2048),
    "175b": Config(layers=96, hidden=12288, heads=96, context=2048),
}

INIT = nn.initializers.normal(0.02)


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, hidden] -> the same; one matmul for q, k and v."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = partial(
            nn.DenseGeneral, dtype=c.dtype, param_dtype=at_least_f32(c.dtype), kernel_init=INIT
        )
        size = c.hidden // c.heads
        q, k, v = jnp.unstack(dense((3, c.heads, size), name="qkv")(x), axis=2)
        q = q * size**-0.5
        if c.attention == "xla" or self.is_initializing():  # parameters need no kernel
            y = (jax.checkpoint(_attend) if c.remat_attention else _attend)(q, k, v)
        else:
            y = KERNELS[c.attention](q[:, :, :, None], k, v)[:, :, :, 0]
        return dense(c.hidden, axis=(-2, -1), name="out")(y)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = causal_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


class Block(nn.Module):
    """[batch, seq, hidden] -> (the same, nothing): the pair is what `nn.scan` wants."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        c = self.config
        kinds = dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype))
        dense: Any = partial(nn.Dense, kernel_init=INIT, **kinds)
        norm: Any = partial(nn.LayerNorm, epsilon=1e-5, **kinds)
        drop = nn.Dropout(c.dropout, deterministic=False)
        x = x + drop(Attention(c, name="attn")(norm(name="ln_1")(x)))
        y = nn.gelu(dense(c.ffn or 4 * c.hidden, name="up")(norm(name="ln_2")(x)))
        return x + drop(dense(c.hidden, name="down")(y)), None


class GPT(nn.Module):
    """[batch, seq] tokens -> [batch, seq, vocab] logits."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        kinds = dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype))
        table = nn.Embed(
            c.padded_vocab or c.vocab, c.hidden, embedding_init=INIT, name="wte", **kinds
        )
        x = table(tokens)
        if c.positions:
            positions = self.param("wpe", INIT, (c.context, c.hidden), kinds["param_dtype"])
            x = x + positions[: tokens.shape[1]].astype(c.dtype)
        x = nn.Dropout(c.dropout, deterministic=False)(x)
        x = stacked(Block, c, layers=c.layers, name="h", scan=c.scan, remat=c.remat)(x)
        x = nn.LayerNorm(epsilon=1e-5, name="ln_f", **kinds)(x)
        if c.tied:
            return table.attend(x)
        return nn.Dense(table.num_embeddings, use_bias=False, kernel_init=INIT, name="head",
                        **kinds)(x)  # fmt: skip


def workload(
    size: str = "tiny",
    batch: int = 8,
    seq: int | None = None,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Next-token training of a GPT of a size in `SIZES`; `overrides` are fields of `Config`.

    `seq` is the size's whole context unless given.
    """
    config = configure(SIZES, size, dtype, **overrides)
    seq = config.context if seq is None else seq
    if seq > config.context:
        raise ValueError(f"seq {seq} is longer than the context of {config.context} positions")
    return make_workload(
        f"gpt-{size}",
        GPT(config),
        cross_entropy,
        token_batch(batch, seq),
        vocab=config.vocab,
        rngs=("dropout",) if config.dropout else (),
        tx=tx,
    )
