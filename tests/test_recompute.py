"""Recomputation: the same numbers whatever is kept; searched with the layouts in one problem."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import candidate_meshes
from jaxscaler.compare import compare
from jaxscaler.cost.memory import enclosing, live_buffers, rules_for
from jaxscaler.cost.schedule import BESIDE, schedule
from jaxscaler.errors import InfeasibleError, OutOfTimeError
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.labels import factor_labels
from jaxscaler.lower.device import device_graph
from jaxscaler.plan import Plan
from jaxscaler.planner import follow_plan, plan_step
from jaxscaler.recipes import RECIPES
from jaxscaler.replan import Again, plan_with_recomputation
from jaxscaler.report.memory import graph_memory
from jaxscaler.rewrite.apply import changed, flat, named, results_of
from jaxscaler.rewrite.changes import Recompute, Segment
from jaxscaler.solve import solve
from jaxscaler.space.build import build_space
from jaxscaler.space.kept import pairs_of
from jaxscaler.space.price import price
from jaxscaler.space.problem import model
from jaxscaler.space.recompute import changes_of
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import trace
from jaxscaler.why import Session
from models import gpt, llama, workload

CLUSTER = Cluster.parse("h100:8")


# -- the same numbers ---------------------------------------------------------------------------


@jax.custom_vjp
def steep(x):
    return jnp.tanh(x)


steep.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (3.0 * d * jnp.cos(x),))  # not the true one


def random_loss(seed):
    """A random program of a few layers: products, a custom rule, a scan, a branch, dropout."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(6, size=5)

    def loss(ws, x, key):
        for i, kind in enumerate(kinds):
            w = ws[i]
            if kind == 0:
                x = steep(x @ w)
            elif kind == 1:
                x = x + jax.nn.gelu(x @ w)
            elif kind == 2:
                x, ys = jax.lax.scan(lambda c, _, w=w: (jnp.sin(c @ w), c[0]), x, None, length=3)
                x = x + jnp.mean(ys)
            elif kind == 3:
                x = jax.lax.cond(jnp.sum(x) > 0, jnp.sin, lambda x, w=w: x @ w, x)
            elif kind == 4:
                keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
                x = jnp.where(keep, 2 * (x @ w), 0.0)
            else:
                x = jax.nn.softmax(x @ w) @ w.T
        return jnp.mean(x**2)

    return loss


def random_changes(closed, seed):
    """Disjoint segments and what they keep, at the top level and in the bodies of scans."""
    rng = np.random.default_rng(seed)
    bodies = [((), closed.jaxpr.eqns)]
    bodies += [
        ((i, 0), eqn.params["jaxpr"].jaxpr.eqns)
        for i, eqn in enumerate(closed.jaxpr.eqns)
        if eqn.primitive.name == "scan"
    ]
    changes, inside = [], []
    for key, eqns in reversed(bodies):
        cuts = sorted(rng.choice(len(eqns) + 1, min(4, len(eqns) + 1), replace=False).tolist())
        for a, b in zip(cuts[::2], cuts[1::2]):
            if not key and any(a <= i < b for i in inside):
                continue  # a changed body stays at the top level
            spots = [(i, r) for i in range(a, b) for r in range(len(eqns[i].outvars))]
            keep = [s for s in spots if rng.random() < 0.3 and _is_float(eqns, s)]
            changes.append(Recompute(Segment(0, a, b - 1, key), tuple(keep)))
            inside += key[:1]
    return changes


def _is_float(eqns, spot):
    return jnp.issubdtype(eqns[spot[0]].outvars[spot[1]].aval.dtype, jnp.floating)


