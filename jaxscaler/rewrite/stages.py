"""A train step cut into the tasks of a pipeline: pure surgery on its jaxpr.

The step of `Traced.changed([Stages(...), Accumulate(...)])` is: equations before | a loop over
micro-batches whose body is the forward and backward pass of one | equations after. Each equation of
the body goes to a run (a stage; `assign.py`) and a phase: F forward; B backward, as far as another
stage waits for it; W the rest of backward (weight gradients, which add up). What a run reads of
another is sent once. What the body reads without change from one micro-batch to the next (weights
after their casts) is prepared once per step, where it is read; so it is no residual.

Outside of the loop a place computes what it can without a transfer: state lives where it is read
and updated, a value that several places have parts of (a tied gradient, a norm over all of them)
goes where most of its operands are. What waits for such a value is of a later *level* of the
update; there are as many levels as transfers in a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.apply import flat
from jaxscaler.rewrite.assign import places_of, run_of
from jaxscaler.rewrite.changes import Stages
from jaxscaler.rewrite.parts import (
    Carry,
    Leaf,
    Loop,
    Part,
    Where,
    made_by,
    nbytes,
    part_of,
    variables,
    with_pulled,
)
from jaxscaler.rewrite.residuals import made_again
from jaxscaler.rewrite.stacked import in_pieces
from jaxscaler.rewrite.stages_outside import place_outside
from jaxscaler.trace import Traced

F, B, W = "F", "B", "W"


@dataclass(frozen=True)
class Staged:
    """A step as tasks. Variables are those of `traced.jaxpr` and of `loop.body`.

    inputs, results: what each flat argument and result is of the step that was cut; state that is
    stacked over layers is in pieces. places: [run] -> where it runs. body: [equation of the loop's
    body] -> (run, phase); None: made again in every task that reads it. again: [run] -> equations
    of its F that B and W make again, as what they read takes less memory than what they make.
    prepare: per place, before the loop. update: per level and place, after it. homes,
    result_homes: where each argument that is state lies, by variable, and each result. sends:
    variable -> places that read it besides the one that makes it.
    """

    traced: Traced
    inputs: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    loop: Loop
    places: tuple[int, ...]
    body: tuple[Where | None, ...]
    again: tuple[frozenset[int], ...]
    prepare: Mapping[int, Part]
    update: tuple[Mapping[int, Part], ...]
    homes: Mapping[Any, int]
    result_homes: tuple[int, ...]
    sends: Mapping[Any, frozenset[int]]

    @property
    def runs(self) -> range:
        return range(len(self.places))

    @cached_property
    def tasks(self) -> dict[Where, tuple[int, ...]]:
        """(run, phase) -> its equations, those that it makes again among them."""
        eqns = self.loop.body.eqns
        found = {}
        for run in self.runs:
            for phase in (F, B, W):
                again = self.again[run] if phase != F else ()
                pulled = [w is None or i in again for i, w in enumerate(self.body)]
                own = [i for i, where in enumerate(self.body) if where == (run, phase)]
                found[run, phase] = tuple(with_pulled(eqns, own, pulled))
        return found

    def part(self, run: int, phases: str) -> Part:
        """The task of a run: "F", "B", "W", or "BW" for both at once."""
        eqns = self.loop.body.eqns
        mine = {(run, phase) for phase in phases}
        indices = sorted({i for where in mine for i in self.tasks[where]})
        made = made_by(eqns, (i for i in indices if self.body[i] in mine))
        return part_of(eqns, indices, [v for v in made if self._readers.get(v, mine) - mine])

    @cached_property
    def _readers(self) -> dict[Any, set[Where | None]]:
        """Variable of the loop's body -> tasks that read it; None: what comes after them."""
        eqns = self.loop.body.eqns
        found: dict[Any, set[Where | None]] = defaultdict(set)
        for where, indices in self.tasks.items():
            for v in part_of(eqns, indices, ()).reads:
                found[v].add(where)
        for v in (*(c.result for c in self.loop.carries), *(v for v, _ in self.loop.stacks)):
            if not _compat.is_literal(v):
                found[v].add(None)
        return found


def staged(traced: Traced) -> Staged:
    """Cut a step that was changed by `Stages` and `Accumulate` of its one marked loss.

    Raises RewriteError, naming the operation, where stages would wait for each other in a circle,
    or one can not be told to a stage.
    """
    change = next((c for c in traced.changes if isinstance(c, Stages)), None)
    if change is None or len(traced.losses) != 1:
        raise RewriteError(
            f"a pipeline is cut from a step with one marked loss (jaxscaler.value_and_grad) and "
            f"its stages; this one has {len(traced.losses)} and {change}"
        )
    places = places_of(change)
    step, inputs, results = in_pieces(flattened := _flat(traced), _loop_at(flattened))
    loop = _find_loop(step)
    body = _body_tasks(loop)
    outside = place_outside(step, loop, places, body)
    again = tuple(made_again(loop, body, run) for run in range(len(places)))
    return Staged(step, inputs, results, loop, places, body, again, *outside)


