"""Errors a user meets: each says which rule was broken, on which object, and what to do."""

from __future__ import annotations

from typing import Any


class JaxscalerError(ValueError):
    """Base of every error that jaxscaler raises on purpose.

    `session`: the search that came to it, where there was one; it can be asked for an explanation.
    """

    session: Any = None


class TraceError(JaxscalerError):
    """The step cannot be planned as it is written (leaf, effect, axis name, reference)."""


class ClusterError(JaxscalerError):
    """A cluster description is malformed, unknown, or larger than what is present."""


class ConfigError(JaxscalerError):
    """A model, a way to spread it, or a run that can not be; the fields are named."""


class ConstraintError(JaxscalerError):
    """A constraint is malformed, matches nothing, or clashes with another."""


class InfeasibleError(JaxscalerError):
    """No plan satisfies the memory limit and the constraints.

    `need`: bytes on a device of the plan of least memory that was found, if there is one.
    """

    need: float | None = None


class OutOfTimeError(InfeasibleError):
    """No plan was found in the time limit: there may be one."""


class PlanError(JaxscalerError):
    """A plan does not belong to this step, cluster or version, or was not achieved."""


class RewriteError(JaxscalerError):
    """A change of the forward pass would change what it computes; the operation is named."""


class SolveError(JaxscalerError):
    """A strategy problem is malformed."""


class ScheduleError(JaxscalerError):
    """A pipeline is malformed, or an order of its tasks is incomplete, cyclic, or does not fit."""
