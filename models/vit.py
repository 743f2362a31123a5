"""Vision Transformer, in flax.nnx: image patches as tokens, pre-norm blocks, a class token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.workload import Workload, at_least_f32, configure, cross_entropy, make_workload


@dataclass(frozen=True)
class Config:
    """Shape of a ViT on square images, cut into square patches."""

    layers: int
    hidden: int
    heads: int
    patch: int = 16
    image: int = 224
    classes: int = 1000
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide into {self.heads} heads")
        if self.image % self.patch:
            raise ValueError(f"image {self.image} does not divide into patches of {self.patch}")


# Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", table 1; patch 14 of "huge" is theirs.
SIZES = {
    "tiny": Config(layers=2, hidden=32, heads=4, patch=2, image=6, classes=16),
    "base": Config(layers=12, hidden=768, heads=12),
    "large": Config(layers=24, hidden=1024, heads=16),
    "huge": Config(layers=32, hidden=1280, heads=16, patch=14),
}

INIT = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """[batch, tokens, hidden] -> the same; every token sees all."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.config = c
        kinds = dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype), rngs=rngs)
        dense: Any = partial(nnx.LinearGeneral, kernel_init=INIT, **kinds)
        norm: Any = partial(nnx.LayerNorm, c.hidden, epsilon=1e-6, **kinds)
        size = c.hidden // c.heads
        self.norm_1, self.norm_2 = norm(), norm()
        self.query, self.key, self.value = (dense(c.hidden, (c.heads, size)) for _ in range(3))
        self.out = dense((c.heads, size), c.hidden, axis=(-2, -1))
        self.up, self.down = dense(c.hidden, 4 * c.hidden), dense(4 * c.hidden, c.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        y = self.norm_1(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
        weights = nnx.softmax(scores.astype(at_least_f32(c.dtype))).astype(c.dtype)
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class ViT(nnx.Module):
    """[batch, height, width, channels] -> [batch, classes] logits."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.config = c
        wide = at_least_f32(c.dtype)
        kinds: Any = dict(dtype=c.dtype, param_dtype=wide, rngs=rngs)
        patch, tokens = (c.patch, c.patch), (c.image // c.patch) ** 2 + 1
        self.patches = nnx.Conv(3, c.hidden, patch, patch, padding="VALID", **kinds)
        self.first = nnx.Param(jnp.zeros((1, 1, c.hidden), wide))
        self.positions = nnx.Param(INIT(rngs.params(), (1, tokens, c.hidden), wide))
        self.blocks = nnx.List([Block(c, rngs) for _ in range(c.layers)])
        self.norm = nnx.LayerNorm(c.hidden, epsilon=1e-6, **kinds)
        self.head = nnx.Linear(c.hidden, c.classes, kernel_init=nnx.initializers.zeros, **kinds)

    def __call__(self, images: jax.Array) -> jax.Array:
        c = self.config
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, c.hidden)
        first = jnp.broadcast_to(self.first[...].astype(c.dtype), (x.shape[0], 1, c.hidden))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...].astype(c.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@dataclass(frozen=True)
class Functional:
    """A module of nnx as functions of its parameters: what `make_workload` takes of a linen one."""

    create: Callable[[nnx.Rngs], Any]

    @cached_property
    def definition(self) -> Any:
        """The module without its parameters."""
        return nnx.split(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))), nnx.Param)[0]

    def init(self, rng: jax.Array, *_: jax.Array) -> dict[str, Any]:
        return {"params": nnx.split(self.create(nnx.Rngs(rng)), nnx.Param)[1]}

    def apply(self, variables: dict[str, Any], *arrays: jax.Array, rngs: Any = None) -> Any:
        return nnx.merge(self.definition, variables["params"])(*arrays)


def workload(
    size: str = "tiny",
    batch: int = 8,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Classification by a ViT of a size in `SIZES`; `overrides` are fields of `Config`."""
    config = configure(SIZES, size, dtype, **overrides)
    specs = {
        "inputs": jax.ShapeDtypeStruct((batch, config.image, config.image, 3), config.dtype),
        "targets": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    model = Functional(lambda rngs: ViT(config, rngs))
    return make_workload(f"vit-{size}", model, cross_entropy, specs, vocab=config.classes, tx=tx)
