"""A step cut into stages: what goes where, the same numbers in any order, and what is refused."""

import functools
import io
import random
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from rich.console import Console
from test_coshard import marked

from jaxscaler.cluster import Cluster
from jaxscaler.cluster.parts import link_between, sub_clusters
from jaxscaler.errors import (
    ClusterError,
    ConstraintError,
    InfeasibleError,
    PlanError,
    RewriteError,
    ScheduleError,
)
from jaxscaler.grad import value_and_grad
from jaxscaler.graph.build import build
from jaxscaler.loops.planner import batch_of
from jaxscaler.lower.executor import Executor, checked_order, in_turns
from jaxscaler.lower.interpret import named_sharding
from jaxscaler.lower.layouts import Layouts
from jaxscaler.lower.sites import common_specs
from jaxscaler.pipeline.front import PipelinedStep
from jaxscaler.pipeline.plan import PipelinePlan
from jaxscaler.pipeline.planner import plan_pipeline, price_stage, with_step
from jaxscaler.pipeline.prices import OUTSIDE, task_seconds
from jaxscaler.pipeline.step import PipelineStep, Rows
from jaxscaler.planner import plan_step
from jaxscaler.program import ALL, Stage, op_assign, op_order, ops, region
from jaxscaler.program_text import dump_program, parse_program
from jaxscaler.rewrite.changes import Accumulate, Stages
from jaxscaler.rewrite.cuts import cut_by_lines, even_cut, units_of
from jaxscaler.rewrite.stages import staged
from jaxscaler.schedule.tasks import Task
from jaxscaler.trace import trace
from models import gpt, llama
from models.workload import Workload


class Whole(NamedTuple):
    """A site whose values are whole on all its devices."""

    mesh: jax.sharding.Mesh

    def spec(self, var):
        return ((),) * len(var.aval.shape)

    def layouts(self, part, inside):
        axes = tuple(self.mesh.shape.items())
        return Layouts(axes, (None,) * len(part.reads), (None,) * len(part.makes))


