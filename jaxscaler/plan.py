"""A plan: decisions by subject, and what they cost. Plain data with a JSON form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from jaxscaler.errors import PlanError
from jaxscaler.program import (
    PLAN,
    Line,
    Replicate,
    Split,
    op_assign,
    op_trans,
    ops,
    region,
    short,
    values,
)
from jaxscaler.rewrite.changes import Change, from_data, to_data

VERSION = 1
T = TypeVar("T")

Specs = tuple[tuple[str, ...], ...]  # per dim, the mesh axes that cut it, major first


@dataclass(frozen=True)
class Decision:
    """What is decided of one subject: which factor each mesh axis cuts.

    In the language: for every factor, `op_assign(op_trans(subject, Split(factor), parts), axes)`;
    with no cuts, `op_trans(subject, Replicate())`. `count` subjects
    share the decision (repeated layers). `in_use` is the layout that state is read in, where it has
    its own.
    """

    subject: str
    what: str
    count: int
    cuts: tuple[tuple[str, str], ...]
    in_use: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True)
class Tensor:
    """A leaf of the step's arguments, or a large activation: where it lies and what it takes."""

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: Specs
    bytes_per_device: float
    used_as: Specs | None = None


@dataclass(frozen=True)
class Traffic:
    """A collective of the step: `nbytes` on one device each time, `count` times a step."""

    kind: str
    axis: str
    nbytes: float
    count: int
    seconds: float
    value: str
    source: str


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and bytes on a device, by what they go to."""

    seconds: float
    compute: float
    communication: float
    peak_bytes: float
    limit_bytes: float
    memory: tuple[tuple[str, float], ...]  # at the fullest moment, by role


@dataclass(frozen=True)
class Search:
    """How the plan was found. `bound`: seconds that no plan on a searched mesh is below."""

    status: str
    bound: float
    gap: float
    seconds: float
    phases: tuple[tuple[str, float], ...]
    meshes: tuple[tuple[str, str, float], ...]  # (mesh, status, seconds of its best plan or bound)


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a plan's data; the file appears whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def read_json(path: str | Path, make: Callable[[Any], T]) -> T:
    """What `make` makes of a file's data. Raises PlanError, naming the file and what is wrong."""
    try:
        return make(json.loads(Path(path).read_text()))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not text") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from error
    except (PlanError, AttributeError) as error:
        raise PlanError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Plan:
    """A parallel plan of one train step on one cluster."""

    cluster: Mapping[str, Any]
    axes: tuple[tuple[str, int], ...]
    decisions: tuple[Decision, ...]
    tensors: tuple[Tensor, ...]
    traffic: tuple[Traffic, ...]
    predicted: Prediction
    search: Search
    constraints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""  # of the step and its argument types
    changes: tuple[Change, ...] = ()  # in the forward pass of marked losses, before all else
    # how to ask the search again (`why`); None in a plan that was read from a file
    session: Any = field(default=None, compare=False, repr=False)
    # the planned step, to be lowered (`planner.Planned`); None in a plan that was read from a file
    step: Any = field(default=None, compare=False, repr=False)

    def program(self) -> list[Line]:
        """The plan as lines of the language; as constraints, they leave this plan alone."""
        return [line for d in self.decisions for line in _lines(d, dict(self.axes))]

    def digest(self) -> str:
        """Short hash of the decisions: equal plans have equal digests on every host."""
        core = [self.axes, [asdict(d) for d in self.decisions], self.fingerprint]
        return hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """Those of the mesh that it runs on: a plan for one device needs no axis, a mesh does."""
        return self.axes or (("device", 1),)

    # -- JSON --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        data = {k: v for k, v in vars(self).items() if k not in ("session", "step")}
        for name in ("decisions", "tensors", "traffic"):
            data[name] = [asdict(x) for x in data[name]]
        for name in ("predicted", "search"):
            data[name] = asdict(data[name])
        data["changes"] = [to_data(change) for change in self.changes]
        return {"version": VERSION, **data}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """Raises PlanError on a plan of another version or with missing parts."""
        if data.get("version") != VERSION:
            raise PlanError(
                f"the plan has version {data.get('version')!r}, this jaxscaler reads {VERSION}: "
                "plan the step again"
            )
        try:
            return Plan(
                cluster=data["cluster"],
                axes=_tuples(data["axes"]),
                decisions=tuple(Decision(**_frozen(d)) for d in data["decisions"]),
                tensors=tuple(Tensor(**_frozen(t)) for t in data["tensors"]),
                traffic=tuple(Traffic(**_frozen(t)) for t in data["traffic"]),
                predicted=Prediction(**_frozen(data["predicted"])),
                search=Search(**_frozen(data["search"])),
                constraints=tuple(data["constraints"]),
                notes=tuple(data["notes"]),
                compiler_options=data["compiler_options"],
                fingerprint=data["fingerprint"],
                changes=tuple(map(from_data, data.get("changes", ()))),
            )
        except (KeyError, TypeError) as error:
            raise PlanError(f"not a plan: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        write_json(path, self.to_dict())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises PlanError, naming the file, when it is not one."""
        return read_json(path, Plan.from_dict)

    # -- people ------------------------------------------------------------------------------------

    def show(self, console: Any = None) -> None:
        """Print the plan: state, activations, collectives, memory, time, search."""
        from jaxscaler.report.show import show

        show(self, console)

    def to_rules(self) -> Any:
        """The layouts of the state as (regex, PartitionSpec) rules, and what rules can not say."""
        from jaxscaler.report.export import to_rules

        return to_rules(self)

    def audit(self) -> Any:
        """What Shardy, the partitioner, makes of the planned step, without compiling it: a
        `verify.report.Audit`, text when printed. PlanError in a plan that was read from a file.
        """
        from jaxscaler.verify.report import audited

        return audited(self)

    def verify(self, target: Any = None, **options: Any) -> Any:
        """What a real compiler makes of the planned step: a `verify.report.Verified`, text when
        printed: memory and collectives, predicted and compiled.

        `target`: a cluster of as many devices, none of which need be there; by default the plan's
        own; or "present": the devices that JAX sees, with their own backend, in this process.
        `options`: `timeout` in seconds, `cache` as in `plan`, `progress`. PlanError in a plan
        that was read from a file, or for devices no compiler is known for; what goes wrong in the
        compiler is the result's `compiled.status`. See docs/verify.md.
        """
        from jaxscaler.verify.report import verified

        return verified(self, target, **options)

    def why(self, path: str) -> str:
        """What was chosen for the subjects that `path` (a glob) selects, and the runner-up."""
        return self._asked("why").why(self, path)

    def what_if(self, change: Any) -> Any:
        """What another program would give: `explain.WhatIf`, a table when printed.

        `change`: one more line, or its YAML, or "without 2": without the second constraint.
        """
        return self._asked("what if").what_if(self, change)

    def shadow_prices(self) -> Any:
        """What one more GB per device, faster links, or a line less would save: a tuple of
        `explain.ShadowPrice`, each of which says whether it is solved or an estimate.
        """
        return self._asked("what its limits cost").shadow_prices(self)

    def _asked(self, what: str) -> Any:
        if self.session is None:
            raise PlanError(f"a plan read from a file can not be asked {what}: plan the step again")
        return self.session


def _lines(d: Decision, sizes: dict[str, int]) -> Iterator[Line]:
    """Per factor that is cut, into what and by which axes; then that no other axis cuts."""
    word = {"op": ops, "cluster": region}.get(d.what, values)
    halves = [(word(name=d.subject), d.cuts)]
    if d.in_use is not None:
        halves.append((values(name=d.subject, to=ops()), d.in_use))
    for subject, cuts in halves:
        for factor in dict.fromkeys(factor for _, factor in cuts):
            axes = tuple(axis for axis, f in cuts if f == factor)
            parts = prod(sizes[axis] for axis in axes)
            line = op_assign(op_trans(subject, Split(factor), parts), short(axes))
            yield replace(line, source=PLAN)
        used = tuple(axis for axis, _ in cuts)
        if not used:
            yield replace(op_trans(subject, Replicate()), source=PLAN)
        elif len(used) < len(sizes):
            yield replace(op_assign(subject, short(used)), source=PLAN)


def _tuples(x: Any) -> Any:
    return tuple(_tuples(y) for y in x) if isinstance(x, list | tuple) else x


def _frozen(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _tuples(v) for k, v in data.items()}
