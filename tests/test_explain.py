"""What is said of programs that leave no plan, of other programs, and of what limits cost."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hy

import jaxscaler as js
from jaxscaler import ALL, ANY, Replicate, Split, op_trans, ops, planner, recipes, values
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.compare import as_data, compare, comparison_table
from jaxscaler.explain import shadow_prices, without_idle
from jaxscaler.program_text import parse_program
from jaxscaler.report.describe import peak_memory
from jaxscaler.solve import INFINITY, evaluate, make_problem, solve
from jaxscaler.solve.conflict import conflict
from jaxscaler.solve.prices import memory_price
from jaxscaler.space.annotations import Author
from jaxscaler.space.constraints import smallest
from jaxscaler.trace import trace
from models import mlp

GOLDEN = Path(__file__).parent / "golden"


def planned(work, memory=0.9, **options):
    traced = trace(work.step, work.state, work.batch)
    return planner.plan_step(traced, Cluster.parse("h100:8"), memory=memory, **options).plan


@pytest.fixture(scope="module")
def plans():
    """By name: (plan without constraints, bytes of a device)."""
    return {"mlp": planned(mlp.workload()), "huge": planned(mlp.workload("huge", batch=16))}


# -- golden explanations ---------------------------------------------------------------------------


def cases():
    """(model, memory, name, program text whose lines stand where they do in the file)."""
    text = (GOLDEN / "clashes.yaml").read_text()
    for part in re.finditer(r"# case: (\w+), ([\d.]+), (.*)\n((?:.+\n)+)", text):
        before = text[: part.start(4)].count("\n")
        yield part[1], float(part[2]), part[3], "\n" * before + part[4]


def said(plan, memory, text):
    """What the planner says of a program; numbers that follow from prices as #."""
    limit = plan.predicted.limit_bytes * memory / 0.9
    try:
        program = parse_program(text, "clashes.yaml")
        session = replace(plan.session, program=program, limit=limit, best=None)
        out = "\n".join(session.search().bound.report())
    except js.JaxscalerError as error:
        out = f"{type(error).__name__}: {error}"
    out = re.sub(r"\([^ ()]*/(\w+\.py):\d+", r"(\1:#", out)
    out = re.sub(r"\nthe largest tensors per device there: .*", "\nthe largest tensors ...", out)
    out = re.sub(r"on mesh [\w=,]+ \(.*\)\.\n", "on mesh # (#).\n", out)
    return re.sub(r"[\d.e+]+ (B|KB|MB|GB|ns|µs|ms|s)\b", r"# \1", out)


def explained(plans):
    return "\n".join(
        f"# {name}\n{said(plans[model], memory, text)}\n" for model, memory, name, text in cases()
    )


def test_every_kind_of_clash_is_explained(plans):
    assert explained(plans) == (GOLDEN / "clashes.txt").read_text()


def test_a_smallest_set_clashes_and_each_of_its_lines_is_needed(plans):
    """Of the lines that are blamed, any one left out leaves a plan."""
    tried = 0
    for model, memory, _, text in cases():
        plan = plans[model]
        if model != "mlp":
            continue
        session = replace(
            plan.session, limit=plan.predicted.limit_bytes * memory / 0.9, best=None,
            program=parse_program(text, "x"),
        )  # fmt: skip
        try:
            session.search()
        except js.JaxscalerError as error:
            _, found, listed = str(error).partition(" no plan:\n")
            if not found:
                continue
            blamed = re.findall(r"^  \d+\. .*\(x:(\d+)\)$", listed, re.M)
            least = [line for line in session.program if line.source.split(":")[1] in blamed]
            assert len(least) == len(blamed) > 0
            with pytest.raises((js.ConstraintError, js.InfeasibleError)):
                replace(session, program=tuple(least)).search(explained=False)
            for line in least:
                rest = without_idle([x for x in least if x is not line])
                assert replace(session, program=rest).search(explained=False).best is not None
            tried += 1
    assert tried >= 6


# -- conflicts of a problem ------------------------------------------------------------------------


