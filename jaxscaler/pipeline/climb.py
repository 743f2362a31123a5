"""From a pipeline to better ones: other shapes, cuts, unequal sub-meshes, searched orders."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from jaxscaler.errors import ScheduleError
from jaxscaler.pipeline.balance import even_ends, uneven
from jaxscaler.pipeline.found import Row, kind_of
from jaxscaler.pipeline.guess import Guess
from jaxscaler.pipeline.space import AGAIN, CHEAP, CHUNKS, TWICE, Candidate, Shape, of_chain
from jaxscaler.pipeline.tries import Tries
from jaxscaler.schedule.search import search
from jaxscaler.schedule.simulate import simulate

SEARCHED = "searched order"
BETTER = 0.999  # of what it was: less gain is not worth another cut
NEAR = 1.5  # of the best: other schedules of a shape are priced if its first is within
CUTS = 3  # of one shape
ROUNDS = 4  # of sub-meshes that are not equal
GRADIENTS = 1.5  # state with its gradients, for a begin
FINAL = 2  # pipelines whose order is searched
SEARCHABLE = 4096  # tasks of these, at most
UNEVEN = 1.1  # of the best: sub-meshes of other sizes are tried of pipelines within
SURE, UNSURE = 1.02, 1.05  # times the best, or the memory: what is guessed to be above is left out


class Climb(Tries):
    """A search that begins with one shape and goes on to neighbours while they are better."""

    def climb(self) -> None:
        number = itertools.count()
        scores: dict[Shape, float] = {}
        nearest: dict[Shape, float] = {}  # least seconds of a neighbour that it comes from
        # (seconds of the neighbour that it comes from, its promise, number, shape)
        queue: list[tuple[float, tuple[bool, float], int, Shape]] = []

        def push(shape: Shape, seconds: float) -> None:
            new = shape not in nearest or seconds < nearest[shape]
            if new and shape not in scores:
                nearest[shape] = seconds
                heapq.heappush(queue, (seconds, self.promise(shape), next(number), shape))

        for shape in self.begin():
            push(shape, inf)
        while queue:
            least = min(scores.values(), default=inf)
            seconds, _, _, shape = heapq.heappop(queue)
            if seconds > least and least < inf:
                break  # all neighbours of the best are priced
            if shape in scores:
                continue
            if self.promise(shape)[1] == inf:
                self.left.add(shape)
                continue
            if self.late():
                self.notes.append(f"out of time: {len(queue) + 1} kinds of pipelines were left")
                return
            scores[shape] = inf if self.hopeless(shape) else self.shape(shape)
            if scores[shape] <= least or least == inf:
                for other in self.neighbours(shape):
                    push(other, scores[shape])
        self.unequal()
        self.search_orders()
        if self.left:
            self.notes.append(
                f"{len(self.left)} kinds of pipelines were guessed to be slower, or not to fit"
            )

    def begin(self) -> list[Shape]:
        """Where the climb begins: each stage's state fits on a node, whose devices share a sample;
        more micro-batches where these would leave stages idle."""
        inner = self.space.inner
        counts = [n for n in self.space.counts if self.sizes(n)]
        node = self.limit * min(inner, self.cluster.num_devices)
        if not counts:
            self.notes.append("no number of stages gives each an equal part of the cluster")
            return []
        held = GRADIENTS * self.space.state_bytes
        enough = [n for n in counts if held / n <= node] or counts[-1:]
        count = enough[0]
        size = self.cluster.num_devices // count
        each = self.space.samples // max(1, size // inner)
        aim = each if each >= count else 2 * count
        micro = min(self.space.micro, key=lambda m: (abs(m - aim), m), default=None)
        if micro is None:
            self.notes.append(f"the batch of {self.space.samples} has no parts that were asked for")
            return []
        counted = [(micro, count)]
        for given in (r.given for r in self.rows if r.given is not None):
            if given.micro in self.space.micro and len(given.devices) in counts:
                counted.insert(0, (given.micro, len(given.devices)))
        names = [*reversed(self.space.again)]
        names.sort(key=lambda name: name != CHEAP)  # the others are guessed from these
        return [
            self.made(micro, count, again)
            for micro, count in dict.fromkeys(counted)
            for again in names
        ]

    def hopeless(self, shape: Shape) -> bool:
        """Whether the same does not fit although more of it is made again."""
        names = list(self.space.again)
        for name in names[names.index(shape.again) + 1 :]:
            if name in (CHEAP, AGAIN) and replace(shape, again=name) in self.misfits:
                why = f"does not fit even with {name}"
                self.rows.append(Row(str(shape), kind_of(shape), None, why=why))
                return True
        return False

    def sizes(self, count: int) -> tuple[int, ...] | None:
        known = self.space.fixed is not None or count <= self.space.blocks
        return self.space.even(count) if known else None

    def ways(self, micro: int, size: int) -> list[int]:
        """Lanes that are looked at, the most first."""
        all_of_them = self.space.lanes(micro, size)
        return [n for n in all_of_them if self.lanes is None or n in self.lanes] or [1]

    def made(self, micro: int, count: int, again: str, like: Shape | None = None) -> Shape:
        sizes = self.sizes(count)
        assert sizes is not None
        ways = self.ways(micro, sizes[0])
        split = like is None or like.lanes > 1
        shape = Shape(micro, sizes, again, ways[0] if split else ways[-1])
        return shape if like is None else replace(shape, turns=like.turns, wide=like.wide)

    def neighbours(self, shape: Shape) -> Iterator[Shape]:
        for again in self.space.again:
            yield replace(shape, again=again)
        counts = [n for n in self.space.counts if self.sizes(n)]
        at, micros = counts.index(len(shape.sizes)), self.space.micro
        place = micros.index(shape.micro)

        def of(count: int) -> Iterator[Shape]:
            aim = shape.micro * count / counts[at]  # as many samples per device at once
            for micro in dict.fromkeys((min(micros, key=lambda m: abs(m - aim)), shape.micro)):
                yield self.made(micro, count, shape.again, shape)

        # what takes less memory first
        for micro in micros[place + 1 : place + 2]:
            yield self.made(micro, len(shape.sizes), shape.again, shape)
        for count in counts[at + 1 : at + 2]:
            yield from of(count)
        for lanes in self.ways(shape.micro, shape.sizes[0]):
            yield replace(shape, lanes=lanes)
        for count in counts[max(0, at - 1) : at]:
            yield from of(count)
        for micro in micros[max(0, place - 1) : place]:
            yield self.made(micro, len(shape.sizes), shape.again, shape)
        if self.space.fixed is None:
            if "interleaved" in self.schedules and not shape.wide:
                yield from self.turned(shape)
            if "interlaced" in self.schedules and shape.turns == 1:
                yield replace(shape, wide=not shape.wide)

    def turned(self, shape: Shape) -> Iterator[Shape]:
        """Other numbers of chunks: the best by a guess, else the next ones."""
        if shape.turns > 1 and self.guess(shape) is not None:
            return  # it was the best
        most = self.space.blocks // len(shape.sizes)
        near = [t for t in (shape.turns + 1, shape.turns - 1) if 1 <= t <= min(most, CHUNKS)]
        if shape.turns == 1:
            some = {*range(2, min(most, CHUNKS) + 1), *(most // n for n in range(1, CHUNKS + 1))}
            found = {t: self.guess(replace(shape, turns=t)) for t in sorted(some - {0, 1})}
            known = {t: g for t, g in found.items() if g is not None}
            fits = {t: g for t, g in known.items() if g.bytes <= SURE * self.limit}
            if known:
                near = sorted(fits, key=lambda t: (fits[t].seconds, t))[:1]
        for turns in near:
            yield replace(shape, turns=turns)

    def guess(self, shape: Shape) -> Guess | None:
        """What the first schedule of a shape would take; None: nothing is known."""
        names = self.names(shape)
        if not names or not self.guesses.records or not self.guesses.known(shape):
            return None
        ends = even_ends(self.works, shape, self.memory)
        return None if ends is None else self.guesses.of(Candidate(shape, ends, names[0]))

    def promise(self, shape: Shape) -> tuple[bool, float]:
        """(whether it is a mere guess, seconds that a shape would take, or the same in chunks); of
        what can not be guessed a little more than the best; inf: it is not worth a price."""
        most = self.space.blocks // len(shape.sizes)
        chunks = "interleaved" in self.schedules and shape.turns == 1 and not shape.wide
        some = [shape, *([replace(shape, turns=most)] if chunks and most > 1 else [])]
        found = [self.guess(one) for one in some]
        if any(guess is None for guess in found):
            return True, UNSURE * self.best if self.best < inf else 0.0
        good = ((not g.near, g.seconds) for g in found if g is not None and self.allows(g))
        return min(good, default=(True, inf))

    def allows(self, guess: Guess) -> bool:
        """Whether what is guessed so is worth a price."""
        room = SURE if guess.near else UNSURE
        least = self.best * (1 + self.simplest)
        return guess.seconds <= room * least and guess.bytes <= room * self.limit

    def names(self, shape: Shape) -> list[str]:
        """Schedules of a shape."""
        if self.space.fixed is not None:
            return list(self.schedules)
        if shape.turns > 1:
            return ["interleaved"]
        if shape.wide:
            return ["interlaced"]
        return of_chain(shape, self.schedules)

    def shape(self, shape: Shape) -> float:
        """Seconds of the best pipeline of a shape that was found."""
        names = self.names(shape)
        if not names:
            return inf
        found = inf
        ends: tuple[int, ...] | None = None
        for _ in range(CUTS):
            new = () if self.space.fixed else even_ends(self.works, shape, self.memory)
            candidate = Candidate(shape, new, names[0]) if new is not None else None
            if candidate is None or candidate in self.known:
                break
            guess = self.guesses.of(candidate) if found < inf else None
            if guess is not None and guess.seconds > BETTER * found:
                break
            plan = self.price(candidate)
            seconds = inf if plan is None else plan.seconds
            if seconds < found:
                ends = new
            elif ends is not None:
                break
            better, found = seconds < BETTER * found, min(found, seconds)
            if not better or self.late() or self.space.fixed:
                break
        if ends is not None and found <= NEAR * self.best:
            for name in names[1:]:
                guess = self.guesses.of(Candidate(shape, ends, name))
                if guess is not None and not self.allows(guess):
                    continue
                plan = self.price(Candidate(shape, ends, name))
                found = min(found, inf if plan is None else plan.seconds)
        return found

    def unequal(self) -> None:
        """Sub-meshes of other sizes, while they help; their works are guessed from known ones."""
        if self.space.fixed is not None:
            return
        for _ in range(ROUNDS):
            chains = (c for c in self.ranked() if c.shape.turns == 1 and not c.shape.wide
                      and c.schedule != TWICE)  # fmt: skip
            old = next(chains, None)
            if old is None or self.late():
                return
            seconds = self.known[old].seconds
            if seconds is None or seconds > UNEVEN * self.best:
                return
            before, count = self.seconds, len(old.shape.sizes)
            for number in (count, count - 1, count + 1):
                if number not in self.space.counts or self.late():
                    continue
                found = uneven(self.works, old.shape, number, self.memory)
                if found is not None:
                    self.price(
                        Candidate(replace(old.shape, sizes=found[0]), found[1], old.schedule)
                    )
            if self.seconds >= before:
                return

    def search_orders(self) -> None:
        """Orders by CP-SAT for the fastest pipelines."""
        tops: list[Candidate] = []
        for one in self.ranked():
            if all((t.shape, t.ends) != (one.shape, one.ends) for t in tops):
                tops.append(one)
        for candidate in tops[:FINAL]:
            tasks = 2 * candidate.shape.micro * candidate.shape.stages
            if tasks > SEARCHABLE:
                self.notes.append(f"{candidate}: no order of its {tasks} tasks was searched")
                continue
            if self.late():
                self.notes.append("out of time: orders were not searched")
                return
            self.search_order(candidate)

    def search_order(self, candidate: Candidate) -> None:
        plan = self.plan(candidate)
        try:
            found = search(plan.pipeline)
        except ScheduleError:
            return
        if found.seconds < BETTER * simulate(plan.pipeline, plan.order).seconds:
            new = replace(candidate, schedule=SEARCHED)
            self.orders[new] = found.order
            self.price(new)