SMALL = dict(seq=8, hidden=16, heads=2, vocab=32)
CLIP = optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(0.1, momentum=0.9))
SCANNED = dict(layers=3, tx=optax.sgd(0.1))
WORKLOADS = {
    "gpt": lambda **o: gpt.workload(**{**SMALL, "dtype": "float64", "batch": 8, **o}),
    "llama": lambda **o: llama.workload(
        **{**SMALL, "ffn": 32, "kv_heads": 2, "layers": 4, "scan": True, "dtype": "float64",
           "batch": 8, **o}
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def tower(tx=None, dtype="float64", batch=8, layers=4, dropout=False):
    """Layers of tanh, the first and the last with the same weights; cheap to compile."""
    tx = optax.sgd(0.1, momentum=0.9) if tx is None else tx

    scale = np.linspace(1, 2, 4)  # an array that the step closes over

    def forward(params, batch, key):
        x = batch["inputs"] * scale
        for n in range(layers):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ params[n % (layers - 1)])
                if dropout:
                    x *= jax.random.bernoulli(jax.random.fold_in(key, n), 0.9, x.shape)
        return x

    def init(key):
        params = [jax.random.normal(k, (4, 4), dtype) for k in jax.random.split(key, layers - 1)]
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss(params, batch, key):
        return jnp.square(forward(params, batch, key) - batch["targets"]).mean()

    def step(state, batch, value_and_grad=jax.value_and_grad):
        key = jax.random.fold_in(jax.random.key(0), state.step)
        value, grads = value_and_grad(loss)(state.params, batch, key)
        return state.apply_gradients(grads=grads), {"loss": value}

    kind = jax.ShapeDtypeStruct((batch, 4), dtype)
    state = jax.eval_shape(init, jax.random.key(0))
    return Workload("tower", step, init, state, {"inputs": kind, "targets": kind})


WORKLOADS["tower"] = tower


def traced_of(model, **options):
    work = WORKLOADS[model](**options)
    if model == "tower":
        step = functools.partial(work.step, value_and_grad=value_and_grad)
    else:
        step = marked(work)
    return work, trace(step, work.state, work.batch)


@functools.lru_cache
def cut_of(model, count, micro=2, places=None, **options):
    """(workload, the step with its changes, the same staged), cut evenly."""
    work, traced = traced_of(model, **options)
    graph = build(traced)
    batch = batch_of(graph, 0, traced.losses[0])
    cut = even_cut(units_of(traced, graph, 0, dict(batch)), 0, count)
    if places is not None:
        cut = Stages(0, tuple((e, t, places[p]) for e, t, p in cut.points))
    changed = traced.changed((cut, Accumulate(0, micro, batch)))
    return work, changed, staged(changed)


# -- what goes where -------------------------------------------------------------------------------


def test_cut_of_a_tied_model():
    _, changed, cut = cut_of("gpt", 2, layers=2)
    paths = dict(zip(cut.traced.jaxpr.jaxpr.invars, cut.traced.in_paths))
    homes = {paths[v]: p for v, p in cut.homes.items()}
    assert homes.keys() == {p for p in changed.in_paths if p.startswith("state/")}
    for layer, place in (("h_0", 0), ("h_1", 1)):
        mine = {p for path, p in homes.items() if layer in path}  # optimizer state too
        assert mine == {place}
    # the tied table lives once, goes to the other place once a step, and so does its gradient
    sent = {paths[v]: where for v, where in cut.sends.items() if v in paths}
    assert homes["state/params/wte/embedding"] == 0
    assert sent["state/params/wte/embedding"] == {1}
    table = (32, 16)
    assert sum(v.aval.shape == table for v in cut.sends) == 2
    assert len(cut.update) == 2  # the sum of the table's gradients waits for the other place
    # inside of the loop one activation goes forward, and one gradient back
    made = {v for eqn in cut.loop.body.eqns for v in eqn.outvars}
    crossing = [v for v in cut.sends if v in made]
    assert [v.aval.shape for v in crossing] == [(4, 8, 16)] * 2


def test_residuals_hold_no_parameters_nor_casts():
    _, _, cut = cut_of("gpt", 2, layers=2, dtype="bfloat16")
    fixed = {v.aval.shape for v in cut.loop.consts}
    where = {v: w for eqn, w in zip(cut.loop.body.eqns, cut.body) if w for v in eqn.outvars}
    for run in cut.runs:
        kept = [v for v in cut.part(run, "BW").reads if v in where and where[v][1] == "F"]
        assert kept and all(v.aval.shape not in fixed for v in kept)
        plain = replace(cut, again=(frozenset(),) * 2).part(run, "BW").reads
        bytes_of = [
            sum(v.aval.size * v.aval.dtype.itemsize for v in reads if v in where)
            for reads in (kept, [v for v in plain if v in where and where[v][1] == "F"])
        ]
        assert bytes_of[0] < 0.7 * bytes_of[1]  # f32 copies of bf16 values are made again


def test_weight_gradients_are_apart():
    _, _, cut = cut_of("gpt", 2, layers=2)
    dots = [e.primitive.name == "dot_general" for e in cut.loop.body.eqns]
    number = {
        (run, phase): sum(dots[i] for i in cut.part(run, phase).eqns)
        for run in cut.runs
        for phase in ("F", "B", "W")
    }
    # a layer has 6 products, whose input gradients are 8 and weight gradients 4; the head 1, 1, 1
    assert [number[1, p] for p in "FBW"] == [7, 9, 5]
    assert [number[0, p] for p in "FBW"] == [6, 0, 12]  # no one waits for the first stage
    sums = {c.result for c in cut.loop.carries}
    assert not sums.intersection(cut.part(1, "B").makes)


def test_a_global_norm_is_a_barrier():
    _, _, cut = cut_of("gpt", 2, layers=2, tx=CLIP)
    assert len(cut.update) >= 3
    scalars = [v for v in cut.sends if not v.aval.shape and v.aval.dtype == np.float64]
    assert scalars  # what crosses for the norm are numbers


def test_a_stack_of_layers_is_cut_with_its_state():
    _, _, cut = cut_of("llama", 2)
    paths = dict(zip(cut.traced.jaxpr.jaxpr.invars, cut.traced.in_paths))
    homes = {paths[v]: p for v, p in cut.homes.items()}
    stacked = {path: p for path, p in homes.items() if "layers" in path}
    assert {path[path.index("[") :]: p for path, p in stacked.items()} == {"[0:2]": 0, "[2:4]": 1}
    assert len(cut.update) == 1 and not any(len(v.aval.shape) == 3 for v in cut.sends
                                            if v in paths)  # fmt: skip


def test_cuts_that_are_said():
    _, traced = traced_of("llama")
    graph = build(traced)
    units = units_of(traced, graph, 0, {})
    scan = next(u.equation for u in units if u.trip == 1)
    lines = [op_assign(region(layers=(0, 2)), Stage(0)), op_assign(region(layers=3), Stage(1))]
    assert cut_by_lines(traced, graph, units, 0, lines).points == ((0, 0, 0), (scan, 3, 1))
    with pytest.raises(ConstraintError, match="no op is on Stage\\(0\\)"):
        cut_by_lines(traced, graph, units, 0, lines[1:])
    with pytest.raises(ConstraintError, match="no op of the marked loss"):
        cut_by_lines(traced, graph, units, 0, [op_assign(ops("nothing"), Stage(0))])


# -- orders ----------------------------------------------------------------------------------------


def gpipe(runs, micro):
    return [[Task(r, m, p) for p in "FB" for m in range(micro)] for r in range(runs)]


def random_order(cut, seed):
    """A legal order with weight gradients apart, drawn at random."""
    draw, count, last = random.Random(seed), cut.loop.micro, len(cut.places) - 1
    todo = {Task(r, m, p) for r in cut.runs for m in range(count) for p in "FBW"}
    done, lines = set(), [[] for _ in range(1 + max(cut.places))]

    def needs(task):
        r, m, phase = task
        if phase == "F":
            return [Task(r - 1, m, "F")] if r else []
        if phase == "W":
            return [Task(r, m, "B")]
        return [Task(r, m, "F"), *([Task(r + 1, m, "B")] if r < last else [])]

    while todo:
        task = draw.choice(sorted(t for t in todo if done.issuperset(needs(t))))
        todo.remove(task)
        done.add(task)
        lines[cut.places[task.stage]].append(task)
    return lines


def test_orders_that_can_not_run():
    _, _, cut = cut_of("gpt", 2, layers=2)
    order = gpipe(2, 2)
    with pytest.raises(ScheduleError, match="lacks B of micro-batch 1 on stage 1"):
        checked_order(cut, [order[0], order[1][:-1]])
    with pytest.raises(ScheduleError, match="twice on a device group: F of micro-batch 0"):
        checked_order(cut, [order[0][:1] + order[0], order[1]])
    with pytest.raises(ScheduleError, match="not: F of micro-batch 7"):
        checked_order(cut, [order[0] + [Task(0, 7, "F")], order[1]])
    stuck = [[Task(0, 0, "B"), Task(0, 0, "F")], [Task(1, 0, "F")]]
    made = set()

    def there(task):
        return task == Task(0, 0, "F")

    with pytest.raises(ScheduleError, match=r"in a circle.*B of micro-batch 0 on stage 0"):
        made.update(in_turns(stuck, there))


def test_orders_that_are_said():
    """`op_order` of tasks: what must wait comes later, the rest of the order stays."""
    _, traced = traced_of("tower")
    line = op_order(Task(1, 0, "B"), (1, 1, "F"))
    assert [str(x) for x in parse_program(dump_program([line]))] == [str(line)]

    def planned(line):
        cluster = Cluster.parse("cpu:2")
        lines = [line]
        return plan_pipeline(traced, cluster, stages=2, micro=4, order="gpipe", constraints=lines)

    first, second = ([t for t in mine if t.phase != "U"] for mine in planned(line).order)
    assert first == [Task(0, m, p) for p in "FB" for m in range(4)]
    assert second.index(Task(1, 0, "B")) < second.index(Task(1, 1, "F"))
    assert sorted(second) == sorted(t._replace(stage=1) for t in first)
    with pytest.raises(ScheduleError, match="in a circle"):
        planned(op_order(Task(1, 0, "B"), Task(1, 0, "F")))
    with pytest.raises(ScheduleError, match="different devices"):
        planned(op_order(Task(1, 0, "B"), Task(0, 1, "F")))
    with pytest.raises(ConstraintError, match="tasks are for micro_batches="):
        plan_step(traced, Cluster.parse("cpu:2"), constraints=[line])


# -- the same numbers ------------------------------------------------------------------------------


def same_steps(work, step, state, gather, steps=2):
    want, plain = jax.jit(work.init)(jax.random.key(0)), jax.jit(work.step)
    for i in range(steps):
        state, metrics = step(state, work.make_batch(i))
        want, expected = plain(want, work.make_batch(i))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-9, atol=1e-12)
    found = jax.tree_util.tree_leaves_with_path(gather(state))
    for (path, a), b in zip(found, jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=name)
    return state


