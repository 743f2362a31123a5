"""A train step on abstract values -> its jaxpr, with a path for every input and output.

The first of the two places where JAX is met. Nothing runs and no argument is touched; a step that
can not be planned is refused here, by name.
"""

from __future__ import annotations

import contextvars
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxscaler import _compat
from jaxscaler.errors import PlanError, TraceError
from jaxscaler.grad import Marks
from jaxscaler.rewrite.changes import Change, Exchange, Recompute, Stages
from jaxscaler.rewrite.early import early

LOOPS = ("scan", "while")


@dataclass(frozen=True)
class Traced:
    """A step as JAX sees it. Flat positions count the leaves of the dynamic arguments in order.

    `in_tree` is the tree of the tuple of dynamic arguments, `arg_names` its elements' names: first
    those given by position, then the `keywords` sorted by name. `state` pairs the flat positions
    (input, output) of what the step takes and gives back; `donated` is empty for a plain function.
    """

    step: Callable
    jaxpr: Any  # jax.extend.core.ClosedJaxpr
    in_tree: Any
    out_tree: Any
    arg_names: tuple[str, ...]
    keywords: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]  # arguments that are part of the program, by name
    static_options: dict[str, tuple]  # as given to `jax.jit`
    in_paths: tuple[str, ...]
    in_avals: tuple
    out_paths: tuple[str, ...]
    out_avals: tuple
    state_pairs: tuple[tuple[int, int], ...]
    arg_of_input: tuple[int, ...]  # index into `arg_names` per flat input
    donated: tuple[bool, ...]
    seconds: float
    roles: tuple[tuple[str, str], ...] = ()  # (glob of input paths, role), as the user says
    losses: tuple[Any, ...] = ()  # forward jaxprs of marked losses (grad.py)
    changes: tuple[Change, ...] = ()  # what was changed in them before they were differentiated
    under_way: float = 1.0  # of a stage: micro-batches that wait for their backward pass at once
    retrace: Callable | None = field(default=None, compare=False, repr=False)

    def changed(self, changes: Sequence[Change]) -> Traced:
        """The same step traced again, its marked losses changed so; it keeps its `Exchange`s."""
        first = [change for change in self.changes if isinstance(change, Exchange)]
        return self.rewritten((*first, *(c for c in changes if not isinstance(c, Exchange))))

    def rewritten(self, changes: Sequence[Change]) -> Traced:
        """The step as it was written traced again, with these changes alone."""
        assert self.retrace is not None
        changed = self.retrace(tuple(changes))
        return replace(changed, roles=self.roles, retrace=self.retrace)

    def position(self, name: str) -> int:
        """Where the positional argument `name` stands in a call, static ones counted."""
        return _positional_names(self.step, 0).index(name) if not name.isdigit() else int(name)

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """The dynamic arguments of a call in the order of `arg_names`.

        Raises PlanError if a static argument is not the one the step was traced with.
        """
        positional, keyword = _bind(_signature(self.step), args, kwargs)
        dynamic, static = _split_static(self.step, positional, keyword, self.static_options)
        if static != self.static:
            raise PlanError(
                f"static arguments {dict(static)} are not those planned for, {dict(self.static)}: "
                "plan the step again for them"
            )
        if tuple(name for name, _ in dynamic) != self.arg_names:
            raise PlanError(
                f"called with arguments {tuple(name for name, _ in dynamic)}, planned for "
                f"{self.arg_names}: give the same ones"
            )
        return tuple(value for _, value in dynamic)


