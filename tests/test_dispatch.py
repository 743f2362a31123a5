"""What dispatching a pipeline's tasks takes: counted as the executor does it, priced, refused."""

import functools
import io
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console
from test_stages import CLIP, tower, traced_of

import jaxscaler as js
from jaxscaler.cluster import Cluster, Curve, Profile
from jaxscaler.cluster.host import ASSUMED, Host
from jaxscaler.errors import ClusterError, InfeasibleError, PlanError
from jaxscaler.grad import value_and_grad
from jaxscaler.lower import executor
from jaxscaler.pipeline import dispatch
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline
from jaxscaler.pipeline.step import PipelineStep
from jaxscaler.schedule.simulate import simulate


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def planned(cluster, **options):
    options = {"stages": 2, "micro": 4, **options}
    return plan_pipeline(traced_of("tower", tx=CLIP)[1], Cluster.parse(cluster), **options)


@pytest.mark.parametrize("order", ["1f1b", "zero-bubble", "chimera"])
def test_counted_as_the_executor_does_it(order, devices, monkeypatch):
    plan = planned("cpu:2", order=order)
    step, work, counted = PipelineStep(plan), tower(tx=CLIP), {"calls": 0, "moves": 0}
    state = step.init(work.init, jax.random.key(0))

    def counting(code):
        def run(args):
            counted["calls"] += 1
            return code.run(args)

        return code._replace(run=run)

    for copy in step.executor.copies:
        for table in (copy.tasks, copy.prepare, *copy.update):
            table.update({key: counting(code) for key, code in table.items()})
    moved, added, apart = executor.Copy.moved, executor.added, executor.apart

    def moving(*args):
        counted["moves"] += 1
        return moved(*args)

    def adding(sums, jitted):
        counted["moves"] += sum(map(len, sums))
        counted["calls"] += len(jitted)
        return added(sums, jitted)

    def taking_apart(x, shardings):  # and putting together again
        counted["calls"] += len(shardings)
        return apart(x, shardings)

    monkeypatch.setattr(executor.Copy, "moved", moving)
    monkeypatch.setattr(executor, "added", adding)
    monkeypatch.setattr(executor, "apart", taking_apart)
    monkeypatch.setattr(dispatch, "TASK", 0.0)
    step(state, work.make_batch(0))
    parts = plan.parts.staged, plan.order, plan.devices
    assert dispatch.host_seconds(*parts, Host(1.0, 0.0, 0.0)) == sum(counted.values())
    assert dispatch.host_seconds(*parts, Host(0.0, 0.0, 1.0)) == counted["moves"] > 0


def test_priced_shown_and_refused(tmp_path):
    says = r"thread dispatches 18 tasks a step, .* s each .*fewer micro-batches.*one program"
    with pytest.raises(InfeasibleError, match=says):
        planned("h100:2")
    plan = planned("h100:2", dispatch_limit=None)
    before = simulate(plan.pipeline, plan.order).seconds
    assert plan.seconds >= max(before, 16 * plan.dispatch) > 1.03 * before
    console = Console(record=True, width=100, file=io.StringIO())
    plan.show(console)
    assert "18 tasks" in console.export_text()
    plan.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json").seconds == plan.seconds
    assert any("18 tasks" in note for note in planned("cpu:2").notes)  # whose times mean nothing


def test_a_measured_host():
    cluster = Cluster.parse("h100:2")
    fast = replace(cluster, device=replace(cluster.device, host=Host(0.0, 0.0, 0.0, "none")))
    assert Cluster.from_dict(fast.to_dict()) == fast
    slow = planned("h100:2", dispatch_limit=None)
    traced = traced_of("tower", tx=CLIP)[1]
    quick = plan_pipeline(traced, fast, stages=2, micro=4, dispatch_limit=1.0)
    assert quick.dispatch < slow.dispatch
    np.testing.assert_allclose(ASSUMED.calls(8, 10), 8 * ASSUMED.call + 80 * ASSUMED.shard)
    with pytest.raises(ClusterError, match="host: `move` must be seconds"):
        Host(0.0, 0.0, -1.0)


def test_a_profile_is_what_the_step_is_priced_by(devices):
    """The measured host, and what it was measured on, count in a pipeline as elsewhere."""
    measured = Profile(
        "cpu", "cpu:8", 8, 1, (Curve("matmul", "f64", (1e3, 1e9), (1e9, 1e9)),), (), (), (), "",
        host=Host(0.0, 0.0, 1e-3),
    )  # fmt: skip
    work = tower()
    step = functools.partial(work.step, value_and_grad=value_and_grad)
    options = dict(cluster="cpu:2", stages=2, micro_batches=4, time_limit=10)

    def planned(**more):
        run = js.parallelize(step, **options, **more)
        return run.plan_for(work.init, jax.random.key(0), batch=work.batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no link was measured
        plan = planned(profile=measured, dispatch_limit=None)
        with pytest.raises(InfeasibleError, match=r"measured.*calibrate"):
            planned(profile=measured)
    assert plan.dispatch > planned().dispatch
    with pytest.raises(PlanError, match="one kind"):
        js.parallelize(step, **{**options, "cluster": "a100-80:1+h100:1"}, profile=measured)
