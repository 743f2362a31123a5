"""The free search finds the best of the whole language: brute force over small steps.

Layouts of every node, meshes, numbers in holes, what is made again, kept or on the host, loops over
parts; each priced by the same cost.
"""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hy
from test_recompute import again_of, layers, model_of

import jaxscaler as js
from jaxscaler import (
    ALL,
    ANY,
    SAME_DEVICE,
    Replicate,
    Split,
    forbid,
    hole,
    if_possible,
    op_assign,
    op_trans,
    ops,
    recipes,
    region,
    values,
)
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import candidate_meshes
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.loops.options import Pick, clash, options
from jaxscaler.planner import plan_step
from jaxscaler.rewrite.changes import Accumulate, Recompute
from jaxscaler.solve import INFINITY, solve
from jaxscaler.space.constraints import Constraints
from jaxscaler.space.price import price
from jaxscaler.space.segments import segmentations
from jaxscaler.trace import trace


def cheapest(problem):
    """The least cost over all choices that fit; inf where none does."""
    sizes = np.diff(problem.node_ptr).tolist()

    def spread(table, *nodes):
        shape = [1] * len(sizes)
        for node in nodes:
            shape[node] = sizes[node]
        return np.where(table >= INFINITY, np.inf, table).reshape(shape)

    total = np.zeros((1,) * len(sizes))
    for i, (lo, hi) in enumerate(itertools.pairwise(problem.node_ptr)):
        total = total + spread(problem.node_costs[lo:hi], i)
    for (i, j), lo, hi in zip(problem.edge_nodes, problem.edge_ptr, problem.edge_ptr[1:]):
        assert i < j
        total = total + spread(problem.edge_costs[lo:hi], i, j)
    if problem.usage_limit is not None:
        for row in range(int(problem.usage_hi.max(initial=0))):
            used = np.zeros((1,) * len(sizes))
            for u, node in enumerate(problem.usage_node):
                if problem.usage_lo[u] <= row < problem.usage_hi[u]:
                    lo, hi = problem.usage_ptr[u : u + 2]
                    used = used + spread(problem.usages[lo:hi], node)
            total = np.where(used > problem.usage_limit, np.inf, total)
    return total.min()


def by_brute_force(session):
    """Seconds of the best plan on any mesh with any numbers in the holes."""
    best = np.inf
    for variant in session.variants(session.bind(session.program)):
        try:
            found = price(
                session.model, variant.mesh, session.cluster.device, int(session.limit),
                variant.keep,
            )  # fmt: skip
        except js.ConstraintError:
            continue
        best = min(best, cheapest(found.problem) * found.unit)
    return best


def by_hand(w, x):
    """A step of least squares, its gradient written out."""
    return w - 0.1 * jnp.einsum("bi,bo->io", x, x @ w)


def by_jax(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


def lookup(w, x):
    """A step whose batch is short, its state long."""
    return w * 0.9 + jnp.sum(x, 0)


STEPS = {  # step, shape of the state and of the batch, cluster
    "by hand": (by_hand, (1024, 512), (64, 1024), "h100:4"),
    "by hand, two nodes": (by_hand, (4096, 512), (4096, 4096), "h100:2x2"),
    "by jax": (by_jax, (1024, 512), (4096, 1024), "h100:2"),
    "lookup": (lookup, (1 << 20,), (4, 1 << 20), "h100:2x2"),
}
n = hole("n", 1, 4)
POOL = [
    op_trans(ops(), Split("batch"), ALL),
    op_trans(ops(primitive="dot_general"), Split(ANY), n),
    op_trans(values(role="parameter"), Split(ANY), n),
    op_trans(values(role="parameter"), Replicate()),
    op_trans(values(role="batch"), Split(0), (1, 2)),
    op_assign(op_trans(values(role="parameter"), Split(0), 2), "device"),
    forbid(op_trans(ops(), Split("contraction"))),
    if_possible(op_trans(ops(), Split(ANY), ALL)),
    n * 2 <= 5,
]


@pytest.fixture(scope="module", params=STEPS)
def session(request):
    step, state, batch, cluster = STEPS[request.param]
    args = (jax.ShapeDtypeStruct(shape, "float32") for shape in (state, batch))
    return plan_step(trace(step, *args), Cluster.parse(cluster)).plan.session


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    program=hy.lists(hy.sampled_from(POOL), max_size=3, unique=True),
    share=hy.sampled_from((1.0, 0.8, 0.6)),
)
@pytest.mark.parametrize("free", [True, False])
def test_no_plan_of_the_language_is_cheaper(session, free, program, share):
    """`share`: of the memory that the free plan takes, as the search counts it."""
    program = () if free else tuple(program)
    took = solve(session.best.priced.problem).peak_usage + session.model.fixed_bytes
    asked = replace(session, program=program, limit=share * took + 1, best=None)
    try:
        best = by_brute_force(asked)
    except js.ConstraintError:  # a hole that stands in no line
        with pytest.raises(js.ConstraintError):
            asked.search(explained=False)
        return
    if best == np.inf:
        with pytest.raises((js.ConstraintError, js.InfeasibleError)):
            asked.search(explained=False)
        return
    found = asked.search(explained=False)
    assert found.status == "optimal"
    assert found.best.seconds == pytest.approx(best, rel=1e-8)


