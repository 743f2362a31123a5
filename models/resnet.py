"""ResNet v1.5 with bottleneck blocks and BatchNorm: the statistics are those of the whole batch."""

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
    """Blocks of each stage; stage i works on width * 2**i features and leaves `expansion` times
    as many.

    `groups` of the 3x3 convolutions: more than 1 is a ResNeXt. `patch_stem`: a 7x7 stem with its
    pooling, which divides the image by 4, else a 3x3 convolution; to `stem` features.
    """

    stages: tuple[int, ...]
    width: int = 64
    expansion: int = 4
    groups: int = 1
    stem: int = 64
    image: int = 224
    classes: int = 1000
    patch_stem: bool = True
    dtype: Any = jnp.bfloat16


# He et al. 2016, "Deep Residual Learning for Image Recognition", table 1, with the stride of a
# bottleneck on its 3x3 convolution (v1.5).
SIZES = {
    "tiny": Config(stages=(1, 1), width=8, stem=8, image=8, classes=16, patch_stem=False),
    "50": Config(stages=(3, 4, 6, 3)),
    "101": Config(stages=(3, 4, 23, 3)),
    "152": Config(stages=(3, 8, 36, 3)),
}


def conv_of(c: Config) -> Any:
    """Convolutions of a model: no bias, since a norm follows each."""
    wide = at_least_f32(c.dtype)
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    return partial(nn.Conv, use_bias=False, dtype=c.dtype, param_dtype=wide, kernel_init=init)


def norm_of(c: Config) -> Any:
    """BatchNorms of a model, in training."""
    wide = at_least_f32(c.dtype)
    return partial(
        nn.BatchNorm,
        use_running_average=False,
        momentum=0.9,
        epsilon=1e-5,
        dtype=c.dtype,
        param_dtype=wide,
        force_float32_reductions=wide == jnp.float32,  # at least: it would cut float64 statistics
    )


class Bottleneck(nn.Module):
    """[batch, h, w, features] -> [batch, h / stride, w / stride, expansion * inner]."""

    config: Config
    inner: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = conv_of(self.config), norm_of(self.config)
        strides, outer = (self.stride, self.stride), self.config.expansion * self.inner
        y = nn.relu(norm(name="norm_1")(conv(self.inner, (1, 1), name="conv_1")(x)))
        spatial = conv(
            self.inner,
            (3, 3),
            strides,
            padding=1,
            feature_group_count=self.config.groups,
            name="conv_2",
        )
        y = nn.relu(norm(name="norm_2")(spatial(y)))
        y = conv(outer, (1, 1), name="conv_3")(y)
        # a block starts as the identity: Goyal et al. 2017, section 5.1
        y = norm(name="norm_3", scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = conv(outer, (1, 1), strides, name="project")(x)
            x = norm(name="norm_project")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """[batch, height, width, channels] -> [batch, classes] logits."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        c = self.config
        conv, norm = conv_of(c), norm_of(c)
        kernel, stride = (7, 2) if c.patch_stem else (3, 1)
        stem = conv(c.stem, (kernel, kernel), (stride, stride), padding=kernel // 2, name="stem")
        x = nn.relu(norm(name="norm")(stem(images)))
        if c.patch_stem:
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for i, blocks in enumerate(c.stages):
            for j in range(blocks):
                stride = 2 if i > 0 and j == 0 else 1
                x = Bottleneck(c, c.width * 2**i, stride, name=f"stage_{i}_block_{j}")(x)
        wide = at_least_f32(c.dtype)
        return nn.Dense(c.classes, dtype=c.dtype, param_dtype=wide, name="head")(x.mean((1, 2)))


def workload(
    size: str = "tiny",
    batch: int = 8,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Classification by a ResNet of a size in `SIZES`; `overrides` are fields of `Config`.

    SGD with momentum unless `tx` is given.
    """
    config = configure(SIZES, size, dtype, **overrides)
    specs = {
        "inputs": jax.ShapeDtypeStruct((batch, config.image, config.image, 3), config.dtype),
        "targets": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return make_workload(
        f"resnet-{size}",
        ResNet(config),
        cross_entropy,
        specs,
        vocab=config.classes,
        mutable=("batch_stats",),
        tx=optax.sgd(0.1, momentum=0.9) if tx is None else tx,
    )
