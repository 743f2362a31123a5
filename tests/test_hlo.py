"""Reading collectives out of compiled HLO text, as the CPU, GPU and TPU compilers write it."""

import pytest

from jaxscaler.errors import PlanError
from jaxscaler.verify.hlo import hlo_collectives, read_hlo
from jaxscaler.verify.normal_form import totals

AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"
A2A, CP = "all_to_all", "collective_permute"

MESH = {"d": 2, "t": 4}
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
GROUPS = {"@t": "[2,4]<=[8]", "@d": "{{0,4},{1,5},{2,6},{3,7}}", "@all": "{}"}


def hlo(entry, before=""):
    text = f"HloModule jit_step\n{ADD}{before}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"
    for short, groups in GROUPS.items():
        text = text.replace(short, f"replica_groups={groups}, dimensions={{0}}, to_apply=%add")
    return text


def in_hlo(entry, before="", **options):
    return totals(hlo_collectives(hlo(entry, before), MESH, **options))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("t",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("d",)),
        ("{}", ("d", "t")),
        ("[2,4]<=[8]", ("t",)),
        ("[4,2]<=[2,4]T(1,0)", ("d",)),
        ("[1,8]<=[8]", ("d", "t")),
        ("[4,2]<=[8]", ("t:(2)2",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("t",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", ("d", "t")),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ("t",)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("d",)),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=(0,4,1,5,2,6,3,7) {'axis_0'}", ("t:(1)2",)),
    ],
)
def test_replica_groups_become_mesh_axes(groups, axes):
    found = in_hlo(
        f"""  %p = f32[16]{{0}} parameter(0)
  ROOT %r = f32[16]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"""
    )
    assert found == {(AR, axes): (1, 64)}


def test_groups_in_an_unknown_notation():
    with pytest.raises(PlanError, match="notation"):
        in_hlo(
            """  %p = f32[16]{0} parameter(0)
  ROOT %r = f32[16]{0} all-reduce(%p), replica_groups=v9<0-7>, to_apply=%add"""
        )


def test_bytes_of_each_kind_are_those_of_the_full_buffer():
    found = in_hlo(
        """  %p = bf16[4,32]{1,0:T(8,128)(2,1)} parameter(0)
  %g = bf16[16,32]{1,0} all-gather(%p), channel_id=1, @t
  %s = bf16[1,32]{1,0} reduce-scatter(bf16[4,32]{1,0} %p), channel_id=2, @t
  %a = bf16[4,32]{1,0} all-to-all(%p), channel_id=3, @t
  %c = bf16[4,32]{1,0} collective-permute(%p), channel_id=4, source_target_pairs={{0,4},{4,0}}
  ROOT %t = (bf16[16,32], bf16[1,32], bf16[4,32], /*index=3*/bf16[4,32]) tuple(%g, %s, %a, %c)"""
    )
    assert found == {
        (AG, ("t",)): (1, 1024),
        (RS, ("t",)): (1, 256),
        (A2A, ("t",)): (1, 256),
        (CP, ("d",)): (1, 256),
    }


def test_combined_collective_counts_each_tensor():
    found = in_hlo(
        """  %p = f32[16]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %r = (f32[16]{0}, f32[8]{0}) all-reduce(%p, %q), channel_id=1, @all
  %a = f32[16]{0} get-tuple-element(%r), index=0
  %b = f32[8]{0} get-tuple-element(%r), index=1
  ROOT %t = (f32[16]{0}, f32[8]{0}) tuple(%a, %b)"""
    )
    assert found == {(AR, ("d", "t")): (2, 96)}


def test_all_to_all_in_parts_is_one_buffer():
    found = in_hlo(
        """  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  ROOT %r = (f32[8]{0}, f32[8]{0}) all-to-all(%p, %q), channel_id=1, @d"""
    )
    assert found == {(A2A, ("d",)): (1, 64)}


def test_asynchronous_pairs_count_once():
    found = in_hlo(
        """  %p = f32[4]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %gs = ((f32[4], f32[8]), (f32[16], f32[32])) all-gather-start(%p, %q), channel_id=1, @t
  %gd = (f32[16]{0}, f32[32]{0}) all-gather-done(%gs)
  %rs = f32[4]{0} all-reduce-start(%p), channel_id=2, @t
  %rd = f32[4]{0} all-reduce-done(%rs)
  %cs = (f32[4], f32[4]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %cd = f32[4]{0} collective-permute-done(%cs)
  %ss = ((f32[8]{0}), f32[2]{0}) async-start(%q), calls=%scatter
  %sd = f32[2]{0} async-done(%ss)
  %g0 = f32[16]{0} get-tuple-element(%gd), index=0
  ROOT %t = (f32[16]{0}, f32[4]{0}, f32[4]{0}, f32[2]{0}) tuple(%g0, %rd, %cd, %sd)""",
        """
%scatter (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  ROOT %s = f32[2]{0} reduce-scatter(%x), channel_id=4, @t
}
""",
    )
    assert found == {
        (AG, ("t",)): (2, 192),
        (AR, ("t",)): (1, 16),
        (CP, ("t",)): (1, 16),
        (RS, ("t",)): (1, 32),
    }


