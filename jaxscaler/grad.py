"""`value_and_grad` and `grad` that mark the loss of a step for the planner.

Outside of a step that is being planned they are JAX's own, or those of flax.nnx where an argument
is an object of it. Inside, the function is first traced on its arguments, as JAX would: the planner
may then change that forward computation (recomputation, loops over parts), and every equation of
the step tells from which forward equation it came. JAX still does all differentiation.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxscaler import _compat
from jaxscaler.rewrite.apply import changed, flat, named
from jaxscaler.rewrite.changes import Change, Exchange, OfSegment


@dataclass(eq=False)
class Marks:
    """The losses that a trace met: their forward jaxprs, flat and named; what is to change."""

    changes: tuple[Change, ...] = ()
    losses: list[Any] = field(default_factory=list)
    inside: bool = False  # a loss within a loss is a part of it

    def of(self, loss: int) -> list[Change]:
        return [c for c in self.changes if _loss(c) == loss]


def value_and_grad(
    fun: Callable | None = None, argnums: Any = 0, has_aux: bool = False, **options: Any
) -> Any:
    """As `jax.value_and_grad` (or `nnx.value_and_grad`), with the loss marked for the planner.

    fun: a function of arrays, pytrees or flax.nnx objects that returns a scalar, or with `has_aux`
    a pair of it and a tree. argnums: which arguments to differentiate by; of objects, also an
    `nnx.DiffState`. options: `holomorphic`, `allow_int`, and what else the transformation takes.
    Without `fun` a decorator.
    """
    return _marking("value_and_grad", fun, argnums, has_aux, options)


def grad(
    fun: Callable | None = None, argnums: Any = 0, has_aux: bool = False, **options: Any
) -> Any:
    """As `jax.grad` (or `nnx.grad`), with the loss marked for the planner; see `value_and_grad`."""
    return _marking("grad", fun, argnums, has_aux, options)


def with_changes(step: Callable, changes: Sequence[Change]) -> Callable:
    """`step` as a function whose marked losses are changed so when it is traced."""

    @functools.wraps(step)
    def changed_step(*args: Any, **kwargs: Any) -> Any:
        with _compat.planning(Marks(tuple(changes))):
            return step(*args, **kwargs)

    return changed_step


def _marking(
    name: str, fun: Callable | None, argnums: Any, has_aux: bool, options: dict
) -> Callable:
    if fun is None:
        return lambda fun: _marking(name, fun, argnums, has_aux, options)
    options = {"argnums": argnums, "has_aux": has_aux, **options}
    plain = getattr(jax, name)(fun, **options) if _are_numbers(argnums) else None

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        nnx = _nnx_for((args, kwargs)) if plain is not None else _nnx()
        marks = _compat.planning.value
        loss = fun if marks is None or marks.inside else _marked(fun, marks, nnx)
        if nnx is not None:
            return getattr(nnx.nnx, name)(loss, **options)(*args, **kwargs)
        if plain is not None and loss is fun:
            return plain(*args, **kwargs)
        return getattr(jax, name)(loss, **options)(*args, **kwargs)

    return differentiated


def _marked(fun: Callable, marks: Marks, nnx: Any) -> Callable:
    if nnx is None:
        return _through_jaxpr(fun, marks)

    @functools.wraps(fun)
    def loss(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, references = nnx.take_call(fun, args, kwargs)
        return nnx.renew(references, _through_jaxpr(nnx.functional(fun), marks)(*args, **kwargs))

    return loss


def _through_jaxpr(fun: Callable, marks: Marks) -> Callable:
    """`fun`, evaluated by way of its forward jaxpr, which `marks` keeps and may change."""

    @functools.wraps(fun)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        kept: list[Any] = []

        def forward(*arrays: jax.Array) -> list[Any]:
            filled = list(leaves)
            for i, array in zip(dynamic, arrays):
                filled[i] = array
            args, kwargs = jax.tree.unflatten(tree, filled)
            results, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            arrays_out = [i for i, leaf in enumerate(results) if isinstance(leaf, jax.Array)]
            rest = [None if i in arrays_out else leaf for i, leaf in enumerate(results)]
            kept[:] = [out_tree, arrays_out, rest]
            return [results[i] for i in arrays_out]

        number = len(marks.losses)
        marks.losses.append(None)
        arrays = [leaves[i] for i in dynamic]
        marks.inside = True
        try:
            closed = jax.make_jaxpr(forward)(*arrays)
        finally:
            marks.inside = False
        closed = named(flat(closed), number)
        wanted = marks.of(number)
        if first := [change for change in wanted if isinstance(change, Exchange)]:
            closed = named(flat(jax.make_jaxpr(changed(closed, first))(*arrays)), number)
        marks.losses[number] = _compat.open_jaxpr(closed)[0]
        made = changed(closed, [change for change in wanted if change not in first])(*arrays)
        out_tree, arrays_out, results = kept
        for i, value in zip(arrays_out, made, strict=True):
            results[i] = value
        return jax.tree.unflatten(out_tree, results)

    return evaluate


def _loss(change: Change) -> int:
    return change.segment.loss if isinstance(change, OfSegment) else change.loss


def _are_numbers(argnums: Any) -> bool:
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    return all(isinstance(n, int) for n in given)


def _nnx() -> Any:
    """`jaxscaler.nnx`, in a program that uses flax.nnx."""
    return importlib.import_module("jaxscaler.nnx") if "flax.nnx" in sys.modules else None


def _nnx_for(arguments: Any) -> Any:
    nnx = _nnx()
    return nnx if nnx is not None and nnx.holds_objects(arguments) else None