@pytest.mark.parametrize("seed", range(4))
def test_any_segments_and_kept_values_give_the_same_numbers(seed):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        ws = [jnp.array(rng.standard_normal((4, 4))) for _ in range(5)]
        args = (ws, jnp.array(rng.standard_normal((3, 4))), jax.random.key(seed))
        loss = random_loss(seed)
        closed = named(flat(jax.make_jaxpr(loss)(*args)), 0)
        expected = jax.jit(jax.value_and_grad(loss))(*args)
        changes = random_changes(closed, seed)
        assert changes

        def rewritten(*args):
            return changed(closed, changes)(*jax.tree.leaves(args))[0]

        found = jax.jit(jax.value_and_grad(rewritten))(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "name", ["exp", "exp2", "expm1", "logistic", "rsqrt", "sqrt", "tan", "tanh"]
)
def test_a_kept_result_is_what_its_own_derivative_reads(name):
    """So that it is not made again for it; and the numbers are the same."""
    function = getattr(jax.lax, name)

    def loss(w, x):
        return jnp.sum(function(jnp.abs(x @ w) + 1.5) ** 2)

    w, x = jnp.full((4, 4), 0.3), jnp.full((3, 4), 0.1)
    closed = named(flat(jax.make_jaxpr(loss)(w, x)), 0)
    eqns = closed.jaxpr.eqns
    (i,) = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == name]
    rewritten = changed(closed, [Recompute(Segment(0, 0, len(eqns) - 1), ((i, 0),))])
    grad = jax.grad(lambda *args: rewritten(*args)[0])
    assert str(jax.make_jaxpr(grad)(w, x)).count(f"= {name}") == 1
    np.testing.assert_allclose(grad(w, x), jax.grad(loss)(w, x), rtol=1e-6)


def test_changes_of_another_step_are_refused():
    closed = flat(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(1.0))
    run = partial(changed, closed)
    with pytest.raises(js.PlanError, match="overlaps"):
        run([Recompute(Segment(0, 0, 1)), Recompute(Segment(0, 1, 1))])(1.0)
    with pytest.raises(js.PlanError, match="goes past the 2 equations"):
        run([Recompute(Segment(0, 0, 2))])(1.0)
    with pytest.raises(js.PlanError, match="makes no result 3"):
        run([Recompute(Segment(0, 0, 1), kept=((1, 3),))])(1.0)
    with pytest.raises(js.PlanError, match="no such bodies"):
        run([Recompute(Segment(0, 0, 1, (1, 0)))])(1.0)


# -- searched -----------------------------------------------------------------------------------


def layers(count, d=256, f=1024):
    """(parameters, step) of residual layers x + gelu(x up) down, the loss marked."""

    def loss(params, x):
        for p in params:
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.mean(x**2)

    def step(params, x):
        value, grads = js.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    one = {"up": jax.ShapeDtypeStruct((d, f), "float32"),
           "down": jax.ShapeDtypeStruct((f, d), "float32")}  # fmt: skip
    return [one] * count, step


def model_of(traced, again=None):
    graph = build(traced)
    folded = fold(graph)
    shared = frozenset() if again is None else again.shared(folded)
    space = build_space(graph, folded, factor_labels(graph, folded), shared)
    lives = live_buffers(graph, folded, rules_for(CLUSTER.device.vendor))
    return model(graph, folded, space, lives)


def again_of(traced, segments, vendor=""):
    """(Again, the model of the step with all segments recomputed, what can be kept)."""
    changed_step = traced.changed([Recompute(s) for s in segments])
    results = {
        s: results_of(traced.losses[s.loss], s.inside)[s.first : s.last + 1] for s in segments
    }
    rules = rules_for(CLUSTER.device.vendor)
    again = Again(segments, pairs_of(build(changed_step), segments, results, rules))
    return again, *again.on(model_of(changed_step, again), vendor)


def cheapest(found, mesh, limit):
    priced = price(found, mesh, CLUSTER.device, limit)
    solution = solve(priced.problem, work_limit=20.0)
    cost = None if solution.cost is None else solution.cost * priced.unit
    return priced, solution, cost


