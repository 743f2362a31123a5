"""The memory model: a heap's packing, one device's graph, live ranges, and what a plan predicts."""

import collections
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.cost.deep import Deep
from jaxscaler.cost.heap import heap_size, live_bytes
from jaxscaler.cost.memory import RULES, buffers, rules_for, turned_state
from jaxscaler.cost.schedule import BEFORE, GATHER, REDUCTION
from jaxscaler.cost.softmax import softmaxes
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.ir import BACKWARD, UPDATE
from jaxscaler.graph.shorten import shortened, shortest, stacks
from jaxscaler.lower.device import device_graph, device_short
from jaxscaler.planner import plan_step
from jaxscaler.report.memory import graph_memory, padded
from jaxscaler.trace import trace
from models import gpt, llama, mlp

GPU, TPU, V5P = RULES["NVIDIA"], RULES["Google"], RULES["v5p"]
SMALL = dict(layers=2, hidden=64, heads=4, batch=8, context=32, vocab=256)


def graph_of(step, *args):
    return build(trace(step, *args))


def found(graph, rules):
    """(primitive, lo, hi, share) of every buffer."""
    made = {v: graph.kinds[op.kind].primitive for op in graph.ops for v in op.outputs}
    value, share, lo, hi = buffers(graph, rules)
    return [(made[v], a, b, s) for v, a, b, s in zip(value.tolist(), lo, hi, share)]


def kind_of(graph, op):
    return graph.kinds[op.kind].primitive


def softmaxes_of(graph):
    traits = [kind.traits for kind in graph.kinds]
    return softmaxes(graph, ["fusable" in t for t in traits], ["heavy" in t for t in traits])


@functools.cache
def planned(name, recipe="zero", cluster="h100:8", **options):
    work = {"gpt": gpt, "llama": llama}[name].workload(**{**SMALL, **options})
    known = {"zero": recipes.zero, "data": recipes.data_parallel, "tensor": recipes.tensor_parallel}
    lines = known[recipe]()
    return plan_step(trace(work.step, work.state, work.batch), js.Cluster.parse(cluster),
                     constraints=lines, time_limit=10)  # fmt: skip


def local(plan):
    return device_graph(plan.graph, plan.folded, plan.space, plan.plan.axes, plan.rows)


class TestHeap:
    def test_buffers_that_never_meet_share_bytes(self):
        size, lo, hi = np.array([8.0, 8.0, 4.0]), np.array([0, 2, 0]), np.array([1, 3, 3])
        assert heap_size(size, lo, hi) == 12

    def test_a_hole_too_small_is_left(self):
        # 4 and 4 leave two holes of 4 apart from each other; 8 does not fit into them
        size = np.array([6.0, 4.0, 4.0, 8.0])
        lo, hi = np.array([0, 0, 0, 1]), np.array([2, 0, 1, 1])
        assert heap_size(size, lo, hi) >= live_bytes(size, lo, hi).max() == 18

    def test_never_below_what_is_live_and_never_overlapping_sums(self):
        rng = np.random.default_rng(0)
        for _ in range(50):
            n = int(rng.integers(1, 12))
            size = rng.integers(1, 20, n).astype(float)
            lo = rng.integers(0, 10, n)
            hi = lo + rng.integers(0, 5, n)
            live = live_bytes(size, lo, hi).max()
            assert live <= heap_size(size, lo, hi) <= size.sum()

    def test_intervals_of_stacked_layers_pack_without_loss(self):
        size = np.array([4.0, 4.0, 4.0, 1.0, 1.0])
        lo, hi = np.array([0, 1, 2, 3, 4]), np.array([8, 7, 6, 3, 4])
        assert heap_size(size, lo, hi) == 13

    def test_live_bytes_by_hand(self):
        live = live_bytes(np.array([2.0, 3.0]), np.array([0, 1]), np.array([1, 2]))
        assert live.tolist() == [2, 5, 3]

    def test_small_cases_are_optimal_against_all_offsets(self):
        size, lo, hi = np.array([3.0, 2.0, 2.0]), np.array([0, 0, 1]), np.array([0, 1, 1])
        least = np.inf
        for at in itertools.product(range(6), repeat=3):
            ends = [a + s for a, s in zip(at, size)]
            meet = ((i, j) for i in range(3) for j in range(i) if lo[i] <= hi[j] and lo[j] <= hi[i])
            if all(ends[i] <= at[j] or ends[j] <= at[i] for i, j in meet):
                least = min(least, max(ends))
        assert heap_size(size, lo, hi) == least


