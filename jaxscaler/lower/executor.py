"""Runs a step that was cut into stages: each task jitted on its stage's devices, in a given order.

One thread dispatches all tasks and waits for none; JAX runs them as their operands arrive, so the
devices work while the host goes on. What no later task reads is let go at once; sums over
micro-batches, and state in the update, are written in place.

One process sees all devices here. Several processes need the pipeline as one program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.lower.copies import added, apart, as_one, over_copies, total
from jaxscaler.lower.interpret import constrain, named_sharding
from jaxscaler.lower.sites import Places, RunningSite, results_of
from jaxscaler.lower.turns import checked_order, in_turns
from jaxscaler.rewrite.parts import Part
from jaxscaler.rewrite.stages import Staged
from jaxscaler.schedule.tasks import Task

Store = dict[tuple[Any, int], Any]  # (variable, place) -> array


class Code(NamedTuple):
    """A jitted part: arrays of `reads` in, of `makes` out."""

    run: Callable[[list], list]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]


class Executor:
    """`executor(leaves) -> results` of a staged step, flat as its jaxpr has them.

    sites: [place]; for two copies of every stage (`schedule.mirrored`) those of the second copies
    follow, and a leaf of the state is an array on both (`meshes`: [place]). order: per device group
    the tasks (`schedule.Task`) that it runs, in order; updates follow the last task, whether the
    order has them or not. Of a stage without W tasks B is all of the backward pass. donate: state
    that is given is written over.

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
        self.staged, self.sites = staged, sites
        count = 1 + max(staged.places)
        firsts = range(0, len(sites), count)
        self.order = checked_order(staged, order, len(firsts))
        split = {t.stage % len(staged.places) for mine in self.order for t in mine
                 if t.phase == "W"}  # fmt: skip
        parts = {
            (run, phase): staged.part(run, "BW" if phase == "B" and run not in split else phase)
            for run in staged.runs
            for phase in ("FBW" if run in split else "FB")
        }
        self.places = Places(staged, sites[:count], parts)
        self.copies = [
            Copy(staged, sites[n : n + count], self.places, parts, donate) for n in firsts
        ]
        self.meshes = [over_copies([c.sites[p].mesh for c in self.copies]) for p in range(count)]
        self.state_results = {o for _, o in staged.traced.state_pairs}
        self.sums: dict[int, list] = defaultdict(list)  # [place]: what both copies add up
        for c in staged.loop.carries:
            if not _compat.is_dropped(c.last):
                self.sums[self.places.source[c.last]].append(c)

    def sharding(self, v: Any, place: int) -> jax.sharding.NamedSharding:
        """Of an argument or result that is state: where all of its copies lie."""
        return named_sharding(self.meshes[place], self.places.spec(v, place))

    def __call__(self, leaves: Sequence) -> list:
        """The flat results of a step on its flat arguments, each on the devices of its stage."""
        count, several = len(self.staged.places), len(self.copies)
        stores = [copy.begun(own) for copy, own in zip(self.copies, self._apart(leaves))]
        passes = [
            _Pass(copy, store, range(n, self.staged.loop.micro, several))
            for n, (copy, store) in enumerate(zip(self.copies, stores))
        ]

        def own(task: Task) -> tuple[_Pass, Task]:
            n, run = divmod(task.stage, count)
            return passes[n], task._replace(stage=run)

        def there(task: Task) -> bool:
            passing, mine = own(task)
            return passing.there(mine)

        for task in in_turns(self.order, there):
            passing, mine = own(task)
            passing.run(mine)
        if several > 1:
            self._exchange(passes)
        for passing in passes:
            passing.end()
        for n in range(len(self.staged.update)):
            for copy, store in zip(self.copies, stores):
                copy.updated(n, store)
        return self._results(stores)

    def _apart(self, leaves: Sequence) -> list[list]:
        """[copy]: its flat arguments."""
        found: list[list] = [[] for _ in self.copies]
        seen: set[int] = set()
        for v, x in zip(self.staged.traced.jaxpr.jaxpr.invars, leaves):
            home = self.staged.homes.get(v)
            each = [x] * len(self.copies)
            if home is not None and isinstance(x, jax.Array):  # no buffer is written over twice
                x = x.copy() if id(x) in seen else x
                seen.add(id(x))
                each = [x] * len(self.copies)
                whole = self.sharding(v, home)
                if len(each) > 1 and x.committed and x.sharding.is_equivalent_to(whole, x.ndim):
                    each = apart(x, [copy.sharding(v, home) for copy in self.copies])
            for mine, own in zip(found, each):
                mine.append(own)
        return found

    def _exchange(self, passes: Sequence[_Pass]) -> None:
        """What copies add up, or stack by micro-batches, each of them then has of all."""
        for place, carries in self.sums.items():
            jitted = [
                copy.jitted(
                    ("total", place), total, [copy.sharding(c.last, place) for c in carries], (n,)
                )
                for n, copy in enumerate(self.copies)
            ]
            made = added([[p.sums[c.inside] for c in carries] for p in passes], jitted)
            for passing, sums in zip(passes, made):
                passing.sums.update(zip((c.inside for c in carries), sums))
        for v, outside in self.staged.loop.stacks:
            own = [dict(p.stacked[outside]) for p in passes]
            for n, copy in enumerate(self.copies):
                there = copy.sharding(v, self.places.source[outside])
                for k, parts in enumerate(own):
                    if k != n:
                        moved = {m: jax.device_put(x, there) for m, x in parts.items()}
                        passes[n].stacked[outside].update(moved)

    def _results(self, stores: Sequence[Store]) -> list:
        """State over all copies, all else as the first copy has it."""
        found = []
        jaxpr = self.staged.traced.jaxpr.jaxpr
        for o, (v, place) in enumerate(zip(jaxpr.outvars, self.staged.result_homes)):
            if _compat.is_literal(v):
                found.append(jnp.asarray(v.val))
            elif len(stores) > 1 and o in self.state_results:
                found.append(as_one([s[v, place] for s in stores], self.sharding(v, place)))
            else:
                found.append(stores[0][v, place])
        return found


