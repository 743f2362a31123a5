"""A search that can be asked again: why a plan is as it is, and what another program would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxscaler import explain
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import Mesh
from jaxscaler.errors import ConstraintError, InfeasibleError, PlanError
from jaxscaler.plan import Plan
from jaxscaler.program import Statement, matches
from jaxscaler.report import describe
from jaxscaler.report.show import decision_text
from jaxscaler.search import Best, Clock, Progress, Variant, search_meshes
from jaxscaler.solve import INFINITY, evaluate, solve
from jaxscaler.space.constraints import Constraints
from jaxscaler.space.nodes import Node
from jaxscaler.space.problem import Model, Priced

ANSWERS = 8  # subjects that one `why` answers for: each is a search

# what else narrows a node: (node, rows, mesh, what the program allows, the bound program) -> mask
Others = Callable[[Node, np.ndarray, Mesh, np.ndarray, Constraints], np.ndarray]


@dataclass(frozen=True)
class Found:
    """What a search found, and the program that it was bound by."""

    best: Best
    bound: Constraints
    tried: tuple[tuple[str, str, float], ...]
    lower: float
    status: str


@dataclass(frozen=True)
class Session:
    """All that a search is given, so that it can be asked again; `best` is what it found."""

    model: Model
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    program: tuple[Statement, ...]
    limit: float  # bytes per device
    time_limit: float
    seed: int
    others: Others
    best: Best | None = None
    lower: float = 0.0
    # the plan of the step as it was written, with these lines more: for those that change the step
    again: Callable[[Sequence[Statement]], Plan] | None = None
    brief: bool = False  # where nothing fits, do not look for what memory would do

    def bind(self, program: Sequence[Statement]) -> Constraints:
        return Constraints(program, self.model.graph, self.model.folded, self.model.space)

    def variants(self, bound: Constraints) -> list[Variant]:
        """A problem per mesh and filling of the named holes, those of coarse meshes first."""
        return [
            Variant(mesh, partial(self.keep, bound, holes), holes)
            for mesh in self.meshes
            for holes in bound.fillings(mesh)
        ]

    def keep(self, bound: Constraints, holes, node: Node, rows, mesh: Mesh) -> np.ndarray:
        """Which strategies of a node are left: bool [strategies]. ConstraintError if none is."""
        return self.others(node, rows, mesh, bound.mask(node, rows, mesh, holes), bound)

    def search(
        self, clock: Clock | None = None, say: Progress | None = None, explained: bool = True
    ) -> Found:
        """Search, from `best` if there is one. Raises ConstraintError or InfeasibleError for a
        program that leaves nothing, `explained` by a smallest part of it.
        """
        bound = self.bind(self.program)
        variants = self.variants(bound)
        try:
            if not variants:
                raise ConstraintError(
                    "no numbers of parts on any mesh fit the named holes and their relations"
                )
            found = search_meshes(
                self.model, self.cluster, variants, self.limit, self.time_limit, self.seed,
                clock or Clock(), say or (lambda phase, detail: None), self.best, self.brief,
            )  # fmt: skip
        except (ConstraintError, InfeasibleError) as error:
            text = explain.clash(self, bound) if self.program and explained else ""
            if not text:
                raise
            raise type(error)(f"{error}\n{text}") from None
        return Found(found[0], bound, *found[1:])

    def why(self, plan: Plan, pattern: str) -> str:
        """Text: per subject that the glob selects, the choice, the runner-up and its price."""
        nodes = self.model.space.nodes
        assert self.best is not None
        hits = [
            i
            for i, node in enumerate(nodes)
            if any(
                matches(pattern, name)
                for name in (node.name.replace(":", "/"), *_paths(self.best.priced, i))
            )
        ]
        if not hits:
            near = ", ".join(node.name for node in nodes if node.what == "state")[:300]
            raise PlanError(f"nothing in the plan matches {pattern!r}; state subjects are: {near}")
        hits.sort(key=lambda i: nodes[i].what != "state")
        lines = [self._one(plan, self.best, i) for i in hits[:ANSWERS]]
        if len(hits) > ANSWERS:
            lines.append(f"{len(hits) - ANSWERS} more subjects match; narrow the pattern")
        return "\n".join(lines)

    def _one(self, plan: Plan, best: Best, i: int) -> str:
        priced, choice = best.priced, best.choice
        chosen = plan.decisions[i]
        problem = priced.problem
        costs = problem.node_costs.copy()
        lo, hi = problem.node_ptr[i], problem.node_ptr[i + 1]
        text = f"{chosen.subject}: {decision_text(chosen)}"
        if hi - lo == 1:
            return f"{text}; it has no other strategy here"
        costs[lo + choice[i]] = INFINITY
        other = solve(replace(problem, node_costs=costs), time_limit=10.0, seed=self.seed)
        if other.choice is None or other.cost is None:
            return f"{text}; nothing else fits"
        runner = describe.decisions(priced, other.choice)[i]
        price = (other.cost - evaluate(problem, choice)[0]) * priced.unit
        return f"{text}; runner-up: {decision_text(runner)}, {price * 1e6:+.1f} us a step"

    def what_if(self, plan: Plan, change: Any) -> explain.WhatIf:
        """The plan with one more line, or without one (see `Plan.what_if`)."""
        return explain.what_if(self, plan, change)

    def shadow_prices(self, plan: Plan) -> tuple[explain.ShadowPrice, ...]:
        """What a little more of everything that binds would buy (see `Plan.shadow_prices`)."""
        return explain.shadow_prices(self, plan)


def _paths(priced: Priced, i: int) -> list[str]:
    """Paths of the state leaves whose layout a node decides."""
    model = priced.model
    return [
        model.graph.values[v].path
        for v in model.graph.inputs
        if (spot := model.space.rest.get(int(model.folded.value_class[v]))) and spot[0] == i
    ]


@dataclass(frozen=True)
class LaterSession:
    """The session of a plan that was not searched now: searches for it when it is asked."""

    search: Callable[[], Any]

    @cached_property
    def session(self) -> Session:
        return self.search().plan.session

    @property
    def best(self) -> Best | None:
        return self.session.best

    def why(self, plan: Plan, pattern: str) -> str:
        return self.session.why(plan, pattern)

    def what_if(self, plan: Plan, change: Any) -> Any:
        return self.session.what_if(plan, change)

    def shadow_prices(self, plan: Plan) -> Any:
        return self.session.shadow_prices(plan)
