"""The driver: trace -> graph -> space -> search over meshes -> plan -> layouts.

The only module that knows all stages. Each stage's seconds are in the plan.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxscaler import _compat
from jaxscaler.cache import Cache, cache_key
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import Mesh, candidate_meshes, named_mesh
from jaxscaler.cost.memory import live_buffers, rules_for
from jaxscaler.errors import ConstraintError, InfeasibleError, PlanError
from jaxscaler.exchange import exchanged
from jaxscaler.explain import explanation
from jaxscaler.fit import fitted
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import Folded, fold
from jaxscaler.graph.ir import BATCH, STATE_ROLES, OpGraph
from jaxscaler.graph.labels import factor_labels
from jaxscaler.loops.asked import loop_lines
from jaxscaler.loops.planner import plan_with_loops
from jaxscaler.lower.emit import emit, rows_of
from jaxscaler.lower.layouts import Layouts
from jaxscaler.lower.step import PlannedStep, donated_arguments
from jaxscaler.plan import Plan, Search
from jaxscaler.program import Statement, if_possible
from jaxscaler.program_text import as_program
from jaxscaler.replan import Again, plan_with_recomputation
from jaxscaler.report import describe
from jaxscaler.rewrite.changes import Change
from jaxscaler.search import Best, Clock, Progress, distinct_meshes
from jaxscaler.solve import warm
from jaxscaler.space.annotations import NOBODY, Annotations, Author, pins_of
from jaxscaler.space.build import build_space
from jaxscaler.space.nodes import Node, Space
from jaxscaler.space.pins import Pin, PinFilter, Pins
from jaxscaler.space.problem import model
from jaxscaler.trace import Traced
from jaxscaler.verify.folded import folded_step
from jaxscaler.why import LaterSession, Session

MEMORY = 0.92  # share of a device's memory that a plan may fill
TIME_LIMIT = 60.0  # seconds of search


@dataclass(frozen=True)
class Planned:
    """A traced step with its graph and its plan."""

    traced: Traced
    graph: OpGraph
    folded: Folded
    space: Space
    plan: Plan
    rows: tuple[np.ndarray, ...]

    def layouts(self) -> Layouts:
        """Specs by position: what `lower` needs."""
        return emit(self.graph, self.folded, self.space, self.plan.axes, self.rows)

    def lower(self, platform: str, folded: bool = False) -> Any:
        """The planned step as a `jax.stages.Lowered` for a platform, on a mesh without devices.

        `folded`: without its repeated layers, which is enough to count collectives.
        """
        traced, layouts = self.traced, self.layouts()
        if folded:
            graph = replace(self.graph, barriers=())
            layouts = emit(graph, self.folded, self.space, self.plan.axes, self.rows)
            traced, layouts = folded_step(traced, self.graph, self.folded, layouts)
        donate = donated_arguments(self.traced, layouts)
        mesh = _compat.abstract_mesh(self.plan.mesh_axes)
        return PlannedStep(traced, layouts, mesh, donate, None).lower(platform)

    @property
    def state_arguments(self) -> tuple[int, ...]:
        """Indices into `traced.arg_names` of the arguments that hold state."""
        return self._arguments(STATE_ROLES)

    @property
    def batch_arguments(self) -> tuple[int, ...]:
        """The same of the arguments that hold batches: no state, and not scalars alone."""
        state = self.state_arguments
        return tuple(arg for arg in self._arguments((BATCH,), 1) if arg not in state)

    def _arguments(self, roles: tuple[str, ...], rank: int = 0) -> tuple[int, ...]:
        args = zip(self.traced.arg_of_input, (self.graph.values[v] for v in self.graph.inputs))
        return tuple(sorted({a for a, v in args if v.role in roles and len(v.shape) >= rank}))


@dataclass(frozen=True)
class _Skeleton:
    graph: OpGraph
    folded: Folded
    space: Space
    fingerprint: str


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: a big graph is all live, and walking it is dearer than making it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what was made counts as old, unwalked
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@_no_collection()
def plan_step(
    traced: Traced,
    cluster: Cluster,
    *,
    constraints: Sequence[Statement | Plan] | Plan | str | Path = (),
    memory: float = MEMORY,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
    merge: bool = True,
    progress: Progress | None = None,
    follow: Pins | None = None,
    cache: Cache | None = None,
    author: Author = NOBODY,
    loops: bool | Sequence[Change] = False,
    explained: bool = True,
) -> Planned:
    """Search the plan space of a traced step on a cluster.

    `constraints`: lines of the language, or the path of a YAML file of them; a plan among them is
    kept wherever it still fits. `memory`: share of the device's memory that may be filled.
    `time_limit`: seconds of search, after which the best plan found is returned with its gap.
    `merge=False` lets equal layers differ. `follow`: state lies where these pins say. `cache`:
    where the plan may be found from earlier, and is kept. `author`: the mesh and the specs that the
    user says. `loops`: whether to look for loops over parts of the forward pass of marked losses
    (co-shards, gradient accumulation), or those to take. Raises InfeasibleError, saying how much
    memory would do, and ConstraintError on a clash, both, if `explained`, with a smallest part of
    the program that leaves no plan.
    """
    say = progress or (lambda phase, detail: None)
    program, kept_axes = _program(constraints)
    if not isinstance(memory, int | float) or not 0 < memory <= 1:
        raise ConstraintError(
            f"memory={memory!r}: the share of a device's memory, above 0 and at most 1"
        )
    if not warm.cache_info().currsize:
        say("solver", "compiled functions are loaded, or made once per installation, in a minute")
    warm()  # or the first search's time limit would pay for that
    clock = Clock()
    if traced.changes:  # by an earlier plan
        traced = traced.changed(())
    if follow is not None:
        pinned = _pins_of_inputs(follow, traced)
        traced = _with_roles(traced, [(traced.in_paths[i], pin.role) for i, pin in pinned.items()])
    say("graph", f"{len(traced.jaxpr.eqns)} equations")
    graph = build(traced)
    written, (traced, rest) = traced, exchanged(traced, program, graph)
    if traced is not written:
        graph = build(traced)
    clock.add("graph")

    def as_it_is(step, its_graph, lines, memory, time_limit, again=None, mesh=None, ask=None):
        return _search_plan(
            step, its_graph, cluster, lines, kept_axes, memory, time_limit, seed, merge, follow,
            author, clock, say, not explained, again, mesh, ask,
        )  # fmt: skip

    # lines that ask for loops: without a marked loss they are refused as any that say too much
    others = loop_lines(rest)[1] if traced.losses else rest

    def with_recomputation(step, its_graph, seconds):
        return plan_with_recomputation(
            as_it_is, step, its_graph, others, memory, seconds,
            rules_for(cluster.device.vendor, cluster.device.name), say,
        )  # fmt: skip

    search = functools.partial(
        plan_with_loops, with_recomputation, as_it_is, traced, graph, rest, loops, cluster,
        memory, time_limit, rules_for(cluster.device.vendor, cluster.device.name), say,
    )  # fmt: skip
    if explained:
        search = functools.partial(_told, search)

    def with_more(lines: Sequence[Statement]) -> Plan:
        return plan_step(
            traced, cluster, constraints=(*program, *lines), memory=memory, time_limit=time_limit,
            seed=seed, merge=merge, follow=follow, author=author, loops=loops, explained=False,
        ).plan  # fmt: skip

    search = functools.partial(_asked, search, with_more, tuple(map(str, program)))
    if cache is None:
        return search()
    key = cache_key(
        graph, cluster.to_dict(), *((str(line), line.source) for line in program), kept_axes,
        memory, time_limit, seed, merge, follow, author, loops,
    )  # fmt: skip
    kept, fault = cache.load(key)
    if kept is not None:
        try:
            found = _follow(traced, graph, replace(kept, session=LaterSession(search)))
            say("cache", f"the plan of an earlier search, {kept.search.seconds:.1f} s")
            return found
        except PlanError as error:
            fault = f"plan cache: {error}; searched again"
    found = search()
    faults = [text for text in (fault, cache.store(key, found.plan)) if text]
    return replace(found, plan=replace(found.plan, notes=(*found.plan.notes, *faults)))


def _asked(search: Callable[[], Planned], again: Callable, said: tuple[str, ...]) -> Planned:
    """What `search` finds; its session can plan the step as it was written once more."""
    found = search()
    session = replace(found.plan.session, again=again)
    return replace(found, plan=replace(found.plan, session=session, constraints=said))


def _told(search: Callable[[], Planned]) -> Planned:
    """What `search` finds. Where that is no plan it is explained, once for all searches."""
    try:
        return search()
    except (ConstraintError, InfeasibleError) as error:
        text = explanation(error)
        told = type(error)("\n".join(filter(None, (str(error), text))))
        told.__dict__.update(error.__dict__)  # how much memory is needed
        raise told from None


def _search_plan(
    traced, graph, cluster, program, kept_axes, memory, time_limit, seed, merge, follow, author,
    clock, say, brief, again: Again | None = None, mesh: Mesh | None = None,
    ask: Callable | None = None,
) -> Any:  # fmt: skip
    """The plan of a step as it is, on `mesh` or all. With `again`: what was found, and of what;
    with `ask`: what that says of the session, not yet searched, and of the same."""
    said = pins_of(graph, author)
    skeleton = skeleton_of(traced, graph, merge, again)
    pins = _pinned(follow, traced, skeleton)
    own = Annotations(said, graph, skeleton.folded, skeleton.space)
    if own.clash or (pins is not None and pins.clash):
        skeleton = skeleton_of(traced, graph, False, again)
        pins = _pinned(follow, traced, skeleton)
        own = Annotations(said, graph, skeleton.folded, skeleton.space)
    clock.add("space")
    limit = cluster.device.hbm_bytes * memory
    if author.axes is None:
        meshes = distinct_meshes(candidate_meshes(cluster))
    else:
        meshes = [named_mesh(cluster, author.axes)]
    if follow is not None:
        if author.axes is not None and not follow.fits(meshes[0]):
            raise PlanError(
                f"the plan to follow is for a mesh {dict(follow.axes)}, not {meshes[0]}: leave the "
                "mesh out, that of the plan is taken"
            )
        fitting = [mesh for mesh in meshes if follow.fits(mesh)]
        meshes = fitting or [named_mesh(cluster, follow.axes)]
    elif kept_axes is not None:  # a plan as a constraint: on its mesh, if there is one
        meshes = [m for m in meshes if tuple(zip(m.names, m.shape)) == kept_axes] or meshes
    if mesh is not None:
        meshes = [mesh]

    def others(node: Node, rows: np.ndarray, mesh: Mesh, allowed, bound) -> np.ndarray:
        allowed = own.mask(node, rows, mesh, allowed, bound)
        return allowed if pins is None else pins.mask(node, rows, mesh, allowed)

    folded, space = skeleton.folded, skeleton.space
    lives = live_buffers(graph, folded, rules_for(cluster.device.vendor, cluster.device.name))
    once, what = model(graph, folded, space, lives), None
    if again is not None:
        once, what = again.on(once, cluster.device.vendor)
    clock.add("space")
    session = Session(once, cluster, tuple(meshes), program, limit, time_limit, seed, others,
                      brief=brief)  # fmt: skip
    if ask is not None:
        return ask(session, what)
    try:
        found = session.search(clock, say, explained=False)
        if again is not None:
            return found, what
        found = fitted(session, found, clock, say)
    except (ConstraintError, InfeasibleError) as error:
        error.session = session
        raise
    bound, best = found.bound, found.best
    tried, lower, status = found.tried, found.lower, found.status
    clock.add("solve")
    say("plan", f"{best.seconds:.3g} s a step on {best.priced.mesh}")
    reported = (*_filled(best), *bound.report())
    for note in reported:
        if note.endswith("matches nothing"):
            warnings.warn(note, stacklevel=2)
    search = Search(status, lower, max(0.0, 1 - lower / best.seconds) if best.seconds else 0.0,
                    clock.total(), clock.phases(), tried)  # fmt: skip
    plan = Plan(
        cluster=cluster.to_dict(),
        axes=tuple(zip(best.priced.mesh.names, best.priced.mesh.shape)),
        decisions=describe.decisions(best.priced, best.choice),
        tensors=describe.tensors(best.priced, best.choice),
        traffic=describe.traffic(best.priced, best.choice, cluster.device),
        predicted=describe.prediction(best.priced, best.choice, cluster.device, limit),
        search=search,
        constraints=tuple(str(line) for line in program),
        changes=traced.changes,
        notes=(*graph.notes, *reported, *describe.remarks(best.priced, best.choice)),
        compiler_options=_compiler_options(cluster),
        fingerprint=skeleton.fingerprint,
        session=replace(session, best=best, lower=lower),
    )
    rows = tuple(r[c] for r, c in zip(best.priced.strategies, best.choice))
    return _tied(Planned(traced, graph, skeleton.folded, skeleton.space, plan, rows))


def _filled(best: Best) -> list[str]:
    return [f"hole {name} = {n}" for name, n in best.variant.holes.items()]


def listed(constraints: Any) -> tuple[Statement | Plan, ...]:
    """Constraints as they may be given: a line or plan, several, or the path of a YAML file.

    Raises ConstraintError for what is no line, and for what is wrong with the file.
    """
    if isinstance(constraints, Plan):
        return (constraints,)
    if isinstance(constraints, str | Path | Statement):
        return as_program(constraints)
    found = tuple(constraints)
    as_program(x for x in found if not isinstance(x, Plan))
    return found


def _program(constraints: Any) -> tuple[tuple[Statement, ...], tuple[tuple[str, int], ...] | None]:
    """(lines, the mesh axes of a plan that is among the constraints)."""
    lines: list[Statement] = []
    axes = None
    for given in listed(constraints):
        if isinstance(given, Plan):
            axes = given.axes
            lines += [if_possible(line) for line in given.program()]
        else:
            lines.append(given)
    return tuple(lines), axes


def _tied(planned: Planned) -> Planned:
    """The same, its plan with the step that it is for."""
    return replace(planned, plan=replace(planned.plan, step=planned))


def follow_plan(traced: Traced, plan: Plan, search: Callable[[], Planned] | None = None) -> Planned:
    """The planned step of a saved plan: no search. Raises PlanError where the plan does not fit.

    `search`: how to search for it, when the plan is asked why.
    """
    plan = replace(plan, session=LaterSession(search)) if search else plan
    known = set(traced.in_paths)
    traced = _with_roles(traced, [(t.path, t.role) for t in plan.tensors if t.path in known])
    return _follow(traced, build(traced), plan)


def _follow(traced: Traced, graph: OpGraph, plan: Plan) -> Planned:
    if plan.changes != traced.changes:
        if plan.changes and not traced.losses:
            raise PlanError(
                "the plan changes the forward pass of a loss that jaxscaler.value_and_grad marks, "
                "and this step has none: use it in the step, or plan this step again"
            )
        traced = traced.rewritten(plan.changes)
        graph = build(traced)
    skeletons = (skeleton_of(traced, graph, merge) for merge in (True, False))
    skeleton = next((s for s in skeletons if s.fingerprint == plan.fingerprint), None)
    if skeleton is None:
        raise PlanError(
            "the plan was made for another step or other argument types: plan this step again"
        )
    decided = {d.subject: d for d in plan.decisions}
    rows = rows_of(skeleton.space.nodes, decided, tuple(name for name, _ in plan.axes))
    known = tuple(row for row in rows if row is not None)
    if len(known) < len(rows):
        missing = [n.name for n, row in zip(skeleton.space.nodes, rows) if row is None]
        raise PlanError(f"the plan decides nothing for {missing[:3]}: plan this step again")
    return _tied(Planned(traced, graph, skeleton.folded, skeleton.space, plan, known))


def skeleton_of(
    traced: Traced, graph: OpGraph, merge: bool, again: Again | None = None
) -> _Skeleton:
    folded = fold(graph, merge)
    shared = frozenset() if again is None else again.shared(folded)
    space = build_space(graph, folded, factor_labels(graph, folded), shared)
    types = [(graph.values[v].shape, graph.values[v].dtype) for v in graph.inputs]
    names = [node.name for node in space.nodes]
    text = repr((traced.in_paths, types, traced.out_paths, len(graph.ops), names))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _Skeleton(graph, folded, space, fingerprint)


def _pinned(follow: Pins | None, traced: Traced, skeleton: _Skeleton) -> PinFilter | None:
    if follow is None:
        return None
    pinned = _pins_of_inputs(follow, traced)
    return PinFilter(pinned, skeleton.graph, skeleton.folded, skeleton.space)


def _pins_of_inputs(follow: Pins, traced: Traced) -> dict[int, Pin]:
    shapes = [aval.shape for aval in traced.in_avals]
    return follow.of_arguments(traced.in_paths, shapes, traced.arg_of_input)


def _with_roles(traced: Traced, roles: Sequence[tuple[str, str]]) -> Traced:
    """The step with these roles of its arguments, by path; what the user said of them counts."""
    return replace(traced, roles=(*roles, *traced.roles))


def _compiler_options(cluster: Cluster) -> dict[str, Any]:
    """What the price of hidden communication assumes of the compiler."""
    if cluster.device.vendor == "NVIDIA":
        return {"xla_gpu_enable_latency_hiding_scheduler": True}
    return {}
