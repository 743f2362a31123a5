"""A planned pipeline that runs: the step on the user's own pytrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscaler import _compat
from jaxscaler.cluster.mesh import device_grid
from jaxscaler.errors import ClusterError, PlanError
from jaxscaler.lower.executor import Executor
from jaxscaler.lower.sites import Planned
from jaxscaler.lower.step import MismatchError, argument_types
from jaxscaler.pipeline.beside import home_of, jit_in_places
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.rewrite.parts import Leaf


@jax.tree_util.register_pytree_node_class
class Rows:
    """An array [rows, ...] whose rows are on the devices of several stages, in order.

    A pytree of its parts, each a `jax.Array`: it can be mapped over and saved as it is. `whole()`
    brings it to the host.
    """

    def __init__(self, parts: Sequence[Any]):
        self.parts = tuple(parts)

    def tree_flatten(self) -> tuple:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: Any, parts: Sequence[Any]) -> Rows:
        return cls(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def whole(self) -> np.ndarray:
        """All rows, as a NumPy array."""
        return np.concatenate([np.asarray(part) for part in self.parts])

    def __repr__(self) -> str:
        return f"Rows({self.dtype}{list(self.shape)} in {len(self.parts)} parts)"


class PipelineStep:
    """A step under a `PipelinePlan`, on the devices at hand: called as the user's step is.

    Each leaf of the state lies on the devices of its stage; state that is stacked over the layers
    of a scan comes as `Rows`. Where stages have copies (Chimera), a leaf is one array that lies on
    the devices of both. State that is given is written over (`donate=False`: it is kept).
    Raises ClusterError if there are too few devices, PlanError in one of several processes, and
    MismatchError for arguments of other types than the planned ones.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        devices: Sequence[jax.Device] | None = None,
        donate: bool = True,
    ):
        if plan.parts is None:
            raise PlanError(
                "a pipeline's plan that was read from a file needs its step: pipeline.with_step"
            )
        self.plan = plan
        self.staged = plan.parts.staged
        self.whole = plan.parts.whole
        devices = list(jax.devices() if devices is None else devices)
        needed = max(first + count for first, count in zip(plan.first, plan.devices))
        if len(devices) < needed:
            raise ClusterError(
                f"the pipeline is for {needed} devices, and {len(devices)} are present"
            )
        sites = [
            Planned(step, planned, _mesh(each.mesh_axes, devices[first : first + count]))
            for copy in plan.sites
            for (first, count), each, step, planned in zip(
                copy, plan.plans, plan.parts.steps, plan.parts.planned
            )
        ]
        self.executor = Executor(self.staged, sites, plan.order, donate)
        self.meshes = self.executor.meshes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = self.whole
        args = traced.arguments(args, kwargs)
        leaves = traced.in_tree.flatten_up_to(args)
        flat = [self._part(leaves[leaf.position], leaf) for leaf in self.staged.inputs]
        results = self.executor(flat)
        made = _joined(self.staged.results, results, len(traced.out_avals))
        return jax.tree.unflatten(traced.out_tree, made)

    def init(self, create: Callable, *args: Any) -> Any:
        """`create(*args)`, the state of the step, each leaf made on the devices of its stage."""
        traced = self.whole
        closed, shapes = jax.make_jaxpr(create, return_shape=True)(*args)
        count = len(jax.tree.leaves(shapes))
        state = [n for n, leaf in enumerate(self.staged.inputs) if leaf.position < count]
        avals = traced.in_avals[:count]
        if [(x.shape, x.dtype) for x in closed.out_avals] != [(x.shape, x.dtype) for x in avals]:
            raise MismatchError(
                "init: what is created is not the first arguments of the planned step"
            )
        inputs = self.staged.traced.jaxpr.jaxpr.invars
        made: dict[int, Any] = {}
        for place in range(len(self.meshes)):
            mine = [n for n in state if self._home(inputs[n]) == place]
            shardings = [self._sharding(inputs[n]) for n in mine]
            chosen = [self.staged.inputs[n] for n in mine]

            def part(*leaves: Any, chosen: Sequence[Leaf] = chosen) -> list:
                results = _compat.emit(closed, leaves)
                return [_rows(results[leaf.position], leaf) for leaf in chosen]

            given = [jnp.asarray(x) if not isinstance(x, jax.Array) else x
                     for x in jax.tree.leaves(args)]  # fmt: skip
            whole = jax.sharding.NamedSharding(self.meshes[place], jax.sharding.PartitionSpec())
            given = [jax.device_put(x, whole) for x in given]
            if mine:
                made.update(zip(mine, jax.jit(part, out_shardings=shardings)(*given)))
        leaves = _joined([self.staged.inputs[n] for n in state], [made[n] for n in state], count)
        return self._as_arguments(leaves)

    def abstract_state(self) -> Any:
        """The state as a tree of `jax.ShapeDtypeStruct`s with shardings: what to restore into.

        State are the first arguments whose leaves all lie on a stage: one as it is, several as a
        tuple. Raises PlanError if there are none.
        """
        inputs, found = self.staged.traced.jaxpr.jaxpr.invars, []
        for v in inputs:
            sharding = self._sharding(v) if v in self.staged.homes else None
            found.append(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding))
        state = {leaf.position for n, leaf in enumerate(self.staged.inputs)
                 if inputs[n] in self.staged.homes}  # fmt: skip
        count = 0
        for arg in self.whole.in_tree.children():
            if not {*range(count, count + arg.num_leaves)} <= state:
                break
            count += arg.num_leaves
        if not count:
            raise PlanError("no argument of the step is state: it gives back none of what it takes")
        mine = [(leaf, x) for leaf, x in zip(self.staged.inputs, found) if leaf.position < count]
        return self._as_arguments(_joined([leaf for leaf, _ in mine], [x for _, x in mine], count))

    def jit(self, fn: Callable) -> Callable:
        """`fn` for functions on the state: norms, moving averages, summaries.

        It is cut by the stages that its arguments lie on (`pipeline.beside`). Leaves of its results
        that belong to a leaf of the state (same shape, same end of the path; parameters first) lie
        as that one does.
        """
        inputs = self.staged.traced.jaxpr.jaxpr.invars
        roles = {t.path: t.role for plan in self.plan.plans for t in plan.tensors}
        seen: Counter[int] = Counter()
        leaves = {}
        for n, leaf in enumerate(self.staged.inputs):
            path, number = self.whole.in_paths[leaf.position], seen[leaf.position]
            seen[leaf.position] += 1
            if inputs[n] in self.staged.homes:
                role = roles.get(leaf.path(self.whole.in_paths), "")
                path = path if leaf.rows is None else f"{path}/{number}"
                leaves[n] = (path, role, tuple(inputs[n].aval.shape))
        home = home_of(leaves, lambda n: (self._home(inputs[n]), self._sharding(inputs[n])))
        return jit_in_places(fn, self.meshes, home)

    def _as_arguments(self, leaves: Sequence) -> Any:
        """The first arguments that so many leaves fill: one as it is, several as a tuple."""
        found, used = [], 0
        for tree in self.whole.in_tree.children():
            if used == len(leaves) and found:
                break
            some = leaves[used : used + tree.num_leaves]
            found.append(jax.tree.unflatten(tree, some))
            used += tree.num_leaves
        return found[0] if len(found) == 1 else tuple(found)

    def place(self, state: Any) -> Any:
        """`state` (whole arrays) as the step takes it; values as they are."""
        leaves, tree = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, Rows))
        inputs = self.staged.traced.jaxpr.jaxpr.invars
        mine = [
            (n, leaf) for n, leaf in enumerate(self.staged.inputs) if leaf.position < len(leaves)
        ]
        parts = [
            jax.device_put(self._part(leaves[leaf.position], leaf), self._sharding(inputs[n]))
            for n, leaf in mine
        ]
        made = _joined([leaf for _, leaf in mine], parts, len(leaves))
        return jax.tree.unflatten(tree, made)

    def gather(self, state: Any) -> Any:
        """`state` with every leaf whole, as a NumPy array on the host."""
        return jax.tree.map(
            lambda x: x.whole() if isinstance(x, Rows) else np.asarray(x),
            state,
            is_leaf=lambda x: isinstance(x, Rows),
        )

    def _home(self, v: Any) -> int:
        return self.staged.homes.get(v, 0)

    def _sharding(self, v: Any) -> jax.sharding.NamedSharding:
        return self.executor.sharding(v, self._home(v))

    def _part(self, x: Any, leaf: Leaf) -> Any:
        aval = self.whole.in_avals[leaf.position]
        ((shape, dtype),) = (
            argument_types((x,))[1] if not isinstance(x, Rows) else ((x.shape, x.dtype),)
        )
        if shape != aval.shape or dtype != aval.dtype:
            raise MismatchError(
                f"{self.whole.in_paths[leaf.position]} is {dtype}{list(shape)}, "
                f"planned for {aval.dtype}{list(aval.shape)}: plan the step for these arguments"
            )
        if not isinstance(x, Rows):
            return _rows(x, leaf)
        ends = np.cumsum([part.shape[0] for part in x.parts]).tolist()
        return x.parts[ends.index(leaf.rows[1])] if leaf.rows else x.whole()


def _rows(x: Any, leaf: Leaf) -> Any:
    return x if leaf.rows is None else x[leaf.rows[0] : leaf.rows[1]]


def _joined(leaves: Sequence[Leaf], values: Sequence[Any], count: int) -> list:
    """Values by leaf, parts of one as `Rows`."""
    parts: list[list] = [[] for _ in range(count)]
    for leaf, x in zip(leaves, values):
        parts[leaf.position].append((leaf, x))
    return [
        found[0][1] if found[0][0].rows is None else Rows([x for _, x in found]) for found in parts
    ]


def _mesh(axes: Sequence[tuple[str, int]], devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    names, shape = zip(*axes)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(device_grid(shape, devices), names, axis_types=auto)
