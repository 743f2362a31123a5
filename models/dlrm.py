"""DLRM: big embedding tables and a dense MLP; all pairs of their vectors feed a second MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.workload import Workload, at_least_f32, configure, make_workload


@dataclass(frozen=True)
class Config:
    """One table of `size` numbers a row for each of `rows`; `bottom` must end in `size`.

    Row counts are rounded up to multiples of `multiple`, so that tables of odd lengths can be cut.
    """

    rows: tuple[int, ...]
    size: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dense: int = 13
    multiple: int = 1
    dtype: Any = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.bottom[-1] != self.size:
            raise ValueError(f"bottom ends in {self.bottom[-1]}, but the rows are of {self.size}")

    def padded(self, table: int) -> int:
        """Rows of a table as it is stored."""
        return -(-self.rows[table] // self.multiple) * self.multiple


# Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
# Systems": the categories of Criteo's Kaggle set; those of the terabyte set, at most 40 million
# rows each, and the widths of MLPerf's training benchmark.
SIZES = {
    "tiny": Config(rows=(64, 48, 3, 40), size=16, bottom=(32, 16), top=(32, 1), dense=8),
    "kaggle": Config(
        rows=(
            1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27,
            14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
        ),
        size=16,
        bottom=(512, 256, 64, 16),
        top=(512, 256, 1),
    ),
    "mlperf": Config(
        rows=(
            39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
            2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
        ),
        size=128,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
    ),
}  # fmt: skip


class DLRM(nn.Module):
    """Dense features [batch, dense] and one row number per table [batch, tables] -> logits [batch].

    Row numbers are taken modulo the length of their table.
    """

    config: Config

    @nn.compact
    def __call__(self, features: jax.Array, categories: jax.Array) -> jax.Array:
        c = self.config
        kinds = dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype))
        dense: Any = partial(nn.Dense, **kinds)
        x = features
        for i, width in enumerate(c.bottom):
            x = nn.relu(dense(width, name=f"bottom_{i}")(x))
        vectors = [x]
        for i, rows in enumerate(c.rows):
            init = nn.initializers.uniform(2 * rows**-0.5)
            table: Any = nn.Embed(
                c.padded(i), c.size, embedding_init=init, name=f"table_{i}", **kinds
            )
            vectors.append(table(categories[:, i] % rows))
        together = jnp.stack(vectors, axis=1)
        products = jnp.einsum("bif,bjf->bij", together, together)
        below = np.tril_indices(len(vectors), -1)
        x = jnp.concatenate([x, products[:, below[0], below[1]]], axis=1)
        for i, width in enumerate(c.top):
            x = dense(width, name=f"top_{i}")(x)
            x = nn.relu(x) if i + 1 < len(c.top) else x
        return x[:, 0]


def clicks(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean binary cross entropy of [batch] logits with labels 0 and 1, in f32 at least."""
    logits = logits.astype(at_least_f32(logits.dtype))
    return optax.sigmoid_binary_cross_entropy(logits, targets.astype(logits.dtype)).mean()


def workload(
    size: str = "tiny",
    batch: int = 16,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Click prediction by a DLRM of a size in `SIZES`; `overrides` are fields of `Config`.

    Adagrad unless `tx` is given.
    """
    config = configure(SIZES, size, dtype, **overrides)
    specs = {
        "inputs": jax.ShapeDtypeStruct((batch, config.dense), config.dtype),
        "categories": jax.ShapeDtypeStruct((batch, len(config.rows)), jnp.int32),
        "targets": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return make_workload(
        f"dlrm-{size}",
        DLRM(config),
        clicks,
        specs,
        vocab={"categories": max(config.rows), "targets": 2},
        tx=optax.adagrad(0.01) if tx is None else tx,
    )
