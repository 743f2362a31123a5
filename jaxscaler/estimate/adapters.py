"""Low-rank adapters (LoRA): what they add to a frozen model, and what the model is spared.

Hu et al. 2021: a frozen [n, m] matrix W is read as W + B A, with A [r, m] and B [n, r] trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxscaler.cost import compute
from jaxscaler.estimate.body import AGAIN, LAYER, MATMUL, Body, Part
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.graph.ir import BACKWARD, FORWARD

if TYPE_CHECKING:
    from jaxscaler.estimate.step import Job


def adapted(model: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrices of a layer that have an adapter: all with weights."""
    h, f = model.hidden, model.ffn
    attention = [(h, model.query_width), (h, model.kv_width), (h, model.kv_width)]
    mlp = [(h, f)] * (model.matrices - 1) + [(f, h)]
    attention.append((model.query_width, h))
    return attention * model.attentions + mlp * (model.mlps * max(1, model.experts))


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """r (n + m) of each matrix, in all layers."""
    return model.layers * rank * sum(n + m for n, m in adapted(model))


def with_adapters(body: Body, job: Job) -> Body:
    """No gradients of frozen weights, half of the products of a backward pass, and two thin
    products beside each frozen one, whose time is that of reading and writing activations.
    """
    device, p = job.cluster.device, job.parallel
    parts = []
    for part in body.parts:
        if part.phase == BACKWARD and part.kind == MATMUL:
            halves = ("seconds", "flops", "nbytes", "runs", "tail")
            part = part._replace(**{name: getattr(part, name) / 2 for name in halves})
        parts.append(part)
    tokens = job.micro * job.seq / p.cp
    dtype = "bfloat16" if job.dtype == "float8" else job.dtype
    none = np.ones((1, 0), np.int64)
    seconds = work = moved = 0.0
    chosen = job.model.chosen or 1
    used = adapted(job.model)
    if job.model.experts:  # a token meets the chosen ones
        used = used[:4] + used[4 : 4 + job.model.matrices] * chosen
    for n, m in used:
        for a, b in ((n, job.lora), (job.lora, m)):
            flops = 2 * tokens * a * b / p.tp
            nbytes = 2 * tokens * (a + b) / p.tp
            one = compute.Work(flops, dtype, ((0, nbytes),), (), 1, False)
            seconds += float(compute.seconds(one, none, {0: np.ones(1)}, device)[0])
            work, moved = work + flops, moved + nbytes
    count = 2 * len(used)
    phases = [(FORWARD, 1), (BACKWARD, 2)]
    if any(part.phase == AGAIN and part.kind == MATMUL for part in body.parts):
        phases.append((AGAIN, 1))
    parts += [
        Part(LAYER, phase, MATMUL, n * seconds, n * work, n * moved, n * count)
        for phase, n in phases
    ]
    return replace(body, parts=tuple(parts))
