"""Plan, audit, compile, plan again: until the compiled step fits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import InfeasibleError, PlanError
from jaxscaler.plan import Plan
from jaxscaler.report.show import size_text
from jaxscaler.verify import targets
from jaxscaler.verify.choose import best_of, without_surprises
from jaxscaler.verify.report import Verified, verified

ROUNDS = 4  # compiles
SLACK = 1.01  # of the learned factor: the next plan's temporaries are others


def plan_verified(
    search: Callable[..., Any],
    cluster: Cluster,
    memory: float,
    verify: bool | int | str,
    constraints: Sequence[Any],
    author: Any,
    progress: Any = None,
) -> Any:
    """The planned step that `parallelize(verify=...)` runs: audited, compiled, and planned again.

    `search(memory=, constraints=, author=)`: `planner.plan_step` of the step. `verify`: True; a
    number, of meshes whose best plans are compiled, of which the fastest by the compiler's word is
    taken; or "present": compile for the devices present instead of by the cluster's own compiler.
    """
    count = 1 if verify == targets.PRESENT else verify
    if not isinstance(count, int) or count < 1:
        raise PlanError(f"verify={verify!r}: True, a number of plans above 0, or 'present'")

    def searched(
        memory: float, constraints: Sequence[Any] = constraints, axes: Any = author.axes
    ) -> Any:
        own = replace(author, axes=axes)
        return search(memory=memory, constraints=tuple(constraints), author=own)

    target = targets.PRESENT if verify == targets.PRESENT else None
    check = functools.partial(verified, target=target, progress=progress)

    def fitting(**options: Any) -> Any:
        careful = without_surprises(functools.partial(searched, **options), tuple(constraints))
        return until_it_fits(careful, cluster, memory, check, here=target is not None)

    first = fitting()
    if count == 1:
        return first
    return best_of(first, int(count), lambda axes: fitting(axes=tuple(axes)), check)


def until_it_fits(
    search: Callable[..., Any],
    cluster: Cluster,
    memory: float,
    check: Callable[[Plan], Verified] = verified,
    rounds: int = ROUNDS,
    here: bool = False,
) -> Any:
    """The first planned step whose compiled program stays within `memory`, a share of the device's.

    `search(memory=share)` plans (`planner.plan_step`). Where the compiler needs more than planned,
    the factor by which its temporaries exceed the predicted ones is learned, and the next search
    has as much less room for temporaries. What came of it is in the plan's notes. Raises PlanError
    where the compiler is not there, InfeasibleError where no plan is left; a plan that still does
    not fit after `rounds` compiles is returned with a warning. `here`: `check` needs no compiler
    but that of the devices present.
    """
    target = None if here else targets.target_of(cluster)
    if target is not None and (lacking := targets.missing(target)):
        extra = targets.EXTRA[target.platform]
        raise PlanError(
            f"verify=True: {', '.join(lacking)} not installed: pip install 'jaxscaler[{extra}]'"
        )
    hbm, limit = cluster.device.hbm_bytes, cluster.device.hbm_bytes * memory
    factor, share, notes = 1.0, memory, []
    least: tuple[float, Any] | None = None
    for turn in range(1, rounds + 1):
        try:
            planned = search(memory=share)
        except InfeasibleError as error:
            if least is None:
                raise
            raise InfeasibleError(
                f"{notes[-1]}; with its temporaries {factor:.2f} times those predicted no plan is "
                f"left: {error}"
            ) from error
        predicted = planned.plan.predicted
        found = check(replace(planned.plan, predicted=replace(predicted, limit_bytes=limit)))
        needed = found.compiled.bytes
        if needed is None:
            notes.append(f"not verified: {found.compiled.status}: {found.compiled.detail}")
            warnings.warn(notes[-1], stacklevel=2)
            return _noted(planned, limit, notes)
        said = f"the compiled step needs {size_text(needed)} of {size_text(limit)}"
        if found.fits:
            notes.append(f"verified in round {turn}: {said}")
            return _noted(planned, limit, notes)
        notes.append(f"round {turn}: {said}, {size_text(predicted.peak_bytes)} were predicted")
        if least is None or needed < least[0]:
            least = needed, planned
        lasting = found.memory[0][1]
        compiled = found.compiled.memory
        held = lasting if compiled is None else compiled.argument
        temporary = max(predicted.peak_bytes - lasting, 1.0)
        factor = max(factor, SLACK * (needed - held) / temporary)
        # the arguments' own excess (padding) comes off before the rest is shared out
        room = limit - lasting - max(held - lasting, 0.0)
        share = (lasting + room / factor) / hbm
        if turn > 1:  # what lasts has changed too: all of it in proportion
            share = min(share, predicted.peak_bytes * limit / needed / SLACK / hbm)
        share = min(share, 0.99 * predicted.peak_bytes / hbm)  # the same plan would come again
        if share <= 0:
            break
    assert least is not None
    notes.append(f"after {len(notes)} rounds no plan was found that fits when compiled")
    warnings.warn("; ".join(notes[-2:]), stacklevel=2)
    return _noted(least[1], limit, notes)


def _noted(planned: Any, limit: float, notes: list[str]) -> Any:
    """The planned step with the limit that the user gave, and what was found on the way."""
    plan = planned.plan
    predicted = replace(plan.predicted, limit_bytes=limit)
    return replace(planned, plan=replace(plan, predicted=predicted, notes=(*plan.notes, *notes)))
