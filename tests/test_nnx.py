"""Steps on flax.nnx objects run under a plan as they run under `nnx.jit`, to float64 rounding."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.lower.state import bytes_per_device
from jaxscaler.lower.step import achieved

PLANS = {"searched": list, "zero3": recipes.zero, "tensor": recipes.tensor_parallel}
STEPS = 3
WIDTH, HIDDEN, BATCH = 16, 32, 8


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


class Model(nnx.Module):
    """Dense, BatchNorm, dropout, dense. No bias before the norm: its gradient is exactly zero."""

    def __init__(self, rngs):
        kinds = dict(rngs=rngs, param_dtype=jnp.float64)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, **kinds)
        self.norm = nnx.BatchNorm(HIDDEN, **kinds)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, **kinds)

    def __call__(self, x):
        return self.down(self.drop(nnx.gelu(self.norm(self.up(x)))))


def create():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train_step(model, optimizer, metrics, batch):
    """As in Flax's own guides: everything is changed in place, nothing but the loss comes back."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def make_batch(seed=0, rows=BATCH):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((rows, WIDTH)) for k in ("x", "y")}


def run(step, objects):
    return [float(step(*objects, make_batch(i))) for i in range(STEPS)]


def arrays(objects):
    """{path: array} of everything in the objects, keys as their data."""
    leaves, _ = jax.tree.flatten_with_path(nnx.state(objects))
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in leaves
    }


def assert_same(got, want):
    got, want = arrays(got), arrays(want)
    assert got.keys() == want.keys()
    for path in got:
        np.testing.assert_allclose(got[path], want[path], rtol=1e-9, atol=1e-12, err_msg=path)


@pytest.fixture(scope="module")
def reference():
    """(objects, losses) after three steps of `nnx.jit`."""
    with jax.enable_x64(True):
        objects = create()
        return objects, run(nnx.jit(train_step), objects)


@pytest.mark.parametrize("plan", PLANS)
def test_same_numbers(reference, plan):
    expected, losses = reference
    step = js.parallelize(train_step, cluster="cpu:8", constraints=PLANS[plan](), time_limit=20)
    objects = step.init(create, batch=make_batch())
    model, kernel = objects[0], objects[0].up.kernel
    assert_bytes_as_planned(step, objects)
    np.testing.assert_allclose(run(step, objects), losses, rtol=1e-9, atol=1e-12)
    assert_same(objects, expected)
    assert_bytes_as_planned(step, objects)
    assert objects[0] is model and model.up.kernel is kernel  # in place
    assert achieved(step.compiled().compiled, step.compiled()) == ()


def assert_bytes_as_planned(step, objects):
    names = ("model/", "optimizer/", "metrics/")
    planned = sum(t.bytes_per_device for t in step.plan.tensors if t.path.startswith(names))
    held = bytes_per_device(jax.tree.leaves(nnx.state(objects)))
    assert len(held) == 8 and set(held.values()) == {planned}


def test_objects_made_eagerly_are_moved_and_split(reference):
    expected, losses = reference
    step = js.parallelize(train_step, cluster="cpu:8", constraints=recipes.zero())
    objects = create()
    np.testing.assert_allclose(run(step, objects), losses, rtol=1e-9, atol=1e-12)
    assert_same(objects, expected)
    kernel = objects[0].up.kernel.get_value()
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert step.compiled().donate == (0, 1, 2)


def test_roles_paths_and_pairs():
    step = js.parallelize(train_step, cluster="cpu:8", constraints=recipes.data_parallel())
    step.plan_for(create, batch=make_batch())
    graph = step.planned.graph
    role = {graph.values[v].path: graph.values[v].role for v in graph.inputs}
    assert role["model/up/kernel"] == role["model/norm/scale"] == "parameter"
    assert role["model/drop/rngs/key"] == role["model/drop/rngs/count"] == "rng"
    assert role["optimizer/opt_state/0/mu/up/kernel"] == role["optimizer/step"] == "optimizer"
    assert role["metrics/loss/total"] == "optimizer"
    assert role["batch/x"] == "batch"
    for i, o in graph.state:
        assert graph.output_paths[o] == "objects/" + graph.values[graph.inputs[i]].path
    assert len(graph.state) == len(role) - 2  # all but the batch
    assert graph.output_paths[-1] == "result"


def test_an_optimizer_that_only_counts_steps_is_state():
    def create_plain():
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    step = js.parallelize(update, cluster="cpu:8", constraints=recipes.zero())
    model, optimizer = step.init(create_plain, batch=make_batch())
    assert {t.path: t.role for t in step.plan.tensors if t.path.startswith("opt")} == {
        "optimizer/step": "optimizer"
    }
    assert step.planned.batch_arguments == (2,) and step.planned.state_arguments == (0, 1)
    step(model, optimizer, make_batch())
    assert int(optimizer.step[...]) == 1
    assert isinstance(step.abstract_state()[1], nnx.Optimizer)


