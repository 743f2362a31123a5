"""Orders as the stage executor takes them: complete, and task by task from one thread."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from jaxscaler.errors import ScheduleError
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.tasks import UPDATE, Task


def checked_order(
    staged: Staged, order: Sequence[Sequence[Task]], copies: int = 1
) -> tuple[tuple[Task, ...], ...]:
    """The order without updates. Raises ScheduleError unless it has every task, each once on each
    of the device groups that run it."""
    found = tuple(tuple(t for t in mine if t.phase != UPDATE) for mine in order)
    needed, known, count = set(), set(), len(staged.places)
    split = {t.stage % count for mine in found for t in mine if t.phase == "W"}
    for stage in range(count * copies):
        copy, run = divmod(stage, count)
        for phase, inside in (("F", "F"), ("B", "B" if run in split else "BW"), ("W", "W")):
            tasks = {Task(stage, m, phase) for m in range(copy, staged.loop.micro, copies)}
            if phase != "W" or run in split:
                known |= tasks
                if any(staged.tasks[run, p] for p in inside):
                    needed |= tasks
    given = {t for mine in found for t in mine}
    twice = {t for mine in found for t, n in Counter(mine).items() if n > 1}
    for what, wrong in (
        ("lacks", needed - given),
        ("has tasks that there are not:", given - known),
        ("has tasks twice on a device group:", twice),
    ):
        if wrong:
            some = ", ".join(map(str, sorted(wrong)[:4]))
            raise ScheduleError(f"the order {what} {some}{' ...' if len(wrong) > 4 else ''}")
    return found


def in_turns(order: Sequence[Sequence[Task]], there: Callable[[Task], bool]) -> Iterator[Task]:
    """All tasks, each when what it reads is there (made, or on its way) and it is the next of every
    device group that runs it. Raises ScheduleError, naming those that wait, if none can go on."""
    at = [0] * len(order)
    groups = defaultdict(list)
    for g, mine in enumerate(order):
        for task in mine:
            groups[task].append(g)
    while heads := {mine[n] for n, mine in zip(at, order) if n < len(mine)}:
        ready = [
            task
            for task in sorted(heads)
            if all(order[g][at[g]] == task for g in groups[task]) and there(task)
        ]
        if not ready:
            waiting = "; ".join(map(str, sorted(heads)))
            raise ScheduleError(f"the order waits in a circle, and can not go on with {waiting}")
        for task in ready:
            yield task
            for g in groups[task]:
                at[g] += 1
