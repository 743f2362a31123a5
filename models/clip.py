"""CLIP: a tower for images and one for texts, trained to tell which of a batch belong together.

The loss compares every image with every text of the batch: it is no mean over samples, so it can
not be added up over parts of the batch.
"""

from __future__ import annotations

import math
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
    make_workload,
)


@dataclass(frozen=True)
class Tower:
    """Shape of a transformer."""

    layers: int
    hidden: int
    heads: int

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.heads} heads")


@dataclass(frozen=True)
class Config:
    """Shape of a CLIP: square images cut into square patches; texts of `context` tokens, of which
    the largest ends the text; both are mapped to `embed` numbers."""

    vision: Tower
    text: Tower
    embed: int
    patch: int
    image: int = 224
    context: int = 77
    vocab: int = 49408
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        check_patches(self.image, self.patch)


def check_patches(image: int, patch: int) -> None:
    """ValueError unless images divide into patches."""
    if image % patch:
        raise ValueError(f"image {image} does not divide into patches of {patch}")


# Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision",
# table 20.
SIZES = {
    "tiny": Config(Tower(2, 32, 4), Tower(2, 16, 2), embed=16, patch=4, image=12, context=8,
                   vocab=64),
    "b32": Config(Tower(12, 768, 12), Tower(12, 512, 8), embed=512, patch=32),
    "b16": Config(Tower(12, 768, 12), Tower(12, 512, 8), embed=512, patch=16),
    "l14": Config(Tower(24, 1024, 16), Tower(12, 768, 12), embed=768, patch=14),
    "l14-336": Config(Tower(24, 1024, 16), Tower(12, 768, 12), embed=768, patch=14, image=336),
}  # fmt: skip

INIT = nn.initializers.normal(0.02)


def kinds_of(dtype: Any) -> Any:
    """Dtypes of a model's layers."""
    return dict(dtype=dtype, param_dtype=at_least_f32(dtype))


class Block(nn.Module):
    """[batch, tokens, hidden] -> (the same, nothing)."""

    tower: Tower
    causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        t, kinds = self.tower, kinds_of(self.dtype)
        dense: Any = partial(nn.DenseGeneral, kernel_init=INIT, **kinds)
        norm: Any = partial(nn.LayerNorm, epsilon=1e-5, **kinds)
        qkv = dense((3, t.heads, t.hidden // t.heads), name="qkv")(norm(name="norm_1")(x))
        q, k, v = jnp.unstack(qkv, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
        if self.causal:
            weights = causal_softmax(scores)
        else:
            weights = nn.softmax(scores.astype(at_least_f32(self.dtype))).astype(self.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + dense(t.hidden, axis=(-2, -1), name="out")(y)
        y = dense(4 * t.hidden, name="up")(norm(name="norm_2")(x))
        y = y * nn.sigmoid(1.702 * y)  # the GELU of the released models
        return x + dense(t.hidden, name="down")(y), None


class Vision(nn.Module):
    """[batch, height, width, channels] -> [batch, 1 + patches, hidden]: a class token, then the
    patches, row by row."""

    tower: Tower
    patch: int
    dtype: Any
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        t, kinds = self.tower, kinds_of(self.dtype)
        patch = (self.patch, self.patch)
        x = nn.Conv(t.hidden, patch, patch, padding="VALID", use_bias=False, name="patches",
                    **kinds)(images)  # fmt: skip
        x = x.reshape(x.shape[0], -1, t.hidden)
        wide = kinds["param_dtype"]
        first = self.param("first", INIT, (1, 1, t.hidden), wide).astype(self.dtype)
        first = jnp.broadcast_to(first, (x.shape[0], 1, t.hidden))
        positions = self.param("positions", INIT, (1 + x.shape[1], t.hidden), wide)
        x = jnp.concatenate([first, x], axis=1) + positions.astype(self.dtype)
        x = nn.LayerNorm(epsilon=1e-5, name="norm", **kinds)(x)
        return stacked(Block, t, False, self.dtype, layers=t.layers, name="layers",
                       scan=self.scan, remat=self.remat)(x)  # fmt: skip


class Text(nn.Module):
    """[batch, seq] tokens -> [batch, hidden]: what the last token of each text has seen."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c, t, kinds = self.config, self.config.text, kinds_of(self.config.dtype)
        x = nn.Embed(c.vocab, t.hidden, embedding_init=INIT, name="embed", **kinds)(tokens)
        positions = self.param("positions", INIT, (c.context, t.hidden), kinds["param_dtype"])
        x = x + positions[: tokens.shape[1]].astype(c.dtype)
        x = stacked(Block, t, True, c.dtype, layers=t.layers, name="layers", scan=c.scan,
                    remat=c.remat)(x)  # fmt: skip
        ends = tokens.argmax(axis=1)
        x = jnp.take_along_axis(x, ends[:, None, None], axis=1)[:, 0]
        return nn.LayerNorm(epsilon=1e-5, name="norm", **kinds)(x)


class CLIP(nn.Module):
    """Images [batch, height, width, channels] and texts [batch, seq] -> (their unit vectors, each
    [batch, embed]; the logarithm of the scale of their products)."""

    config: Config

    @nn.compact
    def __call__(
        self, images: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        c, kinds = self.config, kinds_of(self.config.dtype)
        dense: Any = partial(nn.Dense, c.embed, use_bias=False, kernel_init=INIT, **kinds)
        x = Vision(c.vision, c.patch, c.dtype, c.scan, c.remat, name="vision")(images)[:, 0]
        x = nn.LayerNorm(epsilon=1e-5, name="vision_norm", **kinds)(x)
        seen, read = (
            dense(name="vision_head")(x),
            dense(name="text_head")(Text(c, name="text")(tokens)),
        )
        start = nn.initializers.constant(math.log(1 / 0.07))
        scale = self.param("scale", start, (), kinds["param_dtype"])
        return unit(seen), unit(read), scale


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1, in f32 at least."""
    x = x.astype(at_least_f32(x.dtype))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))


def contrastive(outputs: tuple[jax.Array, jax.Array, jax.Array], _: Any = None) -> jax.Array:
    """Cross entropy of `CLIP`'s outputs: image i belongs to text i, among all in the batch.

    The mean of choosing a text for each image, and an image for each text. The scale of the
    products stays below 100.
    """
    seen, read, scale = outputs
    scale = jnp.exp(jnp.minimum(scale, math.log(100)))
    scores = scale * jnp.einsum("ie,te->it", seen, read)
    own = scale * jnp.sum(seen * read, axis=-1)
    others = jax.nn.logsumexp(scores, axis=1) + jax.nn.logsumexp(scores, axis=0)
    return jnp.mean(others / 2 - own)


def workload(
    size: str = "tiny",
    batch: int = 8,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Contrastive training of a CLIP of a size in `SIZES`; `overrides` are fields of `Config`.

    The batch holds pairs, and nothing else to aim at.
    """
    config = configure(SIZES, size, dtype, **overrides)
    specs = {
        "inputs": jax.ShapeDtypeStruct((batch, config.image, config.image, 3), config.dtype),
        "texts": jax.ShapeDtypeStruct((batch, config.context), jnp.int32),
    }
    return make_workload(
        f"clip-{size}", CLIP(config), contrastive, specs, vocab={"texts": config.vocab}, tx=tx
    )
