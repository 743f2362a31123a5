"""Plans beside the partitioner's and the compiler's word, and the loop that makes them fit."""

import json
import warnings
from dataclasses import replace

import pytest

import jaxscaler as js
from jaxscaler import InfeasibleError, Plan, PlanError, cli, planner, recipes
from jaxscaler.api import with_step
from jaxscaler.cluster import Cluster
from jaxscaler.trace import trace
from jaxscaler.verify import targets, worker
from jaxscaler.verify.audit import audit
from jaxscaler.verify.cycles import op_cycles
from jaxscaler.verify.depth import extrapolate
from jaxscaler.verify.hlo import hlo_collectives
from jaxscaler.verify.loop import until_it_fits
from jaxscaler.verify.normal_form import Collective, Node, totals
from jaxscaler.verify.report import Verified, compare, rematerialized, unmatched
from jaxscaler.verify.targets import target_of
from jaxscaler.verify.worker import Compiled, Memory
from models import gpt, mlp

MLP = mlp.workload(size="tiny", dtype="float32")  # the CPU compiler widens bfloat16


@pytest.fixture(scope="module")
def plan():
    return js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:8", constraints=recipes.zero())


# --- audit ------------------------------------------------------------------------------------


def test_an_audit_agrees_with_the_plan(plan):
    found = plan.audit()
    assert found.agreement == 1.0
    assert not found.unplanned and not found.missing and not found.rematerialized
    assert {c.kind for c in found.collectives} >= {"all_gather", "reduce_scatter"}
    gather = next(c for c in found.collectives if c.kind == "all_gather")
    assert "MLP" in gather.scope and gather.source.endswith("(Dense.__call__)")
    json.dumps(found.to_dict())


@pytest.mark.parametrize("recipe", [recipes.zero, recipes.tensor_parallel])
def test_a_folded_step_has_the_collectives_of_the_whole(recipe):
    work = gpt.workload(size="tiny", layers=6, batch=16)
    cluster = Cluster.parse("h100:8")
    traced = trace(work.step, work.state, work.batch)
    planned = planner.plan_step(traced, cluster, constraints=recipe(), time_limit=10)
    whole, folded = (planned.lower("cuda", folded=f) for f in (False, True))
    assert totals(audit(folded)) == totals(audit(whole))
    small, large = (len(low.as_text().splitlines()) for low in (folded, whole))
    assert small < 0.75 * large


def test_a_plan_for_one_device_is_audited_and_verified():
    plan = js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:1")
    found = plan.audit()
    assert plan.axes == () and found.agreement == 1.0 and not found.collectives
    verified = plan.verify("present")
    assert verified.compiled.status == worker.COMPILED and verified.compiled.memory.argument > 0


def test_what_is_not_in_the_plan_is_named(plan):
    found = plan.audit().collectives
    extra = Collective("all_to_all", ("device",), 4096, "float32", 3, "jit(step)/here", "a.py:1")
    unplanned, missing = unmatched(plan.traffic, (*found, extra))
    assert unplanned == (extra,)
    assert missing == ()
    dearest = max((t for t in plan.traffic if t.kind != "feed"), key=lambda t: t.nbytes)
    fewer = [c for c in found if (c.kind, c.bytes) != (dearest.kind, round(dearest.nbytes))]
    unplanned, missing = unmatched(plan.traffic, fewer)
    assert unplanned == () and missing
    assert {(t.kind, t.nbytes) for t in missing} == {(dearest.kind, dearest.nbytes)}
    (row,) = (r for r in compare(plan.traffic, (*found, extra)) if r.kind == "all_to_all")
    assert (row.planned, row.found) == (0, 3 * 4096)


def test_gathers_that_are_cut_again_are_named():
    nodes = [
        Node("argument"),
        Node("all_gather", (0,), ("d",), 64, "float32", 8, scope="whole"),
        Node("all_slice", (1,), ("d",), 8, "float32", 8),
        Node("all_gather", (0,), ("d",), 64, "float32", 8, scope="used"),
        Node("all_slice", (3,), ("d",), 8, "float32", 8),
        Node("dot", (3, 4)),
        Node("return", (2, 5)),
    ]
    assert [c.scope for c in rematerialized(nodes)] == ["whole"]


