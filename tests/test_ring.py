"""A scan over layers as a pipeline in one program: the same numbers, its price, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting import loss_of, plain, pull, same
from test_coshard import marked

import jaxscaler as js
from jaxscaler import _compat
from jaxscaler.cluster import Cluster
from jaxscaler.errors import PlanError, RewriteError
from jaxscaler.grad import with_changes
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.plan import Plan
from jaxscaler.planner import plan_step
from jaxscaler.program import ALL, ANY, Split, op_assign, op_trans, ops
from jaxscaler.recipes import COMPUTE
from jaxscaler.rewrite.apply import changed, flat
from jaxscaler.rewrite.changes import (
    Accumulate,
    Fission,
    Recompute,
    Ring,
    Segment,
    from_data,
    to_data,
)
from jaxscaler.rewrite.ring import ring, rings, shift
from jaxscaler.space.annotations import Author
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import trace
from models import gpt, llama, t5
from models.workload import cross_entropy

LAYERS, BATCH, SIZE = 4, 8, 3


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def stack(layer=None, **options):
    """(the equation of a scan over layers, its arguments): weights, a bias for all, a memory of
    the batch, a number of the layer; the batch is dim 1."""

    def run(bias, memory, x, weights):
        def one(carry, w):
            x, number = carry
            x = jnp.tanh(jnp.einsum("sbd,de->sbe", x, w) + bias * (number + 1))
            x = x + jnp.einsum("sbd,tbd->stb", x, memory).mean(1)[..., None]
            return (x, number + 1), None

        return jax.lax.scan(layer or one, (x, 0), weights, **options)

    rng = np.random.default_rng(0)
    shapes = (SIZE,), (2, BATCH, SIZE), (2, BATCH, SIZE), (LAYERS, SIZE, SIZE)
    args = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]
    jaxpr = jax.make_jaxpr(run)(*args).jaxpr
    (eqn,) = jaxpr.eqns
    given = dict(zip(jaxpr.invars, args))
    return eqn, [v.val if hasattr(v, "val") else given[v] for v in eqn.invars]


@pytest.mark.parametrize(
    ("stages", "micro", "again", "lanes"),
    [
        (4, 8, True, 1),
        (2, 4, False, 2),
        pytest.param(2, 2, True, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, False, 1, marks=pytest.mark.slow),
    ],
)
def test_same_numbers(stages, micro, again, lanes):
    eqn, args = stack()
    change = Ring(0, 0, stages, micro, (0, 1), again, lanes)

    def whole(*args):
        return eqn.primitive.bind(*args, **eqn.params)

    made = ring(eqn, change)(*args)
    assert made[1] == LAYERS
    same(pull(whole, args), pull(ring(eqn, change), args))
    text = str(jax.make_jaxpr(ring(eqn, change))(*args))
    assert f"length={micro + stages - 1}" in text and f"length={LAYERS // stages}" in text
    assert ("checkpoint" in text or "remat" in text) == again


def test_what_idle_stages_work_on_is_finite():
    """A layer that has no number at zero poisons neither results nor gradients."""

    def layer(carry, w):
        x, number = carry
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w, number + 1), None

    eqn, args = stack(layer)
    made, grads = pull(ring(eqn, Ring(0, 0, 4, 4, (0, 1))), args)
    assert all(jnp.isfinite(x).all() for x in (*made, *grads))
    same((made, grads), pull(lambda *args: eqn.primitive.bind(*args, **eqn.params), args))


def mean(carry, w):
    x, number = carry
    return (x @ w - x.mean(1, keepdims=True), number), None


def sort(carry, w):
    x, number = carry
    return (jnp.sort(x @ w, axis=1), number), None


def stacking(carry, w):
    x, number = carry
    return (x @ w, number), number


@pytest.mark.parametrize(
    ("layer", "change", "says"),
    [
        (None, Ring(0, 0, 3, 2, (0, 1)), "4 layers do not divide into 3 stages"),
        (None, Ring(0, 0, 1, 2, (0, 1)), "do not divide into 1 stages"),
        (None, Ring(0, 0, 2, 3, (0, 1)), "8 does not divide into 3 parts"),
        (None, Ring(0, 0, 2, 4, (0, 1), True, 4), "8 does not divide into 4 parts in 4 lanes"),
        (None, Ring(0, 0, 2, 2, (2, 0)), "has 2 carries"),
        (None, Ring(0, 0, 2, 2, (1, 0)), r"shape \(\) has no dim 0"),
        (None, Ring(0, 0, 2, 3, (0, 2)), "`tanh` at .*test_ring.py.*it reads a sum"),
        (mean, Ring(0, 0, 2, 2, (0, 1)), "`sub` at .*test_ring.py.*meets a part of a sum"),
        (sort, Ring(0, 0, 2, 2, (0, 1)), "`sort` at .* needs the cut dim whole"),
        (stacking, Ring(0, 0, 2, 2, (0, 1)), "stacks a result of every layer"),
    ],
)
def test_refusals(layer, change, says):
    eqn, _ = stack(layer)
    with pytest.raises(RewriteError, match=says):
        ring(eqn, change)


def test_refusals_of_other_loops():
    eqn, _ = stack(reverse=True)
    with pytest.raises(RewriteError, match="from the last layer to the first"):
        ring(eqn, Ring(0, 0, 2, 2, (0, 1)))

    def run(x, inputs):
        return jax.lax.scan(lambda x, y: (x + y, None), x, inputs)

    (eqn,) = jax.make_jaxpr(run)(jnp.zeros((4, 2)), jnp.zeros((6, 4, 2))).jaxpr.eqns
    with pytest.raises(RewriteError, match="a layer reads a part of the batch of its own"):
        ring(eqn, Ring(0, 0, 2, 2))
    with pytest.raises(RewriteError, match="equation 0 is a add, no scan"):
        ring(jax.make_jaxpr(lambda x: x + 1)(1.0).jaxpr.eqns[0], Ring(0, 0, 2, 2))


def scan_of(closed):
    return next(i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive.name == "scan")


@pytest.fixture(scope="module")
def of_t5():
    """(the loss of a tiny T5 as a flat jaxpr of its parameters, their types)."""
    with jax.enable_x64(True):
        work = t5.workload(dtype="float64", batch=4, seq=4, scan=True)
        batch = work.make_batch()

        def loss(params):
            outputs = work.state.apply_fn({"params": params}, batch["inputs"], batch["begun"])
            return [cross_entropy(outputs, batch["targets"])]

        leaves, tree = jax.tree.flatten(work.state.params)
        closed = jax.make_jaxpr(lambda *args: loss(jax.tree.unflatten(tree, args)))(*leaves)
        return flat(closed), leaves


def test_found_and_refused(of_t5):
    """Of a T5 both stacks; the decoder's reads the batch as a constant, too."""
    closed, _ = of_t5
    found, refused = rings(0, closed, 2, 2)
    assert [c.seed for c in found] == [(0, 0), (0, 0)] and refused == []
    assert len({c.scan for c in found}) == 2
    found, refused = rings(0, closed, 3, 2)
    assert found == [] and all("2 layers do not divide into 3" in why for why in refused)
    assert len(refused) == 2


