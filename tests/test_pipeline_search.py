"""The joint search: its space by brute force, the simplest plan, what it says and refuses."""

import io
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from rich.console import Console

from jaxscaler.cluster import Cluster
from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import ConstraintError, InfeasibleError, JaxscalerError, ScheduleError
from jaxscaler.grad import value_and_grad
from jaxscaler.pipeline.balance import Works, even_ends, uneven
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline
from jaxscaler.pipeline.search import search_pipelines
from jaxscaler.pipeline.space import AGAIN, KEPT, Candidate, Shape, space_of
from jaxscaler.planner import Planned
from jaxscaler.program import Stage, op_assign, region
from jaxscaler.rewrite.changes import Recompute, Segment, Stages
from jaxscaler.schedule.tasks import StageWork
from jaxscaler.trace import trace


def tower(widths, batch=4096, ends=True):
    """A traced step, large and never run, whose loss is a product and a tanh per layer (without
    `ends`, the last has none), and a sum."""

    def init(key):
        pairs = itertools.pairwise(widths)
        params = [jax.random.normal(key, pair, "float32") for pair in pairs]
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def loss(params, x):
        for n, w in enumerate(params):
            with jax.named_scope(f"layer_{n}"):
                x = x @ w
                x = jnp.tanh(x) if ends or n + 1 < len(params) else x
        return x.sum()

    def step(state, x):
        value, grads = value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    state = jax.eval_shape(init, jax.random.key(0))
    return trace(step, state, jax.ShapeDtypeStruct((batch, widths[0]), "float32"))


def brute_force(traced, cluster, operations, micros, changes, schedules):
    """(points, sizes, micro, changes, schedule) -> seconds of what `plan_pipeline` takes."""
    found = {}
    total = cluster.num_devices
    for count in range(2, min(total, operations) + 1):
        for cut, bars, micro, again, name in itertools.product(
            itertools.combinations(range(1, operations), count - 1),
            itertools.combinations(range(1, total), count - 1),
            micros, changes, schedules,
        ):  # fmt: skip
            sizes = tuple(b - a for a, b in itertools.pairwise((0, *bars, total)))
            points = ((0, 0, 0), *((e, 0, n) for n, e in enumerate(cut, 1)))
            try:
                plan = plan_pipeline(
                    traced, cluster, stages=Stages(0, points), micro=micro, order=name,
                    submeshes=sizes, changes=pieces(again, cut), dispatch_limit=None,
                )  # fmt: skip
                found[points, sizes, micro, again, name] = plan.seconds
            except JaxscalerError:
                found[points, sizes, micro, again, name] = None
    return found


def pieces(changes, cut):
    """Segments that are made again, none across a cut."""
    found = []
    for change in changes:
        first, last = change.segment.first, change.segment.last
        ends = [first, *(e for e in cut if first < e <= last), last + 1]
        found += [Recompute(Segment(0, a, b - 1)) for a, b in itertools.pairwise(ends)]
    return tuple(found)


def priced(found, space_changes):
    """The rows of a search as `brute_force` names them."""
    rows = {}
    for row in found.tried:
        if row.candidate is not None:
            shape = row.candidate.shape
            points = ((0, 0, 0), *((e, 0, n) for n, e in enumerate(row.candidate.ends, 1)))
            again = space_changes[shape.again]
            rows[points, shape.sizes, shape.micro, again, row.candidate.schedule] = row.seconds
    return rows


