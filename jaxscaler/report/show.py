"""A plan as tables for a terminal: paths first, what differs only in a number on one row."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
from math import prod
from pathlib import PurePath
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from jaxscaler.graph import ir
from jaxscaler.plan import Decision, Plan, Specs, Tensor, Traffic

LARGEST = 12  # rows of activations and collectives
REPLICATED = 5
MESHES = 6
NOTABLE = 0.01  # share of the memory in use from which a replicated tensor is worth naming
RESTING = "at rest → in use"
NARROW = 100  # columns below which cells stand closer
LEAST = {RESTING: 20, "layout": 20, "path": 24, "source": 14}  # widths kept; first gives first
ARGUMENTS = (*ir.STATE_ROLES, ir.BATCH, ir.RNG, ir.CONSTANT)
_DIGITS = re.compile(r"(\d+)")
_SHORT = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}
_FOUND = {  # what the search of a mesh came to, as {} seconds a step
    "optimal": "{}",
    "feasible": "{}, not proved the best",
    "bounded": "none below {}",
    "unknown": "none found in time; none below {}",
    "close": "none below {}, too close to the best to be searched",
}

Row = tuple[str, ...]


def show(plan: Plan, console: Console | None = None) -> None:
    """Print `plan`: where state, batch and activations lie, collectives, memory, time, search.

    Bytes are those of one device. A row of arguments stands for `×` leaves that lie alike; its
    bytes are of all of them. A row of activations stands for those of equal layers, its bytes are
    of one: they do not live at once.
    """
    console = console or Console()
    columns: Row
    head = f"plan {plan.digest()} for {plan.cluster['name']} on mesh {mesh_text(plan)}"
    console.print(head, highlight=False, style="bold")
    _print_table(console, ("arguments", "tensor", RESTING, "×", "bytes"), _arguments(plan.tensors))
    largest = _largest(plan.tensors)
    if largest:
        columns = ("largest activations", "tensor", "layout", "bytes each")
        _print_table(console, columns, largest)
    if plan.traffic:
        columns = ("collectives of", "kind", "axis", "×", "bytes", "time", "source")
        _print_table(console, columns, _collectives(plan.traffic))
    summary = Table.grid(padding=(0, 2, 0, 0))
    for name, lines in _summary(plan):
        for n, line in enumerate(lines):
            summary.add_row("" if n else name, line)
    console.print(summary, markup=False, highlight=False)


# -- words -----------------------------------------------------------------------------------------


def mesh_text(plan: Plan) -> str:
    """The axes of a plan's mesh and their sizes, major first: "x=8, y=4"."""
    return ", ".join(f"{name}={size}" for name, size in plan.axes) or "one device"


def cuts_text(cuts: Sequence[tuple[str, str]]) -> str:
    """Which factor each mesh axis cuts, of (axis, factor): "batch over x"."""
    return ", ".join(f"{factor} over {axis}" for axis, factor in cuts) or "whole"


def decision_text(decision: Decision) -> str:
    """What is decided of one subject, at rest and in use where that differs."""
    text = cuts_text(decision.cuts)
    if decision.in_use is None:
        return text
    return f"{text} at rest, {cuts_text(decision.in_use)} in use"


def spec_text(spec: Specs) -> str:
    """A spec as users write it: P('data', None, ('x', 'y'))."""
    entries = ["None" if not d else repr(d[0]) if len(d) == 1 else repr(d) for d in spec]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def size_text(nbytes: float) -> str:
    """Bytes to three digits, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if nbytes >= 100 else f"{nbytes:.3g} {unit}"


def time_text(seconds: float) -> str:
    """Seconds to three digits, in the unit that suits them."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def type_text(tensor: Tensor) -> str:
    """Dtype and shape as JAX prints them: bf16[8,1024]."""
    kind, *bits = _DIGITS.split(tensor.dtype, maxsplit=1)
    return f"{_SHORT.get(kind, kind)}{''.join(bits)}[{','.join(map(str, tensor.shape))}]"


def source_text(source: str) -> str:
    """File name and line of a source written as "directory/file.py:line:column (function)"."""
    found = re.fullmatch(r"(.*?):(\d+)\b.*", source)
    return f"{PurePath(found[1]).name}:{found[2]}" if found else source


# -- rows ------------------------------------------------------------------------------------------