class Copy:
    """The code of all stages on some sites, [place]: all that a step runs, or one of its copies."""

    def __init__(
        self,
        staged: Staged,
        sites: Sequence[RunningSite],
        places: Places,
        parts: Mapping[tuple[int, str], Part],
        donate: bool,
    ):
        self.staged, self.sites, self.places, self.loop = staged, sites, places, staged.loop
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

    def moved(self, x: Any, v: Any, source: int, place: int) -> Any:
        """A value of `source` as `place` wants it; no host is in between."""
        spec = self.places.sent[v, place]
        if spec != self.places.spec(v, source):
            sharding = named_sharding(self.sites[source].mesh, spec)
            x = self.jitted(sharding, lambda x: x, sharding)(x)
        return jax.device_put(x, self.sharding(v, place))

    def jitted(
        self, key: Any, run: Callable, shardings: Any, given_up: tuple[int, ...] = ()
    ) -> Callable:
        if key not in self._small:
            self._small[key] = jax.jit(run, out_shardings=shardings, donate_argnums=given_up)
        return self._small[key]

    def sharding(self, v: Any, place: int) -> jax.sharding.NamedSharding:
        return named_sharding(self.sites[place].mesh, self.places.spec(v, place))

    # -- one step ----------------------------------------------------------------------------------

    def begun(self, leaves: Sequence) -> Store:
        """What there is before the loop: arguments where they are read, and what is prepared."""
        jaxpr = self.staged.traced.jaxpr
        store: Store = {}
        for v, x in (*zip(jaxpr.jaxpr.invars, leaves), *zip(jaxpr.jaxpr.constvars, jaxpr.consts)):
            home = self.staged.homes.get(v)
            if home is None:
                for p in self.places.wants.get(v, ()):
                    store[v, p] = self._put(x, v, p)
            else:
                self.keep(v, self._put(x, v, home), home, store)
        self._level(self.prepare, store)
        return store

    def updated(self, level: int, store: Store) -> None:
        """One level of the update."""
        self._level(self.update[level], store)
        for key in self.done[level]:
            del store[key]

    def _put(self, x: Any, v: Any, place: int) -> Any:
        sharding = self.sharding(v, place)
        if isinstance(x, jax.Array) and x.committed and x.sharding == sharding:
            return x
        return jax.device_put(x, sharding)

    def _level(self, level: Mapping[int, Code], store: Store) -> None:
        for place, code in level.items():
            made = code.run([store[v, place] for v in code.reads])
            for v, x in zip(code.makes, made):
                self.keep(v, x, place, store)

    def keep(self, v: Any, x: Any, place: int, store: Store) -> None:
        """Store a value outside of the loop, and send it to the places that read it."""
        store[v, place] = x
        if self.places.source[v] == place:
            for p in self.staged.sends.get(v, ()):
                store[v, p] = self.moved(x, v, place, p)

    def zeros(self, store: Store) -> dict[Any, Any]:
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
            found[c.inside] = jax.device_put(x, self.sharding(c.inside, place))
        for place, carries in numbers.items():
            shardings = [self.sharding(c.inside, place) for c in carries]
            begin = self.jitted(("sums", place), lambda some=carries: _begun(some), shardings)
            found.update(zip((c.inside for c in carries), begin()))
        return found

    def slices(self, store: Store, micros: range) -> dict[tuple[Any, int], dict[int, Any]]:
        """(variable of the body, place) -> its value for each of `micros`."""
        found = {}
        for v, atom in self.loop.slices.items():
            for place in sorted(self.places.wants.get(atom, ())):
                split = self.jitted(
                    (v, place),
                    lambda x: [x[m] for m in micros],
                    [self.sharding(v, place)] * len(micros),
                )
                found[v, place] = dict(zip(micros, split(store[atom, place])))
        for atom in self.only_sliced:
            for place in self.places.wants.get(atom, ()):
                del store[atom, place]
        return found