def run_on_single_devices(devices, model, count, order, micro=2, places=None, **options):
    """A device per place, everything whole: the cut and the order alone."""
    work, changed, cut = cut_of(model, count, micro, places, **options)
    meshes = [jax.sharding.Mesh(np.array([d]), "x") for d in devices]
    executor = Executor(cut, list(map(Whole, meshes))[: 1 + max(cut.places)], order(cut))

    def step(state, batch):
        leaves = jax.tree.leaves((state, batch))
        return jax.tree.unflatten(changed.out_tree, executor(leaves))

    same_steps(work, step, work.init(jax.random.key(0)), lambda state: state)


def test_a_place_may_be_visited_twice(devices):
    run_on_single_devices(
        devices, "tower", 4, lambda cut: random_order(cut, 0), places=(0, 1, 0, 1)
    )


@pytest.mark.parametrize("micro", [1, 4])
def test_any_number_of_micro_batches(devices, micro):
    options = dict(micro=micro, dropout=micro > 1)
    run_on_single_devices(devices, "tower", 2, lambda cut: gpipe(2, micro), **options)


def run_planned(model, wanted, cluster="cpu:8", **options):
    options = {"micro": 2, **options}
    work, traced = traced_of(model, **wanted)
    plan = plan_pipeline(traced, Cluster.parse(cluster), time_limit=20, **options)
    step = PipelineStep(plan)
    state = step.init(work.init, jax.random.key(0))
    assert_sent_without_the_host(step.executor)
    return plan, step, same_steps(work, step, state, step.gather)