def test_a_plan_from_a_file_says_what_it_lacks(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    for ask in (loaded.audit, loaded.verify):
        with pytest.raises(PlanError, match="has no step"):
            ask()
    again = with_step(loaded, MLP.step, MLP.state, MLP.batch)
    assert again.audit() == plan.audit()
    other = gpt.workload(size="tiny")
    with pytest.raises(PlanError, match="another step"):
        with_step(loaded, other.step, other.state, other.batch)


# --- verify -----------------------------------------------------------------------------------


def test_a_plan_is_verified_with_the_compiler_of_this_host(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    found = plan.verify(cache=tmp_path)
    assert found.compiled.status == worker.COMPILED, found.compiled.detail
    assert found.fits
    assert found.agreement == 1.0
    arguments = found.memory[0][1:]
    assert arguments[0] == pytest.approx(arguments[1], rel=0.01)
    text = str(found)
    assert "cpu:8: needs" in text and "of 8.59 GB, dominated by" in text
    assert plan.verify(cache=tmp_path).compiled.cached


def test_a_target_has_as_many_devices_as_the_plan(plan):
    with pytest.raises(PlanError, match="8 devices, cpu:4 has 4"):
        plan.verify("cpu:4")


def test_verifying_from_the_command_line(plan, tmp_path, capsys, monkeypatch):
    plan.save(tmp_path / "plan.json")
    args = ["verify", str(tmp_path / "plan.json"), "models.mlp:workload", "--quiet"]
    args += ["--set", "dtype=float32"]
    assert cli.main([*args, "--audit"]) == 0
    assert "agrees with the plan on 100.0%" in capsys.readouterr().out
    monkeypatch.setattr(targets, "missing", lambda target: ("libtpu",))
    assert cli.main([*args, "--for", "v5e:2x4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["fits"]) == (worker.EXTRAS_MISSING, None)


# --- the loop ---------------------------------------------------------------------------------

TARGET = target_of("cpu:8")
LIMIT = 0.5 * TARGET.memory


def compiled(plan, temp_factor=1.0, status=worker.COMPILED):
    """What a compiler that needs `temp_factor` times the temporaries says of a plan."""
    roles = dict(plan.predicted.memory)
    lasting = sum(v for k, v in roles.items() if k != "activation")
    temp = (plan.predicted.peak_bytes - lasting) * temp_factor
    memory = Memory(round(lasting), 0, 0, round(temp)) if status == worker.COMPILED else None
    return Verified(plan, Compiled(TARGET, status, memory=memory), plan.predicted.limit_bytes, None)


@pytest.fixture
def searching(plan):
    """A search whose plans fill what they may, half with activations; and what it was asked."""
    asked = []

    def search(memory):
        asked.append(memory)
        size = memory * TARGET.memory
        if size < 0.1 * LIMIT:
            raise InfeasibleError("nothing fits")
        predicted = replace(
            plan.predicted, peak_bytes=size, limit_bytes=size,
            memory=(("activation", size / 2), ("parameter", size / 2)),
        )  # fmt: skip
        return planner.Planned(None, None, None, None, replace(plan, predicted=predicted), ())

    return search, asked


def test_a_plan_that_fits_is_compiled_once(searching):
    search, asked = searching
    found = until_it_fits(search, Cluster.parse("cpu:8"), 0.5, compiled)
    assert asked == [0.5]
    assert "verified in round 1" in found.plan.notes[-1]


def test_what_the_compiler_needs_more_is_learned(searching):
    search, asked = searching
    found = until_it_fits(
        search, Cluster.parse("cpu:8"), 0.5, lambda plan: compiled(plan, temp_factor=1.5)
    )
    assert len(asked) == 3 and asked == sorted(asked, reverse=True)
    assert compiled(found.plan, 1.5).compiled.bytes <= LIMIT
    assert found.plan.predicted.limit_bytes == LIMIT  # what the user said
    assert "round 2" in found.plan.notes[-2] and "verified in round 3" in found.plan.notes[-1]


def test_a_budget_that_nothing_meets_ends_with_the_reason(searching):
    search, _ = searching
    with pytest.raises(InfeasibleError, match=r"round 2: .*no plan is left: nothing fits"):
        until_it_fits(
            search, Cluster.parse("cpu:8"), 0.5, lambda plan: compiled(plan, temp_factor=40.0)
        )


def test_rounds_are_bounded_and_the_least_is_kept(searching):
    search, asked = searching
    needs = iter((3.0, 2.0, 2.5))

    def check(plan):
        c = replace(compiled(plan).compiled, memory=Memory(0, 0, 0, int(next(needs) * LIMIT)))
        return Verified(plan, c, LIMIT, None)

    with pytest.warns(UserWarning, match="no plan was found that fits"):
        found = until_it_fits(search, Cluster.parse("cpu:8"), 0.5, check, rounds=3)
    assert found.plan.predicted.peak_bytes == pytest.approx(asked[1] * TARGET.memory)


def test_a_compile_that_fails_is_reported_and_the_plan_kept(searching):
    search, asked = searching
    with pytest.warns(UserWarning, match="not verified: timed out"):
        found = until_it_fits(
            search, Cluster.parse("cpu:8"), 0.5,
            lambda plan: compiled(plan, status=worker.TIMED_OUT),
        )  # fmt: skip
    assert len(asked) == 1
    assert "not verified" in found.plan.notes[-1]


def test_the_loop_says_which_extra_it_needs_before_it_searches(searching, monkeypatch):
    search, asked = searching
    monkeypatch.setattr(targets, "missing", lambda target: ("libtpu",))
    with pytest.raises(PlanError, match=r"jaxscaler\[tpu\]"):
        until_it_fits(search, Cluster.parse("v5e:2x4"), 0.5, compiled)
    assert not asked


# --- depth ------------------------------------------------------------------------------------


def at_depth(n):
    return Compiled(
        TARGET, worker.COMPILED, memory=Memory(10 + 7 * n, 3, 1, 100 * n),
        collectives=(
            *(Collective("all_gather", ("d",), 64, "float32", scope=f"h_{i}") for i in range(n)),
            Collective("all_reduce", ("d",), 4, "float32"),
        ),
        cycles=(*((f"h_{i}/dot", 50) for i in range(n)), ("head", 9)),
    )  # fmt: skip


def test_layers_add_up_evenly():
    found = extrapolate((at_depth(2), at_depth(3)), (2, 3), 48)
    whole = at_depth(48)
    assert found.ok and found.status == worker.EXTRAPOLATED
    assert found.memory == whole.memory
    assert {k: b for k, (_, b) in totals(found.collectives).items()} == {
        k: b for k, (_, b) in totals(whole.collectives).items()
    }
    assert dict(found.cycles) == {"h_*/dot": 48 * 50, "head": 9}


# --- compiled text ----------------------------------------------------------------------------

RING = """HloModule m, is_scheduled=true

%windowed_dot_general_cond_rs (c: (f32[2,4], u32[])) -> pred[] {
  %c = (f32[2,4]{1,0}, u32[]) parameter(0)
  %i = u32[] get-tuple-element(%c), index=1
  %end = u32[] constant(8)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%windowed_dot_general_body_rs (b: (f32[2,4], u32[])) -> (f32[2,4], u32[]) {
  %b = (f32[2,4]{1,0}, u32[]) parameter(0)
  %x = f32[2,4]{1,0} get-tuple-element(%b), index=0
  %j = u32[] get-tuple-element(%b), index=1
  %one = u32[] constant(1)
  %send = f32[2,4]{1,0} collective-permute(%x), channel_id=1, PAIRS, METADATA
  %k = u32[] add(%j, %one)
  %work = f32[2,4]{1,0} fusion(%send), calls=%f, METADATA, config={"estimated_cycles":"10"}
  %l = u32[] add(%k, %one)
  ROOT %t = (f32[2,4]{1,0}, u32[]) tuple(%work, %l)
}

%f (y: f32[2,4]) -> f32[2,4] {
  %y = f32[2,4]{1,0} parameter(0)
  ROOT %z = f32[2,4]{1,0} negate(%y)
}

ENTRY %main (p: f32[2,4]) -> f32[2,4] {
  %p = f32[2,4]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %init = (f32[2,4]{1,0}, u32[]) tuple(%p, %zero)
  %ring = (f32[2,4]{1,0}, u32[]) while(%init), LOOP, METADATA
  %out = f32[2,4]{1,0} get-tuple-element(%ring), index=0
  ROOT %last = f32[2,4]{1,0} collective-permute(%out), channel_id=2, PAIRS, METADATA
}
"""
_PAIRS = ",".join(f"{{{i},{(i + 1) % 8}}}" for i in range(8))
for word, meaning in {
    "PAIRS": f"source_target_pairs={{{_PAIRS}}}",
    "METADATA": 'metadata={op_name="jit(step)/dot_general"}',
    "LOOP": "condition=%windowed_dot_general_cond_rs, body=%windowed_dot_general_body_rs",
}.items():
    RING = RING.replace(word, meaning)


def test_a_ring_beside_a_dot_is_the_collective_that_it_makes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = hlo_collectives(RING, {"d": 8})
    assert (found.kind, found.axes, found.bytes, found.count) == ("reduce_scatter", ("d",), 256, 1)


def test_cycles_count_as_often_as_a_loop_runs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op_cycles(RING) == (("jit(step)/dot_general", 40),)  # 0, 2, 4, 6
    assert op_cycles(RING, {"jit(step)/dot_general": 3}) == (("jit(step)/dot_general", 30),)


def test_a_loop_whose_runs_are_not_known_is_named():
    text = RING.replace("direction=LT", "direction=NE")
    with pytest.warns(UserWarning, match=r"jit\(step\)/dot_general.* runs is not known"):
        assert op_cycles(text) == (("jit(step)/dot_general", 10),)
