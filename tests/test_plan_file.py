"""A plan as a file, as a program, and as tables."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

import jaxscaler as js
from jaxscaler import Plan, PlanError, Replicate, Split, dump_program, planner, recipes
from jaxscaler import search as search_module
from jaxscaler.plan import Prediction, Search, Tensor, Traffic
from jaxscaler.report.show import show, size_text, source_text, time_text
from models import gpt, mlp

WORK = mlp.workload(dtype="float32")


@pytest.fixture(scope="module")
def plan():
    return js.plan(
        WORK.step, WORK.state, WORK.batch,
        cluster="cpu:8", constraints=recipes.zero(3), time_limit=10,
    )  # fmt: skip


@pytest.fixture
def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


# -- files -----------------------------------------------------------------------------------------


def test_a_plan_comes_back_equal(plan, saved):
    again = Plan.load(saved)
    assert again == plan
    assert again.digest() == plan.digest()
    assert [path.name for path in saved.parent.iterdir()] == ["plan.json"]
    again.save(saved)
    assert json.loads(saved.read_text()) == json.loads(json.dumps(plan.to_dict()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not JSON \(line 1: "),
        ("[]", "plan.json: "),
        ("{}", "has version None, this jaxscaler reads 1"),
        ('{"version": 1}', "not a plan: 'cluster'"),
    ],
)
def test_what_is_no_plan_is_refused_by_file_and_fault(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json: No such file"):
        Plan.load(tmp_path / "nowhere.json")


# -- a saved plan runs without a search ------------------------------------------------------------


@pytest.mark.parametrize("form", [str, lambda path: path, Plan.load])
def test_a_saved_plan_is_followed(plan, saved, form, monkeypatch):
    def search(*args, **options):
        raise AssertionError("searched")

    monkeypatch.setattr(planner, "plan_step", search)
    monkeypatch.setattr(search_module, "solve", search)
    step = js.parallelize(WORK.step, plan=form(saved))
    state = step.init(WORK.init, jax.random.key(0), batch=WORK.batch)
    assert step.plan.digest() == plan.digest()
    for tensor, leaf in zip(plan.tensors, jax.tree.leaves(state)):
        (nbytes,) = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert nbytes == tensor.bytes_per_device, tensor.path

    batch = WORK.make_batch()
    _, metrics = step(state, batch)
    _, expected = jax.jit(WORK.step)(WORK.init(jax.random.key(0)), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        mlp.workload(dtype="float32", pairs=3),
        mlp.workload(dtype="float32", batch=16),
        gpt.workload(),
    ],
    ids=["layers", "batch", "model"],
)
def test_a_plan_for_another_step_is_refused(saved, other):
    step = js.parallelize(other.step, plan=saved)
    with pytest.raises(PlanError, match="made for another step or other argument types"):
        step.plan_for(other.init, jax.random.key(0), batch=other.batch)
    with pytest.raises(PlanError, match="there is no plan yet"):
        step.plan  # noqa: B018


def test_a_plan_that_lacks_a_decision_is_refused_by_subject(plan):
    lost, *rest = plan.decisions
    step = js.parallelize(WORK.step, plan=replace(plan, decisions=tuple(rest)))
    with pytest.raises(PlanError, match="decides nothing for") as error:
        step.plan_for(WORK.init, jax.random.key(0), batch=WORK.batch)
    assert lost.subject in str(error.value)


# -- the program -----------------------------------------------------------------------------------


def test_a_plan_is_a_program_without_holes(plan):
    sizes = dict(plan.axes)
    said: dict = {}
    for line in plan.program():
        assert line.source == "plan"
        key = (line.subject.name, getattr(line.subject, "to", None) is not None)
        said.setdefault(key, []).append(line)
    halves = [((d.subject, False), d.cuts) for d in plan.decisions]
    halves += [((d.subject, True), d.in_use) for d in plan.decisions if d.in_use is not None]
    assert dict(halves).keys() == said.keys()
    for key, cuts in halves:
        lines = said[key]
        if not cuts:
            assert [line.algo for line in lines] == [Replicate()]
        split = {x.algo.factor: (x.num, x.place) for x in lines if isinstance(x.algo, Split)}
        for factor, (num, place) in split.items():
            axes = [axis for axis, f in cuts if f == factor]
            assert num == math.prod(sizes[axis] for axis in axes)
            assert place == (axes[0] if len(axes) == 1 else tuple(axes))
        assert set(split) == {f for _, f in cuts}
    text = dump_program(plan.program())
    assert "ANY" not in text and "ALL" not in text


# -- tables ----------------------------------------------------------------------------------------


def printed(plan, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        show(plan, console)
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_show_has_what_a_reader_asks(plan, width):
    text = printed(plan, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert f"plan {plan.digest()} for cpu:8 on mesh device=8" in words
    for path in ("state/params/pair_*/down/kernel", "state/opt_state/0/*", "batch/inputs"):
        assert path in words
    assert "f32[32,128]" in words and "P('device')" in words
    assert "as the parameters" in words
    assert "collectives of" in words and "reduce_scatter" in words and "mlp.py:" in words
    assert "on a device" in words and "at the fullest moment" in words
    assert "compute" in words and "exposed communication" in words
    assert "optimal in" in words and "mesh device0=2,device1=4: " in words
    assert "op_trans(values(role=('parameter', 'optimizer')), Split(ANY), ALL)" in words


def test_the_rows_of_arguments_add_up(plan):
    text = printed(plan, 120)
    (last,) = [line.split() for line in text.splitlines() if line.startswith("together")]
    leaves = [t for t in plan.tensors if t.role in ("parameter", "optimizer", "batch")]
    total = size_text(sum(t.bytes_per_device for t in leaves))
    assert last == ["together", str(len(leaves)), *total.split()]


def leaf(path, spec, shape=(64, 64), role="parameter", **rest):
    return Tensor(path, role, shape, "bfloat16", spec, 8192.0, **rest)


def made(plan, tensors, **rest):
    return replace(plan, tensors=tuple(tensors), **rest)


WHOLE, ROWS, COLUMNS = ((), ()), (("device",), ()), ((), ("device",))


def rows_of(text):
    """The lines of the first table as cells."""
    lines = text.splitlines()
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in lines[2 : lines.index("", 2)]
    ]


def test_layers_that_lie_alike_are_one_row_and_the_odd_ones_are_named(plan):
    ends = (0, 11)
    layers = [leaf(f"state/p/h_{i}/up", ROWS if i in ends else COLUMNS) for i in range(12)]
    table = rows_of(printed(made(plan, layers), 120))
    assert table == [
        ["state/p/h_{0,11}/up", "bf16[64,64]", "P('device')", "2", "16.4 KB"],
        ["state/p/h_{1-10}/up", "bf16[64,64]", "P(None, 'device')", "10", "81.9 KB"],
        ["together", "12", "98.3 KB"],
    ]


def test_optimizer_state_is_shown_beside_its_parameters(plan):
    parameters = [leaf(f"state/p/h_{i}/up", COLUMNS, used_as=WHOLE) for i in range(2)]
    parameters += [leaf("state/p/head", WHOLE)]
    moments = [
        replace(t, path=t.path.replace("state/p", f"state/opt/0/{moment}"), role="optimizer",
                spec=ROWS if t.path.endswith("head") else t.spec, used_as=None)
        for moment in ("mu", "nu")
        for t in parameters
    ]  # fmt: skip
    count = leaf("state/opt/0/count", (), (), "optimizer")
    table = rows_of(printed(made(plan, [*parameters, count, *moments]), 120))
    assert table == [
        ["state/p/h_*/up", "bf16[64,64]", "P(None, 'device') → P()", "2", "16.4 KB"],
        ["state/p/head", "bf16[64,64]", "P()", "1", "8.19 KB"],
        ["state/opt/0/count", "bf16[]", "P()", "1", "8.19 KB"],
        ["state/opt/0/*/head", "bf16[64,64]", "P('device')", "2", "16.4 KB"],
        ["state/opt/0/*", "as the parameters", "4", "32.8 KB"],
        ["together", "10", "81.9 KB"],
    ]


def test_what_every_device_holds_whole_is_named_largest_first(plan):
    tensors = [
        *(leaf(f"state/p/h_{i}/up", WHOLE) for i in range(3)),
        replace(leaf("state/p/table", WHOLE, (256, 64)), bytes_per_device=32768.0),
        leaf("state/p/split", ROWS),
        replace(leaf("state/p/small", ((),), (2,)), bytes_per_device=4.0),
    ]
    predicted = replace(plan.predicted, peak_bytes=1e5)
    text = printed(made(plan, tensors, predicted=predicted), 120)
    at = text.index("every device holds whole:")
    lines = [line.strip() for line in text[at:].splitlines()[1:4]]
    assert lines[:2] == ["state/p/table: 32.8 KB", "state/p/h_*/up: 8.19 KB ×3"]
    assert lines[2].startswith("search")


def test_collectives_are_summed_over_layers_and_the_dearest_come_first(plan):
    def gather(i, seconds, value):
        source = "/somewhere/linear.py:287:8 (Dense.__call__)"
        return Traffic("all_gather", "device", 2e6, 2, seconds, value.format(i), source)

    traffic = [gather(i, 1e-3, "h_{}/up:dot_general") for i in range(4)]
    traffic += [gather(0, 3e-3, "head")]
    traffic += [gather(i, 1e-6, "small" + "abcdefghijklmn"[i]) for i in range(14)]
    text = printed(made(plan, (), traffic=tuple(traffic)), 120)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("collectives of"))
    assert lines[at + 1] == "h_*/up:dot_general all_gather device 8 2 MB 4 ms linear.py:287"
    assert lines[at + 2] == "head all_gather device 2 2 MB 3 ms linear.py:287"
    assert lines[at + 13] == "the others together 8 16 MB 4 µs"


def test_activations_and_notes_are_shown(plan):
    activation = replace(leaf("forward:GPT/h_0/up:dot", COLUMNS), role="activation")
    text = printed(made(plan, [activation], notes=("a thing to know",)), 120)
    row = "forward:GPT/h_0/up:dot bf16[64,64] P(None, 'device') 8.19 KB"
    assert row in " ".join(text.split())
    assert "notes" in text and "a thing to know" in text


def test_one_device_has_no_mesh_and_nothing_to_say_of_replication(plan):
    single = made(plan, [leaf("state/p", WHOLE)], axes=(), traffic=())
    text = printed(
        replace(
            single,
            predicted=Prediction(1.0, 1.0, 0.0, 8192.0, 1e4, (("parameter", 8192.0),)),
            search=Search("optimal", 1.0, 0.0, 2.0, (), ()),
        ),
        80,
    )
    assert "on mesh one device" in text
    assert "holds whole" not in text and "collectives" not in text
    assert "8.19 KB of 10 KB on a device (81.9%)" in text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/a/b/model.py:12:3 (Block.__call__)", "model.py:12"),
        ("model.py:7", "model.py:7"),
        ("", ""),
        ("<stdin>", "<stdin>"),
    ],
)
def test_sources_are_shortened(text, short):
    assert source_text(text) == short


def test_units():
    assert [size_text(n) for n in (0, 12, 999, 999.9, 4096, 2.5e9, 1.5e12)] == [
        "0 B", "12 B", "999 B", "1 KB", "4.1 KB", "2.5 GB", "1500 GB",
    ]  # fmt: skip
    assert [time_text(t) for t in (2.0, 0.25, 1e-5, 0)] == ["2 s", "250 ms", "10 µs", "0 ns"]
