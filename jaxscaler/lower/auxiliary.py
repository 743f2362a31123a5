"""Functions beside the step, on its state: norms, moving averages, summaries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxscaler.lower.interpret import named_sharding
from jaxscaler.space.pins import Pins


def jit_on_state(fn: Callable, pins: Pins, mesh, options: dict[str, Any]) -> Callable:
    """`jax.jit(fn, **options)`, with state among arguments and results where `pins` say.

    A leaf belongs to the state leaf of its shape whose path ends alike (parameters come first).
    Results that do lie as that one does. Arguments lie as they are given, but what is not on the
    mesh is moved there, to where it belongs, else whole. What belongs to several leaves that lie
    apart, or to none, is left to the compiler.
    """
    devices = set(mesh.devices.flat)

    def sharding(path, leaf):
        shape = jax.numpy.shape(leaf)
        for keys in (path, path[:-1]):  # a Variable of flax.nnx has its array one level below
            pin = pins.find(jax.tree_util.keystr(keys, simple=True, separator="/"), shape)
            if pin is not None:
                return named_sharding(mesh, pin.spec)
        return None

    def constrained(path, leaf):
        wanted = sharding(path, leaf)
        return leaf if wanted is None else jax.lax.with_sharding_constraint(leaf, wanted)

    def moved(path, leaf):
        if isinstance(leaf, jax.core.Tracer) or not hasattr(leaf, "shape"):
            return leaf
        on_mesh = isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices
        return leaf if on_mesh else jax.device_put(leaf, sharding(path, leaf) or whole)

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    @functools.wraps(fn)
    def on_state(*args, **kwargs):
        return jax.tree_util.tree_map_with_path(constrained, fn(*args, **kwargs))

    jitted = jax.jit(on_state, **options)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        args, kwargs = jax.tree_util.tree_map_with_path(moved, (args, kwargs))
        return jitted(*args, **kwargs)

    return call
