"""A plan in forms that need no jaxscaler: plain JAX source, and rules for paths."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from jax.sharding import PartitionSpec as P

import jaxscaler as js
from jaxscaler import recipes
from jaxscaler.errors import PlanError
from jaxscaler.program import ALL, ANY, Split, op_trans, ops
from jaxscaler.report.export import first_match, partition_spec, to_rules
from jaxscaler.verify.hlo import hlo_collectives
from jaxscaler.verify.normal_form import totals
from models import gpt, llama, mlp, moe, resnet

WORK = mlp.workload(dtype="float32")
ARGS = (WORK.state, WORK.batch)


def parallel(workload, constraints, cluster="cpu:8", **options):
    step = js.parallelize(
        workload.step, cluster=cluster, constraints=constraints, time_limit=30, **options
    )
    step.plan_for(workload.init, jax.random.key(0), batch=workload.batch)
    return step


def module(source):
    names = {}
    exec(compile(source, "exported.py", "exec"), names)
    return names


# -- rules -----------------------------------------------------------------------------------------


def state_of(plan):
    return {t.path: t.spec for t in plan.tensors if t.role in ("parameter", "optimizer")}


def assert_exact(rules, state):
    """In the words of those who use such rules: `re.search`, the first that is found counts."""
    for path, spec in state.items():
        first = next(found for pattern, found in rules if re.search(pattern, path))
        assert first == partition_spec(spec), path


@pytest.mark.parametrize(
    ("recipe", "most"),
    [(recipes.data_parallel(), 1), (recipes.zero(1), 10), (recipes.zero(), 10),
     (recipes.tensor_parallel(), 30)],
    ids=["data", "zero1", "zero3", "tensor"],
)  # fmt: skip
def test_rules_say_where_every_leaf_lies(recipe, most):
    plan = parallel(gpt.workload(dtype="float32", seq=16, layers=4), recipe).plan
    rules, unsaid = plan.to_rules()
    state = state_of(plan)
    assert len(state) > 100
    assert_exact(rules, state)
    assert len(rules) <= most
    assert any(line.startswith("the mesh: device") for line in unsaid)
    assert any(line.startswith("batch/inputs: P(") for line in unsaid)
    assert any("dot_general" in line for line in unsaid)


def test_no_rule_is_in_vain():
    plan = parallel(gpt.workload(dtype="float32", seq=16), recipes.tensor_parallel()).plan
    rules, state = plan.to_rules().rules, state_of(plan)
    for i in range(len(rules)):
        fewer = [*rules[:i], *rules[i + 1 :]]
        assert any(first_match(fewer, path) != partition_spec(s) for path, s in state.items())


def tensor(path, spec):
    return replace(TENSOR, path=path, spec=spec, shape=(8,) * len(spec))


PLAN = js.plan(WORK.step, WORK.state, WORK.batch, cluster="cpu:8", constraints=recipes.zero())
TENSOR = next(t for t in PLAN.tensors if t.role == "parameter")
PARTS = some.sampled_from(["a", "b.c", "h_0", "h_1", "h_10", "0"])
NAMES = some.lists(PARTS, min_size=1, max_size=5)
SPECS = some.sampled_from([(), ((),), (("x",),), (("x",), ()), ((), ("y",)), (("x", "y"), ())])


@given(some.dictionaries(NAMES.map("/".join), SPECS, min_size=1, max_size=12))
def test_rules_of_any_state_are_exact(state):
    plan = replace(PLAN, tensors=tuple(tensor(*item) for item in state.items()))
    assert_exact(to_rules(plan).rules, state)


def test_numbers_are_general_where_layers_lie_alike():
    lies = {"up": (("x",), ()), "down": ((), ("x",)), "scale": ((),)}
    state = {f"h_{i}/{name}": spec for i in range(12) for name, spec in lies.items()}
    plan = replace(PLAN, tensors=tuple(tensor(*item) for item in state.items()))
    rules, _ = to_rules(plan)
    assert len(rules) == 3
    assert first_match(rules, "h_99/down") == P(None, "x")
    state["h_3/up"] = ()
    plan = replace(PLAN, tensors=tuple(tensor(*item) for item in state.items()))
    assert_exact(to_rules(plan).rules, state)
    assert len(to_rules(plan).rules) == 4


def test_what_no_path_tells_apart_is_listed():
    plan = replace(PLAN, tensors=(tensor("w", ((),)), tensor("w", (("x",),)), tensor("v", ((),))))
    rules, unsaid = to_rules(plan)
    assert rules == ((".*", P()),)
    assert unsaid[0].startswith("w: leaves of this path lie apart")


# -- source ----------------------------------------------------------------------------------------


def collectives(compiled, mesh):
    return totals(hlo_collectives(compiled.as_text(), mesh))


MODELS = {
    "mlp": lambda: WORK,
    "gpt": lambda: gpt.workload(dtype="float32", seq=16),
    "llama": lambda: llama.workload(dtype="float32", seq=16, scan=True, remat=True),
    "resnet": lambda: resnet.workload(dtype="float32", stages=(1,)),
    "moe": lambda: moe.workload(dtype="float32", layers=1),
}
PLANS = {"searched": list, "zero3": recipes.zero, "tensor": recipes.tensor_parallel}
QUICK = {("mlp", "zero3"), ("llama", "tensor"), ("moe", "searched")}


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param(m, p, marks=[] if (m, p) in QUICK else pytest.mark.slow)
        for m in MODELS
        for p in PLANS
    ],
)
def test_source_compiles_to_the_same_collectives(model, plan):
    assert_same_collectives(MODELS[model](), PLANS[plan](), some=plan != "searched")


def assert_same_collectives(workload, recipe, some=True, **options):
    step = parallel(workload, recipe, **options)
    exported = module(step.to_python())
    mesh = exported["make_mesh"]()
    assert mesh == step.mesh()
    args = (workload.state, workload.batch)
    compiled = exported["jit_step"](workload.step, mesh, *args).lower(*args).compile()
    found = collectives(compiled, mesh)
    assert found or not some
    assert found == collectives(step.compiled().compiled, step.mesh())


def test_source_says_branches_kernels_and_what_the_step_says():
    """A `cond` whose branches end in one layout, a kernel that each device runs on its part, and
    constraints of the step's author, which speak of its own mesh.
    """

    def square(x):
        return x * x

    squared = js.register_rule(square, "b h -> b h")

    def step(state, batch):
        x = jax.lax.with_sharding_constraint(squared(batch @ state["w"]), jax.P("data", "model"))
        grown = jax.lax.cond(x.sum() > 0, lambda w: w + x.T @ x, lambda w: w * 0.5, state["w"])
        return {"w": grown, "n": state["n"] + 1}, {"loss": x.sum()}

    state = {"w": jnp.ones((16, 16)), "n": jnp.zeros(())}
    workload = SimpleNamespace(step=step, state=state, batch=jnp.ones((8, 16)))
    workload.init = lambda rng: workload.state
    assert_same_collectives(workload, [], mesh={"data": 4, "model": 2})


def test_source_runs_and_gives_the_same_numbers():
    step = parallel(WORK, recipes.zero(), cluster="cpu:4x2")
    exported = module(step.to_python())
    mesh = exported["make_mesh"]()
    run = exported["jit_step"](WORK.step, mesh, WORK.state, WORK.batch)
    state = jax.device_put(
        WORK.init(jax.random.key(0)),
        exported["shardings"](mesh, WORK.state, exported["INPUTS"], "state"),
    )
    planned = step.init(WORK.init, jax.random.key(0))
    for seed in range(2):
        given = state
        state, metrics = run(state, WORK.make_batch(seed))
        planned, expected = step(planned, WORK.make_batch(seed))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
        assert given.params["pair_0"]["up"]["kernel"].is_deleted()
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(planned), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


PLAIN = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import exported

def step(w, x):
    return w - 0.1 * x.T @ (x @ w), (x @ w).sum()

w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
mesh = exported.make_mesh()
new, total = exported.jit_step(step, mesh, w, x)(w, x)
print(len(new.sharding.device_set), float(new.sum()), float(total))
assert not any(name.startswith("jaxscaler") for name in sys.modules)
"""


