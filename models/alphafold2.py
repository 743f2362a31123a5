"""AlphaFold 2's Evoformer: an alignment of sequences and what it says of pairs of residues.

The stack is visited several times, each visit beginning from what the one before made of the first
sequence and the pairs; only the last visit is differentiated. Templates, the stack of extra
sequences, the structure module and dropout are left out; the loss is that of the distances.
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
from models.workload import Workload, at_least_f32, configure, cross_entropy, make_workload


@dataclass(frozen=True)
class Config:
    """Shape of an Evoformer: `sequences` x `residues` tokens of `msa` features, `residues` x
    `residues` pairs of `pair` features.

    Attention has heads of `size`, over the alignment `msa_heads` and over pairs `pair_heads` of
    them. `visits` of the stack: one more than there are recyclings.
    """

    blocks: int
    sequences: int
    residues: int
    msa: int = 256
    pair: int = 128
    size: int = 32
    msa_heads: int = 8
    pair_heads: int = 4
    outer: int = 32
    widening: int = 4
    visits: int = 4
    tokens: int = 23
    reach: int = 32
    bins: int = 64
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16


# Jumper et al. 2021, "Highly accurate protein structure prediction with AlphaFold", supplement:
# sizes of sections 1.6 and 1.10, crops of initial training and of fine-tuning (table 4).
SIZES = {
    "tiny": Config(2, sequences=8, residues=8, msa=16, pair=16, size=4, msa_heads=4, outer=4,
                   widening=2, visits=2, reach=4, bins=8),
    "initial": Config(48, sequences=128, residues=256),
    "finetune": Config(48, sequences=512, residues=384),
}  # fmt: skip


def kinds_of(c: Config) -> Any:
    """Dtypes of a model's layers."""
    return dict(dtype=c.dtype, param_dtype=at_least_f32(c.dtype))


def dense_of(c: Config, bias: bool = True) -> Any:
    """Dense layers of a model."""
    return partial(nn.Dense, use_bias=bias, **kinds_of(c))


def norm_of(c: Config) -> Any:
    """Normalisations of a model."""
    return partial(nn.LayerNorm, epsilon=1e-5, **kinds_of(c))


def gate_of(c: Config) -> Any:
    """Dense layers whose sigmoid is a gate: open at first."""
    return partial(nn.Dense, bias_init=nn.initializers.ones, **kinds_of(c))


class Attention(nn.Module):
    """Gated attention along each row of normalised [batch, rows, n, features] -> the same.

    `pairs` [batch, n, n, any] add a bias to the scores, the same in all rows. Supplement,
    algorithms 7, 8, 13 and 14.
    """

    config: Config
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, pairs: jax.Array | None) -> jax.Array:
        c, heads = self.config, (self.heads, self.config.size)
        wide, features = at_least_f32(c.dtype), x.shape[-1]
        dense: Any = partial(nn.DenseGeneral, heads, **kinds_of(c))
        q, k, v = (dense(use_bias=False, name=name)(x) for name in "qkv")
        scores = jnp.einsum("brqhd,brkhd->brhqk", q * c.size**-0.5, k).astype(wide)
        if pairs is not None:
            bias = dense_of(c, bias=False)(self.heads, name="bias")(pairs).astype(wide)
            scores = scores + jnp.moveaxis(bias, -1, 1)[:, None]
        weights = nn.softmax(scores).astype(c.dtype)
        y = jnp.einsum("brhqk,brkhd->brqhd", weights, v)
        gate = nn.sigmoid(dense(bias_init=nn.initializers.ones, name="gate")(x))
        return nn.DenseGeneral(features, axis=(-2, -1), name="out", **kinds_of(c))(y * gate)


