"""Planning with recomputation: where memory binds, what the backward pass makes again is searched
with the layouts, the step is traced anew with that, and planned on the mesh that was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxscaler.cost.memory import Rules
from jaxscaler.errors import ConstraintError, InfeasibleError, OutOfTimeError
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import Folded, fold
from jaxscaler.graph.ir import OpGraph
from jaxscaler.program import HOST, NOWHERE, Line, Statement, Values
from jaxscaler.report.show import size_text
from jaxscaler.rewrite.apply import results_of
from jaxscaler.rewrite.changes import CoShard, Recompute, Segment, around
from jaxscaler.search import Best
from jaxscaler.solve import solve
from jaxscaler.space.again import HOSTED, HOSTS, OFF, RUN, Recomputation, recomputation
from jaxscaler.space.kept import Pair, pairs_of, shared
from jaxscaler.space.problem import Model, Priced
from jaxscaler.space.recompute import changes_of, extended
from jaxscaler.space.segments import segmentations
from jaxscaler.space.subjects import HANDS_ON, Subjects
from jaxscaler.trace import Traced

TOLERANCE = 0.02  # of the price that was searched, within which the changed step's must be
# (share of the memory, whether segments may be whole) of searches, one after the other where the
# changed step needs more than was searched: whole ones hold what they like.
ATTEMPTS = ((1.0, True), (1.0, False), (0.9, False), (0.8, False), (0.7, False))
SHARE = 0.2  # of the time limit, at least, for each way to cut into segments
ENOUGH = 0.01  # above a bound without memory: other borders of segments are not worth a search
WORK = 5.0  # about as many seconds, for a bound without memory
FULL = 0.7  # of the memory: below, other meshes are not searched for what more would give
UNLIMITED = 1e18  # bytes
NEARLY = 0.9  # of the memory: from there on it may well be what decides
HINT = (
    "with jaxscaler.value_and_grad (or grad) in place of jax's in the step, the planner may also "
    "recompute activations in the backward pass, which takes less memory"
)
LATE = (
    "what the backward pass makes again was not searched to the end: give the search a longer "
    "time_limit"
)


@dataclass(frozen=True)
class Again:
    """The space of a step with all `segments` recomputed, and what of it may be kept instead."""

    segments: tuple[Segment, ...]
    pairs: tuple[Pair, ...]
    lines: tuple[Line, ...] = ()  # of the program: what may be kept
    whole: bool = True  # whether segments may be left as the author wrote them

    def shared(self, folded: Folded) -> frozenset[int]:
        return shared(folded, self.pairs)

    def on(
        self,
        model: Model,
        vendor: str = "",
        never: Collection[int] = (),
        parts: Mapping[int, int] = {},
    ) -> tuple[Model, Recomputation]:
        """The model with the states of recomputation in its problems; on devices of a vendor.

        `never`: values that are not kept (of a co-shard). `parts`: of which so many make a value,
        one of them in memory at a time (of accumulation).
        """
        pairs = tuple(pair for pair in self.pairs if pair.first not in never)
        found = recomputation(
            model.graph, model.folded, model.space, self.segments, pairs, vendor in HOSTS, never
        )
        if not self.whole:
            found = replace(found, wholes=())
        if parts:
            some = {n: min(parts.get(p.first, 1) for p in kept) for n, kept in found.kept.items()}
            found = replace(found, parts=some)
        forced = _forced(self.lines, model, found)

        def extend(priced: Priced, device: Any) -> Priced:
            return extended(priced, found, device, forced)

        return replace(model, extend=extend), found


def plan_with_recomputation(
    search: Callable[..., Any],
    traced: Traced,
    graph: OpGraph,
    program: Sequence[Statement],
    memory: float,
    time_limit: float,
    rules: Rules,
    say: Callable[[str, str], None],
) -> Any:
    """The planned step (`planner.Planned`), with recomputation where that is cheaper, or said.

    `search(traced, graph, program, memory, time_limit, again=, mesh=)` plans a step as it is; with
    `again` it gives (what `Session.search` found, Recomputation) instead.
    """
    lines = tuple(x for x in program if isinstance(x, Line) and x.place in (NOWHERE, HOST))
    rest = tuple(x for x in program if x not in lines)
    plain: Any = None
    error: InfeasibleError | None = None
    if lines and not traced.losses:
        raise ConstraintError(f"{lines[0]} ({lines[0].source}): {HINT}")
    try:
        plain = search(traced, graph, rest, memory, time_limit)
    except InfeasibleError as cause:
        if not traced.losses:
            raise type(cause)(f"{cause}\n{HINT}") from None
        error = cause
    if not traced.losses:
        said = plain.plan.predicted
        return _noted(plain, said.peak_bytes > NEARLY * said.limit_bytes, HINT)
    if plain is not None and not lines and not binds(plain):
        return plain
    found, start = None, time.perf_counter()
    misses: list[InfeasibleError] = []
    for again, changed, its_graph in _spaces(traced, graph, lines, rules):
        say("recompute", f"{len(again.segments)} segments, {len(its_graph.ops)} ops")
        spent = time.perf_counter() - start
        share = min(time_limit, max(2 * time_limit - spent, SHARE * time_limit))
        try:
            one = _attempts(search, traced, again, changed, its_graph, rest, memory, share)
        except InfeasibleError as cause:
            misses.append(cause)
            continue
        if found is None or _cost(one[0]) < _cost(found[0]):
            found = one
        if _cost(found[0]) <= (1 + ENOUGH) * found[1]:
            break
    if found is None:
        if plain is None or lines:
            raise _none(error, misses)
        late = any(isinstance(cause, OutOfTimeError) for cause in misses)
        return _noted(plain, late, LATE)
    planned = found[0]
    if plain is not None and not lines and _cost(plain) <= _cost(planned):
        return plain
    plan = replace(planned.plan, constraints=tuple(str(x) for x in program))
    return replace(planned, plan=plan)


def _cost(planned: Any) -> float:
    return planned.plan.predicted.seconds


def _noted(planned: Any, true: bool, note: str) -> Any:
    """The planned step; with a note on its plan, where that is true."""
    if not true:
        return planned
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, note)))


def _none(error: InfeasibleError | None, misses: Sequence[InfeasibleError]) -> InfeasibleError:
    """What to raise where neither the step as it is nor one that recomputes has a plan."""
    text = str(error or "no plan does what the program says")
    late = [cause for cause in (error, *misses) if isinstance(cause, OutOfTimeError)]
    if late:
        found: InfeasibleError = OutOfTimeError(f"{text}\n{LATE}")
    elif misses:
        found = InfeasibleError(f"{text}\nnor does one that recomputes: {misses[-1]}")
    else:
        found = InfeasibleError(f"{text}\nthere is no layer that could be recomputed")
    found.session = next((e.session for e in (error, *misses) if e is not None and e.session), None)
    found.need = min((e.need for e in (error, *misses) if e is not None and e.need), default=None)
    return found


# -- whether memory binds ----------------------------------------------------------------------


def _binds_on_its_mesh(best: Best) -> bool:
    """Whether a cheaper choice is left out for its memory, on the mesh of a plan."""
    problem = best.priced.problem
    cost = round(best.seconds / best.priced.unit)
    free = solve(replace(problem, usage_limit=None), work_limit=WORK, upper_bound=cost)
    return free.choice is not None


def _free(best: Best) -> int:
    """A bound on what a plan costs with all the memory that it wants, on the mesh of a plan."""
    return solve(replace(best.priced.problem, usage_limit=None), work_limit=WORK).bound


_LAST: list[tuple[Best, bool]] = []  # the last answer of `binds`, which two searches ask for


def binds(planned: Any) -> bool:
    """The same on any mesh; of a plan that leaves much of the memory, on its own mesh alone."""
    best = planned.plan.session.best
    if not (_LAST and _LAST[0][0] is best):
        _LAST[:] = [(best, _binds_anywhere(planned))]
    return _LAST[0][1]


def _binds_anywhere(planned: Any) -> bool:
    session, said = planned.plan.session, planned.plan.predicted
    if _binds_on_its_mesh(session.best):
        return True
    if said.peak_bytes <= FULL * said.limit_bytes:
        return False  # or every step that fits would be searched twice
    free = replace(session, limit=UNLIMITED).search(explained=False)
    return free.best.seconds < session.best.seconds * (1 - 1e-6)


# -- the search --------------------------------------------------------------------------------


def _spaces(traced: Traced, graph: OpGraph, lines: tuple[Line, ...], rules: Rules):
    """(Again, the step with all of its segments recomputed, its graph), per segmentation."""
    loops = [change.segment for change in traced.changes if isinstance(change, CoShard)]
    for found in segmentations(graph, fold(graph), loops):
        segments = tuple(piece for s in found for piece in around(s, loops))
        if segments:
            yield space_of(traced, segments, lines, rules)


def space_of(
    traced: Traced, segments: tuple[Segment, ...], lines: tuple[Line, ...], rules: Rules
) -> tuple[Again, Traced, OpGraph]:
    """(Again, the step with these segments recomputed and nothing kept, its graph)."""
    changed = traced.changed([*traced.changes, *map(Recompute, segments)])
    its_graph = build(changed)
    results = {
        s: results_of(traced.losses[s.loss], s.inside)[s.first : s.last + 1] for s in segments
    }
    pairs = pairs_of(its_graph, segments, results, rules)
    return Again(segments, pairs, lines), changed, its_graph


def _attempts(search, traced, again, changed, its_graph, program, memory, time_limit):
    """(A plan of the step with what was searched for it, a bound without memory).

    Raises InfeasibleError where there is none, OutOfTimeError where there may be.
    """
    error: InfeasibleError | None = None
    for share, whole in ATTEMPTS:
        some, room = replace(again, whole=whole), share * memory
        try:
            found, what = search(changed, its_graph, program, room, time_limit, again=some)
        except InfeasibleError as cause:
            raise error or cause from None
        best = found.best
        changes = changes_of(what, best.priced, best.choice)
        step = traced.changed((*traced.changes, *changes))
        try:
            planned = search(step, build(step), program, memory, time_limit, mesh=best.priced.mesh)
        except InfeasibleError as cause:
            error = cause
            continue
        return _reported(planned, found, changes), _free(best) * best.priced.unit
    assert error is not None
    raise error


def _reported(planned: Any, found: Any, changes: tuple[Recompute, ...]) -> Any:
    """The plan with its changes, the bound of the whole search, and what a user should know."""
    plan, searched = planned.plan, found.best.seconds
    seconds = plan.predicted.seconds
    notes = []
    if changes:
        kept, moved = (sum(map(len, some)) for some in zip(*((c.kept, c.host) for c in changes)))
        host = f" and {moved} that go to the host" if moved else ""
        notes.append(
            f"{len(changes)} segments of the forward pass run again in the backward pass, except "
            f"for {kept} values that are kept{host}; "
            f"{size_text(plan.predicted.peak_bytes)} a device"
        )
    if abs(seconds - searched) > TOLERANCE * searched:
        notes.append(
            f"the changed step is priced at {seconds:.4g} s, while {searched:.4g} s were searched"
        )
    lower = min(found.lower, seconds)
    search = replace(
        plan.search, status=found.status, bound=lower, gap=1 - lower / seconds, meshes=found.tried
    )
    return replace(
        planned,
        plan=replace(
            plan, changes=planned.traced.changes, search=search, notes=(*plan.notes, *notes)
        ),
    )


# -- lines of a program ------------------------------------------------------------------------


def _forced(lines: Sequence[Line], model: Model, found: Recomputation) -> dict[int, frozenset[int]]:
    """Use node -> states that `op_assign(values, NOWHERE)`, HOST, and their opposites leave it.

    Raises ConstraintError for a line that selects nothing that could be kept, or go to the host.
    """
    forced: dict[int, frozenset[int]] = {}
    subjects = Subjects(model.graph, model.folded, model.space)
    for line in lines:
        assert isinstance(line.subject, Values)  # `op_assign` allows no other to go nowhere
        chosen = {v for _, _, v in subjects.value_spots(line.subject)}
        if line.subject.to is not None:  # handed over as a cast of it: that is what may be kept
            for op in model.graph.ops:
                if model.graph.kinds[op.kind].primitive in HANDS_ON and op.inputs[0] in chosen:
                    chosen.update(op.outputs)
        nodes = [n for n, pairs in found.kept.items() if any(p.first in chosen for p in pairs)]
        if not nodes:
            raise ConstraintError(
                f"{line} ({line.source}): selects no activation of a layer that the backward pass "
                'could make again; say values(..., role="activation")'
            )
        if line.place == HOST and not line.forbidden and not found.hosted.issuperset(nodes):
            raise ConstraintError(
                f"{line} ({line.source}): of those, some can not go to the host: values of the "
                f"body of a loop, and any on devices other than those of {' and '.join(HOSTS)}; "
                "say NOWHERE to have them made again"
            )
        meant = frozenset((RUN if line.place == NOWHERE else HOSTED,))
        for node in nodes:
            every = frozenset(found.states(node))
            states = every - meant if line.forbidden else meant | {OFF}
            forced[node] = forced.get(node, every) & states
    return forced
