"""Which ways look promising before they are priced: seconds of a step, very roughly.

It prices nothing: the search prices what comes first here, and this only says where to begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cost.pipeline import bubble
from jaxscaler.estimate import flops
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.options import SEARCHED, Options
from jaxscaler.estimate.parallel import ParallelConfig
from jaxscaler.estimate.price import dtype_for

PASSES = 12  # through memory of rows that go to experts and come back, both ways
CHUNKS = (2, 3, 4, 6, 8)  # of an interleaved stage


def schedules_for(
    layers: int, pp: int, micro_batches: int, names: Sequence[str] = SEARCHED
) -> Iterator[tuple[str, int]]:
    """(schedule, chunks) of a pipeline, those other than 1F1B that divide it.

    Interleaving takes rounds of `pp` micro-batches and equal chunks (Narayanan et al. 2021, section
    2.2); zero-bubble-2 has a closed form from 2 pp - 1 micro-batches on.
    """
    if pp == 1:
        return
    if "interleaved" in names and micro_batches % pp == 0:
        yield from (("interleaved", v) for v in CHUNKS if layers % (pp * v) == 0)
    if "zero-bubble" in names:
        yield "zero-bubble", 1
    if "zero-bubble-2" in names and micro_batches >= 2 * pp - 1:
        yield "zero-bubble-2", 1


def rough_seconds(
    model: ModelConfig, cluster: Cluster, p: ParallelConfig, micro: int, recompute: str,
    options: Options,
) -> float:  # fmt: skip
    """Work, the bubble, uneven stages, traffic of tp, of ep and cp, and of replicas.

    What replicas exchange is reduced inside a node first, so that as many ports share it.
    """
    device, n = cluster.device, cluster.num_devices
    work = flops.training(model, options.batch, options.seq).total
    work *= 4 / 3 if recompute == "full" else 1.0
    rate = device.flops(options.dtype or dtype_for(device)) * device.achievable
    fabric, network = cluster.levels[-1].link.bandwidth, cluster.levels[0].link.bandwidth
    node = math.prod(level.size for level in cluster.levels if level.link.kind != "network")

    def link(near: int, size: int) -> float:
        """Bytes/s of a device among `size`, each `near` devices from the next."""
        inside = max(1, node // near)
        return fabric if size <= inside else min(fabric, network * inside)

    m = options.batch // (p.dp * micro)
    tokens = options.batch * options.seq / (p.dp * p.cp)
    layers = model.layers / p.pp
    again = 1.5 if recompute == "full" else 1.0
    activations = 2 * tokens * layers  # bytes of a number per token and layer of a stage
    traffic = again * 4 * 2 * activations * model.hidden * (1 - 1 / p.tp) / fabric
    if p.ep > 1:
        rows = activations * model.hidden * model.chosen * 4 * again
        traffic += rows * (1 - 1 / p.ep) / link(p.tp, p.ep)
    if p.cp > 1:
        wide = 3 * 2 * model.kv_width / p.tp
        if model.experts:  # rows are chosen from whole sequences
            wide += 4 * again * model.chosen * model.hidden
            rows = activations * p.cp * model.chosen * model.hidden
            traffic += PASSES * rows / device.hbm_bandwidth
        traffic += wide * activations * p.cp / link(p.tp, p.cp)
    size = model.parameters / (p.tp * p.pp)
    moved = (2 + 4 + (4 * m if p.zero == 3 else 0)) * size * (1 - 1 / (p.dp * p.cp))
    replicas = 0.5 * moved / link(p.tp, p.dp * p.cp)
    small = 1 + 0.1 / micro  # few tokens at a time make small kernels
    idle = _least_bubble(model.layers, p.pp, m, options.schedules) if p.pp > 1 else 0.0
    busy = work * _unevenness(model, p.pp) / (n * rate) * small + traffic
    return busy / (1 - idle) + replicas


@lru_cache(maxsize=4096)
def _unevenness(model: ModelConfig, pp: int) -> float:
    """What the slowest stage of a pipeline does over the mean; the head counts as so many layers
    as it has parameters of one that a token meets."""
    idle = (model.experts - model.chosen) * model.mlp_parameters if model.experts else 0
    head = model.hidden * model.vocab / (model.layer_parameters - idle)
    most = max(-(-model.layers // pp), model.layers // pp + head)
    return most * pp / (model.layers + head)


@lru_cache(maxsize=4096)
def _least_bubble(layers: int, pp: int, micro_batches: int, names: tuple[str, ...]) -> float:
    """Share of a step that the best schedule idles, where F, B and W take as long."""
    found = [bubble("1f1b", pp, micro_batches)]
    for name, chunks in schedules_for(layers, pp, micro_batches, names):
        split = (1.0, 1.0, 1.0) if name.startswith("zero-bubble") else (1.0, 2.0, 0.0)
        found.append(bubble(name, pp, micro_batches, chunks, *split))
    return min(found)
