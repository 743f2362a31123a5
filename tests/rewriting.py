"""Forward jaxprs of small models' losses, and what segments of them compute, for tests."""

from __future__ import annotations

import importlib
import random

import jax
import jax.numpy as jnp
import numpy as np

from jaxscaler import _compat
from jaxscaler.rewrite.apply import flat, segment_of
from jaxscaler.rewrite.changes import CoShard, Segment
from models.workload import cross_entropy


def loss_of(name, **options):
    """(flat closed jaxpr, flat arguments, positions of the batch) of a tiny model's loss in f64."""
    module = importlib.import_module(f"models.{name}")
    work = module.workload(**{"size": "tiny", "dtype": "float64", "batch": 4, **options})
    batch, state = work.make_batch(), jax.jit(work.init)(jax.random.key(1))

    def loss(params, batch):
        rngs = {"dropout": jax.random.key(3)}
        outputs = state.apply_fn({"params": params}, batch["inputs"], rngs=rngs)
        if isinstance(outputs, tuple):
            return cross_entropy(outputs[0], batch["targets"]) + 0.01 * outputs[1]
        return cross_entropy(outputs, batch["targets"])

    leaves, tree = jax.tree.flatten((state.params, batch))
    closed = jax.make_jaxpr(lambda *args: [loss(*jax.tree.unflatten(tree, args))])(*leaves)
    count = len(jax.tree.leaves(batch))
    return flat(closed), leaves, tuple(range(len(leaves) - count, len(leaves)))


def values_of(closed, leaves):
    """Variable -> value, of all that a flat jaxpr computes."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars if not _compat.is_dropped(v)]

    def run(*args):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
        for eqn in jaxpr.eqns:
            args = [v.val if _compat.is_literal(v) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, _compat.bind_where_it_stands(eqn, args)))
        return [env[v] for v in made]

    found = jax.jit(run)(*leaves)
    return dict(zip((*jaxpr.constvars, *jaxpr.invars, *made), (*consts, *leaves, *found)))


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def pull(function, args, seed=0):
    """Results of a function and the gradients of a random combination of them, float ones."""
    floats = [i for i, x in enumerate(args) if is_float(x)]

    def combined(moving):
        filled = list(args)
        for i, x in zip(floats, moving):
            filled[i] = x
        made = [x for x in function(*filled) if is_float(x)]
        rng = np.random.default_rng(seed)
        return sum((x * rng.standard_normal(x.shape)).sum() for x in made), made

    (_, made), grads = jax.jit(jax.value_and_grad(combined, has_aux=True))(
        [args[i] for i in floats]
    )
    return made, grads


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


def plain(closed):
    return lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def find(closed, primitive, shape):
    """The first equation of a primitive whose first result has this shape."""
    return next(
        i
        for i, eqn in enumerate(closed.jaxpr.eqns)
        if eqn.primitive.name == primitive and eqn.outvars[0].aval.shape == shape
    )


def random_changes(closed, seed):
    """Random segments and seeds of a jaxpr, each with its segment: legal and not."""
    rng, eqns = random.Random(seed), closed.jaxpr.eqns
    while True:
        first = rng.randrange(len(eqns))
        last = min(len(eqns) - 1, first + rng.choice((1, 3, 8, 20, 50, 100, 400)))
        i = rng.randrange(first, last + 1)
        operands = [(n, v.aval.shape) for n, v in enumerate(eqns[i].invars)
                    if not _compat.is_literal(v)]  # fmt: skip
        spots = [(n, d) for n, shape in operands for d, size in enumerate(shape) if size > 1]
        segment, reads, made = segment_of(closed.jaxpr, first, last)
        if spots and any(is_float(v.aval) for v in made):
            parts, lanes = rng.choice(((2, 1), (2, 2), (4, 1)))
            change = CoShard(Segment(0, first, last), (i, *rng.choice(spots)), parts, lanes)
            yield segment, reads, change
