"""Memory of a device by component: what is there all the time, and what a micro-batch leaves.

Bytes per parameter: Rajbhandari et al. 2020 (ZeRO), section 3; EleutherAI, Transformer Math 101.
Activations: Korthikanti et al. 2022, equations 1 to 6 and table 2, here by tensors, so that they
hold for grouped keys, gated MLPs and experts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from jaxscaler.cost.pipeline import in_flight
from jaxscaler.errors import ConfigError
from jaxscaler.estimate.body import EMBED, HEAD, LAYER, Leaf
from jaxscaler.estimate.config import BUCKETS, ModelConfig, padded_vocab
from jaxscaler.estimate.parallel import ParallelConfig

GB = 1e9


class Optimizer(NamedTuple):
    """Bytes per parameter of its state; `traffic`: read and written by an update of f32 numbers,
    the gradient and parameter with it. Adafactor keeps rows and columns, which are next to nothing.
    """

    state: float
    traffic: float


# m, v of Adam in f32: Kingma and Ba 2015; in 8 bits, with a scale per block of 2048: Dettmers et
# al. 2022; Adafactor without momentum: Shazeer and Stern 2018.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(0, 12),
    "momentum": Optimizer(4, 20),
    "adam": Optimizer(8, 28),
    "adam8bit": Optimizer(2 + 2 * 4 / 2048, 16),
    "adafactor": Optimizer(0, 16),
}


class Software(NamedTuple):
    """What a stack keeps of a training step beside what its mathematics needs.

    logits: bytes of a logit at the loss: 16-bit and 32-bit copies of it, of the softmax and of the
    gradient. fragments: share of what is allocated that the allocator holds beside it. bucket:
    elements of the buffer through which gradients are reduced. beside: bytes of a 16-bit gradient
    that stays beside its f32 sum. overlaps: gradients are reduced while others are computed.
    """

    logits: float
    fragments: float = 0.0
    bucket: float = 0.0
    beside: float = 0.0
    overlaps: bool = True


# XLA lays a step out before it runs. PyTorch's caching allocator holds some 10 % more than is
# allocated, as blocks of one size seldom serve another (PyTorch, CUDA semantics, "memory
# management"). XLA fuses softmax and gradient of a loss; PyTorch keeps all; Megatron's parallel
# cross entropy works in place. DeepSpeed reduces 5e8 elements at a time (its configuration,
# `reduce_bucket_size`); its optimizer for bf16 sums gradients up in f32 beside those of the
# backward pass (BigScience, chronicles of tr11, "Rebalancing layers"). Its pipelines reduce after
# the last backward pass (`PipelineEngine`, the instruction ReduceGrads).
SOFTWARE: Mapping[str, Software] = {
    "jax": Software(2.0 + 4),
    "pytorch": Software(2.0 + 4 + 4 + 4, 0.1),
    "deepspeed": Software(2.0 + 4 + 4 + 4, 0.1, 5e8),
    "megatron": Software(2.0 + 4 + 4, 0.1),
    "megatron-deepspeed": Software(2.0 + 4 + 4, 0.1, 5e8, 2.0, overlaps=False),
}
# Bytes that a process takes of a device before it allocates anything, its kernels above all, which
# a JAX step has in what it leaves free. Measured as nvidia-smi shows them: BigScience, tr3m-1B3,
# "calibration", and chronicles-prequel of tr11, "Possible topologies for 200B".
CONTEXTS: Mapping[str, float] = {
    "v100-16": 1113 * 2**20, "v100-32": 1113 * 2**20, "a100-40": 1573 * 2**20,
    "a100-80": 1573 * 2**20,
}  # fmt: skip
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class States:
    """Bytes per parameter: as read by products, its gradient, its master copy, optimizer state.

    copied: of its gradient in f32 while the update runs, where it is in 16 bits until then. The
    ZeRO paper does not count it. beside: of its 16-bit gradient that stays beside the f32 sum.
    """

    parameter: float
    gradient: float
    master: float
    optimizer: float
    copied: float = 0.0
    beside: float = 0.0

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.beside + self.master + self.optimizer


def states_of(optimizer: str, dtype: str, master: bool, gradient: str, stack: str) -> States:
    """Bytes per parameter while training in `dtype`.

    `master`: parameters are also kept in f32. PyTorch keeps both copies; a JAX step has the f32 one
    alone and casts it where it is read. `gradient`: dtype that gradients are summed up in.
    """
    if stack not in SOFTWARE:
        raise ConfigError(f"stack={stack!r}: one of {', '.join(SOFTWARE)}")
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer!r}: one of {', '.join(OPTIMIZERS)}")
    for name, value in (("dtype", dtype), ("gradient", gradient)):
        if value not in BYTES:
            raise ConfigError(f"{name}={value!r}: one of {', '.join(BYTES)}")
    kept = 2.0 if dtype == "float8" else BYTES[dtype]  # products alone are in 8 bits
    state = OPTIMIZERS[optimizer].state
    if kept == 4 or not master:
        return States(kept, BYTES[gradient], 0.0, state)
    if stack == "jax":
        return States(0.0, BYTES[gradient], 4.0, state)
    if BYTES[gradient] < 4:
        return States(kept, BYTES[gradient], 4.0, state, copied=4.0)
    return States(kept, BYTES[gradient], 4.0, state, beside=SOFTWARE[stack].beside)


def overhead_bytes(memory_gb: float, stack: str, device: str) -> float:
    """What a stack takes of a device for itself, and the process that runs it."""
    return memory_gb * GB + (0.0 if stack == "jax" else CONTEXTS.get(device, 0.0))


def saved_per_layer(
    model: ModelConfig,
    micro: int,
    seq: int,
    parallel: ParallelConfig,
    recompute: str,
    attention: str = "flash",
    dropout: bool = False,
    nbytes: float = 2.0,
) -> float:
    """Bytes that a layer keeps of a micro-batch on a device, as fused kernels keep them.

    With no recomputation, heads of hidden / heads and an MLP of 4 * hidden with dropout this is
    s b h (10 + 24 / t + 5 a s / (h t)), its 10 divided by t with sequence parallelism.
    """
    tokens = micro * seq / parallel.cp
    tp, split = parallel.tp, parallel.tp if parallel.sp else 1
    h = model.hidden
    if recompute == "full":
        return nbytes * tokens * h * model.mlps / split
    blocks = model.attentions + model.mlps
    masks = blocks * tokens * h if dropout else 0.0
    whole = nbytes * tokens * h * 2 * blocks + masks  # inputs of norms and of what follows them
    kv = model.kv_width if tp <= model.kv_heads else tp * model.head_size
    # q, k, v, input of out
    inside = model.attentions * nbytes * tokens * (2 * model.query_width + 2 * kv)
    rows = tokens * (model.chosen or 1)
    inside += model.mlps * nbytes * rows * model.ffn * (3 if model.gated else 2)
    if model.experts:  # rows as they come to the experts, and come back
        whole += 2 * nbytes * rows * h
    if attention == "unfused" and recompute == "none":
        scores = model.attentions * model.heads * tokens * seq
        inside += scores * (2 * nbytes + 1 if dropout else nbytes)
    return whole / split + inside / tp


class StageSize(NamedTuple):
    """What a pipeline stage has: layers, and which ends."""

    layers: int
    first: bool
    last: bool


@cache
def stages_of(layers: int, pp: int) -> tuple[StageSize, ...]:
    """Layers as evenly as they go; what is left over goes to stages inside, last to the ends."""
    each, more = divmod(layers, pp)
    inner = [*range(1, pp - 1), 0, pp - 1][: pp if pp > 1 else 1]
    extra = set(inner[:more])
    return tuple(StageSize(each + (i in extra), i == 0, i == pp - 1) for i in range(pp))


class Local(NamedTuple):
    """Parameters of a stage on one device, by who shares them."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        return self.dense + self.expert