def same_as_brute_force(widths, operations, micros, changes, schedules, ends=True):
    traced = tower(widths, ends=ends)
    cluster = Cluster.parse("v100:4")
    assert len(traced.losses[0].eqns) == operations
    found = search_pipelines(
        traced, cluster, micro=micros, changes=changes, schedules=schedules, lanes=(1,),
        exhaustive=True, dispatch_limit=None, time_limit=1e9,
    )  # fmt: skip
    names = {", ".join(map(str, c)) or KEPT: tuple(c) for c in changes}
    brute = brute_force(traced, cluster, operations, micros, tuple(names.values()), schedules)
    rows = priced(found, names)
    assert rows.keys() == brute.keys()
    for key, seconds in brute.items():
        assert rows[key] == (None if seconds is None else pytest.approx(seconds, rel=1e-9)), key
    fits = [s for s in brute.values() if s is not None]
    alone = found.spmd.plan.predicted.seconds
    assert found.seconds == pytest.approx(min(*fits, alone), rel=1e-9)
    fast = search_pipelines(
        traced, cluster, micro=micros, changes=changes, schedules=schedules, lanes=(1,),
        spmd=False, dispatch_limit=None, time_limit=1e9,
    )  # fmt: skip
    return fast, min(fits)


def test_all_of_a_small_space():
    fast, least = same_as_brute_force((8192, 4096, 1024), 5, (2,), ((),), ("1f1b", "zero-bubble"))
    assert isinstance(fast.best, PipelinePlan)
    assert fast.seconds <= 1.05 * least


@pytest.mark.slow
def test_all_of_six_operations():
    again = (Recompute(Segment(0, 0, 3)),)
    fast, least = same_as_brute_force(
        (8192, 4096, 2048, 1024), 6, (2, 4), ((), again), ("1f1b", "zero-bubble"), ends=False
    )
    assert fast.seconds <= 1.05 * least


def test_balance_learns():
    """Blocks of one kind take what priced stages say of them, and the cut follows."""
    space = space_of(tower((512,) * 9), Cluster.parse("v100:4"))
    works, shape = Works(space), Shape(4, (1, 1, 1, 1))
    assert space.blocks == 8 and len({*space.kinds[1:-1]}) == 1
    assert even_ends(works, shape, math.inf) == (2, 4, 6)
    slow = [StageWork((n,), forward=t, backward=2 * t) for n, t in enumerate((9.0, 2, 2, 2))]
    works.learn(shape, (2, 4, 6), slow)  # the first block is much more than its work says
    ends = even_ends(works, shape, math.inf)
    assert ends[0] == 1
    sizes, cut = uneven(works, shape, 3, math.inf)
    assert sum(sizes) == 4 and sizes[0] == 2 and len(cut) == 2


def test_the_simplest():
    traced = tower((8192, 4096, 1024))
    cluster = Cluster.parse("v100:4")
    options = dict(micro=(2, 4), stages=2, dispatch_limit=None, time_limit=1e9)
    best = search_pipelines(traced, cluster, spmd=False, **options)
    assert isinstance(best.best, PipelinePlan) and best.seconds == best.plan.seconds
    assert best.seconds == min(r.seconds for r in best.tried if r.seconds is not None)
    simple = search_pipelines(traced, cluster, spmd=False, simplest=1e3, **options)
    rows = [r for r in simple.tried if r.seconds is not None]
    assert simple.plan.micro == 2 and len(rows) > 2
    found = search_pipelines(traced, cluster, simplest=1e3, **options)
    assert isinstance(found.best, Planned) and found.best is found.spmd
    console = Console(record=True, width=120, file=io.StringIO())
    found.show(console)
    text = console.export_text()
    assert "no stages" in text and "2 stages of 2, 2 micro-batches, 1f1b" in text


def test_what_is_refused():
    traced = tower((8192, 4096, 1024))
    cluster = Cluster.parse("v100:4")
    with pytest.raises(InfeasibleError, match=r"nothing fits .* by kind: no stages"):
        search_pipelines(traced, cluster, memory=1e-6, micro=2, stages=2, dispatch_limit=None)
    with pytest.raises(ScheduleError, match="'fast' is none of"):
        search_pipelines(traced, cluster, schedules=("fast",))
    with pytest.raises(ConstraintError, match="micro=0"):
        search_pipelines(traced, cluster, micro=0)
    with pytest.raises(ConstraintError, match="simplest=-1"):
        search_pipelines(traced, cluster, simplest=-1)