def test_source_needs_no_jaxscaler(tmp_path):
    def step(w, x):
        return w - 0.1 * x.T @ (x @ w), (x @ w).sum()

    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    planned = js.parallelize(step, cluster="cpu:8", constraints=recipes.data_parallel())
    new, total = planned(w, x)
    (tmp_path / "exported.py").write_text(planned.to_python())
    (tmp_path / "plain.py").write_text(PLAIN)
    ran = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    devices, *numbers = map(float, ran.stdout.split())
    assert devices == 8
    np.testing.assert_allclose(numbers, [float(new.sum()), float(total)], rtol=1e-5)


def test_source_is_for_the_step_that_was_planned():
    exported = module(parallel(WORK, recipes.zero()).to_python())

    def other(state, batch):
        state, metrics = WORK.step(state, batch)
        return state, {"loss": 2 * metrics["loss"]}

    jitted = exported["jit_step"](other, exported["make_mesh"](), *ARGS)
    with pytest.raises(ValueError, match="another program"):
        jitted.lower(*ARGS)


def test_source_lists_what_it_can_not_say():
    """Plain JAX has no way to shrink the grid of a kernel that is cut."""
    from jax.experimental import pallas as pl

    def step(w, x):
        block = pl.BlockSpec((1, 128), lambda i: (i, 0))
        return w * 0.9, pl.pallas_call(
            lambda source, target: target.__setitem__(..., source[...] * 2),
            grid=(8,), in_specs=[block], out_specs=block, interpret=True,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x * w)  # fmt: skip

    cut = op_trans(ops(primitive="pallas_call"), Split(ANY), ALL)
    planned = js.parallelize(step, cluster="cpu:8", constraints=[cut])
    planned.plan_for(lambda: jnp.ones(()), batch=jnp.ones((8, 128)))
    unsaid = planned.to_python().split("# What this form can not say")[1]
    assert "# - pallas_call" in unsaid
    source = parallel(WORK, recipes.zero()).to_python()
    assert "# What this form can not say, and leaves to the compiler:\n# Nothing." in source
    assert max(map(len, source.split("INSIDE = {")[0].splitlines())) <= 100


