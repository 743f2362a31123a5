"""benchmarks/harness.py: plans run in turns; what goes wrong with one is a result of its row."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import harness
import jax
import pytest

from jaxscaler import recipes
from jaxscaler.cluster import Cluster
from jaxscaler.errors import InfeasibleError

TINY = {"size": "tiny", "pairs": 1}


def rows_of(plans, **options):
    rows = harness.measure_model("mlp", 16, TINY, plans, Cluster.parse("cpu:8"), 2, 1, **options)
    return {row["plan"]: row for row in rows}


@pytest.fixture(scope="module")
def rows():
    """Rows of plans that run, and of others that fail, each in another way."""

    def refuses():
        raise InfeasibleError("nothing fits\nas was expected")

    def breaks():
        raise KeyError("a bug")

    run = harness.run

    def run_or_not(runner, steps):
        if runner is out_of_memory:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        run(runner, steps)

    make = harness.make
    out_of_memory = None

    def noted(work, plan, cluster):
        nonlocal out_of_memory
        runner = make(work, plan, cluster)
        out_of_memory = runner if plan == "zero3" else out_of_memory
        return runner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "PLANS", {
            "planned": recipes.data_parallel, "zero3": recipes.zero, "refused": refuses,
            "broken": breaks, "tensor": recipes.context_parallel, "jit": None,
        })  # fmt: skip
        patch.setattr(harness, "run", run_or_not)
        patch.setattr(harness, "make", noted)
        yield rows_of(list(harness.PLANS))


def test_what_runs_is_measured(rows):
    for plan, predicted in (("planned", True), ("jit", False)):
        row = rows[plan]
        assert row["status"] == "ok"
        assert row["step_ms"] > 0 and row["spread"] >= 0
        assert row["samples_s"] == pytest.approx(16 / row["step_ms"] * 1e3)
        assert row["mfu"] > 0 and row["memory_gb"] > 0
        assert row["memory_from"] == "compiler"  # CPU devices have no allocator that counts
        assert (row["predicted_ms"] is not None) == predicted
        assert (row["predicted_gb"] is not None) == predicted
    assert rows["planned"]["mesh"] == "device=8" and rows["jit"]["mesh"] == "one device"


def test_mfu_is_of_all_devices_at_the_peak_of_the_dtype(rows):
    device = Cluster.parse("cpu:8").device
    work = __import__("models.mlp").mlp.workload(batch=16, **TINY)
    at_peak = harness.peak_seconds(work, device)
    assert rows["jit"]["mfu"] == pytest.approx(at_peak / rows["jit"]["step_ms"] * 1e3)
    assert rows["planned"]["mfu"] == pytest.approx(at_peak / 8 / rows["planned"]["step_ms"] * 1e3)
    # two products forward, three backward: the inputs have no gradient
    assert at_peak * device.flops("bfloat16") == pytest.approx(5 * 2 * 16 * 32 * 128)


def test_a_failure_is_named_in_its_row_and_ends_nothing(rows):
    assert rows["zero3"]["status"] == "out of memory"
    assert rows["refused"]["status"] == "no plan: nothing fits"
    assert rows["broken"]["status"] == "KeyError: 'a bug'"
    assert rows["tensor"]["status"] == "no plan: the model has nothing of the kind"  # no sequence
    assert "step_ms" not in rows["zero3"]


def test_bars():
    ok = {"model": "m", "status": "ok"}
    rows = [{**ok, "plan": "planned", "step_ms": 1.0}, {**ok, "plan": "data", "step_ms": 0.5}]
    assert [bar["ok"] for bar in harness.judge(rows)] == [True]  # times of CPUs are not judged
    (bar,) = harness.judge([{"model": "m", "plan": "planned", "status": "out of memory"}])
    assert not bar["ok"]


def test_bars_on_real_devices(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ok = {"model": "m", "status": "ok"}
    rows = [{**ok, "plan": "planned", "step_ms": 1.0}, {**ok, "plan": "data", "step_ms": 0.5},
            {**ok, "plan": "jit", "step_ms": 0.1}]  # fmt: skip
    assert [bar["ok"] for bar in harness.judge(rows)] == [True, False]


def test_the_allocators_peak_counts_where_it_rose(monkeypatch):
    monkeypatch.setattr(harness, "_highest", lambda: 3e9)
    assert harness.memory(None, 2e9) == {"memory_gb": 3.0, "memory_from": "allocator"}
    assert harness.memory(None, 3e9) == {"memory_gb": None, "memory_from": "not known"}


def test_the_command_writes_json(tmp_path, capsys):
    file = tmp_path / "h.json"
    size = ["--size", "size=tiny", "--size", "pairs=1", "--size", "batch=16"]
    assert harness.main(["--models", "mlp", "--plans", "jit", *size, "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert [row["plan"] for row in result["rows"]] == ["jit"]
    assert result["bars"][0]["ok"] is False  # no planned step was asked for
    with pytest.raises(SystemExit, match="KEY=VALUE"):
        harness.main(["--size", "tiny"])


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"model": "m", "status": "ok", "plan": "jit", "step_ms": 1.0, "predicted_ms": None,
           "memory_gb": 1.0, "predicted_gb": 2.0}  # fmt: skip
    harness.plot([row, {"model": "m", "plan": "data", "status": "out of memory"}],
                 str(tmp_path / "h.png"))  # fmt: skip
    assert (tmp_path / "h.png").stat().st_size > 1000


@pytest.mark.slow
def test_processes_run_it_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    root = Path(harness.__file__).parent.parent
    arguments = ["--models", "mlp", "--plans", "planned,jit", "--size", "size=tiny",
                 "--size", "pairs=1", "--size", "batch=16"]  # fmt: skip
    files = [tmp_path / f"{i}.json" for i in range(2)]
    runs = [
        subprocess.Popen(
            [sys.executable, harness.__file__, *arguments, "--json", str(file)],
            env=os.environ | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2",
                              "JAX_PROCESS_ID": str(i), "JAX_NUM_CPU_DEVICES": "2",
                              "PYTHONPATH": str(root)},
            stderr=subprocess.PIPE, text=True,
        )
        for i, file in enumerate(files)
    ]  # fmt: skip
    for run in runs:
        _, err = run.communicate(timeout=400)
        assert run.returncode == 0, err[-2000:]
    found = json.loads(files[0].read_text())["rows"]
    assert {row["plan"]: row["status"] for row in found} == {"planned": "ok", "jit": "ok"}
    assert not files[1].exists()
