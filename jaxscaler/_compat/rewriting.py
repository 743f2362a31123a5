"""Making equations and jaxprs anew: literals, barriers, scans, dead code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.extend import core as jex

from jaxscaler._compat.jaxprs import REMAT, SUBJAXPR_PARAMS, fresh_var

# --- rewriting forward jaxprs -----------------------------------------------------------------


def is_literal(atom) -> bool:
    """Whether an operand stands in the jaxpr itself."""
    return isinstance(atom, jex.Literal)


def is_dropped(var) -> bool:
    """Whether a result of an equation is thrown away."""
    return isinstance(var, jex.DropVar)


def in_scope(eqn, name: str):
    """`eqn` with `name` last in its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


@contextlib.contextmanager
def where_it_stands(eqn) -> Iterator[None]:
    """A context in which what is bound has the names, source line and settings of `eqn`."""
    from jax._src import source_info_util  # as `jax.core.eval_jaxpr` does it

    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind_where_it_stands(eqn, args) -> list:
    """Results of `eqn` on `args`, with its names and source line; custom rules stay whole."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with where_it_stands(eqn):
        results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def last_uses(jaxpr) -> dict:
    """Per variable, the last equation that reads it; those of results, the number of equations."""
    found = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not is_literal(v)}
    found.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not is_literal(v))
    return found


def closed_over_nothing(jaxpr, invars, eqns, outvars):
    """A closed jaxpr of some equations of `jaxpr`."""
    effects = {effect for eqn in eqns for effect in eqn.effects}
    part = jaxpr.replace(
        constvars=[],
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.ClosedJaxpr(part, ())


def changes_nothing(eqn) -> bool:
    """Whether an equation only hands its operand on: a name, a rounding to what it is already."""
    if eqn.primitive.name != "reduce_precision":
        return eqn.primitive.name == "name"
    info = jax.numpy.finfo(eqn.invars[0].aval.dtype)
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return bits == (info.nexp, info.nmant)


planning = jax.make_user_context(None)  # what the step is traced for; caches of jit tell it apart


def custom_jvp_rule(eqn, zeros: tuple[bool, ...]):
    """(closed jaxpr, zeros of the results) of the derivative rule of a `custom_jvp_call`.

    `zeros`: which operands have no tangent. The jaxpr takes the operands, then the tangents that
    there are, and gives the results, then their tangents that are not zero.
    """
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return jex.ClosedJaxpr(jaxpr, tuple(consts)), tuple(out_zeros)


def custom_vjp_rule(eqn) -> tuple:
    """(forward, backward, number of results) of the rule of a `custom_vjp_call`, closed jaxprs.

    forward: operands -> results, then what backward needs. backward: that, then cotangents of the
    results that are floats -> cotangents of the operands that are.
    """
    spec = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    floats = [i for i, x in enumerate(spec) if is_float(x)]
    pulls: list = []

    def forward(*args):
        def moved(*moving):
            filled = list(args)
            for i, x in zip(floats, moving):
                filled[i] = x
            made = eqn.primitive.bind(*filled, **eqn.primitive.get_bind_params(eqn.params))
            return [x for x in made if is_float(x)], made

        _, pull, made = jax.vjp(moved, *[args[i] for i in floats], has_aux=True)
        kept, tree = jax.tree.flatten(pull)
        pulls[:] = [tree]
        return *made, *kept

    ahead = jax.make_jaxpr(forward)(*spec)
    results = len(eqn.outvars)
    kept = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ahead.out_avals[results:]]
    cts = [x for x in ahead.out_avals[:results] if is_float(x)]

    def backward(*given):
        pull = jax.tree.unflatten(pulls[0], given[: len(kept)])
        return pull(list(given[len(kept) :]))

    back = jax.make_jaxpr(backward)(*kept, *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cts])
    return ahead, back, results


def is_float(x) -> bool:
    """Whether a value, or its type, can be differentiated."""
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


# --- dead code --------------------------------------------------------------------------------


def without_dead_code(closed):
    """`closed` without the equations that no result or effect needs, in bodies too, as XLA leaves
    them out; differentiation makes some. Arguments and results stay."""
    from jax.interpreters import partial_eval as pe

    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


# --- the backward pass ------------------------------------------------------------------------


def is_made_again(eqn) -> bool:
    """Whether an equation is the backward pass of a `jax.checkpoint`, its forward pass within."""
    return eqn.primitive.name in REMAT and bool(eqn.params.get("differentiated"))


def is_transposed(eqn) -> bool:
    """Whether an equation came from transposition: it is of a backward pass."""
    return "transpose(" in str(eqn.source_info.name_stack)


def barrier_eqn(operands, like):
    """An equation that hands on variables once all are computed; where and when `like` stands."""
    made = [fresh_var(v) for v in operands]
    return _barrier_template().replace(
        invars=list(operands), outvars=made, source_info=like.source_info, ctx=like.ctx
    )


def on_host(var) -> bool:
    """Whether a variable lies in the memory of the host."""
    return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host


@functools.lru_cache(maxsize=1)
def _barrier_template():
    """A barrier, traced by JAX."""
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).jaxpr.eqns[-1]


# --- equations that are made ------------------------------------------------------------------


def rebuilt_scan(eqn, body, consts, carries, slices, results):
    """The `scan` equation with another closed body, on other operands; as many iterations."""
    inputs = [*consts, *carries, *slices]
    params = {
        **eqn.params,
        SUBJAXPR_PARAMS["scan"][0]: body,
        "num_consts": len(consts),
        "num_carry": len(carries),
        "linear": (False,) * len(inputs),
    }
    effects = body.jaxpr.effects
    return eqn.replace(invars=inputs, outvars=list(results), params=params, effects=effects)


def zeros_eqn(var):
    """An equation that makes `var`, which is no scalar, of zeros."""
    aval = var.aval
    made = jax.make_jaxpr(lambda: jax.lax.full(aval.shape, 0, aval.dtype))()
    (eqn,) = made.jaxpr.eqns
    return eqn.replace(outvars=[var])


def zero(aval):
    """A literal 0 of a scalar type."""
    return jex.Literal(np.zeros((), aval.dtype), aval)


def with_constants(closed, variables, values):
    """A closed jaxpr whose free variables are bound to arrays."""
    return jex.ClosedJaxpr(closed.jaxpr.replace(constvars=list(variables)), list(values))
