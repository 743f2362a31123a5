"""Chimera: two copies of every stage in opposite directions, with the numbers of the plain step."""

import functools
import io
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from rich.console import Console
from test_pipeline_search import tower
from test_stages import run_planned

import jaxscaler as js
from jaxscaler.cluster import Cluster
from jaxscaler.cluster.host import Host
from jaxscaler.cost.pipeline import in_flight, step_seconds
from jaxscaler.errors import ConstraintError, InfeasibleError, ScheduleError
from jaxscaler.pipeline.dispatch import host_seconds
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline
from jaxscaler.pipeline.search import search_pipelines
from jaxscaler.pipeline.step import Rows
from jaxscaler.program import ALL
from jaxscaler.schedule import check, family
from jaxscaler.schedule.tasks import UPDATE, Edge, task_graph
from jaxscaler.trace import trace

SIZE, LAYERS, BATCH = 8, 4, 16
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def init(key, size=SIZE, tx=TX):
    params = [jax.random.normal(k, (size, size)) / 3 for k in jax.random.split(key, LAYERS)]
    return {"params": params, "opt": tx.init(params), "steps": jnp.zeros((), int)}


def step(state, batch, tx=TX, grad=js.value_and_grad):
    """Equal layers, clipping, Adam; the errors of all samples, and their mean."""

    def loss(params):
        x = batch
        for n, w in enumerate(params):
            with jax.named_scope(f"layer_{n}"):
                x = x + jnp.tanh(x @ w)
        errors = jnp.square(x).mean(-1)
        return errors.mean(), {"errors": errors}

    (value, aux), grads = grad(loss, has_aux=True)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    state = {"params": params, "opt": opt, "steps": state["steps"] + 1}
    return state, {"loss": value, "norm": optax.tree.norm(grads), **aux}


def batches(count, size=SIZE):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((BATCH, size)) for _ in range(count)]


def close(got, want):
    got = jax.tree.map(lambda x: x.whole() if isinstance(x, Rows) else np.asarray(x), got,
                       is_leaf=lambda x: isinstance(x, Rows))  # fmt: skip
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def copies_agree(state):
    """Bit for bit, whatever device a leaf is read from."""
    for leaf in jax.tree.leaves(state):
        at = {}
        for shard in leaf.addressable_shards:
            at.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in at.values():
            assert others
            for other in others:
                np.testing.assert_array_equal(first, other)


def test_a_life(devices, tmp_path):
    """Steps, a checkpoint, functions on the state: one state, which both copies have."""
    run = js.parallelize(
        step, cluster="cpu:4", stages=2, micro_batches=4, schedule="chimera", time_limit=10
    )
    given = batches(3)
    state = run.init(init, jax.random.key(0), batch=given[0])
    want, plain = (
        jax.jit(init)(jax.random.key(0)),
        jax.jit(functools.partial(step, grad=jax.value_and_grad)),
    )
    close(state, want)
    for batch in given[:2]:
        old = state
        state, metrics = run(state, batch)
        want, expected = plain(want, batch)
        close(metrics, expected)
    close(state, want)
    copies_agree(state)
    assert all(x.is_deleted() for x in old["params"])  # written over, on both
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {4}
    close(run.gather(state), want)
    close(run.jit(optax.tree.norm)(state["params"]), optax.tree.norm(want["params"]))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", run.abstract_state())
    other = run.place(run.gather(state))
    want, expected = plain(want, given[2])
    for again in (restored, other, run.gather(state)):
        made = run(again, given[2])
        close(made, (want, expected))
        copies_agree(made[0])


def planned(micro=4, stages=4, cluster="cpu:4", size=SIZE, tx=TX, **options):
    state = jax.eval_shape(functools.partial(init, size=size, tx=tx), jax.random.key(0))
    traced = trace(functools.partial(step, tx=tx), state, batches(1, size)[0])
    options = {"order": "chimera", "time_limit": 10, **options}
    return plan_pipeline(traced, Cluster.parse(cluster), stages=stages, micro=micro, **options)


@functools.cache
def priced():
    """Four stages in both directions, the same in one, and how they were priced."""
    return planned(), planned(order="1f1b")


