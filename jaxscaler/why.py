"""Why a plan is as it is: the runner-up of a decision, by a search without what was chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxscaler.errors import PlanError
from jaxscaler.plan import Decision, Plan
from jaxscaler.program import matches
from jaxscaler.report import describe
from jaxscaler.search import Best
from jaxscaler.solve import INFINITY, evaluate, solve
from jaxscaler.space.problem import Priced

ANSWERS = 8  # subjects that one `why` answers for: each is a search


@dataclass(frozen=True)
class Session:
    """Answers `plan.why` by searching again with the chosen strategy forbidden."""

    best: Best
    seed: int

    def why(self, plan: Plan, pattern: str) -> str:
        """Text: per subject that the glob selects, the choice, the runner-up and its price."""
        nodes = self.best.priced.model.space.nodes
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
        lines = [self._one(plan, i) for i in hits[:ANSWERS]]
        if len(hits) > ANSWERS:
            lines.append(f"{len(hits) - ANSWERS} more subjects match; narrow the pattern")
        return "\n".join(lines)

    def _one(self, plan: Plan, i: int) -> str:
        priced, choice = self.best.priced, self.best.choice
        chosen = plan.decisions[i]
        problem = priced.problem
        costs = problem.node_costs.copy()
        lo, hi = problem.node_ptr[i], problem.node_ptr[i + 1]
        text = f"{chosen.subject}: {_words(chosen)}"
        if hi - lo == 1:
            return f"{text}; it has no other strategy here"
        costs[lo + choice[i]] = INFINITY
        other = solve(replace(problem, node_costs=costs), time_limit=10.0, seed=self.seed)
        if other.choice is None or other.cost is None:
            return f"{text}; nothing else fits"
        runner = describe.decisions(priced, other.choice)[i]
        price = (other.cost - evaluate(problem, choice)[0]) * priced.unit
        return f"{text}; runner-up: {_words(runner)}, {price * 1e6:+.1f} us a step"


def _paths(priced: Priced, i: int) -> list[str]:
    """Paths of the state leaves whose layout a node decides."""
    model = priced.model
    return [
        model.graph.values[v].path
        for v in model.graph.inputs
        if (spot := model.space.rest.get(int(model.folded.value_class[v]))) and spot[0] == i
    ]


def _words(decision: Decision) -> str:
    def half(cuts):
        return ", ".join(f"{factor} over {axis}" for axis, factor in cuts) or "whole"

    text = half(decision.cuts)
    return text if decision.in_use is None else f"{text} at rest, {half(decision.in_use)} in use"