class TestRules:
    def test_an_elementwise_kernel_takes_over_a_dying_operand(self):
        def step(w, x):
            y = x @ w
            return (jnp.exp(y) * y) @ w

        graph = graph_of(step, jnp.zeros((8, 8)), jnp.zeros((4, 8)))
        first, product, _ = sorted(found(graph, GPU), key=lambda b: b[1])
        assert (first[0], product[0]) == ("dot_general", "mul")
        assert first[2] < product[1]

    def test_another_width_is_not_taken_over(self):
        def step(w, x):
            return (x @ w).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

        graph = graph_of(step, jnp.zeros((8, 8)), jnp.zeros((4, 8)))
        made = {b[0]: b for b in found(graph, GPU) if b[0] != "convert_element_type"}
        casts = [b for b in found(graph, GPU) if b[0] == "convert_element_type"]
        assert max(b[1] for b in casts) <= made["dot_general"][2]
        assert any(b[1] == made["dot_general"][1] or b[2] >= b[1] for b in casts)

    def test_a_tanh_with_two_readers_is_stored_on_gpus(self):
        def step(w, x):
            t = jnp.tanh(x @ w)
            return (t * 2) @ w, (t + 1) @ w

        graph = graph_of(step, jnp.zeros((8, 8)), jnp.zeros((4, 8)))
        assert "tanh" in [b[0] for b in found(graph, GPU)]
        assert "tanh" not in [b[0] for b in found(graph, TPU)]

    def test_products_of_a_tpu_compute_casts_but_no_exponentials(self):
        def step(w, x):
            return (x @ w + 1) @ w, jnp.exp(x @ w) @ w

        def names(rules):
            return [b[0] for b in found(graph, rules)]

        graph = graph_of(step, jnp.zeros((8, 8)), jnp.zeros((4, 8)))
        assert {"add", "exp"} <= set(names(GPU))
        assert "exp" in names(TPU) and "add" not in names(TPU)

    def test_a_sum_with_a_scatter_into_zeros_takes_one_buffer(self):
        """What is added to a scattered value dies where the scatter runs: it goes into it."""

        def step(x, i):
            y = x @ x
            return (jnp.zeros_like(y).at[i].add(1.0) + y * 2).astype(jnp.bfloat16) @ x

        graph = graph_of(step, jnp.zeros((8, 8)), jnp.zeros((3,), jnp.int32))
        scatter = next(b for b in found(graph, GPU) if b[0] == "scatter-add")
        product = next(b for b in found(graph, GPU) if b[0] == "dot_general")
        assert product[2] <= scatter[1]

    def test_elementwise_kernels_of_a_tpu_write_over_nothing(self):
        def step(w, x):
            y = x @ w
            return (jnp.exp(y) * y) @ w

        graph = graph_of(step, jnp.zeros((8, 8)), jnp.zeros((4, 8)))
        first, product, _ = sorted(found(graph, TPU), key=lambda b: b[1])
        assert (first[0], product[0]) == ("dot_general", "mul")
        assert first[2] == product[1]

    def test_what_a_softmax_between_products_keeps(self):
        """GPUs: the product and the softmax; v5e: what is left of the product; v5p: the latter two.

        A softmax that no product reads, and one of which rows are looked up, are no such ones.
        """

        def attention(q, k):
            x = (q @ k.T).astype(jnp.float32) * 0.5
            e = jnp.exp(x - x.max(-1, keepdims=True))
            return (e / e.sum(-1, keepdims=True)).astype(jnp.bfloat16) @ k

        def loss(q, k):
            x = (q @ k.T).astype(jnp.float32)
            x = x - x.max(-1, keepdims=True)
            return jnp.take_along_axis(x, jnp.zeros((8, 1), int), -1), jnp.exp(x) @ x

        half = jnp.zeros((8, 8), jnp.bfloat16)
        graph = graph_of(attention, half, half)

        def names(g, rules):
            return [b[0] for b in sorted(found(g, rules), key=lambda b: b[1])]

        kept = {"dot_general", "sub", "convert_element_type"}  # but for the result

        def of(rules):
            return [n for n in names(graph, rules) if n in kept]

        assert of(GPU) == ["dot_general", "convert_element_type"]
        assert of(TPU) == ["sub"]
        assert of(V5P) == ["sub", "convert_element_type"]
        assert names(graph_of(loss, half, half), TPU)[0] == "dot_general"
        shifted, products, made = softmaxes_of(graph)
        assert len(shifted) == len(products) == 1 and len(made) >= 3
        assert not any(softmaxes_of(graph_of(loss, half, half)))

    def test_state_of_matrices_whose_whole_gradients_are_transposed(self):
        """Up and down projections, with both moments; nothing where the gradients are scattered."""
        graph = local(planned("gpt", "data", remat=True))
        found = [graph.values[v] for v in turned_state(graph)]
        assert len(found) == 2 * 2 * 3
        assert {v.shape for v in found} == {(64, 256), (256, 64)}
        assert not turned_state(local(planned("gpt", "zero", remat=True)))
        held, more = (graph_memory(graph, V5P._replace(turned=t)).peak for t in (False, True))
        assert more - held == pytest.approx(12 * 64 * 256 * 4, rel=0.01)

    def test_vendors(self):
        assert rules_for("Google") is rules_for("Google", "v5e") is TPU
        assert rules_for("Google", "v5p") is V5P
        assert rules_for("AMD") == GPU == rules_for("none")