def _flat(traced: Traced) -> Traced:
    closed = _compat.without_dead_code(flat(traced.jaxpr))
    return replace(traced, jaxpr=closed, in_avals=tuple(closed.in_avals))


# -- the loop --------------------------------------------------------------------------------------


def _loop_at(traced: Traced) -> int:
    eqns = traced.jaxpr.jaxpr.eqns
    found = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "scan" and _is_loop(eqn)]
    if len(found) != 1:
        raise RewriteError(f"the step has {len(found)} loops over micro-batches of a loss, not one")
    return found[0]


def _find_loop(traced: Traced) -> Loop:
    at = _loop_at(traced)
    eqn = traced.jaxpr.jaxpr.eqns[at]
    num_consts, num_carry, length = _compat.scan_sizes(eqn)
    body, consts = _compat.open_jaxpr(_compat.subjaxprs(eqn)[0])
    if consts or body.constvars:
        raise RewriteError("the loop over micro-batches closes over arrays: make them arguments")
    inside = body.invars
    stop = num_consts + num_carry
    return Loop(
        at,
        body,
        length,
        dict(zip(inside[:num_consts], eqn.invars)),
        dict(zip(inside[stop:], eqn.invars[stop:])),
        tuple(
            map(
                Carry, inside[num_consts:stop], body.outvars, eqn.invars[num_consts:stop],
                eqn.outvars,
            )
        ),
        tuple(zip(body.outvars[num_carry:], eqn.outvars[num_carry:])),
    )  # fmt: skip


def _is_loop(eqn: Any) -> bool:
    """The loop of `Accumulate` is no equation of the loss, and holds some."""
    if "stage@" in str(eqn.source_info.name_stack):
        return False
    inner, _ = _compat.open_jaxpr(_compat.subjaxprs(eqn)[0])
    return any("stage@" in str(e.source_info.name_stack) for e in inner.eqns)


def _body_tasks(loop: Loop) -> tuple[Where | None, ...]:
    eqns = loop.body.eqns
    invariant = set(loop.consts)
    home: dict[Any, Where] = {}
    where: list[Where | None] = []
    for eqn in eqns:
        read = variables(eqn.invars)
        if invariant.issuperset(read) and not eqn.effects:
            invariant.update(eqn.outvars)
            where.append(None)
            continue
        votes = [(nbytes(v), home[v][0]) for v in read if v in home]
        run = run_of(eqn)
        if run is None:
            if not votes:  # of the number of the micro-batch, or its data, alone
                where.append(None)
                continue
            run = max(votes, key=lambda vote: (vote[0], -vote[1]))[1]
        late = any(home[v][1] == B for v in read if v in home)
        phase = B if late or "transpose(" in str(eqn.source_info.name_stack) else F
        where.append((run, phase))
        home.update((v, (run, phase)) for v in eqn.outvars)
    leaves = [c.result for c in loop.carries] + [v for v, _ in loop.stacks]
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    for v in variables(leaves):
        if v in maker and where[maker[v]] is None:
            where[maker[v]] = (0, F)
    _check_directions(eqns, where, home)
    return _weights_apart(eqns, where, home)


def _check_directions(eqns: Sequence, where: Sequence, home: Mapping[Any, Where]) -> None:
    """Forward goes to later runs, backward to earlier ones."""
    for eqn, at in zip(eqns, where):
        for v in variables(eqn.invars):
            made = home.get(v)
            if at is None or made is None:
                continue
            (run, phase), (from_run, from_phase) = at, made
            back = phase == F and (from_phase == B or from_run > run)
            if back or (phase == B and from_phase == B and from_run < run):
                raise RewriteError(
                    f"stages in a circle: `{eqn.primitive.name}` at "
                    f"{_compat.source_line(eqn) or '?'} ({phase} of stage {run}) needs what "
                    f"{from_phase} of stage {from_run} makes, which waits for it"
                )


def _weights_apart(eqns: Sequence, where: list, home: Mapping[Any, Where]) -> tuple:
    """Backward equations that no other run waits for are W."""
    needed = {
        v
        for eqn, at in zip(eqns, where)
        if at is not None
        for v in variables(eqn.invars)
        if v in home and home[v][0] != at[0]
    }
    found = list(where)
    for i in reversed(range(len(eqns))):
        if where[i] is not None and where[i][1] == B:
            if needed.isdisjoint(eqns[i].outvars):
                found[i] = (where[i][0], W)
            else:
                needed.update(variables(eqns[i].invars))
    return tuple(found)
