"""The price of serving a model: the prompt (prefill), then a token at a time (decode)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cost.collective import collective_time
from jaxscaler.cost.compute import MEMORY_EFFICIENCY
from jaxscaler.errors import ConfigError
from jaxscaler.estimate.body import EMBED, HEAD, LAYER, Leaf
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants, constants_for
from jaxscaler.estimate.memory import (
    BYTES,
    StageSize,
    kv_cache_bytes,
    leaves_of,
    local_parameters,
    overhead_bytes,
    stages_of,
)
from jaxscaler.estimate.parallel import ParallelConfig, check, level_of
from jaxscaler.estimate.price import dtype_for
from jaxscaler.estimate.step import Job, Step

WEIGHTS = ("", "int8", "int4", "float8")  # dtypes of stored weights; empty: that of products


@dataclass(frozen=True)
class Served:
    """What serving takes.

    prefill: seconds until the prompts of a batch are read, and the first token is there. decode:
    seconds of a token, for every sample of the batch, with the cache filled half way through the
    answer. seconds: of the whole answer. parts: of a decoded token, by what they are spent on.
    tokens_per_second: decoded, by all replicas. memory: bytes by component on a device.
    """

    model: ModelConfig
    parallel: ParallelConfig
    cluster: str
    batch: int
    prompt: int
    answer: int
    prefill: float
    decode: float
    seconds: float
    tokens_per_second: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    memory_limit: float
    constants: Constants

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_limit


def serve(
    model: ModelConfig,
    parallel: ParallelConfig,
    cluster: Cluster,
    *,
    batch: int,
    prompt: int,
    answer: int = 1,
    dtype: str | None = None,
    weights: str = "",
    cache: str = "",
    stack: str = "jax",
    constants: Constants | None = None,
    memory: float = 1.0,
) -> Served:
    """Price serving `batch` prompts at a time on each of `parallel.dp` replicas; see `Served`.

    weights, cache: dtypes in which weights and the cache of keys and values are stored, that of
    products unless given. Decoding reads the weights once, and the cache of every sample, for a
    token of each. Raises ConfigError, naming the fields, for what does not divide.
    """
    p = parallel
    for name, value in (("weights", weights), ("cache", cache)):
        if value not in WEIGHTS:
            raise ConfigError(f"{name}={value!r}: one of {', '.join(WEIGHTS[1:])}")
    if answer < 1:
        raise ConfigError(f"answer={answer!r}: a whole number, 1 or more")
    if p.cp > 1 or p.ep > 1 or p.zero:
        raise ConfigError(f"cp={p.cp}, ep={p.ep}, zero={p.zero}: serving is priced with tp, pp, dp")
    if model.family == "t5":
        raise ConfigError(f"{model.name}: family='t5': serving is priced for decoders alone")
    check(model, p, cluster.num_devices, batch * p.dp, prompt, batch)
    device = cluster.device
    dtype = dtype or dtype_for(device)
    constants = constants or constants_for(device, stack)
    one = ParallelConfig(**{**vars(p), "sp": False})
    job = Job(model, one, cluster, batch, prompt, "none", dtype, "flash", stack, False, weights)
    whole = Step(job, job.body(), constants, 1, 0.0, 0.0)
    # A token a sample fills no wave of tiles: such products are split along what they contract.
    single = Step(job, job.body(seq=1), replace(constants, wave=0.0), 1, 0.0, 0.0)
    prefill = _through(whole, model.layers, LAYER) + _through(single, 1, EMBED, HEAD)
    parts = _spent(single, model.layers, LAYER, EMBED, HEAD)
    seen = prompt + answer / 2
    stored = BYTES[cache or dtype]
    kv = kv_cache_bytes(model, batch, 1, stored) / min(p.tp, model.kv_heads)
    rate = device.hbm_bandwidth * MEMORY_EFFICIENCY * constants.attention
    parts["cache"] = kv * seen / rate
    if p.pp > 1:
        for tokens, name in ((1, "pp"), (prompt, "")):
            nbytes = batch * tokens * model.hidden * BYTES[dtype]
            hop = float(collective_time("collective_permute", single.pp_axis, nbytes))
            if name:
                parts[name] = (p.pp - 1) * hop
            else:
                prefill += (p.pp - 1) * hop
    decode = sum(parts.values())
    used = serving_memory(
        model, p, batch, prompt + answer, prompt, BYTES[weights or dtype], stored, BYTES[dtype],
        overhead_bytes(constants.memory_gb, stack, device.name), whole.body.leaves,
    )  # fmt: skip
    return Served(
        model, p, cluster.name, batch, prompt, answer, prefill, decode,
        prefill + (answer - 1) * decode, p.dp * batch / decode, parts, used,
        memory * device.hbm_bytes, constants,
    )  # fmt: skip


def serving_memory(
    model: ModelConfig,
    p: ParallelConfig,
    batch: int,
    context: int,
    prompt: int,
    weights: float,
    cache: float,
    activations: float,
    overhead: float,
    leaves: Sequence[Leaf] | None = None,
) -> dict[str, float]:
    """Bytes by component on the fullest device of a replica that serves `batch` samples at a time,
    of `context` tokens in the end; weights, cache, activations: bytes of a number of each."""
    leaves = leaves_of(model, p.tp, p.ep) if leaves is None else leaves

    def held(stage: StageSize) -> int:
        return local_parameters(leaves, model, stage, p.pp).all

    stage = max(stages_of(model.layers, p.pp), key=held)
    kv = kv_cache_bytes(model, batch, context, cache) / min(p.tp, model.kv_heads)
    used = {
        "parameters": held(stage) * weights,
        "KV cache": kv * stage.layers / model.layers,
        "activations": _widest(model, batch * prompt, p.tp) * activations,
        "framework": overhead,
    }
    return {name: nbytes for name, nbytes in used.items() if nbytes}


def score(
    model: ModelConfig,
    parallel: ParallelConfig,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    micro_batch: int = 1,
    dtype: str | None = None,
    stack: str = "jax",
    constants: Constants | None = None,
) -> float:
    """Seconds of a forward pass over `batch` samples of `seq` tokens, the head at every token, as a
    reference, reward or value model runs it in a training step's way.

    Micro-batches follow each other through the stages of a pipeline; with ZeRO-3 layers are
    gathered for each of them, beside what is computed as far as the constants say.
    """
    p = replace(parallel, ep=1)
    count = check(model, p, cluster.num_devices, batch, seq, micro_batch)
    device = cluster.device
    dtype = dtype or dtype_for(device)
    constants = constants or constants_for(device, stack)
    job = Job(model, p, cluster, micro_batch, seq, "none", dtype, "flash", stack, False)
    step = Step(job, job.body(), constants, 1, 0.0, 0.0)
    once = _through(step, model.layers, LAYER) + _through(step, 1, EMBED, HEAD)
    seconds = (count + p.pp - 1) * once / p.pp
    shard = job.axes(replica=p.dp * p.cp // p.shards, shard=p.shards)["shard"]
    if p.zero < 3 or shard.size == 1:
        return seconds
    nbytes = model.parameters / (p.tp * p.pp) * BYTES[dtype] / model.layers
    gathered = count * model.layers * float(collective_time("all_gather", shard, nbytes))
    gathered /= step.speed[level_of(shard)]
    hidden = constants.hidden
    return seconds + max((1 - hidden) * gathered, gathered - hidden * seconds)


def _spent(step: Step, layers: int, *where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in step.body.parts:
        if part.where in where:
            times = layers if part.where == LAYER else 1
            for what, seconds in step.tuned(part).items():
                found[what] = found.get(what, 0.0) + times * seconds
    return found


def _through(step: Step, layers: int, *where: str) -> float:
    return sum(_spent(step, layers, *where).values())


def _widest(model: ModelConfig, tokens: int, tp: int) -> float:
    """Numbers that are live at once while a prompt is read: a layer's input and widest inside."""
    mlp = (model.matrices - 1) * model.ffn * (model.chosen or 1)
    attention = model.query_width + 2 * model.kv_width
    return tokens * (2 * model.hidden + max(mlp, attention) / tp)