# -- with what is made again ---------------------------------------------------------------------

FOUR = Cluster.parse("h100:4")
PROGRAMS = {
    "free": (),
    "zero": recipes.zero(3),
    "two_d": recipes.two_d(),
    "no sums": (forbid(op_trans(ops(primitive="dot_general"), Split("contraction"))),),
}


def kept(bound, holes, node, rows, mesh):
    return bound.mask(node, rows, mesh, holes)


def best_on_any_mesh(model, program, limit):
    """Seconds of the best plan on any mesh with any numbers in the holes, by the solver."""
    bound = Constraints(program, model.graph, model.folded, model.space)
    best = np.inf
    for mesh in candidate_meshes(FOUR):
        for holes in bound.fillings(mesh):
            keep = partial(kept, bound, holes)
            try:
                found = price(model, mesh, FOUR.device, limit, keep)
            except js.ConstraintError:
                continue
            solution = solve(found.problem, work_limit=20.0)
            assert solution.status in ("optimal", "infeasible")
            if solution.cost is not None:
                best = min(best, solution.cost * found.unit)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_made_again_or_moved_is_cheaper(name):
    """Every set of values kept, made again, or on the host; every mesh; every number in a hole."""
    params, step = layers(2)
    traced = trace(step, params, jax.ShapeDtypeStruct((1 << 17, 256), "float32"))
    plain = model_of(traced)
    segment = segmentations(plain.graph, plain.folded)[-1][0]
    again, space, _ = again_of(traced, (segment,), FOUR.device.vendor)
    spots = sorted({(p.equation, p.result) for p in again.pairs})
    assert 2 <= len(spots) <= 4
    changed = [
        model_of(traced.changed([Recompute(segment, *(tuple(s for s, at in zip(spots, where)
                                                            if at == place) for place in (1, 2)))]))
        for where in itertools.product(range(3), repeat=len(spots))
    ]  # fmt: skip
    whole = price(plain, candidate_meshes(FOUR)[0], FOUR.device, None)
    took = solve(whole.problem).peak_usage + plain.fixed_bytes
    met = 0
    for share in (0.9, 0.75):
        limit = int(share * took)
        models = (plain, *changed)
        best = min(best_on_any_mesh(one, PROGRAMS[name], limit) for one in models)
        found = best_on_any_mesh(space, PROGRAMS[name], limit)
        assert found == pytest.approx(best, rel=0.02)
        met += found < np.inf
    assert met


# -- with loops over parts -----------------------------------------------------------------------

ROWS, WIDTH, WORDS = 2048, 64, 16384  # logits: 134 MB; the head's weights: 4 MB
PARTS = (2, 16)


