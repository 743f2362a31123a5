"""Where each number of an estimate is from: formula, values, source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxscaler.estimate import flops
from jaxscaler.estimate.memory import OPTIMIZERS, SOFTWARE, states_of
from jaxscaler.estimate.price import Priced

if TYPE_CHECKING:
    from jaxscaler.estimate.estimate import Estimate

BOOK = "Scaling book, Transformer math"
KORTHIKANTI = "Korthikanti et al. 2022, table 2"
ZERO = "Rajbhandari et al. 2020 (ZeRO), section 3"
COMPRESSION = "estimate/compression.py: Tang et al. 2021, Wang et al. 2023"
PLANNER = "the planner: cost/compute.py, cost/collective.py"


@dataclass(frozen=True)
class Line:
    """A number with its unit, the formula, the values in it, and where the formula is from."""

    name: str
    value: float
    unit: str
    formula: str
    values: str
    source: str


def lines(estimate: Estimate) -> list[Line]:
    """All numbers of an estimate, in the order in which they follow from each other."""
    m, best = estimate.model, estimate.best
    found = [
        Line("parameters", m.parameters, "", "L (attention + MLP + norms) + tables",
             f"L={m.layers}, h={m.hidden}, heads={m.heads} of {m.head_size}, kv_heads={m.kv_heads},"
             f" ffn={m.ffn} x {m.matrices}, V={m.vocab}, tied={m.tied}, experts={m.experts}",
             "the traced model's own leaves"),
        Line("tokens", estimate.tokens, "", "given, or 20 P", f"P={m.parameters:.4g}",
             "Hoffmann et al. 2022, table 3"),
        Line("C, rule of thumb", 6 * m.active_parameters * estimate.tokens, "FLOPs", "6 P D",
             f"P={m.active_parameters:.4g} active, D={estimate.tokens:.4g}",
             "EleutherAI, Transformer Math 101"),
        *_work(estimate),
        *_memory(estimate),
        *_step(best),
    ]  # fmt: skip
    run, n = estimate.chosen, best.parallel.devices
    good = run.goodput
    found += [
        Line("failures", good.mtbf / 3600, "hours between them", "MTBF of a device / n",
             f"n={n}", "Llama 3: 419 in 54 days on 16,384 GPUs, unless given"),
        Line("checkpoint interval", good.interval, "s",
             "sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d",
             f"d={good.write:.3g} s to write, M={good.mtbf:.4g} s", "Daly 2006, equation 37"),
        Line("goodput", good.share, "of the time", "T / (T + d) (1 - ((T + d) / 2 + R) / M)",
             f"T={good.interval:.4g}, d={good.write:.3g}, M={good.mtbf:.4g}", "Young 1974"),
        Line("days", run.days, "days", "D / (tokens per second) / goodput",
             f"D={estimate.tokens:.4g}, {best.tokens_per_second:.5g} tokens/s",
             "the price of a step"),
    ]  # fmt: skip
    if run.cost is not None:
        found.append(
            Line("cost", run.cost, "", "n * days * 24 * price per device-hour",
                 f"n={n}, price={estimate.price_per_hour:g}", "price as given")
        )  # fmt: skip
    narrowed = estimate.compression
    for name, x in narrowed.narrowed.items() if narrowed else ():
        found.append(
            Line(f"step with gradients in {name}", x.seconds, "s",
                 "narrower reductions as far as they are exposed, and what narrows them",
                 f"exposed {x.parts.get('dp', 0.0):.4g} of {best.parts.get('dp', 0.0):.4g} s, "
                 f"quantising {x.parts.get('compress', 0.0):.4g} s", COMPRESSION)
        )  # fmt: skip
    floor, expected, _ = estimate.tflops
    found += [
        Line("TFLOP/s per device", expected, "model TFLOP/s", "C of a step / seconds / n",
             f"C={best.model_flops:.4g}, {best.seconds:.4g} s, n={n}", "the price of a step"),
        Line("floor", floor, "model TFLOP/s", "0.85 * expected",
             f"expected={expected:.4g}", "the error that step times are held to: below it "
             "something is wrong"),
    ]  # fmt: skip
    return found


def _work(estimate: Estimate) -> list[Line]:
    m, o = estimate.model, estimate.options
    work, best = estimate.work, estimate.best
    tokens = o.batch * o.seq
    said = f"T={tokens}, h={m.hidden}, L={m.layers}"
    once = [
        ("attention weights", work.attention, "3 * 2 T h (2 q + 2 kv) L",
         f"{said}, q={m.query_width}, kv={m.kv_width}"),
        ("scores", work.scores, "3 * 4 T s q L", f"{said}, s={o.seq}, q={m.query_width}"),
        ("MLP", work.mlp, "3 * 2 T n h f k L",
         f"{said}, n={m.matrices}, f={m.ffn}, k={m.chosen or 1}"),
        ("router", work.router, "3 * 2 T h E L", f"{said}, E={m.experts}"),
        ("head", work.head, "3 * 2 T h V", f"{said}, V={m.vocab}"),
    ]  # fmt: skip
    found = [
        Line(f"FLOPs of a step: {name}", value, "FLOPs", formula, values, BOOK)
        for name, value, formula, values in once
        if value
    ]
    causal = flops.training(m, o.batch, o.seq, causal=True).total
    return [
        *found,
        Line("FLOPs of a step", work.total, "FLOPs", "their sum: full attention, nothing again",
             said, "Narayanan et al. 2021, without recomputation"),
        Line("FLOPs of a step, causal", causal, "FLOPs", "scores counted in half", said,
             "Megatron-Bridge from 26.02, MaxText since July 2025"),
        Line("FLOPs of a step, hardware", best.hardware_flops, "FLOPs",
             "with what recomputation runs again", f"recompute={best.recompute}",
             "Korthikanti et al. 2022"),
        Line("MFU", best.mfu, "", "FLOPs of a step / (seconds * n * peak)",
             f"{best.seconds:.4g} s, n={best.parallel.devices}", "Chowdhery et al. 2022"),
        Line("HFU", best.hfu, "", "the same of hardware FLOPs", "", "Chowdhery et al. 2022"),
    ]  # fmt: skip


def _memory(estimate: Estimate) -> list[Line]:
    o, best, m = estimate.options, estimate.best, estimate.model
    p = best.parallel
    states = states_of(o.optimizer, best.dtype, o.master, o.gradient, o.stack)
    software = SOFTWARE[o.stack]
    shared = f"zero={p.zero}, among {p.shards}"
    local = f"P / (tp pp) local, tp={p.tp}, pp={p.pp}"
    how = {
        "parameters": (f"{states.parameter or states.master:g} B each", f"{local}; {shared}", ZERO),
        "master parameters": (f"{states.master:g} B each", f"{local}; {shared}", ZERO),
        "gradients": (f"{states.gradient:g} B each", f"{local}; {shared}", ZERO),
        "optimizer": (f"{states.optimizer:g} B each", f"{o.optimizer}; {shared}",
                      f"memory.OPTIMIZERS: {OPTIMIZERS[o.optimizer].state:g} B"),
        "gradients in f32": (f"{states.copied:g} B each", "while the update runs",
                             "Megatron-LM, DeepSpeed: 16-bit gradients are copied"),
        "gradients in 16 bits": (f"{states.beside:g} B each", f"{local}; {shared}",
                                 "memory.SOFTWARE: they stay beside their f32 sums"),
        "reduction bucket": (f"{states.gradient:g} B * {software.bucket:g} elements",
                             "or a whole table, or all there are", "memory.SOFTWARE"),
        "error feedback": ("4 B each", f"{local}; whole on every device", COMPRESSION),
        "gathered layers": ("2 layers in 2 B", local, "PyTorch FSDP: one is prefetched"),
        "activations": ("kept of a layer * layers of a stage * micro-batches in flight",
                        f"b={best.micro_batch}, s={o.seq}, h={m.hidden}, recompute="
                        f"{best.recompute}, {p.schedule}, m={best.micro_batches}",
                        KORTHIKANTI if o.stack != "jax" else "what the traced step keeps"),
        "recomputed layer": ("one layer without recomputation", f"b={best.micro_batch}, s={o.seq}",
                             KORTHIKANTI),
        "logits": (f"{software.logits:g} B * b s V / tp beyond the recomputed layer",
                   f"b={best.micro_batch}, s={o.seq}, V={m.vocab}, tp={p.tp}",
                   "copies in 16 and 32 bits: memory.SOFTWARE"),
        "fragments": (f"{software.fragments:.1%} of what is allocated", o.stack,
                      "memory.SOFTWARE"),
        "framework": ("constant of the stack", o.stack, best.constants.source),
    }  # fmt: skip
    return [
        Line(f"memory: {name}", value / 1e9, "GB", *how[name])
        for name, value in best.memory.items()
    ] + [
        Line("memory", best.memory_bytes / 1e9, "GB", "their sum, on the fullest device",
             f"limit {best.memory_limit / 1e9:.4g} GB", "")
    ]  # fmt: skip


def _step(best: Priced) -> list[Line]:
    p = best.parallel
    how = {
        "matmul": ("max(FLOPs / rate, bytes / bandwidth) of products with weights", PLANNER),
        "attention": ("the same of scores and what they weigh", PLANNER),
        "vector": ("bytes / bandwidth of everything else", PLANNER),
        "launch": ("kernels * start", PLANNER),
        "tp": ("collectives of tensor parallelism, all exposed", PLANNER),
        "cp": ("collectives of context parallelism, all exposed", PLANNER),
        "ep": ("all-to-alls of experts, all exposed", PLANNER),
        "pp": ("transfers between stages", PLANNER),
        "dp": ("reduction and gathering of parameters, what is not hidden", PLANNER),
        "bubble": (f"idle time of {p.schedule}", "cost/pipeline.py"),
        "update": ("bytes of state / bandwidth", PLANNER),
        "compress": ("bytes that narrowing and widening stream / bandwidth", COMPRESSION),
    }
    c = best.constants
    said = (
        f"{p}, b={best.micro_batch}, m={best.micro_batches}; of the planner's speed: "
        f"matmul {c.matmul:.3g}, attention {c.attention:.3g}, vector {c.vector:.3g}, "
        f"fabric {c.fabric:.3g}, network {c.network:.3g}, hidden {c.hidden:.3g}"
    )
    return [
        Line(f"step: {name}", value, "s", how[name][0], said if i == 0 else "", how[name][1])
        for i, (name, value) in enumerate(best.parts.items())
    ] + [Line("step", best.seconds, "s", "their sum", "", best.constants.source)]
