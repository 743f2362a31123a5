"""A stack of pairs of dense layers: out to a hidden width, an activation, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models.workload import Workload, at_least_f32, configure, make_workload, mean_squared_error

ACTIVATIONS = {"relu": nn.relu, "gelu": nn.gelu}


@dataclass(frozen=True)
class Config:
    """`pairs` x (width -> hidden -> width); `batch` is the one that makes the size what it is."""

    pairs: int
    width: int
    hidden: int
    batch: int
    activation: str = "relu"
    dtype: Any = jnp.bfloat16


# Not published models, but the two ends of the choice that a planner has:
# `wide` moves far more activation than weight bytes, `huge` the other way round.
SIZES = {
    "tiny": Config(pairs=2, width=32, hidden=128, batch=8),
    "wide": Config(pairs=4, width=1024, hidden=4096, batch=65536),
    "huge": Config(pairs=2, width=16384, hidden=65536, batch=64),
}


class Pair(nn.Module):
    """[batch, width] -> [batch, width]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = partial(nn.Dense, dtype=c.dtype, param_dtype=at_least_f32(c.dtype))
        x = dense(c.hidden, name="up")(x)
        return dense(c.width, name="down")(ACTIVATIONS[c.activation](x))


class MLP(nn.Module):
    """[batch, width] -> [batch, width]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.config.pairs):
            x = Pair(self.config, name=f"pair_{i}")(x)
        return x


def workload(
    size: str = "tiny",
    batch: int | None = None,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Regression by the MLP of a size in `SIZES`; `overrides` are fields of `Config`."""
    config = configure(SIZES, size, dtype, **overrides)
    rows = jax.ShapeDtypeStruct((batch or config.batch, config.width), config.dtype)
    specs = {"inputs": rows, "targets": rows}
    return make_workload(f"mlp-{size}", MLP(config), mean_squared_error, specs, tx=tx)
