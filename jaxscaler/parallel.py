"""A step that is planned when its types are known, and then runs on the plan's mesh."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxscaler import _compat, planner, processes
from jaxscaler.cache import find_cache
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import device_grid
from jaxscaler.cluster.profile import Profile
from jaxscaler.errors import ClusterError, ConstraintError, PlanError
from jaxscaler.given import (
    StepOnObjects,
    as_cluster,
    author_of,
    traced_step,
    without_objects,
)
from jaxscaler.lower.auxiliary import jit_on_state
from jaxscaler.lower.state import abstract_leaves, init_state, place
from jaxscaler.lower.step import (
    MismatchError,
    argument_types,
    as_planned,
    compile_step,
    donated_arguments,
)
from jaxscaler.plan import Plan
from jaxscaler.program import Statement
from jaxscaler.report.export import to_python
from jaxscaler.space.pins import Pins
from jaxscaler.trace import Traced, refuse_other_devices
from jaxscaler.verify.loop import plan_verified


class ParallelStep(StepOnObjects):
    """A step that is planned at the first call, or by `plan_for` or `init`, and then runs."""

    def __init__(
        self,
        step: Callable,
        *,
        cluster: str | Cluster | None = None,
        constraints: Sequence[Statement | Plan] | Plan | str | Path = (),
        memory: float = planner.MEMORY,
        time_limit: float = planner.TIME_LIMIT,
        seed: int = 0,
        progress: planner.Progress | None = None,
        devices: Sequence[jax.Device] | None = None,
        plan: Plan | str | Path | None = None,
        donate: bool | tuple[int, ...] = True,
        roles: Mapping[str, str] = {},
        follow: ParallelStep | Plan | None = None,
        cache: bool | str | Path = True,
        mesh: Any = None,
        specs: Mapping[str, Any] = {},
        profile: Profile | str | Path | None = None,
        loops: bool = True,
        verify: bool | int | str = False,
    ):
        functools.update_wrapper(self, step)
        self.author = author_of(mesh, specs)
        self._given_mesh = mesh
        self._own_mesh = mesh if isinstance(mesh, jax.sharding.Mesh) else None
        if self._own_mesh is not None and devices is None:
            devices = list(self._own_mesh.devices.flat)
        self.step = step
        self.given = Plan.load(plan) if isinstance(plan, str | Path) else plan
        if self.given is not None and follow is not None:
            raise PlanError("plan= says all of the layouts already: leave follow= or plan= out")
        if self.given is not None and specs:
            raise PlanError("plan= says all of the layouts already: leave specs= or plan= out")
        if self.given is not None and profile is not None:
            raise PlanError("profile= prices a search, plan= needs none: leave one of them out")
        if self.given is not None and verify:
            raise PlanError("verify= may plan again, plan= is kept: use plan.verify() instead")
        self.verify = verify
        if isinstance(follow, ParallelStep):
            cluster = cluster or follow.cluster
            devices = follow.devices if devices is None else devices
        elif cluster is None and (known := self.given or follow) is not None:
            cluster = Cluster.from_dict(known.cluster)
        self.devices: Sequence[jax.Device] | None = devices
        self.cluster: Cluster = as_cluster(cluster, devices, profile)
        self.donate = {True: None, False: ()}[donate] if isinstance(donate, bool) else donate
        self.roles = roles
        self.planned: planner.Planned | None = None
        options: dict[str, Any] = dict(
            constraints=planner.listed(constraints),
            memory=memory,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
            loops=loops,
        )
        self._search: functools.partial[planner.Planned] = functools.partial(
            planner.plan_step,
            cluster=self.cluster,
            cache=find_cache(cache),
            author=self.author,
            **options,
        )
        # the same step elsewhere
        self._like = functools.partial(
            ParallelStep,
            step,
            **options,
            donate=donate,
            roles=roles,
            cache=cache,
            mesh=mesh,
            specs=specs,
            profile=profile,
            verify=verify,
        )
        self._follow = follow
        self._compiled: Callable | None = None
        self._run: Callable | None = None  # what was compiled, once it is known to be as planned
        self._runs: dict[Any, Callable] = {}  # the same by types of the arguments

    @property
    def plan(self) -> Plan:
        """The plan. PlanError before there is one."""
        return self._known().plan

    def plan_for(self, create: Callable, *args: Any, batch: Any, **kwargs: Any) -> Plan:
        """Plan for `step(create(*args), batch)` on abstract values; nothing is allocated.

        `batch`: arrays or `jax.ShapeDtypeStruct`s; a tuple stands for several arguments. So does a
        tuple made by `create`, of a step that takes as many: `(model, optimizer)`.
        """
        made = jax.eval_shape(without_objects(create), *args, **kwargs)
        rest = batch if isinstance(batch, tuple) else (batch,)
        return self._plan(*self._meet((*self._as_arguments(made, rest), *rest), {})).plan

    def init(self, create: Callable, *args: Any, batch: Any = None) -> Any:
        """`create(*args)`, every leaf made where the plan wants it; plans first if need be.

        The state is of the planned tree, whatever objects `create` makes anew for its static
        fields.
        """
        if self.planned is None:
            if batch is None:
                raise PlanError("init: give batch=, so that the step is planned before its state")
            self.plan_for(create, *args, batch=batch)
        found = self._known()
        traced = found.traced
        made = jax.eval_shape(create := without_objects(create), *args)
        first, size = traced.in_tree.children()[0], len(jax.tree.leaves(made))
        one = first.num_leaves == size and (first.node_data() or (None,))[0] is tuple
        several = type(made) is tuple and not one
        trees = traced.in_tree.children()[: len(made) if several else 1]
        specs = [
            spec
            for spec, arg in zip(found.layouts().inputs, traced.arg_of_input)
            if arg < len(trees) and spec is not None
        ]
        leaves = iter(jax.tree.leaves(init_state(create, args, specs, self.mesh())))
        planned = tuple(
            jax.tree.unflatten(tree, [next(leaves) for _ in range(tree.num_leaves)])
            for tree in trees
        )
        state = planned if several else planned[0]
        return self._nnx.give(state) if self._nnx else state

    def abstract_state(self) -> Any:
        """The state as a tree of `jax.ShapeDtypeStruct`s with shardings: what to restore into.

        State are the arguments that hold parameters or optimizer state: one as it is, several as a
        tuple. Nothing is allocated.
        """
        found, mesh = self._known(), self.mesh()
        traced = found.traced
        leaves = abstract_leaves(traced.in_paths, traced.in_avals, found.layouts().inputs, mesh)
        args = jax.tree.unflatten(traced.in_tree, leaves)
        state = tuple(args[i] for i in found.state_arguments)
        if not state:
            raise PlanError("no argument of the step is state; `roles` says which are")
        tree = state if len(state) > 1 else state[0]
        return self._nnx.give(tree) if self._nnx else tree

    def place(self, state: Any) -> Any:
        """`state` (arrays in the tree of `abstract_state`) where the plan wants it, values as is.

        Raises a PlanError that names the leaf which is not of the planned shape or dtype.
        """
        wanted = self.abstract_state()
        if self._nnx is None:
            return place(state, jax.tree.leaves(wanted))
        state, wanted = self._nnx.take((state, wanted))
        return self._nnx.give(place(state, jax.tree.leaves(wanted)))

    def move(self, state: Any, **options: Any) -> tuple[ParallelStep, Any]:
        """The step planned anew for other devices, and `state` moved there; values as they are.

        `options`: those of `parallelize` that say where (`cluster`, `devices`, `plan`; none of
        them: the devices that JAX sees now), and any that shall be other than they were. `state`
        stays alive: both have their memory until it is deleted.
        """
        if "plan" in options:  # which is not searched
            options = {"profile": None, "verify": False, **options}
        step = self._like(**options)
        step.step, step._nnx = self.step, self._nnx
        step._plan_traced(self._known().traced)
        return step, step.place(state)

    def jit(self, fn: Callable, **options: Any) -> Callable:
        """`jax.jit(fn, **options)` for functions on the state: norms, moving averages, summaries.

        Leaves of its results that belong to a leaf of the state (same shape, same end of the path;
        parameters first) lie as that one does. Arguments that are not on the mesh are moved there.
        """
        return jit_on_state(fn, Pins.of(self.plan), self.mesh(), options)

    def feed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of `loader` as arrays that lie as planned, each made one ahead of its use.

        In several processes each gives its own rows of a batch, in the order of the processes, or
        every one the whole batch; shapes tell which. A step of several batch arguments takes tuples
        of them. PlanError before there is a plan, and on a batch of another tree.
        """
        found = self._known()
        wanted, specs = found.batch_arguments, found.layouts().inputs
        return processes.feed(loader, found.traced, wanted, specs, self.mesh())

    def to_python(self) -> str:
        """The plan as plain JAX source, without jaxscaler; what it can not say is in it too."""
        found = self._known()
        if self._nnx:
            raise PlanError(
                "a step on flax.nnx objects has no form in plain JAX: its arguments are taken "
                "apart by jaxscaler; plan.to_rules() gives the layouts of its arrays"
            )
        layouts = found.layouts()
        donate = donated_arguments(found.traced, layouts) if self.donate is None else self.donate
        return to_python(found.plan, found.traced, found.graph, layouts, donate)

    def mesh(self) -> jax.sharding.Mesh:
        """The plan's mesh on the devices at hand. ClusterError if there are too few."""
        axes = self.plan.mesh_axes
        names, shape = zip(*axes)
        size = math.prod(shape)
        devices = list(jax.devices() if self.devices is None else self.devices)
        if len(devices) < size:
            raise ClusterError(
                f"the plan is for {size} devices ({self.cluster.name}), but {len(devices)} are "
                "present; plan for those (cluster=None), or run where there are as many"
            )
        own = self._own_mesh
        if own is not None and dict(axes) == {n: s for n, s in own.shape.items() if s > 1}:
            grid = own.devices.reshape(shape)  # in the order that the user gave them
        else:
            grid = device_grid(shape, devices[:size])
        return jax.sharding.Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def compiled(self) -> Any:
        """The planned step on the devices at hand: a `lower.step.PlannedStep`, or plain jit."""
        if self._compiled is None:
            self._compiled = self._compile(self._known())
        return self._compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.planned is None:
            self._plan(*self._meet(args, kwargs))
        if self._nnx is None:
            return self._call(*args, **kwargs)
        args, kwargs, references = self._nnx.take_call(self.step, args, kwargs)
        return self._nnx.renew(references, self._call(*args, **kwargs))

    # -- inside ------------------------------------------------------------------------------------

    def _known(self) -> planner.Planned:
        if self.planned is None:
            raise PlanError(
                "there is no plan yet: call plan_for(...), init(...), or the step itself first"
            )
        return self.planned

    def _trace(self, args: tuple, kwargs: dict[str, Any]) -> Traced:
        device = self.cluster.device
        return traced_step(self.step, args, kwargs, self.roles, self._given_mesh, device)

    def _plan(self, args: tuple, kwargs: dict[str, Any]) -> planner.Planned:
        return self._plan_traced(self._trace(args, kwargs))

    def _plan_traced(self, traced: Traced) -> planner.Planned:
        refuse_other_devices(traced.jaxpr, self.cluster.num_devices)
        self._compiled = self._run = None
        self._runs = {}
        follow = self._follow.plan if isinstance(self._follow, ParallelStep) else self._follow
        if self.given is not None:
            given = self.given
            self.planned = processes.agree(
                lambda: planner.follow_plan(traced, given), self._devices()
            )
        else:
            self.planned = self._find(traced, follow=Pins.of(follow) if follow else None)
        return self.planned

    def _compile(self, found: planner.Planned) -> Any:
        mesh, traced = self.mesh(), found.traced
        if not found.plan.axes and self.author.axes:  # traced again, as it is
            traced = replace(traced, step=_compat.run_inside_mesh(traced.step, self._given_mesh))
        return compile_step(
            traced,
            found.layouts() if found.plan.axes else None,
            mesh,
            donate=self.donate,
            compiler_options=self._compiler_options(mesh),
        )

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            traced = self._known().traced
            types = (traced.in_tree, tuple((a.shape, a.dtype) for a in traced.in_avals))
            self._run = self._runs[types] = as_planned(self.compiled())
        try:
            return self._run(*args, **kwargs)
        except MismatchError:
            self._run = self._run_for(args, kwargs)
        return self._run(*args, **kwargs)

    def _run_for(self, args: tuple, kwargs: dict[str, Any]) -> Callable:
        """What runs the step on arguments of other types than the last: of other shapes, or with
        other objects as static fields.

        Planned with the state where it is, once for each. MismatchError if it is another state.
        """
        known = self._known()
        types = argument_types(known.traced.arguments(args, kwargs))
        if types not in self._runs:
            traced = self._trace(args, kwargs)
            if _shapes(traced) == _shapes(known.traced):
                found = planner.follow_plan(traced, known.plan)
            else:
                _refuse_other_state(known.plan, traced)
                found = self._plan_other(traced)
            self._runs[types] = as_planned(self._compile(found))
        return self._runs[types]

    def _plan_other(self, traced: Traced) -> planner.Planned:
        pins = Pins.of(self.plan)
        try:
            return self._find(traced, follow=pins, explained=False)
        except ConstraintError as error:
            warnings.warn(
                f"the constraints allow no plan for arguments of other shapes, which are planned "
                f"without them, the state as before: {error}",
                stacklevel=5,
            )
            return self._find(traced, follow=pins, constraints=())

    def _find(self, traced: Traced, **options: Any) -> planner.Planned:
        """The step with a plan that is searched once, whatever the number of processes."""
        nnx = self._nnx
        author = nnx.with_own_words(self.author, traced) if nnx else self.author
        search = functools.partial(self._search, traced, author=author, **options)
        if self.verify:
            given = self._search.keywords | options
            search = functools.partial(
                plan_verified,
                search,
                self.cluster,
                given["memory"],
                self.verify,
                given["constraints"],
                author,
                given["progress"],
            )
        return processes.share(
            search,
            lambda plan: planner.follow_plan(traced, plan, search),
            self._devices(),
        )

    def _devices(self) -> Sequence[jax.Device]:
        """The devices to run on, as far as processes share them."""
        if not jax.distributed.is_initialized():
            return ()
        devices = jax.devices() if self.devices is None else self.devices
        return list(devices)[: self.cluster.num_devices]

    def _compiler_options(self, mesh: jax.sharding.Mesh) -> dict[str, Any] | None:
        """The plan's compiler options where the devices are of the kind it was priced for."""
        gpu = all(device.platform == "gpu" for device in mesh.devices.flat)
        return dict(self.plan.compiler_options) or None if gpu else None


def _shapes(traced: Traced) -> dict[str, tuple]:
    return {path: (a.shape, a.dtype) for path, a in zip(traced.in_paths, traced.in_avals)}


def _refuse_other_state(plan: Plan, traced: Traced) -> None:
    found = {path: (shape, str(dtype)) for path, (shape, dtype) in _shapes(traced).items()}
    changed = [
        f"{pin.path}: {found.get(pin.path, 'gone')}, planned {pin.shape}"
        for pin in Pins.of(plan).pins
        if pin.path not in found or found[pin.path][0] != pin.shape
    ]
    if changed:
        raise MismatchError(
            f"the step is planned for another state ({'; '.join(changed[:3])}): make another "
            "`parallelize` of it for this one"
        )