def assert_sent_without_the_host(executor):
    """Every shard of what is received is a shard of what is sent."""
    for v, others in executor.staged.sends.items():
        source = executor.places.source[v]
        for p in others:
            shape = v.aval.shape
            sent = named_sharding(executor.sites[source].mesh, executor.places.sent[v, p])
            got = named_sharding(executor.sites[p].mesh, executor.places.spec(v, p))
            known = sent.devices_indices_map(shape).values()
            assert set(map(str, got.devices_indices_map(shape).values())) <= set(map(str, known))


def test_unequal_stages(tmp_path):
    wanted = dict(tx=CLIP)
    plan, step, _ = run_planned("tower", wanted, stages=3, submeshes=(1, 2, 4))
    assert plan.devices == (1, 2, 4)
    homes = {len(mesh.devices.flat) for mesh in step.meshes}
    assert homes == {1, 2, 4}
    for n, each in enumerate(plan.plans):  # what the tasks cost is what the stage step costs
        seconds = task_seconds(plan.parts.staged, plan.parts.steps[n], plan.parts.planned[n])
        parts = [s if where == OUTSIDE else s * plan.micro for where, s in seconds.items()]
        np.testing.assert_allclose(sum(parts), each.predicted.seconds, rtol=1e-6)
        assert seconds[n, "F"] > 0 and seconds[OUTSIDE] > 0
    plan.save(tmp_path / "plan.json")
    read = PipelinePlan.load(tmp_path / "plan.json")
    assert read == plan
    again = with_step(read, traced_of("tower", **wanted)[1])
    assert again.parts.planned[2].layouts() == plan.parts.planned[2].layouts()
    with pytest.raises(PlanError, match="needs its step"):
        PipelineStep(read)


