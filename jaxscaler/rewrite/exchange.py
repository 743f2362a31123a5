"""Segments that compute the same by other means: a kernel of the user's, products in another dtype.

Both are made first: other changes of the loss count the equations that these leave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxscaler import _compat
from jaxscaler.errors import ConstraintError, PlanError
from jaxscaler.rewrite.changes import Cast, Kernel

PRODUCTS = ("dot_general", "conv_general_dilated")  # what runs in another dtype

_kernels: dict[str, Callable] = {}


def register_kernel(name: str, function: Callable) -> None:
    """Make `function` an implementation that `Kernel(name)` lines put in the place of a region.

    function: takes the arrays that the region reads, in the order in which it first reads them, and
    gives those that are read after it (one array, or a tuple in the order in which the region makes
    them), of the same shapes and dtypes. JAX differentiates it: a kernel without a derivative wants
    `jax.custom_vjp`, one that may be split `jaxscaler.register_rule`. That it computes the same is
    the user's word. A plan names the kernel, so what loads the plan registers it too.
    """
    if not callable(function):
        raise ConstraintError(f"register_kernel({name!r}): {function!r} is no function")
    _kernels[name] = function


def kernel(closed: Any, change: Kernel) -> Callable[..., list]:
    """The registered kernel in the place of a segment. PlanError where its types differ."""
    function = _kernels.get(change.name)
    if function is None:
        raise PlanError(
            f"{change}: no kernel {change.name!r} is registered (known: {sorted(_kernels)}): call "
            "jaxscaler.register_kernel before planning or loading the plan"
        )
    eqns = _compat.open_jaxpr(closed)[0].eqns

    def run(*args: Any) -> list:
        _check_call(change, function, args)
        with _compat.where_it_stands(eqns[0]):
            made = function(*args)
        made = list(made) if isinstance(made, tuple | list) else [made]
        if (got := types(made)) != (wanted := types(closed.out_avals)):
            raise PlanError(
                f"Kernel({change.name!r}) makes {got or 'nothing'} of {types(args)}, and the "
                f"equations {change.segment.first} to {change.segment.last} make {wanted}: it is "
                "given what they read, in the order in which they first read it"
            )
        return made

    return run


def _check_call(change: Kernel, function: Callable, args: tuple) -> None:
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise PlanError(
            f"Kernel({change.name!r}): {error}; its region reads {types(args)}, in this order"
        ) from None
    except ValueError:  # a builtin has no signature
        pass


def cast(closed: Any, change: Cast) -> Callable[..., list]:
    """A segment whose products take operands, and hand on results, in another dtype.

    What they read is cast on its way in, so that it travels between devices in that dtype, and
    their results, partial sums too, are cast back after they were added up.
    """
    dtype = jax.numpy.dtype(change.dtype)
    jaxpr, consts = _compat.open_jaxpr(closed)

    def run(*args: Any) -> list:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if _compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            if is_castable(eqn):
                with _compat.where_it_stands(eqn):
                    operands = [jax.lax.convert_element_type(x, dtype) for x in operands]
                narrow = eqn.replace(params={**eqn.params, "preferred_element_type": dtype})
                (made,) = _compat.bind_where_it_stands(narrow, operands)
                with _compat.where_it_stands(eqn):
                    results = [jax.lax.convert_element_type(made, eqn.outvars[0].aval.dtype)]
            else:
                results = _compat.bind_where_it_stands(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run


def is_castable(eqn: Any) -> bool:
    """Whether an equation is a product of real floating-point numbers."""
    floats = (jax.numpy.issubdtype(v.aval.dtype, jax.numpy.floating) for v in eqn.invars)
    return eqn.primitive.name in PRODUCTS and all(floats)


def types(values: Any) -> str:
    """Dtypes and shapes, as errors name them."""
    return ", ".join(f"{_compat.dtype_name(v)}{list(v.shape)}" for v in values)