@pytest.mark.slow
def test_both_stacks_of_an_encoder_and_decoder(of_t5):
    closed, types = of_t5
    rng = np.random.default_rng(0)
    leaves = [0.2 * rng.standard_normal(leaf.shape) for leaf in types]
    found, _ = rings(0, closed, 2, 4)
    same(grads(plain(closed), leaves), grads(changed(closed, found), leaves))


def grads(function, args):
    return jax.jit(jax.value_and_grad(lambda args: function(*args)[0]))([*map(jnp.asarray, args)])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (2, 8), (4, 4)])
def test_models(model, stages, micro):
    """Also with layers of which some values are kept."""
    closed, leaves, batch = loss_of(model, layers=4, scan=True, batch=8, seq=8)
    scan = scan_of(closed)
    last = len(closed.jaxpr.eqns[scan].params["jaxpr"].jaxpr.eqns) - 1
    fixed = {i: leaves[i] for i in batch}

    def of(function):
        moving = [x for i, x in enumerate(leaves) if i not in fixed]

        def filled(*args):
            rest = iter(args)
            return function(*(fixed[i] if i in fixed else next(rest) for i in range(len(leaves))))

        return grads(filled, moving)

    again = Recompute(Segment(0, 0, last, (scan, 0)))
    want, change = of(plain(closed)), Ring(0, scan, stages, micro, again=False)
    same(want, of(changed(closed, [change])))
    same(want, of(changed(closed, [change, again])))


