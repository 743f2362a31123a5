"""A mixture of experts: a Llama whose MLPs are experts, of which each token goes to a few.

Routing is by one-hot tensors and einsums (or by indices), with room for `capacity` tokens per
expert: what does not fit passes by. The experts' weights are stacked: their first dim is the
expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models import llama
from models.workload import (
    Workload,
    at_least_f32,
    configure,
    cross_entropy,
    make_workload,
    token_batch,
)

ROUTING = ("one-hot", "permute")


@dataclass(frozen=True)
class Config(llama.Config):
    """A Llama of which each token's MLP is a weighted sum of `chosen` out of `experts`.

    Each expert takes `capacity_factor` times its even share of a sequence's tokens. `balance`: the
    weight of the loss that evens out the experts' shares. `routing`: "one-hot" tensors and einsums,
    or "permute", by indices.
    """

    experts: int = 8
    chosen: int = 2
    capacity_factor: float = 1.25
    balance: float = 0.01
    routing: str = "one-hot"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.routing not in ROUTING:
            raise ValueError(f"routing {self.routing!r}: there is {', '.join(ROUTING)}")


# Jiang et al. 2024, "Mixtral of Experts", table 1; it drops no token, which capacity does.
SIZES = {
    "tiny": Config(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, context=16, vocab=64),
    "8x7b": Config(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, context=32768, vocab=32000,
        theta=1e6,
    ),
}  # fmt: skip


def assign(gates: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(expert, weight, place in its queue) of each choice of each token: [batch, seq, chosen].

    `gates` [batch, seq, experts] are probabilities. A token's first choice goes before any token's
    second, and earlier tokens before later ones. Lepikhin et al. 2021, "GShard", algorithm 1.
    """
    weights, picks = jax.lax.top_k(gates, chosen)
    weights = weights / weights.sum(-1, keepdims=True)
    picked = jax.nn.one_hot(picks, gates.shape[-1], dtype=gates.dtype)  # [..., chosen, experts]
    before = jnp.zeros_like(gates[:, :1])  # places taken by earlier choices
    places = []
    for c in range(chosen):
        mine = picked[:, :, c]
        place = jnp.cumsum(mine, axis=1) - mine + before
        before = before + mine.sum(1, keepdims=True)
        places.append((place * mine).sum(-1))
    return picks, weights, jnp.stack(places, -1).astype(jnp.int32)


