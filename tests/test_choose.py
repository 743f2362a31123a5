"""Plans by the word of the partitioner and of compilers: planned again, the best of several."""

from dataclasses import replace

import pytest

import jaxscaler as js
from jaxscaler import cli, commands, planner, recipes
from jaxscaler.cluster import Cluster
from jaxscaler.cluster.mesh import named_mesh
from jaxscaler.cost.collective import collective_time
from jaxscaler.errors import ClusterError, InfeasibleError, PlanError
from jaxscaler.given import author_of
from jaxscaler.trace import trace
from jaxscaler.verify import choose, loop, worker
from jaxscaler.verify.cycles import PER_CYCLE, clock
from jaxscaler.verify.normal_form import COLLECTIVES, Collective
from jaxscaler.verify.report import Verified, compare
from jaxscaler.verify.targets import Target, target_of
from jaxscaler.verify.worker import Compiled, Memory
from models import mlp

MLP = mlp.workload(size="tiny", dtype="float32", pairs=1)
# Simulated devices at an H100's rates: plans have a choice, and the compiler for CPUs is at hand.
H100 = Cluster.parse("h100:8")
QUICK = replace(H100, name="quick", device=replace(H100.device, name="cpu", vendor="generic"))


@pytest.fixture(scope="module")
def plan():
    return js.plan(MLP.step, MLP.state, MLP.batch, cluster="h100:8", constraints=recipes.zero())


def beside(plan, collectives, cycles=None, total=1):
    made = Compiled(Target("t", "cpu", 8, 10.0), worker.COMPILED, memory=Memory(total, 0, 0, 0),
                    collectives=tuple(collectives), cycles=cycles)  # fmt: skip
    return Verified(plan, made, 5.0, compare(plan.traffic, collectives))


def as_planned(plan):
    return [Collective(t.kind, tuple(t.axis.split(",")), round(t.nbytes), "", t.count)
            for t in plan.traffic if t.kind in COLLECTIVES]  # fmt: skip


# --- seconds by the compiler's word -----------------------------------------------------------


def test_seconds_are_those_of_the_compiled_collectives(plan):
    moved = as_planned(plan)
    assert beside(plan, moved).seconds == pytest.approx(plan.predicted.seconds)
    mesh = named_mesh(H100, plan.axes)
    more = Collective("all_gather", mesh.names, 10**8, "f32", 3)
    extra = 3 * float(collective_time("all_gather", mesh.axis(",".join(mesh.names)), 10**8))
    found = beside(plan, [*moved, more]).seconds
    assert found == pytest.approx(plan.predicted.seconds + extra)
    part = replace(more, axes=(f"{mesh.names[0]}:(1)2",))  # over a part of an axis
    assert beside(plan, [*moved, part]).seconds > plan.predicted.seconds
    assert replace(beside(plan, moved), compared=None).seconds is None


def test_seconds_on_a_tpu_are_its_cycles():
    plan = js.plan(MLP.step, MLP.state, MLP.batch, cluster="v5e:2x4", constraints=recipes.zero())
    rate = clock(Cluster.parse("v5e:2x4").device)
    assert rate == pytest.approx(1.5e9, rel=0.01)
    found = beside(plan, as_planned(plan), cycles=(("a", int(rate)), ("b", int(rate)))).seconds
    assert found == pytest.approx(plan.predicted.seconds - plan.predicted.compute + 2, rel=1e-6)
    assert clock(H100.device) is None
    assert set(PER_CYCLE) == {"v4", "v5e", "v5p", "v6e"}


# --- the devices present ----------------------------------------------------------------------


def test_a_plan_is_compiled_for_the_devices_present(devices):
    plan = js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:8", constraints=recipes.zero())
    found = plan.verify("present")
    assert found.fits and found.agreement == 1.0
    assert found.compiled.memory.argument > 0
    assert found.compiled.target.name == "present: 8 x cpu"
    ahead = target_of("h100:8")
    here = replace(found.compiled, target=replace(ahead, topology="present"))
    assert "autotuning" in str(replace(found.compiled, target=ahead).unknown)
    assert "autotuning" not in str(here.unknown)


def test_too_few_devices_are_present():
    plan = js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:16")
    with pytest.raises(ClusterError, match="for 16 devices"):
        plan.verify("present")


def test_one_of_several_processes(monkeypatch):
    import jax

    plan = js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:8", constraints=recipes.zero())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(PlanError, match="name a cluster"):
        plan.verify("present")


