"""The rules of the normal form, on graphs written by hand."""

import pytest

from jaxscaler.errors import PlanError
from jaxscaler.verify.normal_form import (
    Collective,
    Node,
    element,
    group_axes,
    normal_form,
    pair_axes,
    totals,
)

AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"


def reduce_(x, axes=("d",), size=64, parts=8, **fields):
    return Node(AR, (x,), axes, size, "float32", parts, **fields)


def slice_(x, axes=("d",), parts=8, **fields):
    return Node("all_slice", (x,), axes, 8, "float32", parts, **fields)


def kinds(nodes):
    return [c.kind for c in normal_form(nodes)]


X = Node("argument")


def test_all_reduce_then_slice_is_reduce_scatter():
    (found,) = normal_form([X, reduce_(0), slice_(1)])
    assert found == Collective(RS, ("d",), 64, "float32")


@pytest.mark.parametrize("op", ["transpose", "convert", "reshape", "copy"])
def test_slices_are_found_behind_layout_and_casts_and_twice(op):
    assert kinds([X, reduce_(0), Node(op, (1,)), slice_(2), slice_(2), slice_(1)]) == [RS]


@pytest.mark.parametrize(
    "rest",
    [
        [slice_(1), Node("multiply", (1, 1))],  # a whole copy is used too
        [Node("multiply", (1, 1)), slice_(2)],  # not a sum any more
        [slice_(1, axes=("t",))],  # cut over other devices than it is summed over
        [slice_(1, axes=(), parts=4)],
        [slice_(1, loop=1)],
        [],
    ],
)
def test_all_reduce_that_is_used_whole_stays(rest):
    assert kinds([X, reduce_(0), *rest]) == [AR]


def test_slice_over_more_axes_than_summed_over():
    assert kinds([X, reduce_(0), slice_(1, axes=("d", "t"), parts=32)]) == [RS]
    assert kinds([X, reduce_(0), slice_(1, axes=(), parts=32)]) == [RS]


def test_slice_over_fewer_axes_than_summed_over():
    assert kinds([X, reduce_(0, axes=("d", "t")), slice_(1, axes=("d",))]) == [AR]


def test_all_reduces_of_one_sum_are_one():
    nodes = [X, X, X, *map(reduce_, range(3)), Node("convert", (5,))]
    nodes += [Node("add", (3, 4)), Node("add", (7, 6)), Node("return", (8,))]
    assert kinds(nodes) == [AR]
    assert kinds([*nodes, slice_(8)]) == [AR]
    assert kinds([*nodes[:-1], slice_(8)]) == [RS]


def test_all_reduces_do_not_meet_behind_a_transpose():
    nodes = [X, X, *map(reduce_, range(2)), Node("transpose", (3,)), Node("add", (2, 4))]
    assert kinds([*nodes, Node("return", (5,))]) == [AR, AR]


def test_all_reduce_of_the_widest_addend_counts():
    nodes = [X, X, reduce_(0, size=32), reduce_(1, size=64)]
    nodes += [Node("convert", (2,)), Node("add", (4, 3)), Node("return", (5,))]
    assert [c.bytes for c in normal_form(nodes)] == [64]


@pytest.mark.parametrize(
    ("a", "b", "more"),
    [
        (reduce_(0), reduce_(1, axes=("t",)), []),  # over other devices
        (reduce_(0), reduce_(1, combiner="maximum"), []),
        (reduce_(0), reduce_(1, loop=1), []),
        (reduce_(0), reduce_(1), [Node("tanh", (2,))]),  # one is used by itself, too
    ],
)
def test_all_reduces_that_cannot_be_one(a, b, more):
    assert kinds([X, X, a, b, Node("add", (2, 3)), *more, Node("return", (4,))]) == [AR, AR]


def test_reduce_scatters_of_one_sum_are_one():
    scatter = [Node(RS, (x,), ("d",), 64, "float32", 8) for x in range(2)]
    assert kinds([X, X, *scatter, Node("add", (2, 3)), Node("return", (4,))]) == [RS]


