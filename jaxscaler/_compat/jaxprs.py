"""Equations and jaxprs: what is inside of them, what they say of themselves."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.extend import core as jex

# --- jaxprs inside equations ------------------------------------------------------------------

# Which parameters of an equation hold its sub-jaxprs, in the order that keys count them.
# What is not listed (shard_map, pallas_call, ffi_call, ...) is opaque: planned as a whole.
SUBJAXPR_PARAMS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}
INLINED_CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")


def subjaxprs(eqn) -> tuple:
    """The jaxprs (open or closed, as the equation holds them) inside `eqn`, in key order."""
    found: list = []
    for name in SUBJAXPR_PARAMS.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        found.extend(value if isinstance(value, tuple) else (value,))
    return tuple(found)


def with_subjaxprs(eqn, bodies) -> dict[str, Any]:
    """The parameters of `eqn` with `bodies` in place of `subjaxprs(eqn)`."""
    rest = iter(bodies)
    params = dict(eqn.params)
    for name in SUBJAXPR_PARAMS.get(eqn.primitive.name, ()):
        value = params[name]
        params[name] = tuple(next(rest) for _ in value) if isinstance(value, tuple) else next(rest)
    return params


def open_jaxpr(jaxpr) -> tuple[Any, tuple]:
    """(jaxpr with constvars, consts) of an open or a closed jaxpr."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, ()


def with_eqns(jaxpr, eqns, outvars):
    """`jaxpr`, open or closed, with other equations and results; arguments and effects stay."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.replace(jaxpr=with_eqns(jaxpr.jaxpr, eqns, outvars))
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)


def fresh_var(var):
    """A new variable of the same type; what is dropped stays dropped."""
    return jex.DropVar(var.aval) if isinstance(var, jex.DropVar) else jex.Var(var.aval)


def is_inlinable(eqn) -> bool:
    """Whether `eqn` is a call that adds nothing to its body: no shardings, no constants."""
    if eqn.primitive.name not in INLINED_CALLS:
        return False
    specified = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(s).__name__ == "UnspecifiedValue" for s in specified) and not any(
        open_jaxpr(body)[1] or open_jaxpr(body)[0].constvars for body in subjaxprs(eqn)
    )


def scoped(eqn, call):
    """`eqn` of the body of the equation `call`, named as an equation of the jaxpr around it."""
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def emit(closed, args) -> list:
    """Results of `closed` on `args`, its equations taken over as they are.

    Like `jax.core.eval_jaxpr`, but inside a `jit` trace no equation is traced again (no shape
    inference, no tracing of bodies, custom rules untouched; names and source lines kept).
    """
    from jax._src import source_info_util
    from jax._src.interpreters import partial_eval as pe  # no public way to add an equation

    source = source_info_util.current()
    with jex.take_current_trace() as trace:
        if not isinstance(trace, pe.DynamicJaxprTrace):
            raise TypeError("emit() belongs inside a jit trace")
        jaxpr, consts = open_jaxpr(closed)
        env = {}
        for var, value in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True):
            env[var] = trace.to_jaxpr_tracer(value, source)

        def read(atom):
            if isinstance(atom, jex.Literal):
                return pe.DynamicJaxprTracer(trace, atom.aval, atom, source)
            return env[atom]

        for eqn in jaxpr.eqns:
            tracers = trace.emit_eqn(
                [read(v) for v in eqn.invars],
                [v.aval for v in eqn.outvars],
                eqn.primitive,
                eqn.params,
                eqn.effects,
                eqn.source_info,
                eqn.ctx,
            )
            env.update(zip(eqn.outvars, tracers))
        return [read(v) for v in jaxpr.outvars]


# --- effects, references, meshes --------------------------------------------------------------


def ordered_effects(eqn_or_jaxpr) -> tuple:
    """The ordered effects of an equation or jaxpr (printing, io_callback with ordered=True)."""
    from jax._src import effects  # ordered_effects has no public home

    return tuple(e for e in eqn_or_jaxpr.effects if effects.ordered_effects.contains(e))


def is_ref(aval) -> bool:
    """Whether `aval` is the type of a mutable `jax.Ref`."""
    return type(aval).__name__ == "AbstractRef"


def explicit_axes(mesh) -> tuple[str, ...]:
    """Names of the axes of `mesh` (concrete or abstract) in Explicit mode."""
    explicit = jax.sharding.AxisType.Explicit
    types = mesh.axis_types or ()
    return tuple(n for n, t in zip(mesh.axis_names, types) if t == explicit)


LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "optax"))


def source_line(eqn) -> str:
    """`file:line (function)` of the innermost frame that is not a library's, "" if none is."""
    from jax._src import source_info_util  # no public way to the frames of a traceback

    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = (f for f in frames if not any(name in f.file_name for name in LIBRARIES))
    frame = next(own, frames[0] if frames else None)
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})" if frame else ""


# --- single equations -------------------------------------------------------------------------


def bind_equation(eqn, args) -> list:
    """Results of one equation on `args`, as the primitive binds them in its own context."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


# --- reading equations ------------------------------------------------------------------------

CONTROL_FLOW = ("scan", "while", "cond")
REMAT = ("remat", "remat2", "remat3", "checkpoint")
CALLS = frozenset(SUBJAXPR_PARAMS) - frozenset(CONTROL_FLOW)  # inlined for planning


Literal = jex.Literal  # an operand of an equation that stands in the jaxpr itself
DropVar = jex.DropVar  # a result of an equation that is thrown away


def dtype_name(aval) -> str:
    """Name of an abstract value's dtype ("bfloat16", "int4", "key<fry>"), "" if it has none."""
    dtype = getattr(aval, "dtype", None)
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = "" if dtype is None else str(dtype)
    return name


_dtype_names: dict[Any, str] = {}  # a dtype takes microseconds to print, a step has 100,000 values


def scan_sizes(eqn) -> tuple[int, int, int]:
    """(constants, carries, length) of a `scan` equation; jax 0.11 keeps the first two in a tree."""
    params = eqn.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"], params["length"]
    consts, carry, _ = map(len, params["ft_in"].unpack())
    return consts, carry, params["length"]
