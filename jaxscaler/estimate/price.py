"""The price of a training step of a model that is spread in a given way over a cluster.

What one micro-batch takes on the devices that share it is the planner's price of the traced model
(`body.py`); around it stands the algebra of a step (`step.py`). Constants of stacks and devices are
data (`constants.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.devices import Device
from jaxscaler.errors import ConfigError
from jaxscaler.estimate import flops
from jaxscaler.estimate.adapters import adapter_parameters
from jaxscaler.estimate.body import ATTENTION, RECOMPUTE
from jaxscaler.estimate.compression import compression_of
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants, constants_for
from jaxscaler.estimate.memory import (
    BYTES,
    OPTIMIZERS,
    States,
    overhead_bytes,
    saved_per_layer,
    stage_memories,
    states_of,
)
from jaxscaler.estimate.parallel import ParallelConfig, check
from jaxscaler.estimate.step import Job, Step


@dataclass(frozen=True)
class Priced:
    """What a step takes.

    seconds: of the step. parts: the same by what it is spent on ("matmul", "attention", "vector",
    "launch", "tp", "cp", "ep", "dp", "pp", "update", "bubble", "compress"); they sum up to it,
    communication by what of it is exposed. hidden: seconds of data-parallel communication that run
    beside compute. memory: bytes by component on the fullest device. model_flops: of a step on all
    devices, without what is computed again, attention counted in full (as `flops.training` says);
    hardware_flops: what the devices work, that included. mfu, hfu: those over the devices' peak.
    shared: seconds of communication between replicas by level ("fabric", "network"), before
    constants are applied and any is hidden. ends: bytes on a device of the first and of the last
    pipeline stage.
    """

    model: ModelConfig
    parallel: ParallelConfig
    cluster: str
    batch: int
    seq: int
    micro_batch: int
    micro_batches: int
    recompute: str
    dtype: str
    seconds: float
    parts: Mapping[str, float]
    hidden: float
    memory: Mapping[str, float]
    memory_limit: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    constants: Constants
    shared: Mapping[str, float]
    ends: tuple[float, float]

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.seq / self.seconds

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_limit

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per device."""
        return self.model_flops / self.seconds / self.parallel.devices / 1e12


def dtype_for(device: Device) -> str:
    """What a device trains in unless told: bf16, or f16 where it has no bf16."""
    rates = dict(device.peak_flops)
    return "bfloat16" if "bf16" in rates else "float16" if "f16" in rates else "float32"


def attention_for(model: ModelConfig, given: str | None, recompute: str = "none") -> str:
    """How attention is computed: as given, or by a kernel where the model has one."""
    if model.family == "t5" and (given == "flash" or recompute == "selective"):
        raise ConfigError(
            f"{model.name}: attention={given!r}, recompute={recompute!r}: biases of positions are "
            "added to its scores, so they are unfused and kept, or recomputed with their layer"
        )
    return given or ("unfused" if model.family == "t5" else "flash")


def trained_states(
    model: ModelConfig, states: States, dtype: str, lora: int, base: str
) -> tuple[States, float]:
    """(bytes per parameter, share of the parameters that are trained) with adapters of rank `lora`
    beside a model that is stored in `base`; states as they are without."""
    if not lora:
        return states, 1.0
    trained = adapter_parameters(model, lora) / model.parameters
    frozen = BYTES[base or ("bfloat16" if dtype == "float8" else dtype)]
    learned = states.parameter or states.master  # of an adapter
    return replace(states, parameter=frozen + trained * learned), trained


def price(
    model: ModelConfig,
    parallel: ParallelConfig,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    micro_batch: int = 1,
    recompute: str = "none",
    dtype: str | None = None,
    attention: str | None = None,
    stack: str = "jax",
    optimizer: str = "adam",
    master: bool = True,
    gradient: str = "float32",
    dropout: bool = False,
    lora: int = 0,
    base: str = "",
    compress: str = "",
    constants: Constants | None = None,
    memory: float = 1.0,
) -> Priced:
    """Price a training step; see `Priced`.

    batch: samples of a step on all devices, `seq` tokens each; micro_batch: samples that a replica
    takes at a time, batch / (dp * micro_batch) times. recompute: "none", "selective" (scores of
    attention) or "full" (whole layers; under PyTorch the whole forward pass, under "jax" what the
    backward pass reads of it). dtype: of products ("float8" speeds up those with weights alone).
    attention: "flash" (unless given; T5 has no kernel) or "unfused". stack: "jax", "pytorch",
    "megatron", "megatron-deepspeed" or "deepspeed": what is kept, and whose constants hold.
    gradient: dtype that gradients are summed up and reduced in. master, optimizer, dropout: see
    memory.py. lora: rank of adapters on all matrices of a frozen model, which is stored in `base`
    ("int8", "int4", …; that of products unless given). compress: gradients are reduced in "bf16",
    or in "int8" with error feedback. constants: instead of those of `efficiency.csv`. memory: the
    share of the device's that may be filled.

    Raises ConfigError, naming the fields, for what does not divide.
    """
    attention = attention_for(model, attention, recompute)
    for name, value, known in (("recompute", recompute, RECOMPUTE),
                               ("attention", attention, ATTENTION)):  # fmt: skip
        if value not in known:
            raise ConfigError(f"{name}={value!r}: one of {', '.join(known)}")
    count = check(model, parallel, cluster.num_devices, batch, seq, micro_batch)
    device = cluster.device
    dtype = dtype or dtype_for(device)
    if not isinstance(lora, int) or lora < 0 or (base and base not in BYTES):
        raise ConfigError(f"lora={lora!r}, base={base!r}: a rank, 0 or more, and a known dtype")
    if base and not lora:
        raise ConfigError(f"base={base!r} needs lora: what is trained is kept in {dtype}")
    states, trained = trained_states(
        model, states_of(optimizer, dtype, master, gradient, stack), dtype, lora, base
    )
    constants = constants or constants_for(device, stack)
    job = Job(
        model, parallel, cluster, micro_batch, seq, recompute, dtype, attention, stack, lora=lora
    )
    body = job.body()
    narrow = compression_of(compress, gradient)
    step = Step(job, body, constants, count, BYTES[gradient], OPTIMIZERS[optimizer].traffic,
                trained, narrow)  # fmt: skip
    parts, hidden, shared = step.parts()
    seconds = sum(parts.values())
    saved = body.saved
    if stack != "jax":
        saved = saved_per_layer(model, micro_batch, seq, parallel, recompute, attention, dropout)
    stages = stage_memories(
        model, body.leaves, saved, parallel, states, micro=micro_batch, seq=seq,
        micro_batches=count, recompute=recompute, attention=attention, dropout=dropout,
        overhead=overhead_bytes(constants.memory_gb, stack, device.name), trained=trained,
        late=stack == "jax" and count == 1, stack=stack, feedback=narrow.kept if narrow else 0.0,
    )  # fmt: skip
    totals = [sum(stage.values()) for stage in stages]
    work = flops.training(model, batch, seq)
    if lora:
        work = flops.fine_tuning(model, batch, seq, adapter_parameters(model, lora))
    peak = device.flops(dtype) * cluster.num_devices
    hardware = work.total + flops.again(model, batch, seq, recompute)
    return Priced(
        model, parallel, cluster.name, batch, seq, micro_batch, count, recompute, dtype, seconds,
        parts, hidden, stages[totals.index(max(totals))], memory * device.hbm_bytes, work.total,
        hardware, work.total / seconds / peak, hardware / seconds / peak, constants, shared,
        (totals[0], totals[-1]),
    )  # fmt: skip