def test_optimum_equals_enumeration_of_kept_sets():
    """All kept sets of a small step, each traced and planned: none is cheaper than the search."""
    params, step = layers(2)
    traced = trace(step, params, jax.ShapeDtypeStruct((1 << 17, 256), "float32"))
    plain = model_of(traced)
    mesh = candidate_meshes(CLUSTER)[0]
    segments = segmentations(plain.graph, plain.folded)[-1][:1]
    again, space, what = again_of(traced, segments)
    assert len(again.pairs) >= 2
    _, free, _ = cheapest(plain, mesh, None)
    for share in (0.85, 0.7):
        limit = int(share * free.peak_usage) + plain.fixed_bytes
        priced, solution, cost = cheapest(space, mesh, limit)
        spots = sorted({(p.equation, p.result) for p in again.pairs})
        best = np.inf
        for n in range(len(spots) + 1):
            for kept in itertools.combinations(spots, n):
                one = model_of(traced.changed([Recompute(segments[0], kept)]))
                best = min(best, cheapest(one, mesh, limit)[2] or np.inf)
        best = min(best, cheapest(plain, mesh, limit)[2] or np.inf)
        if cost is None:
            assert best == np.inf
            continue
        assert cost == pytest.approx(best, rel=0.02)
        changes = changes_of(what, priced, solution.choice)
        assert cheapest(model_of(traced.changed(changes)), mesh, limit)[2] == pytest.approx(
            best, rel=0.02
        )


def language_model(module, size, tools=js, **sizes):
    w = module.workload(size, **sizes)

    def step(state, batch):
        def loss(params):
            logits = state.apply_fn({"params": params}, batch["inputs"])
            return workload.cross_entropy(logits, batch["targets"])

        value, grads = tools.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return w, step


TINY = {
    "gpt": partial(language_model, gpt, "tiny", batch=64, layers=3, vocab=64),
    "llama-scan": partial(language_model, llama, "tiny", batch=64, layers=4, vocab=64, scan=True),
}


def three_layers():
    """(step, parameters, samples, what plain jit makes of them), in the precision that is set."""
    _, step = layers(3)
    keys = jax.random.split(jax.random.key(0), 7)
    params = [
        {"up": 0.1 * jax.random.normal(a, (8, 32)), "down": 0.1 * jax.random.normal(b, (32, 8))}
        for a, b in zip(keys[:3], keys[3:6])
    ]
    x = jax.random.normal(keys[6], (16, 8))
    return step, params, x, jax.jit(step)(params, x)


def test_a_recomputed_step_computes_the_same():
    """On 8 devices, in float64."""
    with jax.enable_x64(True):
        step, params, x, expected = three_layers()
        lines = [js.op_assign(js.values(role="activation"), js.NOWHERE)]
        planned = js.parallelize(step, cluster="cpu:8", mesh={"d": 8}, constraints=lines)
        found = planned(params, x)
        assert planned.plan.changes
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama-scan"])
def test_recomputed_steps_compute_the_same(name, tmp_path):
    """On 8 devices, in float64: searched under a limit that nothing else fits.

    And the same step from a file.
    """
    with jax.enable_x64(True):
        w, step = TINY[name](dtype="float64")
        _, without = TINY[name](dtype="float64", tools=jax)
        options = dict(cluster="cpu:8", mesh={"d": 8}, time_limit=20)
        free = js.plan(step, w.state, w.batch, **options)
        share = {"gpt": 0.7, "llama-scan": 0.6}[name]
        options["memory"] = share * free.predicted.peak_bytes / 2**33
        with pytest.raises(js.InfeasibleError, match="value_and_grad"):
            js.plan(without, w.state, w.batch, **options)
        planned = js.parallelize(step, **options)
        state = planned.init(w.init, jax.random.key(0), batch=w.batch)
        plan = planned.plan
        assert plan.changes
        assert plan.predicted.peak_bytes <= plan.predicted.limit_bytes
        batch = w.make_batch(0)
        expected, metrics = jax.jit(without)(w.init(jax.random.key(0)), batch)
        state, found = planned(state, batch)
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-9)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        follower = follow_plan(planned._trace((w.state, w.batch), {}), loaded)
        assert follower.traced.changes == plan.changes
        with pytest.raises(js.PlanError, match="value_and_grad"):
            follow_plan(trace(without, w.state, w.batch), loaded)


# -- said ---------------------------------------------------------------------------------------


