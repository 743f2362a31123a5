"""Published measurements in one form, and the scores of predictions for them."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import _published as published
import _scores as scores

GPT = {
    "source": "Some paper", "model": "GPT-1B", "hidden": "2048", "layers": "24", "heads": "16",
    "kv_heads": "16", "ffn": "8192", "vocab": "50304", "seq": "2048", "global_batch": "512",
    "micro_batch": "4", "device": "A100-80", "n_devices": "64", "tp": "2", "pp": "4", "dp": "8",
    "zero": "1", "recompute": "full", "measured_tflops_per_device": "", "measured_step_s": "10",
    "measured_mem_gb": "20", "notes": "Megatron-DeepSpeed; bf16/fp16; mem nvidia-smi",
}  # fmt: skip


def row(**changes):
    return published.normalised({**GPT, **changes})


def test_a_whole_row():
    found = row()
    assert not found.missing and not found.faults
    assert (found.device, found.stack, found.dtype) == ("a100-80", "megatron", "f16")
    assert (found.seconds, found.seconds_from) == (10.0, "step")
    assert found.memory == 20 * 2**30  # what nvidia-smi calls GB
    assert found.schedule == "1f1b"


@pytest.mark.parametrize(
    ("notes", "column", "value"),
    [
        ("MXFP8; cp=2 vp=5 ep=8", "cp", 2),
        ("MXFP8; cp=2 vp=5 ep=8", "chunks", 5),
        ("MXFP8; cp=2 vp=5 ep=8", "ep", 8),
        ("MXFP8; cp=2 vp=5 ep=8", "dtype", "f8"),
        ("interleaved 1F1B", "schedule", "interleaved"),
        ("JAX MaxText bf16", "stack", "jax"),
        ("FSDP amp_bf16", "stack", "torch"),
        ("eager", "compiled", False),
        ("8x HDR200 IB per node", "node_gbs", 200.0),
    ],
)
def test_notes_become_columns(notes, column, value):
    assert getattr(row(notes=notes), column) == value


def test_seconds_follow_from_tokens_and_from_flops():
    tokens = 512 * 2048
    assert row(measured_step_s="", notes="5000 tok/s/GPU").seconds == tokens / (64 * 5000)
    found = row(measured_step_s="", measured_tflops_per_device="100", notes="TF=6ND derived")
    dense = 24 * (4 * 2048**2 + 2 * 2048 * 8192) + 50304 * 2048
    assert found.seconds == pytest.approx(6 * dense * tokens / (64 * 100e12))


def test_contradictions_are_named():
    assert row(dp="4").faults == ("tp 2 x pp 4 x dp 4 x cp 1 is not 64 devices",)
    assert "does not divide batch" in row(micro_batch="7").faults[0]
    assert "heads do not divide hidden" in row(heads="15", kv_heads="15").faults[0]
    assert row(device="abacus").faults == ("unknown device",)
    (fault,) = row(notes="1 tok/s/GPU").faults
    assert "by tokens against 10 s by step" in fault


def test_what_is_missing_is_listed():
    assert row(micro_batch="", recompute="").missing == ("micro_batch", "recompute")
    assert row(measured_step_s="").missing == ("seconds",)
    assert row(measured_step_s="", notes="OOM").out_of_memory


def test_what_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="Some paper, GPT-1B: hidden 'wide' is no number"):
        row(hidden="wide")
    with pytest.raises(ValueError, match="layers '-3' is not positive"):
        row(layers="-3")


def test_a_table_without_a_column_is_an_error(tmp_path):
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerow([c for c in published.COLUMNS if c != "seq"])
    with pytest.raises(ValueError, match=r"no column \['seq'\]"):
        published.read(path)


def scored(times, predicted):
    rows = [row(measured_step_s=str(t), micro_batch=str(2**i)) for i, t in enumerate(times)]
    return [scores.Scored(r, p) for r, p in zip(rows, predicted)]


def test_errors():
    found = scores.seconds_errors(scored([10, 10], [11, 8]))
    assert (found.mape, found.median) == pytest.approx((0.15, 0.15))
    assert found.bias == pytest.approx(-0.05)


def test_ranks_and_regret():
    times = [10, 11, 12, 13, 14]
    (found,) = scores.ranks(scored(times, times), 0.0)
    assert (found.plans, found.spearman, found.regret) == (5, pytest.approx(1), 0)
    assert found.ceiling == pytest.approx(1)
    (found,) = scores.ranks(scored(times, times[::-1]), 0.0)
    assert found.spearman == pytest.approx(-1) and found.regret == pytest.approx(0.4)


def test_noise_is_the_spread_of_one_plan_measured_twice():
    same = [scores.Scored(row(measured_step_s=t), 1.0) for t in ("9", "11")]
    plans, spread = scores.noise(same)
    assert plans == 1 and spread == pytest.approx(np.std([9, 11], ddof=1) / 10)