TPU_SCATTER = """
%NAME (x: f32[64,8]) -> f32[16,8] {
  %x = f32[64,8]{1,0:T(8,128)} parameter(0)
  %r = f32[64,8]{1,0:T(8,128)} all-reduce(%x), channel_id=1, @t
  %id = u32[] partition-id()
  %table = s32[8]{0} constant({0, 16, 32, 48, 0, 16, 32, 48})
  %at = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %offset = s32[] reshape(%at)
  %zero = s32[] constant(0)
  ROOT %s = f32[16,8]{1,0:T(8,128)} dynamic-slice(%r, %offset, %zero), dynamic_slice_sizes={16,8}
}
"""


@pytest.mark.parametrize("name", ["all-reduce-scatter.3", "fused_computation"])
def test_all_reduce_and_own_slice_in_a_fusion_is_reduce_scatter(name):
    found = in_hlo(
        f"""  %p = f32[64,8]{{1,0}} parameter(0)
  ROOT %f = f32[16,8]{{1,0}} fusion(%p), kind=kCustom, calls=%{name}""",
        TPU_SCATTER.replace("NAME", name),
    )
    assert found == {(RS, ("t",)): (1, 64 * 8 * 4)}


def test_slice_at_an_offset_that_all_devices_share_is_no_scatter():
    found = in_hlo(
        """  %p = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[64]{0} all-reduce(%p), channel_id=1, @t
  ROOT %s = f32[16]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={16}"""
    )
    assert found == {(AR, ("t",)): (1, 256)}


def test_one_collective_spread_over_several_fusions_counts_once():
    spread = "".join(
        f"""
%async_collective_fusion.{i} (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %r = f32[16]{{0}} all-reduce(%x), channel_id=7, @all, metadata={{op_name="dot"}}
}}
"""
        for i in range(3)
    )
    entry = """  %p = f32[16]{0} parameter(0)
  %a = f32[16]{0} fusion(%p), kind=kCustom, calls=%async_collective_fusion.0
  %b = f32[16]{0} fusion(%p), kind=kCustom, calls=%async_collective_fusion.1
  %c = f32[16]{0} fusion(%b), kind=kCustom, calls=%async_collective_fusion.2
  ROOT %t = (f32[16]{0}, f32[16]{0}) tuple(%a, %c)"""
    assert in_hlo(entry, spread) == {(AR, ("d", "t")): (1, 64)}


def test_one_channel_twice_in_one_computation_is_two_collectives():
    found = in_hlo(
        """  %p = f32[16]{0} parameter(0)
  %r = f32[16]{0} all-reduce(%p), channel_id=1, @all
  %s = f32[16]{0} sine(%r)
  ROOT %q = f32[16]{0} all-reduce(%s), channel_id=1, @all"""
    )
    assert found == {(AR, ("d", "t")): (2, 128)}


LOOP = """
%cond (s: (s32[], f32[16])) -> pred[] {
  %s = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(5)
  ROOT %more = pred[] compare(%i, %n), direction=LT
}

%body (s: (s32[], f32[16])) -> (s32[], f32[16]) {
  %s = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %h = f32[16]{0} get-tuple-element(%s), index=1
  %r = f32[16]{0} all-reduce(%h), channel_id=1, @all
  ROOT %t = (s32[], f32[16]{0}) tuple(%i, %r)
}
"""
WHILE = """  %p = f32[16]{0} parameter(0)
  %z = s32[] constant(0)
  %t = (s32[], f32[16]{0}) tuple(%z, %p)
  ROOT %w = (s32[], f32[16]{0}) while(%t), condition=%cond, body=%body, \
metadata={op_name="jit(step)/while"}"""


def test_loops_multiply():
    known = WHILE + ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{}}'
    assert in_hlo(known, LOOP) == {(AR, ("d", "t")): (5, 320)}


def test_loop_without_trip_count_warns_and_can_be_told():
    with pytest.warns(UserWarning, match="jit\\(step\\)/while"):
        assert in_hlo(WHILE, LOOP) == {(AR, ("d", "t")): (1, 64)}
    assert in_hlo(WHILE, LOOP, trip_counts={"jit(step)/while": 5}) == {(AR, ("d", "t")): (5, 320)}


def test_branches_of_a_conditional_count():
    branches = "".join(
        f"""
%branch{i} (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %r = f32[16]{{0}} all-reduce(%x), channel_id={i + 1}, @all
}}
"""
        for i in range(2)
    )
    entry = """  %p = f32[16]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[16]{0} conditional(%i, %p, %p), branch_computations={%branch0, %branch1}"""
    assert in_hlo(entry, branches) == {(AR, ("d", "t")): (2, 128)}


def test_text_that_is_no_module():
    with pytest.raises(PlanError, match="ENTRY"):
        hlo_collectives("module @jit_step {}", MESH)


def test_line_that_is_cut_off():
    with pytest.raises(PlanError, match="cut off"):
        read_hlo(hlo("  %p = f32[16]{0} all-reduce(%x, "), MESH)


def test_text_of_another_mesh():
    text = hlo(
        """  %p = f32[16]{0} parameter(0)
  ROOT %r = f32[16]{0} all-reduce(%p), replica_groups={{0,1,2}}, to_apply=%add"""
    )
    with pytest.raises(PlanError, match="mesh"):
        hlo_collectives(text, MESH)
