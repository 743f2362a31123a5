"""What docs/support.md claims of primitives is what their rules say; of styles, what happens."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rule_cases import CASES

import jaxscaler as js
from jaxscaler import _compat
from jaxscaler.graph.ir import FROZEN, PASS, REDUCE
from jaxscaler.graph.rules import rules_for

TEXT = (Path(__file__).parent.parent / "docs" / "support.md").read_text()


def claims():
    """(primitive, kinds of dims that occur by the table)."""
    table = TEXT.split("## Primitives")[1]
    for row in re.findall(r"^\|(.*)\|$", table, re.MULTILINE):
        _, names, *columns = (cell.strip() for cell in row.split("|"))
        kinds = {kind for kind, cell in zip((PASS, REDUCE, FROZEN), columns) if cell}
        for name in re.findall(r"`([^`]+)`", names):
            yield name, kinds


def equations(closed, name):
    for eqn in _compat.open_jaxpr(closed)[0].eqns:
        for body in _compat.subjaxprs(eqn):
            yield from equations(body, name)
        if eqn.primitive.name == name:
            yield eqn


@pytest.fixture(scope="module")
def kinds_of():
    """Kinds of factors by primitive, over all the programs of `rule_cases.py`."""
    with jax.enable_x64(True):
        found = [
            (case.primitive, eqn)
            for case in CASES
            for eqn in equations(jax.make_jaxpr(case.fn)(*case.operands()), case.primitive)
        ]
        rules = rules_for([eqn for _, eqn in found])
    kinds = {}
    for (name, _), rule in zip(found, rules, strict=True):
        kinds.setdefault(name, set()).update(f.kind for f in rule.factors)
    return kinds


@pytest.mark.parametrize(("name", "kinds"), list(claims()), ids=[name for name, _ in claims()])
def test_primitives(name, kinds, kinds_of):
    assert kinds_of[name] == kinds


def explicit(w):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        return js.plan(lambda w: w + 1, w, cluster="cpu:8")


def on_half_of_the_devices(x):
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=kinds, devices=jax.devices()[:4])
    rows = jax.P("x")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=rows, out_specs=rows)(x)


@pytest.mark.parametrize(
    ("claim", "plan"),
    [
        ("`in_shardings`", lambda w: js.plan(
            jax.jit(lambda w: w, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
            w, cluster="cpu:8")),
        ("`pmap` binds", lambda w: js.plan(
            lambda w: jax.lax.pmean(w, "batch"), w, cluster="cpu:8")),
        ("Explicit axes", explicit),
        ("a leaf that is no array", lambda w: js.plan(lambda w, s: w, w, "text", cluster="cpu:8")),
        ("`jax.Ref` argument", lambda w: js.plan(
            lambda r: r[...] + 1, jax.new_ref(w), cluster="cpu:8")),
        ("`shard_map` over another", lambda w: js.plan(
            on_half_of_the_devices, w, cluster="cpu:8")),
    ],
    ids=["shardings", "pmap", "explicit", "leaf", "ref", "shard_map"],
)  # fmt: skip
def test_refused(claim, plan):
    (row,) = [line for line in TEXT.splitlines() if claim in line]
    assert "refused" in row
    with pytest.raises(js.TraceError):
        plan(jnp.zeros(8))


def test_a_while_loop_has_a_note():
    def step(w):
        return jax.lax.while_loop(lambda w: w.sum() < 9, lambda w: w + 1, w)

    notes = js.plan(step, jnp.zeros(8), cluster="cpu:8").notes
    assert any("while" in note for note in notes)
