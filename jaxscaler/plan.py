"""A plan: decisions by subject, and what they cost. Plain data with a JSON form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxscaler.errors import PlanError

VERSION = 1

Specs = tuple[tuple[str, ...], ...]  # per dim, the mesh axes that cut it, major first


@dataclass(frozen=True)
class Decision:
    """What is decided of one subject: which factor each mesh axis cuts.

    In the language: for every (axis, factor), `op_trans(subject, Split(factor), size of axis)` and
    `op_assign(subject, axis)`; with no cuts, `op_trans(subject, Replicate())`. `count` subjects
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
    # how to ask the search again (`why`); None in a plan that was read from a file
    session: Any = field(default=None, compare=False, repr=False)

    def program(self) -> list[str]:
        """The plan as lines of the language."""
        sizes = dict(self.axes)
        lines = []
        for d in self.decisions:
            halves = [(d.subject, d.cuts)]
            if d.in_use is not None:
                halves.append((f"{d.subject} in use", d.in_use))
            for subject, cuts in halves:
                if not cuts:
                    lines.append(f"op_trans({subject!r}, Replicate())")
                for axis, factor in cuts:
                    lines.append(f"op_trans({subject!r}, Split({factor!r}), {sizes[axis]})")
                    lines.append(f"op_assign({subject!r}, {axis!r})")
        return lines

    def digest(self) -> str:
        """Short hash of the decisions: equal plans have equal digests on every host."""
        core = [self.axes, [asdict(d) for d in self.decisions], self.fingerprint]
        return hashlib.sha256(json.dumps(core, sort_keys=True).encode()).hexdigest()[:16]

    # -- JSON --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        data = {k: v for k, v in vars(self).items() if k != "session"}
        for name in ("decisions", "tensors", "traffic"):
            data[name] = [asdict(x) for x in data[name]]
        for name in ("predicted", "search"):
            data[name] = asdict(data[name])
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
            )
        except (KeyError, TypeError) as error:
            raise PlanError(f"not a plan: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        part.replace(path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises PlanError, naming the file, when it is not one."""
        try:
            return Plan.from_dict(json.loads(Path(path).read_text()))
        except OSError as error:
            raise PlanError(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: not text") from error
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from error
        except (PlanError, AttributeError) as error:
            raise PlanError(f"{path}: {error}") from error

    # -- people ------------------------------------------------------------------------------------

    def show(self, console: Any = None) -> None:
        """Print the plan: state, activations, collectives, memory, time, search."""
        from jaxscaler.report.show import show

        show(self, console)

    def to_rules(self) -> Any:
        """The layouts of the state as (regex, PartitionSpec) rules, and what rules can not say."""
        from jaxscaler.report.export import to_rules

        return to_rules(self)

    def why(self, path: str) -> str:
        """What was chosen for the subjects that `path` (a glob) selects, and the runner-up."""
        if self.session is None:
            raise PlanError("a plan read from a file can not be asked why: plan the step again")
        return self.session.why(self, path)


def _tuples(x: Any) -> Any:
    return tuple(_tuples(y) for y in x) if isinstance(x, list | tuple) else x


def _frozen(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _tuples(v) for k, v in data.items()}
