"""A plan in forms that need no jaxscaler: plain JAX source, and rules of (regex, PartitionSpec)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.graph.ir import STATE_ROLES, OpGraph
from jaxscaler.lower.interpret import with_branch_ends
from jaxscaler.plan import Plan, Specs
from jaxscaler.report import standalone
from jaxscaler.report.show import cuts_text, mesh_text

INTERIOR = ("op", "cluster", "use")  # decisions on what neither comes in nor goes out
NAMED = 12  # subjects of a layout that are named


class Rules(NamedTuple):
    """Rules in order: the first whose pattern is found in a path (`re.search`) gives its spec.

    `unsaid`: what the plan says and rules can not.
    """

    rules: tuple[tuple[str, PartitionSpec], ...]
    unsaid: tuple[str, ...]


def to_rules(plan: Plan) -> Rules:
    """Rules for the paths of the state: right for every leaf of it, few as a greedy search goes.

    Numbers in paths are generalised where leaves that differ only in them lie alike. A spec leaves
    out whole dims at its end, so `PartitionSpec()` is "whole" at any rank. Paths with several
    layouts (no path tells their leaves apart) get no rule; they are in `unsaid`.
    """
    found: dict[str, set[Specs]] = {}
    for tensor in plan.tensors:
        if tensor.role in STATE_ROLES:
            found.setdefault(tensor.path, set()).add(_trimmed(tensor.spec))
    ambiguous = [path for path, specs in found.items() if len(specs) > 1]
    specs = {path: next(iter(s)) for path, s in found.items() if len(s) == 1}
    rules = tuple((pattern, partition_spec(spec)) for pattern, spec in _decision_list(specs))
    unsaid = [f"{path}: leaves of this path lie apart, no rule can tell them" for path in ambiguous]
    unsaid.append(f"the mesh: {mesh_text(plan)}")
    unsaid += [f"{t.path}: {_spec_text(t.spec)}" for t in plan.tensors if t.role == "batch"]
    unsaid += _interior_words(plan)
    return Rules(rules, tuple(unsaid))


def partition_spec(spec: Specs) -> PartitionSpec:
    """A spec of the plan as JAX's, whole dims at its end left out."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in _trimmed(spec)))


# -- rules -----------------------------------------------------------------------------------------


def _decision_list(specs: dict[str, Specs]) -> list[tuple[str, Specs]]:
    """Patterns in order. Each takes, of the paths that are left, only such as lie alike: right by
    construction. Last comes a pattern for all that is left.
    """
    alike: dict[str, set[Specs]] = {}
    for path, spec in specs.items():
        alike.setdefault(re.sub(r"\d+", "0", path), set()).add(spec)
    patterns = {path: _patterns(path, r"\d+") for path in specs}
    exact = {path: _patterns(path, None) for path in specs}
    useful = {pattern for names in patterns.values() for pattern in names}
    for path in specs:
        if len(alike[re.sub(r"\d+", "0", path)]) > 1:  # numbers tell leaves apart
            useful |= exact[path]
    matching: dict[str, set[str]] = {}
    for path in specs:
        for pattern in useful & (patterns[path] | exact[path]):
            matching.setdefault(pattern, set()).add(path)
    left, rules = dict(specs), []
    while len(set(left.values())) > 1:
        pure = {p: hits for p, hits in matching.items() if len({left[path] for path in hits}) == 1}
        # most paths; of those that take as many the shortest, then the first
        pattern = min(pure, key=lambda p: (-len(pure[p]), len(p), p))
        taken = set(pure[pattern])
        rules.append((pattern, left[next(iter(taken))]))
        left = {path: spec for path, spec in left.items() if path not in taken}
        matching = {p: rest for p, hits in matching.items() if (rest := hits - taken)}
    rules += [(".*", spec) for spec in set(left.values())]
    for rule in list(rules):  # a later rule may do for what an earlier one took
        fewer = [r for r in rules if r is not rule]
        if all(first_match(fewer, path) == spec for path, spec in specs.items()):
            rules = fewer
    return rules