def test_static_arguments_and_names():
    def step(scale, w, x):
        return w - scale * x.mean() * w

    step = jax.jit(step, static_argnums=0)
    planned = js.parallelize(step, cluster="cpu:8")
    w, x = jnp.ones((8, 8)), jnp.ones(8)
    expected = step(0.5, w, x)
    planned(0.5, w, x)
    exported = module(planned.to_python())
    assert exported["ARGUMENTS"] == ("w", "x")
    w = jnp.ones((8, 8))
    run = exported["jit_step"](step.__wrapped__, exported["make_mesh"](), 0.5, w, x)
    np.testing.assert_allclose(run(0.5, w, x), expected)
    assert w.is_deleted() == (planned.compiled().donate != ())


def test_what_has_no_form_in_plain_jax_is_refused():
    from flax import nnx

    def named(w, *, x):
        return w * x.mean()

    planned = js.parallelize(named, cluster="cpu:8")
    planned(jnp.ones((8, 8)), x=jnp.ones(8))
    with pytest.raises(PlanError, match=r"given by keyword \(\('x',\)\)"):
        planned.to_python()

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    planned = js.parallelize(lambda model, x: model(x).sum(), cluster="cpu:8")
    planned(model, jnp.ones((8, 8)))
    with pytest.raises(PlanError, match=r"flax.nnx objects has no form in plain JAX"):
        planned.to_python()
    assert planned.plan.to_rules().rules
