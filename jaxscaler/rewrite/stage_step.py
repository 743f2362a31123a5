"""The part of a pipelined step that one place runs, as a step of its own for the planner.

It has the place's equations in their order: before the loop, a loop over micro-batches with the
place's equations of the body, after it. What other places send is an argument, what it sends a
result; inside the loop one micro-batch of either (a loop-invariant argument, a carried result), as
no more than that is under way at once. So it prices and lays out what the place does; it is planned
and never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import jax

from jaxscaler import _compat
from jaxscaler.graph import kinds
from jaxscaler.graph.ir import PARAMETER
from jaxscaler.rewrite.parts import Carry, variables, with_pulled
from jaxscaler.rewrite.stages import Staged
from jaxscaler.trace import Traced

ARGUMENTS = ("state", "received", "batch")


@dataclass(frozen=True)
class StageStep:
    """The step of one place. outer, body: equation of the whole step (of its loop's body) -> of
    this one; at: this one's loop. received: variable of the loop's body -> argument that it is."""

    place: int
    traced: Traced
    outer: Mapping[int, int]
    body: Mapping[int, int]
    at: int
    received: Mapping[Any, Any]


def stage_step(staged: Staged, place: int) -> StageStep:
    """What `place` does of a staged step. Variables are those of the step and its loop's body."""
    jaxpr, loop = staged.traced.jaxpr.jaxpr, staged.loop
    body, scan, received, passed = _loop_of(staged, place)
    parts = [level[place] for level in (staged.prepare, *staged.update) if place in level]
    ours = sorted({i for part in parts for i in part.eqns})
    before, after = ([i for i in ours if (i < loop.at) == first] for first in (True, False))
    firsts = variables(carry.first for carry in passed)
    zeros = [_compat.zeros_eqn(v) for v in firsts]
    eqns = [*(jaxpr.eqns[i] for i in before), *zeros, scan, *(jaxpr.eqns[i] for i in after)]
    at = len(before) + len(zeros)
    outer = {i: n for n, i in enumerate(before)} | {i: at + 1 + n for n, i in enumerate(after)}
    traced = _traced(staged, place, eqns, list(received.values()), [c.last for c in passed])
    return StageStep(place, traced, outer, {i: n for n, i in enumerate(body)}, at, received)


def _loop_of(staged: Staged, place: int) -> tuple[list[int], Any, dict[Any, Any], list[Carry]]:
    """(equations of the body, the loop's equation, body variable -> argument that another place
    sends, what is sent to others as a carry)."""
    loop, eqns = staged.loop, staged.loop.body.eqns
    own = [i for i, w in enumerate(staged.body) if w is not None and staged.places[w[0]] == place]
    body = with_pulled(eqns, own, [where is None for where in staged.body])
    made = {v for i in body for v in eqns[i].outvars}
    mine = {v for i in own for v in eqns[i].outvars}
    body = _sums_early(body, eqns, {c.result for c in loop.carries})
    read = dict.fromkeys(v for i in body for v in variables(eqns[i].invars) if v not in made)
    carries = [c for c in loop.carries if c.result in mine]
    sums = {c.inside for c in carries}
    consts, slices = ([v for v in read if v in known] for known in (loop.consts, loop.slices))
    others = [v for v in read if v not in loop.consts and v not in loop.slices and v not in sums]
    received = {v: _compat.fresh_var(v) for v in others}
    fresh = _compat.fresh_var
    passed = [
        Carry(fresh(v), v, fresh(v) if v.aval.shape else _compat.zero(v.aval), fresh(v))
        for v in staged.sends
        if v in mine
    ]
    stacks = [(v, outside) for v, outside in loop.stacks if v in mine]
    carried = [*carries, *passed]
    part = _compat.closed_over_nothing(
        loop.body,
        [*consts, *others, *(c.inside for c in carried), *slices],
        [eqns[i] for i in body],
        [*(c.result for c in carried), *(v for v, _ in stacks)],
    )
    scan = _compat.rebuilt_scan(
        staged.traced.jaxpr.jaxpr.eqns[loop.at],
        part,
        [*(loop.consts[v] for v in consts), *received.values()],
        [c.first for c in carried],
        [loop.slices[v] for v in slices],
        [*(c.last for c in carried), *(outside for _, outside in stacks)],
    )
    return body, scan, received, passed


def _sums_early(body: Sequence[int], eqns: Sequence, results: set) -> list[int]:
    """The order of a body in which what only adds to sums over micro-batches (`results`) comes as
    soon as it can: each run's task adds its own gradients."""
    makers = {v: i for i in body for v in eqns[i].outvars}
    needs = {i: {makers[v] for v in variables(eqns[i].invars) if v in makers} for i in body}
    readers = Counter(n for i in body for n in needs[i])
    late: dict[int, set[int]] = {}  # equation -> what it still waits for
    for i in reversed(body):
        sums = not results.isdisjoint(eqns[i].outvars)
        cast = readers[i] == 1 and len(needs[i]) == 1 and any(i in n for n in late.values())
        if (sums or cast) and needs[i] and kinds.is_elementwise(eqns[i]):
            late[i] = needs[i]
    found: list[int] = []
    for i in body:
        ready = [] if i in late else [i]
        while ready:
            found.append(done := ready.pop())
            for n, waits in late.items():
                if done in waits:
                    waits.discard(done)
                    ready += [n] * (not waits)
    return found


def _traced(
    staged: Staged, place: int, eqns: Sequence, received: Sequence, passed: Sequence
) -> Traced:
    whole = staged.traced
    jaxpr = whole.jaxpr.jaxpr
    path_of = dict(zip(jaxpr.invars, whole.in_paths))
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in made)
    results = [
        (o, v) for o, v in enumerate(jaxpr.outvars)
        if staged.result_homes[o] == place and not _compat.is_literal(v)
    ]  # fmt: skip
    becomes = dict(whole.state_pairs)
    state = [i for i, v in enumerate(jaxpr.invars) if staged.homes.get(v) == place]
    inputs = {"state": [jaxpr.invars[i] for i in state]}
    fixed = set(jaxpr.constvars)
    data = [v for v in read if v in path_of and v not in staged.homes]
    known = {*inputs["state"], *data, *fixed}
    sent_here = [v for v in read if v not in known and v not in received]
    inputs["received"] = [*sent_here, *received]
    inputs["batch"] = data
    names = {v: path_of.get(v, f"received/{n}") for n, v in enumerate(inputs["received"])}
    outgoing = [v for v in staged.sends if v in made]
    # new state first, in the order of the old; a result that another place has is passed on
    kept = [jaxpr.outvars[becomes[i]] for i in state]
    rest = [(o, v) for o, v in results if o not in set(becomes.values())]
    outputs = [*kept, *(v for _, v in rest), *outgoing, *passed]
    count = len(state)
    invars = [v for name in ARGUMENTS for v in inputs[name]]
    part = _compat.closed_over_nothing(jaxpr, invars, eqns, outputs)
    if bound := [v for v in jaxpr.constvars if v in read]:
        values = dict(zip(jaxpr.constvars, whole.jaxpr.consts))
        part = _compat.with_constants(part, bound, [values[v] for v in bound])
    paths = tuple(path_of.get(v) or names[v] for v in invars)
    copies = [
        (names[v], PARAMETER) for v in sent_here
        if v in staged.homes and v.aval.shape and names[v].count("*") == 0
    ]  # fmt: skip
    said = [
        (pattern, role) for pattern, role in whole.roles
        if any(p == pattern or fnmatchcase(p, pattern) for p in paths)
    ]  # fmt: skip
    out_paths = [
        *(whole.out_paths[becomes[i]] for i in state),
        *(whole.out_paths[o] for o, _ in rest),
        *(f"sent/{n}" for n in range(len(outgoing) + len(passed))),
    ]
    return replace(
        whole,
        jaxpr=part,
        in_tree=jax.tree.structure(tuple([0] * len(inputs[name]) for name in ARGUMENTS)),
        out_tree=jax.tree.structure(([0] * count, [0] * (len(outputs) - count))),
        arg_names=ARGUMENTS,
        keywords=(),
        static=(),
        static_options={},
        in_paths=paths,
        in_avals=tuple(v.aval for v in invars),
        out_paths=tuple(out_paths),
        out_avals=tuple(v.aval for v in outputs),
        state_pairs=tuple((n, n) for n in range(count)),
        arg_of_input=tuple(k for k, name in enumerate(ARGUMENTS) for _ in inputs[name]),
        donated=(),
        roles=(*copies, *said),
        losses=(),
        changes=(),
        retrace=None,
    )