@pytest.mark.parametrize("donated", [(), ("model", "optimizer")])
def test_nnx_jit_is_unwrapped_and_its_options_hold(reference, donated):
    expected, losses = reference

    @nnx.jit(static_argnames="scale", donate_argnames=donated)
    def scaled(model, optimizer, metrics, batch, scale):
        return train_step(model, optimizer, metrics, batch) * scale

    step = js.parallelize(scaled, cluster="cpu:8", constraints=recipes.zero())
    objects = create()
    before = objects[0].up.kernel.get_value(), objects[2].loss.total.get_value()
    got = [float(step(*objects, make_batch(i), scale=2)) for i in range(STEPS)]
    np.testing.assert_allclose(got, 2 * np.array(losses), rtol=1e-9, atol=1e-12)
    assert_same(objects, expected)
    assert step.compiled().donate == tuple(range(len(donated)))
    assert not before[1].is_deleted()
    with pytest.raises(js.PlanError, match="static"):
        step(*objects, make_batch(), scale=3)


def test_nnx_jit_around_the_planned_step(reference):
    expected, losses = reference
    step = js.parallelize(train_step, cluster="cpu:8", constraints=recipes.zero())
    objects = step.init(create, batch=make_batch())
    outer = nnx.jit(lambda *args: step(*args) + 1)
    np.testing.assert_allclose(run(outer, objects), np.array(losses) + 1, rtol=1e-9, atol=1e-12)
    assert_same(objects, expected)


def test_one_device_is_plain_jit(reference):
    expected, losses = reference
    step = js.parallelize(train_step, cluster="cpu:1")
    objects = step.init(create, batch=make_batch())
    np.testing.assert_allclose(run(step, objects), losses, rtol=1e-9, atol=1e-12)
    assert_same(objects, expected)


def test_second_call_does_not_trace():
    traces = []

    def counted(*args):
        traces.append(1)
        return train_step(*args)

    counted.__signature__ = inspect.signature(train_step)
    step = js.parallelize(counted, cluster="cpu:8", constraints=recipes.data_parallel())
    objects = create()
    step(*objects, make_batch(0))
    planned = len(traces)
    step(*objects, make_batch(1))
    step(*objects, make_batch(2))
    assert planned == len(traces) == 1


class Tied(nnx.Module):
    """Two layers with one kernel, and an alias of a submodule."""

    def __init__(self, rngs):
        self.one = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.two = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.two.kernel = self.one.kernel
        self.alias = self.one

    def __call__(self, x):
        return self.alias(jnp.tanh(self.two(self.one(x))))


def test_shared_parts_stay_shared():
    def together():
        return nnx.ModelAndOptimizer(Tied(nnx.Rngs(1)), optax.adam(1e-2))

    def step(opt, net, batch):  # `net` is a part of `opt`
        loss, grads = nnx.value_and_grad(loss_fn)(net, batch)
        opt.update(grads)
        return loss

    want = together()
    losses = run(nnx.jit(step), (want, want.model))
    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.zero())
    got, net = planned.init(lambda: (o := together(), o.model), batch=make_batch())
    assert net is got.model and net.two.kernel is net.one.kernel and net.alias is net.one
    np.testing.assert_allclose(run(planned, (got, net)), losses, rtol=1e-9, atol=1e-12)
    assert_same(got, want)
    assert net is got.model and net.two.kernel is net.one.kernel and net.alias is net.one


def test_objects_that_come_back_are_the_callers():
    def step(model, optimizer, metrics, batch):
        loss = train_step(model, optimizer, metrics, batch)
        return {"model": model, "twin": nnx.clone(model), "loss": loss}

    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.zero())
    objects = create()
    out = planned(*objects, make_batch())
    assert out["model"] is objects[0]
    assert out["twin"] is not objects[0]
    assert_same(out["twin"], objects[0])


def test_keyword_arguments_and_objects_in_containers(reference):
    expected, losses = reference

    def step(batch, *, objects):
        return train_step(*objects["trained"], objects["metrics"], batch)

    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.zero())
    model, optimizer, metrics = create()
    objects = {"trained": (model, optimizer), "metrics": metrics}
    got = [float(planned(objects=objects, batch=make_batch(i))) for i in range(STEPS)]
    np.testing.assert_allclose(got, losses, rtol=1e-9, atol=1e-12)
    assert_same((model, optimizer, metrics), expected)
    assert planned.compiled().donate == (1,)


