"""Swin Transformer: attention in windows of an image, which every other block shifts by half."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.workload import Workload, at_least_f32, configure, cross_entropy, make_workload


@dataclass(frozen=True)
class Config:
    """Shape of a Swin on square images.

    Stage i has `depths[i]` blocks of hidden * 2**i features and heads * 2**i heads, on a map of
    image / patch / 2**i. A window larger than the map is the map, and is not shifted. `scan` loops
    over the blocks of a stage, two at a time: one with windows in place and one shifted.
    """

    depths: tuple[int, ...]
    hidden: int
    heads: int
    window: int = 7
    image: int = 224
    patch: int = 4
    classes: int = 1000
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.heads} heads")
        coarsest = self.patch * 2 ** (len(self.depths) - 1)
        if self.image % coarsest:
            raise ValueError(f"image {self.image} does not divide by {coarsest}, its coarsest step")
        for stage in range(len(self.depths)):
            size, window = self.window_of(stage)
            if size % window:
                raise ValueError(
                    f"stage {stage}: a map of {size} does not divide into windows of {window}"
                )
        if self.scan and any(depth % 2 for depth in self.depths):
            raise ValueError(f"depths {self.depths}: a scan takes the blocks of a stage in pairs")

    def window_of(self, stage: int) -> tuple[int, int]:
        """(side of a stage's map, side of its windows)."""
        size = self.image // self.patch // 2**stage
        return size, min(size, self.window)


def deep(layers: int, heads: int, hidden: int) -> Config:
    """A large one: what is not in the first, second and last stage, two blocks each, is in the
    third."""
    return Config((2, 2, layers - 6, 2), hidden, heads, window=48, image=1536)


# t .. l: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted
# Windows", section 3.3. 1.8b .. 27b: (layers, heads, hidden) of the largest models in the artifact
# of Lin et al. 2024, "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep
# Learning Training" (OSDI), named by their number of parameters.
SIZES = {
    "tiny": Config((2, 2), hidden=16, heads=2, window=4, image=32, classes=16),
    "t": Config((2, 2, 6, 2), hidden=96, heads=3),
    "s": Config((2, 2, 18, 2), hidden=96, heads=3),
    "b": Config((2, 2, 18, 2), hidden=128, heads=4),
    "l": Config((2, 2, 18, 2), hidden=192, heads=6),
    "1.8b": deep(32, 16, 512),
    "5b": deep(40, 24, 768),
    "10b": deep(48, 32, 1024),
    "27b": deep(56, 32, 1536),
}

INIT = nn.initializers.normal(0.02)


def windows_of(x: jax.Array, window: int) -> jax.Array:
    """[batch, size, size, features] -> [batch, windows, tokens of a window, features]."""
    batch, size, _, features = x.shape
    side = size // window
    x = x.reshape(batch, side, window, side, window, features).swapaxes(2, 3)
    return x.reshape(batch, side * side, window * window, features)


def map_of(x: jax.Array, size: int, window: int) -> jax.Array:
    """The inverse of `windows_of`."""
    batch, *_, features = x.shape
    side = size // window
    x = x.reshape(batch, side, side, window, window, features).swapaxes(2, 3)
    return x.reshape(batch, size, size, features)


def displacements(window: int) -> jax.Array:
    """[query, key] -> which of the (2 * window - 1)**2 displacements within a window that is.

    Made of iotas where it is used: nothing of size query x key is stored.
    """
    tokens = (window * window, window * window)
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, tokens, d) for d in (0, 1))
    down = queries // window - keys // window + window - 1
    right = queries % window - keys % window + window - 1
    return down * (2 * window - 1) + right


def neighbourhoods(size: int, window: int, shift: int) -> jax.Array:
    """[windows, tokens] labels of what was next to each other before the map was rolled.

    After a roll the last windows hold strips of both ends of the map, which must not attend to
    each other.
    """
    rows = jnp.arange(size)
    strip = jnp.where(rows < size - window, 0, jnp.where(rows < size - shift, 1, 2))
    labels = 3 * strip[:, None] + strip[None, :]
    return windows_of(labels[None, :, :, None], window)[0, :, :, 0]


