"""What a pipeline would take, guessed from one that was priced: which shapes are worth a price.

A block takes per sample of a device what it took there, by kind (`balance.Works`); stages of such
blocks are simulated in their order as any others. So of the same micro-batches and devices (other
chunks, other cuts, other orders) the guess is close. Of others it is a guess: no sample is spread
over more than the devices of a node, and what more devices would share is the batch alone.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import log
from statistics import median
from typing import NamedTuple

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import ScheduleError
from jaxscaler.pipeline.balance import Seen, Works
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.space import AGAIN, CHAIN, KEPT, PLANNED, Candidate, Shape
from jaxscaler.schedule.families import family
from jaxscaler.schedule.simulate import simulate
from jaxscaler.schedule.tasks import Edge, Pipeline, StageWork

SECONDS = ("forward", "backward", "weight", "update")
BYTES = ("kept", "static")
TASKS = 20_000  # of a pipeline that is simulated for a guess, at most
BACKWARD = 2.0  # times forward, where nothing is made again
MORE = 2.0  # times what is kept beside products, where elementwise values are kept too


class Guess(NamedTuple):
    """Seconds of a step and, at least, bytes of a device. near: of sizes that were priced."""

    seconds: float
    bytes: float
    near: bool


class _Record(NamedTuple):
    shape: Shape
    dispatch: float
    barrier: float | None
    sums: dict[str, list[float]]  # [block]: of all blocks before
    working: float
    edge: Edge


class Guesses:
    """Pipelines that were priced, each a chain of equal sub-meshes, and what others would take."""

    def __init__(self, works: Works):
        self.works, self.space = works, works.space
        self.records: list[_Record] = []
        self.made: dict[Candidate, Guess | None] = {}

    def learn(self, candidate: Candidate, plan: PipelinePlan) -> None:
        """From what a candidate took."""
        shape, pipeline = candidate.shape, plan.pipeline
        if not self.known(shape) or shape.turns > 1 or candidate.schedule not in CHAIN:
            return
        ends = list(pairwise((0, *candidate.ends, self.space.blocks)))
        device, size = self.space.device_at(0), shape.sizes[0]

        def sums(name: str) -> list[float]:
            scaled = [
                (Seen(a, b, size, device, work), getattr(work, name) or 0.0)
                for (a, b), work in zip(ends, pipeline.stages, strict=True)
            ]
            rate = sum(value for _, value in scaled) / float(self.works.flops.sum())
            each = self.works.blocks(scaled, rate).tolist()
            if name in BYTES:  # a plan takes more where it may: at least what the leanest takes
                each = [min(value / (s.last - s.first) for s, value in scaled)] * self.space.blocks
            return [*accumulate(each, initial=0.0)]

        edges = pipeline.edges or (Edge(0, 1),)
        edge = Edge(0, 1, median(e.seconds for e in edges), median(e.bytes for e in edges))
        working = min(work.working for work in pipeline.stages)
        every = {name: sums(name) for name in (*SECONDS, *BYTES)}
        self.made.clear()
        self.records.append(_Record(shape, plan.dispatch, pipeline.barrier, every, working, edge))

    def known(self, shape: Shape) -> bool:
        """Whether such a shape can be guessed, or learned from."""
        plain = isinstance(self.space.cluster, Cluster) and self.space.fixed is None
        return plain and not shape.wide and len({*shape.sizes}) == 1

    def of(self, candidate: Candidate) -> Guess | None:
        """None: nothing near was priced, or the order can not be told beforehand."""
        shape = candidate.shape
        tasks = 2 * shape.micro * shape.stages
        if not self.records or not self.known(shape) or tasks > TASKS:
            return None
        if candidate not in self.made:
            self.made[candidate] = self._made(candidate)
        return self.made[candidate]

    def _made(self, candidate: Candidate) -> Guess | None:
        shape = candidate.shape
        record = min(self.records, key=lambda r: self._distance(r.shape, shape))
        pipeline = self._pipeline(record, candidate)
        try:
            order = family(candidate.schedule, pipeline)
        except ScheduleError:
            return None
        timeline = simulate(pipeline, order, record.dispatch)
        near = (shape.again, shape.lanes) == (record.shape.again, record.shape.lanes)
        near &= (shape.micro, shape.sizes) == (record.shape.micro, record.shape.sizes)
        return Guess(timeline.seconds, max(peak.bytes for peak in timeline.peak), near)

    def _distance(self, old: Shape, new: Shape) -> tuple:
        far = abs(log(self._samples(old) / self._samples(new)))
        return old.again != new.again, far, old.lanes != new.lanes, old.sizes != new.sizes

    def _samples(self, shape: Shape) -> float:
        """Of a micro-batch, that the devices of a node have at once."""
        nodes = max(1.0, shape.sizes[0] / self.space.inner)
        return max(1.0, self.space.samples / shape.micro / nodes)

    def _pipeline(self, record: _Record, candidate: Candidate) -> Pipeline:
        shape, sums = candidate.shape, record.sums
        count = len(shape.sizes)
        scale = self._samples(shape) / self._samples(record.shape)
        inner, size = self.space.inner, shape.sizes[0]
        if size < inner:  # fewer devices for a sample
            scale *= inner / size
        if record.shape.sizes[0] < inner:
            scale *= record.shape.sizes[0] / inner
        runs = list(pairwise((0, *candidate.ends, self.space.blocks)))

        def of(name: str, run: tuple[int, int]) -> float:
            return sums[name][run[1]] - sums[name][run[0]]

        stages = []
        for s, run in enumerate(runs):
            forward = scale * of("forward", run)
            backward = scale * (of("backward", run) + of("weight", run))
            backward = _again(forward, backward, record.shape.again, shape.again)
            split = candidate.schedule.startswith("zero-bubble")
            mine = runs[s % count :: count] if s < count else []  # of a group, on its first chunk
            stages.append(StageWork(
                groups=(s % count,),
                forward=forward,
                backward=backward / 2 if split else backward,
                weight=backward / 2 if split else None,
                update=sum(of("update", r) for r in mine) if mine else None,
                kept=scale * of("kept", run) * _kept(record.shape.again, shape.again),
                working=scale * record.working,
                static=sum(of("static", r) for r in mine),
            ))  # fmt: skip
        edges = tuple(
            Edge(s, s + 1, scale * record.edge.seconds, scale * record.edge.bytes)
            for s in range(len(stages) - 1)
        )
        return Pipeline(tuple(stages), shape.micro, edges, (), record.barrier)


def _again(forward: float, backward: float, old: str, new: str) -> float:
    """Backward seconds, with something else made again."""
    if old == new:
        return backward
    bare = backward - (forward if old == AGAIN else 0.0)
    if new == AGAIN:
        return bare + forward
    return min(bare, BACKWARD * forward) if new in (KEPT, PLANNED) else bare


def _kept(old: str, new: str) -> float:
    """How many times as much is kept, at least."""
    if old == new:
        return 1.0
    if new in (AGAIN, PLANNED):
        return 0.0
    return MORE if new == KEPT else 1.0
