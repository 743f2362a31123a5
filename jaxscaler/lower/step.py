"""A traced step and its layouts -> a compiled step on the user's own pytrees.

Compiled once, ahead of the first call, for the types that were traced: what is called afterwards is
the executable itself, so a call costs what a hand-written `jit` costs and never traces again.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.grad import with_changes
from jaxscaler.lower.interpret import constrain, named_sharding
from jaxscaler.lower.layouts import Layouts, Spec
from jaxscaler.trace import Traced


class MismatchError(PlanError):
    """A call's arguments are not of the types the step was planned for; a new plan is needed."""


class Difference(NamedTuple):
    """A tensor at the border of the step that the compiler laid out otherwise than planned."""

    path: str
    planned: jax.sharding.Sharding
    achieved: jax.sharding.Sharding


def compile_step(
    traced: Traced,
    layouts: Layouts | None,
    mesh,
    *,
    donate: tuple[int, ...] | None = None,
    compiler_options: dict[str, str | bool] | None = None,
) -> Callable:
    """The step under `layouts` on `mesh` (Auto axes): a callable on the original pytrees.

    `donate`: which arguments (indices into `traced.arg_names`) give up their buffers. By default
    what the user's own `jit` donates, or else every argument that is state throughout and keeps
    its layouts. With no layouts, or for a mesh of one device that is JAX's default, the result is
    `jax.jit` of the step itself. Raises PlanError where layouts do not fit the step or the mesh.
    """
    if donate is None:
        donate = donated_arguments(traced, layouts)
    if layouts is None or _is_default_device(mesh):
        return _plain_jit(traced, donate, compiler_options)
    return PlannedStep(traced, layouts, mesh, donate, compiler_options)


class PlannedStep:
    """A step that runs under a plan. `step(*args)` does what the user's step does.

    NumPy and uncommitted arrays go where the plan wants them; arrays committed elsewhere are moved.
    Arguments of other shapes or trees raise MismatchError, before any argument is touched.
    """

    def __init__(self, traced: Traced, layouts: Layouts, mesh, donate, compiler_options):
        if dict(layouts.axes) != dict(mesh.shape) and (layouts.axes or mesh.size > 1):
            raise PlanError(
                f"the plan is for a mesh {dict(layouts.axes)}, the devices form {dict(mesh.shape)}"
            )
        self.traced = traced
        self.layouts = layouts
        self.mesh = mesh
        self.donate = donate
        self.in_shardings = _shardings(
            layouts.inputs, traced.in_paths, traced.in_avals, mesh, "input"
        )
        self.out_shardings = _shardings(
            layouts.outputs, traced.out_paths, traced.out_avals, mesh, "output"
        )
        constrained = constrain(traced.jaxpr, layouts, mesh)

        def step(*args):
            leaves, tree = jax.tree.flatten(args)
            _check_types(traced, tree, leaves)
            return jax.tree.unflatten(traced.out_tree, _compat.emit(constrained, leaves))

        step.__name__ = step.__qualname__ = getattr(traced.step, "__name__", "step")
        self.jitted = jax.jit(
            step,
            in_shardings=jax.tree.unflatten(traced.in_tree, self.in_shardings),
            out_shardings=jax.tree.unflatten(traced.out_tree, self.out_shardings),
            donate_argnums=donate,
            compiler_options=compiler_options,
        )
        self._direct = not (traced.static or traced.keywords)
        returned = _returned(traced, donate)
        self._taken, self._given = _ids_at(donate), _ids_at(returned)
        self._own = None  # ids of the donated arguments as the last call gave them
        self._run = self._first

    def __call__(self, *args, **kwargs):
        if kwargs or not self._direct:
            args = self.traced.arguments(args, kwargs)
        try:
            if self._taken(args) != self._own:  # not straight from the last call
                _refuse_given_up(args, self.traced.in_paths)
                args = _unshare(args, self.donate, _identity)
            out = self._run(*args)
        except PlanError:
            raise
        except (ValueError, TypeError, LookupError) as error:  # before any buffer is given up
            out = self._run_moved(args, error)
        self._own = self._given(out)
        return out

    def lower(self, platform: str | None = None):
        """The `jax.stages.Lowered` step for the types that were traced.

        `platform` ("cpu", "cuda", "tpu"): lower for one whose devices need not be there; an
        abstract mesh needs it said.
        """
        avals = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
            for a in self.traced.in_avals
        ]
        traced = self.jitted.trace(*jax.tree.unflatten(self.traced.in_tree, avals))
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))

    @functools.cached_property
    def compiled(self):
        """The `jax.stages.Compiled` step; the one compilation."""
        return self.lower().compile()

    def _first(self, *args):
        """The first call: compile, and part arrays that share a buffer which is to be given up."""
        out = self.compiled(*_unshare(args, self.donate, _buffers))
        self._run = self.compiled
        return out

    def _run_moved(self, args, error: Exception):
        """Retry with arrays that were committed elsewhere moved to where the plan wants them."""
        leaves, tree = jax.tree.flatten(args)
        try:
            _check_types(self.traced, tree, leaves)
        except MismatchError as mismatch:
            raise mismatch from error  # JAX's words name the differences
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self.jitted(*args)  # inside another jit, grad or vmap
        moved = [
            jax.device_put(leaf, sharding) if _is_elsewhere(leaf, sharding) else leaf
            for leaf, sharding in zip(leaves, self.in_shardings, strict=True)
        ]
        if all(new is old for new, old in zip(moved, leaves)):
            raise error
        return self._run(*jax.tree.unflatten(tree, moved))


