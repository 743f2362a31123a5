"""Orders of pipelines: bubbles beside their closed forms, searched orders beside the best family.

Stages are priced by simple arithmetic on `jaxscaler.cluster`'s device table with the planner's
roofline (`jaxscaler.cost.compute`): floating-point work of the matrix products, bytes of parameters
and activations, one message a transfer. No step is traced and no stage planned here; what is
compared is orders of the same tasks. The families compared are all that apply and fit into 92 % of
the memory.

- `closed`: simulated against the closed form of `jaxscaler.cost.pipeline`, equal stages without
  transfers.
- `search`: T5 with a vocabulary of 1M (embedding and head on all devices), AlphaFold2 with three
  recyclings, two towers (CLIP), mixed GPUs, each with whole and with split backward tasks. Strictly
  better is asked wherever the bound does not prove the family the best.
- `speed`: chains of 8 stages with transfers, of 8, 32 and 256 micro-batches.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
from _harness import at_least, at_most, main

from jaxscaler.cluster.devices import Device, find_device
from jaxscaler.cluster.links import Link
from jaxscaler.cost.compute import Work, seconds
from jaxscaler.cost.pipeline import bubble
from jaxscaler.errors import ScheduleError
from jaxscaler.schedule import Edge, Pipeline, StageWork, mirrored, search, simulate, uniform
from jaxscaler.schedule.families import FAMILIES
from jaxscaler.schedule.search import WORK, best_family

SHARE = 0.92  # of a device's memory that may be used, as the planner's default
ADAM = 16  # bytes a parameter at rest: weights, gradients in 2; master copy, moments in 4 each
SECONDS = 30.0  # for 8 stages and 32 micro-batches on 2 cores


def roofline(device: Device, flops: float, nbytes: float, dtype: str) -> float:
    """Seconds of one kernel."""
    work = Work(flops, dtype, ((0, nbytes),), (), 1, True)
    return float(seconds(work, np.ones((1, 0)), {0: np.ones(1)}, device)[0])


def message(link: Link, nbytes: float) -> float:
    """Seconds of one transfer between two devices."""
    return link.launch + link.latency + nbytes / float(link.bandwidth * link.efficiency(nbytes))


def reduction(link: Link, nbytes: float, devices: int) -> float:
    """Seconds of an all-reduce, as a ring."""
    return message(link, 2 * (devices - 1) / devices * nbytes)


def layers(
    count: float, width: int, params: float, tokens: int, length: int, device: Device, dtype: str
) -> StageWork:
    """`count` transformer layers of `params` parameters on one device, whole backward tasks.

    tokens: of a micro-batch, in sequences of `length`. Scores are not kept (a fused attention), so
    34 bytes a token and channel are (Korthikanti et al., 2022).
    """
    flops = count * (2 * params * tokens + 4 * tokens * length * width)
    moved = count * (2 * params + 20 * tokens * width)
    forward = roofline(device, flops, moved, dtype)
    return StageWork(
        groups=(0,),
        forward=forward,
        backward=2 * forward,
        update=roofline(device, 0.0, 30 * count * params, dtype),
        kept=34 * tokens * width * count,
        static=ADAM * count * params,
    )


def split(pipeline: Pipeline) -> Pipeline:
    """Backward tasks in two halves: gradients of inputs and of weights.

    What weight gradients read is two thirds of what was kept (Qi et al., 2024, count 32 of 34 bytes
    less the norms' inputs and the scores).
    """
    stages = tuple(
        stage
        if stage.backward is None
        else replace(
            stage,
            backward=stage.backward / 2,
            weight=stage.backward / 2,
            kept_weight=stage.kept * 2 / 3,
        )
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)


def limits(*devices: Device) -> tuple[float, ...]:
    return tuple(SHARE * device.hbm_bytes for device in devices)


def t5(micro: int, vocabulary: int = 1_000_000) -> Pipeline:
    """T5 of 32 layers, 3072 wide, on 8 V100-32GB: embedding and head cut over all of them."""
    device, fabric = find_device("v100-32")
    width, length, link = 3072, 1024, fabric.intra
    sent = 2 * length * width
    everyone = tuple(range(8))
    table = vocabulary * width / 8  # parameters of a device's share
    lookup = roofline(device, 0.0, 3 * 2 * 2 * length * width, "f16")
    embed = StageWork(
        groups=everyone,
        forward=lookup + reduction(link, 2 * sent, 8),
        backward=lookup,
        update=roofline(device, 0.0, 30 * table, "f16"),
        static=ADAM * table,
        name="embed",
    )
    logits = roofline(device, 2 * table * length, 2 * table + 6 * length * vocabulary / 8, "f16")
    head = StageWork(
        groups=everyone,
        forward=logits + message(link, 8 * length),
        backward=2 * logits + reduction(link, sent, 8),
        kept=6 * length * vocabulary / 8,
        static=ADAM * table,
        update=embed.update,
        name="head",
    )
    sizes = [(5, 12), (5, 12), (6, 12), (4, 16), (3, 16), (3, 16), (3, 16), (3, 16)]
    blocks = [
        replace(
            layers(count, width, square * width**2, length, length, device, "f16"),
            groups=(g,),
            name="encoder" if square == 12 else "decoder",
        )
        for g, (count, square) in enumerate(sizes)
    ]
    hop = message(link, sent)
    both = message(link, 2 * sent)  # the decoder hands the encoder's output on
    edges = [Edge(0, 1, 0.0), Edge(0, 4, 0.0)]
    edges += [Edge(s, s + 1, hop if s < 4 else both) for s in range(1, 8)]
    edges += [Edge(8, 9, hop)]
    return Pipeline((embed, *blocks, head), micro, tuple(edges), limits(*[device] * 8))


def alphafold2(micro: int, visits: int = 4) -> Pipeline:
    """48 Evoformer blocks on 4 V100-32GB, every block recomputed, `visits` - 1 recyclings.

    512 sequences, 384 residues. The first group also has the extra MSA stack, as 4 blocks; the last
    one the structure module, as a tenth of a block's work for each of its 8 layers.
    """
    device, fabric = find_device("v100-32")
    s, r, m, z = 512, 384, 256, 128
    flops = (
        2 * 5 * 2 * s * r * m * m + 4 * s * r * r * m + 4 * s * s * r * m  # MSA rows, columns
        + 16 * s * r * m * m  # transition
        + 2 * r * r * s * 32 * 32 + 2 * r * r * 1024 * z  # outer product mean
        + 2 * (12 * r * r * z * z + 2 * r**3 * z)  # triangle updates
        + 2 * (10 * r * r * z * z + 4 * r**3 * z)  # triangle attention
        + 16 * r * r * z * z  # transition
    )  # fmt: skip
    block = roofline(device, flops, 5e9, "f16")  # about 5 GB of activations are made
    entry = 2 * (s * r * m + r * r * z)  # what goes from block to block
    counts = (12 + 4, 12, 12, 12 + 0.8)
    hop = message(fabric.intra, entry)
    stages, edges = [], []
    for visit in range(visits):
        last = visit == visits - 1
        for g, count in enumerate(counts):
            stages.append(
                StageWork(
                    groups=(g,),
                    forward=count * block,
                    backward=3 * count * block if last else None,
                    kept=entry * count if last else 0.0,
                    working=5e9,
                    static=ADAM * 1.8e6 * count if last else 0.0,
                    name=f"visit {visit}",
                )
            )
    edges = [Edge(k, k + 1, hop, entry) for k in range(len(stages) - 1)]
    return Pipeline(tuple(stages), micro, tuple(edges), limits(*[device] * 4))


def clip(micro: int, pairs: int = 96) -> Pipeline:
    """ViT-L/14 and a text tower of 12 layers on 4 A100-40GB; the last has text, loss, 3 layers."""
    device, fabric = find_device("a100-40")
    image = [
        replace(layers(n, 1024, 12 * 1024**2, pairs * 257, 257, device, "bf16"), groups=(g,))
        for g, n in enumerate((7, 7, 7, 3))
    ]
    text = layers(12, 768, 12 * 768**2, pairs * 77, 77, device, "bf16")
    loss = roofline(device, 2 * pairs * pairs * 768, 4 * pairs * pairs, "bf16")
    stages = (
        *(replace(stage, name="image") for stage in image),
        replace(text, groups=(3,), name="text"),
        StageWork((3,), loss, 2 * loss, name="loss"),
    )
    hop = message(fabric.intra, 2 * pairs * 257 * 1024)
    edges = (Edge(0, 1, hop), Edge(1, 2, hop), Edge(2, 3, hop), Edge(3, 5), Edge(4, 5))
    return Pipeline(stages, micro, edges, limits(*[device] * 4))


def mixed(micro: int) -> Pipeline:
    """Llama-7B's 32 layers on 4 A100-40GB and 4 V100-32GB, layers by speed; the last has the head.

    Each GPU is in a machine of its own, and Ethernet of 25 Gb/s between them.
    """
    fast, network = find_device("a100-40")
    ethernet = replace(network.inter, bandwidth=25e9 / 8)
    slow, _ = find_device("v100-32")
    devices = [fast] * 4 + [slow] * 4
    width, length, params = 4096, 2048, 202e6
    stages = []
    for g, (device, count) in enumerate(zip(devices, (6, 6, 6, 6, 2, 2, 2, 2))):
        dtype = "bf16" if device is fast else "f16"
        stage = layers(count, width, params, length, length, device, dtype)
        if g == 7:
            head = roofline(device, 2 * 32000 * width * length, 6 * 32000 * length, dtype)
            stage = replace(
                stage,
                forward=stage.forward + head,
                backward=(stage.backward or 0.0) + 2 * head,
                kept=stage.kept + 6 * 32000 * length,
                static=stage.static + ADAM * 32000 * width,
            )
        stages.append(replace(stage, groups=(g,)))
    hop = message(ethernet, 2 * length * width)
    edges = tuple(Edge(s, s + 1, hop) for s in range(7))
    return Pipeline(tuple(stages), micro, edges, limits(*devices))


CASES = {"t5-1m": t5, "alphafold2": alphafold2, "clip": clip, "mixed": mixed}


def chain(micro: int) -> Pipeline:
    """8 stages of 6 seconds, transfers of one, the memory of 10 micro-batches a group."""
    stages = tuple(StageWork((g,), 2.0, 4.0, kept=1.0) for g in range(8))
    return Pipeline(stages, micro, tuple(Edge(s, s + 1, 1.0) for s in range(7)), (10.0,) * 8)


def measure(quick: bool):
    yield from closed(quick)
    for name, case in CASES.items():
        for micro in (8,) if quick else (32,):
            for kind, pipeline in (("whole", case(micro)), ("split", split(case(micro)))):
                if not quick or kind == "whole":
                    yield searched("search", f"{name} {kind}", pipeline, quick)
    for micro in (8, 32) if quick else (8, 32, 256):
        yield searched("speed", "8 stages", chain(micro), quick)


def closed(quick: bool):
    """The farthest of many shapes from the closed form, by family."""
    counts = (2, 4, 6) if quick else (1, 2, 3, 4, 6, 8, 16)
    for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "chimera", "inference"):
        worst, shapes = 0.0, 0
        for p in counts:
            for micro in sorted({1, p, p + 1, 2 * p, 4 * p, 32}):
                for chunks in (2, 3) if name == "interleaved" else (1,):
                    backward = None if name == "inference" else 3.0
                    weight = 1.5 if name == "zero-bubble" else None
                    pipeline = uniform(p, micro, 2.0, backward, weight, chunks=chunks)
                    if name == "chimera":
                        pipeline = mirrored(pipeline)
                    try:
                        form = bubble(name, p, micro, chunks, 2.0, backward or 0.0, weight or 0.0)
                        found = simulate(pipeline, FAMILIES[name](pipeline)).bubble
                    except ScheduleError:  # chimera: odd stages, or no closed form
                        continue
                    worst = max(worst, *(abs(b - form) for b in found))
                    shapes += 1
        yield {"part": "closed", "case": name, "shapes": shapes, "off": worst}


def searched(part: str, case: str, pipeline: Pipeline, quick: bool) -> dict:
    best_family(pipeline)  # what is imported or compiled on first use is not the search's
    start, work = time.perf_counter(), time.process_time()
    found = search(pipeline, work=0.5 if quick else WORK)
    wall, cpu = time.perf_counter() - start, time.process_time() - work
    peak = found.timeline.peak
    return {
        "part": part,
        "case": case,
        "stages": len(pipeline.stages),
        "groups": pipeline.groups,
        "micro": pipeline.micro,
        "tasks": len(found.timeline.tasks),
        "family": found.family,
        "family s": found.family_seconds,
        "searched s": found.seconds,
        "bound s": found.bound,
        "gap": found.gap,
        "ratio": found.family_seconds and found.seconds / found.family_seconds,
        "bubble": max(found.timeline.bubble),
        "memory": max(p.bytes / limit for p, limit in zip(peak, pipeline.limits)),
        "seconds": wall,
        "cpu": cpu,
        "work": found.work,
    }


def judge(rows):
    for row in rows:
        if row["part"] == "closed":
            yield at_most(f"{row['case']}: off its closed form", row["off"], 1e-9)
            yield at_least(f"{row['case']}: shapes", row["shapes"], 1)
    runs = [row for row in rows if row["part"] != "closed"]
    for row in runs:
        name = f"{row['case']}, {row['micro']} micro-batches"
        yield at_most(f"{name}: memory", row["memory"], 1 + 1e-9)
        yield at_most(f"{name}: searched / best family", row["ratio"], 1.0)
    for row in runs:
        if row["part"] == "search" and (row["family s"] or 0.0) > row["bound s"] * (1 + 1e-9):
            yield at_most(
                f"{row['case']}, {row['micro']} micro-batches: better", row["ratio"], 1 - 1e-6
            )
    work = {row["micro"]: row["work"] for row in runs if row["part"] == "speed"}
    if 256 in work:
        yield at_most("work: 256 micro-batches / 32", work[256] / work[32], 1.0)
    for row in runs:
        if row["stages"] == 8 and row["micro"] == 32:
            yield at_most(f"{row['case']}, 8 x 32: seconds", row["seconds"], SECONDS)


if __name__ == "__main__":
    sys.exit(main("schedules", measure, lambda rows: list(judge(rows))))
