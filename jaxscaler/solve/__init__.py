"""The plan-space solver: strategy problems in, choices with a proved bound out. Knows no JAX.

Names are looked up when they are first used: problems come without the compiler of the solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxscaler import _lazy

_MODULE = {
    "INFINITY": "problem",
    "Solution": "problem",
    "StrategyProblem": "problem",
    "Use": "search",
    "evaluate": "evaluate",
    "least_memory": "solver",
    "make_problem": "build",
    "read_problem": "iopddl",
    "solve": "solver",
    "solve_tied": "tied",
    "usage_profile": "evaluate",
    "validate": "build",
    "warm": "warm",
    "write_problem": "iopddl",
}

if TYPE_CHECKING:
    from jaxscaler.solve.build import make_problem as make_problem
    from jaxscaler.solve.build import validate as validate
    from jaxscaler.solve.evaluate import evaluate as evaluate
    from jaxscaler.solve.evaluate import usage_profile as usage_profile
    from jaxscaler.solve.iopddl import read_problem as read_problem
    from jaxscaler.solve.iopddl import write_problem as write_problem
    from jaxscaler.solve.problem import INFINITY as INFINITY
    from jaxscaler.solve.problem import Solution as Solution
    from jaxscaler.solve.problem import StrategyProblem as StrategyProblem
    from jaxscaler.solve.search import Use as Use
    from jaxscaler.solve.solver import least_memory as least_memory
    from jaxscaler.solve.solver import solve as solve
    from jaxscaler.solve.tied import solve_tied as solve_tied
    from jaxscaler.solve.warm import warm as warm
else:
    __all__ = sorted(_MODULE)

    __getattr__ = _lazy.lazy(__name__, _MODULE)
