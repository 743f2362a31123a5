"""The U-Net of a diffusion model: it predicts the noise in an image from the image and the time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.workload import Workload, at_least_f32, configure, make_workload, mean_squared_error


@dataclass(frozen=True)
class Config:
    """Level i has width * multipliers[i] features on an image of size image / 2**i.

    `blocks` residual blocks per level; levels whose image size is in `attention` attend after each.
    """

    width: int
    multipliers: tuple[int, ...]
    blocks: int = 2
    attention: tuple[int, ...] = (16,)
    image: int = 32
    groups: int = 32
    dropout: float = 0.1
    timesteps: int = 1000
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.width % self.groups:
            raise ValueError(f"width {self.width} does not divide into {self.groups} groups")
        if self.image % 2 ** (len(self.multipliers) - 1):
            raise ValueError(
                f"image {self.image} can not be halved {len(self.multipliers) - 1} times"
            )


# Ho et al. 2020, "Denoising Diffusion Probabilistic Models", appendix B: 35.7 million parameters
# on CIFAR-10, 114 million at 256 x 256.
SIZES = {
    "tiny": Config(
        width=16, multipliers=(1, 2), blocks=1, attention=(4,), image=8, groups=4, dropout=0.0
    ),
    "cifar": Config(width=128, multipliers=(1, 2, 2, 2)),
    "256": Config(width=128, multipliers=(1, 1, 2, 2, 4, 4), image=256, dropout=0.0),
}

ZEROS = nn.initializers.zeros  # of the last layer of a branch: it starts as the identity


def kinds_of(c: Config) -> Any:
    """Dtypes of a model's layers."""
    return dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype))


def time_features(time: jax.Array, size: int, dtype: Any) -> jax.Array:
    """[batch] -> [batch, size]: sines, then cosines, of `size / 2` frequencies.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """
    half = size // 2
    rates = jnp.exp(-jnp.log(10000.0) / (half - 1) * jnp.arange(half, dtype=dtype))
    angles = time.astype(dtype)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class Residual(nn.Module):
    """Image [batch, h, w, any] and time [batch, t] -> [batch, h, w, features]."""

    config: Config
    features: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        c, kinds = self.config, kinds_of(self.config)
        norm: Any = partial(nn.GroupNorm, c.groups, **kinds)
        conv: Any = partial(nn.Conv, self.features, **kinds)
        y = conv((3, 3), name="conv_1")(nn.silu(norm(name="norm_1")(x)))
        y += nn.Dense(self.features, name="time", **kinds)(nn.silu(time))[:, None, None]
        y = nn.Dropout(c.dropout, deterministic=False)(nn.silu(norm(name="norm_2")(y)))
        y = conv((3, 3), kernel_init=ZEROS, name="conv_2")(y)
        if x.shape[-1] != self.features:
            x = conv((1, 1), name="skip")(x)
        return x + y


class Attention(nn.Module):
    """Self-attention with one head over all pixels, [batch, h, w, features] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, kinds = self.config, kinds_of(self.config)
        batch, height, width, size = x.shape
        y = nn.GroupNorm(c.groups, name="norm", **kinds)(x).reshape(batch, height * width, size)
        dense: Any = partial(nn.Dense, size, **kinds)
        q, k, v = (dense(name=name)(y) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqc,bkc->bqk", q * size**-0.5, k)
        weights = nn.softmax(scores.astype(at_least_f32(c.dtype))).astype(c.dtype)
        y = dense(kernel_init=ZEROS, name="out")(jnp.einsum("bqk,bkc->bqc", weights, v))
        return x + y.reshape(x.shape)


class UNet(nn.Module):
    """Images [batch, size, size, channels] and times [batch] -> the noise, of the images' shape."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, time: jax.Array) -> jax.Array:
        c, kinds = self.config, kinds_of(self.config)
        conv: Any = partial(nn.Conv, kernel_size=(3, 3), **kinds)
        dense: Any = partial(nn.Dense, 4 * c.width, **kinds)
        t = time_features(time, c.width, at_least_f32(c.dtype))
        t = dense(name="time_2")(nn.silu(dense(name="time_1")(t)))

        def block(x: jax.Array, features: int, attend: bool, name: str) -> jax.Array:
            x = Residual(c, features, name=name)(x, t)
            return Attention(c, name=f"{name}_attention")(x) if attend else x

        def level(i: int) -> tuple[int, bool]:
            return c.width * c.multipliers[i], c.image // 2**i in c.attention

        last = len(c.multipliers) - 1
        x = conv(c.width, name="first")(images)
        skips = [x]
        for i in range(last + 1):
            for j in range(c.blocks):
                x = block(x, *level(i), name=f"down_{i}_{j}")
                skips.append(x)
            if i < last:
                x = conv(x.shape[-1], strides=(2, 2), name=f"halve_{i}")(x)
                skips.append(x)
        x = block(x, x.shape[-1], True, name="middle_0")
        x = block(x, x.shape[-1], False, name="middle_1")
        for i in range(last, -1, -1):
            for j in range(c.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = block(x, *level(i), name=f"up_{i}_{j}")
            if i > 0:
                x = conv(x.shape[-1], name=f"double_{i}")(x.repeat(2, axis=1).repeat(2, axis=2))
        x = nn.silu(nn.GroupNorm(c.groups, name="norm", **kinds)(x))
        return conv(images.shape[-1], kernel_init=ZEROS, name="last")(x)


def workload(
    size: str = "tiny",
    batch: int = 8,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Noise prediction by a U-Net of a size in `SIZES`; `overrides` are fields of `Config`."""
    config = configure(SIZES, size, dtype, **overrides)
    images = jax.ShapeDtypeStruct((batch, config.image, config.image, 3), config.dtype)
    times = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return make_workload(
        f"unet-{size}",
        UNet(config),
        mean_squared_error,
        {"inputs": images, "time": times, "targets": images},
        vocab=config.timesteps,
        rngs=("dropout",) if config.dropout else (),
        tx=tx,
    )
