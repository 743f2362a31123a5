"""What is offered as a loop over parts, and what a loop is thought to do before it is traced."""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting import plain, pull, same, values_of
from test_recompute import model_of

import jaxscaler as js
from jaxscaler import _compat
from jaxscaler.cost.memory import RULES, buffers
from jaxscaler.graph import kinds
from jaxscaler.graph.build import build
from jaxscaler.loops.options import options
from jaxscaler.rewrite.apply import flat, segment_of
from jaxscaler.rewrite.candidates import candidates, cores
from jaxscaler.rewrite.changes import Recompute, Segment
from jaxscaler.rewrite.chunk import chunked
from jaxscaler.space.loops import reach, with_loops
from jaxscaler.trace import trace

# -- cores -----------------------------------------------------------------------------------------


def attention(x, wq, wk, wv, wo):
    """One sample, attention, and a roll that only whole maps can take."""
    q, k, v = (jnp.einsum("sd,dhe->she", x, w) for w in (wq, wk, wv))
    weights = jax.nn.softmax(jnp.einsum("qhe,khe->hqk", q, k), axis=-1)
    made = jnp.einsum("hqk,khe->qhe", weights, v)
    return x + jnp.roll(jnp.einsum("qhe,hed->qd", made, wo), 3, axis=0)


def mlp(x, up, down):
    return x + jax.nn.gelu(x @ up) @ down


