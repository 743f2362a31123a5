"""Loops over parts that a program asks for, or forbids: the lines with SAME_DEVICE.

op_assign(op_trans(region("h_*/mlp"), Split("batch"), 4), SAME_DEVICE)        a co-shard
op_assign(op_trans(ops(phase=("forward", "backward")), Split("batch"), 8), SAME_DEVICE)
                                                                              accumulation
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from jaxscaler.errors import ConstraintError, InfeasibleError, RewriteError
from jaxscaler.graph.build import build
from jaxscaler.graph.ir import BACKWARD, FORWARD, UPDATE
from jaxscaler.graph.labels import factor_labels
from jaxscaler.holes import Hole
from jaxscaler.program import ALL, ANY, SAME_DEVICE, Line, Ops, Split, Statement
from jaxscaler.rewrite.accumulate import batch_division
from jaxscaler.rewrite.candidates import Candidate, candidates
from jaxscaler.rewrite.changes import Accumulate, Change, Segment
from jaxscaler.space.selected import Equations, equations, runs
from jaxscaler.space.subjects import Subjects
from jaxscaler.trace import Traced

PARTS = (2, 4, 8, 16)  # numbers that are tried where a line, or nobody, says one
MORE = (32, 64, 128)  # of an accumulation, that are tried where none of those makes a plan fit
ASKED = 12  # programs that are planned for them
FACTORS = 3  # that are tried where a line says ANY


def loop_lines(program: Sequence[Statement]) -> tuple[tuple[Line, ...], tuple[Statement, ...]]:
    """(the lines that speak of loops over parts, the others)."""
    lines = tuple(x for x in program if isinstance(x, Line) and x.place == SAME_DEVICE)
    return lines, tuple(x for x in program if x not in lines)


def accumulates(line: Line) -> bool:
    """Whether a line speaks of parts whose backward pass follows their forward pass."""
    subject = line.subject
    if not isinstance(subject, Ops) or subject != type(subject)(phase=subject.phase):
        return False
    return BACKWARD in subject.phase


class Way(NamedTuple):
    """One way to carry a line out. loops: (size of the factor, changes by parts and lanes)."""

    parts: int
    loops: tuple[tuple[int, Callable[[int, int], Sequence[Change]]], ...]

    def changes(self, lanes: int) -> tuple[Change, ...] | None:
        """Its changes; None where they do not divide into so many lanes too."""
        if any(size % (self.parts * lanes) for size, _ in self.loops):
            return None
        return tuple(change for _, made in self.loops for change in made(self.parts, lanes))


class Asked:
    """The loop lines of a program, bound to a step's graph and marked losses.

    Raises ConstraintError for a line that no loop carries out.
    """

    def __init__(
        self, lines: Sequence[Line], subjects: Subjects, losses: Sequence[Any],
        batch: Mapping[int, tuple],
    ):  # fmt: skip
        self.lines, self.subjects, self.losses = lines, subjects, losses
        self.graph, self.batch = subjects.graph, batch
        for line in lines:
            _check(line)

    # -- asked for ---------------------------------------------------------------------------------

    def wanted(self) -> list[list[Way]]:
        """Per line that asks for a loop the ways to do so, of which one is taken."""
        return [
            self._accumulation(line) if accumulates(line) else self._co_shards(line)
            for line in self.lines
            if not line.forbidden
        ]

    def _accumulation(self, line: Line) -> list[Way]:
        found = []
        for loss, jaxpr in enumerate(self.losses):
            batch = self.batch[loss]
            try:
                size = batch_division(jaxpr, dict(batch)).size
            except RewriteError as error:
                raise _refused(line, f"loss {loss}: {error}") from None
            found.append((size, partial(_accumulate, loss, batch)))
        return self._ways(line, found)

    def _co_shards(self, line: Line) -> list[Way]:
        assert isinstance(line.algo, Split)
        runs, names = self.runs(line), line.algo.factor
        if not runs:
            raise _refused(line, "it selects no op of the forward pass of a marked loss")
        named = None if names == ANY else self._named(names)
        groups: dict[tuple[Segment, ...], list[Candidate]] = defaultdict(list)
        for candidate in candidates(self.losses, runs, named, free=False):
            around = (next(r for r in runs if _within(s, r)) for s in candidate.segments)
            groups[tuple(around)].append(candidate)
        reached = {run for group in groups for run in group}
        if missing := [run for run in runs if run not in reached]:
            factor = "" if names == ANY else f" by a factor {names!r}"
            first, last = missing[0].first, missing[0].last
            raise _refused(line, f"no loop{factor} over equations {first} to {last} of the loss")
        count = max(map(len, groups.values())) if names == ANY else 1
        out: list[Way] = []
        for k in range(min(count, FACTORS)):
            some = [found[min(k, len(found) - 1)] for found in groups.values()]
            out += self._ways(line, [(c.size, c.changes) for c in some])
        return out

    def _ways(self, line: Line, loops: Sequence[tuple[int, Callable]]) -> list[Way]:
        num = line.num
        assert isinstance(num, int | tuple)
        numbers = [num] if isinstance(num, int) else [n for n in PARTS if num[0] <= n <= num[1]]
        found = [n for n in numbers if all(size % n == 0 for size, _ in loops)]
        if not found:
            sizes = ", ".join(str(size) for size, _ in loops)
            raise _refused(line, f"a factor of {sizes} has no such parts")
        return [Way(n, tuple(loops)) for n in found]

    # -- what a line selects -----------------------------------------------------------------------

    def equations(self, line: Line) -> Equations:
        """Equations of the forward pass whose ops a line selects."""
        assert isinstance(line.subject, Ops)
        return equations(self.subjects, line.subject)

    def runs(self, line: Line) -> list[Segment]:
        """The stretches of equations that a line selects without a gap; each is one loop."""
        heavy = {
            (op.origin.loss, op.origin.key)
            for op in self.graph.ops
            if op.origin is not None and "heavy" in self.graph.kinds[op.kind].traits
        }
        return [
            run
            for run in runs(self.graph, self.equations(line))
            if any((run.loss, (*run.inside, i)) in heavy for i in range(run.first, run.last + 1))
        ]

    def _named(self, names: Any) -> Any:
        """(segment, equation in its body, operand, dim) -> whether that is a factor so named."""
        names = (names,) if isinstance(names, str) else names
        labels = factor_labels(self.graph, self.subjects.folded)
        at = {
            (op.origin.loss, op.origin.key): op
            for op in self.graph.ops
            if op.origin is not None and op.phase == FORWARD and not op.origin.again
        }

        def named(segment: Segment, i: int, operand: int, dim: int) -> bool:
            op = at.get((segment.loss, (*segment.inside, i)))
            rule = None if op is None else self.graph.kinds[op.kind].rule
            if op is None or rule is None or operand >= len(rule.operands):
                return False
            dims = rule.operands[operand]
            if dim >= len(dims) or not dims[dim]:
                return False
            return labels[self.subjects.folded.op_class[op.id]].get(dims[dim][0]) in names

        return named

    # -- forbidden ---------------------------------------------------------------------------------

    def forbids(self, accumulation: bool, equations: Collection[tuple]) -> bool:
        """Whether a line forbids a loop over these (loss, key) of equations."""
        return any(
            accumulates(line) if accumulation else self._over(line, equations)
            for line in self.lines
            if line.forbidden
        )

    def _over(self, line: Line, equations: Collection[tuple]) -> bool:
        """Whether a line speaks of co-shards over some of these equations."""
        assert isinstance(line.subject, Ops)
        if accumulates(line) and UPDATE not in line.subject.phase:
            return False
        return not self.equations(line).isdisjoint(equations)


def _check(line: Line) -> None:
    if not isinstance(line.subject, Ops):
        raise _refused(line, "values do not run: say region(...) or ops(...)")
    if line.yielding:
        raise _refused(line, "a loop is asked for, or it is not: leave if_possible out")
    if line.algo is None and not line.forbidden:
        raise _refused(line, "say what is divided, and into how many parts: op_trans(region(...), "
                             "Split(...), n) in place of the subject")  # fmt: skip
    if line.algo is not None and not isinstance(line.algo, Split):
        raise _refused(line, f"{line.algo} makes no parts: say Split(...)")
    if isinstance(line.num, Hole) or line.num == ALL:
        raise _refused(line, "parts of a loop are a number or a range of numbers")
    if not line.forbidden and accumulates(line) and line.algo != Split("batch"):
        raise _refused(line, 'forward and backward pass are divided by samples: Split("batch")')


def _refused(line: Line, why: str) -> ConstraintError:
    return ConstraintError(f"{line} ({line.source}): {why}")


def _within(inner: Segment, outer: Segment) -> bool:
    same = (inner.loss, inner.inside) == (outer.loss, outer.inside)
    return same and outer.first <= inner.first and inner.last <= outer.last


def _accumulate(loss: int, batch: tuple, parts: int, lanes: int) -> tuple[Accumulate, ...]:
    return (Accumulate(loss, parts, batch, lanes),)


# -- planned ----------------------------------------------------------------------


def taken(
    search: Callable, traced: Traced, wanted: Sequence[Sequence[Way]], devices: int, seconds: float
) -> Any:
    """The best planned step (`search(traced, graph, seconds)`) with loops that lines ask for.

    Raises InfeasibleError where none fits.
    """
    best, error, tried = None, None, 0
    for ways in product(*wanted):
        for lanes in dict.fromkeys((devices, 1)):
            some = [way.changes(lanes) for way in ways]
            if None in some or tried == ASKED:
                continue
            tried += 1
            step = traced.changed([change for changes in some for change in changes or ()])
            try:
                found = search(step, build(step), seconds)
            except InfeasibleError as cause:
                error = cause
                continue
            if best is None or found.plan.predicted.seconds < best.plan.predicted.seconds:
                best = found
    if best is None:
        raise error or ConstraintError("no loop that is asked for divides so")
    plan = replace(best.plan, changes=best.traced.changes)
    if tried == ASKED:
        plan = replace(plan, notes=(*plan.notes, f"of the ways to loop, {ASKED} were tried"))
    return replace(best, plan=plan)
