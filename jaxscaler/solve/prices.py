"""What the memory limit costs at the margin, from the multipliers of its rows."""

from __future__ import annotations

import numpy as np

from jaxscaler.solve.kernel import NoSolution, from_problem
from jaxscaler.solve.messages import RESOLUTION
from jaxscaler.solve.multipliers import ascend, by_row, start_multipliers
from jaxscaler.solve.presolve import presolve
from jaxscaler.solve.problem import StrategyProblem

STEPS = 2000  # of the ascent, at most


def memory_price(problem: StrategyProblem, cost: int) -> float:
    """About how much cost one more unit of the usage limit saves, 0 where the limit does not bind.

    An estimate: the sum of the Lagrange multipliers of the memory rows, the slope of the bound that
    they prove. `cost`: that of the best choice known. (Fisher, The Lagrangian relaxation method for
    solving integer programming problems, 1981.)
    """
    try:
        kernel, _ = presolve(from_problem(problem))
    except NoSolution:
        return 0.0
    if not kernel.num_nodes or not len(kernel.caps):
        return 0.0
    state = start_multipliers(kernel, shift=RESOLUTION - max(cost - kernel.offset, 1).bit_length())

    def decoded(choice: np.ndarray, usage: np.ndarray) -> int | None:
        return None

    ascend(state, STEPS, cost, decoded)
    return float(sum(by_row(state).values()))
