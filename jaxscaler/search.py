"""The search over candidate meshes: price a space on each, solve, keep the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError, InfeasibleError
from jaxscaler.report import describe
from jaxscaler.report.show import size_text
from jaxscaler.solve import least_memory, solve
from jaxscaler.space.problem import Filter, Model, Priced, price

Progress = Callable[[str, str], None]  # (phase, detail)


@dataclass(frozen=True)
class Best:
    """The best plan found: a priced space, a strategy per node, seconds a step."""

    priced: Priced
    choice: np.ndarray
    seconds: float


class Clock:
    """Seconds by phase."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.spent: dict[str, float] = {}

    def add(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent[phase] = self.spent.get(phase, 0.0) + now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.start

    def phases(self) -> tuple[tuple[str, float], ...]:
        return tuple((k, round(v, 4)) for k, v in self.spent.items())


def search_meshes(
    model: Model,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    keep: Filter,
    limit: float,
    time_limit: float,
    seed: int,
    clock: Clock,
    say: Progress,
) -> tuple[Best, tuple[tuple[str, str, float], ...], float, str]:
    """Best plan over the candidate meshes; a mesh whose bound is above the best is not searched."""
    best: Best | None = None
    tried, lowers, clashes, misfits = [], [], [], []
    proved = True
    start = time.perf_counter()
    for n, mesh in enumerate(meshes):
        left = time_limit - (time.perf_counter() - start)
        if left <= 0 and best is not None:  # what it could have given is not known
            tried.append((str(mesh), "not searched: out of time", 0.0))
            proved = False
            continue
        say("search", f"mesh {mesh} ({n + 1} of {len(meshes)})")
        try:
            priced = price(model, mesh, cluster.device, int(limit), keep)
        except ConstraintError as error:
            clashes.append(error)
            tried.append((str(mesh), "constraints allow nothing", 0.0))
            continue
        clock.add("price")
        upper = None if best is None else int(best.seconds / priced.unit)
        share = max(left / (len(meshes) - n), 1.0)
        found = solve(priced.problem, time_limit=share, seed=seed, upper_bound=upper)
        clock.add("solve")
        lowers.append(found.bound * priced.unit if found.status != "infeasible" else float("inf"))
        proved &= found.status in ("optimal", "bounded", "infeasible")
        cost = 0.0 if found.cost is None else found.cost * priced.unit
        tried.append((str(mesh), found.status, cost or found.bound * priced.unit))
        if found.choice is not None and (best is None or cost < best.seconds):
            best = Best(priced, found.choice, cost)
        if found.status == "infeasible":
            misfits.append(priced)
    if best is None:
        if clashes and len(clashes) == len(meshes):
            raise clashes[0]
        if len(misfits) + len(clashes) < len(meshes):
            raise InfeasibleError(
                f"no plan was found in {time_limit:g} s: give the search a longer time_limit, or "
                "constraints that leave less to search"
            )
        raise _infeasible(cluster, limit, misfits)
    lower = min(best.seconds, *lowers) if lowers else best.seconds
    return best, tuple(tried), lower, "optimal" if proved else "feasible"


def distinct_meshes(meshes: Sequence[Mesh]) -> list[Mesh]:
    """Leave out meshes that differ from another only in the order of axes on equal links."""
    seen, out = set(), []
    for mesh in meshes:
        key = tuple(sorted(
            (part.level.name, 1 if part.level.link.kind != "torus" else part.stride, part.size)
            for axis in mesh.axes for part in axis.parts
        )) if all(len(axis.parts) == 1 for axis in mesh.axes) else str(mesh)  # fmt: skip
        if key not in seen:
            seen.add(key)
            out.append(mesh)
    return out


def _infeasible(cluster: Cluster, limit: float, misfits: Sequence[Priced]) -> InfeasibleError:
    """How much memory would do, and what dominates it, over the meshes that were tried."""
    head = (
        f"no plan fits {size_text(limit)} per device ({cluster.device.name}, "
        f"{cluster.num_devices} devices)"
    )
    least = [(found, p) for p in misfits if (found := least_memory(p.problem, time_limit=5.0))]
    if not least:
        return InfeasibleError(
            f"{head}, nor any other memory: the constraints leave no plan at all"
        )
    (usage, choice), priced = min(least, key=lambda x: x[0][0])
    _, by_role = describe.peak_memory(priced, choice)
    roles = ", ".join(f"{role} {size_text(n)}" for role, n in by_role[:4])
    top = sorted(describe.tensors(priced, choice), key=lambda t: -t.bytes_per_device)[:5]
    names = "; ".join(f"{t.path} {t.shape} {t.dtype}: {size_text(t.bytes_per_device)}" for t in top)
    need = size_text(usage + priced.model.fixed_bytes)
    return InfeasibleError(
        f"{head}: the least that any plan takes is {need}, on mesh {priced.mesh} "
        f"({roles}).\nthe largest tensors per device there: {names}\n"
        "use more devices or larger ones, a smaller batch, or drop constraints"
    )
