"""What a user says of shardings is kept: constraints in the step, logical axes, specs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxscaler as js
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.cluster.mesh import named_mesh
from jaxscaler.lower.step import achieved

MESH = {"data": 4, "model": 2}
constrain = jax.lax.with_sharding_constraint


def make_step(hidden=None, out=None):
    """A two-layer step of gradient descent; specs or shardings of its activations, if any."""

    def step(params, x):
        def loss(params):
            y = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
            y = y if hidden is None else constrain(y, hidden)
            y = y @ params["down"]["kernel"]
            y = y if out is None else constrain(y, out)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": {"kernel": jax.random.normal(keys[0], (16, 32)), "bias": jnp.ones(32)},
        "down": {"kernel": jax.random.normal(keys[1], (32, 8))},
    }
    return params, jax.random.normal(keys[2], (64, 16))


def run(step, **options):
    """The planned step after a call; its results are those of plain `jit` without constraints."""
    expected, value = jax.jit(make_step())(*arguments())
    planned = js.parallelize(step, cluster="cpu:8", donate=(), **options)
    got, loss = planned(*arguments())
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)
    compiled = planned.compiled()
    assert achieved(compiled.compiled, compiled) == ()
    return planned, got


def results_of(planned, primitive="sharding_constraint"):
    """Specs of the results of the user's constraints in the plan, in program order."""
    p = planned.planned
    space, classes = p.space, p.folded.value_class
    found = []
    for a in p.graph.annotations:
        node, port = space.made[int(classes[a.value])]
        dims = [()] * len(a.spec)
        for axis, f in zip(p.plan.axes, p.rows[node]):
            for d, factors in enumerate(space.nodes[node].ports[port].dims):
                dims[d] += (axis[0],) if f in factors else ()
        found.append(tuple(dims))
    return found


@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "model"), P("model"), P()])
def test_a_constraint_is_kept(spec):
    planned, _ = run(make_step(hidden=spec), mesh=MESH)
    assert planned.plan.axes == (("data", 4), ("model", 2))
    wanted = tuple((s,) if s else () for s in (*spec, None, None)[:2])
    assert results_of(planned) == [wanted] * len(results_of(planned)) and results_of(planned)


def test_what_a_constraint_leaves_open_is_searched():
    planned, _ = run(make_step(hidden=P(P.UNCONSTRAINED, "model")), mesh=MESH)
    assert all(spec[1] == ("model",) and "model" not in spec[0] for spec in results_of(planned))


def test_a_users_own_mesh():
    devices = np.array(jax.devices())[::-1].reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    planned, _ = run(make_step(hidden=NamedSharding(mesh, P("b", "a"))), mesh=mesh)
    assert (planned.mesh().devices == devices).all() and planned.plan.axes == (("a", 2), ("b", 4))
    assert set(results_of(planned)) == {(("b",), ("a",))}


def test_an_axis_of_one_device():
    planned, _ = run(make_step(hidden=P("data", "model")), mesh={"data": 8, "model": 1})
    assert planned.plan.axes == (("data", 8),)
    assert set(results_of(planned)) == {(("data",), ())}


def test_one_device():
    planned = js.parallelize(make_step(hidden=P("data")), cluster="cpu:1", mesh={"data": 1})
    expected, value = jax.jit(make_step())(*arguments())
    got, loss = planned(*arguments())
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


def test_specs_of_arguments():
    specs = {"params/*/kernel": P(None, "model"), "x": P("data")}
    planned, got = run(make_step(), mesh=MESH, specs=specs)
    for leaf in (got["up"]["kernel"], got["down"]["kernel"]):
        assert leaf.sharding.is_equivalent_to(NamedSharding(planned.mesh(), P(None, "model")), 2)
    spec = {t.path: t.spec for t in planned.plan.tensors}
    assert spec["params/up/kernel"] == ((), ("model",)) and spec["x"] == (("data",), ())


def test_leaves_of_equal_layers_may_be_pinned_apart():
    def step(params, x):
        def loss(params):
            y = x
            for i in range(4):
                y = jnp.tanh(y @ params[f"h_{i}"])
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {f"h_{i}": jnp.full((16, 16), 0.1 * i) for i in range(4)}
    x = jnp.ones((32, 16))
    specs = {"params/h_1": P("data", None), "params/h_2": P("model", "data")}
    planned = js.parallelize(step, cluster="cpu:8", mesh=MESH, specs=specs, donate=())
    got = planned(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, step(params, x))
    for path, spec in specs.items():
        leaf = got[path.split("/")[1]]
        assert leaf.sharding.is_equivalent_to(NamedSharding(planned.mesh(), spec), 2)


