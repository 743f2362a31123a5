"""State that is made where it will live: no array is ever whole on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.lower.interpret import named_sharding
from jaxscaler.lower.layouts import Spec
from jaxscaler.lower.step import MismatchError, checked_sharding


def shardings_tree(treedef, specs: Sequence[Spec], mesh):
    """The pytree `treedef` with a `NamedSharding` on `mesh` at every leaf."""
    return jax.tree.unflatten(treedef, [named_sharding(mesh, spec) for spec in specs])


def init_state(init: Callable, args: tuple, specs: Sequence[Spec], mesh):
    """`init(*args)`, each leaf laid out on `mesh` by its entry of `specs`, in flattening order.

    The initialiser runs as one sharded program, so a leaf is never whole anywhere unless its spec
    says so; the values are those of `init(*args)` up to rounding. Raises PlanError, naming the
    leaf, where `specs` do not fit what `init` makes.
    """
    args = jax.tree.map(lambda leaf: _on_mesh(leaf, mesh), args)
    jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(*args)
    made, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in made]
    if len(made) != len(specs):
        raise PlanError(
            f"the initialiser makes {len(made)} arrays, the plan lays out {len(specs)}; the first "
            f"are {paths[:3]}: pass the initialiser of the state that was planned"
        )
    shardings = [
        checked_sharding(mesh, spec, path, leaf.shape)
        for spec, path, (_, leaf) in zip(specs, paths, made)
    ]
    make = jax.jit(
        lambda *leaves: jax.tree.unflatten(treedef, _compat.emit(jaxpr, leaves)),
        out_shardings=jax.tree.unflatten(treedef, shardings),
    )
    return make(*jax.tree.leaves(args))


def abstract_leaves(paths, avals, specs: Sequence[Spec | None], mesh) -> list[jax.ShapeDtypeStruct]:
    """Types of arrays with the sharding that each has on `mesh` (no spec: none).

    PlanError where an array can not lie as its spec says.
    """
    shardings = [
        None if spec is None else checked_sharding(mesh, spec, path, aval.shape)
        for path, aval, spec in zip(paths, avals, specs, strict=True)
    ]
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(avals, shardings)
    ]


def place(tree, wanted: Sequence[jax.ShapeDtypeStruct]):
    """`tree`, each leaf moved to where its entry of `wanted` says; the values stay what they are.

    Raises MismatchError, naming the leaf, where the two are not of the same types.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if len(found) != len(wanted):
        raise MismatchError(
            f"the state has {len(found)} arrays, the plan lays out {len(wanted)}: give the state "
            "arguments of the step, as `abstract_state()` has them"
        )
    for (path, leaf), want in zip(found, wanted):
        is_ = jax.typeof(leaf)
        if is_.shape != want.shape or is_.dtype != want.dtype:
            raise MismatchError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} is "
                f"{is_.dtype}{list(is_.shape)}, planned for {want.dtype}{list(want.shape)}"
            )
    moved = jax.device_put([leaf for _, leaf in found], [want.sharding for want in wanted])
    return jax.tree.unflatten(treedef, moved)


def bytes_per_device(tree) -> dict[jax.Device, int]:
    """What the arrays of `tree` hold on each device of this process, in bytes."""
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def _on_mesh(leaf, mesh):
    """`leaf`, moved if it was committed to other devices than those of `mesh`."""
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return leaf
    if set(leaf.sharding.device_set) == set(mesh.devices.flat):
        return leaf
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
