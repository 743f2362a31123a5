"""What the partitioner and a target's compiler say of a plan, beside what the plan predicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import Mesh, named_mesh
from jaxscaler.cost.collective import collective_time
from jaxscaler.errors import PlanError
from jaxscaler.graph.ir import BATCH, CONSTANT, RNG, STATE_ROLES
from jaxscaler.plan import Plan, Traffic
from jaxscaler.report.show import size_text
from jaxscaler.verify import audit as shardy
from jaxscaler.verify.cycles import clock
from jaxscaler.verify.normal_form import (
    ALL_GATHER,
    ALL_SLICE,
    COLLECTIVES,
    Collective,
    Node,
    normal_form,
)
from jaxscaler.verify.present import compiled_here
from jaxscaler.verify.targets import PRESENT, Target, target_of
from jaxscaler.verify.worker import TIMEOUT, TOO_BIG, Compiled, Progress, compile_for

Axes = tuple[str, ...]
ARGUMENTS = (*STATE_ROLES, BATCH, RNG, CONSTANT, "fixed")  # roles of what lies there all the time
SHOWN = 8  # rows of what was not foreseen
_NUMBER = re.compile(r"_\d+(?=/|$)")  # of a layer, in the names of its ops
SMALL = 0.01  # share of the bytes below which a difference is not worth a remark


@dataclass(frozen=True)
class Compared:
    """Bytes a step of one kind of collective over some axes: as planned, and as found."""

    kind: str
    axes: Axes
    planned: float
    found: float


@dataclass(frozen=True)
class Audit:
    """The collectives that Shardy makes of a planned step, against the plan's own.

    `unplanned` are those that no prediction accounts for, `missing` predictions that nothing came
    of, `rematerialized` values that are gathered whole only to be cut again.
    """

    collectives: tuple[Collective, ...]
    compared: tuple[Compared, ...]
    unplanned: tuple[Collective, ...]
    missing: tuple[Traffic, ...]
    rematerialized: tuple[Collective, ...]

    @property
    def agreement(self) -> float:
        """1 - (sum over kinds and axes of the difference) / (bytes found or planned)."""
        return agreement(self.compared)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"agreement": self.agreement, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"Shardy agrees with the plan on {self.agreement:.1%} of the bytes"]
        lines += _differences(self.compared)
        for title, rows in (
            ("not in the plan", self.unplanned),
            ("gathered whole only to be cut again", self.rematerialized),
        ):
            lines += [f"{title}: {_words(c)}" for c in rows[:SHOWN]]
            lines += [f"{title}: {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        for row in self.missing[:SHOWN]:
            lines.append(
                f"planned, but not found: {row.count} x {row.kind} over {row.axis}, "
                f"{size_text(row.nbytes)} each, {row.value} at {row.source}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Verified:
    """A plan beside what a target's compiler makes of it.

    `limit` is the share of the device's memory that the plan may fill, in bytes. `compared` is None
    where the compiled text is not to be had.
    """

    plan: Plan
    compiled: Compiled
    limit: float
    compared: tuple[Compared, ...] | None

    @property
    def fits(self) -> bool | None:
        """Whether the compiled step stays within the limit; None where it is not known."""
        needed = self.compiled.bytes
        if needed is None:
            return False if self.compiled.status == TOO_BIG else None
        return needed <= self.limit

    @property
    def memory(self) -> tuple[tuple[str, float, float | None], ...]:
        """(kind, bytes predicted, bytes compiled): arguments, what else there is, together."""
        roles = dict(self.plan.predicted.memory)
        lasting = sum(size for role, size in roles.items() if role in ARGUMENTS)
        peak = self.plan.predicted.peak_bytes
        made = self.compiled.memory
        return (
            ("arguments", lasting, None if made is None else made.argument),
            (
                "temporaries, results",
                peak - lasting,
                None if made is None else made.total - made.argument,
            ),
            ("together", peak, self.compiled.bytes),
        )

    @property
    def seconds(self) -> float | None:
        """Seconds of a step with the compiler's word in place of the plan's: its collectives, at
        the plan's prices, and on TPUs its cycles; None where the compiled text is not to be had.
        """
        if self.compared is None:
            return None
        own = Cluster.from_dict(self.plan.cluster)
        mesh = named_mesh(own, self.plan.axes)
        found = self.plan.predicted.seconds
        for planned, sign in ((False, 1), (True, -1)):
            found += sign * moving_seconds(self._moved(planned), mesh)
        rate = clock(own.device)
        if self.compiled.cycles and rate:
            cycles = sum(n for _, n in self.compiled.cycles)
            found += cycles / rate - self.plan.predicted.compute
        return found

    def _moved(self, planned: bool) -> list[Collective]:
        if not planned:
            return list(self.compiled.collectives or ())
        return [
            Collective(t.kind, _axes(t), round(t.nbytes), "", t.count)
            for t in self.plan.traffic
            if t.kind in COLLECTIVES
        ]

    @property
    def agreement(self) -> float | None:
        """As `Audit.agreement`, of the compiled collectives."""
        return None if self.compared is None else agreement(self.compared)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; without the plan, the program and its text."""
        c = self.compiled
        memory = {kind: {"predicted": a, "compiled": b} for kind, a, b in self.memory}
        return {
            "target": c.target.name, "status": c.status, "detail": c.detail, "fits": self.fits,
            "bytes": c.bytes, "limit": self.limit, "memory": memory,
            "compiled_memory": None if c.memory is None else asdict(c.memory),
            "agreement": self.agreement,
            "compared": None if self.compared is None else [asdict(row) for row in self.compared],
            "cycles": c.cycles, "remarks": c.remarks, "unknown": c.unknown, "seconds": c.seconds,
            "cached": c.cached, "versions": c.versions,
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        c, target = self.compiled, self.compiled.target
        if c.bytes is None:
            yield f"{target.name}: {c.status}: {c.detail}"
            return
        yield (
            f"{target.name}: needs {size_text(c.bytes)} of {size_text(target.memory)}, dominated "
            f"by {self._dominant()}"
        )
        if not self.fits:
            yield (
                f"does not fit: the plan may fill {size_text(self.limit)}; "
                "plan with verify=True, or with less memory="
            )
        for kind, predicted, compiled in self.memory:
            found = "not known" if compiled is None else size_text(compiled)
            yield f"{kind}: {size_text(predicted)} predicted, {found} compiled"
        if self.compared is None:
            yield f"collectives: {c.status}: {c.detail}"
        else:
            yield f"collectives agree with the plan on {agreement(self.compared):.1%} of the bytes"
            yield from _differences(self.compared)
        if c.cycles:
            total = sum(n for _, n in c.cycles)
            yield f"cycles by the compiler's estimate: {total:.4g}, most of them in"
            for path, n in by_layer(c.cycles).most_common(5):
                yield f"  {n / total:6.1%}  {path or 'what has no name'}"
        yield from (f"remark: {text}" for text in c.remarks)
        yield f"not known before it runs: {'; '.join(c.unknown)}"
        made = ", ".join(f"{name} {v}" for name, v in (c.versions or {}).items())
        yield f"compiled in {c.seconds:.1f} s{' (kept)' if c.cached else ''} with {made}"

    def _dominant(self) -> str:
        """The kind of memory that takes most, with the plan's roles of that kind."""
        made = self.compiled.memory
        roles = sorted(self.plan.predicted.memory, key=lambda row: -row[1])
        if made is None:
            return f"{roles[0][0]} by the plan's own count" if roles else "nothing known"
        lasting = made.argument >= made.total - made.argument
        name = "arguments" if lasting else "temporaries"
        size = made.argument if lasting else made.total - made.argument
        kinds = [role for role, _ in roles if (role in ARGUMENTS) == lasting]
        return f"{name}, {size_text(size)}" + (f" (most of it {kinds[0]})" if kinds else "")


def audited(plan: Plan) -> Audit:
    """Shardy's word on a plan. PlanError for a plan without its step (read from a file)."""
    lowered = _step(plan, "audited").lower(target_platform(plan), folded=True)
    nodes = shardy.read(shardy.partition(lowered))
    found = normal_form(nodes)
    unplanned, missing = unmatched(plan.traffic, found)
    return Audit(found, compare(plan.traffic, found), unplanned, missing, rematerialized(nodes))


def verified(
    plan: Plan,
    target: str | Cluster | None = None,
    *,
    timeout: float = TIMEOUT,
    cache: Any = True,
    progress: Progress | None = None,
    **options: Any,
) -> Verified:
    """A target's word on a plan: see `Plan.verify`."""
    step = _step(plan, "verified")
    own = Cluster.from_dict(plan.cluster)
    if target == PRESENT:
        compiled = compiled_here(plan, step, own)
        return _beside(plan, compiled, own)
    where: Target = target_of(own if target is None else target)
    size = prod(n for _, n in plan.axes)
    if where.devices != size:
        raise PlanError(
            f"the plan is for {size} devices, {where.name} has {where.devices}: plan for it"
        )
    same = where.platform == target_platform(plan)  # the options are one compiler's
    compiled = compile_for(
        where,
        step.lower(where.platform),
        compiler_options=plan.compiler_options if same else {},
        timeout=timeout,
        cache=cache,
        progress=progress,
        **options,
    )
    return _beside(plan, compiled, own)


def _beside(plan: Plan, compiled: Compiled, own: Cluster) -> Verified:
    share = plan.predicted.limit_bytes / own.device.hbm_bytes
    found = compiled.collectives
    compared = None if found is None else compare(plan.traffic, found)
    return Verified(plan, compiled, share * compiled.target.memory, compared)


def target_platform(plan: Plan) -> str:
    """The platform to lower a plan's step for: its cluster's, or where none is known, the CPU's."""
    try:
        return target_of(Cluster.from_dict(plan.cluster)).platform
    except PlanError:
        return "cpu"


def _step(plan: Plan, what: str) -> Any:
    if plan.step is None:
        raise PlanError(
            f"a plan read from a file has no step to be {what}: give the step too, with "
            "parallelize(step, plan=...) or `jaxscaler verify PLAN MODULE:FUNCTION`"
        )
    return plan.step


# --- comparing --------------------------------------------------------------------------------


def compare(planned: Iterable[Traffic], found: Iterable[Collective]) -> tuple[Compared, ...]:
    """Bytes by kind and axes, the most first."""
    bytes_: dict[tuple[str, Axes], list[float]] = {}
    for t in planned:
        if t.kind in COLLECTIVES:
            bytes_.setdefault((t.kind, _axes(t)), [0.0, 0.0])[0] += t.nbytes * t.count
    for c in found:
        bytes_.setdefault((c.kind, c.axes), [0.0, 0.0])[1] += c.bytes * c.count
    rows = (Compared(kind, axes, a, b) for (kind, axes), (a, b) in bytes_.items())
    return tuple(sorted(rows, key=lambda row: (-max(row.planned, row.found), row.kind, row.axes)))


def moving_seconds(collectives: Iterable[Collective], mesh: Mesh) -> float:
    """Seconds of collectives one after the other. One over a part of an axis, as partitioners
    split them, counts as over the whole."""
    total = 0.0
    for c in collectives:
        if c.axes:
            axis = mesh.axis(",".join(dict.fromkeys(_PART.sub("", name) for name in c.axes)))
            total += c.count * float(collective_time(c.kind, axis, c.bytes))
    return total


_PART = re.compile(r":\(\d+\)\d+$")


def agreement(rows: Sequence[Compared]) -> float:
    """1 - (sum of the differences) / (the larger sum of bytes); 1 where nothing moves."""
    total = max(sum(row.planned for row in rows), sum(row.found for row in rows))
    wrong = sum(abs(row.planned - row.found) for row in rows)
    return max(0.0, 1.0 - wrong / total) if total else 1.0


def unmatched(
    planned: Iterable[Traffic], found: Iterable[Collective]
) -> tuple[tuple[Collective, ...], tuple[Traffic, ...]]:
    """(found but not planned, planned but not found), matched by kind, axes and bytes."""
    left: Counter[tuple[str, Axes, int]] = Counter()
    planned = [t for t in planned if t.kind in COLLECTIVES]
    for t in planned:
        left[t.kind, _axes(t), round(t.nbytes)] += t.count
    unplanned = []
    for c in found:
        key = (c.kind, c.axes, c.bytes)
        more = c.count - min(c.count, left[key])
        left[key] -= c.count - more
        if more:
            unplanned.append(replace(c, count=more))
    missing = []
    for t in planned:
        key = (t.kind, _axes(t), round(t.nbytes))
        lacking = min(t.count, left[key])
        left[key] -= lacking
        if lacking:
            missing.append(replace(t, count=lacking))
    order = sorted(unplanned, key=lambda c: -c.bytes * c.count)
    return tuple(order), tuple(sorted(missing, key=lambda t: -t.nbytes * t.count))


def rematerialized(nodes: Sequence[Node]) -> tuple[Collective, ...]:
    """Gathers of which every device only uses slices: a way from one layout to another that makes
    the whole tensor on every device."""
    users: dict[int, set[str]] = {}
    for node in nodes:
        for j in node.inputs:
            users.setdefault(j, set()).add(node.op)
    return tuple(
        Collective(n.op, n.axes, n.bytes, n.dtype, n.times, n.scope, n.source)
        for i, n in enumerate(nodes)
        if n.op == ALL_GATHER and users.get(i) == {ALL_SLICE}
    )


def _axes(t: Traffic) -> Axes:
    return tuple(t.axis.split(","))


def _differences(rows: Sequence[Compared]) -> Iterator[str]:
    total = max(sum(row.planned for row in rows), sum(row.found for row in rows), 1.0)
    for row in rows:
        if abs(row.planned - row.found) > SMALL * total:
            yield (
                f"  {row.kind} over {','.join(row.axes)}: {size_text(row.planned)} planned, "
                f"{size_text(row.found)} found"
            )


def _words(c: Collective) -> str:
    times = f"{c.count} x " if c.count > 1 else ""
    where = f" at {c.source}" if c.source else ""
    return f"{times}{c.kind} over {','.join(c.axes)}, {size_text(c.bytes)}: {c.scope}{where}"


def by_layer(cycles: Sequence[tuple[str, int]]) -> Counter[str]:
    """Cycles by path, equal layers together: numbers in names are dropped."""
    found: Counter[str] = Counter()
    for path, n in cycles:
        found[_NUMBER.sub("_*", path)] += n
    return found
