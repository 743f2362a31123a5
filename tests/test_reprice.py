"""A step that makes things again costs, traced anew, what the search said it would."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import pytest
from test_recompute import CLUSTER, again_of, cheapest, language_model, model_of

import jaxscaler as js
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import candidate_meshes
from jaxscaler.cost.memory import live_buffers, rules_for
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.labels import factor_labels
from jaxscaler.space.build import build_space
from jaxscaler.space.problem import model
from jaxscaler.space.recompute import changes_of
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import trace
from models import gpt, llama, moe, resnet, swin, t5, unet, vit, workload

LARGE = {  # where work, not the start of kernels, is what takes time
    "gpt": partial(language_model, gpt, "small", batch=32, layers=3, vocab=1024),
    "llama-scan": partial(
        language_model, llama, "8b", batch=8, seq=1024, layers=6, vocab=1024, hidden=1024, heads=8,
        ffn=4096, scan=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_price_of_the_changed_step_is_what_was_searched(name):
    w, step = LARGE[name]()
    traced = trace(step, w.state, w.batch)
    plain = model_of(traced)
    mesh = candidate_meshes(CLUSTER)[0]
    segments = segmentations(plain.graph, plain.folded)[0]
    _, space, what = again_of(traced, segments)
    _, free, _ = cheapest(space, mesh, None)
    limit = int(0.8 * free.peak_usage) + space.fixed_bytes
    priced, solution, cost = cheapest(space, mesh, limit)
    changes = changes_of(what, priced, solution.choice)
    assert changes
    _, again, priced_again = cheapest(model_of(traced.changed(changes)), mesh, limit)
    assert priced_again == pytest.approx(cost, rel=0.02)
    assert again.peak_usage <= solution.peak_usage * 1.02


SMALL = {
    "resnet": lambda: resnet.workload(batch=64),
    "vit": lambda: vit.workload(batch=64, layers=3),
    "gpt": lambda: gpt.workload(batch=64, layers=4),
    "llama-scan": lambda: llama.workload(batch=64, layers=4, scan=True),
    "swin": lambda: swin.workload(batch=64),
    "moe": lambda: moe.workload(batch=64, layers=3),
    "unet": lambda: unet.workload(batch=64),
    "t5": lambda: t5.workload(batch=64),
}
QUICK = ("resnet", "llama-scan")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SMALL]
)
def test_price_of_the_changed_step_is_what_was_searched_where_kernels_are_small(name, monkeypatch):
    """On one device, so that the start of kernels is what takes time; by every segmentation."""
    tools = vars(jax) | {"value_and_grad": js.value_and_grad}
    monkeypatch.setattr(workload, "jax", SimpleNamespace(**tools))
    w = SMALL[name]()
    traced = trace(w.step, w.state, w.batch)
    plain = model_of(traced)
    mesh = candidate_meshes(Cluster.parse("h100:1"))[0]
    met = 0
    for segments in segmentations(plain.graph, plain.folded):
        _, space, what = again_of(traced, segments)
        _, free, _ = cheapest(space, mesh, None)
        for share in (0.9, 0.75):
            limit = int(share * free.peak_usage) + space.fixed_bytes
            priced, solution, cost = cheapest(space, mesh, limit)
            if cost is None:
                continue
            changes = changes_of(what, priced, solution.choice)
            met += bool(changes)
            _, _, again = cheapest(model_of(traced.changed(changes)), mesh, None)
            assert again == pytest.approx(cost, rel=0.02)
    assert met


def test_what_clusters_take_does_not_depend_on_folding():
    """Merged layers, as layers apart: on one device a step costs the same to the last kernel."""
    w = SMALL["swin"]()
    graph = build(trace(w.step, w.state, w.batch))
    mesh = candidate_meshes(Cluster.parse("h100:1"))[0]
    costs = []
    for merge in (True, False):
        folded = fold(graph, merge)
        space = build_space(graph, folded, factor_labels(graph, folded))
        lives = live_buffers(graph, folded, rules_for(CLUSTER.device.vendor))
        costs.append(cheapest(model(graph, folded, space, lives), mesh, None)[2])
    assert costs[0] == pytest.approx(costs[1], rel=1e-6)