@hy.composite
def small_problems(draw):
    rng = np.random.default_rng(draw(hy.integers(0, 10**6)))
    n, k = draw(hy.integers(2, 4)), draw(hy.integers(2, 3))
    table = np.where(rng.random((k, k)) < 0.3, INFINITY, 0)
    edges = [(i, i + 1, table) for i in range(n - 1)]
    usages = [(i, 0, 1 + i, rng.integers(0, 5, k)) for i in range(n)]
    costs = rng.integers(0, 9, (n, k)).tolist()
    problem = make_problem(costs, edges, usages, draw(hy.integers(2, 12)))
    groups = [rng.random(n * k) < 0.6 for _ in range(draw(hy.integers(1, 4)))]
    return problem, groups


def holds(problem, groups):
    """Whether some choice is feasible and in every group."""
    sizes = np.diff(problem.node_ptr)
    for choice in itertools.product(*map(range, sizes)):
        at = problem.node_ptr[:-1] + np.array(choice)
        if all(g[at].all() for g in groups) and evaluate(problem, np.array(choice))[2]:
            return True
    return False


@settings(max_examples=60, deadline=None)
@given(small_problems())
def test_a_conflict_is_one_and_is_found(case):
    problem, groups = case
    core = conflict(problem, groups)
    assert (core is None) == holds(problem, groups)
    if core is not None:
        assert not holds(problem, [groups[g] for g in core])
        least = smallest(core, lambda some: not holds(problem, [groups[g] for g in some]))
        if len(least) > 1:
            for g in least:
                assert holds(problem, [groups[x] for x in least if x != g])


def test_the_price_of_memory_is_the_slope_of_the_least_cost():
    """Six alike nodes that pay 1000 MB for 2 MB less each: a byte is worth 500."""
    nodes, mb = 6, 10**6
    usages = [(i, 0, 1, [mb, 3 * mb]) for i in range(nodes)]
    alike = [(i, i + 1, [[0, 1], [1, 0]]) for i in range(nodes - 1)]  # hardly anything
    problem = make_problem([[1000 * mb, 0]] * nodes, alike, usages, 12 * mb)
    best = solve(problem)
    assert best.cost == pytest.approx(3000 * mb, rel=1e-6)
    assert memory_price(problem, best.cost) == pytest.approx(500, rel=0.05)
    one_less = solve(replace(problem, usage_limit=14 * mb)).cost
    assert one_less == pytest.approx(2000 * mb, rel=1e-6)
    assert memory_price(replace(problem, usage_limit=18 * mb), 0) == 0


# -- what if ---------------------------------------------------------------------------------------


