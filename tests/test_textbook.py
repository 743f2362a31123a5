"""Plans are the textbook's where there is one: on the plan, and in the partitioner's words."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.verify.audit import audit
from jaxscaler.verify.hlo import hlo_collectives
from models import gpt, llama, mlp

MB = 1 << 20


def planned(workload, cluster, **options):
    step = js.parallelize(workload.step, cluster=cluster, time_limit=30, **options)
    plan = step.plan_for(workload.init, jax.random.key(0), batch=workload.batch)
    return step, plan


def products(plan):
    return [d for d in plan.decisions if ":dot_general" in d.subject and d.what == "op"]


def moved(plan, *kinds):
    return sum(t.nbytes * t.count for t in plan.traffic if t.kind in kinds)


def audited(step, *kinds):
    return sum(c.bytes * c.count for c in audit(step.compiled().lower()) if c.kind in kinds)


def parameter_bytes(workload, itemsize):
    return sum(leaf.size * itemsize for leaf in jax.tree.leaves(workload.state.params))


class TestWideBatch:
    """Far more activations than weights: every product on samples, gradients reduced once."""

    @pytest.fixture(scope="class")
    @staticmethod
    def wide():
        workload = mlp.workload("wide")
        return workload, *planned(workload, "h100:8")

    def test_every_product_is_split_on_samples(self, wide):
        _, _, plan = wide
        assert len(products(plan)) >= 11
        for decision in products(plan):
            assert {factor for _, factor in decision.cuts} == {"batch"}, decision
            assert len(decision.cuts) == len(plan.axes)

    def test_gradients_are_reduced_once(self, wide):
        workload, step, plan = wide
        gradients = parameter_bytes(workload, itemsize=2)  # products run, and reduce, in bfloat16
        loss = 4
        assert moved(plan, "reduce_scatter", "all_reduce") == pytest.approx(
            gradients, abs=64 * loss
        )
        assert audited(step, "reduce_scatter", "all_reduce") == pytest.approx(
            gradients, abs=64 * loss
        )

    def test_nothing_else_moves_but_weights(self, wide):
        """The update is sharded: what is reduced is gathered again, and that is all."""
        workload, step, plan = wide
        assert moved(plan, "all_to_all", "collective_permute") == 0
        assert moved(plan, "all_gather") <= 2 * parameter_bytes(workload, itemsize=2)
        assert audited(step, "all_gather") == moved(plan, "all_gather")

    def test_state_kept_whole_is_plain_data_parallelism(self):
        """With replicated state: all-reduce of the gradients, once, and nothing else."""
        workload = mlp.workload("wide")
        step, plan = planned(workload, "h100:8", constraints=recipes.data_parallel())
        assert moved(plan, "all_gather", "all_to_all", "collective_permute", "reduce_scatter") == 0
        expected = parameter_bytes(workload, itemsize=2)
        assert moved(plan, "all_reduce") == pytest.approx(expected, abs=256)
        assert audited(step, "all_reduce") == pytest.approx(expected, abs=256)
        for tensor in plan.tensors:
            if tensor.role in ("parameter", "optimizer"):
                assert not any(tensor.spec), tensor


class TestHugeWeights:
    """Few samples, huge weights: columns then rows, one all-reduce a pair and direction."""

    BATCH = 16

    @pytest.fixture(scope="class")
    @staticmethod
    def huge():
        workload = mlp.workload("huge", batch=TestHugeWeights.BATCH)
        return workload, *planned(workload, "h100:8")

    def test_columns_then_rows(self, huge):
        _, _, plan = huge
        specs = {t.path: t.spec for t in plan.tensors}
        for pair in ("pair_0", "pair_1"):
            up, down = (specs[f"state/params/{pair}/{name}/kernel"] for name in ("up", "down"))
            assert not up[0] and up[1], up
            assert down[0] and not down[1], down

    def test_one_all_reduce_a_pair_and_direction(self, huge):
        """Two pairs forward; backward only where the input has a gradient: not in the first."""
        workload, step, plan = huge
        row = self.BATCH * workload.batch["inputs"].shape[1] * 2
        reduced = [t for t in plan.traffic if t.kind == "all_reduce" and t.nbytes == row]
        assert sum(t.count for t in reduced) == 3
        found = [c for c in audit(step.compiled().lower()) if c.bytes == row]
        assert [c.kind for c in found] == ["all_reduce"] * 3
        assert sum("transpose" in c.scope for c in found) == 1

    def test_numbers_and_count_of_a_small_pair(self):
        """A small pair where bytes are all that counts: the three stand in XLA's own HLO."""
        workload = mlp.workload(width=64, hidden=256, batch=4, dtype="float32")
        cluster = js.Cluster.parse("h100:8")
        (level,) = cluster.levels
        link = replace(level.link, latency=0.0, launch=0.0, half_bytes=0.0, bandwidth=1e9)
        cluster = replace(cluster, levels=(replace(level, link=link),))
        step, plan = planned(workload, cluster, constraints=recipes.tensor_parallel())
        state = step.init(workload.init, jax.random.key(0), batch=workload.batch)
        batch = workload.make_batch(0)
        compiled = step.compiled()
        row = 4 * 64 * 4
        found = hlo_collectives(compiled.compiled.as_text(), step.mesh(), merge=True)
        reduced = sum(c.bytes * c.count for c in found if c.kind == "all_reduce")
        assert reduced == moved(plan, "all_reduce")
        assert sum(c.count for c in found if c.kind == "all_reduce" and c.bytes == row) == 3
        assert not [c for c in found if c.kind != "all_reduce" and c.bytes >= row]
        _, metrics = step(state, batch)
        _, want = jax.jit(workload.step)(jax.jit(workload.init)(jax.random.key(0)), batch)
        np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-5)