def test_stages_that_are_said():
    """Lines fix the cut; micro-batches, sub-meshes and schedules are searched."""
    traced = tower((8192, 4096, 1024))
    lines = [op_assign(region(layers=k), Stage(k)) for k in (0, 1)]
    found = search_pipelines(
        traced, Cluster.parse("v100:4"), constraints=lines, spmd=False, dispatch_limit=None,
        schedules=("1f1b", "gpipe"), micro=(2, 4), lanes=(1,),
    )  # fmt: skip
    assert found.plan.places == (0, 1)
    cuts = {c.points for row in found.tried for c in found.plan.changes if isinstance(c, Stages)}
    assert len(cuts) == 1
    assert {r.candidate.shape.micro for r in found.tried if r.seconds} == {2, 4}


def test_devices_of_two_kinds():
    """Each stage is on one kind, and the slower kind has less to do."""
    found = search_pipelines(
        tower((2048,) * 9), Mixed.parse("v100-32:2+a100-80:2"), micro=(4,), stages=2, lanes=(1,),
        schedules=("1f1b",), dispatch_limit=None,
    )  # fmt: skip
    best = min((r for r in found.tried if r.seconds), key=lambda r: r.seconds)
    assert best.candidate.shape.sizes == (2, 2) and best.candidate.ends[0] < 4
    names = [c["device"]["name"] for c in found.plan.clusters]
    assert names == ["v100-32", "a100-80"]
    assert found.spmd is None and "several kinds" in found.tried[0].why


def test_recomputation_in_stages(devices):
    """Layers made again in the backward tasks of their stages: the same numbers."""
    from test_stages import run_planned, traced_of

    with jax.enable_x64(True):
        _, traced = traced_of("tower")
        space = space_of(traced, Cluster.parse("cpu:2"), micro=2)
        candidate = Candidate(Shape(2, (1, 1), AGAIN), (2,), "1f1b")
        cut = Stages(0, ((0, 0, 0), (4, 0, 1)))  # in the middle of a layer, whose segment is cut
        changes = replace(space, fixed=cut).changes(candidate)
        assert len(changes) == len(space.again[AGAIN]) + 1
        plan, _, _ = run_planned("tower", {}, "cpu:2", stages=cut, changes=changes)
        eqns = plan.parts.staged.loop.body.eqns
        again = [w for e, w in zip(eqns, plan.parts.staged.body) if "remat" in e.primitive.name]
        assert {run for run, _ in again} == {0, 1} and {phase for _, phase in again} <= {"B", "W"}


def test_a_plan_that_is_known():
    """It competes as it is, and nothing worse is found."""
    traced, cluster = tower((8192, 4096, 1024)), Cluster.parse("v100:4")
    cut = Stages(0, ((0, 0, 0), (1, 0, 1)))
    known = plan_pipeline(traced, cluster, stages=cut, micro=2, dispatch_limit=None)
    options = dict(known=[known], spmd=False, micro=2, stages=2, dispatch_limit=None)
    found = search_pipelines(traced, cluster, schedules=("1f1b",), **options)
    assert found.tried[0].given is known and found.seconds <= known.seconds
    assert search_pipelines(traced, cluster, time_limit=0, **options).best is known


@pytest.mark.slow
def test_the_front_door():
    from test_stages import WORKLOADS, marked

    from jaxscaler import parallelize, plan

    work = WORKLOADS["gpt"](layers=2, dtype="float32")
    options = dict(pipelines=True, simplest=0.02)
    found = plan(marked(work), work.state, work.batch, cluster="cpu:4", time_limit=30, **options)
    assert found.predicted.seconds > 0
    step = parallelize(marked(work), cluster="cpu:4", pipelines=True, spmd=False, stages=2,
                       micro=2, lanes=(1,), devices=jax.devices()[:4],
                       dispatch_limit=None)  # fmt: skip
    state = step.init(work.init, jax.random.key(0), batch=work.batch)
    assert isinstance(step.plan, PipelinePlan) and step.found is not None
    batch = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), work.batch)
    _, metrics = step(state, batch)
    whole = work.init(jax.random.key(0))
    _, wanted = jax.jit(work.step)(whole, batch)
    assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