class _Pass:
    """The micro-batches that go through one copy in one step: what is kept and added up of them.

    sums: variable before a micro-batch -> its value. stacked: result -> micro-batch -> its part.
    """

    def __init__(self, copy: Copy, store: Store, micros: range):
        self.copy, self.store, self.loop = copy, store, copy.loop
        self.sums = copy.zeros(store)
        self.slices = copy.slices(store, micros)
        self.kept: dict[tuple[Any, int, int], Any] = {}  # (variable, place, micro-batch)
        self.uses: dict[tuple[Any, int, int], int] = {}
        self.stacked: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.results = {c.result: c.inside for c in self.loop.carries}
        self.ends = dict(self.loop.stacks)

    def _at(self, task: Task) -> tuple[Code, int]:
        copy = self.copy
        return copy.tasks[task.stage, task.phase], copy.staged.places[task.stage]

    def there(self, task: Task) -> bool:
        """Whether what a task reads is made, or on its way."""
        code, place = self._at(task)
        made = (v for v in code.reads if (v, place) in self.copy.places.readers)
        return all((v, place, task.micro) in self.kept for v in made)

    def run(self, task: Task) -> None:
        copy, readers = self.copy, self.copy.places.readers
        code, place, m = *self._at(task), task.micro
        made = code.run([self._read(v, place, m) for v in code.reads]) if code.makes else []
        for v, x in zip(code.makes, made):
            if v in self.results:
                self.sums[self.results[v]] = x
            if v in self.ends:
                self.stacked[self.ends[v]][m] = x
            for p in (place, *copy.staged.sends.get(v, ())):
                if (v, p) in readers:
                    self.kept[v, p, m] = x if p == place else copy.moved(x, v, place, p)
                    self.uses[v, p, m] = readers[v, p]

    def _read(self, v: Any, place: int, m: int) -> Any:
        if v in self.sums:
            return self.sums[v]
        if v in self.loop.consts:
            atom = self.loop.consts[v]
            return atom.val if _compat.is_literal(atom) else self.store[atom, place]
        if v in self.loop.slices:
            return self.slices[v, place][m]
        key = v, place, m
        self.uses[key] -= 1
        return self.kept[key] if self.uses[key] else self.kept.pop(key)

    def end(self) -> None:
        """Sums and stacks are there for the update."""
        copy, source = self.copy, self.copy.places.source
        for c in self.loop.carries:
            if not _compat.is_dropped(c.last):
                copy.keep(c.last, self.sums[c.inside], source[c.last], self.store)
        for v, parts in self.stacked.items():
            place = source[v]
            stack = copy.jitted(v, lambda *xs: jnp.stack(xs), copy.sharding(v, place))
            whole = stack(*(parts[m] for m in range(self.loop.micro)))
            copy.keep(v, whole, place, self.store)


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