class TestStateAboveTheBudget:
    """State that does not fit whole is split at rest: ZeRO."""

    @pytest.fixture(scope="class")
    @staticmethod
    def plan():
        workload = mlp.workload("huge", batch=4096)
        state = parameter_bytes(workload, itemsize=12)  # weights and two moments in float32
        limit = 10e9
        assert limit < state / 4
        memory = limit / js.Cluster.parse("h100:8").device.hbm_bytes
        return planned(workload, "h100:8", memory=memory)[1], state, limit

    def test_state_is_an_eighth(self, plan):
        plan, state, limit = plan
        held = sum(t.bytes_per_device for t in plan.tensors if t.path.startswith("state/"))
        assert held <= 1.01 * state / 8
        assert plan.predicted.peak_bytes <= limit

    def test_every_large_leaf_is_split(self, plan):
        plan = plan[0]
        for t in plan.tensors:
            if t.path.startswith("state/") and t.bytes_per_device > MB:
                whole = np.prod(t.shape) * 4
                assert t.bytes_per_device == whole / 8, t


class TestHeads:
    """Two key/value heads on a four-way axis: a head is never cut by accident through a reshape."""

    def test_a_head_is_not_cut(self):
        workload = llama.workload("tiny", heads=8, kv_heads=2, hidden=256, seq=64, scan=False)
        step, plan = planned(workload, "h100:4", constraints=recipes.tensor_parallel())
        sizes = dict(plan.axes)
        reshapes = [d for d in plan.decisions if ":reshape" in d.subject and "/attn" in d.subject]
        assert reshapes
        graph, space = step.planned.graph, step.planned.space
        for node, row in zip(space.nodes, step.planned.rows):
            for port in node.ports:
                for dim in port.dims:
                    real = [f for f in dim if node.factors[f].size > 1]
                    cut = np.prod([sizes[a] for a, f in zip(sizes, row) if f in real[1:]])
                    assert cut == 1, (node.name, "a minor factor is cut")
        for op in graph.ops:
            kind = graph.kinds[op.kind]
            if (
                kind.primitive == "reshape"
                and "attn/k" in op.scope
                and len(kind.result_shapes[0]) == 4
            ):
                node = space.nodes[space.node_of[step.planned.folded.op_class[op.id]]]
                row = step.planned.rows[space.node_of[step.planned.folded.op_class[op.id]]]
                heads = [f for f, x in enumerate(node.factors) if x.size == 2]
                cut = np.prod([n for n, f in zip(sizes.values(), row) if f in heads])
                assert cut <= 2

    def test_same_numbers_on_four_devices(self):
        with jax.enable_x64(True):
            workload = llama.workload(
                "tiny", heads=8, kv_heads=2, hidden=64, seq=16, scan=False, dtype="float64"
            )
            step, _ = planned(workload, "cpu:4", constraints=recipes.tensor_parallel())
            state = step.init(workload.init, jax.random.key(0), batch=workload.batch)
            plain = jax.jit(workload.init)(jax.random.key(0))
            got, _ = step(state, workload.make_batch(0))
            want, _ = jax.jit(workload.step)(plain, workload.make_batch(0))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-12)


def test_an_odd_vocabulary_is_never_split_at_rest():
    workload = gpt.workload("small", batch=8, seq=128, layers=2)
    assert workload.state.params["wte"]["embedding"].shape[0] == 50257
    _, plan = planned(workload, "h100:8")
    rows = [t for t in plan.tensors if 50257 in t.shape and t.path.startswith("state/")]
    assert len(rows) == 3
    assert all(not t.spec[t.shape.index(50257)] for t in rows)
    (note,) = [n for n in plan.notes if "state/params/wte/embedding" in n]
    assert "50257" in note and "50304" in note


def test_a_batch_of_three_on_eight_devices_is_planned_and_said():
    workload = gpt.workload("tiny", batch=3)
    step, plan = planned(workload, "cpu:8")
    assert any("batch/inputs" in n and "3" in n and "8 devices" in n for n in plan.notes)
    state = step.init(workload.init, jax.random.key(0), batch=workload.batch)
    _, metrics = step(state, workload.make_batch(0))
    _, want = jax.jit(workload.step)(
        jax.jit(workload.init)(jax.random.key(0)), workload.make_batch(0)
    )
    np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-4)
