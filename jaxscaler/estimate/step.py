"""The algebra of a step around what one micro-batch takes: pipeline, replicas, update.

Seconds of kernels are those of `cost/compute.py`, of collectives those of `cost/collective.py`, of
pipelines the closed forms of `cost/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import Axis
from jaxscaler.cost.collective import collective_time
from jaxscaler.cost.compute import MEMORY_EFFICIENCY
from jaxscaler.cost.pipeline import step_seconds
from jaxscaler.estimate.adapters import with_adapters
from jaxscaler.estimate.body import (
    AGAIN,
    EMBED,
    HEAD,
    LAYER,
    MATMUL,
    SCORES,
    VECTOR,
    Body,
    Part,
    body_of,
)
from jaxscaler.estimate.compression import Compression
from jaxscaler.estimate.config import ModelConfig, padded_vocab
from jaxscaler.estimate.constants import Constants
from jaxscaler.estimate.memory import BYTES, SOFTWARE, StageSize, local_parameters, stages_of
from jaxscaler.estimate.parallel import ParallelConfig, axes_of, level_of, over_trees
from jaxscaler.estimate.template import Task
from jaxscaler.graph.ir import BACKWARD, FORWARD

WITH_TRANSFER = ("gpipe", "1f1b")  # families whose closed form counts transfers
COMPUTE_KINDS = (MATMUL, SCORES, VECTOR)


@dataclass(frozen=True)
class Job:
    """What is computed where: the axes, and the body of a micro-batch on them."""

    model: ModelConfig
    parallel: ParallelConfig
    cluster: Cluster
    micro: int
    seq: int
    recompute: str
    dtype: str
    attention: str
    stack: str
    training: bool = True
    weights: str = ""
    lora: int = 0

    def body(self, seq: int = 0) -> Body:
        """Of micro-batches of `seq` tokens, those of the job unless given."""
        p, model = self.parallel, self.model
        dtype = "bfloat16" if self.dtype == "float8" else self.dtype
        task = Task(
            replace(model, name="traced"),
            model.kv_heads if p.tp <= model.kv_heads else p.tp,
            padded_vocab(model.vocab, p.tp),
            seq or self.seq,
            dtype,
            self.attention,
            self.recompute,
            self.training,
            "float32" if self.training and self.stack == "jax" else dtype,
            self.weights,
        )
        axes = self.axes(dp=p.dp // p.ep, ep=p.ep, cp=p.cp)
        inner = tuple(axes[name] for name in ("ep", "cp", "tp"))
        body = body_of(task, self.micro, inner, p.sp and p.tp > 1, self.cluster.device)
        if self.stack != "jax" and self.recompute == "full":
            body = _whole_forward_again(body)
        return with_adapters(body, self) if self.lora else body

    def axes(self, **degrees: int) -> dict[str, Axis]:
        """Axes between pipeline stages, outermost, and tensor parallelism, innermost."""
        return _axes(self.cluster, (("pp", self.parallel.pp), *degrees.items(),
                                    ("tp", self.parallel.tp)))  # fmt: skip


@lru_cache(maxsize=4096)
def _axes(cluster: Cluster, sizes: tuple[tuple[str, int], ...]) -> dict[str, Axis]:
    return axes_of(cluster, dict(sizes))


@lru_cache(maxsize=4096)
def _whole_forward_again(body: Body) -> Body:
    """Layers run their whole forward pass again, as a framework without a compiler does it."""
    kept = [part for part in body.parts if (part.where, part.phase) != (LAYER, AGAIN)]
    again = [
        part._replace(phase=AGAIN) for part in kept if (part.where, part.phase) == (LAYER, FORWARD)
    ]
    return replace(body, parts=(*kept, *again))


@dataclass
class Step:
    """The algebra of a step around the parts of a micro-batch."""

    job: Job
    body: Body
    constants: Constants
    micro_batches: int
    gradient_bytes: float
    update_traffic: float
    trained: float = 1.0  # share of the parameters that are
    compress: Compression | None = None  # of gradients, where they are reduced

    def __post_init__(self) -> None:
        p = self.job.parallel
        self.stages = stages_of(self.job.model.layers, p.pp)
        axes = self.job.axes(dp=p.dp // p.ep, ep=p.ep, cp=p.cp)
        self.levels = {name: level_of(axis) for name, axis in axes.items() if axis.size > 1}
        self.trees = {name: over_trees(axis) for name, axis in axes.items() if axis.size > 1}
        self.pp_axis = axes["pp"]
        self.speed = {"fabric": self.constants.fabric, "network": self.constants.network}

    # -- a micro-batch on a stage ------------------------------------------------------------------

    def level(self, kind: str) -> str:
        names = kind.split(":")[0].split(",")
        levels = {self.levels.get(name, "fabric") for name in names}
        return "network" if "network" in levels else "fabric"

    def tuned(self, part: Part) -> dict[str, float]:
        """Seconds of a part with constants applied, by what they are spent on."""
        c = self.constants
        if part.kind not in COMPUTE_KINDS:
            axis = part.kind.split(":")[0].split(",")[0]
            seconds = part.seconds / self.speed[self.level(part.kind)]
            if part.kind.endswith(":all_reduce") and axis in self.trees:
                seconds *= self.trees[axis]
            return {axis: seconds}
        seconds = part.seconds
        if part.kind == MATMUL and self.job.dtype == "float8":
            device = self.job.cluster.device
            seconds *= device.flops(self.dtype) / device.flops("float8_e4m3fn")
        if part.kind == SCORES and self.unaligned():
            seconds = max(seconds, part.flops / self.plain_rate)
        share = {MATMUL: c.matmul, SCORES: c.attention, VECTOR: c.vector}[part.kind]
        seconds *= 1 + c.wave * part.tail / part.flops if part.tail else 1
        return {part.kind: seconds / share, "launch": part.runs * c.launch_us * 1e-6}

    @property
    def plain_rate(self) -> float:
        """FLOP/s without tensor cores."""
        rates = dict(self.job.cluster.device.peak_flops)
        return rates.get("f32", max(rates.values()))

    def unaligned(self) -> bool:
        """Whether products with heads are kept from tensor cores: rows of a head that are no
        multiple of 16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", section
        "Tensor Core Requirements"). Kernels of attention fill them up."""
        job = self.job
        row = job.model.head_size * BYTES[self.dtype]
        return job.attention == "unfused" and job.cluster.device.vendor == "NVIDIA" and row % 16 > 0

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.job.dtype == "float8" else self.job.dtype

    def stage(self, stage: StageSize) -> dict[str, dict[str, float]]:
        """phase -> what -> seconds of one micro-batch on a stage."""
        counts = {LAYER: stage.layers, EMBED: stage.first, HEAD: stage.last}
        found: dict[str, dict[str, float]] = {}
        for part in self.body.parts:
            phase = FORWARD if part.phase == FORWARD else BACKWARD
            spent = found.setdefault(phase, {})
            for what, seconds in self.tuned(part).items():
                spent[what] = spent.get(what, 0.0) + counts[part.where] * seconds
        spent = found[BACKWARD]
        spent[VECTOR] = spent.get(VECTOR, 0.0) + self.adding(stage) / self.rate()
        return found

    def adding(self, stage: StageSize) -> float:
        """Bytes by which a micro-batch's gradients are added to those before it."""
        p = self.job.parallel
        if self.micro_batches == 1:
            return 0.0
        n = local_parameters(self.body.leaves, self.job.model, stage, p.pp).all
        split = p.shards if p.zero >= 2 else 1
        return n / split * (2 * self.gradient_bytes + BYTES[self.dtype])

    def rate(self) -> float:
        """Bytes a second that stream through memory."""
        return self.job.cluster.device.hbm_bandwidth * MEMORY_EFFICIENCY * self.constants.vector

    # -- the step ----------------------------------------------------------------------------------

    def parts(self) -> tuple[dict[str, float], float, dict[str, float]]:
        """(seconds by what they are spent on, hidden communication, `Priced.shared`)."""
        p, m = self.job.parallel, self.micro_batches
        different = {stage: self.stage(stage) for stage in set(self.stages)}
        stages = [different[stage] for stage in self.stages]
        totals = [_sum(stage[FORWARD]) + _sum(stage[BACKWARD]) for stage in stages]
        slowest = max(range(p.pp), key=totals.__getitem__)
        parts: dict[str, float] = {}
        for phase in stages[slowest].values():
            for what, seconds in phase.items():
                parts[what] = parts.get(what, 0.0) + m * seconds
        if p.pp > 1:
            parts |= self.pipeline(stages, totals[slowest])
        forward, backward = (_sum(stages[slowest][phase]) for phase in (FORWARD, BACKWARD))
        exposed, hidden, update, narrowing, shared = self.replicas(slowest, forward, backward)
        parts["dp"], parts["update"], parts["compress"] = exposed, update, narrowing
        return {k: v for k, v in parts.items() if v}, hidden, shared

    def pipeline(self, stages, slowest: float) -> dict[str, float]:
        """Transfers between stages, and the bubble: what a step takes beyond its micro-batches."""
        p, m = self.job.parallel, self.micro_batches
        # Every tensor-parallel device sends its share (Narayanan et al. 2021, section 4.1).
        nbytes = self.job.micro * self.job.seq / p.cp * self.job.model.hidden / p.tp
        nbytes *= BYTES[self.dtype]
        seconds = float(collective_time("collective_permute", self.pp_axis, nbytes))
        seconds /= self.speed[level_of(self.pp_axis)]
        mean = {
            phase: sum(_sum(stage[phase]) for stage in stages) / p.pp
            for phase in (FORWARD, BACKWARD)
        }
        weight = 0.0
        if p.schedule.startswith("zero-bubble"):  # half of the products of the backward pass
            weight = sum(stage[BACKWARD].get(MATMUL, 0.0) for stage in stages) / p.pp / 2
            mean[BACKWARD] -= weight
        run = partial(step_seconds, p.schedule, p.pp, m, mean[FORWARD], mean[BACKWARD], weight)
        sends = 2 * p.chunks * m * seconds
        if p.schedule in WITH_TRANSFER:
            sends = run(seconds, p.chunks) - run(0.0, p.chunks)
        whole = run(0.0, p.chunks)
        idle = whole - m * (mean[FORWARD] + mean[BACKWARD] + weight)
        return {"pp": sends, "bubble": idle}

    # -- replicas ----------------------------------------------------------------------------------

    def replicas(
        self, slowest: int, forward: float, backward: float
    ) -> tuple[float, float, float, float, dict[str, float]]:
        """(exposed seconds of communication between replicas, hidden ones, seconds of the update,
        of narrowing gradients, communication by level before constants)."""
        p, m = self.job.parallel, self.micro_batches
        stage = self.stages[slowest]
        local = local_parameters(self.body.leaves, self.job.model, stage, p.pp)
        shared: dict[str, float] = {}

        def run(kind: str, axis: Axis, elements: float, nbytes: float, times: int = 1) -> float:
            """Seconds of collectives on all parameters of a kind, a layer at a time."""
            if axis.size == 1 or not elements:
                return 0.0
            pieces = max(1, stage.layers)
            once = float(collective_time(kind, axis, elements * nbytes / pieces)) * pieces * times
            once *= over_trees(axis) if kind == "all_reduce" else 1.0
            level = level_of(axis)
            shared[level] = shared.get(level, 0.0) + once
            return once / self.speed[level]

        streamed = 0.0  # bytes that compression takes through memory

        def reduce(kind: str, axis: Axis, elements: float, times: int = 1) -> float:
            nonlocal streamed
            if self.compress is None:
                return run(kind, axis, elements, self.gradient_bytes, times)
            if axis.size == 1:
                return 0.0
            passes, nbytes = self.compress.passes(kind, axis)
            streamed += nbytes * elements * times
            return sum(run(x.collective, x.axis, elements, x.nbytes, times) for x in passes)

        reduced = gathered = 0.0
        per_micro = m if p.zero >= 2 else 1
        for elements, shards, copies in (
            (local.dense, p.shards, p.dp * p.cp),
            (local.expert, max(1, p.shards // p.ep), p.dp * p.cp // p.ep),
        ):
            among = self.job.axes(replica=copies // shards, shard=shards,
                                  other=p.dp * p.cp // copies)  # fmt: skip
            shard, replica = among["shard"], among["replica"]
            learned = self.trained * elements
            if p.zero == 0:
                whole = self.job.axes(all=copies, other=p.dp * p.cp // copies)["all"]
                reduced += reduce("all_reduce", whole, learned)
                continue
            reduced += reduce("reduce_scatter", shard, learned, per_micro)
            reduced += reduce("all_reduce", replica, learned / shards)
            kept = BYTES[self.dtype]
            if p.zero == 3:
                gathered += run("all_gather", shard, elements, kept, 2 * m)
            else:
                gathered += run("all_gather", shard, learned, kept)
        if self.job.model.tied and p.pp > 1 and not self.job.lora:
            ends = replace(self.pp_axis, parts=(replace(self.pp_axis.parts[0], size=2),))
            table = max(x.local for x in self.body.leaves if x.where == EMBED)
            reduced += float(collective_time("all_reduce", ends, table * self.gradient_bytes))
        if p.zero == 3:  # for every micro-batch, beside all that it computes
            spans = [(gathered + reduced, m * (forward + backward))]
        else:  # before the first micro-batch's layers, after the last one's
            spans = [(gathered, forward), (reduced, per_micro * backward)]
        share = self.constants.hidden if SOFTWARE[self.job.stack].overlaps else 0.0
        exposed = hidden = 0.0
        for seconds, beside in spans:
            open_ = max((1 - share) * seconds, seconds - share * beside)
            exposed, hidden = exposed + open_, hidden + seconds - open_
        dense = local.dense / (p.shards if p.zero else 1)
        expert = local.expert / (max(1, p.shards // p.ep) if p.zero else 1)
        update = self.trained * (dense + expert) * self.update_traffic / self.rate()
        return exposed, hidden, update, streamed / self.rate(), shared


def _sum(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
