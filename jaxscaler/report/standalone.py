"""How an exported plan is applied, in plain JAX: `report.export` copies what stands below the line.

The tables are empty here; an exported module has those of its plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES: tuple = ()
ARGUMENTS: tuple = ()
INPUTS: dict = {}
OUTPUTS: dict = {}
INSIDE: dict = {}
KERNELS: dict = {}
PROGRAM = ""
OPTIONS: dict = {}
COMPILER_OPTIONS: dict = {}
IN_CONTEXT = False

# --- how the tables are applied ---------------------------------------------------------------


def make_mesh(devices=None):
    """The mesh on `devices` (default: the first of all), in their order."""
    names, sizes = zip(*AXES)
    devices = (jax.devices() if devices is None else devices)[: math.prod(sizes)]
    kinds = (AxisType.Auto,) * len(names)
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=kinds)


def path_of(keys):
    """A path of `jax.tree_util` as the tables have it."""
    parts = (jax.tree_util.keystr((key,), simple=True) for key in keys)
    return "/".join(part for part in parts if part)


def specs_of(tree, table, name=""):
    """The spec of each leaf of `tree`, in order; `name` is that of the argument."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = ["/".join(part for part in (name, path_of(keys)) if part) for keys, _ in leaves]
    return [table[path or "result"] for path in paths]


def shardings(mesh, tree, table, name=""):
    """`tree` with the sharding of each leaf; `name` is that of the argument."""
    found = [None if s is None else NamedSharding(mesh, s) for s in specs_of(tree, table, name)]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def jit_step(step, mesh, *args):
    """`jax.jit(step)` with the layouts of its arguments (arrays, or their types), of its results,
    and of the tensors inside. ValueError when it is traced and is not the step that was planned.
    """
    static = OPTIONS.get("static_argnums", ())
    jitted = step if hasattr(step, "trace") else jax.jit(step, static_argnums=static)

    def dynamic(args):
        given = [arg for i, arg in enumerate(args) if i not in static]
        return list(zip(ARGUMENTS, given, strict=True))

    def traced(args):
        types = [a if i in static else jax.tree.map(type_of, a) for i, a in enumerate(args)]
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        with context if IN_CONTEXT else contextlib.nullcontext():
            return jitted.trace(*types)

    def laid_out(*args):
        found, given = traced(args), dynamic(args)
        jaxpr = needed(found.jaxpr)
        if program(jaxpr) != PROGRAM:
            raise ValueError(
                "INSIDE counts the equations of another program: the step was changed, or JAX "
                "traces it otherwise in this version. Plan and export it again"
            )
        leaves = [leaf for _, arg in given for leaf in jax.tree.leaves(arg)]
        specs = [spec for name, arg in given for spec in specs_of(arg, INPUTS, name)]
        results = Body(mesh, zip(leaves, specs)).run(jaxpr, leaves, ())
        return jax.tree.unflatten(jax.tree.structure(found.out_info), results)

    gpu = all(device.platform == "gpu" for device in mesh.devices.flat)
    return jax.jit(
        laid_out,
        in_shardings=tuple(shardings(mesh, arg, INPUTS, name) for name, arg in dynamic(args)),
        out_shardings=shardings(mesh, traced(args).out_info, OUTPUTS),
        compiler_options=(COMPILER_OPTIONS or None) if gpu else None,
        **OPTIONS,
    )


