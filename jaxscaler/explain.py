"""Why a program leaves nothing, what another line would change, and what is worth how much."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError, InfeasibleError, PlanError
from jaxscaler.fit import fitted
from jaxscaler.holes import Hole, Relation
from jaxscaler.plan import Plan, Search
from jaxscaler.program import Line, Split, Statement, holes_of
from jaxscaler.program_text import parse_program
from jaxscaler.report import describe
from jaxscaler.report.show import decision_text, mesh_text, size_text, time_text
from jaxscaler.search import Clock
from jaxscaler.solve import evaluate, solve
from jaxscaler.solve.conflict import conflict
from jaxscaler.solve.prices import memory_price
from jaxscaler.space import strategies as st
from jaxscaler.space.constraints import Constraints, changes_step, smallest
from jaxscaler.space.price import price
from jaxscaler.space.problem import Priced

if TYPE_CHECKING:
    from jaxscaler.why import Found, Session

SETS = 3  # of clashing lines that are told
RELAXED = 6  # lines of a clash for which a relaxation is searched
DROPPED = 8  # lines whose price is found by leaving them out
SHOWN = 8  # changed decisions that a comparison lists
SECONDS = 10.0  # of each of these searches
GIGABYTE = 10**9
FASTER = 1.1


# -- clashes ---------------------------------------------------------------------------------------


def clash(session: Session, bound: Constraints) -> str:
    """Smallest sets of lines that leave no plan, and what would do; "" if no line is to blame.

    Smallest: without any one line of a set, the others of it leave a plan.
    """
    tests = _Tests(session, bound)
    left: list[Statement] = [*(x for x in bound.lines if not x.yielding), *bound.relations]
    if tests.none_left([]):
        return ""
    sets: list[list[Statement]] = []
    while len(sets) < SETS and (blamed := tests.blamed(left)):
        sets.append(smallest([x for x in left if x in blamed], tests.none_left))
        left = [x for x in left if x not in sets[-1]]
    if not sets:
        return ""
    out = []
    for least in sets:
        what = "the line that leaves" if len(least) == 1 else f"the {len(least)} lines that leave"
        out.append(f"{'and ' if out else ''}{what} no plan:")
        out += [f"  {n}. {_said(x)}   ({x.source})" for n, x in enumerate(least, start=1)]
    if len(sets) > 1:
        return "\n".join([*out, "one line of each has to be left out or widened"])
    return "\n".join([*out, *_relaxations(session, sets[0])])


def _said(line: Statement) -> str:
    return line.text(names=True) if isinstance(line, Relation) else str(line)


def explanation(error: BaseException | None) -> str:
    """What `clash` says of the search that came to an error, or to what it was raised for."""
    while error is not None and getattr(error, "session", None) is None:
        error = error.__context__
    session = getattr(error, "session", None)
    return clash(session, session.bind(session.program)) if session and session.program else ""


class _Tests:
    """Whether some lines of a program leave a plan on some mesh, with some numbers in the holes."""

    def __init__(self, session: Session, bound: Constraints):
        self.session, self.bound = session, bound
        self.number = {line: n for n, line in enumerate(bound.lines)}
        self.variants = [
            (mesh, holes) for mesh in session.meshes for holes in bound.fillings(mesh, ())
        ]
        self.priced: dict[str, Priced | None] = {}
        self._rows: dict[str, list[np.ndarray]] = {}
        self._masks: dict[tuple, dict[int, dict[int, np.ndarray]]] = {}

    def none_left(self, items: Sequence[Statement]) -> bool:
        return all(self.core(v, items) is not None for v in self.variants)

    def blamed(self, items: Sequence[Statement]) -> set[Statement]:
        """Lines that are enough for a clash on every mesh; none if there is a plan."""
        out: set[Statement] = set()
        for v in self.variants:
            core = self.core(v, items)
            if core is None:
                return set()
            out.update(core)
        return out

    def core(
        self, variant: tuple[Mesh, Mapping[str, int]], items: Sequence[Statement]
    ) -> list[Statement] | None:
        """Some of the items that leave nothing in a variant, None if there is something left."""
        mesh, holes = variant
        for item in items:
            if isinstance(item, Relation) and not item.holds(dict(holes)):
                return [item]
        lines = [item for item in items if isinstance(item, Line)]
        for line in lines:
            try:
                self.bound.here(line, mesh)
            except ConstraintError:
                return [line]
        for i, masks in self.masks(mesh, holes).items():
            mine = {line: masks[n] for line in lines if (n := self.number[line]) in masks}
            rows = self.rows(mesh)[i]
            if mine and not (rows & np.logical_and.reduce(list(mine.values()))).any():
                return smallest(list(mine), partial(_nothing, rows, mine))
        priced = self.price(mesh)
        if priced is None:
            return []
        groups = [self.group(priced, holes, line) for line in lines]
        core = conflict(priced.problem, groups, self.session.seed)
        return None if core is None else [lines[g] for g in core]

    def rows(self, mesh: Mesh) -> list[np.ndarray]:
        """Per node, which of its strategies everything but the program allows."""
        if str(mesh) not in self._rows:
            free = self.session.bind(())
            found = []
            for node in self.session.model.space.nodes:
                rows = st.strategies(node, mesh.shape)
                every = np.ones(len(rows), bool)
                found.append(self.session.others(node, rows, mesh, every, free))
            self._rows[str(mesh)] = found
        return self._rows[str(mesh)]

    def masks(self, mesh: Mesh, holes: Mapping[str, int]) -> dict[int, dict[int, np.ndarray]]:
        """Node -> line -> what it allows, where that is not everything."""
        key = (str(mesh), *holes.items())
        if key not in self._masks:
            found = {}
            for i in self.bound.touching:
                node = self.session.model.space.nodes[i]
                rows = st.strategies(node, mesh.shape)
                found[i] = self.bound.masks(node, rows, mesh, holes)
            self._masks[key] = found
        return self._masks[key]

    def price(self, mesh: Mesh) -> Priced | None:
        """The problem of a mesh without the program; None if it has no strategy somewhere."""
        if str(mesh) not in self.priced:
            free = self.session.bind(())
            keep = partial(self.session.keep, free, {})
            session = self.session
            try:
                found = price(session.model, mesh, session.cluster.device, int(session.limit), keep)
            except ConstraintError:
                self.priced[str(mesh)] = None
            else:
                self.priced[str(mesh)] = found
        return self.priced[str(mesh)]

    def group(self, priced: Priced, holes: Mapping[str, int], line: Line) -> np.ndarray:
        """What a line allows, over the strategies of all nodes that everything else allows."""
        mesh = priced.mesh
        n, masks = self.number[line], self.masks(mesh, holes)
        parts = []
        for i, rows in enumerate(self.rows(mesh)):
            allowed = masks.get(i, {}).get(n)
            parts.append(np.ones(int(rows.sum()), bool) if allowed is None else allowed[rows])
        total = int(priced.problem.node_ptr[-1])  # of nodes that no line speaks of, too
        parts.append(np.ones(total - sum(map(len, parts)), bool))
        return np.concatenate(parts)


def _nothing(rows: np.ndarray, masks: Mapping[Line, np.ndarray], some: Sequence[Line]) -> bool:
    return not (rows & np.logical_and.reduce([masks[line] for line in some])).any()


def _relaxations(session: Session, least: Sequence[Statement]) -> Iterator[str]:
    """What a step takes with a line of a clash wider, or without it; the fastest first."""
    found: list[tuple[float, str]] = []
    for n, line in enumerate(least[:RELAXED], start=1):
        wide = _wider(line)
        with_it = None if wide is None else _with(session, line, [wide])
        if wide is not None and with_it is not None:
            said = f"  with {_parts(wide.num)} in {n}: {time_text(with_it)} a step"
            found.append((with_it, said))
        seconds = _with(session, line, [])
        if seconds is not None and (with_it is None or seconds < with_it * (1 - 1e-6)):
            found.append((seconds, f"  without {n}: {time_text(seconds)} a step"))
    if found:
        yield "what would do, the fastest first:"
        yield from (text for _, text in sorted(found, key=lambda x: x[0]))


def _with(session: Session, line: Statement, instead: Sequence[Statement]) -> float | None:
    """Seconds of a step with other lines in place of one; None where that leaves no plan."""
    program = [y for x in session.program for y in (instead if x is line else (x,))]
    left = min(session.time_limit, SECONDS)
    other = replace(session, program=without_idle(program), best=None, time_limit=left)
    try:
        return searched(other, explained=False).best.seconds
    except (ConstraintError, InfeasibleError):
        return None


def without_idle(program: Sequence[Statement]) -> tuple[Statement, ...]:
    """The lines without relations of holes that stand in no line any more."""
    used = {h.name for x in program if isinstance(x, Line) for h in holes_of(x)}
    idle = [
        x
        for x in program
        if isinstance(x, Relation) and not used.issuperset(h.name for h in x.holes)
    ]
    return tuple(x for x in program if x not in idle)


def _wider(line: Statement) -> Line | None:
    """The line with as few parts as one; None where that says no less."""
    if not isinstance(line, Line) or not isinstance(line.algo, Split) or line.forbidden:
        return None
    if isinstance(line.num, Hole) or line.num == 1:
        return None
    low, high = line.num if isinstance(line.num, tuple) else (1, line.num)
    most = high if isinstance(high, int) else sys.maxsize
    return replace(line, num=(1, most)) if isinstance(line.num, int | str) or low > 1 else None


def _parts(num: Any) -> str:
    return f"1 to {num[1]} parts" if num[1] < sys.maxsize else "any number of parts"


# -- what if ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WhatIf:
    """A plan, and what another program makes of it."""

    change: str
    before: Plan
    after: Plan

    @property
    def seconds(self) -> float:
        """By how much a step takes longer; 0 for the same plan, however costs are rounded."""
        before, after = ((p.axes, p.changes, p.decisions) for p in (self.before, self.after))
        if before == after:
            return 0.0
        return self.after.predicted.seconds - self.before.predicted.seconds

    def changed(self) -> list[tuple[str, str, str]]:
        """(subject, before, after) of every decision that differs."""
        old = {d.subject: decision_text(d) for d in self.before.decisions}
        now = [(d.subject, decision_text(d)) for d in self.after.decisions]
        pairs = ((subject, old.get(subject, "not there"), text) for subject, text in now)
        return [(subject, then, text) for subject, then, text in pairs if then != text]

    def __str__(self) -> str:
        rows = [("", "now", "then", "difference")]
        before, after = _numbers(self.before), _numbers(self.after)
        for key in dict.fromkeys([*before, *after]):
            a, b = before.get(key, 0.0), after.get(key, 0.0)
            text = size_text if key.startswith(("memory", "moved")) else time_text
            sign = "+" if b >= a else "-"
            same = abs(b - a) <= 1e-9 * max(abs(a), abs(b))
            rows.append((key, text(a), text(b), "" if same else sign + text(abs(b - a))))
        rows.append(("mesh", mesh_text(self.before), mesh_text(self.after), ""))
        wide = [max(len(row[c]) for row in rows) for c in range(4)]
        lines = [self.change]
        lines += ["  ".join(t.ljust(w) for t, w in zip(row, wide)).rstrip() for row in rows]
        changed = self.changed()
        lines.append(f"{len(changed)} of {len(self.after.decisions)} decisions change")
        lines += [f"  {subject}: {a} -> {b}" for subject, a, b in changed[:SHOWN]]
        if len(changed) > SHOWN:
            lines.append(f"  and {len(changed) - SHOWN} more")
        return "\n".join(lines)


def searched(session: Session, explained: bool = True) -> Found:
    """What a session finds, fitted into memory as the planner does it."""
    clock, say = Clock(), lambda phase, detail: None
    return fitted(session, session.search(clock, say, explained), clock, say)


def what_if(session: Session, plan: Plan, change: Any) -> WhatIf:
    """Search again, from the plan that was found, with a line more or one of the lines less.

    `change`: a line; its YAML; or "without 2", the second of `plan.constraints`. Raises PlanError
    for anything else, ConstraintError and InfeasibleError where the change leaves no plan.
    """
    said, program = _changed(session.program, plan.constraints, change)
    more = program[len(session.program) :]
    if session.again is not None and any(map(changes_step, more)):
        return WhatIf(said, plan, session.again(more))
    found = searched(replace(session, program=program))
    return WhatIf(said, plan, plan_of(replace(session, program=program), plan, found))


def _changed(
    program: tuple[Statement, ...], listed: Sequence[str], change: Any
) -> tuple[str, tuple[Statement, ...]]:
    if isinstance(change, Statement):
        return f"with {change}", (*program, change)
    if not isinstance(change, str):
        raise PlanError(f'what_if: {change!r} is no line, no text of one, and not "without <n>"')
    dropped = re.fullmatch(r"without (\d+)", change.strip())
    if dropped is None:
        text = change if change.lstrip().startswith("-") else f"- {change}"
        more = parse_program(text, "what_if")
        return f"with {'; '.join(map(str, more))}", (*program, *more)
    n = int(dropped[1])
    if not 1 <= n <= len(listed):
        raise PlanError(f"what_if: {change!r}: the plan has {len(listed)} constraints")
    at = [str(line) for line in program]
    if listed[n - 1] not in at:
        raise PlanError(
            f"what_if: {listed[n - 1]} changes the step itself: plan it again without that line"
        )
    i = at.index(listed[n - 1])
    return f"without {program[i]}", program[:i] + program[i + 1 :]


def plan_of(session: Session, plan: Plan, found: Found) -> Plan:
    """`plan` with what a session found in place of what it says, and that session."""
    best, device = found.best, session.cluster.device
    gap = max(0.0, 1 - found.lower / best.seconds) if best.seconds else 0.0
    return replace(
        plan,
        axes=tuple(zip(best.priced.mesh.names, best.priced.mesh.shape)),
        decisions=describe.decisions(best.priced, best.choice),
        tensors=describe.tensors(best.priced, best.choice),
        traffic=describe.traffic(best.priced, best.choice, device),
        predicted=describe.prediction(best.priced, best.choice, device, session.limit),
        search=Search(found.status, found.lower, gap, 0.0, (), found.tried),
        constraints=tuple(str(line) for line in session.program),
        notes=(*found.bound.report(), *describe.remarks(best.priced, best.choice)),
        session=replace(session, best=best, lower=found.lower),
    )


def _numbers(plan: Plan) -> dict[str, float]:
    p = plan.predicted
    out = {
        "step": p.seconds, "compute": p.compute, "communication": p.communication,
        "memory": p.peak_bytes,
    }  # fmt: skip
    for t in plan.traffic:
        key = f"moved: {t.kind}"
        out[key] = out.get(key, 0.0) + t.nbytes * t.count
    return out


# -- shadow prices ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShadowPrice:
    """What a step would take less (`seconds`, above 0) if `what` were so.

    how: "solved", the search was run again; "at least", on the plan's mesh alone, so that another
    may save more; "estimate", from the multipliers of the memory limit.
    """

    what: str
    seconds: float
    how: str

    def __str__(self) -> str:
        saved = time_text(self.seconds) if self.seconds > 0 else "nothing"
        return f"{self.what}: saves {saved} a step ({self.how})"


def shadow_prices(session: Session, plan: Plan) -> tuple[ShadowPrice, ...]:
    """One more GB per device, each link 10 % faster, and each line of the program dropped."""
    best = session.best
    assert best is not None
    problem, unit = best.priced.problem, best.priced.unit
    now = evaluate(problem, best.choice)[0]
    out = []
    per_byte = memory_price(problem, now) * unit
    out.append(ShadowPrice("1 GB more per device", per_byte * GIGABYTE, "estimate"))
    if problem.usage_limit is not None:
        more = replace(problem, usage_limit=problem.usage_limit + GIGABYTE)
        out.append(ShadowPrice("1 GB more per device", _gain(session, more, best.choice) * unit,
                               "at least"))  # fmt: skip
    for name in dict.fromkeys(p.level.name for a in best.priced.mesh.axes for p in a.parts):
        mesh = _faster(best.priced.mesh, name)
        again = price(session.model, mesh, session.cluster.device, int(session.limit),
                      _on(best.priced.mesh, best.variant.keep))  # fmt: skip
        before = now * unit
        found = solve(again.problem, time_limit=SECONDS, seed=session.seed, hint=best.choice)
        cost = evaluate(again.problem, best.choice)[0] if found.cost is None else found.cost
        out.append(ShadowPrice(f"links of {name} 10 % faster", before - cost * again.unit,
                               "at least"))  # fmt: skip
    for n, line in enumerate(plan.constraints[:DROPPED], start=1):
        what = f"without line {n}, {line}"
        try:
            then = what_if(session, plan, f"without {n}")
        except (ConstraintError, InfeasibleError, PlanError):
            continue  # a hole of another line needs it, or the step is another without it
        out.append(ShadowPrice(what, -then.seconds, "solved"))
    return tuple(out)


def _gain(session: Session, problem: Any, choice: np.ndarray) -> int:
    """How much less the best choice of a looser problem costs than one of its choices."""
    found = solve(problem, time_limit=SECONDS, seed=session.seed, hint=choice)
    return evaluate(problem, choice)[0] - (found.cost if found.cost is not None else 0)


def _on(mesh: Mesh, keep: Callable) -> Callable:
    """A filter that sees the mesh it was made for."""
    return lambda node, rows, _: keep(node, rows, mesh)


def _faster(mesh: Mesh, level: str) -> Mesh:
    def part(p: Any) -> Any:
        if p.level.name != level:
            return p
        return replace(p, level=replace(p.level, link=p.level.link.faster(FASTER)))

    return Mesh(tuple(replace(a, parts=tuple(map(part, a.parts))) for a in mesh.axes))