def route(gates: jax.Array, chosen: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Where each token goes: (dispatch, combine), each [batch, seq, experts, capacity].

    dispatch is 1 at the token's place with an expert, combine the weight it comes back with.
    """
    experts, kind = gates.shape[-1], gates.dtype
    picks, weights, places = assign(gates, chosen)
    dispatch = combine = jnp.zeros((*gates.shape, capacity), kind)
    for c in range(chosen):
        # a place beyond the capacity has no one in its one-hot row: the token is dropped
        mine = jax.nn.one_hot(picks[:, :, c], experts, dtype=kind)
        here = mine[..., None] * jax.nn.one_hot(places[:, :, c], capacity, dtype=kind)[:, :, None]
        dispatch = dispatch + here
        combine = combine + here * weights[:, :, c, None, None]
    return dispatch, combine


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """[batch, n, hidden] and rows [batch, m] of n -> [batch, m, hidden]."""
    return jax.vmap(lambda x, rows: x[rows])(x, rows)


def permute(
    x: jax.Array, gates: jax.Array, chosen: int, capacity: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """(rows of `x` [batch, seq, hidden] for each expert: [experts, batch, capacity, hidden], the
    function that brings such rows back to their tokens and sums them up by weight).

    The same as products with `route`'s tensors, by indices: nothing of size seq x capacity is made.
    """
    batch, seq, hidden = x.shape
    experts = gates.shape[-1]
    picks, weights, places = assign(gates, chosen)
    kept = places < capacity
    slots = jnp.where(kept, picks * capacity + places, experts * capacity)  # the last: dropped
    tokens = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32)[:, None], (seq, chosen))

    def tokens_of(slots: jax.Array) -> jax.Array:
        return jnp.zeros(experts * capacity + 1, jnp.int32).at[slots.ravel()].set(tokens.ravel())

    rows = take(x, jax.vmap(tokens_of)(slots)[:, :-1])
    rows = jnp.moveaxis(rows.reshape(batch, experts, capacity, hidden), 1, 0)

    def back(rows: jax.Array) -> jax.Array:
        flat = jnp.moveaxis(rows, 0, 1).reshape(batch, experts * capacity, hidden)
        shares = jnp.where(kept, weights, 0).astype(rows.dtype)
        each = [
            take(flat, jnp.where(kept, slots, 0)[:, :, c]) * shares[:, :, c, None]
            for c in range(chosen)
        ]
        return sum(each[1:], each[0])

    return rows, back


class Experts(nn.Module):
    """[batch, seq, hidden] -> (the same, balance loss)."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        wide = at_least_f32(c.dtype)
        capacity = math.ceil(c.capacity_factor * c.chosen * x.shape[1] / c.experts)
        # the router is in f32: Fedus et al. 2022, "Switch Transformers", section 2.4
        router = nn.Dense(
            c.experts,
            use_bias=False,
            dtype=wide,
            param_dtype=wide,
            kernel_init=llama.INIT,
            name="router",
        )
        gates = nn.softmax(router(x.astype(wide)))
        if c.routing == "permute":
            rows, back = permute(x, gates, c.chosen, capacity)
        else:
            dispatch, combine = (t.astype(c.dtype) for t in route(gates, c.chosen, capacity))
            rows = jnp.einsum("bsec,bsh->ebch", dispatch, x)
            back = partial(jnp.einsum, "bsec,ebch->bsh", combine)

        def weight(name: str, rows: int, columns: int) -> jax.Array:
            found = self.param(name, llama.INIT, (c.experts, rows, columns), wide)
            return found.astype(c.dtype)

        gate, up = weight("gate", c.hidden, c.ffn), weight("up", c.hidden, c.ffn)
        down = weight("down", c.ffn, c.hidden)
        inner = nn.silu(jnp.einsum("ebch,ehf->ebcf", rows, gate))
        inner = inner * jnp.einsum("ebch,ehf->ebcf", rows, up)
        rows = jnp.einsum("ebcf,efh->ebch", inner, down)
        # share of tokens whose first choice an expert is, times its mean probability: the same
        first = jax.nn.one_hot(gates.argmax(-1), c.experts, dtype=wide).mean((0, 1))
        balance = c.experts * jnp.sum(first * gates.mean((0, 1)))
        return back(rows), balance


class Block(nn.Module):
    """[batch, seq, hidden] -> (the same, balance loss)."""

    config: Config

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config
        norm = llama.norm_of(c)
        x = x + llama.Attention(c, name="attn")(norm(name="attn_norm")(x), angles)
        y, balance = Experts(c, name="experts")(norm(name="experts_norm")(x))
        return x + y, balance


class MoE(nn.Module):
    """[batch, seq] tokens -> ([batch, seq, vocab] logits, mean balance loss of the layers)."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        wide = at_least_f32(c.dtype)
        table = nn.Embed(
            c.vocab,
            c.hidden,
            dtype=c.dtype,
            param_dtype=wide,
            embedding_init=llama.INIT,
            name="embed",
        )
        x = table(tokens)
        angles = llama.rotary_angles(tokens.shape[1], c.head_size, c.theta, wide)
        block = nn.remat(Block, prevent_cse=not c.scan) if c.remat else Block
        if c.scan:
            block = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.layers,
            )
            x, balance = block(c, name="layers")(x, angles)
        else:
            losses = []
            for i in range(c.layers):
                x, loss = block(c, name=f"layers_{i}")(x, angles)
                losses.append(loss)
            balance = jnp.stack(losses)
        x = llama.norm_of(c)(name="norm")(x)
        logits = table.attend(x) if c.tied else llama.dense_of(c)(c.vocab, name="head")(x)
        return logits, balance.mean()


def workload(
    size: str = "tiny",
    batch: int = 8,
    seq: int | None = None,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Next-token training of a mixture of a size in `SIZES`; `overrides` are fields of `Config`.

    `seq` is the size's whole context unless given.
    """
    config = configure(SIZES, size, dtype, **overrides)

    def loss(outputs: tuple[jax.Array, jax.Array], targets: jax.Array) -> jax.Array:
        logits, balance = outputs
        return cross_entropy(logits, targets) + config.balance * balance

    return make_workload(
        f"moe-{size}",
        MoE(config),
        loss,
        token_batch(batch, config.context if seq is None else seq),
        vocab=config.vocab,
        tx=tx,
    )