def _arguments(tensors: Iterable[Tensor]) -> list[Row]:
    """Leaves of the arguments. Optimizer state that lies as its parameters do is one row."""
    leaves = [t for t in tensors if t.role in ARGUMENTS]
    leaders = _leaders(leaves)
    stem = _stem({prefix for prefix, _, _ in leaders.values()})
    like = [t for t in leaves if t.path in leaders and _alike(t, leaders[t.path][2])]
    alike = {t.path for t in like}
    named: dict[bool, list[tuple[str, Hashable, Tensor]]] = {True: [], False: []}  # state, feeds
    for t in leaves:
        if t.path not in alike:
            path = f"{stem}/{leaders[t.path][1]}" if t.path in leaders else t.path
            key = (t.role, t.shape, t.dtype, t.spec, t.used_as)
            named[t.role in ir.STATE_ROLES].append((path, key, t))
    state, feeds = (
        [
            (path, type_text(group[0]), _layout(group[0]), str(len(group)), _total(group))
            for path, group in _grouped(named[is_state])
        ]
        for is_state in (True, False)
    )
    if like:
        pattern = stem if stem.endswith("*") else f"{stem}/*"
        state.append((pattern, "", "as the parameters", str(len(like)), _total(like)))
    return [*state, *feeds, ("together", "", "", str(len(leaves)), _total(leaves))]


def _alike(t: Tensor, leader: Tensor) -> bool:
    return (t.dtype, t.spec) == (leader.dtype, leader.spec)


def _leaders(leaves: Sequence[Tensor]) -> dict[str, tuple[str, str, Tensor]]:
    """Path of an optimizer leaf -> (what comes before, the path it shares with a parameter, that).

    A leaf follows the parameter of its shape whose path ends like its own for the longest.
    """
    endings: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for t in leaves:
        if t.role == ir.PARAMETER:
            for _, suffix in _cuts(t.path):
                endings.setdefault((suffix, t.shape), t)
    found = {}
    for t in leaves:
        if t.role == ir.OPTIMIZER:
            for prefix, suffix in _cuts(t.path):
                leader = endings.get((suffix, t.shape))
                if leader is not None:
                    found[t.path] = (prefix, suffix, leader)
                    break
    return found


def _cuts(path: str) -> Iterator[tuple[str, str]]:
    """(prefix, suffix) at every slash, the longest suffix first."""
    for at in (m.start() for m in re.finditer("/", path)):
        yield path[:at], path[at + 1 :]


def _stem(prefixes: set[str]) -> str:
    """One glob for paths that share their first parts: a/0/mu, a/0/nu -> a/0/*."""
    if len(prefixes) == 1:
        return next(iter(prefixes))
    levels = zip(*(prefix.split("/") for prefix in prefixes))
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]
    return "/".join((*shared, "*"))


def _layout(t: Tensor) -> str:
    """The spec at rest, and the one in use where that is another."""
    moved = t.used_as is not None and t.used_as != t.spec
    return spec_text(t.spec) + (f" → {spec_text(t.used_as or ())}" if moved else "")


def _total(tensors: Iterable[Tensor]) -> str:
    return size_text(sum(t.bytes_per_device for t in tensors))


def _largest(tensors: Iterable[Tensor]) -> list[Row]:
    named = [(t.path, (t.shape, t.dtype, t.spec), t) for t in tensors if t.role not in ARGUMENTS]
    groups = sorted(_grouped(named), key=lambda group: -group[1][0].bytes_per_device)
    return [
        (path, type_text(group[0]), _layout(group[0]), _total(group[:1]))
        for path, group in groups[:LARGEST]
    ]


def _collectives(traffic: Iterable[Traffic]) -> list[Row]:
    """Those of a step, the dearest first; `bytes` of one, time of all on the row."""
    named = [(t.value, (t.kind, t.axis, t.nbytes, source_text(t.source)), t) for t in traffic]
    groups = sorted(_grouped(named), key=lambda group: -sum(t.seconds for t in group[1]))
    rows: list[Row] = [
        (path or "?", group[0].kind, group[0].axis, str(sum(t.count for t in group)),
         size_text(group[0].nbytes), time_text(sum(t.seconds for t in group)),
         source_text(group[0].source))
        for path, group in groups[:LARGEST]
    ]  # fmt: skip
    rest = [t for _, group in groups[LARGEST:] for t in group]
    if rest:
        nbytes = size_text(sum(t.nbytes * t.count for t in rest))
        rows.append(("the others together", "", "", str(sum(t.count for t in rest)), nbytes,
                     time_text(sum(t.seconds for t in rest)), ""))  # fmt: skip
    return rows


