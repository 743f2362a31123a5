"""The plan-space solver: strategy problems in, choices with a proved bound out. Knows no JAX."""

from jaxscaler.solve.build import make_problem, validate
from jaxscaler.solve.evaluate import evaluate, usage_profile
from jaxscaler.solve.iopddl import read_problem, write_problem
from jaxscaler.solve.problem import INFINITY, Solution, StrategyProblem
from jaxscaler.solve.search import Use
from jaxscaler.solve.solver import least_memory, solve
from jaxscaler.solve.tied import solve_tied
from jaxscaler.solve.warm import warm

__all__ = [
    "INFINITY",
    "Solution",
    "StrategyProblem",
    "Use",
    "evaluate",
    "least_memory",
    "make_problem",
    "read_problem",
    "solve",
    "solve_tied",
    "usage_profile",
    "validate",
    "warm",
    "write_problem",
]