class WindowAttention(nn.Module):
    """Self-attention within windows, [batch, size, size, features] -> the same."""

    config: Config
    stage: int
    shifted: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, wide = self.config, at_least_f32(self.config.dtype)
        dense: Any = partial(nn.DenseGeneral, dtype=c.dtype, param_dtype=wide, kernel_init=INIT)
        size, window = c.window_of(self.stage)
        shift = window // 2 if self.shifted and window < size else 0
        features, heads = x.shape[-1], c.heads * 2**self.stage
        if shift:
            x = jnp.roll(x, (-shift, -shift), axis=(1, 2))
        qkv = dense((3, heads, features // heads), name="qkv")(windows_of(x, window))
        q, k, v = jnp.unstack(qkv, axis=3)
        scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q * q.shape[-1] ** -0.5, k)
        table = self.param("bias", INIT, ((2 * window - 1) ** 2, heads), wide)
        bias = table.astype(c.dtype)[displacements(window)]
        scores = scores.astype(wide) + jnp.moveaxis(bias, -1, 0).astype(wide)
        if shift:
            labels = neighbourhoods(size, window, shift)
            same = labels[:, None, :, None] == labels[:, None, None, :]
            scores = jnp.where(same, scores, jnp.finfo(wide).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(c.dtype)
        y = jnp.einsum("bnhqk,bnkhd->bnqhd", weights, v)
        y = map_of(dense(features, axis=(-2, -1), name="out")(y), size, window)
        return jnp.roll(y, (shift, shift), axis=(1, 2)) if shift else y


class Block(nn.Module):
    """[batch, size, size, features] -> the same."""

    config: Config
    stage: int
    shifted: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kinds, features = kinds_of(self.config), x.shape[-1]
        dense: Any = partial(nn.Dense, kernel_init=INIT, **kinds)
        norm: Any = partial(nn.LayerNorm, epsilon=1e-5, **kinds)
        attention = WindowAttention(self.config, self.stage, self.shifted, name="attn")
        x = x + attention(norm(name="norm_1")(x))
        y = nn.gelu(dense(4 * features, name="up")(norm(name="norm_2")(x)))
        return x + dense(features, name="down")(y)


class Pair(nn.Module):
    """A block with windows in place and one shifted, as what `nn.scan` wants."""

    config: Config
    stage: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        # A loop's body can not be merged with its recomputation, so it needs no barrier.
        block = nn.remat(Block, prevent_cse=False) if self.config.remat else Block
        for i in range(2):
            x = block(self.config, self.stage, bool(i), name=f"block_{i}")(x)
        return x, None


class Swin(nn.Module):
    """[batch, image, image, channels] -> [batch, classes] logits."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        c = self.config
        kinds = kinds_of(c)
        norm: Any = partial(nn.LayerNorm, epsilon=1e-5, **kinds)
        patch = (c.patch, c.patch)
        x = nn.Conv(c.hidden, patch, patch, padding="VALID", name="patches", **kinds)(images)
        x = norm(name="patches_norm")(x)
        for stage, depth in enumerate(c.depths):
            if stage > 0:
                y = norm(name=f"merge_norm_{stage}")(merged(x))
                dense = nn.Dense(2 * x.shape[-1], use_bias=False, kernel_init=INIT,
                                 name=f"merge_{stage}", **kinds)  # fmt: skip
                x = dense(y)
            x = self.blocks(x, stage, depth)
        x = norm(name="norm")(x).mean((1, 2))
        return nn.Dense(c.classes, kernel_init=INIT, name="head", **kinds)(x)

    def blocks(self, x: jax.Array, stage: int, depth: int) -> jax.Array:
        c = self.config
        if c.scan:
            pairs: Any = nn.scan(
                Pair, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth // 2
            )
            return pairs(c, stage, name=f"stage_{stage}")(x, None)[0]
        block = nn.remat(Block) if c.remat else Block
        for i in range(depth):
            x = block(c, stage, bool(i % 2), name=f"stage_{stage}_block_{i}")(x)
        return x


def merged(x: jax.Array) -> jax.Array:
    """[batch, size, size, features] -> [batch, size / 2, size / 2, 4 * features]: a patch of four,
    columns major."""
    batch, size, _, features = x.shape
    half = size // 2
    x = x.reshape(batch, half, 2, half, 2, features).transpose(0, 1, 3, 4, 2, 5)
    return x.reshape(batch, half, half, 4 * features)


def kinds_of(c: Config) -> Any:
    """Dtypes of a model's layers."""
    return dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype))


def workload(
    size: str = "tiny",
    batch: int = 8,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Classification by a Swin of a size in `SIZES`; `overrides` are fields of `Config`."""
    config = configure(SIZES, size, dtype, **overrides)
    specs = {
        "inputs": jax.ShapeDtypeStruct((batch, config.image, config.image, 3), config.dtype),
        "targets": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return make_workload(
        f"swin-{size}", Swin(config), cross_entropy, specs, vocab=config.classes, tx=tx
    )
