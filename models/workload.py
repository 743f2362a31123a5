"""A workload: an ordinary single-device train step and what it is called with.

The models here are plain flax.linen modules with no sharding annotation: they are what a user has
before a planner. This file holds what they share: the train step, the losses, the causal softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

Batch = dict[str, Any]
Config = TypeVar("Config")


@dataclass(frozen=True)
class Workload:
    """A train step with its abstract arguments; nothing is allocated until `init` is called.

    `step(state, batch) -> (state, metrics)` is for one device, to be jitted or planned.
    `init(rng) -> state` makes the real state and may be jitted.
    `state` and `batch` are trees of `jax.ShapeDtypeStruct`; `batch` has "inputs", what else the
    model takes, and "targets" if the loss has any. `vocab` bounds the integers of a batch (0: the
    batch is of floats), or those of each array by name.
    """

    name: str
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    init: Callable[[jax.Array], TrainState]
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    vocab: int | Mapping[str, int] = 0

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        held = self.state.params, getattr(self.state, "frozen", {})
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(held))

    def make_batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        """A concrete random batch: uniform tokens below `vocab`, or standard normal floats."""
        rng = np.random.default_rng(seed)

        def draw(key: str, spec: jax.ShapeDtypeStruct) -> np.ndarray:
            if jnp.issubdtype(spec.dtype, jnp.integer):
                bound = self.vocab if isinstance(self.vocab, int) else self.vocab[key]
                return rng.integers(bound, size=spec.shape, dtype=spec.dtype)
            return rng.standard_normal(spec.shape).astype(spec.dtype)

        return {key: draw(key, spec) for key, spec in self.batch.items()}


class StatefulTrainState(TrainState):
    """A train state with the collections that the forward pass rewrites, such as "batch_stats"."""

    variables: Mapping[str, Any]


class FrozenTrainState(TrainState):
    """A train state with parameters that are not trained: `params` and the optimizer lack them."""

    frozen: Mapping[str, Any]


def make_workload(
    name: str,
    model: Any,
    loss: Callable[[Any, Any], jax.Array],
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    vocab: int | Mapping[str, int] = 0,
    rngs: tuple[str, ...] = (),
    mutable: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
    tx: optax.GradientTransformation | None = None,
) -> Workload:
    """The workload that trains `model` on `loss(outputs, targets)`; AdamW unless `tx` is given.

    `model`: a linen module, or what has its `init` and `apply`. It is called on the arrays of
    `batch` in their order, all but "targets". `rngs` names the
    random streams that the forward pass draws from (such as "dropout"): their key is folded from
    the step counter, so that a step is a function of its arguments alone. `mutable` names the
    collections that the forward pass rewrites (such as "batch_stats"): they are part of the state.
    `frozen` names submodules that are not trained; a model has these or mutable collections.
    """
    if frozen and mutable:
        raise ValueError(f"frozen {frozen} beside mutable {mutable}: only one of them is supported")
    tx = optax.adamw(3e-4) if tx is None else tx
    fed = tuple(key for key in batch if key != "targets")

    def init(rng: jax.Array) -> TrainState:
        examples = [jnp.zeros((1, *batch[key].shape[1:]), batch[key].dtype) for key in fed]
        made = model.init(rng, *examples)
        common = dict(apply_fn=model.apply, params=made["params"], tx=tx)
        if frozen:
            kept, common["params"] = _parted(made["params"], frozen)
            return FrozenTrainState.create(**common, frozen=kept)
        if not mutable:
            return TrainState.create(**common)
        return StatefulTrainState.create(**common, variables={key: made[key] for key in mutable})

    def step(state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        streams = {name: jax.random.fold_in(jax.random.key(0), state.step) for name in rngs}
        arrays = [batch[key] for key in fed]

        def objective(params: Any) -> jax.Array:
            whole = {**params, **state.frozen} if frozen else params
            outputs = state.apply_fn({"params": whole}, *arrays, rngs=streams)
            return loss(outputs, batch.get("targets"))

        def stateful(params: Any) -> tuple[jax.Array, Any]:
            collections = {"params": params, **state.variables}
            outputs, new = state.apply_fn(collections, *arrays, rngs=streams, mutable=mutable)
            return loss(outputs, batch.get("targets")), new

        if not mutable:
            value, grads = jax.value_and_grad(objective)(state.params)
            return state.apply_gradients(grads=grads), {"loss": value}
        (value, new), grads = jax.value_and_grad(stateful, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, variables=new), {"loss": value}

    key = jax.eval_shape(jax.random.key, 0)
    return Workload(name, step, init, jax.eval_shape(init, key), dict(batch), vocab)


def _parted(params: Mapping[str, Any], names: tuple[str, ...]) -> tuple[dict, dict]:
    """(the submodules that are named, the others)."""
    return ({k: v for k, v in params.items() if k in names},
            {k: v for k, v in params.items() if k not in names})  # fmt: skip


def token_batch(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch of a language model: [batch, seq] tokens and the ones that follow them."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean softmax cross entropy of [..., vocab] logits with integer targets, in f32 at least."""
    logits = logits.astype(at_least_f32(logits.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def mean_squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error, in f32 at least."""
    dtype = at_least_f32(outputs.dtype)
    return jnp.mean(jnp.square(outputs.astype(dtype) - targets.astype(dtype)))


def causal_softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the keys of [..., query, key] scores, where no query sees a later key.

    In f32 at least, and back in the scores' dtype. The mask is made of iotas where it is used:
    nothing of size query x key is stored.
    """
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], d) for d in (0, 1))
    wide = scores.astype(at_least_f32(scores.dtype))
    wide = jnp.where(keys <= queries, wide, jnp.finfo(wide.dtype).min)
    return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)


def at_least_f32(dtype: Any) -> jnp.dtype:
    """f32 for half precisions, else the dtype itself: for parameters, softmax and losses."""
    return jnp.promote_types(dtype, jnp.float32)


def configure(sizes: Mapping[str, Config], size: str, dtype: str, **overrides: Any) -> Config:
    """The `size` row of `sizes` with some of its fields replaced.

    Raises ValueError for an unknown size or field, or a 64-bit dtype that JAX would cut to 32.
    """
    if size not in sizes:
        raise ValueError(f"unknown size {size!r}; there is {', '.join(sizes)}")
    row = sizes[size]
    known = [field.name for field in fields(row)]  # type: ignore[arg-type]
    if unknown := sorted(overrides.keys() - set(known)):
        raise ValueError(f"unknown option {', '.join(unknown)}; there is {', '.join(known)}")
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"dtype {dtype} needs 64-bit JAX: set jax_enable_x64")
    return replace(row, dtype=jnp.dtype(dtype), **overrides)  # type: ignore[type-var]