def test_static_fields_that_the_step_changes():
    def step(model, optimizer, metrics, batch):
        model.train()
        loss = train_step(model, optimizer, metrics, batch)
        model.eval()
        return loss

    want, got = create(), create()
    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.zero())
    losses = run(nnx.jit(step), want)
    np.testing.assert_allclose(run(planned, got), losses, rtol=1e-9, atol=1e-12)
    assert got[0].drop.deterministic
    assert_same(got, want)


def test_other_rng_streams(reference):
    def step(model, rngs, batch):
        noisy = {**batch, "x": batch["x"] + rngs.noise.normal((BATCH, WIDTH), dtype=jnp.float64)}
        return loss_fn(model, noisy)

    want, got = (nnx.Rngs(params=0, noise=1) for _ in range(2))
    model = create()[0]
    losses = run(nnx.jit(step), (nnx.clone(model), want))
    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.data_parallel())
    np.testing.assert_allclose(run(planned, (model, got)), losses, rtol=1e-9, atol=1e-12)
    assert int(got.noise.count.get_value()) == int(want.noise.count.get_value()) == STEPS


def test_functional_style_under_jax_jit(reference):
    """Graph definition and state apart, `jax.jit` with donation: pytrees, the main road."""
    expected, losses = reference

    def step(definition, state, batch):
        objects = nnx.merge(definition, state)
        loss = train_step(*objects, batch)
        return nnx.state(objects), loss

    planned = js.parallelize(
        jax.jit(step, donate_argnums=1), cluster="cpu:8", constraints=recipes.zero()
    )
    definition, state = planned.init(lambda: nnx.split(create()), batch=make_batch())
    got = []
    for i in range(STEPS):
        state, loss = planned(definition, state, make_batch(i))
        got.append(float(loss))
    np.testing.assert_allclose(got, losses, rtol=1e-9, atol=1e-12)
    assert_same(nnx.merge(definition, state), expected)
    assert planned.compiled().donate == (1,)


def test_plan_without_devices():
    plan = js.plan(train_step, *create(), make_batch(), cluster="h100:8", time_limit=20)
    assert {t.path for t in plan.tensors} >= {"model/up/kernel", "optimizer/step", "batch/x"}


def test_saved_plan_is_followed(tmp_path):
    first = js.parallelize(train_step, cluster="cpu:8", constraints=recipes.zero())
    first.plan_for(create, batch=make_batch()).save(tmp_path / "plan.json")
    second = js.parallelize(train_step, plan=tmp_path / "plan.json")
    objects = second.init(create, batch=make_batch())
    run(second, objects)
    assert second.plan.digest() == first.plan.digest()


class Scanned(nnx.Module):
    """`nnx.scan` over `nnx.remat` blocks made by `nnx.vmap`: parameters [layers, ...]."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(block, x):
            return block(x)

        return forward(self.blocks, x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.dense(x)))


class Adapted(nnx.Module):
    """A frozen layer with a trained low-rank one beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return self.base(x) + self.lora(x)


def update(model, optimizer, batch):
    wrt = nnx.DiffState(0, optimizer.wrt)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, batch)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize(
    ("make", "tx", "wrt"),
    [
        (Scanned, optax.adam(1e-2), nnx.Param),
        (Adapted, optax.adam(1e-2), nnx.LoRAParam),
        (Tied, optax.MultiSteps(optax.adam(1e-2), 2), nnx.Param),
    ],
    ids=["scan-remat-vmap", "lora", "multi-steps"],
)
def test_same_numbers_of_other_modules(make, tx, wrt):
    def create():
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=wrt)

    want = create()
    losses = run(nnx.jit(update), want)
    step = js.parallelize(update, cluster="cpu:8", constraints=recipes.zero())
    got = step.init(create, batch=make_batch())
    np.testing.assert_allclose(run(step, got), losses, rtol=1e-9, atol=1e-12)
    assert_same(got, want)


