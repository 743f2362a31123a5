"""The command line from end to end: files, streams, exit statuses, texts of errors."""

import json
import subprocess
import sys

import pytest

from jaxscaler import Plan, cli, commands, dump_program, target
from jaxscaler.solve import evaluate
from jaxscaler.solve.iopddl import read_problem

TARGET = "models.mlp:workload"
TINY = [TARGET, "--cluster", "cpu:8", "--time-limit", "10"]

CUSTOM = '''
import jax
import jax.numpy as jnp
from types import SimpleNamespace


def step(state, x, y):
    loss = jnp.mean((x @ state - y) ** 2)
    return state - 0.1 * jnp.sign(loss) * state, loss


def linear(width, batch=8):
    """A workload that is no Workload, of a step with two arguments beside its state."""
    shape = jax.ShapeDtypeStruct
    batch = (shape((batch, width), jnp.float32), shape((batch,), jnp.float32))
    return SimpleNamespace(step=step, state=shape((width,), jnp.float32), batch=batch)


def untraceable():
    return SimpleNamespace(step=step, state="words", batch=({}, {}))


def incomplete():
    return SimpleNamespace(step=step)


not_a_function = 3
'''


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The folder in which `jaxscaler plan` left plan.json and problem.json.gz."""
    folder = tmp_path_factory.mktemp("planned")
    files = ["--out", str(folder / "plan.json")]
    files += ["--export-problem", str(folder / "problem.json.gz")]
    assert cli.main(["plan", *TINY, "--batch", "16", "--set", "pairs=1", "--quiet", *files]) == 0
    return folder


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """A module `custom_workloads` in the current directory."""
    (tmp_path / "custom_workloads.py").write_text(CUSTOM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "custom_workloads"
    sys.modules.pop("custom_workloads", None)


def error_of(capsys, *argv):
    """(status, message) of a command that fails with nothing on stdout."""
    status = cli.main([*argv])
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    _, prefix, message = err.rpartition("jaxscaler: error: ")
    assert prefix
    return status, message


# -- plan ------------------------------------------------------------------------------------------


def test_plan_leaves_whole_files_and_nothing_else(planned):
    assert sorted(path.name for path in planned.iterdir()) == ["plan.json", "problem.json.gz"]
    plan = Plan.load(planned / "plan.json")
    shapes = {t.path: t.shape for t in plan.tensors}
    assert shapes["batch/inputs"] == (16, 32)
    assert "state/params/pair_0/up/kernel" in shapes
    assert "state/params/pair_1/up/kernel" not in shapes


def test_plan_shows_the_plan_on_stdout_and_progress_on_stderr(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["plan", *TINY, "--recipe", "data_parallel"]) == 0
    out, err = capsys.readouterr()
    assert "for cpu:8 on mesh device=8" in out
    assert "op_trans(ops(phase='update'), Replicate())" in out
    lines = err.splitlines()
    phases = [line.split(" s  ")[1].split(": ")[0] for line in lines]
    assert phases[:3] == ["trace", "graph", "search"] and phases[-1] == "plan"
    assert TARGET in lines[0]


def test_json_is_all_there_is_on_stdout_and_is_the_plan(capsys, custom):
    argv = ["plan", f"{custom}:linear", "--cluster", "cpu:8", "--set", "width=16", "--json"]
    assert cli.main([*argv, "--quiet", "--batch", "32", "--out", "p.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = Plan.from_dict(json.loads(out))
    assert plan == Plan.load("p.json")
    assert {t.path: t.shape for t in plan.tensors} == {
        "state": (16,), "x": (32, 16), "y": (32,),
    }  # fmt: skip


def test_a_cluster_may_be_a_file(capsys, custom, tmp_path):
    text = 'name = "lab"\n[device]\nbase = "cpu"\nname = "pi"\n'
    text += '[[levels]]\nname = "board"\nsize = 4\nlink = {kind = "switch", bandwidth = 1e9}\n'
    (tmp_path / "lab.toml").write_text(text)
    argv = ["plan", f"{custom}:linear", "--set", "width=16", "--cluster", "lab.toml"]
    assert cli.main([*argv, "--json", "--quiet"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert plan.cluster["name"] == "lab"
    assert dict(plan.axes).keys() <= {"board", "board0", "board1"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["plan", TARGET], "required: --cluster"),
        (["plan", "models.mlp", "--cluster", "cpu:8"], "'models.mlp' is not of the form MODULE:F"),
        (
            ["plan", "models.nlp:workload", "--cluster", "cpu:8"],
            "can not import models.nlp: No mod",
        ),
        (
            ["plan", "models.mlp:work", "--cluster", "cpu:8"],
            "has no function 'work'; did you mean w",
        ),
        (
            ["plan", *TINY, "--seq", "8"],
            "models.mlp:workload: unknown option seq; there is pairs, ",
        ),
        (["plan", *TINY, "--size", "vast"], "unknown size 'vast'; there is tiny"),
        (["plan", *TINY, "--batch", "0"], "--batch: '0' is not a whole number above 0"),
        (["plan", *TINY, "--set", "batch=8", "--batch", "8"], "batch is given more than once"),
        (["plan", *TINY, "--set", "pairs"], "'pairs' is not of the form KEY=VALUE"),
        (["plan", *TINY, "--memory", "1.5"], "'1.5' is not above 0 and at most 1"),
        (["plan", *TINY, "--time-limit", "nan"], "'nan' is not a number above 0"),
        (["plan", *TINY, "--seed", "-1"], "'-1' is not a whole number from 0"),
        (["plan", *TINY, "--recipe", "magic"], "invalid choice: 'magic' (choose from"),
        (
            ["plan", *TINY, "--out", "no/such/folder/plan.json"],
            "there is no directory no/such/folder",
        ),
        (["plan", *TINY, "--export-problem", "/"], "/ is a directory"),
        (["plan", TARGET, "--cluster", "h1000:8"], "h1000"),
        (["plan", TARGET, "--cluster", "cpu:8xx"], "cluster 'cpu:8xx', position"),
        (["plan", TARGET, "--cluster", "nowhere.toml"], "nowhere.toml: No such file"),
        (["show", "nowhere.json"], "nowhere.json: No such file"),
        (["show", "broken.cfg"], "broken.cfg: not JSON"),
        (["plan", TARGET, "--cluster", "broken.toml"], "broken.toml: "),
        (["show", "broken.json"], "broken.json: not text"),
        (["show", "plan.json", "--json", "--program"], "not allowed with argument"),
        (["solve", "nowhere.json"], "nowhere.json: cannot be read"),
        (["solve", "broken.cfg"], "broken.cfg: byte 1: "),
    ],
)
def test_bad_input_is_status_2_and_one_message(capsys, tmp_path, argv, message):
    (tmp_path / "broken.toml").write_text("[")
    (tmp_path / "broken.cfg").write_text("[metadata]")
    (tmp_path / "broken.json").write_bytes(b"\xff\xfe")
    argv = [str(tmp_path / word) if word.startswith("broken") else word for word in argv]
    status, text = error_of(capsys, *argv)
    assert status == 2
    assert message in text


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("linear", ["--set", "depth=2"], "takes no depth; it takes width, batch"),
        ("linear", [], "missing a required argument: 'width'; give it with --set"),
        ("incomplete", [], "returned a SimpleNamespace without state, batch"),
        ("not_a_function", [], "no function 'not_a_function'; it has step, linear, untrace"),
    ],
)
def test_a_target_that_does_not_fit_is_status_2(capsys, custom, function, options, message):
    argv = ["plan", f"{custom}:{function}", "--cluster", "cpu:8", *options]
    status, text = error_of(capsys, *argv)
    assert status == 2
    assert message in text


def test_a_step_that_can_not_be_planned_is_status_1(capsys, custom):
    status, text = error_of(capsys, "plan", f"{custom}:untraceable", "--cluster", "cpu:8")
    assert status == 1
    assert text.startswith("state is a str, not an array: ")


def test_constraints_that_clash_are_status_1_and_leave_no_file(capsys, tmp_path):
    file = tmp_path / "plan.json"
    argv = ["plan", *TINY, "--batch", "3", "--recipe", "data_parallel", "--out", str(file)]
    status, text = error_of(capsys, *argv)
    assert status == 1
    assert "no strategy of" in text and "Split('batch'), ALL" in text
    assert list(tmp_path.iterdir()) == []


def test_constraints_from_a_file(capsys, tmp_path):
    file = tmp_path / "lines.yaml"
    file.write_text("- op_trans: [values: {role: parameter}, Replicate]\n")
    assert cli.main(["plan", *TINY, "--constraints", str(file), "--json", "--quiet"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["constraints"] == ["op_trans(values(role='parameter'), Replicate())"]
    file.write_text("- op_trans: [values: {rule: parameter}, Replicate]\n")
    status, text = error_of(capsys, "plan", *TINY, "--constraints", str(file))
    assert status == 1
    assert text.startswith(f"{file}:1: values has no 'rule'; did you mean 'role'?")


def test_recipes_beside_the_searched_plan(capsys):
    argv = ["compare", *TINY, "--recipe", "zero_3", "expert_parallel", "--quiet"]
    assert cli.main([*argv, "--json"]) == 0
    rows = {row["plan"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {"searched", "zero_3", "expert_parallel"}
    assert rows["searched"]["seconds"] <= rows["zero_3"]["seconds"] * (1 + 1e-9)
    assert "matches nothing" in rows["expert_parallel"]["reason"]


def test_what_does_not_fit_is_status_3_and_leaves_no_file(capsys, tmp_path):
    file = tmp_path / "plan.json"
    status, text = error_of(capsys, "plan", *TINY, "--memory", "1e-6", "--out", str(file))
    assert status == 3
    assert "no plan fits" in text and "largest tensors" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a=1e-3", 1e-3), ("a=float32", "float32"), ("a=true", True),
        ("a=false", False), ("a=none", None), ("a=None", None), ("a='1'", "1"), ("a=x=y", "x=y"),
    ],
)  # fmt: skip
def test_settings_are_literals_or_words(text, value):
    key, found = target.setting(text)
    assert key == "a"
    assert found == value and type(found) is type(value)


# -- show ------------------------------------------------------------------------------------------


def test_show_prints_what_was_planned(capsys, planned):
    file = planned / "plan.json"
    plan = Plan.load(file)
    assert cli.main(["show", str(file)]) == 0
    assert f"plan {plan.digest()} for cpu:8" in capsys.readouterr().out
    assert cli.main(["show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert cli.main(["show", str(file), "--program"]) == 0
    assert capsys.readouterr().out == dump_program(plan.program())


# -- solve -----------------------------------------------------------------------------------------


def test_an_exported_problem_solves_to_what_was_planned(capsys, planned):
    file = planned / "problem.json.gz"
    assert cli.main(["solve", str(file), "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    cost, peak, feasible = evaluate(read_problem(file), result["choice"])
    assert feasible
    assert (result["status"], result["cost"], result["peak_usage"]) == ("optimal", cost, peak)
    plan = Plan.load(planned / "plan.json")
    assert result["name"] == ",".join(f"{name}={size}" for name, size in plan.axes)
    # the unit of cost is the plan's own: the two optima agree in what they leave of the gap
    assert result["gap"] == plan.search.gap == 0


def problem_of(usages, limit):
    """Two nodes of two strategies that live together."""
    nodes = {"intervals": [[0, 1], [0, 1]], "costs": [[1, 5], [7, 2]], "usages": usages}
    edges = {"nodes": [[0, 1]], "costs": [[0, 9, 3, 0]]}
    return {"problem": {"name": "pair", "nodes": nodes, "edges": edges, "usage_limit": limit}}


def test_solve_prints_the_answer(capsys, tmp_path):
    file = tmp_path / "pair.json"
    file.write_text(json.dumps(problem_of([[1, 1], [1, 1]], 2)))
    assert cli.main(["solve", str(file)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert {"name: pair", "status: optimal", "cost: 7", "bound: 7", "peak_usage: 2"} <= set(lines)
    assert "2 nodes, 1 edges" in err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_problem_without_an_answer_is_status_3(capsys, tmp_path, options):
    file = tmp_path / "pair.json"
    file.write_text(json.dumps(problem_of([[2, 2], [2, 2]], 3)))
    assert cli.main(["solve", str(file), *options]) == 3
    out, err = capsys.readouterr()
    assert "is 4, above the limit 3" in err
    assert out == "" if not options else json.loads(out)["status"] == "infeasible"


# -- files -----------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text("before")

    def half(path):
        path.write_text("half of a fi")
        raise OSError(28, "No space left on device")

    with pytest.raises(cli.UsageError, match=r"plan\.json: No space left on device"):
        commands._write(file, half)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert file.read_text() == "before"


def test_python_dash_m(planned):
    argv = [sys.executable, "-m", "jaxscaler", "show", str(planned / "plan.json"), "--program"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == dump_program(Plan.load(planned / "plan.json").program())