def _grouped(named: Iterable[tuple[str, Hashable, Any]]) -> list[tuple[str, list[Any]]]:
    """Merge (path, key, item) of equal keys whose paths differ only in numbers, in order.

    The path of a group has * where its numbers differ, or, where another group would be called the
    same, the numbers: h_*/up, or h_{0,11}/up beside h_{1-10}/up.
    """
    groups: dict[tuple[str, Hashable], list[tuple[list[str], Any]]] = defaultdict(list)
    for path, key, item in named:
        groups[_DIGITS.sub("*", path), key].append((_DIGITS.split(path), item))
    texts: dict[tuple[str, int], set[str]] = defaultdict(set)  # of the numbers at a place
    runs: dict[tuple[str, Hashable, int], str] = {}
    for (pattern, key), members in groups.items():
        for at in range(1, len(members[0][0]), 2):
            text = _runs(sorted({int(split[at]) for split, _ in members}))
            texts[pattern, at].add(text)
            runs[pattern, key, at] = text
    out = []
    for (pattern, key), members in groups.items():
        parts = list(members[0][0])
        for at in range(1, len(parts), 2):
            text = runs[pattern, key, at]
            if not text.isdigit():
                parts[at] = "*" if len(texts[pattern, at]) == 1 else f"{{{text}}}"
        out.append(("".join(parts), [item for _, item in members]))
    return out


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers by their runs: 0,2-10."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# -- lines -----------------------------------------------------------------------------------------


def _summary(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """(name, lines): memory, time, what is replicated, the search, constraints, notes."""
    p, s = plan.predicted, plan.search
    share = p.peak_bytes / p.limit_bytes
    roles = ", ".join(f"{role} {size_text(n)}" for role, n in p.memory)
    yield (
        "memory",
        [
            f"{size_text(p.peak_bytes)} of {size_text(p.limit_bytes)} on a device ({share:.1%})",
            f"at the fullest moment {roles}",
        ],
    )
    kinds: Counter[str] = Counter()
    for t in plan.traffic:
        kinds[t.kind] += t.seconds  # type: ignore[assignment]
    lines = [
        f"{time_text(p.seconds)} a step: {time_text(p.compute)} compute, "
        f"{time_text(p.communication)} exposed communication"
    ]
    if kinds:
        spent = ", ".join(f"{kind} {time_text(t)}" for kind, t in kinds.most_common())
        lines.append(f"collectives, hidden or not: {spent}")
    yield "time", lines
    replicated = _replicated(plan)
    if replicated:
        yield "replicated", ["the largest tensors that every device holds whole:", *replicated]
    phases = ", ".join(f"{phase} {time_text(t)}" for phase, t in s.phases)
    meshes = [
        f"mesh {mesh}: " + _FOUND.get(status, status).format(time_text(seconds))
        for mesh, status, seconds in s.meshes
    ]
    more = [f"and {len(meshes) - MESHES} more meshes"] if len(meshes) > MESHES else []
    yield "search", [
        f"{s.status} in {time_text(s.seconds)}: bound {time_text(s.bound)}, gap {s.gap:.2%}",
        phases, *meshes[:MESHES], *more,
    ]  # fmt: skip
    if plan.constraints:
        yield "constraints", list(plan.constraints)
    if plan.notes:
        yield "notes", list(plan.notes)


def _replicated(plan: Plan) -> list[str]:
    """The largest tensors that no axis cuts, of those that matter."""
    named = [
        (t.path, (t.shape, t.dtype, t.role), t)
        for t in plan.tensors
        if plan.axes and prod(t.shape) > 1 and not any(t.spec)
        and t.bytes_per_device >= NOTABLE * plan.predicted.peak_bytes
    ]  # fmt: skip
    groups = sorted(_grouped(named), key=lambda group: -group[1][0].bytes_per_device)
    return [
        f"{path}: {size_text(group[0].bytes_per_device)}"
        + (f" ×{len(group)}" if len(group) > 1 else "")
        for path, group in groups[:REPLICATED]
    ]


def _print_table(console: Console, columns: Row, rows: Sequence[Row]) -> None:
    """Rows in aligned columns. Short of space, layouts wrap at commas and paths at slashes."""
    gap = 1 if console.width < NARROW else 2
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows)]
    over = sum(widths) + gap * (len(widths) - 1) - console.width
    kinds = ("path", *columns[1:])
    for kind, least in LEAST.items():
        if kind in kinds:
            at = kinds.index(kind)
            cut = min(max(over, 0), max(widths[at] - least, 0))
            widths[at] -= cut
            over -= cut
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for kind, title, width in zip(kinds, columns, widths):
        right = kind in ("×", "time") or kind.startswith("bytes")
        table.add_column(title, width=width, justify="right" if right else "left", overflow="fold")
    for path, *cells in rows:
        table.add_row(_wrapped(path, widths[0]), *cells)
    console.print(table, markup=False, highlight=False)
    console.print()


def _wrapped(path: str, width: int) -> str:
    """A path in lines of at most `width`, broken after a slash or a colon where there is one."""
    lines = [""]
    for part in re.findall(r"[^/:]*[/:]|[^/:]+", path):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append(" ")
        lines[-1] += part
    return "\n".join(lines)