class Logical(nn.Module):
    """A dense layer with logical axes on its kernel and its result."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        y = jnp.tanh(nn.Dense(32, kernel_init=init)(x))
        return nn.with_logical_constraint(y, ("batch", "mlp"))


def test_flax_logical_axes():
    model, rules = Logical(), (("batch", "data"), ("mlp", "model"), ("embed", None))

    def step(params, x):
        def loss(params):
            with nn.logical_axis_rules(rules):
                return jnp.mean(model.apply({"params": params}, x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    x = jnp.ones((16, 8))
    params = model.init(jax.random.key(0), x)["params"]
    expected, value = jax.jit(step)(params, x)
    planned = js.parallelize(step, cluster="cpu:8", mesh=MESH, donate=())
    got, loss = planned(params, x)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert {(("data",), ("model",)), ((), ("model",))} <= set(results_of(planned))


def test_a_shard_map_over_the_same_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    part = jax.shard_map(
        lambda x: x - jax.lax.pmean(x.sum(), ("data", "model")),
        mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"),
    )  # fmt: skip

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(part(constrain(x @ w, P("data"))) ** 2))(w)

    w, x = jnp.arange(16.0).reshape(4, 4) / 16, jnp.ones((16, 4))
    planned = js.parallelize(step, cluster="cpu:8", mesh=mesh, donate=())
    with jax.set_mesh(mesh):
        expected = jax.jit(step)(w, x)
    np.testing.assert_allclose(planned(w, x), expected, rtol=1e-5)
    assert any("shard_map" in note for note in planned.plan.notes)


# --- what is refused --------------------------------------------------------------------------


def refused(step, said, constraints=(), **options):
    with pytest.raises(js.JaxscalerError, match=said):
        js.plan(
            step, *arguments(), cluster="cpu:8", cache=False, constraints=constraints, **options
        )


def test_names_without_a_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = make_step(hidden=NamedSharding(mesh, P("data")))
    refused(step, r"with_sharding_constraint\(P\('data', None\)\) at .*test_annotations.py.*mesh=")
    refused(make_step(), r"specs\['x'\] names axes.*mesh=", specs={"x": P("data")})


def test_another_mesh_than_the_constraint_has():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = make_step(hidden=NamedSharding(mesh, P("data")))
    refused(step, "is for a mesh .*'data': 4.* but mesh= is .*'data': 2", mesh={"data": 2, "x": 4})


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ({"params/*/kernal": P("data")}, "'params/\\*/kernal' matches no argument"),
        ({"params/*/kernel": P("tensor")}, "has no axis 'tensor'"),
        ({"params/up/bias": P(None, "data")}, "2 dims, but the value has shape \\(32,\\)"),
        ({"params/up/kernel": P("data", "data")}, "axis 'data' can cut one dim only"),
        ({"params/up/kernel": P(("model", "data"))}, "not in the order of the mesh"),
        (
            {"params/up/*": P("model"), "params/*/kernel": P("data")},
            r"both ways: specs\['params/up/\*'\].* and specs\['params/\*/kernel'\]",
        ),
    ],
)
def test_specs_that_can_not_be(specs, said):
    refused(make_step(), said, mesh=MESH, specs=specs)


def test_a_pin_that_does_not_divide():
    def odd(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    with pytest.raises(
        js.ConstraintError, match=r"dim 0 of shape \(10, 4\) does not divide into 4"
    ):
        js.plan(odd, jnp.ones((10, 4)), jnp.ones((8, 10)), cluster="cpu:8", cache=False, mesh=MESH,
                specs={"w": P("data")})  # fmt: skip


def test_a_pin_against_a_line_names_both():
    whole = js.op_trans(js.values("params/up/kernel"), js.Replicate())
    refused(
        make_step(), r"specs\['params/up/kernel'\].*contradicts.*Replicate.*test_annotations.py",
        [whole], mesh=MESH, specs={"params/up/kernel": P("data")},
    )  # fmt: skip
    never = js.forbid(js.op_trans(js.ops(phase="forward"), js.Split("batch")))
    refused(
        make_step(hidden=P("data")), r"with_sharding_constraint.*contradicts.*test_annotations.py",
        [never], mesh=MESH,
    )  # fmt: skip


def test_specs_beside_a_plan():
    plan = js.plan(make_step(), *arguments(), cluster="cpu:8", cache=False, mesh=MESH)
    with pytest.raises(js.PlanError, match="leave specs= or plan= out"):
        js.parallelize(make_step(), plan=plan, mesh=MESH, specs={"x": P("data")})
    run(make_step(), plan=plan, mesh=MESH)


def test_explicit_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    refused(make_step(), "Explicit", mesh=mesh)


def test_a_mesh_is_cut_from_the_levels_of_a_cluster():
    cluster = Cluster.parse("h100:8x4")
    mesh = named_mesh(cluster, (("data", 8), ("model", 4)))
    assert [[(p.level.name, p.size, p.stride) for p in a.parts] for a in mesh.axes] == [
        [("node", 4, 1), ("device", 2, 4)],
        [("device", 4, 1)],
    ]
    with pytest.raises(js.ClusterError, match="is not of the 32 devices"):
        named_mesh(cluster, (("data", 8), ("model", 2)))