def test_equal_gathers_are_one():
    gather = Node(AG, (0,), ("d",), 64, "float32", 8, params="dim 0")
    assert kinds([X, gather, gather]) == [AG]
    assert kinds([X, gather, gather._replace(params="dim 1")]) == [AG, AG]
    assert kinds([X, X, gather, gather._replace(inputs=(1,))]) == [AG, AG]
    assert kinds([X, gather, gather._replace(loop=1)]) == [AG, AG]


def test_what_a_compiler_left_apart_stays_apart():
    gather = Node(AG, (0,), ("d",), 64, "float32", 8)
    assert [c.kind for c in normal_form([X, gather, gather], merge=False)] == [AG, AG]
    nodes = [X, X, *map(reduce_, range(2)), Node("add", (2, 3)), slice_(4)]
    assert [c.kind for c in normal_form(nodes, merge=False)] == [AR, AR]
    assert [c.kind for c in normal_form([X, reduce_(0), slice_(1)], merge=False)] == [RS]


def test_gathers_of_equal_gathers_are_one():
    gather = Node(AG, (0,), ("d",), 64, "float32", 8)
    over_t = Node(AG, (1,), ("t",), 64, "float32", 8)
    assert kinds([X, gather, gather, over_t, over_t._replace(inputs=(2,))]) == [AG, AG]


def test_gather_of_a_constant_is_free():
    nodes = [Node("constant"), Node("broadcast_in_dim", (0,)), Node("convert", (1,))]
    assert kinds([*nodes, Node(AG, (2,), ("d",), 64, "float32", 8)]) == []
    assert kinds([*nodes, reduce_(2)]) == [AR]  # a sum of constants is none of the constants


def test_a_collective_over_no_axis_is_free():
    assert kinds([X, Node(AG, (0,), (), 64, "float32", 1)]) == []


def test_counts_and_totals():
    nodes = [X, reduce_(0, times=3, loop=1), reduce_(0, times=12, loop=2)]
    assert [c.count for c in normal_form(nodes)] == [3, 12]
    assert totals(normal_form(nodes)) == {(AR, ("d",)): (15, 15 * 64)}


@pytest.mark.parametrize(
    ("group", "axes"),
    [
        ([0], ()),
        ([0, 1, 2, 3], ("t",)),
        ([0, 4], ("d",)),
        ([3, 7], ("d",)),
        (range(8), ("d", "t")),
        ([0, 4, 1, 5, 2, 6, 3, 7], ("d", "t")),
        ([0, 1], ("t:(2)2",)),
        ([0, 2], ("t:(1)2",)),
        ([0, 2, 4, 6], ("d", "t:(1)2")),
    ],
)
def test_axes_of_device_groups(group, axes):
    assert group_axes(list(group), {"d": 2, "t": 4}) == axes


def test_parts_of_one_axis_that_do_not_touch():
    assert group_axes([0, 1, 4, 5], {"d": 8}) == ("d:(1)2", "d:(4)2")


def test_a_group_that_is_no_axis():
    with pytest.raises(PlanError, match=r"\[0, 1, 2\]"):
        group_axes([0, 1, 2], {"d": 2, "t": 4})


def test_axes_of_permutes():
    mesh = {"d": 2, "t": 4}
    assert pair_axes([(0, 1), (1, 2), (2, 3), (3, 0)], mesh) == ("t",)
    assert pair_axes([(0, 4), (4, 0)], mesh) == ("d",)
    assert pair_axes([(0, 5)], mesh) == ("d", "t")
    assert pair_axes([(0, 0)], mesh) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f32", ("float32", 32)),
        ("bf16", ("bfloat16", 16)),
        ("ui8", ("uint8", 8)),
        ("u8", ("uint8", 8)),
        ("s32", ("int32", 32)),
        ("i64", ("int64", 64)),
        ("i1", ("bool", 8)),
        ("pred", ("bool", 8)),
        ("f8E4M3FN", ("float8_e4m3fn", 8)),
        ("complex<f32>", ("complex64", 64)),
        ("c128", ("complex128", 128)),
        ("s4", ("int4", 4)),
        ("token", ("token", 0)),
    ],
)
def test_element_types(name, expected):
    assert element(name) == expected