def gated(x, up, gate, down):
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def flat_of(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return flat(jax.make_jaxpr(lambda *args: [function(*args)])(*args))


HEADS = [(8, 2, 4)] * 3 + [(2, 4, 8)]
LAYERS = {
    "attention": (attention, (32, 8), *HEADS),
    "mlp": (mlp, (32, 8), (8, 32), (32, 8)),
    "gated": (gated, (32, 8), (8, 32), (8, 32), (32, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_core_is_the_least_span_over_whose_ends_nothing_wide_flows(name):
    """Against all spans: the shortest one with the largest product in it that neither reads nor
    hands on a value of more than half its size."""
    eqns = flat_of(*LAYERS[name]).jaxpr.eqns
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    size = {v: prod(v.aval.shape) for v in made}
    heavy = [v for v, i in made.items() if eqns[i].primitive.name not in kinds.FUSABLE]
    top = max(heavy, key=lambda v: size[v])
    wide = {v for v in made if 2 * size[v] > size[top]}

    touching = {i: wide & {v for v in (*e.invars, *e.outvars) if not _compat.is_literal(v)}
                for i, e in enumerate(eqns)}  # fmt: skip

    def closed(a, b):
        flows = (made[v] in range(a, b + 1) for i in touching if not a <= i <= b
                 for v in touching[i])  # fmt: skip
        reads = (made[v] in range(a, b + 1) for i in range(a, b + 1) for v in touching[i])
        return a <= made[top] <= b and not any(flows) and all(reads)

    spans = [(a, b) for a in range(len(eqns)) for b in range(a, len(eqns)) if closed(a, b)]
    found = list(cores(eqns, [(0, len(eqns) - 1)]))
    assert found[0] == min(spans, key=lambda span: span[1] - span[0])


def test_a_core_reaches_over_the_border_of_a_segment():
    loss = flat_of(*LAYERS["attention"])
    end = len(loss.jaxpr.eqns) - 1
    (whole,) = cores(loss.jaxpr.eqns, [(0, end)])
    middle = sum(whole) // 2
    halves = [Segment(0, 0, middle), Segment(0, middle + 1, end)]
    found = candidates([loss], halves)
    over = [c for c in found if (c.segments[0].first, c.segments[0].last) == whole]
    assert {c.size for c in over} == {2, 32}  # heads and queries; keys are summed over


def test_the_queries_of_an_attention_that_is_rolled_after_it():
    """The factor can not be followed into the roll; as a loop of the core alone it need not be."""
    loss = flat_of(*LAYERS["attention"])
    whole = [Segment(0, 0, len(loss.jaxpr.eqns) - 1)]
    assert 32 not in {c.size for c in candidates([loss], whole, free=False)}
    assert 32 in {c.size for c in candidates([loss], whole)}


def test_what_is_offered_computes_the_same():
    """Results and gradients of the cores of a layer, in two parts of each of their factors."""
    with jax.enable_x64(True):
        loss = flat_of(*LAYERS["attention"])
        rng = np.random.default_rng(0)
        args = [rng.standard_normal(v.aval.shape).astype(np.float32) for v in loss.jaxpr.invars]
        args = [x.astype(np.float64) for x in args]
        loss = flat(jax.make_jaxpr(lambda *args: [attention(*args)])(*args))
        whole = Segment(0, 0, len(loss.jaxpr.eqns) - 1)
        found = candidates([loss], [whole])
        values = values_of(loss, args)
        cores_alone = [c for c in found if c.size in (2, 32)]
        assert len(cores_alone) > 1
        for candidate in cores_alone:
            (change,) = candidate.changes(2)
            segment, reads, _ = segment_of(loss.jaxpr, change.segment.first, change.segment.last)
            some = [values[v] for v in reads]
            same(pull(plain(segment), some), pull(chunked(segment, change), some))


# -- what a loop would cover -----------------------------------------------------------------------


def marked(loss):
    def step(params, batch):
        value, grads = js.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TEXT, WIDTH = 4096, 64


def one_attention(params, batch):
    x = attention(batch["x"], *params)
    return (x * x).mean()


ONE = [floats(WIDTH, 2, 32)] * 3 + [floats(2, 32, WIDTH)]
SAMPLE = {"x": floats(TEXT, WIDTH)}


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_holds_in_parts_what_the_backward_pass_makes_too(again):
    """Nothing of the size of the scores is left whole, recomputed or not."""
    traced = trace(marked(one_attention), ONE, SAMPLE)
    graph = build(traced)
    (core,) = {s for o in options(traced, graph, (), []) for s in o.segments
               if o.size == TEXT and len(o.cuts[0]) < 40}  # fmt: skip
    (option,) = [o for o in options(traced, graph, (), []) if o.segments == (core,)
                 and o.size == TEXT]  # fmt: skip
    if again:
        graph = build(traced.changed([Recompute(core)]))
    covered = reach(graph, option.looped(16, None))
    wide = {v.id for v in graph.values if prod(v.shape) >= 2 * TEXT * TEXT}
    assert len(wide) > 6 and wide <= covered.values


def test_gradients_add_up_over_an_accumulation():
    params, batch = [floats(8, 32), floats(32, 8)], {"x": floats(4, 16, 8)}

    def loss(params, batch):
        return (mlp(batch["x"], *params) ** 2).mean()

    traced = trace(marked(loss), params, batch)
    graph = build(traced)
    option = next(o for o in options(traced, graph, (), []) if not o.again)
    covered = reach(graph, option.looped(2, None))
    assert {(8, 32), (32, 8)} <= {graph.values[v].shape for v in covered.sums}
    assert not any(4 in graph.values[v].shape for v in covered.sums)


def ways_of_weights(model):
    """How often each weight of `mlp` goes to the products that read it."""
    graph, space = model.graph, model.space
    products = {
        n for n, node in enumerate(space.nodes) for c in node.members
        if graph.kinds[graph.ops[model.folded.representatives[c]].kind].primitive == "dot_general"
    }  # fmt: skip
    found = Counter()
    for edge in space.edges:
        value = graph.values[model.samples[edge.value]]
        if edge.dst in products and value.shape in WEIGHTS:
            found[edge.times] += 1
    return found


WEIGHTS = [(8, 32), (32, 8)]


def test_weights_are_read_and_their_gradients_reduced_once_a_part():
    """As often as in the step that is traced with the loop."""

    def loss(params, batch):
        return (mlp(batch["x"], *params) ** 2).mean()

    traced = trace(marked(loss), [floats(*shape) for shape in WEIGHTS], {"x": floats(4, 16, 8)})
    before = model_of(traced)
    option = next(o for o in options(traced, before.graph, (), []) if not o.again)
    loop = option.looped(2, None)
    covered = reach(before.graph, loop)
    guess = with_loops(before, [(loop, covered)])
    true = model_of(traced.changed(option.changes(2, 1, None)))
    assert set(ways_of_weights(before)) == {1}
    assert set(ways_of_weights(guess)) == set(ways_of_weights(true)) == {2}
    classes = before.folded.value_class
    sums = {int(classes[v]) for v in covered.sums}
    for a, b in zip(before.space.edges, guess.space.edges):
        use = before.space.use.get(a.value)
        once = a.value in sums and (use is None or use[0] != a.dst)
        assert not once or b.times == a.times  # on to the update: after the loop


# -- what the copies and operands of a loop take ---------------------------------------------------


def test_a_loop_holds_its_carry_once_and_what_it_takes_apart():
    def step(params, batch):
        def body(total, row):
            return total + row[:, None] * params, None

        return jax.lax.scan(body, jnp.zeros((64, 64)), 2 * batch)[0]

    graph = build(trace(step, floats(64, 64), floats(8, 64)))
    held = buffers(graph, RULES["NVIDIA"])
    shape = [graph.values[v].shape for v in held.value.tolist()]
    assert shape.count((8, 64)) == 1  # the doubled batch: an operand of the loop
    for at in range(len(graph.ops)):
        alive = (held.lo <= at) & (at <= held.hi)
        assert sum(s == (64, 64) for s, here in zip(shape, alive) if here) <= 1


def test_what_goes_in_and_comes_out_of_a_loop_is_copied():
    """Of an MLP by tokens: x and the result forward, and their gradients backward."""

    def loss(params, batch):
        return (jnp.tanh(batch["x"] @ params[0]) @ params[1]).sum()

    traced = trace(marked(loss), [floats(8, 64), floats(64, 8)], {"x": floats(1, 32, 8)})
    graph = build(traced)
    option = next(o for o in options(traced, graph, (), []) if o.again and o.size == 32)
    covered = reach(graph, option.looped(4, None))
    shapes = [graph.values[v].shape for v, _, _ in covered.copies]
    assert (1, 32, 64) not in shapes and all(a <= b for _, a, b in covered.copies)