def test_a_scan_is_cut_in_one_way(of_t5):
    closed, _ = of_t5
    scan = scan_of(closed)
    with pytest.raises(PlanError, match="a scan is cut in one way"):
        changed(closed, [Fission(0, scan, (1, 1)), Ring(0, scan, 2, 2)])


@pytest.mark.parametrize("spec", [("a",), (None, "a"), (("a", "b"), "c"), (("a", "b", "c"),)])
def test_every_device_hands_its_edge_to_the_next(spec, devices):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (jax.sharding.AxisType.Auto,) * 3)
    x = jnp.arange(16.0).reshape(8, 2)
    spec = jax.sharding.PartitionSpec(*spec)
    for function in (shift, lambda x: jax.vjp(shift, x)[1](x)[0]):
        eqn = next(
            e
            for e in jax.make_jaxpr(jax.jit(function))(x).jaxpr.eqns[0].params["jaxpr"].eqns[::-1]
            if e.primitive.name == "ring_shift"
        )
        alone = _compat.on_shards(eqn, mesh, [spec], [spec])
        (got,) = jax.jit(plain(alone))(x)
        np.testing.assert_array_equal(got, jnp.roll(x, eqn.params["by"], 0))


# -- planned ---------------------------------------------------------------------------------------

LAYOUT = (("stage", 2), ("data", 2), ("tensor", 2))
PIPELINE = [
    op_assign(op_trans(ops(phase=COMPUTE), Split("stage"), ALL), "stage"),
    op_assign(op_trans(ops(phase=COMPUTE), Split("batch"), ALL), "data"),
    op_trans(ops(primitive="dot_general", parameter="*"), Split(ANY), ALL),
]


def perceptron(layers=4, batch=16, size=8):
    """(a step, what makes its state, a batch): a scan over hidden layers between two others."""

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"in": (size, size), "layers": (layers, size, size), "out": (size, 4)}
        made = {k: jax.random.normal(i, s) for i, (k, s) in zip(keys, shapes.items())}
        return {"params": made}

    def step(state, batch):
        def loss(params):
            x = batch["inputs"] @ params["in"]
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
            return jnp.mean(jnp.square(x @ params["out"] - batch["targets"]))

        value, grads = js.value_and_grad(loss)(state["params"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": new}, {"loss": value}

    rng = np.random.default_rng(0)
    shapes = {"inputs": (batch, size), "targets": (batch, 4)}
    return step, init, {k: rng.standard_normal(shape) for k, shape in shapes.items()}


@pytest.fixture(scope="module")
def scanned():
    with jax.enable_x64(True):
        step, init, batch = perceptron()
        state = jax.eval_shape(init, jax.random.key(0))
        return trace(step, state, jax.eval_shape(lambda: batch))


def ring_in(traced, *numbers, **options):
    (loss,) = traced.losses
    scan = next(i for i, e in enumerate(loss.eqns) if e.primitive.name == "scan")
    return Ring(0, scan, *numbers, **options)


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (2, 4), (4, 2)])
def test_priced_as_so_many_ticks(scanned, stages, micro):
    """The products of the layers take (micro + stages - 1) / micro times what they took."""
    traced = scanned

    def products(traced):
        graph = build(traced)
        ops = [op for op in graph.ops if op.repeat > 1]
        found = [op for op in ops if graph.kinds[op.kind].primitive == "dot_general"]
        return sum(graph.kinds[op.kind].flops * op.repeat for op in found)

    plain, pipeline = (
        products(t) for t in (traced, traced.changed([ring_in(traced, stages, micro, again=False)]))
    )
    np.testing.assert_allclose(pipeline / plain, (micro + stages - 1) / micro, rtol=1e-9)


@pytest.fixture(scope="module")
def planned(scanned):
    with jax.enable_x64(True):
        return plan_step(
            scanned, Cluster.parse("cpu:8"), constraints=PIPELINE, author=Author(LAYOUT),
            loops=[ring_in(scanned, 2, 4, lanes=2)], time_limit=10,
        )  # fmt: skip


def test_layers_lie_on_their_stages(planned):
    plan = planned.plan
    specs = {t.path: t.spec for t in plan.tensors}
    assert "stage" in specs["state/params/layers"][0]
    assert not any("stage" in cut for cut in specs["state/params/layers"][1:])
    hands = [t for t in plan.traffic if t.kind == "collective_permute"]
    assert {t.axis for t in hands} == {"stage"} and sum(t.count for t in hands) == 2 * 5
    # a micro-batch of 4 samples of 8 numbers, in two parts, which tensor parallelism may halve
    assert {t.nbytes for t in hands} <= {4 * 8 * 8 / 2, 4 * 8 * 8 / 4}
    assert Plan.from_dict(plan.to_dict()).changes == plan.changes


