"""The language and what it does to a space: lines as text, refusals, and masks of strategies."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hy

import jaxscaler as js
from jaxscaler import (
    ALL,
    ANY,
    ConstraintError,
    Replicate,
    Split,
    forbid,
    op_assign,
    op_trans,
    ops,
    recipes,
    values,
)
from jaxscaler.cluster.mesh import candidate_meshes
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import fold
from jaxscaler.graph.labels import factor_labels
from jaxscaler.space import strategies as st
from jaxscaler.space.build import build_space
from jaxscaler.space.constraints import Constraints
from jaxscaler.trace import trace
from models import mlp

# -- the language ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (op_trans(ops(), Split("batch"), ALL), "op_trans(ops(), Split('batch'), ALL)"),
        (op_trans(values("a/*"), Split(ANY), 4), "op_trans(values(path='a/*'), Split(ANY), 4)"),
        (op_trans(values(), Split(0), (2, 4)), "op_trans(values(), Split(0), (2, 4))"),
        (
            op_trans(ops(phase="update", parameter="*"), Replicate()),
            "op_trans(ops(phase='update', parameter='*'), Replicate())",
        ),
        (op_assign(values(role="batch"), "node"), "op_assign(values(role='batch'), 'node')"),
        (forbid(op_trans(ops(), Split("sequence"))), "forbid(op_trans(ops(), Split('sequence')))"),
    ],
)
def test_a_line_reads_as_it_was_written(line, text):
    assert str(line) == text
    again = eval(text, vars(js))
    assert replace(again, source=line.source) == line
    assert re.fullmatch(r".*test_program\.py:\d+", line.source)


def test_forbidding_twice_is_requiring():
    line = op_trans(ops(), Split("batch"), 2)
    assert forbid(forbid(line)) == line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops(phase="sideways"), "no phase 'sideways'; there are forward, backward, update"),
        (lambda: values(role=("parameter", "tea")), "no role 'tea'"),
        (lambda: op_trans("layer", Replicate()), "'layer' is no subject"),
        (lambda: op_trans(ops(), "batch"), "'batch' is no algorithm"),
        (lambda: op_trans(ops(), Split("batch"), "most"), "'most' is no number, range or ALL"),
        (lambda: op_trans(ops(), Split("batch"), 0), "num 0"),
        (lambda: op_trans(ops(), Split("batch"), 2.5), r"num 2\.5"),
        (lambda: op_trans(ops(), Split("batch"), True), "num True"),
        (lambda: op_trans(ops(), Split("batch"), (4, 2)), r"num \(4, 2\)"),
        (lambda: op_trans(ops(), Split("batch"), (1, 2, 3)), r"num \(1, 2, 3\)"),
        (lambda: op_trans(ops(), Replicate(), 2), "makes no parts"),
        (lambda: op_trans(values(), Split(-1)), r"Split\(-1\).*counted from 0"),
        (lambda: op_trans(ops(), Split(0)), r"Split\(0\).*name a factor"),
        (lambda: op_assign(ops(), 3), "place 3 is no name"),
        (lambda: op_assign("layer", "node"), "'layer' is no subject"),
    ],
)
def test_what_is_no_line_is_refused(make, message):
    with pytest.raises(ConstraintError, match=message):
        make()


def test_recipes_are_programs():
    assert [str(line) for line in recipes.zero(1)] == [
        "op_trans(ops(phase=('forward', 'backward')), Split('batch'), ALL)",
        "op_trans(values(role='optimizer'), Split(ANY), ALL)",
        "op_trans(values(role='parameter'), Replicate())",
    ]
    assert all(line.forbidden for line in recipes.tensor_parallel()[:2])
    assert str(recipes.data_parallel()[-1]) == "op_trans(ops(phase='update'), Replicate())"


# -- masks -----------------------------------------------------------------------------------------


def narrow_bias_step(state, batch):
    """A layer whose bias of 10 no 8 devices can share."""
    loss = jnp.mean((batch @ state["w"] + state["b"]) ** 2)
    return {k: v - 0.1 * loss for k, v in state.items()}, loss


@pytest.fixture(scope="module")
def skeleton():
    """(graph, folded, space) of a tiny MLP in float32."""
    work = mlp.workload(dtype="float32")
    return skeleton_of(work.step, work.state, work.batch)


def skeleton_of(step, *args):
    graph = build(trace(step, *args))
    folded = fold(graph, True)
    return graph, folded, build_space(graph, folded, factor_labels(graph, folded))


def mesh_of(cluster, axes):
    (mesh,) = [m for m in candidate_meshes(js.Cluster.parse(cluster)) if str(m) == axes]
    return mesh


def masks(skeleton, mesh, *lines):
    """(bound constraints, {node name: (node, rows, mask)}) of the nodes that `lines` speak of."""
    bound = Constraints(lines, *skeleton)
    out = {}
    for node in skeleton[2].nodes:
        rows = st.strategies(node, mesh.shape)
        before = list(bound.matched)
        mask = bound.mask(node, rows, mesh)
        if bound.matched != before:
            out[node.name] = (node, rows, mask)
    return bound, out


WHOLE = ("cpu:8", "device=8")
CUT = ("cpu:8", "device0=2,device1=4")


@pytest.mark.parametrize("axes", [WHOLE, CUT])
@pytest.mark.parametrize(("num", "least", "most"), [(ALL, 8, 8), (8, 8, 8), ((2, 8), 2, 8)])
def test_split_leaves_what_cuts_the_factor_so_often(skeleton, axes, num, least, most):
    mesh = mesh_of(*axes)
    line = op_trans(ops(phase=("forward", "backward")), Split("batch"), num)
    _, found = masks(skeleton, mesh, line)
    assert len(found) > 5
    for node, rows, mask in found.values():
        batch = [f for f, name in node.labels if name == "batch" and node.factors[f].size > 1]
        parts = st.parts(node, rows, mesh.shape)[:, batch].prod(axis=1)
        assert mask.any()
        np.testing.assert_array_equal(mask, (least <= parts) & (parts <= most))


def test_a_range_has_two_ends(skeleton):
    mesh = mesh_of(*CUT)
    _, found = masks(skeleton, mesh, op_trans(values("state/params/*"), Split(ANY), (2, 4)))
    assert found
    for node, rows, mask in found.values():
        parts = np.where(st.layouts(node, 0, rows) >= 0, mesh.shape, 1).prod(axis=1)
        assert set(parts[mask]) == {2, 4}
        assert {1, 8} <= set(parts[~mask])


def test_replicate_and_its_opposite(skeleton):
    mesh = mesh_of(*WHOLE)
    line = op_trans(values(role="parameter"), Replicate())
    _, kept = masks(skeleton, mesh, line)
    _, left = masks(skeleton, mesh, forbid(line))
    assert kept.keys() == left.keys()
    for name, (node, rows, mask) in kept.items():
        assert (st.layouts(node, 0, rows[mask]) == st.UNUSED).all()
        np.testing.assert_array_equal(mask, ~left[name][2])


def test_a_value_is_split_by_dim(skeleton):
    mesh = mesh_of(*WHOLE)
    _, found = masks(skeleton, mesh, op_trans(values("*params/pair_*/up/kernel"), Split(1), ALL))
    assert found
    for node, rows, mask in found.values():
        assert (st.layouts(node, 0, rows[mask]) == 1).all()


@given(
    factor=hy.sampled_from(["batch", "contraction", ANY]),
    num=hy.one_of(hy.integers(1, 8), hy.tuples(hy.integers(1, 4), hy.integers(4, 8)), hy.just(ALL)),
    mesh=hy.sampled_from([mesh_of(*WHOLE), mesh_of(*CUT)]),
)
def test_a_line_and_its_opposite_share_a_node_between_them(skeleton, factor, num, mesh):
    line = op_trans(ops(), Split(factor), num)
    bound = Constraints((line, forbid(line)), *skeleton)
    for node in skeleton[2].nodes:
        rows = st.strategies(node, mesh.shape)
        does = bound.allowed(0, node, rows, mesh)
        does_not = bound.allowed(1, node, rows, mesh)
        assert (does is None) == (does_not is None)
        if does is not None and node.name not in bound.relaxed[0]:
            np.testing.assert_array_equal(does, ~does_not)


@pytest.mark.parametrize("level", ["node", "device"])
def test_parts_go_to_the_level_they_are_assigned(skeleton, level):
    mesh = mesh_of("h100:8x4", "node=4,device=8")
    away = [name != level for name in mesh.names]
    line = op_assign(ops(phase="forward"), level)
    _, found = masks(skeleton, mesh, line)
    _, others = masks(skeleton, mesh, forbid(line))
    assert found
    for name, (_, rows, mask) in found.items():
        crossing = (rows[:, away] != st.UNUSED).any(axis=1)
        np.testing.assert_array_equal(mask, ~crossing)
        np.testing.assert_array_equal(others[name][2], crossing)


def test_an_axis_that_joins_two_levels_is_at_neither(skeleton):
    mesh = mesh_of("v5e:2x4", "x_y=8")
    _, found = masks(skeleton, mesh, op_assign(ops(phase="forward"), "x"))
    assert found
    for _, rows, mask in found.values():
        assert (rows[mask] == st.UNUSED).all()


def test_an_unknown_level_is_an_error_that_names_the_known(skeleton):
    with pytest.raises(ConstraintError, match=r"no level or axis 'rack'; it has device"):
        masks(skeleton, mesh_of(*WHOLE), op_assign(ops(), "rack"))


def test_a_clash_names_lines_node_and_mesh(skeleton):
    lines = (
        op_trans(ops(phase="forward"), Split("batch"), ALL),
        op_trans(ops(phase="forward"), Split("contraction"), ALL),
    )
    with pytest.raises(ConstraintError) as error:
        masks(skeleton, mesh_of(*WHOLE), *lines)
    text = str(error.value)
    assert re.search(r"no strategy of 'forward:MLP/pair_\d/\w+:dot_general' ", text)
    assert "batch=8" in text and "on mesh device=8" in text
    for line in lines:
        assert f"  {line}   ({line.source})" in text
    assert "leave one out" in text


def test_a_named_factor_does_not_give_way(skeleton):
    with pytest.raises(ConstraintError, match="Split\\('batch'\\), 3"):
        masks(skeleton, mesh_of(*WHOLE), op_trans(ops(), Split("batch"), 3))


# -- reports ---------------------------------------------------------------------------------------


def test_lines_without_effect_are_reported(skeleton):
    once = op_trans(values(role="parameter"), Replicate())
    again = op_trans(values("state/params/*"), Replicate())
    nothing = op_trans(ops("Transformer/*"), Split("batch"), ALL)
    no_factor = op_trans(ops(), Split("bach"), ALL)
    bound, _ = masks(skeleton, mesh_of(*WHOLE), once, again, nothing, no_factor)
    assert bound.report() == (
        f"constraint {again} ({again.source}) changes nothing",
        f"constraint {nothing} ({nothing.source}) matches nothing",
        f"constraint {no_factor} ({no_factor.source}) matches nothing",
    )


def test_what_can_not_be_split_so_often_is_split_as_often_as_it_can():
    state = {"w": jnp.zeros((16, 10)), "b": jnp.zeros(10)}
    skeleton = skeleton_of(narrow_bias_step, state, jnp.zeros((8, 16)))
    line = op_trans(values("state/*"), Split(ANY), ALL)
    for axes, most in ((WHOLE, 1), (CUT, 2)):
        mesh = mesh_of(*axes)
        constraints, found = masks(skeleton, mesh, line)
        node, rows, mask = found["state/b"]
        parts = np.where(st.layouts(node, 0, rows) >= 0, mesh.shape, 1).prod(axis=1)
        assert set(parts[mask]) == {most}
        assert "state/b can not be split that often" in " ".join(constraints.report())


def test_a_line_on_one_of_several_equal_layers_says_that_it_holds_for_all():
    work = mlp.workload(dtype="float32", pairs=6)
    skeleton = skeleton_of(work.step, work.state, work.batch)
    line = op_trans(values("state/params/pair_2/up/kernel"), Replicate())
    constraints, found = masks(skeleton, mesh_of(*WHOLE), line)
    assert len(found) == 1
    (note,) = constraints.report()
    assert note.startswith(f"constraint {line} also holds for state/params/pair_")
    assert "pair_2/" not in note.split("also holds for")[1]


# -- through the planner ---------------------------------------------------------------------------


def test_a_plan_carries_its_constraints_and_what_came_of_them():
    work = mlp.workload(dtype="float32")
    nothing = op_trans(values("state/nowhere"), Replicate())
    lines = [*recipes.zero(1), nothing]
    plan = js.plan(
        work.step, work.state, work.batch, cluster="cpu:8", constraints=lines, time_limit=10
    )
    assert plan.constraints == tuple(map(str, lines))
    assert f"constraint {nothing} ({nothing.source}) matches nothing" in plan.notes
    moments = [t for t in plan.tensors if t.role == "optimizer" and t.shape]
    assert len(moments) == 16
    assert all(any(t.spec) for t in moments)


def test_a_clash_on_every_mesh_is_an_error():
    work = mlp.workload(batch=3)
    with pytest.raises(ConstraintError, match="Split\\('batch'\\), ALL"):
        js.plan(
            work.step, work.state, work.batch,
            cluster="cpu:8", constraints=recipes.data_parallel(), time_limit=10,
        )  # fmt: skip
