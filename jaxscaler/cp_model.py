"""OR-Tools' `cp_model`, imported when a name of it is first used.

That import takes a third of a second (it brings pandas), and most answers are found without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from ortools.sat.python import cp_model

    return getattr(cp_model, name)