def trace(step: Callable, *args, static_argnums=None, static_argnames=None, **kwargs) -> Traced:
    """Trace `step` (plain, or already `jax.jit`-ted) on arrays or `jax.ShapeDtypeStruct`s.

    Raises TraceError, naming path, shape, rule and way out, for: a leaf that is no array, a mesh
    with Explicit axes, an axis name that only `pmap` binds, a `jax.Ref`, an ordered effect. Errors
    of the step itself come out as they are.
    """
    _refuse_explicit(jax.sharding.get_abstract_mesh(), "jax.set_mesh")
    if _compat.is_jitted(step):
        options = _compat.jit_options(step)
        if options.pop("fixes_shardings"):
            raise TraceError(
                f"{_name(step)} fixes its own shardings in jax.jit, so nothing is left to plan: "
                "pass the function without in_shardings and out_shardings"
            )
        jitted: Any = step
    else:
        options = {"static_argnums": static_argnums, "static_argnames": static_argnames}
        options = {k: v for k, v in options.items() if v is not None}
        jitted = jax.jit(step, **options)
    positional, keyword = _bind(_signature(step), args, kwargs)
    dynamic, static = _split_static(step, positional, keyword, options)
    names = tuple(name for name, _ in dynamic)
    leaves, in_tree = jax.tree_util.tree_flatten_with_path(tuple(value for _, value in dynamic))
    in_keys = [(names[path[0].idx], *_keys(path[1:])) for path, _ in leaves]
    in_paths = tuple(map(_path, in_keys))
    for path, (_, leaf) in zip(in_paths, leaves):
        _check_leaf(path, leaf)
    abstract = dict(zip(names, (jax.tree.map(_abstract, value) for _, value in dynamic)))
    order = _positional_names(step, len(positional))
    around = jax.sharding.get_abstract_mesh()
    mesh = None if around.empty else around

    def traced_with(changes: tuple[Change, ...]) -> Traced:
        start, marks = time.perf_counter(), Marks(changes)
        try:
            with _compat.cudnn_on_any_host(), _compat.inside_mesh(mesh), _compat.planning(marks):
                traced = jitted.trace(
                    *(abstract.get(name, value) for name, value in zip(order, positional)),
                    **{name: abstract.get(name, value) for name, value in keyword.items()},
                )
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise TraceError(
                f"{_name(step)} uses an axis name that only pmap or shard_map binds ({error}): the "
                "planned step sees the whole batch as one array, so a mean over it is already the "
                "global one; remove the pmean/psum/axis_index over that axis"
            ) from error

        again = any(isinstance(change, Recompute) for change in changes)
        again &= not any(isinstance(change, Stages) for change in changes)  # programs of their own
        jaxpr = _compat.without_dead_code(traced.jaxpr)
        jaxpr = early(jaxpr) if again else jaxpr
        _refuse_refs(jaxpr, in_paths)
        _refuse_ordered(jaxpr)
        outs, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
        out_keys = [_keys(path) for path, _ in outs]
        donated = tuple(info.donated for info in jax.tree.leaves(traced.args_info))
        return Traced(
            step=step,
            jaxpr=jaxpr,
            in_tree=in_tree,
            out_tree=out_tree,
            arg_names=names,
            keywords=tuple(sorted(k for k in keyword if k in names)),
            static=static,
            static_options=options,
            in_paths=in_paths,
            in_avals=tuple(jaxpr.in_avals),
            out_paths=tuple(_path(keys) or "result" for keys in out_keys),
            out_avals=tuple(jaxpr.out_avals),
            state_pairs=state_pairs(
                in_tree, jaxpr.in_avals, in_keys, out_tree, jaxpr.out_avals, out_keys
            ),
            arg_of_input=tuple(path[0].idx for path, _ in leaves),
            donated=donated if _compat.is_jitted(step) else (),
            seconds=time.perf_counter() - start,
            losses=tuple(marks.losses),
            changes=changes,
        )

    context = contextvars.copy_context()
    first = traced_with(())
    return replace(first, retrace=lambda changes: context.run(traced_with, changes))


# --- arguments --------------------------------------------------------------------------------


def _name(fun) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def _signature(fun) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # builtins have none
        return None