@pytest.mark.parametrize("again", [True, False])
def test_what_is_made_again_in_a_layer_can_be_searched(scanned, again):
    """The body of the scan is a segment as it was, unless a stage is made again anyway."""
    change = ring_in(scanned, 2, 4, again=again)

    def segments(traced):
        graph = build(traced)
        return [s for some in segmentations(graph, fold(graph)) for s in some if s.inside]

    plain, pipeline = segments(scanned), segments(scanned.changed([change]))
    assert plain and pipeline == ([] if again else plain)
    traced = scanned.changed([change, *map(Recompute, pipeline)])
    assert sum("rematted" in op.scope for op in build(traced).ops) > 0


def test_one_program_for_devices_that_are_not_there(planned):
    text = planned.lower("tpu").as_text()
    assert text.count("collective_permute") == 2


def test_the_partitioner_agrees(planned):
    assert planned.plan.audit().agreement > 0.95


@pytest.mark.aot
def test_the_compiler_for_gpus_agrees(tmp_path, monkeypatch):
    """One reduction of the gradients by the batch, after the loop; the stages' own axis."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # the suite's are the CPU compiler's
    with jax.enable_x64(False):
        work = llama.workload(layers=4, scan=True, batch=32, seq=32, hidden=128, ffn=256)
        traced = trace(marked(work), work.state, work.batch)
        plan = plan_step(
            traced, Cluster.parse("h100:8"), loops=[ring_in(traced, 4, 4, lanes=2)],
            constraints=PIPELINE[:2], author=Author((("data", 2), ("stage", 4))), time_limit=10,
        ).plan  # fmt: skip
        assert {t.axis for t in plan.traffic if t.kind == "collective_permute"} == {"stage"}
        found = plan.verify(cache=tmp_path)
    assert found.agreement > 0.95, str(found)


def test_same_numbers_on_eight_devices(planned, devices):
    assert_same_numbers(*perceptron(), planned.plan)


def assert_same_numbers(step, init, batch, plan):
    run = js.parallelize(step, cluster="cpu:8", plan=plan)
    state = run.init(init, jax.random.key(0), batch=batch)
    got, metrics = run(state, batch)
    want, expected = jax.jit(step)(jax.jit(init)(jax.random.key(0)), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-9, atol=1e-12)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(jnp.asarray(a), b, rtol=1e-9, atol=1e-12)
    text = run.compiled().compiled.as_text()
    assert text.count(" collective-permute(") + text.count(" collective-permute-start(") >= 2


def test_gradients_accumulate_around_a_pipeline(scanned):
    """Two parts of the batch, one after another, each in two micro-batches."""
    step, init, batch = perceptron()
    (loss,) = scanned.losses
    arguments = enumerate((*loss.constvars, *loss.invars))
    samples = tuple((i, 0) for i, v in arguments if v.aval.shape[0] == len(batch["inputs"]))
    changes = [ring_in(scanned, 2, 2), Accumulate(0, 2, samples)]
    state = init(jax.random.key(0))
    same(jax.jit(with_changes(step, changes))(state, batch), jax.jit(step)(state, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stages", "micro", "lanes", "program"),
    [
        (gpt, 2, 2, 1, PIPELINE),
        (gpt, 4, 8, 1, []),
        (llama, 4, 4, 1, []),
        (llama, 4, 2, 2, []),
    ],
)
def test_same_numbers_of_other_plans(model, stages, micro, lanes, program, devices):
    work = model.workload(layers=4, scan=True, batch=8, seq=8, dtype="float64")
    traced = trace(marked(work), work.state, work.batch)
    plan = plan_step(
        traced, Cluster.parse("cpu:8"), constraints=program, time_limit=10,
        author=Author(LAYOUT) if program else Author(),
        loops=[ring_in(traced, stages, micro, lanes=lanes)],
    ).plan  # fmt: skip
    assert_same_numbers(marked(work), work.init, work.make_batch(), plan)


def test_a_change_as_data():
    change = Ring(0, 3, 4, 8, (1, 0), False, 2)
    assert from_data(to_data(change)) == change