def test_what_is_assigned_nowhere_is_not_kept():
    params, step = layers(3)
    x = jax.ShapeDtypeStruct((1024, 256), "float32")
    hidden = js.values(role="activation", primitive="dot_general")
    line = js.op_assign(hidden, js.NOWHERE)
    traced = trace(step, params, x)
    plan = plan_step(traced, CLUSTER, constraints=[line], time_limit=5).plan
    assert plan.changes and "dot_general" not in kept_by(plan, traced)
    assert str(line) in plan.constraints
    with pytest.raises(js.ConstraintError, match="value_and_grad"):
        plan_step(trace(lambda w: w * 2, x), CLUSTER, constraints=[line])
    other = js.op_assign(js.values(role="activation", path="nothing_like_it"), js.NOWHERE)
    with pytest.raises(js.ConstraintError, match="selects no activation"):
        plan_step(traced, CLUSTER, constraints=[other], time_limit=5)


def kept_by(plan, traced):
    """Primitives of what the segments of a plan keep."""
    eqns = traced.losses[0].eqns
    return {eqns[i].primitive.name for c in plan.changes for i, _ in c.kept}


def test_what_may_not_go_nowhere_is_kept():
    """Beside a line that has all else made again, or nothing would be."""
    params, step = layers(3)
    traced = trace(step, params, jax.ShapeDtypeStruct((1024, 256), "float32"))
    lines = [
        js.forbid(js.op_assign(js.values(role="activation", primitive="dot_general"), js.NOWHERE)),
        js.op_assign(js.values(role="activation", primitive="tanh"), js.NOWHERE),
    ]
    plan = plan_step(traced, CLUSTER, constraints=lines, time_limit=5).plan
    assert plan.changes
    for change in plan.changes:
        eqns = traced.losses[0].eqns
        inside = range(change.segment.first, change.segment.last + 1)
        read_later = {i for i in inside if eqns[i].primitive.name == "dot_general"}
        kept = {i for i, _ in change.kept}
        assert kept & read_later and not any(eqns[i].primitive.name == "tanh" for i in kept)
    both = [lines[0], js.op_assign(lines[0].subject, js.NOWHERE)]
    with pytest.raises(js.JaxscalerError, match=r"nor does one that recomputes|clash"):
        plan_step(traced, CLUSTER, constraints=both, time_limit=5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["recompute_all", "recompute_selective"])
def test_recipes_say_what_is_made_again(recipe):
    w, step = TINY["gpt"]()
    traced = trace(step, w.state, w.batch)
    plan = plan_step(traced, CLUSTER, constraints=RECIPES[recipe](), time_limit=20).plan
    eqns = traced.losses[0].eqns
    kept = [eqns[i].outvars[r].aval.shape for c in plan.changes for i, r in c.kept]
    assert plan.changes and not any(shape[-1] == shape[-2] for shape in kept if len(shape) == 4)
    if recipe == "recompute_all":
        assert not kept


def test_recomputation_is_compared_and_asked_for_on_a_marked_step():
    params, step = layers(3)
    traced = trace(step, params, jax.ShapeDtypeStruct((1024, 256), "float32"))
    plan = plan_step(traced, CLUSTER, time_limit=5).plan
    programs = {"again": RECIPES["recompute_all"](), "zero_3": RECIPES["zero_3"]()}
    found = {row.name: row.plan for row in compare(plan, programs)}
    assert found["again"].changes and not kept_by(found["again"], traced)
    assert not found["zero_3"].changes
    assert found["again"].predicted.seconds > found["searched"].predicted.seconds
    asked = plan.what_if(RECIPES["recompute_all"]()[0])
    assert asked.after.changes == found["again"].changes and asked.changed()
    assert "NOWHERE" in str(asked)


def test_comparing_with_recomputation_says_what_it_needs():
    x = jax.ShapeDtypeStruct((1024, 256), "float32")
    plan = plan_step(trace(lambda w: w * 2, x), CLUSTER, time_limit=5).plan
    rows = compare(plan, {"recompute_all": RECIPES["recompute_all"]()})
    (row,) = [row for row in rows if row.plan is None]
    assert "NOWHERE" in row.reason and "value_and_grad" in row.reason