def entropy(params, batch):
    """Cross entropy over a vocabulary that is large."""
    logits = jnp.tanh(batch["x"] @ params["up"]) @ params["head"]
    right = jnp.take_along_axis(logits, batch["y"][..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


def layered(params, batch):
    """Two layers that are wide inside."""
    x = batch["x"]
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return (x * x).mean()


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def words(*shape):
    return {"x": floats(*shape, WIDTH), "y": jax.ShapeDtypeStruct(shape, "int32")}


HEAD = {"up": floats(WIDTH, WIDTH), "head": floats(WIDTH, WORDS)}
STACK = [(floats(WIDTH, 4096), floats(4096, WIDTH))] * 2  # 134 MB inside of 8192 tokens
NO_SUMS = forbid(op_trans(ops(primitive="dot_general"), Split("contraction")))
NO_CO_SHARD = forbid(op_assign(region(phase="forward"), SAME_DEVICE))
NO_ACCUMULATION = forbid(op_assign(ops(phase=("forward", "backward")), SAME_DEVICE))
LOOPS = {  # loss, parameters, batch, cluster, megabytes, program
    "one text": (entropy, HEAD, words(1, ROWS), "v100-32:1", 160, ()),
    "texts": (entropy, HEAD, words(ROWS), "v100-32:1", 160, ()),
    "texts, co-shards alone": (entropy, HEAD, words(ROWS), "v100-32:1", 160, (NO_ACCUMULATION,)),
    "texts, sums alone": (entropy, HEAD, words(ROWS), "v100-32:1", 160, (NO_CO_SHARD,)),
    "texts on two": (entropy, HEAD, words(ROWS), "v100-32:2", 100, (NO_SUMS,)),
    "layers": (layered, STACK, {"x": floats(1, 8192, WIDTH)}, "v100-32:1", 200, ()),
}  # fmt: skip


def sets_of_loops(traced):
    """Every set of loops that may stand in one step, in each number of parts."""
    graph = build(traced)
    segments = dict.fromkeys(s for some in segmentations(graph, fold(graph)) for s in some)
    offers = list(options(traced, graph, tuple(segments), []))
    for some in itertools.product((1, *PARTS), repeat=len(offers)):
        picks = [Pick(o, n) for o, n in zip(offers, some) if n > 1]
        pairs = itertools.combinations([p.option for p in picks], 2)
        if not any(clash(*pair) for pair in pairs) and all(
            p.option.size % p.parts == 0 for p in picks
        ):
            yield picks


@pytest.mark.parametrize("name", LOOPS)
def test_no_loops_over_parts_are_cheaper(name, monkeypatch):
    """Every set of loops, in two or sixteen parts, each with what else is made again searched."""
    monkeypatch.setattr("jaxscaler.loops.options.PARTS", PARTS)
    loss, params, batch, where, megabytes, program = LOOPS[name]
    cluster = Cluster.parse(where)

    def step(params, batch):
        value, grads = js.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    traced = trace(step, params, batch)
    asked = dict(memory=megabytes * 1e6 / cluster.device.hbm_bytes, time_limit=5, explained=False)
    rest = [line for line in program if line is NO_SUMS]
    seconds = {}
    for picks in sets_of_loops(traced):
        for lanes in {1, cluster.num_devices}:
            if any(p.option.size % (p.parts * lanes) for p in picks) or (lanes > 1 and not picks):
                continue
            changes = [c for p in picks for c in p.changes(lanes)]
            kinds = {isinstance(c, Accumulate) for c in changes}
            if (NO_CO_SHARD in program and False in kinds) or (
                NO_ACCUMULATION in program and True in kinds
            ):
                continue
            try:
                plan = plan_step(traced, cluster, loops=changes, constraints=rest, **asked).plan
            except (js.InfeasibleError, js.RewriteError):  # or loops that do not go together
                continue
            seconds[tuple(map(str, picks)), lanes] = plan.predicted.seconds
    found = plan_step(traced, cluster, loops=True, constraints=program, **asked).plan
    assert len(seconds) > 1 and ((), 1) not in seconds  # nothing fits without
    least = min(seconds.values())
    assert found.predicted.seconds == pytest.approx(least, rel=0.006), (found.changes, seconds)