def achieved(compiled, step: PlannedStep) -> tuple[Difference, ...]:
    """Where the `compiled` step's inputs and outputs lie otherwise than `step` planned.

    Inputs that the program does not use have no layout and are left out.
    """
    traced = step.traced
    ins = traced.in_tree.flatten_up_to(compiled.input_shardings[0])
    outs = traced.out_tree.flatten_up_to(compiled.output_shardings)
    borders = (
        (traced.in_paths, traced.in_avals, step.in_shardings, ins),
        (traced.out_paths, traced.out_avals, step.out_shardings, outs),
    )
    return tuple(
        Difference(path, want, got)
        for border in borders
        for path, aval, want, got in zip(*border, strict=True)
        if want is not None and got is not None and not got.is_equivalent_to(want, aval.ndim)
    )


def as_planned(step: Any) -> Callable:
    """A compiled step. PlanError where the compiler laid it out otherwise than planned."""
    found = achieved(step.compiled, step) if isinstance(step, PlannedStep) else ()
    if found:
        said = "; ".join(f"{d.path}: planned {d.planned}, got {d.achieved}" for d in found[:3])
        raise PlanError(f"{len(found)} tensors are not laid out as planned: {said}")
    return step


def argument_types(args: tuple) -> Any:
    """What a compiled step depends on of its dynamic arguments: their tree, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((np.shape(leaf), _dtype(leaf)) for leaf in leaves)


# --- helpers ----------------------------------------------------------------------------------


def _is_default_device(mesh) -> bool:
    """Whether `mesh` is the one device that `jax.jit` runs on when nothing is said."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return False
    with jax.ensure_compile_time_eval():  # also inside another jit
        return set(mesh.devices.flat) == jax.numpy.zeros(()).devices()


def _plain_jit(traced: Traced, donate: tuple[int, ...], compiler_options):
    """`jax.jit` of the user's own function, with the user's static arguments."""
    step: Any = traced.step
    options: dict[str, Any] = {**traced.static_options, "compiler_options": compiler_options}
    names = [traced.arg_names[i] for i in donate]
    if numbers := [traced.position(name) for name in names if name not in traced.keywords]:
        options["donate_argnums"] = numbers
    if keywords := [name for name in names if name in traced.keywords]:
        options["donate_argnames"] = keywords
    plain = step.__wrapped__ if _compat.is_jitted(step) else step
    return jax.jit(with_changes(plain, traced.changes) if traced.changes else plain, **options)


def donated_arguments(traced: Traced, layouts: Layouts | None) -> tuple[int, ...]:
    """Which arguments give up their buffers when the user says nothing else: see `compile_step`."""
    keeps = set(range(len(traced.in_avals)))
    if traced.donated:
        keeps = {i for i in keeps if traced.donated[i]}
    else:
        keeps = {
            i
            for i, o in traced.state_pairs
            if layouts is None or layouts.inputs[i] == layouts.outputs[o]
        }
    leaves: dict[int, list[int]] = {}
    for i, arg in enumerate(traced.arg_of_input):
        leaves.setdefault(arg, []).append(i)
    return tuple(arg for arg, inputs in leaves.items() if keeps.issuperset(inputs))


def _shardings(specs, paths, avals, mesh, what: str) -> tuple:
    """One sharding (None: left to the compiler) per flat input or output."""
    if len(specs) != len(paths):
        raise PlanError(f"the plan has {len(specs)} {what} layouts, the step {len(paths)} {what}s")
    return tuple(
        None if spec is None else checked_sharding(mesh, spec, path, aval.shape)
        for spec, path, aval in zip(specs, paths, avals)
    )