class TestDeviceGraph:
    def test_shapes_are_local_and_copies_are_the_plans(self):
        plan = planned("gpt")
        graph = local(plan)
        whole = sum(np.prod(plan.graph.values[v].shape) for v in plan.graph.inputs)
        cut = sum(np.prod(graph.values[v].shape) for v in graph.inputs)
        assert cut < whole / 6  # eight devices; a few leaves do not divide
        names = [graph.kinds[op.kind].primitive for op in graph.ops]
        assert GATHER in names and REDUCTION in names
        assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
        made = [v for op in graph.ops for v in op.outputs if v >= 0]
        assert len(made) == len(set(made))

    def test_of_one_device_it_is_the_graph(self):
        work = mlp.workload()
        plan = plan_step(trace(work.step, work.state, work.batch), js.Cluster.parse("h100:1"))
        graph = local(plan)
        assert len(graph.ops) == len(plan.graph.ops)
        assert graph.values == plan.graph.values

    def test_arguments_of_a_tpu_are_padded(self):
        assert padded((1024, 3, 16, 64), (8, 128)) == 1024 * 3 * 16 * 64  # 1024 minor, 16 beside it
        assert padded((3, 64), (8, 128)) == 8 * 128 == padded((64, 3), (8, 128))
        assert padded((64,), (8, 128)) == 64
        graph = local(planned("gpt"))
        bare, tiled = (graph_memory(graph, r._replace(late=None)) for r in (GPU, TPU))
        assert dict(tiled.by_role)["parameter"] > dict(bare.by_role)["parameter"]


class TestSchedule:
    def test_weight_gradients_run_late_and_not_in_order(self):
        graph = local(planned("gpt", "data", remat=True))
        late = graph_memory(graph, GPU).peak
        in_order = graph_memory(graph, GPU._replace(late=None)).peak
        assert late > in_order

    def test_every_buffer_begins_before_it_ends_and_inside_the_step(self):
        for scan in (False, True):
            graph = local(planned("llama", "data", kv_heads=2, ffn=128, scan=scan, remat=True))
            for rules in (GPU, TPU):
                _, share, lo, hi = buffers(graph, rules)
                assert (hi >= lo).all() and (lo >= -1).all() and (hi <= len(graph.ops) + 1).all()
                assert (share > 0).all()

    def test_on_a_tpu_products_wait_for_the_next_segment_at_most(self):
        from jaxscaler.cost.memory import _Ranges

        graph = local(planned("gpt", "zero", remat=True, layers=3))
        assert TPU.late == BEFORE
        place = _Ranges(graph, TPU).place
        spans = [r for r in graph.regions if r.what == "remat"]
        assert len(spans) == 3
        late = [
            op for op in graph.ops if place[op.id] > op.id and "dot_general" in kind_of(graph, op)
        ]
        inside = [(op, n) for op in late for n, r in enumerate(spans) if r.first <= op.id <= r.last]
        assert len({n for _, n in inside}) == 3  # of every layer
        for op, n in inside:
            if n + 1 < len(spans):  # those of the last layer wait for all else
                assert spans[n].last < place[op.id] < spans[n + 1].first + 40

    def test_only_the_backward_pass_waits(self):
        from jaxscaler.cost.memory import _Ranges

        graph = local(planned("gpt", "data"))
        place = _Ranges(graph, GPU).place
        moved = {op.phase for op in graph.ops if place[op.id] > op.id}
        assert moved <= {BACKWARD, UPDATE} and BACKWARD in moved


LLAMA = dict(kv_heads=2, ffn=128, scan=False)
DEEP = {
    "gpt 12, zero": ("gpt", "zero", dict(layers=12)),
    "gpt 24, data, remat": ("gpt", "data", dict(layers=24, remat=True)),
    "llama 12, data": ("llama", "data", dict(layers=12, **LLAMA)),
    "llama 24, zero, remat": ("llama", "zero", dict(layers=24, remat=True, **LLAMA)),
    "llama 24, tensor, remat": ("llama", "tensor", dict(layers=24, remat=True, **LLAMA)),
}


