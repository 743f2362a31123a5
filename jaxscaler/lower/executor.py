"""Runs a step that was cut into stages: each task jitted on its stage's devices, in a given order.

One thread dispatches all tasks and waits for none; JAX runs them as their operands arrive, so the
devices work while the host goes on. What no later task reads is let go at once; sums over
micro-batches, and state in the update, are written in place.

One process sees all devices here. Several processes need the pipeline as one program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import PlanError, ScheduleError
from jaxscaler.lower.interpret import constrain, named_sharding
from jaxscaler.lower.sites import Places, RunningSite, results_of
from jaxscaler.rewrite.parts import Part
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.tasks import UPDATE, Task

Store = dict[tuple[Any, int], Any]  # (variable, place) -> array


class Code(NamedTuple):
    """A jitted part: arrays of `reads` in, of `makes` out."""

    run: Callable[[list], list]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]


class Executor:
    """`executor(leaves) -> results` of a staged step, flat as its jaxpr has them.

    sites: [place]. order: per device group the tasks (`schedule.Task`) that it runs, in order;
    updates follow the last task, whether the order has them or not. Of a stage without W tasks B is
    all of the backward pass. donate: state that is given is written over.

    Raises ScheduleError, naming tasks, for an order that is not complete or waits in a circle, and
    PlanError in one of several processes.
    """

    def __init__(
        self,
        staged: Staged,
        sites: Sequence[RunningSite],
        order: Sequence[Sequence[Task]],
        donate: bool = True,
    ):
        if jax.process_count() > 1:
            raise PlanError(
                f"a stage executor dispatches to all devices from one process, and there are "
                f"{jax.process_count()}: several need the pipeline as one program"
            )
        self.staged, self.sites, self.loop = staged, sites, staged.loop
        self.order = checked_order(staged, order)
        split = {t.stage for mine in self.order for t in mine if t.phase == "W"}
        parts = {
            (run, phase): staged.part(run, "BW" if phase == "B" and run not in split else phase)
            for run in staged.runs
            for phase in ("FBW" if run in split else "FB")
        }
        self.places = Places(staged, sites, parts)
        sums = {c.inside for c in self.loop.carries}
        self.tasks = {
            key: self._code(part, staged.places[key[0]], True, sums) for key, part in parts.items()
        }
        self.prepare = {p: self._code(part, p, False) for p, part in staged.prepare.items()}
        last = self._last_levels()
        inputs = staged.traced.jaxpr.jaxpr.invars
        state = {inputs[i] for i, _ in staged.traced.state_pairs} if donate else set()
        self.update = [
            {
                p: self._code(
                    part, p, False, _written_over(part, {v for v in state if last.get((v, p)) == n})
                )
                for p, part in level.items()
            }
            for n, level in enumerate(staged.update)
        ]
        self.done = [
            [key for key, n in last.items() if n == level] for level in range(len(self.update))
        ]
        self._small: dict[Any, Callable] = {}  # copies, slices and stacks, jitted once
        read_late = {atom for atom in self.loop.consts.values() if not _compat.is_literal(atom)}
        read_late |= {v for level in staged.update for part in level.values() for v in part.reads}
        self.only_sliced = set(self.loop.slices.values()) - read_late - results_of(staged)

    # -- code --------------------------------------------------------------------------------------

    def _code(
        self, part: Part, place: int, inside: bool, given_up: Collection = frozenset()
    ) -> Code:
        """A part as a jitted function; the buffers of what is `given_up` are used again."""
        site, spec = self.sites[place], self.places.spec
        jaxpr = self.loop.body if inside else self.staged.traced.jaxpr.jaxpr
        eqns = [jaxpr.eqns[i] for i in part.eqns]
        closed = _compat.closed_over_nothing(jaxpr, list(part.reads), eqns, list(part.makes))
        layouts = site.layouts(part, inside)
        sent: dict[int, Any] = {
            n: (site.spec(v),) for n, v in enumerate(part.reads) if spec(v, place) != site.spec(v)
        }
        layouts = replace(
            layouts,
            inputs=tuple(spec(v, place) for v in part.reads),
            body_inputs=layouts.body_inputs | ({(): sent} if sent else {}),
        )
        constrained = constrain(closed, layouts, site.mesh)
        jitted = jax.jit(
            lambda *args: _compat.emit(constrained, args),
            out_shardings=[named_sharding(site.mesh, spec(v, place)) for v in part.makes],
            donate_argnums=tuple(i for i, v in enumerate(part.reads) if v in given_up),
        )
        return Code(lambda args: jitted(*args), part.reads, part.makes)

    def _last_levels(self) -> dict[tuple[Any, int], int]:
        """(variable, place) -> the last level of the update that reads it; no results."""
        results, levels = results_of(self.staged), enumerate(self.staged.update)
        return {
            (v, p): n
            for n, level in levels
            for p, part in level.items()
            for v in part.reads
            if v not in results
        }

    def _moved(self, x: Any, v: Any, source: int, place: int) -> Any:
        """A value of `source` as `place` wants it; no host is in between."""
        spec = self.places.sent[v, place]
        if spec != self.places.spec(v, source):
            sharding = named_sharding(self.sites[source].mesh, spec)
            x = self._jitted(sharding, lambda x: x, sharding)(x)
        return jax.device_put(x, self._sharding(v, place))

    def _jitted(self, key: Any, run: Callable, shardings: Any) -> Callable:
        if key not in self._small:
            self._small[key] = jax.jit(run, out_shardings=shardings)
        return self._small[key]

    def _sharding(self, v: Any, place: int) -> jax.sharding.NamedSharding:
        return named_sharding(self.sites[place].mesh, self.places.spec(v, place))

    # -- one step ----------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence) -> list:
        """The flat results of a step on its flat arguments, each on the devices of its stage."""
        staged, jaxpr = self.staged, self.staged.traced.jaxpr
        store: Store = {}
        given = (*zip(jaxpr.jaxpr.invars, leaves), *zip(jaxpr.jaxpr.constvars, jaxpr.consts))
        seen: set[int] = set()
        for v, x in given:
            home = staged.homes.get(v)
            if home is not None and isinstance(x, jax.Array):  # no buffer is written over twice
                x = x.copy() if id(x) in seen else x
                seen.add(id(x))
            if home is None:
                for p in self.places.wants.get(v, ()):
                    store[v, p] = self._put(x, v, p)
            else:
                self._keep(v, self._put(x, v, home), home, store)
        self._level(self.prepare, store)
        self._micro_batches(store)
        for level, done in zip(self.update, self.done):
            self._level(level, store)
            for key in done:
                del store[key]
        return [
            jnp.asarray(v.val) if _compat.is_literal(v) else store[v, p]
            for v, p in zip(jaxpr.jaxpr.outvars, staged.result_homes)
        ]

    def _put(self, x: Any, v: Any, place: int) -> Any:
        sharding = self._sharding(v, place)
        if isinstance(x, jax.Array) and x.committed and x.sharding == sharding:
            return x
        return jax.device_put(x, sharding)

    def _level(self, level: Mapping[int, Code], store: Store) -> None:
        for place, code in level.items():
            made = code.run([store[v, place] for v in code.reads])
            for v, x in zip(code.makes, made):
                self._keep(v, x, place, store)

    def _keep(self, v: Any, x: Any, place: int, store: Store) -> None:
        """Store a value outside of the loop, and send it to the places that read it."""
        store[v, place] = x
        if self.places.source[v] == place:
            for p in self.staged.sends.get(v, ()):
                store[v, p] = self._moved(x, v, place, p)

    def _micro_batches(self, store: Store) -> None:
        loop, readers = self.loop, self.places.readers
        sums = self._zeros(store)
        slices = self._slices(store)
        results = {c.result: c.inside for c in loop.carries}
        ends = dict(loop.stacks)
        kept: dict[tuple[Any, int, int], Any] = {}  # (variable, place, micro-batch)
        uses: dict[tuple[Any, int, int], int] = {}
        stacked: dict[Any, dict[int, Any]] = defaultdict(dict)

        def read(v: Any, place: int, m: int) -> Any:
            if v in sums:
                return sums[v]
            if v in loop.consts:
                atom = loop.consts[v]
                return atom.val if _compat.is_literal(atom) else store[atom, place]
            if v in loop.slices:
                return slices[v, place][m]
            uses[v, place, m] -= 1
            return kept[v, place, m] if uses[v, place, m] else kept.pop((v, place, m))

        def there(task: Task) -> bool:
            code, place = self.tasks[task.stage, task.phase], self.staged.places[task.stage]
            made = (v for v in code.reads if (v, place) in readers)
            return all((v, place, task.micro) in kept for v in made)

        for task in in_turns(self.order, there):
            code, place, m = *self._at(task), task.micro
            made = code.run([read(v, place, m) for v in code.reads]) if code.makes else []
            for v, x in zip(code.makes, made):
                if v in results:
                    sums[results[v]] = x
                if v in ends:
                    stacked[ends[v]][m] = x
                for p in (place, *self.staged.sends.get(v, ())):
                    if (v, p) in readers:
                        kept[v, p, m] = x if p == place else self._moved(x, v, place, p)
                        uses[v, p, m] = readers[v, p]
            del made
        for c in loop.carries:
            if not _compat.is_dropped(c.last):
                self._keep(c.last, sums[c.inside], self.places.source[c.last], store)
        for v, parts in stacked.items():
            place = self.places.source[v]
            stack = self._jitted(v, lambda *xs: jnp.stack(xs), self._sharding(v, place))
            self._keep(v, stack(*(parts[m] for m in range(loop.micro))), place, store)

    def _at(self, task: Task) -> tuple[Code, int]:
        return self.tasks[task.stage, task.phase], self.staged.places[task.stage]

    def _zeros(self, store: Store) -> dict[Any, Any]:
        """What sums over micro-batches begin with, each in a buffer of its own."""
        found: dict[Any, Any] = {}
        seen = Counter(c.first for c in self.loop.carries if not _compat.is_literal(c.first))
        numbers = defaultdict(list)  # [place]: the sums that begin with one
        for c in self.loop.carries:
            place = self.places.source[c.last]
            if _compat.is_literal(c.first):
                numbers[place].append(c)
                continue
            x = store[c.first, place]
            if seen[c.first] > 1 or c.first in self.places.wants:
                x = x.copy()
            found[c.inside] = jax.device_put(x, self._sharding(c.inside, place))
        for place, carries in numbers.items():
            shardings = [self._sharding(c.inside, place) for c in carries]
            begin = self._jitted(("sums", place), lambda some=carries: _begun(some), shardings)
            found.update(zip((c.inside for c in carries), begin()))
        return found

    def _slices(self, store: Store) -> dict[tuple[Any, int], list]:
        """(variable of the body, place) -> its value for every micro-batch."""
        found, count = {}, self.loop.micro
        for v, atom in self.loop.slices.items():
            for place in sorted(self.places.wants.get(atom, ())):
                split = self._jitted(
                    (v, place),
                    lambda x: [x[m] for m in range(count)],
                    [self._sharding(v, place)] * count,
                )
                found[v, place] = split(store[atom, place])
        for atom in self.only_sliced:
            for place in self.places.wants.get(atom, ()):
                del store[atom, place]
        return found


def _begun(carries: Sequence) -> list:
    return [jnp.full(c.inside.aval.shape, c.first.val, c.inside.aval.dtype) for c in carries]


def _written_over(part: Part, state: Collection) -> set:
    """Those of `state` in whose buffers results of a part find place."""
    room = Counter((v.aval.shape, v.aval.dtype) for v in part.makes)
    found = set()
    for v in part.reads:
        if v in state and room[v.aval.shape, v.aval.dtype]:
            room[v.aval.shape, v.aval.dtype] -= 1
            found.add(v)
    return found


# -- orders ----------------------------------------------------------------------------------------


def checked_order(staged: Staged, order: Sequence[Sequence[Task]]) -> tuple[tuple[Task, ...], ...]:
    """The order without updates. Raises ScheduleError unless it has every task, each once on each
    of the device groups that run it."""
    found = tuple(tuple(t for t in mine if t.phase != UPDATE) for mine in order)
    split = {t.stage for mine in found for t in mine if t.phase == "W"}
    needed, known = set(), set()
    for run in staged.runs:
        for phase, inside in (("F", "F"), ("B", "B" if run in split else "BW"), ("W", "W")):
            tasks = {Task(run, m, phase) for m in range(staged.loop.micro)}
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
