"""Activations on the host: the same numbers, the price of its link, refusals."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_recompute import CLUSTER, layers, three_layers

import jaxscaler as js
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.plan import Plan
from jaxscaler.planner import plan_step
from jaxscaler.recipes import RECIPES
from jaxscaler.trace import trace

PRODUCTS_TO_HOST = js.op_assign(js.values(role="activation", primitive="dot_general"), js.HOST)


def test_what_goes_to_the_host_comes_back_the_same():
    """On 8 devices, in float64. Devices of the CPU accept it, and keep it where it is."""
    with jax.enable_x64(True):
        step, params, x, expected = three_layers()
        planned = js.parallelize(
            step, cluster="h100:8", mesh={"d": 8}, constraints=[PRODUCTS_TO_HOST]
        )
        found = planned(params, x)
        assert any(c.host for c in planned.plan.changes)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_the_host_takes_what_its_link_costs():
    """By the line and by the multipliers: priced as searched, and the device holds less."""
    params, step = layers(4)
    traced = trace(step, params, jax.ShapeDtypeStruct((1 << 15, 256), "float32"))
    lines = [PRODUCTS_TO_HOST, *RECIPES["data_parallel"]()]
    kept = plan_step(traced, CLUSTER, constraints=lines[1:], time_limit=5).plan
    plan = plan_step(traced, CLUSTER, constraints=lines, time_limit=5).plan
    assert not [n for n in plan.notes if "were searched" in n]
    moved = [t for t in plan.traffic if t.kind == "offload"]
    spots = sum(len(c.host) for c in plan.changes)
    assert sum(t.count for t in moved) == 2 * spots > 0
    link = 2 * sum(t.nbytes * t.count for t in moved) / 2 / CLUSTER.device.host_bandwidth
    assert sum(t.seconds for t in moved) == pytest.approx(link * 0.4)
    assert plan.predicted.seconds >= kept.predicted.seconds + 0.9 * link * 0.4
    assert plan.predicted.peak_bytes < 0.9 * kept.predicted.peak_bytes
    loaded = Plan.from_dict(plan.to_dict())
    assert loaded.changes == plan.changes


def test_the_search_sends_to_the_host_what_its_link_carries_cheaply():
    """Where the link is fast, and running again is dear, a tight limit is met so."""
    params, step = layers(4)
    traced = trace(step, params, jax.ShapeDtypeStruct((1 << 15, 256), "float32"))
    device = replace(CLUSTER.device, host_bandwidth=1e13)
    cluster = replace(CLUSTER, device=device)
    lines = RECIPES["data_parallel"]()
    free = plan_step(traced, cluster, constraints=lines, time_limit=5).plan
    share = 0.75 * free.predicted.peak_bytes / device.hbm_bytes
    tight = plan_step(traced, cluster, constraints=lines, memory=share, time_limit=10).plan
    assert any(c.host for c in tight.changes)
    never = js.forbid(js.op_assign(js.values(role="activation"), js.HOST))
    again = plan_step(traced, cluster, constraints=[*lines, never], memory=share, time_limit=10)
    assert not any(c.host for c in again.plan.changes)
    assert tight.predicted.seconds < again.plan.predicted.seconds


def test_what_has_no_host_is_refused_by_line():
    params, step = layers(3)
    traced = trace(step, params, jax.ShapeDtypeStruct((1024, 256), "float32"))
    line = PRODUCTS_TO_HOST
    with pytest.raises(js.ConstraintError, match=r"HOST.*devices other than.*say NOWHERE"):
        plan_step(traced, Cluster.parse("cpu:8"), constraints=[line], time_limit=5)
    state = js.op_assign(js.values(role="optimizer"), js.HOST)
    with pytest.raises(js.ConstraintError, match="selects no activation"):
        plan_step(traced, CLUSTER, constraints=[state], time_limit=5)
    with pytest.raises(js.ConstraintError, match="value_and_grad"):
        plan_step(trace(lambda w: w * 2, jnp.zeros((8, 8))), CLUSTER, constraints=[line])