def test_what_the_backend_refuses_is_a_status(monkeypatch):
    import jax

    def refuse(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20G of 16G hbm. ")

    plan = js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:8", constraints=recipes.zero())
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    found = plan.verify("present")
    assert found.compiled.status == worker.TOO_BIG and found.compiled.needs == 20 * 2**30
    assert not found.fits


# --- the loop, end to end ---------------------------------------------------------------------


def test_a_step_that_does_not_fit_as_compiled_is_planned_until_it_does(devices):
    """Memory between what the plan predicts and what the compiler needs: a real search, a real
    compiler, and in the end a step that fits."""
    work = mlp.workload(size="tiny", width=512, hidden=2048, pairs=2, batch=64, dtype="float32")
    first = js.plan(work.step, work.state, work.batch, cluster=QUICK)
    needs = first.verify("present").compiled.bytes
    assert needs > first.predicted.peak_bytes
    limit = (needs + first.predicted.peak_bytes) / 2
    step = js.parallelize(
        work.step, cluster=QUICK, memory=limit / QUICK.device.hbm_bytes, verify="present"
    )
    plan = step.plan_for(lambda: work.state, batch=work.batch)
    assert plan.digest() != first.digest()
    assert "round 1: the compiled step needs" in " ".join(plan.notes)
    assert "verified in round" in plan.notes[-1]
    assert plan.verify("present").compiled.bytes <= limit
    assert plan.predicted.limit_bytes == pytest.approx(limit)


@pytest.mark.parametrize("verify", [0.5, -1, "there"])
def test_verify_is_true_a_number_or_present(verify):
    with pytest.raises(PlanError, match="verify="):
        js.plan(MLP.step, MLP.state, MLP.batch, cluster="cpu:8", verify=verify)


def test_a_given_plan_is_not_planned_again(plan):
    with pytest.raises(PlanError, match=r"plan\.verify\(\)"):
        js.parallelize(MLP.step, plan=plan, verify=True)


# --- several plans ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_mesh():
    """Planned steps by mesh axes."""
    traced = trace(MLP.step, MLP.state, MLP.batch)
    made = {}

    def plan(axes):
        if axes not in made:
            author = author_of(dict(axes), {})
            made[axes] = planner.plan_step(traced, H100, author=author)
        return made[axes]

    return plan


MESHES = (("device", 8),), (("device0", 2), ("device1", 4)), (("device0", 4), ("device1", 2))


def chosen(on_mesh, count, seconds, unfit=()):
    """What `best_of` takes, where the compiler says `seconds` of the plans on MESHES."""
    found = on_mesh(MESHES[0])
    tried = tuple((",".join(f"{n}={s}" for n, s in axes), "feasible", float(i))
                  for i, axes in enumerate(MESHES))  # fmt: skip
    tried = (*tried, ("device=8; tp = 2", "feasible", 0.5), ("one device", "close", 0.1))
    search = replace(found.plan.search, meshes=tried)
    first = replace(found, plan=replace(found.plan, search=search))
    asked = []

    def search_on(axes):
        asked.append(axes)
        if axes in unfit:
            raise InfeasibleError("nothing fits\nhere")
        return on_mesh(axes)

    def check(plan):
        by_mesh = seconds[MESHES.index(plan.axes)]
        verified = beside(plan, as_planned(plan), total=1 if by_mesh else 9)
        shift = replace(plan.predicted, seconds=by_mesh or 1.0)
        return replace(verified, plan=replace(plan, predicted=shift))

    return choose.best_of(first, count, search_on, check).plan, asked


def test_the_fastest_by_the_compilers_word_is_taken(on_mesh):
    plan, asked = chosen(on_mesh, 3, (3.0, 1.0, 2.0))
    assert plan.axes == MESHES[1] and asked == list(MESHES[1:])
    assert "device=8: 3 s a step; device0=2,device1=4: 1 s a step" in plan.notes[-1]


def test_so_many_plans_are_compiled_and_no_more(on_mesh):
    plan, asked = chosen(on_mesh, 2, (3.0, 4.0, 1.0))
    assert plan.axes == MESHES[0] and asked == [MESHES[1]]


def test_what_does_not_fit_or_has_no_plan_is_not_taken(on_mesh):
    plan, _ = chosen(on_mesh, 3, (None, 2.0, 1.0), unfit=(MESHES[2],))
    assert plan.axes == MESHES[1]
    assert "device=8: not verified" in plan.notes[-1]
    assert "device0=4,device1=2: nothing fits" in plan.notes[-1]


# --- surprises --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensor():
    """A search under tensor parallelism, and what it was asked."""
    traced = trace(MLP.step, MLP.state, MLP.batch)
    asked = []

    def search(constraints, memory=0.9):
        asked.append(constraints)
        return planner.plan_step(traced, H100, constraints=constraints, memory=memory)

    return search, asked


def surprising(monkeypatch, planned, nbytes):
    """Have audits find an all-gather at the first cut product, as long as it is cut."""
    cut = next(d for d in planned.plan.decisions
               if d.cuts and d.what == "op" and "dot_general" in d.subject)  # fmt: skip
    (at,) = [i for i, node in enumerate(planned.space.nodes) if node.name == cut.subject]
    op = next(op for op in planned.graph.ops
              if planned.space.node_of.get(int(planned.folded.op_class[op.id])) == at)  # fmt: skip
    axes = tuple(axis for axis, _ in cut.cuts)
    scope = f"jit(step)/jvp({op.scope})/sharding_constraint"
    found = Collective("all_gather", axes, nbytes, "f32", 1, scope, op.source)
    real = choose.audited

    def audited(plan):
        audit = real(plan)
        now = next((d for d in plan.decisions if d.subject == cut.subject), None)
        still = now is not None and set(cut.cuts) & set(now.cuts)
        return replace(audit, unplanned=(found,) if still else ())

    monkeypatch.setattr(choose, "audited", audited)
    return cut


def test_a_plan_with_a_surprise_is_planned_without_it(tensor, monkeypatch):
    search, asked = tensor
    lines = tuple(recipes.tensor_parallel())
    cut = surprising(monkeypatch, search(constraints=lines), 10**9)
    asked.clear()
    found = choose.without_surprises(search, lines)(memory=0.9).plan
    assert len(asked) >= 2 and asked[0] == lines and asked[1][: len(lines)] == lines
    assert any("forbid" in str(line) for line in asked[1][len(lines) :])
    now = next((d.cuts for d in found.decisions if d.subject == cut.subject), ())
    assert not set(now) & set(cut.cuts)
    assert any("planned again without what Shardy moves besides" in n for n in found.notes)


def test_a_surprise_that_costs_nothing_is_left_alone(tensor, monkeypatch):
    search, asked = tensor
    lines = tuple(recipes.tensor_parallel())
    surprising(monkeypatch, search(constraints=lines), 1)
    monkeypatch.setattr(choose, "WORTH", 1e9)
    asked.clear()
    choose.without_surprises(search, lines)(memory=0.9)
    assert asked == [lines]


def test_a_surprise_that_nothing_removes_is_reported(tensor, monkeypatch):
    search, asked = tensor
    lines = tuple(recipes.tensor_parallel())
    there = Collective("all_to_all", ("device",), 10**9, "f32", 2, "jit(step)/nowhere", "a.py:1")
    planned = search(constraints=lines)
    there = replace(there, axes=planned.plan.axes[0][:1])
    real = choose.audited
    monkeypatch.setattr(choose, "audited", lambda plan: replace(real(plan), unplanned=(there,)))
    asked.clear()
    found = choose.without_surprises(search, lines)(memory=0.9).plan
    assert asked == [lines]  # no op stands there, so there is no line to add
    assert "Shardy also makes 2 x all_to_all" in found.notes[-1] and "a.py:1" in found.notes[-1]


def test_the_loop_audits_and_chooses(monkeypatch):
    """`plan_verified` hands its constraints on, and asks for other meshes only if it is told."""
    calls = []
    monkeypatch.setattr(loop, "without_surprises", lambda search, given: lambda **o: search(
        constraints=given, **o))  # fmt: skip
    monkeypatch.setattr(loop, "until_it_fits", lambda search, cluster, memory, check, here: search(
        memory=memory))  # fmt: skip
    monkeypatch.setattr(loop, "best_of", lambda first, n, on, check: (first, on((("d", 8),)), n))

    def search(**options):
        calls.append(options)
        return len(calls)

    author = author_of(None, {})
    assert loop.plan_verified(search, H100, 0.5, True, ("line",), author) == 1
    assert loop.plan_verified(search, H100, 0.5, 3, ("line",), author) == (2, 3, 3)
    assert [call["author"].axes for call in calls] == [None, None, (("d", 8),)]
    assert all(call["constraints"] == ("line",) and call["memory"] == 0.5 for call in calls)


@pytest.mark.parametrize(
    ("options", "verify"), [([], False), (["--verify"], True), (["--best-of", "3"], 3)]
)
def test_the_command_line_says_how_many(options, verify, monkeypatch):
    asked = []
    monkeypatch.setattr(commands, "plan_step", lambda *args, **given: asked.append(given["verify"]))
    monkeypatch.setattr(commands, "_print_plan", lambda found, as_json: None)
    target = ["models.mlp:workload", "--size", "tiny", "--cluster", "cpu:8", "--quiet"]
    assert cli.main(["plan", *target, *options]) == 0
    assert asked == [verify]