def type_of(leaf):
    """The type of an array without where it lies, which JAX would write into the program."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


BODIES = {
    **dict.fromkeys(("jit", "pjit", "remat", "remat2", "checkpoint", "scan"), ("jaxpr",)),
    **dict.fromkeys(("closed_call", "core_call", "eval_jaxpr"), ("call_jaxpr",)),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), ("call_jaxpr",)),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")


def opened(jaxpr):
    """(jaxpr, its constants) of an open or a closed one."""
    closed = isinstance(jaxpr, core.ClosedJaxpr)
    return (jaxpr.jaxpr, jaxpr.consts) if closed else (jaxpr, ())


def bodies_of(eqn):
    """The jaxprs inside an equation, in the order that keys count them."""
    values = [eqn.params[name] for name in BODIES.get(eqn.primitive.name, ())]
    return [body for v in values for body in (v if isinstance(v, tuple) else (v,))]


def needed(closed):
    """The program without the equations that no result needs, which are not counted."""
    every = [True] * len(closed.jaxpr.outvars)
    return closed.replace(jaxpr=partial_eval.dce_jaxpr(closed.jaxpr, every, instantiate=True)[0])


def program(jaxpr):
    """A digest of the names of all equations."""

    def names(jaxpr):
        for eqn in opened(jaxpr)[0].eqns:
            yield eqn.primitive.name
            for body in bodies_of(eqn):
                yield "("
                yield from names(body)
                yield ")"

    return hashlib.sha256(" ".join(names(jaxpr)).encode()).hexdigest()[:16]


class Body:
    """The values of one jaxpr as it is run, and where they are known to lie.

    Equal constraints on one value are one. A key counts equations, with (body, equation) for each
    level inside; that of a body ends with the body's number, that of the whole step is ().
    """

    def __init__(self, mesh, known=()):
        known = list(known)
        self.mesh = mesh
        self.values = [value for value, _ in known]  # kept: an id is that of a living value
        self.lies = {id(value): spec for value, spec in known}
        self.made: dict[Any, Any] = {}

    def place(self, values, key, side):
        """The operands ("in") or results ("out") of equation or body `key` where INSIDE says."""
        values = list(values)
        for i, specs in INSIDE.get(key, {}).get(side, {}).items():
            for spec in specs:
                x = values[i]
                if self.lies.get(id(x)) == spec:
                    continue
                if (id(x), spec) not in self.made:
                    y = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
                    self.values += [x, y]
                    self.made[id(x), spec], self.lies[id(y)] = y, spec
                values[i] = self.made[id(x), spec]
        return values

    def run(self, jaxpr, args, key):
        """The results of `jaxpr`, open or closed, on `args`."""
        jaxpr, consts = opened(jaxpr)
        values = dict(zip(jaxpr.constvars, consts))
        values.update(zip(jaxpr.invars, self.place(args, key, "in")))

        def read(atom):
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            here = (*key, i)
            made = self.equation(eqn, self.place(map(read, eqn.invars), here, "in"), here)
            values.update(zip(eqn.outvars, self.place(made, here, "out")))
        return self.place(map(read, jaxpr.outvars), key, "out")

    def equation(self, eqn, args, key):
        """The results of one equation."""

        def bind(params, *args):
            made = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
            return list(made) if eqn.primitive.multiple_results else [made]

        name, params = eqn.primitive.name, eqn.params
        if key in KERNELS:
            ins, outs = KERNELS[key]
            part = jax.shard_map(  # not in the equation's context: its mesh has no manual axes
                lambda *args: bind(params, *args),
                mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False,
            )  # fmt: skip
            return part(*args)
        if name == "sharding_constraint" and isinstance(params["sharding"], NamedSharding):
            sharding = NamedSharding(self.mesh, self.own(params["sharding"].spec))
            return [jax.lax.with_sharding_constraint(args[0], sharding)]
        bodies = bodies_of(eqn)
        said = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        if (
            name in CALLS
            and all(type(s).__name__ == "UnspecifiedValue" for s in said)
            and not opened(bodies[0])[0].constvars
        ):
            return self.run(bodies[0], args, (*key, 0))
        if bodies and any(other[: len(key)] == key for other in (*INSIDE, *KERNELS)):
            new = iter([self.rebuilt(body, (*key, s)) for s, body in enumerate(bodies)])
            params = dict(params)
            for field in BODIES.get(name, ()):
                several = isinstance(params[field], tuple)
                params[field] = tuple(next(new) for _ in params[field]) if several else next(new)
        with eqn.ctx.manager:
            return bind(params, *args)

    def rebuilt(self, body, key):
        """`body`, open or closed, with its constraints."""
        avals = [v.aval for v in opened(body)[0].invars]
        types = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
            for a in avals
        ]
        new = jax.make_jaxpr(lambda *args: Body(self.mesh).run(body, args, key))(*types)
        return new if isinstance(body, core.ClosedJaxpr) else new.jaxpr

    def own(self, spec):
        """A spec of the step's author, without axes of one device, which the mesh lacks."""

        def dim(cut):
            names = cut if isinstance(cut, tuple) else (cut,) if isinstance(cut, str) else None
            return cut if names is None else tuple(n for n in names if n in self.mesh.shape) or None

        return P(*map(dim, spec))