def test_a_stage_on_all_devices():
    """What a tied first and last layer do is cut over all devices, between the others' ticks."""
    _, traced = traced_of("tower")
    graph = build(traced)
    units = units_of(traced, graph, 0, dict(batch_of(graph, 0, traced.losses[0])))
    lines = [op_assign(region(layers=k), Stage(p)) for k, p in enumerate((0, 1, 2, 0))]
    cut = cut_by_lines(traced, graph, units, 0, lines)
    options = dict(stages=cut, submeshes=(ALL, 2, 2), order="interlaced", micro=4)
    plan, _, state = run_planned("tower", {}, **options)
    assert plan.devices == (4, 2, 2) and plan.first == (0, 0, 2)
    wide = [t for t in plan.order[0] if t.stage in (0, 3) and t.phase in "FB"]
    assert wide == [t for t in plan.order[1] if t.stage in (0, 3) and t.phase in "FB"]
    assert len(state.params[0].sharding.device_set) == 4
    console = Console(record=True, width=100, file=io.StringIO())
    plan.show(console)
    rows = [line.split()[:2] for line in console.export_text().splitlines()[2:6]]
    assert rows == [["0", "0-3"], ["1", "0-1"], ["2", "2-3"], ["3", "0-3"]]


def test_a_tied_model():
    run_planned("gpt", dict(layers=2, tx=optax.sgd(0.1)), stages=2, submeshes=(2, 4))


def test_scanned_layers_in_a_random_order():
    _, _, cut = cut_of("llama", 2, **SCANNED)
    _, step, state = run_planned("llama", SCANNED, stages=2, order=random_order(cut, 1))
    stacked = state.params["layers"]["gate"]["kernel"]
    assert isinstance(stacked, Rows) and stacked.shape == (3, 16, 32)
    again = step.place(jax.tree.map(jnp.asarray, step.gather(state)))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state)):
        assert a.sharding == b.sharding and (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "wanted", "options"),
    [
        ("gpt", dict(layers=4), dict(stages=4, order="gpipe", micro=4)),
        ("gpt", dict(layers=4), dict(stages=4, order="1f1b", micro=4)),
        ("gpt", dict(layers=2, batch=16), dict(stages=2, order="zero-bubble", micro=4)),
        ("gpt", dict(layers=2, remat=True), dict(stages=2, order="1f1b")),
        ("gpt", dict(layers=2, batch=16), dict(stages=2, order="1f1b", lanes=4)),
        ("llama", dict(layers=4, scan=False), dict(stages=4, order="1f1b")),
        ("llama", dict(layers=4, remat=True, tx=CLIP), dict(stages=4, order="1f1b")),
        ("llama", dict(layers=3), dict(stages=2, order="gpipe", submeshes=(2, 4))),
    ],
)
def test_same_numbers(model, wanted, options):
    run_planned(model, wanted, **options)


# -- what is refused -------------------------------------------------------------------------------


