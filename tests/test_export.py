"""A plan in forms that need no jaxscaler: plain JAX source, and rules for paths."""

import re
import subprocess
import sys
from dataclasses import replace

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
from jaxscaler.report.export import first_match, partition_spec, to_rules
from jaxscaler.verify.hlo import hlo_collectives
from jaxscaler.verify.normal_form import totals
from models import gpt, mlp

WORK = mlp.workload(dtype="float32")


def parallel(workload, constraints, cluster="cpu:8"):
    step = js.parallelize(workload.step, cluster=cluster, constraints=constraints, time_limit=10)
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


@pytest.mark.parametrize(
    ("workload", "recipe"),
    [
        (WORK, recipes.data_parallel()),
        (WORK, recipes.zero(1)),
        (mlp.workload(dtype="float32", pairs=1), recipes.tensor_parallel()),
    ],
    ids=["data", "zero1", "tensor"],
)
def test_source_compiles_to_the_same_collectives(workload, recipe):
    """Where the inside of the step follows from how state and batch lie."""
    step = parallel(workload, recipe)
    source = step.to_python()
    exported = module(source)
    mesh = exported["make_mesh"]()
    assert mesh == step.mesh()
    args = (workload.state, workload.batch)
    compiled = exported["jit_step"](workload.step, mesh, *args).lower(*args).compile()
    found = collectives(compiled, mesh)
    assert found
    assert found == collectives(step.compiled().compiled, step.mesh())


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


def test_source_lists_what_it_can_not_say():
    source = parallel(WORK, recipes.zero()).to_python()
    unsaid = " ".join(source.split("# Not said here")[1].replace("#  ", "").split())
    assert "inside the step, whole: state/params/pair_0/down/kernel in use" in unsaid
    assert "inside the step, batch over device: " in unsaid
    assert "and 22 more that plan.program() lists" in unsaid
    assert max(map(len, source.splitlines())) <= 100


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