class TestWhatIf:
    @pytest.fixture(scope="class")
    @staticmethod
    def plan():
        return planned(
            mlp.workload("wide"), constraints=recipes.zero(3), author=Author((("device", 8),))
        )

    def test_a_line_more_is_the_plan_of_both(self, plan):
        line = op_trans(values("pair_0/up/kernel", role="parameter"), Split(1), ALL)
        found = plan.what_if(line)
        assert found.seconds >= -1e-12
        assert found.after.constraints == (*plan.constraints, str(line))
        again = replace(plan.session, program=(*plan.session.program, line), best=None).search()
        assert found.after.predicted.seconds == pytest.approx(again.best.seconds, rel=1e-9)
        changed = {subject for subject, _, _ in found.changed()}
        before = {d.subject: d for d in plan.decisions}
        assert changed == {
            d.subject for d in found.after.decisions
            if (d.cuts, d.in_use) != (before[d.subject].cuts, before[d.subject].in_use)
        }  # fmt: skip
        text = str(found)
        assert text.startswith(f"with {line}\n") and f"{len(changed)} of " in text
        assert all(word in text for word in ("step", "compute", "communication", "memory"))

    def test_a_line_less_is_never_dearer(self, plan):
        for n in (1, 2):
            found = plan.what_if(f"without {n}")
            assert found.seconds <= 1e-12
            assert len(found.after.constraints) == 1
        assert found.after.what_if("without 1").after.constraints == ()

    def test_a_line_as_text(self, plan):
        found = plan.what_if("op_trans: [values: {role: batch}, Replicate]")
        assert found.after.constraints[-1] == "op_trans(values(role='batch'), Replicate())"

    def test_what_leaves_no_plan_is_explained(self, plan):
        line = op_trans(ops(phase="forward", primitive="dot_general"), Split("contraction"), 8)
        with pytest.raises(js.ConstraintError, match="2 lines that leave no plan"):
            plan.what_if(line)

    @pytest.mark.parametrize("change", ["without 3", "without 0", 7])
    def test_what_is_no_change(self, plan, change):
        with pytest.raises(js.PlanError, match="what_if"):
            plan.what_if(change)

    def test_a_plan_from_a_file_is_not_asked(self, plan, tmp_path):
        plan.save(tmp_path / "plan.json")
        kept = js.Plan.load(tmp_path / "plan.json")
        for asked in (lambda: kept.what_if("without 1"), kept.shadow_prices):
            with pytest.raises(js.PlanError, match="plan the step again"):
                asked()

    def test_shadow_prices_are_what_a_search_finds(self, plan):
        prices = plan.shadow_prices()
        by = {(p.what, p.how): p.seconds for p in prices}
        for n, line in enumerate(plan.session.program, start=1):
            solved = -plan.what_if(f"without {n}").seconds
            assert by[f"without line {n}, {line}", "solved"] == pytest.approx(solved, abs=1e-12)
        (link,) = [p for p in prices if p.what.startswith("links of")]
        assert link.seconds > 0 and link.how == "at least"  # its gathers are not all hidden
        assert "(estimate)" in str(prices[0])

    def test_memory_that_binds_has_a_price(self):
        bound = [op_trans(ops(phase=("forward", "backward")), Split("batch"), ALL)]
        free = planned(
            mlp.workload("huge", batch=16), author=Author((("device", 8),)), constraints=bound
        )
        best = free.session.best
        limit = 0.8 * peak_memory(best.priced, best.choice)[0]
        session = replace(free.session, limit=limit, best=None)
        found = session.search()
        tight = replace(session, best=found.best, lower=found.lower)
        assert found.best.seconds > best.seconds
        estimate, solved = (p.seconds for p in shadow_prices(tight, free)[:2])
        assert estimate > 0
        assert 0 <= solved <= found.best.seconds - best.seconds + 1e-12


# -- recipes beside the search ---------------------------------------------------------------------


def test_recipes_are_compared_with_the_search():
    work = mlp.workload("wide")
    plan = planned(work, author=Author((("device", 8),)))
    wanted = ("data_parallel", "zero_3", "expert_parallel", "two_d", "hybrid")
    rows = compare(plan, {name: recipes.RECIPES[name]() for name in wanted})
    found = {row.name: row for row in rows}
    assert rows[0].plan.predicted.seconds <= plan.predicted.seconds * (1 + 1e-9)
    assert (
        found["zero_3"].plan.predicted.peak_bytes < found["data_parallel"].plan.predicted.peak_bytes
    )
    assert "matches nothing" in found["expert_parallel"].reason
    assert "no level or axis 'node'" in found["hybrid"].reason
    assert found["two_d"].plan is None  # one axis can not be cut in two
    data = {row["plan"]: row for row in as_data(rows)}
    assert data["searched"]["seconds"] == plan.predicted.seconds
    assert data["hybrid"].keys() == {"plan", "reason"}
    assert comparison_table(rows).row_count == len(wanted) + 1


def test_a_constraint_of_the_plan_holds_for_what_it_is_compared_with():
    line = op_trans(values(role="optimizer"), Split(ANY), ALL)
    plan = planned(mlp.workload("wide"), author=Author((("device", 8),)), constraints=[line])
    rows = compare(plan, {"whole": [op_trans(values(role="parameter"), Replicate())]})
    (other,) = [row for row in rows if row.name == "whole"]
    assert other.plan.constraints[0] == str(line)
    saved = replace(plan, session=None)
    with pytest.raises(js.PlanError, match="cache=False"):
        compare(saved, {})