class Transition(nn.Module):
    """[..., features] -> the same, each alone. Supplement, algorithms 9 and 15."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, features = self.config, x.shape[-1]
        y = dense_of(c)(c.widening * features, name="up")(norm_of(c)(name="norm")(x))
        return dense_of(c)(features, name="down")(nn.relu(y))


class OuterProductMean(nn.Module):
    """[batch, sequences, n, msa] -> [batch, n, n, pair]. Supplement, algorithm 10."""

    config: Config

    @nn.compact
    def __call__(self, m: jax.Array) -> jax.Array:
        c = self.config
        m = norm_of(c)(name="norm")(m)
        left, right = (dense_of(c)(c.outer, name=name)(m) for name in ("left", "right"))
        product = jnp.einsum("bsic,bsjd->bijcd", left, right) / m.shape[1]
        return nn.DenseGeneral(c.pair, axis=(-2, -1), name="out", **kinds_of(c))(product)


class Triangle(nn.Module):
    """Pairs [batch, n, n, pair] by the two other edges of all triangles -> the same.

    Edges that go out from i and j, else those that come in. Supplement, algorithms 11 and 12.
    """

    config: Config
    outgoing: bool

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        c = self.config
        z = norm_of(c)(name="norm")(z)

        def gated(name: str) -> jax.Array:
            gate = nn.sigmoid(gate_of(c)(c.pair, name=f"{name}_gate")(z))
            return gate * dense_of(c)(c.pair, name=name)(z)

        rule = "bikc,bjkc->bijc" if self.outgoing else "bkic,bkjc->bijc"
        y = norm_of(c)(name="norm_out")(jnp.einsum(rule, gated("left"), gated("right")))
        gate = nn.sigmoid(gate_of(c)(c.pair, name="gate")(z))
        return gate * dense_of(c)(c.pair, name="out")(y)


class Block(nn.Module):
    """(alignment [batch, sequences, n, msa], pairs [batch, n, n, pair]) -> (the same, nothing).

    Supplement, algorithm 6.
    """

    config: Config

    @nn.compact
    def __call__(self, x: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
        c, norm = self.config, norm_of(self.config)
        (m, z) = x
        along = norm(name="row_norm")(m)
        row: Any = Attention(c, c.msa_heads, name="row")
        m = m + row(along, norm(name="row_pair_norm")(z))
        across = norm(name="column_norm")(m).swapaxes(1, 2)
        m = m + Attention(c, c.msa_heads, name="column")(across, None).swapaxes(1, 2)
        m = m + Transition(c, name="msa_transition")(m)
        z = z + OuterProductMean(c, name="outer")(m)
        z = z + Triangle(c, True, name="outgoing")(z)
        z = z + Triangle(c, False, name="incoming")(z)
        start = norm(name="start_norm")(z)
        z = z + Attention(c, c.pair_heads, name="start")(start, start)
        end = norm(name="end_norm")(z).swapaxes(1, 2)
        z = z + Attention(c, c.pair_heads, name="end")(end, end).swapaxes(1, 2)
        z = z + Transition(c, name="pair_transition")(z)
        return (m, z), None


class Evoformer(nn.Module):
    """[batch, sequences, n] tokens, the first sequence's the one asked for -> [batch, n, n, bins]
    logits of distances."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c, kinds = self.config, kinds_of(self.config)
        embed: Any = partial(nn.Embed, c.tokens, **kinds)
        first = tokens[:, 0]
        m = embed(c.msa, name="msa_embed")(tokens)
        m = m + embed(c.msa, name="first_embed")(first)[:, None]
        left, right = (embed(c.pair, name=name)(first) for name in ("left", "right"))
        z = left[:, :, None] + right[:, None] + self.positions(tokens.shape[-1])
        blocks = stacked(Block, c, layers=c.blocks, name="blocks", scan=c.scan, remat=c.remat)
        row_norm, pair_norm = norm_of(c)(name="again_norm"), norm_of(c)(name="again_pair_norm")
        made = jnp.zeros_like(m), jnp.zeros_like(z)
        for _ in range(c.visits):
            before, pairs = jax.lax.stop_gradient(made)
            again = row_norm(before[:, 0])[:, None]
            asked = jax.lax.broadcasted_iota(jnp.int32, (m.shape[1], 1, 1), 0) == 0
            made = blocks((jnp.where(asked, m + again, m), z + pair_norm(pairs)))
        logits = dense_of(c)(c.bins, name="head")(made[1])
        return logits + logits.swapaxes(1, 2)

    def positions(self, residues: int) -> jax.Array:
        """[n, n, pair] by how far, and where, one residue is from another in the sequence."""
        c = self.config
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (residues, residues), d)
                         for d in (0, 1))  # fmt: skip
        away = jnp.clip(rows - columns, -c.reach, c.reach) + c.reach
        return nn.Embed(2 * c.reach + 1, c.pair, name="positions", **kinds_of(c))(away)


def workload(
    size: str = "tiny",
    batch: int = 8,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Prediction of distances by a size in `SIZES`; `overrides` are fields of `Config`."""
    config = configure(SIZES, size, dtype, **overrides)
    alignment = (batch, config.sequences, config.residues)
    specs = {
        "inputs": jax.ShapeDtypeStruct(alignment, jnp.int32),
        "targets": jax.ShapeDtypeStruct((batch, *alignment[2:], *alignment[2:]), jnp.int32),
    }
    return make_workload(
        f"alphafold2-{size}",
        Evoformer(config),
        cross_entropy,
        specs,
        vocab={"inputs": config.tokens, "targets": config.bins},
        tx=tx,
    )