def checked_sharding(mesh, spec: Spec, path: str, shape: tuple[int, ...]):
    """`named_sharding`, or PlanError if the array `path` of `shape` can not be stored that way."""
    if len(spec) != len(shape):
        raise PlanError(f"{path} of shape {shape} has {len(shape)} dims, its layout {spec} not")
    try:
        sharding = named_sharding(mesh, spec)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    for dim, (size, axes) in enumerate(zip(shape, spec)):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise PlanError(
                f"{path} of shape {shape}: dim {dim} of size {size} can not be stored in {parts} "
                f"equal parts along {axes}; pad it to {-(-size // parts) * parts}, or keep it whole"
            )
    return sharding


def _check_types(traced: Traced, tree, leaves) -> None:
    if tree != traced.in_tree:
        raise MismatchError(
            "the arguments form another pytree than the one planned for (static fields count: a "
            "state with a new optimizer object is another one); plan the step for these arguments"
        )
    for path, aval, leaf in zip(traced.in_paths, traced.in_avals, leaves):
        shape, dtype = np.shape(leaf), _dtype(leaf)
        if shape != aval.shape or dtype != aval.dtype:
            raise MismatchError(
                f"{path} is {dtype}{list(shape)}, planned for {aval.dtype}{list(aval.shape)}: plan "
                "the step for these arguments"
            )


def _dtype(leaf):
    """The dtype that JAX gives `leaf`, a Python scalar or an array; of anything else its type."""
    if hasattr(leaf, "dtype"):
        dtype = leaf.dtype
    elif isinstance(leaf, bool | int | float | complex):
        dtype = jax.dtypes.result_type(leaf)
    else:
        return type(leaf)
    return jax.dtypes.canonicalize_dtype(dtype) if isinstance(dtype, np.dtype) else dtype


def _is_elsewhere(leaf, sharding) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and sharding is not None
        and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    )


def _returned(traced: Traced, donate: tuple[int, ...]) -> tuple:
    """Per donated argument the index or key of the result that is its next value; () if unclear."""
    node = traced.out_tree.node_data()
    if node is None or node[0] not in (tuple, list, dict):
        return ()
    children = traced.out_tree.children()
    keys = node[1] if node[0] is dict else range(len(children))
    spans: dict[tuple, Any] = {}
    start = 0
    for key, child in zip(keys, children, strict=True):
        spans[tuple(range(start, start + child.num_leaves))] = key
        start += child.num_leaves
    becomes = dict(traced.state_pairs)
    leaves = [
        tuple(becomes.get(i) for i, arg in enumerate(traced.arg_of_input) if arg == given)
        for given in donate
    ]
    return tuple(spans[span] for span in leaves) if spans.keys() >= set(leaves) else ()


def _ids_at(places: tuple) -> Callable:
    """A quick function from a tuple or dict to the identities of what stands at `places`."""
    if not places:
        return lambda values: None
    get = operator.itemgetter(*places)
    if len(places) == 1:
        return lambda values: id(get(values))
    return lambda values: tuple(map(id, get(values)))


def _refuse_given_up(args: tuple, paths: tuple[str, ...]) -> None:
    """Raise PlanError for an array that an earlier call took: the CPU client would die of it."""
    for path, leaf in zip(paths, jax.tree.leaves(args)):
        held = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if held and leaf.is_deleted():
            raise PlanError(
                f"{path} was given up to an earlier call of the step, which made the new state in "
                "its place: go on with what that call returned, or pass donate=False to keep both"
            )


def _unshare(args: tuple, donate: tuple[int, ...], held_by: Callable) -> tuple:
    """`args` with copies in place of donated arrays that hold (`held_by`) what another holds too.

    XLA refuses to take one buffer twice, and the CPU client of jaxlib 0.10 dies of it.
    """
    held: set = set()
    parted = list(args)
    for i in sorted(range(len(args)), key=lambda i: i in donate):  # what stays comes first
        leaves, tree = jax.tree.flatten(args[i])
        shared = []
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                holds = held_by(leaf)
                shared += [n] if i in donate and not held.isdisjoint(holds) else []
                held |= holds
        for n in shared:
            leaves[n] = leaves[n].copy()
        parted[i] = jax.tree.unflatten(tree, leaves) if shared else args[i]
    return tuple(parted)


def _identity(array: jax.Array) -> set:
    return {id(array)}


def _buffers(array: jax.Array) -> set:
    """(device, address) of the array's buffers on this process."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    shards = (shard for shard in array.addressable_shards if shard.data.size)
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards}
