"""Well-known plans beside the searched one: what each takes, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from jaxscaler.errors import ConstraintError, InfeasibleError, PlanError
from jaxscaler.explain import plan_of, searched
from jaxscaler.plan import Plan
from jaxscaler.program import Statement
from jaxscaler.report.show import mesh_text, size_text, time_text
from jaxscaler.space.constraints import changes_step
from jaxscaler.why import Session

SEARCHED = "searched"


@dataclass(frozen=True)
class Row:
    """A program by name, and its best plan, or what leaves it none."""

    name: str
    plan: Plan | None
    reason: str = ""


def compare(
    plan: Plan,
    programs: Mapping[str, Sequence[Statement]],
    progress: Callable[[str, str], None] = lambda phase, detail: None,
) -> list[Row]:
    """The plan, then the best plan of each program on top of the plan's own constraints.

    A line that matches nothing makes a program one of another model: it has no plan. The fastest
    come first. Raises PlanError for a plan that was read from a file.
    """
    session = plan.session
    if not isinstance(session, Session):
        raise PlanError("compare: the plan was not searched now: plan the step again, cache=False")
    rows = [Row(SEARCHED, plan)]
    for name, program in programs.items():
        progress("compare", name)
        try:
            best = _best(session, plan, program)
        except (ConstraintError, InfeasibleError) as error:
            rows.append(Row(name, None, _reason(error)))
            continue
        idle = [note for note in best.notes if note.endswith("matches nothing")]
        if idle:
            rows.append(Row(name, None, idle[0].removeprefix("constraint ")))
        else:
            rows.append(Row(name, best))
    return sorted(rows, key=lambda r: float("inf") if r.plan is None else r.plan.predicted.seconds)


def _best(session: Session, plan: Plan, program: Sequence[Statement]) -> Plan:
    """The best plan with a program more: of the step as it was written, if that changes it."""
    if session.again is not None and any(map(changes_step, program)):
        return session.again(program)
    mine = replace(session, program=(*session.program, *program))
    return plan_of(mine, plan, searched(mine, explained=False))


def _reason(error: Exception) -> str:
    """The first line of an error, with the next where that is a heading."""
    first, _, rest = str(error).partition("\n")
    return f"{first} {rest.partition(chr(10))[0].strip()}" if first.endswith(":") else first


def comparison_table(rows: Sequence[Row]) -> Table:
    """As people read it."""
    table = Table(title="recipes beside the searched plan")
    for column in ("plan", "step", "of searched", "communication", "memory", "moved", "mesh"):
        table.add_column(column, justify="left" if column in ("plan", "mesh") else "right")
    searched = next(row.plan for row in rows if row.name == SEARCHED and row.plan is not None)
    for row in rows:
        if row.plan is None:
            table.add_row(row.name, "none", "", "", "", "", row.reason)
            continue
        p = row.plan.predicted
        table.add_row(
            row.name, time_text(p.seconds), f"{p.seconds / searched.predicted.seconds:.2f}",
            time_text(p.communication), size_text(p.peak_bytes), size_text(moved(row.plan)),
            mesh_text(row.plan),
        )  # fmt: skip
    return table


def as_data(rows: Sequence[Row]) -> list[dict]:
    """The same as plain data: seconds and bytes."""
    out: list[dict] = []
    for row in rows:
        if row.plan is None:
            out.append({"plan": row.name, "reason": row.reason})
            continue
        p = row.plan.predicted
        out.append(
            {"plan": row.name, "seconds": p.seconds, "communication": p.communication,
             "peak_bytes": p.peak_bytes, "moved_bytes": moved(row.plan), "axes": row.plan.axes,
             "status": row.plan.search.status}
        )  # fmt: skip
    return out


def moved(plan: Plan) -> float:
    """Bytes that a device's collectives move in a step; the batch from the host is none."""
    return sum(t.nbytes * t.count for t in plan.traffic if t.axis != "host")