def test_what_is_priced():
    """Each copy has all that its stage takes; the update waits for gradients of both."""
    both, one = priced()
    assert both.copies == 2 and both.places == one.places == (0, 1, 2, 3)
    assert both.sites[1] == both.sites[0][::-1]
    device, link = Cluster.parse("cpu:4").device, Cluster.parse("cpu:4").levels[0].link
    sums = [8.0 * SIZE * SIZE] * 4  # a layer's gradients; numbers count nothing
    exchange = [
        link.launch + link.latency + s / (link.bandwidth * link.efficiency(s))
        + 3 * s / device.hbm_bandwidth
        for s in sums
    ]  # fmt: skip
    most = max(a + b for a, b in zip(exchange, exchange[::-1]))
    assert both.pipeline.barrier == pytest.approx(most)
    for k, stage in enumerate(one.pipeline.stages):
        for copy, group in ((k, k), (k + 4, 3 - k)):
            found = both.pipeline.stages[copy]
            assert found.groups == (group,) and found.micros == (copy // 4, 2)
            assert found.updating == sums[k] + sums[3 - k]
            for name in ("forward", "backward", "update", "kept", "static", "working"):
                assert getattr(found, name) == pytest.approx(getattr(stage, name))
    for g, peak in enumerate(both.timeline.held):
        static = [one.pipeline.stages[k].static for k in (g, 3 - g)]
        assert peak[0].bytes == pytest.approx(sum(static))


@pytest.mark.parametrize("clipped", [True, False])
def test_equal_stages_have_the_closed_forms(clipped):
    """What `plan_pipeline` makes, its stages set alike: step and memory as the formulas say."""
    both = priced()[0] if clipped else planned(tx=optax.sgd(0.1))
    f, b, u, kept, static = 2.0, 3.0, 0.5, 7.0, 100.0
    stages = tuple(
        replace(s, forward=f, backward=b, update=u + s.update * 0, kept=kept, static=static,
                working=0.0, updating=0.0)
        for s in both.pipeline.stages
    )  # fmt: skip
    edges = tuple(Edge(e.source, e.target) for e in both.pipeline.edges)
    alike = replace(both.pipeline, stages=stages, edges=edges, limits=())
    timeline = check(alike, family("chimera", alike))
    assert (alike.barrier is not None) == clipped
    want = step_seconds("chimera", 4, 4, f, b) + 2 * u + (alike.barrier or 0.0)
    assert timeline.seconds == pytest.approx(want)
    for g, peak in enumerate(timeline.peak):
        assert peak.bytes == pytest.approx(2 * static + kept * in_flight("chimera", g, 4, 4))


def test_gradients_of_the_copy_need_room():
    """Where little else is under way, the exchange is what a group holds most in."""
    plan = planned(stages=2, cluster="cpu:2", size=64, tx=optax.sgd(0.1))
    peak = plan.timeline.peak[0].bytes
    static = sum(plan.pipeline.stages[s].static for s in plan.pipeline.stages_of(0))
    sums = 2 * LAYERS // 2 * 8 * 64 * 64
    assert plan.pipeline.stages[0].updating == sums
    updates = [plan.timeline.when[t] for t in plan.order[0] if t.phase == UPDATE]
    assert len(updates) == 2
    at = max(p.bytes for p in plan.timeline.held[0] if p.seconds >= updates[0][0])
    assert peak >= at >= static + sums
    with pytest.raises(InfeasibleError):
        planned(stages=2, cluster="cpu:2", size=64, tx=optax.sgd(0.1),
                memory=0.99 * static / Cluster.parse("cpu:2").device.hbm_bytes)  # fmt: skip


def test_what_the_host_copies():
    """What crosses between stages once a micro-batch; outside of the loop twice; and all sums."""
    both, one = priced()
    moves = [
        round(host_seconds(plan.parts.staged, plan.order, plan.devices, Host(0, 0, 1e6)) / 1e6)
        for plan in (both, one)
    ]
    inside, sums = 4 * 2 * 3, LAYERS + 1  # an activation and a gradient between stages; the loss
    assert moves[0] == inside + 2 * (moves[1] - inside) + 2 * sums


def test_both_copies_fit_together():
    """A plan that fits alone, and not beside its copy, is made anew with less room."""
    options = dict(stages=2, cluster="cpu:4", size=64, tx=optax.adam(0.1), dispatch_limit=None)
    free = planned(**options)
    most = max(peak.bytes for peak in free.timeline.peak)
    memory = 0.8 * most / Cluster.parse("cpu:4").device.hbm_bytes
    tight = planned(memory=memory, **options)
    assert max(peak.bytes for peak in tight.timeline.peak) <= 0.8 * most
    assert all(plan.predicted.peak_bytes < 0.8 * most for plan in free.plans)  # each alone


def test_the_search_looks_at_it_where_told():
    """Little to exchange, few micro-batches: two directions are faster, at twice the state."""
    traced = tower((1024,) * 5, batch=65536)
    found = search_pipelines(
        traced, Cluster.parse("v100:4"), micro=4, stages=2, schedules=("1f1b", "chimera"),
        lanes=(1,), changes=((),), spmd=False, dispatch_limit=None,
    )  # fmt: skip
    seconds = {row.candidate.schedule: row.seconds for row in found.tried}
    assert isinstance(found.plan, PipelinePlan) and found.plan.copies == 2
    assert seconds["chimera"] < seconds["1f1b"]
    assert found.plan.seconds == pytest.approx(min(seconds.values()))


def random_order(pipeline, seed):
    draw, graph = random.Random(seed), task_graph(pipeline)
    left = {i: {n.task for n in needs} for i, needs in enumerate(graph.needs)}
    lines = [[] for _ in range(pipeline.groups)]
    while left:
        i = draw.choice(sorted(i for i, needs in left.items() if not needs & left.keys()))
        del left[i]
        task = graph.tasks[i]
        lines[pipeline.stages[task.stage].groups[0]] += [task] * (task.phase != UPDATE)
    return lines


def test_a_random_order_of_both_copies(devices, tmp_path):
    """Tasks of stages behind the last are of copies; a saved plan, read again, says so too."""
    order = random_order(priced()[0].pipeline, 0)
    plan = planned(order=order)
    plan.save(tmp_path / "plan.json")
    read = PipelinePlan.load(tmp_path / "plan.json")
    assert read == plan and read.copies == 2
    console = Console(record=True, width=120, file=io.StringIO())
    read.show(console)
    text = console.export_text().splitlines()
    assert "4 stages" in text[0] and "in both directions" in text[0]
    rows = [" ".join(line.split()[:3]) for line in text[2:6]]
    assert rows == ["0 0, 3", "1 1, 2", "2 2, 1", "3 3, 0"]
    run = js.parallelize(step, micro_batches=4, plan=read)
    state, want = run.init(init, jax.random.key(0), batch=batches(1)[0]), init(jax.random.key(0))
    for batch in batches(2):
        state, metrics = run(state, batch)
        want, expected = jax.jit(functools.partial(step, grad=jax.value_and_grad))(want, batch)
        close((state, metrics), (want, expected))
    copies_agree(state)
    with pytest.raises(ScheduleError, match="missing on group 3"):
        planned(order=[*order[:3], order[3][1:]])


def test_refusals():
    with pytest.raises(ScheduleError, match=r"an even number of stages.* 3 on 3"):
        planned(stages=3, cluster="cpu:3")
    with pytest.raises(ConstraintError, match="copy of stage 0 is on the devices of stage 1"):
        planned(stages=2, cluster="cpu:3", submeshes=(1, 2))
    with pytest.raises(ScheduleError, match="on devices of its own"):
        planned(stages=2, cluster="cpu:2", submeshes=(2, ALL))


@pytest.mark.parametrize(
    ("model", "wanted", "options"),
    [
        ("tower", dict(tx=TX), dict(stages=2, submeshes=(2, 2))),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt", dict(layers=2, tx=TX), dict(stages=2, submeshes=(1, 1))),
                ("gpt", dict(layers=4), dict(stages=4, submeshes=(1,) * 4)),
                ("gpt", dict(layers=4, tx=TX), dict(stages=4, submeshes=(2,) * 4)),
                ("gpt", dict(layers=2, batch=16), dict(stages=2, lanes=2)),
                ("llama", dict(tx=TX), dict(stages=2, submeshes=(2, 2))),
                ("llama", dict(tx=TX, remat=True), dict(stages=4, submeshes=(2,) * 4)),
            )
        ),
    ],
)
def test_same_numbers(model, wanted, options, devices):
    """A tied embedding, a tied layer and a scan among them."""
    options = dict(order="chimera", micro=4, **options)
    plan, _, state = run_planned(model, wanted, **options)
    assert plan.copies == 2
    copies_agree(state)
