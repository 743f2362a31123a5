"""A plan in forms that need no jaxscaler: plain JAX source, and rules of (regex, PartitionSpec)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jaxscaler.errors import PlanError
from jaxscaler.graph.ir import STATE_ROLES
from jaxscaler.plan import Plan, Specs

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
    unsaid.append(f"the mesh: {_mesh_text(plan)}")
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


def to_python(plan: Plan, traced: Any, layouts: Any, donate: tuple[int, ...]) -> str:
    """Source of a module with the plan's mesh, a spec per leaf, and `jit_step(step, mesh, *args)`.

    `traced`, `layouts`, `donate`: the step, its specs by position, and the arguments that it takes
    over. Raises PlanError for a step whose arguments `jax.jit` gives no shardings: by keyword only.
    """
    if traced.keywords:
        raise PlanError(
            f"jax.jit takes no shardings for arguments given by keyword ({traced.keywords}): plan "
            "the step with them given by position"
        )
    inputs = _table(traced.in_paths, layouts.inputs)
    outputs = _table(traced.out_paths, layouts.outputs)
    static = tuple(traced.position(name) for name, _ in traced.static)
    names = ", ".join(traced.arg_names)
    axes = plan.axes or (("device", 1),)
    words = list(_interior_words(plan))
    if layouts.kernels:
        words.append(f"{len(layouts.kernels)} kernels run under shard_map, each device on its part")
    unsaid = "\n".join(map(_comment, words)) or "# Nothing."
    options = [f"donate_argnums={_positions(traced, donate)!r}"]
    options += [f"static_argnums={static!r}"] if static else []
    return _SOURCE.format(
        title=f"Shardings of {getattr(traced.step, '__name__', 'step')}({names}) "
        f"on {_mesh_text(plan)}, planned for {plan.cluster.get('name', 'a cluster')}.",
        digest=plan.digest(), axes=repr(axes), arguments=repr(traced.arg_names), inputs=inputs,
        outputs=outputs, options=", ".join(options), unsaid=unsaid,
    )  # fmt: skip


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


def _mesh_text(plan: Plan) -> str:
    return ", ".join(f"{name}={size}" for name, size in plan.axes) or "one device"


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
        layout = ", ".join(f"{factor} over {axis}" for axis, factor in cuts) or "whole"
        subjects.sort(key=lambda name: not name.endswith(("in use", "dot_general")))
        more = len(subjects) - NAMED
        rest = f", and {more} more that plan.program() lists" if more > 0 else ""
        lines.append(f"inside the step, {layout}: {', '.join(subjects[:NAMED])}{rest}")
    return lines


_SOURCE = '''"""{title}

Plain JAX. Plan {digest}.

    mesh = make_mesh()
    jitted = jit_step(step, mesh, *args)   # args: arrays or jax.ShapeDtypeStruct

What this form can not say, and leaves to the compiler, is listed at its end.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {axes}
ARGUMENTS = {arguments}

INPUTS = {{
{inputs}}}

OUTPUTS = {{
{outputs}}}


def make_mesh(devices=None):
    """The mesh on `devices` (default: the first of all), in their order."""
    names, sizes = zip(*AXES)
    devices = (jax.devices() if devices is None else devices)[: math.prod(sizes)]
    kinds = (AxisType.Auto,) * len(names)
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=kinds)


def path_of(keys):
    """A path of `jax.tree_util` as the tables have it."""
    parts = (jax.tree_util.keystr((key,), simple=True) for key in keys)
    return "/".join(part for part in parts if part)


def shardings(mesh, tree, table, name=""):
    """`tree` with the sharding of each leaf; `name` is that of the argument."""

    def sharding(keys, leaf):
        spec = table["/".join(part for part in (name, path_of(keys)) if part) or "result"]
        return None if spec is None else NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def jit_step(step, mesh, *args):
    """`jax.jit(step)` with the shardings of its arguments (arrays, or their types) and results."""
    options = dict({options})
    static = options.get("static_argnums", ())
    dynamic = [arg for i, arg in enumerate(args) if i not in static]
    ins = tuple(
        shardings(mesh, arg, INPUTS, name) for name, arg in zip(ARGUMENTS, dynamic, strict=True)
    )
    out = jax.jit(step, static_argnums=static).eval_shape(*args)
    outs = shardings(mesh, out, OUTPUTS)
    return jax.jit(step, in_shardings=ins, out_shardings=outs, **options)


# Not said here (the compiler lays these out as follows from the above, or not):
{unsaid}
'''
