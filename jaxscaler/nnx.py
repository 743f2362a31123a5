"""Steps on flax.nnx objects as functions of pytrees.

A `Graph` stands for an object (Module, Optimizer, Rngs, Metric ...): its arrays by path, all else
static. The step, as a function, takes and gives back Graphs; afterwards the caller's own objects
are brought up to date, as `nnx.jit` does. Objects may share parts, also across arguments.

Imported only by programs that use flax.nnx.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import spmd
from flax.nnx.graphlib import IndexMap, RefMap, is_graph_node

from jaxscaler import _compat
from jaxscaler.errors import TraceError


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Leaves:
    """Arrays with their paths inside an object."""

    paths: tuple[str, ...]
    arrays: list

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, self.paths)
        return tuple(zip(keys, self.arrays, strict=True)), self.paths

    @classmethod
    def tree_unflatten(cls, paths, arrays):
        return cls(paths, list(arrays))


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Graph:
    """An object: what `nnx.flatten` makes of it. A node of its own for the arrays: they stay what
    they are when a static field of the object changes.
    """

    definition: nnx.GraphDef
    leaves: Leaves

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey(""), self.leaves),), self.definition

    @classmethod
    def tree_unflatten(cls, definition, children):
        return cls(definition, *children)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Links:
    """Per object, in the order of the arguments: which of its parts the caller has already."""

    definitions: tuple[nnx.GraphDef, ...]


class Stepped(NamedTuple):
    """What a functional step returns: the objects of its arguments by name, and its result."""

    objects: OrderedDict[str, Any]
    result: Any
    links: Links


def wanted(step: Callable, arguments: Any) -> bool:
    """Whether `step` works on objects: some are among its arguments, or it went through `nnx.jit`.

    A function under `jax.jit` sees objects as plain pytrees, and stays as it is. Raises TraceError
    for a step that holds objects itself, a bound method or a partial.
    """
    held = (step.args, step.keywords) if isinstance(step, functools.partial) else ()
    if holds_objects((held, getattr(step, "__self__", None))):
        name = getattr(step, "__name__", type(step).__name__)
        raise TraceError(
            f"{name} holds flax.nnx objects (it is a bound method, or a partial): pass the "
            "function itself (Class.method), and the objects as arguments of every call"
        )
    if _compat.is_jitted(step):
        return False
    return _is_nnx_jitted(step) or holds_objects(arguments)


def holds_objects(tree: Any) -> bool:
    """Whether there is an object, or a Graph for one, in `tree`. Variables alone are pytrees."""
    found = (x for x in _leaves(tree) if not isinstance(x, nnx.Variable))
    return any(is_graph_node(x) or isinstance(x, Graph) for x in found)


def take(tree: Any, references: RefMap | None = None, known: RefMap | None = None) -> Any:
    """`tree` with a Graph for every object, a shared part where it is met first.

    `references` is filled with the parts and their numbers. Parts that are in `known` are linked to
    their number there.
    """
    references = RefMap() if references is None else references
    return jax.tree.map(
        lambda x: _graph(x, references, known) if _is_object(x) else x, tree, is_leaf=_is_object
    )


def take_call(step: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict, RefMap]:
    """The arguments of a call with Graphs for objects, and the parts of these for `renew`."""
    bound = inspect.signature(step).bind(*args, **kwargs)
    references = RefMap()
    args, kwargs = take((bound.args, bound.kwargs), references)
    return args, kwargs, references


def give(tree: Any) -> Any:
    """`tree` with new objects for its Graphs."""
    return _objects(tree, IndexMap())


def renew(references: RefMap, stepped: Stepped) -> Any:
    """The result of a step, after the caller's objects were brought up to date in place."""
    known, index = IndexMap.from_refmap(references), IndexMap()
    for definition, graph in zip(stepped.links.definitions, _leaves(stepped.objects), strict=True):
        _object(Graph(definition, graph.leaves), index, known)
    return _objects(stepped.result, index, known)


def unsharded() -> Any:
    """A context in which Variables are made without a mesh, whatever they say of one."""
    return nnx.use_eager_sharding(False)


def with_own_words(author: Any, traced: Any) -> Any:
    """An `Author`, and what the Variables among a step's arguments say of how they lie.

    Without a mesh they are left out, with a warning.
    """
    said = _said_of(jax.tree.unflatten(traced.in_tree, range(len(traced.in_paths))))
    if said and author.axes is None:
        i, _, words = said[0]
        warnings.warn(
            f"{words} ({traced.in_paths[i]}) speaks of a mesh that the search does not know: what "
            f"{len(said)} Variables say is left to the search. mesh= keeps it",
            stacklevel=2,
        )
        return author
    own = ((traced.in_paths[i], _compat.spec_dims(spec), words) for i, spec, words in said)
    return replace(author, own=tuple(own))


def functional(step: Callable) -> Callable:
    """`step` as a function of Graphs that returns `Stepped`; it keeps its name and signature.

    What the user said to `nnx.jit` holds (static and donated arguments). Raises TraceError for one
    that fixes shardings, and, when traced, for a step that adds arrays to an object or drops some.
    """
    fun: Any = step.fun if _is_nnx_jitted(step) else step  # type: ignore[attr-defined]

    @functools.wraps(fun)
    def function(*args, **kwargs) -> Stepped:
        index = IndexMap()
        args, kwargs = _objects((args, kwargs), index)
        objects = _arguments_with_objects(fun, args, kwargs)
        before = take(objects)
        result = fun(*args, **kwargs)
        after = take(objects)
        _refuse_other_arrays(before, after)
        known, references = RefMap.from_indexmap(index), RefMap()
        linked = _leaves(take(objects, references, known))
        links = Links(tuple(graph.definition for graph in linked))
        return Stepped(after, take(result, references, known), links)

    return _jitted_like(step, function) if _is_nnx_jitted(step) else function