# -- weight gradients in time -------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_parallel_layers():
    """Five residual layers, all made again, data parallel on 8 devices."""
    params, step = layers(5)
    traced = trace(step, params, jax.ShapeDtypeStruct((1 << 14, 256), "float32"))
    lines = [*RECIPES["data_parallel"](), *RECIPES["recompute_all"]()]
    return plan_step(traced, CLUSTER, constraints=lines, time_limit=10)


def test_a_segment_waits_for_the_gradients_of_the_one_before_the_last(data_parallel_layers):
    graph = data_parallel_layers.graph
    count = len(data_parallel_layers.plan.changes)
    assert len(graph.barriers) == count - 2 >= 2  # of the last two nothing comes after
    order = [c.segment for c in reversed(data_parallel_layers.plan.changes)]

    def segment(op):
        key = graph.ops[op].origin.key[0]
        return next((n for n, s in enumerate(order) if s.first <= key <= s.last), None)

    for n, barrier in enumerate(graph.barriers):
        made = [int(graph.makers[v, 0]) for v in barrier.values]
        assert all(o < barrier.at for o in made)
        gradients = [o for o in made if graph.values[graph.ops[o].outputs[0]].shape in SHAPES]
        assert {segment(o) for o in gradients} == {n} and len(gradients) == 2
        assert segment(barrier.at) == n + 2


SHAPES = ((256, 1024), (1024, 256))  # of the weights of `layers`


def test_gradients_in_time_take_less_memory(data_parallel_layers):
    p = data_parallel_layers
    local = device_graph(p.graph, p.folded, p.space, p.plan.axes, p.rows)
    rules = rules_for("NVIDIA")
    held = graph_memory(local, rules).peak
    late = graph_memory(replace(local, barriers=()), rules).peak
    assert held < 0.8 * late
    places = schedule(
        local,
        ["fusable" in k.traits for k in local.kinds],
        ["heavy" in k.traits for k in local.kinds],
        enclosing(local),
        BESIDE,
    ).place
    for barrier in local.barriers:
        assert all(places[local.makers[v, 0]] < barrier.at for v in barrier.values)


def test_a_barrier_reduces_partial_sums_once(data_parallel_layers):
    """The partitioner finds what was planned: no sum is reduced twice, or behind a barrier."""
    found = data_parallel_layers.plan.audit()
    assert found.agreement > 0.99, str(found)


# -- what a search may cost ---------------------------------------------------------------------


def searches(outcomes):
    """A `search` for `plan_with_recomputation` that comes to one outcome after another."""
    calls = []

    def search(traced, graph, program, memory, time_limit, again=None, mesh=None):
        calls.append(again)
        raise outcomes[min(len(calls), len(outcomes)) - 1]

    return search, calls


@pytest.mark.parametrize(
    ("outcomes", "kind", "text"),
    [
        ([InfeasibleError("too big")], InfeasibleError, "nor does one that recomputes: too big"),
        ([InfeasibleError("too big"), OutOfTimeError("late")], OutOfTimeError, "longer time_limit"),
        ([OutOfTimeError("late"), InfeasibleError("too big")], OutOfTimeError, "longer time_limit"),
    ],
)
def test_a_search_without_time_says_nothing_of_what_fits(outcomes, kind, text):
    params, step = layers(3)
    traced = trace(step, params, jax.ShapeDtypeStruct((64, 256), "float32"))
    search, calls = searches(outcomes)
    rules = rules_for(CLUSTER.device.vendor)
    with pytest.raises(InfeasibleError) as error:
        plan_with_recomputation(
            search, traced, build(traced), (), 0.9, 1.0, rules, lambda phase, detail: None
        )
    assert type(error.value) is kind and text in str(error.value)
    assert len(calls) >= 2


def test_a_step_that_fits_is_searched_once(monkeypatch):
    params, step = layers(3)
    traced = trace(step, params, jax.ShapeDtypeStruct((1024, 256), "float32"))
    found = []
    once = Session.search
    monkeypatch.setattr(Session, "search", lambda *a, **k: found.append(1) or once(*a, **k))
    plan = plan_step(traced, CLUSTER, time_limit=5).plan
    assert found == [1] and not plan.changes