def _bind(signature, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The call with every argument by position that can be; defaults stay unsaid."""
    if signature is None:
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _positional_names(step, count: int) -> list[str]:
    """Names of what `step` takes by position, then numbers up to `count`."""
    signature = _signature(step)
    names = [
        parameter.name
        for parameter in (signature.parameters.values() if signature else ())
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names + [str(i) for i in range(len(names), count)]  # *args, or no signature


def _split_static(step, positional: tuple, keyword: dict, options: dict):
    """(name, value) pairs: of dynamic arguments by position then keyword, and of static ones."""
    names = _positional_names(step, len(positional))
    nums = options.get("static_argnums", ())
    nums = {n % len(names) if n < 0 else n for n in ((nums,) if isinstance(nums, int) else nums)}
    static_names = options.get("static_argnames", ())
    static_names = {static_names} if isinstance(static_names, str) else set(static_names)
    static_names |= {name for i, name in enumerate(names) if i in nums}
    dynamic, static = [], []
    for i, value in enumerate(positional):
        (static if names[i] in static_names else dynamic).append((names[i], value))
    for name in sorted(keyword):
        (static if name in static_names else dynamic).append((name, keyword[name]))
    return tuple(dynamic), tuple(static)


def _keys(path) -> tuple[str, ...]:
    """A pytree path as plain names: dict keys, attributes, positions."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _path(keys: tuple[str, ...]) -> str:
    return "/".join(filter(None, keys))  # a level of the tree may go without a name


# --- what can not be planned ------------------------------------------------------------------


def _check_leaf(path: str, leaf) -> None:
    if isinstance(leaf, (bool, int, float, complex)):
        return
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        aval = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None
    if aval is not None and _compat.is_ref(aval):
        raise TraceError(_ref_message(path, aval))
    if (mesh := getattr(getattr(aval, "sharding", None), "mesh", None)) is not None:
        _refuse_explicit(mesh, path)
    dtype = getattr(aval, "dtype", None)
    if dtype is None or (
        isinstance(dtype, np.dtype) and dtype.kind in "OSUV" and not _is_jax(dtype)
    ):
        raise TraceError(
            f"{path} is a {type(leaf).__name__}, not an array: every leaf of the arguments must be "
            "one. Pass it as a static argument (static_argnums), make it a static field of its "
            "pytree (flax.struct.field(pytree_node=False)), or use None"
        )


def _abstract(leaf):
    """The type of an array without where it lies now: JAX would write that into the program."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def _is_jax(dtype: np.dtype) -> bool:
    """bfloat16, float8 and int4 are structs to numpy."""
    return dtype.kind == "V" and dtype.names is None and jax.dtypes.issubdtype(dtype, np.number)


def _ref_message(path: str, aval) -> str:
    return (
        f"{path} of shape {getattr(aval, 'shape', ())} is a mutable jax.Ref: a plan lays out "
        "values, not references. Pass the array (ref[...]) and return the new one"
    )


def _refuse_refs(closed, in_paths) -> None:
    jaxpr, _ = _compat.open_jaxpr(closed)
    named = (*zip(in_paths, jaxpr.invars), *(("a closed-over value", v) for v in jaxpr.constvars))
    for path, var in named:
        if _compat.is_ref(var.aval):
            raise TraceError(_ref_message(path, var.aval))


def _refuse_ordered(closed) -> None:
    if not _compat.ordered_effects(closed):
        return
    eqn, loops = next(_ordered_eqns(closed, ()))
    place = f" inside a {loops[-1]}" if loops else ""
    raise TraceError(
        f"ordered effect of {eqn.primitive.name}{place} at {_compat.source_line(eqn)}: several "
        "devices keep no common order. Use ordered=False, or move it out of the step"
    )


def _ordered_eqns(jaxpr, loops) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The innermost equations with ordered effects, and the loops around each."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        if _compat.ordered_effects(eqn):
            name = eqn.primitive.name
            inside = (*loops, name) if name in LOOPS else loops
            found = [e for body in _compat.subjaxprs(eqn) for e in _ordered_eqns(body, inside)]
            yield from found or [(eqn, loops)]


def _refuse_explicit(mesh, where: str) -> None:
    if axes := _compat.explicit_axes(mesh):
        raise TraceError(
            f"{where}: axes {axes} of the mesh {dict(mesh.shape)} are in Explicit mode, where the "
            "types of the program fix its shardings and nothing is left to plan. Use "
            "axis_types=(AxisType.Auto, ...), or no mesh at all"
        )


def refuse_other_devices(jaxpr, count: int) -> None:
    """Raise TraceError for a `shard_map` over another number of devices than the plan's."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        for body in _compat.subjaxprs(eqn):
            refuse_other_devices(body, count)
        if eqn.primitive.name == "shard_map" and eqn.params["mesh"].size != count:
            mesh = eqn.params["mesh"]
            raise TraceError(
                f"shard_map over a mesh {dict(mesh.shape)} of {mesh.size} devices at "
                f"{_compat.source_line(eqn)}, but the plan is for {count}: all of a step runs on "
                "the same devices. Give it a mesh of all of them, or plan for as many as it has"
            )


# --- state ------------------------------------------------------------------------------------


def state_pairs(
    in_tree, in_avals, in_keys, out_tree, out_avals, out_keys
) -> tuple[tuple[int, int], ...]:
    """(flat input, flat output) of what the step takes and gives back; keys are paths, per leaf.

    Largest first, each tree inside the arguments is paired with an equal one (structure, shapes,
    dtypes) inside the outputs; among several with the one whose path ends alike, else the
    outermost, else the first. A lone array says little (a batch may look like a prediction): it
    counts only inside the first arguments, up to one that is not state throughout, and a scalar
    only as the first argument. It needs a result of its own, if it is an argument of its own (but
    not the last) or inside the first one, or else a result whose path ends alike. An object of one
    array (an optimizer that counts steps) is state as well if it comes back under its name.
    """

    def types(avals, tree, start):
        return tuple((a.shape, a.dtype) for a in avals[start : start + tree.num_leaves])

    wanted: dict[Any, list] = {}
    for tree, start, path in _subtrees(out_tree, 0, out_keys):
        wanted.setdefault(types(out_avals, tree, start), []).append((tree, start, path))
    paired: dict[int, int] = {}
    taken: set[int] = set()

    def counts(start: int, path) -> bool:
        """Whether a lone array may be state: all arguments before its own are."""
        before = (i for i in range(start) if in_keys[i][0] != path[0])
        shaped = bool(in_avals[start].shape) or (start == 0 and len(path) == 1)
        last = len(path) == 1 and start == len(in_keys) - 1 > 0
        return shaped and not last and all(i in paired for i in before)

    def may_be(tree, path, other_path) -> bool:
        if not jax.tree_util.treedef_is_leaf(tree):
            return True
        alone = len(other_path) < 2 and (len(path) == 1 or path[0] == in_keys[0][0])
        return alone or (len(path) > 1 and _common_suffix(path, other_path) > 0)

    def is_object(tree) -> bool:
        kind = (tree.node_data() or (None,))[0]
        return kind not in (None, tuple, list, dict)

    inside = [node for node in _subtrees(in_tree, 0, in_keys) if node[2]]
    for tree, start, path in sorted(inside, key=lambda node: (-node[0].num_leaves, node[1])):
        size = tree.num_leaves
        by_name = size == 1 and not counts(start, path)
        if start in paired or (by_name and not is_object(tree)):
            continue
        free = [
            (-_common_suffix(path, other_path), len(other_path), at)
            for other, at, other_path in wanted.get(types(in_avals, tree, start), ())
            if other == tree
            and may_be(tree, path, other_path)
            and (not by_name or _common_suffix(path, other_path) > 0)
            and taken.isdisjoint(range(at, at + size))
        ]
        if free:
            at = min(free)[-1]
            taken.update(range(at, at + size))
            paired.update((start + i, at + i) for i in range(size))
    return tuple(sorted(paired.items()))


def _common_suffix(a, b) -> int:
    same = 0
    for x, y in zip(reversed(a), reversed(b)):
        if x != y:
            break
        same += 1
    return same


def _subtrees(tree, start: int, keys, depth: int = 0):
    """(subtree, its first leaf, its path), outer before inner; `keys` has a path per leaf."""
    if tree.num_leaves:
        yield tree, start, keys[start][:depth]
        for child in tree.children():
            yield from _subtrees(child, start, keys, depth + 1)
            start += child.num_leaves