def leaves_of(model: ModelConfig, tp: int, ep: int) -> tuple[Leaf, ...]:
    """Parameters by place on one device, in closed form: what `Body.leaves` sums up to."""
    h, q, f = model.hidden, model.query_width, model.ffn
    kv = max(model.kv_heads, tp) * model.head_size  # each device has a copy of what it reads
    biased, gpt = model.qkv_bias or model.family == "gpt", model.family == "gpt"
    attention = (h * (q + 2 * kv) + q * h + (q + 2 * kv if biased else 0)) // tp
    whole = (model.attentions + model.mlps) * (2 if gpt else 1) * h  # norms
    whole += 2 * h if gpt else 0  # biases of out and down
    mlp = model.matrices * h * f // tp + (f // tp if gpt else 0)
    if model.experts:
        whole += h * model.experts
    vocab = padded_vocab(model.vocab, tp)
    table = vocab // tp * h + (model.context * h if model.positions else 0)
    head = model.head_parameters - (0 if model.tied else h * model.vocab)
    if model.family == "t5":  # biases of positions, by heads
        head -= 2 * BUCKETS * (model.heads - model.heads // tp)
    head += 0 if model.tied else vocab // tp * h
    dense = model.attentions * attention + whole + (0 if model.experts else model.mlps * mlp)
    layer = [Leaf("layer", LAYER, 0, dense, False)]
    if model.experts:
        layer.append(Leaf("experts", LAYER, 0, model.experts // ep * mlp, True))
    return (*layer, Leaf("table", EMBED, 0, table, False), Leaf("head", HEAD, 0, head, False))


def local_parameters(
    leaves: Sequence[Leaf], model: ModelConfig, stage: StageSize, pp: int
) -> Local:
    """Elements on a device before ZeRO; tied tables stand on the first and on the last stage."""
    counts = {LAYER: stage.layers, EMBED: stage.first, HEAD: stage.last}
    dense = sum(x.local * counts[x.where] for x in leaves if not x.expert)
    expert = sum(x.local * counts[x.where] for x in leaves if x.expert)
    if model.tied and stage.last and pp > 1:
        dense += max(x.local for x in leaves if x.where == EMBED)
    return Local(dense, expert)


def training_memory(*args, **options) -> dict[str, float]:
    """`stage_memories` of the fullest stage."""
    return max(stage_memories(*args, **options), key=lambda parts: sum(parts.values()))


def stage_memories(
    model: ModelConfig,
    leaves: Sequence[Leaf],
    saved: float,
    parallel: ParallelConfig,
    states: States,
    *,
    micro: int,
    seq: int,
    micro_batches: int,
    recompute: str,
    attention: str,
    dropout: bool,
    overhead: float,
    trained: float = 1.0,
    late: bool = False,
    stack: str = "jax",
    feedback: float = 0.0,
) -> list[dict[str, float]]:
    """Bytes by component on a device of the first stage, of one inside and of the last (of the only
    one); `trained`: share of parameters that are (LoRA).

    `saved`: bytes that a layer keeps of a micro-batch. `overhead`: bytes of the framework itself.
    `late`: gradients are not there while the loss is computed: a JAX step of one micro-batch.
    `stack`: a row of `SOFTWARE`. `feedback`: bytes per element of the error that compressed
    gradients keep, of the whole local gradient.
    """
    stages, software = stages_of(model.layers, parallel.pp), SOFTWARE[stack]
    tokens = micro * seq / parallel.cp
    shards = _shards(parallel)
    layer = local_parameters(leaves, model, StageSize(1, False, False), 2).all
    found = []
    for at in sorted({0, parallel.pp // 2, parallel.pp - 1}):
        stage = stages[at]
        n = local_parameters(leaves, model, stage, parallel.pp)

        def spread(nbytes: float, stage_of_zero: int, n=n) -> float:
            split = parallel.zero >= stage_of_zero
            dense = n.dense / (shards["dense"] if split else 1)
            return nbytes * (dense + n.expert / (shards["expert"] if split else 1))

        parts = {
            "parameters": spread(states.parameter, 3) if states.parameter
            else spread(states.master, 3),
            "master parameters": trained * spread(states.master, 1) if states.parameter else 0.0,
            "gradients": trained * spread(states.gradient, 2),
            "gradients in 16 bits": trained * spread(states.beside, 2),
            "optimizer": trained * spread(states.optimizer, 1),
            "gradients in f32": trained * spread(states.copied, 1),
        }  # fmt: skip
        if parallel.dp * parallel.cp > 1:
            parts["error feedback"] = trained * feedback * n.all
        if parallel.zero == 3 and max(shards.values()) > 1:
            parts["gathered layers"] = 2 * 2.0 * layer
        if software.bucket and parallel.dp * parallel.cp > 1:
            table = max((x.local for x in leaves if x.where == EMBED), default=0)
            bucket = max(software.bucket, table if stage.first or stage.last else 0)
            parts["reduction bucket"] = trained * states.gradient * min(bucket, n.all)
        held = in_flight(parallel.schedule, at, parallel.pp, micro_batches, parallel.chunks)
        parts["activations"] = saved * stage.layers * held
        if stage.first:
            kept = 1.0 if dropout else 0.0  # the mask of the embedding, and what its norm reads
            kept += 2.0 if model.embed_norm and stack != "jax" else 0.0
            parts["activations"] += kept * tokens * model.hidden * held
        if recompute == "full":
            parts["recomputed layer"] = saved_per_layer(
                model, micro, seq, parallel, "none", attention, dropout
            )
        if stage.last:
            logits = tokens * model.vocab / parallel.tp * software.logits
            gone = parts["gradients"] if late else parts.get("recomputed layer", 0.0)
            parts["logits"] = max(0.0, logits - gone)
        parts["fragments"] = software.fragments * sum(parts.values())
        parts["framework"] = overhead
        found.append({name: nbytes for name, nbytes in parts.items() if nbytes})
    return found


def _shards(p: ParallelConfig) -> dict[str, int]:
    return {"dense": max(1, p.shards), "expert": max(1, p.shards // p.ep)}


def kv_cache_bytes(model: ModelConfig, batch: int, context: int, nbytes: float = 2.0) -> float:
    """Keys and values of all tokens, on all devices: 2 * bytes * L * K * H * T * b."""
    return 2 * nbytes * model.layers * model.kv_width * context * batch
