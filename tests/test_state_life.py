"""The state of a plan in other hands: checkpoints, other devices, evaluation, side computations."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxscaler as js
from jaxscaler import recipes, search
from jaxscaler.errors import PlanError
from jaxscaler.lower.step import MismatchError
from models import mlp

WORK = mlp.workload(dtype="float32")


def parallel(cluster="cpu:8", constraints=(), workload=WORK, **options):
    return js.parallelize(
        workload.step, cluster=cluster, constraints=constraints, time_limit=10, **options
    )


def values(tree):
    return jax.tree.map(np.asarray, tree)


def assert_equal(tree, other):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), b, err_msg=jax.tree_util.keystr(path))


def assert_lies_as(tree, abstract):
    for leaf, want in zip(jax.tree.leaves(tree), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), (leaf.sharding, want)


def alive(tree):
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def trained():
    """(a step under ZeRO-3 on 2 x 4 devices, its state after one step)."""
    step = parallel("cpu:4x2", recipes.zero(), donate=())
    state = step.init(WORK.init, jax.random.key(0), batch=WORK.batch)
    state, _ = step(state, WORK.make_batch(0))
    return step, state


def loss_after(state, seed=1):
    _, metrics = jax.jit(WORK.step)(values(state), WORK.make_batch(seed))
    return float(metrics["loss"])


class TestAbstractState:
    def test_it_is_the_state_without_arrays(self, trained):
        step, state = trained
        abstract = step.abstract_state()
        assert jax.tree.structure(abstract) == jax.tree.structure(state)
        for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            assert isinstance(want, jax.ShapeDtypeStruct)
            assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)
        assert_lies_as(state, abstract)
        assert dict(step.plan.axes) == {"node": 2, "device": 4}
        kernel = abstract.params["pair_0"]["up"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) != kernel.shape

    def test_several_arguments_are_a_tuple(self):
        def step(frozen, batch, state):
            w = state["w"] - 0.1 * jnp.mean((batch["x"] @ frozen["base"]) * state["w"])
            return {"w": w, "m": 0.9 * state["m"] + w}

        frozen, batch = {"base": jnp.ones((16, 8))}, {"x": jnp.ones((8, 16))}
        state = {"w": jnp.ones(8), "m": jnp.ones(8)}
        planned = js.parallelize(step, cluster="cpu:8", roles={"frozen/*": "parameter"})
        planned(frozen, batch, dict(state))
        assert jax.tree.structure(planned.abstract_state()) == jax.tree.structure((frozen, state))

    def test_before_a_plan(self):
        with pytest.raises(PlanError, match="there is no plan yet"):
            parallel().abstract_state()

    def test_a_step_without_state(self):
        step = js.parallelize(lambda x: jnp.sum(x * 2), cluster="cpu:8")
        step(jnp.ones((8, 4)))
        with pytest.raises(PlanError, match="no argument of the step is state; `roles`"):
            step.abstract_state()


class TestCheckpoint:
    """Saved under one plan, restored into another, on other devices."""

    @pytest.fixture(scope="class")
    @staticmethod
    def saved(trained, tmp_path_factory):
        step, state = trained
        folder = tmp_path_factory.mktemp("run")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", state)
        step.plan.save(folder / "plan.json")
        (folder / "digest").write_text(step.plan.digest())
        return folder

    @pytest.mark.parametrize(
        ("cluster", "constraints"),
        [("cpu:4", recipes.data_parallel()), ("cpu:8", recipes.tensor_parallel())],
        ids=["4-data-parallel", "8-tensor"],
    )
    def test_another_plan_and_device_count(self, trained, saved, cluster, constraints):
        _, state = trained
        other = parallel(cluster, constraints)
        other.plan_for(WORK.init, jax.random.key(0), batch=WORK.batch)
        assert (saved / "digest").read_text() != other.plan.digest()
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(saved / "state", other.abstract_state())
        assert_equal(restored, values(state))
        assert_lies_as(restored, other.abstract_state())
        expected = loss_after(state)
        _, metrics = other(restored, WORK.make_batch(1))
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)

    def test_the_plan_beside_it_is_followed(self, trained, saved):
        _, state = trained
        step = js.parallelize(WORK.step, plan=saved / "plan.json")
        step.plan_for(WORK.init, jax.random.key(0), batch=WORK.batch)
        assert step.plan.digest() == (saved / "digest").read_text()
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(saved / "state", step.abstract_state())
        assert_equal(restored, values(state))

    def test_nnx_objects(self, tmp_path):
        """The state of the objects is saved, and put back into objects that are made abstractly."""
        step, model, optimizer = nnx_step()
        step(model, optimizer, nnx_batch())
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", nnx.state((model, optimizer)))
        other, *_ = nnx_step(cluster="cpu:4", constraints=recipes.data_parallel())
        other.plan_for(make_nnx, batch=nnx_batch())
        abstract = other.abstract_state()
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "state", nnx.state(abstract))
        nnx.update(abstract, restored)
        assert_equal(nnx.state(abstract), values(nnx.state((model, optimizer))))
        expected = float(step(model, optimizer, nnx_batch()))
        assert float(other(*abstract, nnx_batch())) == pytest.approx(expected, rel=1e-5)


class TestMove:
    def test_to_fewer_devices(self, trained):
        step, state = trained
        other, moved = step.move(state, cluster="cpu:4")
        assert dict(other.plan.axes) == {"device": 4}
        assert alive(state)
        assert_equal(moved, values(state))
        assert_lies_as(moved, other.abstract_state())
        assert len(moved.params["pair_0"]["up"]["kernel"].sharding.device_set) == 4
        expected = loss_after(state)
        _, metrics = other(moved, WORK.make_batch(1))
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)

    def test_to_other_devices_and_another_plan(self, trained, devices):
        step, state = trained
        _, moved = step.move(state, devices=devices[6:], constraints=recipes.data_parallel())
        assert_equal(moved, values(state))
        for leaf in jax.tree.leaves(moved):
            assert leaf.sharding.device_set == set(devices[6:])
            assert leaf.sharding.is_fully_replicated

    def test_to_a_saved_plan(self, trained, tmp_path):
        step, state = trained
        other, moved = step.move(state, cluster="cpu:4")
        other.plan.save(tmp_path / "plan.json")
        again, there = step.move(state, plan=tmp_path / "plan.json")
        assert again.plan.digest() == other.plan.digest()
        assert_lies_as(there, other.abstract_state())
        assert_equal(there, values(moved))

    def test_nnx_objects_come_back_as_new_ones(self):
        step, model, optimizer = nnx_step()
        step(model, optimizer, nnx_batch())
        before = values(nnx.state((model, optimizer)))
        other, (moved, opt) = step.move((model, optimizer), cluster="cpu:4")
        assert_equal(nnx.state((moved, opt)), before)
        assert moved is not model
        assert len(moved.up.kernel.get_value().sharding.device_set) == 4
        assert opt.opt_state is not optimizer.opt_state
        other(moved, opt, nnx_batch())

    def test_another_state_is_refused_by_leaf(self, trained):
        step, state = trained
        with pytest.raises(MismatchError, match=r"kernel is float32\[3\], planned for float32\["):
            step.place(
                jax.tree_util.tree_map_with_path(
                    lambda p, x: x if "kernel" not in str(p) else jnp.ones(3), state
                )
            )
        with pytest.raises(MismatchError, match="the state has 8 arrays, the plan lays out"):
            step.place(state.params)

    def test_place_takes_what_was_read_elsewhere(self, trained):
        step, state = trained
        placed = step.place(values(state))
        assert_lies_as(placed, step.abstract_state())
        assert_equal(placed, values(state))


def evaluate(state, batch):
    outputs = state.apply_fn({"params": state.params}, batch["inputs"])
    return {"loss": jnp.mean((outputs - batch["targets"]) ** 2), "outputs": outputs}


class TestFollow:
    def assert_evaluates(self, step, state, batch):
        got, expected = step(state, batch), jax.jit(evaluate)(values(state), batch)
        for name in ("loss", "outputs"):
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-5)

    def test_the_state_lies_as_in_training(self, trained):
        train, state = trained
        step = js.parallelize(evaluate, follow=train)
        self.assert_evaluates(step, state, WORK.make_batch(3))
        assert step.plan.axes == train.plan.axes
        lies = {t.path: t.spec for t in train.plan.tensors if t.path.startswith("state/")}
        assert lies == {t.path: t.spec for t in step.plan.tensors if t.path.startswith("state/")}
        assert any(any(spec) for spec in lies.values())
        assert alive(state)
        assert_lies_as(state, step.abstract_state())

    def test_a_part_of_the_state_under_another_name(self, trained):
        """`p` has the paths of parameters and of both moments: the parameters are meant."""
        train, state = trained

        def loss(p, inputs):
            return state.apply_fn({"params": p}, inputs).sum()

        step = js.parallelize(loss, follow=train.plan)
        inputs = WORK.make_batch(0)["inputs"]
        np.testing.assert_allclose(
            step(state.params, inputs), loss(values(state.params), inputs), rtol=1e-4
        )
        abstract = train.abstract_state().params
        assert_lies_as(step.abstract_state(), abstract)

    def test_leaves_that_lie_apart_may_not_share_a_decision(self):
        """Two layers that fold into one class for evaluation, but not in the plan to follow."""

        def step(w, x):
            mean = jnp.mean(x, 0)
            return {k: v * mean if k == "b" else v - 0.1 * mean for k, v in w.items()}

        def read(w, x):
            for name in w:  # layers of six ops or more are found to be equal
                x = jnp.tanh(jnp.abs(jnp.cos(jnp.sin(x @ w[name]) + 1) * 2))
            return x

        w = {name: (n + 1) / 8 * jnp.eye(8) for n, name in enumerate("abcdef")}
        x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)
        split = [js.op_trans(js.values(f"w/{k}"), js.Split(d), js.ALL) for d, k in enumerate("bc")]
        train = js.parallelize(step, cluster="cpu:8", constraints=split)
        train(jax.tree.map(jnp.copy, w), x)
        apart = {t.path: t.spec for t in train.plan.tensors if t.path.startswith("w/")}
        assert apart["w/b"] == (("device",), ())
        assert apart["w/c"] == ((), ("device",))
        free = js.plan(read, w, x, cluster="cpu:8", roles={"w/*": "parameter"})
        assert any(d.subject == "w/b" and d.count > 1 for d in free.decisions)
        planned = js.parallelize(read, follow=train)
        np.testing.assert_allclose(planned(w, x), read(w, x), rtol=1e-5)
        lies = {t.path: t.spec for t in planned.plan.tensors if t.path.startswith("w/")}
        assert lies == apart
        again = js.parallelize(read, plan=planned.plan)
        np.testing.assert_allclose(again(w, x), read(w, x), rtol=1e-5)

    def test_other_clusters_and_steps_are_refused(self, trained):
        train, state = trained
        with pytest.raises(js.ClusterError, match="mesh node=2, device=4 is not of the 4 devices"):
            js.parallelize(evaluate, follow=train, cluster="cpu:4")(state, WORK.make_batch(0))
        with pytest.raises(PlanError, match="none of the arguments is state of the plan to follow"):
            js.parallelize(lambda x: x + 1, follow=train)(jnp.ones(8))
        with pytest.raises(PlanError, match="there is no plan yet"):
            js.parallelize(evaluate, follow=parallel())(state, WORK.make_batch(0))
        with pytest.raises(PlanError, match="leave follow= or plan= out"):
            js.parallelize(evaluate, follow=train, plan=train.plan)

    def test_nnx(self):
        step, model, optimizer = nnx_step()
        step(model, optimizer, nnx_batch())
        before = nnx.state(model)

        def evaluate(model, x):
            return (model(x) ** 2).mean()

        planned = js.parallelize(evaluate, follow=step)
        x = nnx_batch()
        np.testing.assert_allclose(planned(model, x), evaluate(model, x), rtol=1e-5)
        lies = {t.path: t.spec for t in step.plan.tensors if t.path.startswith("model/")}
        got = {t.path: t.spec for t in planned.plan.tensors if t.path.startswith("model/")}
        assert got == lies
        assert_lies_as(nnx.state(model), before)


class TestShapes:
    """One state, batches of several shapes: planned for each, the state where it is."""

    def test_same_numbers_and_one_storage(self, monkeypatch):
        step = parallel(constraints=recipes.zero())
        state = step.init(WORK.init, jax.random.key(0), batch=WORK.batch)
        plan, plain = step.plan, jax.jit(WORK.step)
        expected = jax.jit(WORK.init)(jax.random.key(0))
        searched, solve = [], search.solve
        monkeypatch.setattr(search, "solve", lambda *a, **k: searched.append(1) or solve(*a, **k))
        for seed, rows in enumerate((8, 16, 8, 16, 8)):
            batch = {k: np.tile(v, (2, 1))[:rows] for k, v in WORK.make_batch(seed).items()}
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                state, metrics = step(state, batch)
            expected, other = plain(expected, batch)
            np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-5)
            assert_lies_as(state, step.abstract_state())
        assert len(searched) == 1
        assert step.plan is plan
        for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)

    def test_a_shape_that_constraints_do_not_allow(self):
        """Three samples can not be split over eight devices: planned without, and said."""
        step = parallel(constraints=recipes.data_parallel())
        state = step.init(WORK.init, jax.random.key(0), batch=WORK.batch)
        batch = {k: v[:3] for k, v in WORK.make_batch(0).items()}
        _, expected = jax.jit(WORK.step)(values(state), batch)
        with pytest.warns(UserWarning, match="the constraints allow no plan") as said:
            state, metrics = step(state, batch)
        assert said[0].filename == __file__
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
        assert_lies_as(state, step.abstract_state())

    def test_another_state_is_refused(self, trained):
        step, _ = trained
        wide = mlp.workload(dtype="float32", hidden=64)
        other = jax.jit(wide.init)(jax.random.key(0))
        with pytest.raises(MismatchError, match=r"planned for another state \(state/params/pair_0"):
            step(other, WORK.make_batch(0))
        assert alive(other)

    def test_plain_jit_on_one_device(self):
        step = parallel("cpu:1")
        state = step.init(WORK.init, jax.random.key(0), batch=WORK.batch)
        state, _ = step(state, WORK.make_batch(0))
        batch = {k: v[:3] for k, v in WORK.make_batch(0).items()}
        _, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])


class TestJit:
    def test_results_that_are_state_lie_as_state(self, trained):
        step, state = trained

        @step.jit
        def averaged(average, state):
            new = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, state.params)
            return new, {"norm": optax.tree.norm(state.params)}

        average, aux = averaged(state.params, state)
        assert_lies_as(average, step.abstract_state().params)
        np.testing.assert_allclose(aux["norm"], optax.tree.norm(values(state.params)), rtol=1e-5)
        for got, want in zip(jax.tree.leaves(average), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-7)

    def test_also_what_nothing_flows_into(self, trained):
        """Where the compiler has nothing to go by, and would leave it whole."""
        step, state = trained
        zeros = step.jit(lambda state: jax.tree.map(jnp.zeros_like, state.params))(state)
        assert_lies_as(zeros, step.abstract_state().params)

    def test_nnx(self):
        step, model, optimizer = nnx_step()
        step(model, optimizer, nnx_batch())
        zeros = step.jit(lambda model: jax.tree.map(jnp.zeros_like, nnx.state(model)))(model)
        assert_lies_as(zeros, nnx.state(model))
        assert not model.up.kernel.get_value().sharding.is_fully_replicated

    def test_what_is_not_on_the_mesh_is_moved(self, trained):
        step, state = trained
        add = step.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
        here = jax.device_put(values(state.params), jax.devices()[3])
        for other in (here, values(state.params)):
            total = add(state.params, other)
            assert_lies_as(total, step.abstract_state().params)
            assert_equal(total, jax.tree.map(lambda x: 2 * np.asarray(x), state.params))

    def test_options_of_jit(self, trained):
        step, state = trained
        scale = step.jit(
            lambda params, by: jax.tree.map(lambda x: by * x, params),
            static_argnums=1, donate_argnums=0,
        )  # fmt: skip
        given = jax.tree.map(jnp.copy, state.params)
        doubled = scale(given, 2)
        assert not alive(given)
        assert_equal(doubled, jax.tree.map(lambda x: 2 * np.asarray(x), state.params))

    def test_nothing_is_compiled_again(self, trained):
        step, state = trained
        traces = []
        norm = step.jit(lambda params: (traces.append(1), optax.tree.norm(params))[1])
        for _ in range(3):
            norm(state.params)
        assert len(traces) == 1


class TestAfterAnError:
    """State that a step is to take over is there as long as the step has not begun to run."""

    @pytest.fixture
    def started(self):
        step = parallel(constraints=recipes.zero())
        return step, step.init(WORK.init, jax.random.key(0), batch=WORK.batch)

    def test_a_wrong_batch(self, started):
        step, state = started
        batch = WORK.make_batch(0)
        wrong = {**batch, "inputs": batch["inputs"][:, :3]}
        with pytest.raises(Exception, match="shape"):  # of the model, on its way to another plan
            step(state, wrong)
        with pytest.raises(js.TraceError, match="batch/inputs"):
            step(state, {**batch, "inputs": "words"})
        with pytest.raises(TypeError):
            step(state)
        assert alive(state)
        state, _ = step(state, batch)
        assert alive(state)

    def test_a_plan_that_can_not_be(self, started, monkeypatch):
        """The search for another batch fails: the state is as it was."""
        step, state = started

        def fail(*args, **options):
            raise js.InfeasibleError("no plan fits")

        step(state, WORK.make_batch(0))
        state = step.init(WORK.init, jax.random.key(0))
        big = {k: np.tile(v, (4, 1)) for k, v in WORK.make_batch(0).items()}
        monkeypatch.setattr(step, "_search", fail)
        with pytest.raises(js.InfeasibleError):
            step(state, big)
        assert alive(state)
        step(state, WORK.make_batch(1))

    def test_a_step_that_fails_while_it_runs_has_taken_its_state(self):
        """Then only a checkpoint helps: XLA has given the buffers to the results."""

        def check(x):
            if x > 0:
                raise ValueError("not this batch")
            return x

        def step(w, x):
            bad = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x.max())
            return w * 0.5 + bad, w.sum()

        planned = js.parallelize(step, cluster="cpu:1")  # of several, the others would wait
        w = planned(jnp.ones((8, 8)), -jnp.ones(8))[0]
        with pytest.raises(Exception, match="not this batch"):
            jax.block_until_ready(planned(w, jnp.ones(8)))
        assert w.is_deleted()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def make_nnx():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_batch():
    return jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), jnp.float32)


def nnx_step(cluster="cpu:8", constraints=None):
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    constraints = recipes.zero() if constraints is None else constraints
    step = js.parallelize(train, cluster=cluster, constraints=constraints, time_limit=10)
    return step, *make_nnx()
