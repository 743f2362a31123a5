"""The fastest plan whose step fits as the compiler lays it out, where the search's rows differ.

The search bounds memory by rows over live buffers in program order (`space/problem.py`); the memory
that a plan is said to take is that of one device's own program (`report/memory.py`): layout
changes, late products and holes of the heap come on top.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxscaler.errors import InfeasibleError, OutOfTimeError
from jaxscaler.report import describe
from jaxscaler.report.memory import device_memory
from jaxscaler.report.show import size_text
from jaxscaler.search import Best, Clock, Progress, leanest

if TYPE_CHECKING:
    from jaxscaler.why import Found, Session

ROUNDS = 4  # searches with less memory each


def fitted(session: Session, found: Found, clock: Clock, say: Progress) -> Found:
    """`found`, or what is found with so much less memory that the step fits `session.limit`.

    Raises InfeasibleError, saying what would do, where even the plan of least memory does not fit.
    """
    limit = aim = session.limit
    best, late = found.best, False
    for _ in range(ROUNDS):
        peak = _peak(session, best)
        if peak <= limit:
            return found
        rows = describe.peak_memory(best.priced, best.choice)[0]
        aim = min(aim, rows) * limit / peak
        say("memory", f"{size_text(peak)} as compiled: again with {size_text(aim)}")
        try:
            less = replace(session, limit=aim, best=None, brief=True)
            found = less.search(clock, say, explained=False)
        except InfeasibleError as error:
            late = isinstance(error, OutOfTimeError)
            break
        best = found.best
    else:
        if _peak(session, best) <= limit:
            return found
    need, choice = leanest(best.priced, session.cluster.device) or (np.inf, best.choice)
    if need <= limit:
        least = replace(best, choice=choice, seconds=describe.cost_of(best.priced, choice))
        return replace(found, best=least, status="feasible")
    need = min(need, _peak(session, best))
    missed = (OutOfTimeError if late else InfeasibleError)(
        f"no plan fits {size_text(limit)} per device as the compiler lays it out: the least "
        f"found for a plan is {size_text(need)}, on mesh {best.priced.mesh}\n"
        "use more devices or larger ones, a smaller batch, or drop constraints"
    )
    missed.need = need
    raise missed


def _peak(session: Session, best: Best) -> float:
    return device_memory(best.priced, best.choice, session.cluster.device).peak