def first_match(rules: Sequence[tuple[str, Any]], path: str) -> Any:
    """The spec of the first rule whose pattern is found in `path`, or None."""
    return next((spec for pattern, spec in rules if re.search(pattern, path)), None)


def _patterns(path: str, number: str | None) -> set[str]:
    """All patterns that match a path: its ends, a name far before an end, itself; `number` in place
    of each number in it, if given.
    """
    names = [_escaped(part, number) for part in path.split("/")]
    found = {f"^{'/'.join(names)}$"}
    for n in range(1, len(names) + 1):
        end = "/".join(names[-n:])
        found.add(f"(^|/){end}$")
        found.update(f"(^|/){name}/.*/{end}$" for name in names[: -n - 1])
    return found


def _escaped(part: str, number: str | None) -> str:
    pieces = re.split(r"(\d+)", part)
    return "".join(number if number and p.isdigit() else re.escape(p) for p in pieces)


def _trimmed(spec: Specs) -> Specs:
    n = len(spec)
    while n and not spec[n - 1]:
        n -= 1
    return tuple(spec[:n])


# -- source ----------------------------------------------------------------------------------------

LINE = "# --- how the tables are applied"  # of `standalone`, where its source begins to be copied


def to_python(
    plan: Plan, traced: Any, graph: OpGraph, layouts: Any, donate: tuple[int, ...]
) -> str:
    """Source of a module with the plan's mesh, all its layouts, and `jit_step(step, mesh, *args)`.

    `traced`, `layouts`, `donate`: the step, its specs by position, and the arguments that it takes
    over. Raises PlanError for a step with arguments by keyword only, which `jax.jit` gives no
    shardings, and for a plan that changes the loss itself.
    """
    if traced.keywords:
        raise PlanError(
            f"jax.jit takes no shardings for arguments given by keyword ({traced.keywords}): plan "
            "the step with them given by position"
        )
    if traced.changes:
        raise PlanError(
            f"the plan changes the loss before it is differentiated ({len(traced.changes)} changes,"
            " such as recomputation), which no layout can say: plan.to_rules() gives those of the "
            "state"
        )
    axes = plan.mesh_axes
    layouts = with_branch_ends(traced.jaxpr, layouts, _compat.abstract_mesh(axes))
    lines = {
        op.key: f"{graph.kinds[op.kind].primitive} {op.source.rpartition('/')[2]}".strip()
        for op in graph.ops
    }
    kernels, unsaid = {}, []
    for key, specs in layouts.kernels.items():
        if lines[key].startswith("pallas_call") and any(cut for s in specs[0] for cut in s):
            unsaid.append(f"{lines[key]} runs under shard_map on the part of each device")
        else:
            kernels[key] = specs
    static = tuple(traced.position(name) for name, _ in traced.static)
    options = {"donate_argnums": _positions(traced, donate)}
    if static:
        options["static_argnums"] = static
    names = ", ".join(traced.arg_names)
    return _SOURCE.format(
        title=f"Shardings of {getattr(traced.step, '__name__', 'step')}({names}) "
        f"on {mesh_text(plan)}, planned for {plan.cluster.get('name', 'a cluster')}.",
        digest=plan.digest(),
        axes=repr(axes),
        arguments=repr(traced.arg_names),
        inputs=_table(traced.in_paths, layouts.inputs),
        outputs=_table(traced.out_paths, layouts.outputs),
        inside=_inside(layouts, lines),
        kernels="".join(f"    {key}: {_sides(specs)},\n" for key, specs in kernels.items()),
        program=repr(standalone.program(traced.jaxpr)),
        options=repr(options),
        compiler_options=repr(dict(plan.compiler_options)),
        in_context=_compat.in_mesh_context(traced.jaxpr),
        functions=inspect.getsource(standalone).partition(LINE)[2].partition("\n")[2].strip(),
        unsaid="\n".join(map(_comment, unsaid)) or "# Nothing.",
    )


