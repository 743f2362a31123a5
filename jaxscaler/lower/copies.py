"""A pipeline whose stages come twice, in opposite directions: what their copies have in common.

Both copies of a stage have its state, and both update it, so that they stay equal: their sums over
micro-batches are added first, on either side. To the user a leaf of the state is one array, which
lies alike on the devices of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "copies"


def over_copies(meshes: Sequence[jax.sharding.Mesh]) -> jax.sharding.Mesh:
    """One mesh of the devices of all copies of a place, along an axis that cuts nothing.

    In the order of devices, whichever copy is the first: two stages on the same devices have them
    in the same order.
    """
    if len(meshes) == 1:
        return meshes[0]
    ranked = sorted(meshes, key=lambda mesh: mesh.devices.flat[0].id)
    grid = np.stack([mesh.devices for mesh in ranked])
    auto = (jax.sharding.AxisType.Auto,) * grid.ndim
    return jax.sharding.Mesh(grid, (AXIS, *meshes[0].axis_names), axis_types=auto)


def apart(x: jax.Array, shardings: Sequence[jax.sharding.NamedSharding]) -> list[jax.Array]:
    """An array over all copies' devices as one for each of them; no bytes move."""
    at = {shard.device: shard.data for shard in x.addressable_shards}
    return [
        jax.make_array_from_single_device_arrays(
            x.shape, sharding, [at[d] for d in sharding.mesh.devices.flat]
        )
        for sharding in shardings
    ]


def as_one(copies: Sequence[jax.Array], sharding: jax.sharding.NamedSharding) -> jax.Array:
    """The other way: equal arrays of all copies as one over the devices of all."""
    shards = [shard.data for x in copies for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, shards)


def added(sums: Sequence[Sequence[jax.Array]], jitted: Sequence[Callable]) -> list[list]:
    """[copy]: the sums of all copies, added in the same order everywhere.

    sums: [copy]: its own ones. jitted: [copy]: `jax.jit` with the devices' layouts, which may write
    over the copy's own sums. All are sent before any is written over.
    """
    whole = [
        [mine if k == n else [jax.device_put(x, own.sharding) for x, own in zip(mine, sums[n])]
         for k, mine in enumerate(sums)]
        for n in range(len(sums))
    ]  # fmt: skip
    return [run(*parts) for run, parts in zip(jitted, whole)]


def total(*sums: Sequence[Any]) -> list:
    return [functools.reduce(jnp.add, xs) for xs in zip(*sums)]