def annotated(out_sharding, **metadata):
    """(create, a model's kernel) where the kernel says how it lies."""

    def create():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), out_sharding, **metadata)
        kinds = dict(rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        model = nnx.Sequential(
            nnx.Linear(WIDTH, HIDDEN, kernel_init=init, **kinds), nnx.Linear(HIDDEN, WIDTH, **kinds)
        )
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return create


KERNEL = "model/layers/0/kernel"
MESH = {"data": 2, "model": 4}


def specs_of(plan):
    return {t.path: t.spec for t in plan.tensors}


def test_what_variables_say_is_kept_on_a_mesh():
    create = annotated((None, "model"))
    with nnx.use_eager_sharding(False):
        want = create()
    losses = run(nnx.jit(update), want)
    step = js.parallelize(update, cluster="cpu:8", mesh=MESH)
    got = step.init(create, batch=make_batch())
    assert specs_of(step.plan)[KERNEL] == ((), ("model",))
    np.testing.assert_allclose(run(step, got), losses, rtol=1e-9, atol=1e-12)
    kernel = got[0].layers[0].kernel
    assert kernel.out_sharding == (None, "model")
    assert kernel.get_value().sharding.shard_shape((WIDTH, HIDDEN)) == (WIDTH, HIDDEN // 4)
    assert_same(got, want)


def test_what_variables_say_without_a_mesh_is_said():
    step = js.parallelize(update, cluster="cpu:8", constraints=recipes.zero())
    with pytest.warns(UserWarning, match=rf"'model'\) of an nnx.Param \({KERNEL}\)"):
        model, optimizer = step.init(annotated((None, "model")), batch=make_batch())
    assert np.isfinite(step(model, optimizer, make_batch()))
    assert model.layers[0].kernel.out_sharding == (None, "model")


def test_names_of_variables_go_through_rules():
    create = annotated(("embed", "mlp"), sharding_rules=(("embed", "data"),))
    step = js.parallelize(update, cluster="cpu:8", mesh=MESH)
    with nnx.logical_axis_rules([("mlp", "model")]):
        step.plan_for(create, batch=make_batch())
    assert specs_of(step.plan)[KERNEL] == (("data",), ("model",))
    with pytest.raises(js.ConstraintError, match=rf"Param \({KERNEL}\).* has no axis 'mlp'"):
        js.parallelize(update, cluster="cpu:8", mesh=MESH).plan_for(create, batch=make_batch())


def test_what_variables_and_specs_say_must_agree():
    with nnx.use_eager_sharding(False):
        objects = annotated((None, "model"), optimizer_sharding=("data", "model"))()
    plan = js.plan(update, *objects, make_batch(), cluster="cpu:8", mesh=MESH)
    moments = [s for path, s in specs_of(plan).items() if path.endswith("mu/layers/0/kernel")]
    assert moments == [(("data",), ("model",))]
    specs = {KERNEL: jax.P("model")}
    message = rf"specs\['{KERNEL}'\] = P\('model'\) .*, and out_sharding=\(None, 'model'\) of an"
    with pytest.raises(js.ConstraintError, match=message):
        js.plan(update, *objects, make_batch(), cluster="cpu:8", mesh=MESH, specs=specs)


def test_another_batch_size_keeps_the_objects():
    want, got = create(), create()
    plain = nnx.jit(train_step)
    step = js.parallelize(train_step, cluster="cpu:8", constraints=recipes.zero())
    for i, rows in enumerate((BATCH, 2 * BATCH, BATCH)):
        batch = make_batch(i, rows)
        np.testing.assert_allclose(step(*got, batch), plain(*want, batch), rtol=1e-9, atol=1e-12)
    assert_same(got, want)


# --- refused, by name -------------------------------------------------------------------------


def test_new_arrays_are_refused():
    class Sows(Model):
        def __call__(self, x):
            y = super().__call__(x)
            self.sow(nnx.Intermediate, "seen", y)
            return y

    def step(model, batch):
        return loss_fn(model, batch)

    model = Sows(nnx.Rngs(0))
    planned = js.parallelize(step, cluster="cpu:8")
    with pytest.raises(js.TraceError, match=r"model with other arrays.*seen.*nnx\.pop"):
        planned(model, make_batch())


class Trainer(nnx.Module):
    def __init__(self):
        self.model, self.optimizer, self.metrics = create()

    def step(self, batch):
        return train_step(self.model, self.optimizer, self.metrics, batch)


def test_methods(reference):
    _, losses = reference
    step = js.parallelize(Trainer.step, cluster="cpu:8", constraints=recipes.zero())
    np.testing.assert_allclose(run(step, (Trainer(),)), losses, rtol=1e-9, atol=1e-12)


def test_a_step_that_holds_objects_is_refused():
    trainer = Trainer()
    for step in (trainer.step, functools.partial(Trainer.step, trainer)):
        with pytest.raises(js.TraceError, match="objects as arguments of every call"):
            js.parallelize(step, cluster="cpu:8")(make_batch())


def test_fixed_shardings_are_refused():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    fixed = nnx.jit(train_step, in_shardings=(sharding,) * 4)
    with pytest.raises(js.TraceError, match="train_step fixes its own shardings"):
        js.parallelize(fixed, cluster="cpu:8")(*create(), make_batch())


def test_another_model_is_refused_and_touches_nothing():
    def step(model, batch):
        return loss_fn(model, batch)

    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.data_parallel())
    planned(Adapted(nnx.Rngs(0)), make_batch())
    other = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    with pytest.raises(js.PlanError, match="model/base/kernel"):
        planned(other, make_batch())
    assert not other.kernel.get_value().is_deleted()


def test_jaxscaler_alone_does_not_import_the_adapter():
    code = "import sys, jaxscaler; assert 'jaxscaler.nnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
