"""A pipeline over devices of two kinds: a plan for each stage's kind, and the same numbers."""

import functools

import jax
import pytest
from test_stages import same_steps, tower, traced_of

import jaxscaler as js
from jaxscaler.cluster import Cluster
from jaxscaler.cluster.devices import find_device
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.cluster.parts import link_between, part_at
from jaxscaler.errors import ClusterError
from jaxscaler.grad import value_and_grad
from jaxscaler.pipeline.planner import plan_pipeline

TEXT = "a100-80:4+v100-32:2"


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def test_parts_of_several_kinds():
    mixed = Mixed.parse(TEXT)
    assert mixed.name == TEXT and mixed.num_devices == 6
    assert Mixed.from_dict(mixed.to_dict()) == mixed
    assert part_at(mixed, 4, 2).device.name == "v100-32"
    assert part_at(mixed, 2, 2).device.name == "a100-80"
    assert link_between(mixed, 0, 1) == Cluster.parse("a100-80:4").levels[0].link
    assert link_between(mixed, 3, 4) == find_device("v100-32")[1].inter  # the slower one
    with pytest.raises(ClusterError, match=r"devices 3 to 4 of .* are of several kinds"):
        part_at(mixed, 3, 2)
    with pytest.raises(ClusterError, match="several kinds are for a pipeline"):
        Cluster.parse(TEXT)


def test_a_kind_per_stage(devices, tmp_path):
    work = tower()
    step = functools.partial(work.step, value_and_grad=value_and_grad)
    options = dict(stages=2, micro_batches=4, dispatch_limit=None)
    run = js.parallelize(step, cluster=TEXT, time_limit=10, **options)
    state = run.init(work.init, jax.random.key(0), batch=work.batch)
    same_steps(work, run, state, run.gather)
    plan = run.plan
    assert plan.devices == (4, 2) and plan.first == (0, 4)
    kinds = [Cluster.from_dict(c).device for c in plan.clusters]
    assert [kind.name for kind in kinds] == ["a100-80", "v100-32"]
    for kind, limit in zip(kinds, plan.pipeline.limits):
        assert 0.5 * kind.hbm_bytes < limit < kind.hbm_bytes
    plan.save(tmp_path / "plan.json")
    again = js.parallelize(step, plan=tmp_path / "plan.json", **options)
    state = again.init(work.init, jax.random.key(0), batch=work.batch)
    same_steps(work, again, state, again.gather, steps=1)


def test_each_kind_has_its_own_speed():
    traced = traced_of("tower")[1]
    options = dict(stages=2, micro=2, dispatch_limit=None, time_limit=10)
    first, second = (
        plan_pipeline(traced, Mixed.parse(text), **options).pipeline.stages
        for text in ("v100-32:2+a100-80:2", "a100-80:2+v100-32:2")
    )
    assert first[0].forward > second[0].forward and first[1].forward < second[1].forward