def test_refusals(monkeypatch):
    work, traced = traced_of("gpt", layers=2)
    cluster = Cluster.parse("cpu:2")
    with pytest.raises(RewriteError, match="a factor of 8 does not divide into 3 parts"):
        plan_pipeline(traced, cluster, stages=2, micro=3)
    with pytest.raises(RewriteError, match="on no stage"):
        plan_pipeline(traced, cluster, stages=Stages(0, ((4, 0, 0), (9, 0, 1))), micro=2)
    with pytest.raises(ConstraintError, match="needs its stages"):
        plan_pipeline(traced, cluster, micro=2)
    with pytest.raises(PlanError, match=r"jaxscaler\.value_and_grad"):
        plan_pipeline(trace(work.step, work.state, work.batch), cluster, stages=2, micro=2)
    with pytest.raises(InfeasibleError, match="stage 0 on cpu:2"):
        plan_pipeline(traced, cluster, stages=2, micro=2, memory=1e-9)
    _, _, cut = cut_of("gpt", 2, layers=2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(PlanError, match="as one program"):
        Executor(cut, [], gpipe(2, 2))


def test_a_loss_that_couples_samples():
    def step(w, x):
        return value_and_grad(lambda w: jnp.sqrt(jnp.square(jnp.tanh(x @ w) @ w).sum()))(w)

    traced = trace(step, jnp.zeros((4, 4)), jnp.zeros((8, 4)))
    with pytest.raises(RewriteError, match=r"`sqrt` at .*not affine"):
        plan_pipeline(traced, Cluster.parse("cpu:2"), stages=2, micro=2)


# -- places ----------------------------------------------------------------------------------------


def test_a_stage_priced_alone():
    """The same price as in the whole pipeline, but for what its neighbours decide."""
    _, traced = traced_of("tower")
    batch = batch_of(build(traced), 0, traced.losses[0])
    cluster = Cluster.parse("cpu:1")
    whole = plan_pipeline(traced, Cluster.parse("cpu:2"), stages=2, micro=2, submeshes=(1, 1))
    (_, _, _), (equation, trip, _) = whole.changes[0].points
    options = dict(micro=2, batch=batch)
    works = [
        price_stage(traced, cluster, begin=(0, 0), end=(equation, trip), **options)[0],
        price_stage(traced, cluster, begin=(equation, trip), end=None, **options)[0],
    ]
    for alone, within in zip(works, whole.pipeline.stages):
        for name in ("forward", "backward", "update", "kept", "static"):
            np.testing.assert_allclose(getattr(alone, name), getattr(within, name), rtol=1e-6)


def test_common_specs():
    ours, theirs = {"a": 2, "b": 2}, {"c": 4, "d": 2}
    cut = ((("a", "b"), ()), ours)
    assert common_specs(2, cut, ((("c",), ("d",)), theirs)) == ((("a", "b"), ()), (("c",), ()))
    assert common_specs(2, cut, ((("d",), ("c",)), theirs)) == ((("a",), ()), (("d",), ()))
    assert common_specs(2, cut, (((), ("c",)), theirs)) == (((), ()), ((), ()))


def test_parts_of_a_cluster():
    cluster = Cluster.parse("h100:8x2")
    parts = sub_clusters(cluster, (2, 6, 8))
    assert [[level.size for level in part.levels] for part in parts] == [[2], [6], [1, 8]]
    assert link_between(cluster, 0, 2) == cluster.levels[1].link
    assert link_between(cluster, 2, 8) == cluster.levels[0].link
    with pytest.raises(ClusterError, match="devices 6 to 9"):
        sub_clusters(cluster, (6, 4))
    with pytest.raises(ClusterError, match="has 16"):
        sub_clusters(cluster, (16, 1))


@pytest.mark.slow
def test_the_front_door():
    from jaxscaler import parallelize

    work = WORKLOADS["gpt"](layers=2)
    lines = [op_assign(region(layers=k), Stage(k)) for k in (0, 1)]
    step = parallelize(
        marked(work), cluster="cpu:4", constraints=lines, micro_batches=2, schedule="1f1b"
    )
    assert isinstance(step, PipelinedStep)
    state = step.init(work.init, jax.random.key(0), batch=work.batch)
    same_steps(work, step, state, step.gather)
