"""Models with more than one stack as pipelines of the stage executor: the same numbers."""

import functools
import itertools

import jax
import optax
import pytest
from test_stages import random_order, same_steps

import jaxscaler as js
from jaxscaler.cluster import Cluster
from jaxscaler.errors import RewriteError
from jaxscaler.graph.build import build
from jaxscaler.loops.planner import batch_of
from jaxscaler.pipeline.planner import plan_pipeline
from jaxscaler.pipeline.step import PipelineStep
from jaxscaler.program import Stage, op_assign, region
from jaxscaler.rewrite.changes import Accumulate, Stages
from jaxscaler.rewrite.cuts import even_cut, units_of
from jaxscaler.rewrite.stages import staged
from jaxscaler.schedule.simulate import simulate
from jaxscaler.schedule.tasks import Task
from jaxscaler.trace import trace
from models import alphafold2, clip, t5, vlm
from models.workload import cross_entropy

SGD = dict(dtype="float64", tx=optax.sgd(0.1))
TOWERS = dict(vision=clip.Tower(1, 16, 2), text=clip.Tower(1, 16, 2))
WORKLOADS = {
    "vlm": lambda: vlm.workload(batch=8, seq=8, layers=2, vision=TOWERS["vision"], **SGD),
    "alphafold2": lambda: alphafold2.workload(batch=4, blocks=1, **SGD),
    "t5": lambda: t5.workload(batch=8, seq=8, scan=True, **SGD),
    "clip": lambda: clip.workload(batch=8, **TOWERS, **SGD),
}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@functools.cache
def traced_of(name):
    work = WORKLOADS[name]()
    score = clip.contrastive if name == "clip" else cross_entropy
    fed = [key for key in work.batch if key != "targets"]

    def step(state, batch):
        def loss(params):
            whole = {**params, **getattr(state, "frozen", {})}
            outputs = state.apply_fn({"params": whole}, *(batch[key] for key in fed))
            return score(outputs, batch["targets"]) if "targets" in batch else score(outputs)

        value, grads = js.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return work, trace(step, work.state, work.batch)


def cut(name, count):
    _, traced = traced_of(name)
    graph = build(traced)
    batch = batch_of(graph, 0, traced.losses[0])
    return even_cut(units_of(traced, graph, 0, dict(batch)), 0, count), batch


def visits():
    """The block of an Evoformer on two places, in each of its two visits."""
    _, traced = traced_of("alphafold2")
    scopes = {op.origin.key[0]: op.scope for op in build(traced).ops
              if op.origin and op.phase == "forward"}  # fmt: skip
    block = [i for i, scope in sorted(scopes.items()) if "blocks_0" in scope]
    (end,) = (a for a, b in itertools.pairwise(block) if b - a > 20)  # of the first visit
    halves = [i for i in block if "blocks_0/outgoing" in scopes[i]]
    first, second = halves[0], next(i for i in halves if i > end)
    return Stages(0, ((0, 0, 0), (first, 0, 1), (end + 1, 0, 0), (second, 0, 1)))


def run(name, **options):
    work, traced = traced_of(name)
    options = {"stages": 2, "micro": 2, "time_limit": 10, **options}
    plan = plan_pipeline(traced, Cluster.parse("cpu:8"), **options)
    step = PipelineStep(plan)
    same_steps(work, step, step.init(work.init, jax.random.key(0)), step.gather, steps=1)
    return plan


@pytest.mark.slow
def test_a_frozen_encoder_is_a_stage_without_backward():
    lines = [op_assign(region("vision"), Stage(0)), op_assign(region("project_*"), Stage(1))]
    plan = run("vlm", stages=None, constraints=lines, submeshes=(2, 4), micro=4)
    assert plan.pipeline.stages[0].backward is None
    assert plan.pipeline.stages[1].backward > 0
    assert not [t for t in plan.order[0] if t.phase == "B"]


@pytest.mark.slow
def test_a_stack_that_is_visited_again():
    """The parameters of a block lie once, whichever visit reads them."""
    plan = run("alphafold2", stages=visits(), order="nf1b", submeshes=(1, 2))
    # both visits read what the first stage embeds
    assert [s.backward is None for s in plan.pipeline.stages] == [False, True, False, False]
    assert len(plan.pipeline.stages) == 4 and len(plan.order) == 2


@pytest.mark.slow
def test_an_encoder_and_a_decoder_that_are_scanned():
    run("t5", stages=4, submeshes=(1, 1, 2, 4))


@pytest.mark.slow
def test_an_encoder_and_a_decoder_in_a_random_order():
    stages, batch = cut("t5", 2)
    _, traced = traced_of("t5")
    changed = traced.changed((stages, Accumulate(0, 2, batch)))
    run("t5", stages=stages, order=random_order(staged(changed), 3))


@pytest.mark.slow
def test_two_towers_under_a_loss_of_all_pairs():
    """It is no sum over samples: one micro-batch, in which the towers run side by side."""
    _, traced = traced_of("clip")
    with pytest.raises(RewriteError, match=r"contrastive.*parts do not add up"):
        plan_pipeline(traced, Cluster.parse("cpu:8"), stages=2, micro=2)
    names = ("vision", "text", "text_head")  # the last with the loss
    lines = [op_assign(region(name), Stage(k)) for k, name in enumerate(names)]
    plan = run("clip", stages=None, constraints=lines, micro=1, submeshes=(4, 2, 1))
    when = simulate(plan.pipeline, plan.order).when
    first, second = (when[Task(k, 0, "F")] for k in (0, 1))
    assert max(first[0], second[0]) < min(first[1], second[1])
