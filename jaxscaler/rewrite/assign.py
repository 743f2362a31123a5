"""Pipeline stages of a forward pass, written into its equations before it is differentiated.

`changes.Stages` says from which equation of a marked loss on (of a scan: from which iteration on)
the forward pass runs where. A *run* is a stretch of equations of one place; it is the stage of a
pipeline, and a place that is visited several times has several. Every equation gets "stage@run" in
its name stack, which JAX hands on to all that it derives, so that backward equations say where
they run. A value that does not depend on the batch and is read by several runs (a tied table) is
copied for each, so that each adds up a gradient of its own; they are summed once a step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscaler import _compat
from jaxscaler.errors import RewriteError
from jaxscaler.rewrite.changes import Fission, Stages

_RUN = re.compile(r"stage@(\d+)")


def run_text(run: int) -> str:
    """What stands in the name stack of an equation of a run."""
    return f"stage@{run}"


def run_of(eqn: Any) -> int | None:
    """The run of an equation: its own, or that of all equations inside; None if nothing says.

    Raises RewriteError where the equations inside of one are of several runs.
    """
    if found := _RUN.search(str(eqn.source_info.name_stack)):
        return int(found[1])
    inside = {
        run
        for body in _compat.subjaxprs(eqn)
        for inner in _compat.open_jaxpr(body)[0].eqns
        if (run := run_of(inner)) is not None
    }
    if len(inside) > 1:
        raise RewriteError(
            f"`{eqn.primitive.name}` at {_compat.source_line(eqn) or '?'} runs on stages "
            f"{sorted(inside)}: a stage may not begin inside of it; cut before or after it"
        )
    return inside.pop() if inside else None


def places_of(change: Stages) -> tuple[int, ...]:
    """[run]: the place where it runs. Raises RewriteError for points that are out of order."""
    points = change.points
    if not points or points[0][:2] != (0, 0):
        raise RewriteError(f"{change}: the ops before the first point are on no stage")
    if any(b[:2] <= a[:2] for a, b in pairwise(points)):
        raise RewriteError(f"{change}: the points of stages must come in program order")
    return tuple(p for i, (_, _, p) in enumerate(points) if i == 0 or points[i - 1][2] != p)


def runs_of(change: Stages) -> dict[tuple[int, int], int]:
    """(equation, iteration) -> the run that begins there."""
    found: dict[tuple[int, int], int] = {}
    run, last = -1, None
    for equation, trip, place in change.points:
        if place != last:
            run, last = run + 1, place
            found[equation, trip] = run
    return found


class Assignment:
    """Where each equation at the top level of a loss runs: what `apply` asks while it writes."""

    def __init__(self, jaxpr: Any, change: Stages, batch: Mapping[int, int]):
        places_of(change)
        begins = runs_of(change)
        self.change = change
        self.runs: dict[int, list[int]] = {}  # equation -> its runs; a cut scan has several
        self.trips: dict[int, list[int]] = defaultdict(list)  # of a cut scan: where pieces begin
        for equation, trip in begins:
            if equation >= len(jaxpr.eqns):
                raise RewriteError(f"{change}: the loss has only {len(jaxpr.eqns)} equations")
            if trip:
                self.trips[equation].append(trip)
        run = 0
        for i in range(len(jaxpr.eqns)):
            run = begins.get((i, 0), run)
            self.runs[i] = [run]
            for trip in self.trips.get(i, ()):
                run = begins[i, trip]
                self.runs[i].append(run)
        self.shared = self._shared(jaxpr, batch)
        self.copies: dict[tuple[Any, int], Any] = {}

    def fission(self, i: int, eqn: Any) -> Fission | None:
        """How the scan at equation `i` is cut; None where it is not."""
        starts = self.trips.get(i)
        if not starts:
            return None
        if eqn.primitive.name != "scan":
            raise RewriteError(
                f"{self.change}: equation {i} is a {eqn.primitive.name}; a stage can begin inside "
                "of a scan only"
            )
        length = _compat.scan_sizes(eqn)[2]
        if starts[-1] >= length:
            raise RewriteError(f"{self.change}: scan {i} has only {length} iterations")
        ends = [0, *starts, length]
        return Fission(self.change.loss, i, tuple(b - a for a, b in pairwise(ends)))

    def marked(self, i: int, eqn: Any) -> Any:
        """Equation `i`, its bodies marked with its run, if it has one."""
        bodies = _compat.subjaxprs(eqn)
        if not bodies or len(self.runs[i]) > 1:
            return eqn
        new = [marked(body, self.runs[i][0]) for body in bodies]
        return eqn.replace(params=_compat.with_subjaxprs(eqn, new))

    def reads(self, i: int, eqn: Any, atoms: Sequence, values: Sequence) -> list:
        """`values` as equation `i` reads them: copies of those that another run reads first."""
        return [self._read(i, eqn, v, x) for v, x in zip(atoms, values)]

    def _read(self, i: int, eqn: Any, var: Any, value: Any) -> Any:
        run = self.runs[i][0]
        if _compat.is_literal(var) or self.shared.get(var, run) == run:
            return value
        if (var, run) not in self.copies:
            with jax.named_scope(run_text(run)), _compat.where_it_stands(eqn):
                self.copies[var, run] = checkpoint_name(value, run_text(run))
        return self.copies[var, run]

    def _shared(self, jaxpr: Any, batch: Mapping[int, int]) -> dict[Any, int]:
        """Variables that do not depend on the batch and that several runs read -> the first."""
        arguments = (*jaxpr.constvars, *jaxpr.invars)
        varying = {arguments[i] for i in batch}
        readers: dict[Any, list[int]] = defaultdict(list)
        for i, eqn in enumerate(jaxpr.eqns):
            read = [v for v in eqn.invars if not _compat.is_literal(v)]
            if not varying.isdisjoint(read):
                varying.update(eqn.outvars)
                for v in read:
                    readers[v].append(self.runs[i][0])
        return {
            v: runs[0]
            for v, runs in readers.items()
            if v not in varying and len({*runs}) > 1 and _is_float(v.aval)
        }


def marked(jaxpr: Any, run: int) -> Any:
    """A body (open or closed) whose equations say their run: loops may lose their own name."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqns = []
    for eqn in inner.eqns:
        bodies = [marked(body, run) for body in _compat.subjaxprs(eqn)]
        params = _compat.with_subjaxprs(eqn, bodies) if bodies else eqn.params
        eqns.append(_compat.in_scope(eqn.replace(params=params), run_text(run)))
    return _compat.with_eqns(jaxpr, eqns, inner.outvars)


def copied(args: Sequence, run: int) -> list:
    """What a piece of a cut scan reads of the others' values."""
    return [checkpoint_name(x, run_text(run)) if _is_float(x) else x for x in args]


def _is_float(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
