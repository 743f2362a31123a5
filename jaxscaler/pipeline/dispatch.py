"""What the host's one thread that dispatches a pipeline's tasks costs, and when that is too much.

The stage executor calls a jitted function for every task, and copies what other stages read. That
takes the thread's time, whatever the devices do (`cluster.host.Host`): with many small tasks the
devices wait for it. The simulated step has the mean of a task; what it adds to a step is refused
above a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.host import ASSUMED, Host
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import InfeasibleError
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.rewrite.parts import variables
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.simulate import simulate
from jaxscaler.schedule.tasks import Order

LIMIT = 0.03  # of the step
TASK = 5e-5  # seconds of the executor's own work for a task, as its profile has it


def host_seconds(staged: Staged, order: Order, devices: Sequence[int], host: Host) -> float:
    """Seconds of the host's thread for all calls and copies of a step.

    devices: per place. What is laid out anew before it is sent is not counted. Where stages have
    copies, sums go from each to the other and are added, and state is taken apart and put together.
    """
    count = len(staged.places)
    copies = 1 + max(task.stage for mine in order for task in mine) // count
    split = {task.stage % count for mine in order for task in mine if task.phase == "W"}
    sums = {c.result for c in staged.loop.carries}

    def sent(values: Sequence) -> float:
        return sum(host.moves(devices[p]) for v in values for p in staged.sends.get(v, ()))

    each = 0.0  # micro-batch
    for run in staged.runs:
        for phase in ("F", "B", "W") if run in split else ("F", "BW"):
            part = staged.part(run, phase)
            arrays = len(part.reads) + len(part.makes)
            if part.eqns:
                each += TASK + host.calls(devices[staged.places[run]], arrays)
            each += sent([v for v in part.makes if v not in sums])
    once = 0.0
    for level in (staged.prepare, *staged.update):
        for place, part in level.items():
            once += TASK + host.calls(devices[place], len(part.reads) + len(part.makes))
            once += sent(part.makes)
    carries = [c.last for c in staged.loop.carries]
    once += sent([*staged.homes, *carries])
    if copies > 1:
        once += sum(host.calls(devices[p], 0) for p in staged.homes.values())
        for place, n in _sums(staged).items():
            once += n * host.moves(devices[place]) + TASK + host.calls(devices[place], 3 * n)
    return each * staged.loop.micro + copies * once


def _sums(staged: Staged) -> Counter[int]:
    """Place -> how many sums over micro-batches it has."""
    made = {
        v: staged.places[where[0]]
        for eqn, where in zip(staged.loop.body.eqns, staged.body)
        if where is not None
        for v in eqn.outvars
    }
    return Counter(made[v] for v in variables(c.result for c in staged.loop.carries) if v in made)


def with_dispatch(
    plan: PipelinePlan, cluster: Cluster | Mixed, limit: float | None = LIMIT
) -> PipelinePlan:
    """A plan with the seconds that dispatching a task takes.

    Raises InfeasibleError where it makes the step longer by more than `limit` of it; None: no
    limit. The table's times of simulated CPU devices mean nothing: there it is only noted.
    """
    assert plan.parts is not None
    host = cluster.device.host or ASSUMED
    total = host_seconds(plan.parts.staged, plan.order, plan.devices, host)
    tasks = len({task for mine in plan.order for task in mine})
    plan = replace(plan, dispatch=total / tasks)
    before, after = simulate(plan.pipeline, plan.order).seconds, plan.timeline.seconds
    share = 1 - before / after if after else 0.0
    if limit is None or share <= limit:
        return plan
    text = (
        f"the host's one thread dispatches {tasks} tasks a step, {total / tasks:.2g} s each "
        f"({host.source}): of a step of {after:.3g} s that is {share:.0%}, and may be {limit:.0%}"
    )
    if cluster.device.name == "cpu" and not cluster.device.curves:
        note = f"{text} on devices whose times mean something"
        return replace(plan, notes=(*plan.notes, note))
    raise InfeasibleError(
        f"{text}: take fewer micro-batches or fewer stages, or the pipeline as one program "
        "(one_program=True), where a step is one call; `jaxscaler calibrate` measures the host; "
        "dispatch_limit=None asks for it anyway"
    )