class TestDepth:
    """Memory of a deep step from a short one, against the same rules on the whole."""

    @pytest.mark.parametrize("name", DEEP)
    def test_a_short_step_tells_the_memory_of_the_whole(self, name):
        model, recipe, options = DEEP[name]
        plan = planned(model, recipe, **options)
        short = shortest(plan.graph, plan.folded)
        assert short is not None and len(short.graph.ops) < 0.5 * len(plan.graph.ops)
        part = device_short(short, plan.space, plan.plan.axes, plan.rows)
        whole = local(plan)
        for rules in (GPU, GPU._replace(late=None), TPU):
            want = graph_memory(whole, rules)
            got = graph_memory(part.graph, rules, Deep(part))
            assert got.peak == pytest.approx(want.peak, rel=0.005)
            assert sum(n for _, n in got.by_role) == pytest.approx(got.peak)
            held, holds = dict(want.by_role), dict(got.by_role)
            assert holds["parameter"] == pytest.approx(held["parameter"])
            for role in held | holds:
                assert holds.get(role, 0) == pytest.approx(held.get(role, 0), abs=0.01 * want.peak)

    def test_what_is_left_is_a_model_with_fewer_layers(self):
        deep, shallow = (planned("gpt", layers=n) for n in (12, 6))
        (stack,) = stacks(deep.graph, deep.folded)
        short = shortened(deep.graph, deep.folded, stack, 6)
        short.graph.verify()

        def kinds(graph):  # scalars: the norm of all gradients is summed in one go
            return collections.Counter(
                (k.primitive, k.operand_shapes, k.result_shapes, op.phase)
                for op in graph.ops
                for k in (graph.kinds[op.kind],)
                if any(map(np.prod, k.result_shapes))
            )

        assert kinds(short.graph) == kinds(shallow.graph)
        assert len(short.graph.state) == len(shallow.graph.state)

    def test_what_each_layer_has_outside_of_the_stack_counts_for_all(self):
        """Parameters that are cast before the first layer lie in memory for every layer."""

        def step(ws, x):
            ws = [w.astype(jnp.bfloat16) for w in ws]
            kept = []
            for w in ws:
                kept.append(x)
                x = jnp.tanh(jnp.sin(x) @ w) + x
                x = jnp.exp(jnp.cos(x) @ w) * x
            for w, y in zip(ws[::-1], kept[::-1]):
                x = jnp.exp(jnp.tanh(x @ w) * y) @ w + y
                x = jnp.cos(jnp.sin(x) @ w) - x
            return x

        half = jnp.zeros((4, 64), jnp.bfloat16)
        graph = graph_of(step, [jnp.zeros((64, 64))] * 16, half)
        folded = fold(graph)
        short = shortest(graph, folded)
        assert short is not None and len(short.graph.ops) < len(graph.ops) / 2
        for rules in (GPU, TPU):
            want = graph_memory(graph, rules).peak
            got = graph_memory(short.graph, rules, Deep(short)).peak
            assert got == pytest.approx(want, rel=0.005)

    def test_shallow_and_scanned_stacks_stay_whole(self):
        for options in (dict(layers=2), dict(layers=12, kv_heads=2, ffn=128, scan=True)):
            plan = planned("llama" if "scan" in options else "gpt", **options)
            assert shortest(plan.graph, plan.folded) is None


class TestPrediction:
    @pytest.mark.parametrize("recipe", ["zero", "data"])
    def test_roles_add_up_and_arguments_are_exact(self, recipe):
        plan = planned("gpt", recipe).plan
        assert sum(n for _, n in plan.predicted.memory) == pytest.approx(plan.predicted.peak_bytes)
        held = sum(t.bytes_per_device for t in plan.tensors if t.role == "parameter")
        assert dict(plan.predicted.memory)["parameter"] == pytest.approx(held)

    def test_a_plan_fits_as_compiled(self):
        work = gpt.workload(**SMALL)
        traced = trace(work.step, work.state, work.batch)
        cluster = js.Cluster.parse("h100:8")
        free = plan_step(traced, cluster, time_limit=5).plan.predicted
        share = 0.8 * free.peak_bytes / cluster.device.hbm_bytes
        tight = plan_step(traced, cluster, memory=share, time_limit=5).plan.predicted
        assert tight.peak_bytes <= 0.8 * free.peak_bytes
        assert tight.seconds >= free.seconds

    def test_recomputation_saves_memory(self):
        """Where scores are the most of what is kept; of small ones the late products hold more."""
        kept, again = (planned("gpt", context=512, remat=remat) for remat in (False, True))
        assert again.plan.predicted.peak_bytes < 0.8 * kept.plan.predicted.peak_bytes
