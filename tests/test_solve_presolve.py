"""Each presolve step, and all of them, against enumeration on random small problems."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from solve_problems import all_choices, kernel_least, random_problem

from jaxscaler.solve import evaluate
from jaxscaler.solve.kernel import (
    FORBIDDEN,
    UNCHANGED,
    Kernel,
    NoSolution,
    Way,
    from_problem,
    parts,
    restrict,
)
from jaxscaler.solve.presolve import presolve, without_dominated
from jaxscaler.solve.presolve.arcs import supported
from jaxscaler.solve.presolve.edges import merge, normalise
from jaxscaler.solve.presolve.eliminate import eliminate
from jaxscaler.solve.presolve.memory import affordable, tidy_memory

Step = Callable[[Kernel], tuple[Kernel, Way]]


def same(kernel: Kernel) -> tuple[Kernel, Way]:
    return kernel, UNCHANGED


STEPS: dict[str, Step] = {
    "arcs": lambda kernel: restrict(kernel, supported(kernel)),
    "merge": merge,
    "normalise": lambda kernel: same(normalise(kernel)),
    "memory": lambda kernel: same(tidy_memory(kernel)),
    "affordable": lambda kernel: restrict(kernel, affordable(kernel)),
    "dominance": without_dominated,
    "eliminate": eliminate,
    "all": presolve,
}
COUNT = 400


def prepared(seed: int, memory: bool = True) -> Kernel | None:
    """A random kernel as the steps meet it: consistent, its memory rows tidy."""
    kernel = from_problem(random_problem(np.random.default_rng(seed), memory))
    try:
        kernel = tidy_memory(restrict(kernel, supported(kernel))[0])
        return restrict(kernel, supported(kernel))[0]
    except NoSolution:
        return None


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_step_keeps_the_least_cost_and_carries_choices_both_ways(name: str, memory: bool) -> None:
    changed = 0
    for seed in range(COUNT):
        if name in ("arcs", "memory", "all"):
            before = from_problem(random_problem(np.random.default_rng(seed), memory))
        else:
            found = prepared(seed, memory)
            if found is None:
                continue
            before = found
        least = kernel_least(before)
        try:
            after, way = STEPS[name](before)
        except NoSolution:
            assert least is None, seed
            continue
        changed += len(after.costs) + len(after.edge_nodes) + len(after.caps) < (
            len(before.costs) + len(before.edge_nodes) + len(before.caps)
        )
        assert kernel_least(after) == least, seed
        for choice in all_choices(after.sizes)[:40]:
            cost = after.cost(choice)
            if cost < FORBIDDEN and after.fits(choice):
                lifted = way.lift(choice)
                assert before.fits(lifted), seed
                assert before.cost(lifted) == cost, seed
        for choice in all_choices(before.sizes)[:40]:
            cost = before.cost(choice)
            if cost < FORBIDDEN and before.fits(choice):
                lowered = way.lower(choice)
                assert after.fits(lowered) and after.cost(lowered) <= cost, seed
    assert changed > COUNT // 50 or (name in ("memory", "affordable") and not memory)


def test_kernel_is_the_problem() -> None:
    for seed in range(200):
        problem = random_problem(np.random.default_rng(seed))
        kernel = from_problem(problem)
        for choice in all_choices(kernel.sizes)[:50]:
            cost, _, feasible = evaluate(problem, choice)
            assert (kernel.cost(choice) < FORBIDDEN and kernel.fits(choice)) == feasible
            if feasible:
                assert kernel.cost(choice) == cost


def test_parts_are_independent() -> None:
    several = 0
    for seed in range(400):
        kernel = prepared(seed)
        if kernel is None:
            continue
        pieces = parts(kernel)
        several += len(pieces) > 1
        assert sorted(np.concatenate([nodes for _, nodes in pieces]).tolist()) == list(
            range(kernel.num_nodes)
        )
        leasts = [kernel_least(piece) for piece, _ in pieces]
        expected = None if None in leasts else sum(leasts)
        assert kernel_least(kernel) == expected, seed
    assert several > 30