def _inside(layouts: Any, lines: dict) -> str:
    """Rows of INSIDE, in the order of the program."""
    rows: dict[tuple[int, ...], dict[str, dict]] = {}
    for side, tables in (
        ("in", (layouts.operands, layouts.body_inputs)),
        ("out", (layouts.results, layouts.body_outputs)),
    ):
        for key, at in (item for table in tables for item in table.items()):
            rows.setdefault(key, {})[side] = at
    text = ""
    for key, sides in sorted(rows.items()):
        said = ", ".join(
            f"{side!r}: {{{', '.join(f'{i}: {_specs(specs)}' for i, specs in sorted(at.items()))}}}"
            for side, at in sides.items()
        )
        what = lines.get(key) or (f"inside {lines.get(key[:-1], 'a call')}" if key else "the step")
        text += f"    # {what}\n    {key}: {{{said}}},\n"
    return text


def _specs(specs: Sequence[Specs]) -> str:
    return f"[{', '.join(map(_spec_text, specs))}]"


def _sides(specs: tuple[Sequence[Specs], Sequence[Specs]]) -> str:
    ins, outs = specs
    return f"(({''.join(_spec_text(s) + ', ' for s in ins)}), {_specs(outs)})"


def _comment(text: str) -> str:
    return fill(text, 99, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)


def _positions(traced: Any, donate: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(traced.position(traced.arg_names[i]) for i in donate)


def _table(paths: Sequence[str], specs: Sequence[Specs | None]) -> str:
    return "".join(
        f"    {path!r}: {'None' if spec is None else _spec_text(spec)},\n"
        for path, spec in zip(paths, specs, strict=True)
    )


def _spec_text(spec: Specs) -> str:
    parts = (
        repr(axes[0]) if len(axes) == 1 else repr(tuple(axes) or None) for axes in _trimmed(spec)
    )
    return f"P({', '.join(parts)})"


def _interior_words(plan: Plan) -> list[str]:
    """What the plan decides of tensors inside the step: by layout, and some of its subjects."""
    found: dict[tuple, list[str]] = {}
    for d in plan.decisions:
        if d.what in INTERIOR:
            found.setdefault(d.cuts, []).append(d.subject)
        elif d.in_use is not None and d.in_use != d.cuts:
            found.setdefault(d.in_use, []).append(f"{d.subject} in use")
    lines = []
    for cuts, subjects in found.items():
        subjects.sort(key=lambda name: not name.endswith(("in use", "dot_general")))
        more = len(subjects) - NAMED
        rest = f", and {more} more that plan.program() lists" if more > 0 else ""
        lines.append(f"inside the step, {cuts_text(cuts)}: {', '.join(subjects[:NAMED])}{rest}")
    return lines


_SOURCE = '''"""{title}

Plain JAX. Plan {digest}.

    mesh = make_mesh()
    jitted = jit_step(step, mesh, *args)   # args: arrays or jax.ShapeDtypeStruct
"""

import contextlib
import hashlib
import math
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {axes}
ARGUMENTS = {arguments}

INPUTS = {{
{inputs}}}

OUTPUTS = {{
{outputs}}}

# By equation of the step's jaxpr (see `Body`): the specs of its operands and results, by position,
# one after another.
INSIDE = {{
{inside}}}

# Equations that every device runs on its part alone: specs of all operands, of all results.
KERNELS = {{
{kernels}}}

PROGRAM = {program}  # the digest of the jaxpr that INSIDE counts
OPTIONS = {options}
COMPILER_OPTIONS = {compiler_options}  # on GPUs
IN_CONTEXT = {in_context}  # the step speaks of the axes of its mesh

# What this form can not say, and leaves to the compiler:
{unsaid}


{functions}
'''