# --- one object -------------------------------------------------------------------------------


def _is_object(x) -> bool:
    return is_graph_node(x) or isinstance(x, nnx.Variable)


def _leaves(tree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda x: _is_object(x) or isinstance(x, Graph))


def _graph(x, references: RefMap, known: RefMap | None) -> Graph:
    definition, flat = nnx.flatten(x, ref_index=references, ref_outer_index=known, graph=True)
    paths = tuple("/".join(map(str, path)) for path in flat.paths)
    return Graph(definition, Leaves(paths, [_array(leaf) for leaf in flat.leaves]))


def _array(leaf):
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _object(graph: Graph, index: IndexMap, known: IndexMap | None = None):
    return nnx.unflatten(
        graph.definition, graph.leaves.arrays, index_ref=index, outer_index_outer_ref=known
    )


def _objects(tree, index: IndexMap, known: IndexMap | None = None):
    return jax.tree.map(
        lambda x: _object(x, index, known) if isinstance(x, Graph) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Graph),
    )


def _said_of(tree: Any) -> list[tuple[int, jax.sharding.PartitionSpec, str]]:
    """What Variables say of how they lie, of a tree of numbered leaves: (number, spec, in words).

    That is their `out_sharding` (`nnx.with_partitioning` sets it), names of axes replaced by their
    `sharding_rules` and the rules in force. An optimizer copies what it finds at parameters: of its
    own Variables only what no parameter says (their `optimizer_sharding`) counts.
    """
    found, objects = [], filter(_is_object, _leaves(give(tree)))
    for variable in (leaf for x in objects for leaf in nnx.flatten(x, graph=True)[1].leaves):
        metadata = variable.get_metadata() if isinstance(variable, nnx.Variable) else {}
        if said := metadata.get("out_sharding"):
            rules = metadata.get("sharding_rules") or ()
            words = f"out_sharding={said!r} of an nnx.{type(variable).__name__}"
            found.append((variable, said, _resolved(said, rules), words))
    own = {repr(said) for variable, said, *_ in found if not isinstance(variable, nnx.OptState)}
    return [
        (variable.get_raw_value(), spec, words)
        for variable, said, spec, words in found
        if not isinstance(variable, nnx.OptState) or repr(said) not in own
    ]


def _resolved(said: Any, rules: Any) -> jax.sharding.PartitionSpec:
    """A spec, names or a sharding as a spec of axes of a mesh."""
    said = getattr(said, "sharding", said)  # of a Format
    rules = dict(spmd.composite_rules(spmd.get_logical_axis_rules(), rules))

    def dim(cut: Any) -> Any:
        names = [rules.get(n, n) for n in cut] if isinstance(cut, tuple) else [rules.get(cut, cut)]
        flat = [n for name in names for n in (name if isinstance(name, tuple) else (name,))]
        return flat[0] if len(flat) == 1 else tuple(n for n in flat if n is not None) or None

    return jax.sharding.PartitionSpec(*map(dim, getattr(said, "spec", said)))


# --- steps ------------------------------------------------------------------------------------


def _is_nnx_jitted(step) -> bool:
    return hasattr(step, "jitted_fn") and hasattr(step, "fun")


def _jitted_like(step, function: Callable) -> Callable:
    """`function` under `jax.jit` with the options that `step` was given in `nnx.jit`."""
    name = getattr(step, "__name__", type(step).__name__)
    if step.in_shardings is not None or step.out_shardings is not None:
        raise TraceError(
            f"{name} fixes its own shardings in nnx.jit, so nothing is left to plan: pass the "
            "function without in_shardings and out_shardings"
        )
    if getattr(step, "partial_args", None):
        raise TraceError(
            f"{name} holds some of its arguments (nnx.jit_partial): pass the function itself, and "
            "call the planned step with all of them"
        )
    options = _compat.jit_options(step.jitted_fn)
    del options["fixes_shardings"]
    return jax.jit(function, **options, **_compat.jit_donation(step.jitted_fn))


def _arguments_with_objects(fun, args, kwargs) -> OrderedDict[str, Any]:
    """Arguments by name as they stand in (args, kwargs); what is no object is None."""
    arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    names = [n for n in arguments if n not in kwargs] + sorted(n for n in arguments if n in kwargs)
    kept = (
        (n, jax.tree.map(lambda x: x if _is_object(x) else None, arguments[n], is_leaf=_is_object))
        for n in names
    )
    return OrderedDict((name, x) for name, x in kept if _leaves(x))


def _refuse_other_arrays(before, after) -> None:
    for name in before:
        paths = [
            {path for graph in _leaves(tree[name]) for path in graph.leaves.paths}
            for tree in (before, after)
        ]
        if paths[0] != paths[1]:
            more, less = sorted(paths[1] - paths[0])[:3], sorted(paths[0] - paths[1])[:3]
            raise TraceError(
                f"the step leaves {name} with other arrays than it had (new: {more}, gone: {less}):"
                " what is planned must be there from the start. Create them before the first step, "
                "or take what the step adds away again in it (nnx.pop)"
            )
