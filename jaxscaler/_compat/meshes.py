"""Shardings that users write into a step, and the meshes they are on."""

from __future__ import annotations

import contextlib
import functools

import jax

from jaxscaler._compat.compiling import is_jitted
from jaxscaler._compat.jaxprs import open_jaxpr


def annotation(eqn) -> tuple[tuple, tuple] | None:
    """(spec, axes) of a `with_sharding_constraint` with names of a mesh; None of any other.

    `spec`: per dim the axes that cut it, major first, or None where it is left open; `axes`:
    (name, size) of the mesh, major first.
    """
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    rank = len(eqn.outvars[0].aval.shape)
    spec = spec_dims(sharding.spec)
    return (*spec, *((),) * (rank - len(spec))), tuple(sharding.mesh.shape.items())


def spec_dims(spec) -> tuple[tuple[str, ...] | None, ...]:
    """A `PartitionSpec` per dim: the axes that cut it, major first, or None where it is open."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    return tuple(
        None if part is free else part if isinstance(part, tuple) else (part,) if part else ()
        for part in spec
    )


def on_mesh(eqn, mesh):
    """A named sharding-constraint equation moved to `mesh`; axes that it lacks are of size 1."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    dims = [
        free if cut is None else tuple(name for name in cut if name in mesh.shape) or None
        for cut in spec_dims(eqn.params["sharding"].spec)
    ]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))
    empty = _constraint_template(mesh).params["context_mesh"]
    return eqn.replace(params={**eqn.params, "sharding": sharding, "context_mesh": empty})


def run_inside_mesh(step, mesh):
    """`step`, plain or jitted, as a plain function that runs `inside_mesh(mesh)`."""
    plain = step.__wrapped__ if is_jitted(step) else step

    @functools.wraps(plain)
    def run(*args, **kwargs):
        with inside_mesh(mesh):
            return plain(*args, **kwargs)

    return run


def inside_mesh(mesh):
    """A context in which specs may name the axes of `mesh`, as under `jax.set_mesh`.

    `mesh`: a `Mesh`, an `AbstractMesh`, sizes by name, or None. A mesh that is set already stays.
    """
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.abstract_mesh
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        mesh = abstract_mesh(tuple(mesh.items()))
    return jax.sharding.use_abstract_mesh(mesh)


def abstract_mesh(axes):
    """A mesh of no devices with `axes` ((name, size), major first) in Auto mode."""
    names, sizes = zip(*axes)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=auto)


def in_mesh_context(jaxpr) -> bool:
    """Whether a step was traced where a mesh was set."""
    eqns = open_jaxpr(jaxpr)[0].eqns
    return bool(eqns) and not eqns[0].ctx.cur_abstract_mesh.empty


def constraint_eqn(var, result, sharding, like):
    """`result = with_sharding_constraint(var, sharding)`, in the scope of the equation `like`."""
    template = _constraint_template(sharding.mesh)
    return template.replace(
        invars=[var],
        outvars=[result],
        params={**template.params, "sharding": sharding},
        source_info=like.source_info if like is not None else None,
        ctx=like.ctx if like is not None else None,
    )


@functools.lru_cache(maxsize=8)
def _constraint_template(mesh):
    """A sharding-constraint equation on `mesh`, traced by JAX: its parameters are JAX's own."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, whole))(0.0)
    return traced.jaxpr.eqns[-1]
