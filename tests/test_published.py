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
    assert (found.device, found.stack, found.dtype) == ("a100-80", "megatron-deepspeed", "f16")
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
        ("800 Gbps/node HDR", "node_gbs", 100.0),
        ("2 JAX devices per chip", "devices", 128),
        ("Megatron-DeepSpeed fp16", "gradient", "float16"),
        ("NeMo bf16", "stack", "megatron"),
    ],
)
def test_notes_become_columns(notes, column, value):
    assert getattr(row(notes=notes), column) == value


def test_seconds_follow_from_tokens_and_from_flops():
    tokens = 512 * 2048
    for said in ("5000", "5,000.0"):
        assert row(measured_step_s="", notes=f"{said} tok/s/GPU").seconds == tokens / (64 * 5000)
    found = row(measured_step_s="", measured_tflops_per_device="100", notes="TF=6ND derived")
    dense = 24 * (4 * 2048**2 + 2 * 2048 * 8192) + 50304 * 2048
    assert found.seconds == pytest.approx(6 * dense * tokens / (64 * 100e12))


def test_contradictions_are_named():
    assert row(dp="4").faults == ("tp 2 x pp 4 x dp 4 x cp 1 is not 64 devices",)
    assert "does not divide batch" in row(micro_batch="7").faults[0]
    assert "heads do not divide hidden" in row(heads="15", kv_heads="15").faults[0]
    assert row(device="abacus").faults == ("unknown device 'abacus'",)
    assert row(micro_batch="1.5").faults == ("micro-batch 1.5 is no whole number",)
    (fault,) = row(notes="1 tok/s/GPU").faults
    assert "by tokens against 10 s by step" in fault


def test_what_is_missing_is_listed():
    assert row(micro_batch="", recompute="").missing == ("micro_batch", "recompute")
    assert row(measured_step_s="").missing == ("seconds",)
    assert row(recompute="qkv_offloaded").missing == ("recompute", "offload")
    assert row(measured_step_s="", notes="OOM").out_of_memory


def test_what_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="Some paper, GPT-1B: hidden 'wide' is no number"):
        row(hidden="wide")
    for value in ("-3", "nan", "inf"):
        with pytest.raises(ValueError, match=f"layers '{value}' is not positive"):
            row(layers=value)


@pytest.mark.parametrize(
    ("text", "name"),
    [("A100-80", "a100-80"), ("NVIDIA H100", "h100"), ("TPU v5p", "v5p"), ("TPUv6e", "v6e"),
     ("b200", "b200"), ("abacus", None), ("", None)],
)  # fmt: skip
def test_devices_as_tables_write_them(text, name):
    assert published.device_named(text) == name


def write(path, columns, rows):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return path


def test_a_table_without_a_needed_column_is_an_error(tmp_path):
    columns = [c for c in published.COLUMNS if c not in ("seq", "kv_heads")]
    with pytest.raises(ValueError, match=r"no column \['seq'\]"):
        published.read(write(tmp_path / "table.csv", columns, [GPT]))


def test_other_tables_are_read(tmp_path):
    """Columns of their own, columns left out, rows that say nothing of use."""
    columns = [c for c in published.COLUMNS if c not in ("kv_heads", "zero")] + ["date", "price"]
    rows = [GPT, GPT | {"hidden": "wide"}, GPT | {"ffn": ""}, GPT | {"device": "abacus"}, {}]
    table = published.read(write(tmp_path / "table.csv", columns, rows))
    assert table.ignored == ["date", "price"]
    assert [line.split(":")[0] for line in table.unread] == ["line 3", "line 4", "line 6"]
    assert "hidden 'wide' is no number" in table.unread[0] and "no ffn" in table.unread[1]
    first, second = table.rows
    assert first.kv_heads == 16 and first.missing == () and first.zero == 0
    assert published.problems([second]) == ["Some paper, GPT-1B: unknown device 'abacus'"]


def test_zero_inside_a_slice():
    assert row().shard == 0 and row(zero="3 in 256-slice x DP2 over DCN").shard == 256


def test_readings_of_memory_that_cannot_both_be():
    rows = [row(measured_mem_gb=m, micro_batch=b) for m, b in (("20", "1"), ("30", "2"))]
    assert published.settled(rows) == (rows, [])
    for memory, micro in (("23", "1"), ("24", "4")):  # again; less with more samples
        found, lines = published.settled([*rows, row(measured_mem_gb=memory, micro_batch=micro)])
        assert len(lines) == 1 and f"GB with micro-batch {micro if micro == '1' else 2}" in lines[0]
        assert [r.memory is None for r in found] == [micro == "1", micro == "4", True]


def test_a_source_has_facts_of_some_of_its_rows():
    chronicles = {"source": "BigScience chronicles", "model": "GPT-195B"}
    before = row(**chronicles, measured_step_s="112.69")
    after = row(**chronicles, measured_step_s="116.54")
    assert (before.setup, before.gradient) == ("pcie", "float16")
    assert (after.setup, after.gradient) == ("bf16", "float32")
    assert before.group != after.group and before.blocking and not row().blocking


def scored(times, predicted):
    rows = [row(measured_step_s=str(t), micro_batch=str(2**i)) for i, t in enumerate(times)]
    return [scores.Scored(r, p) for r, p in zip(rows, predicted)]


def test_errors():
    found = scores.seconds_errors(scored([10, 10], [11, 8]))
    assert (found.mape, found.median) == pytest.approx((0.15, 0.15))
    assert found.bias == pytest.approx(-0.05)


def test_ranks_and_regret():
    times = [10, 11, 12, 13, 14]
    (found,) = scores.ranks(scored(times, times), {})
    assert (found.plans, found.spearman, found.regret) == (5, pytest.approx(1), 0)
    assert found.ceiling == pytest.approx(1)
    (found,) = scores.ranks(scored(times, times[::-1]), {})
    assert found.spearman == pytest.approx(-1) and found.regret == pytest.approx(0.4)
    assert (found.pairs, found.wrong) == (10, 1.0)
    (found,) = scores.ranks(scored(times, times[::-1]), {"Some paper": 0.1})
    assert found.ceiling < 1 and found.pairs == 1  # 10 and 14 alone are apart for sure


def test_what_differs_between_plans_that_are_ranked_wrongly():
    times = [10, 11, 12, 13, 14]
    assert scores.differing(scored(times, times), {}) == []
    (found,) = scores.differing(scored(times, times[::-1]), {})
    assert (found.what, found.pairs, found.wrong) == ("micro_batch", 10, 10)
    apart = [(b / a - 1, a / b - 1) for i, a in enumerate(times) for b in times[i + 1 :]]
    assert (found.measured, found.predicted) == pytest.approx(tuple(np.mean(apart, axis=0)))
    assert len(scores.differing(scored(times, times[::-1]), {"Some paper": 0.1})) == 1


def test_noise_is_the_spread_of_one_plan_measured_twice():
    same = [scores.Scored(row(measured_step_s=t), 1.0) for t in ("9", "11")]
    plans, spread = scores.noise(same)
    assert plans == 1 and spread == pytest.approx(np.std([9, 11], ddof=1) / 10)
    assert scores.noise([*same, same[0]]) == (plans, spread)  # listed twice, measured once
    assert scores.noise([same[0], same[0]]) == (0, 0.0)


def test_a_source_with_few_repeated_plans_has_the_noise_of_all():
    def twice(source, times, micro):
        rows = [row(source=source, measured_step_s=t, micro_batch=micro) for t in times]
        return [scores.Scored(r, 1.0) for r in rows]

    calm = [s for micro in "124" for s in twice("calm", ("10", "10.1"), micro)]
    found = scores.floors([*calm, *twice("loud", ("9", "11"), "1")])
    assert found["calm"] == pytest.approx(scores.noise(calm)[1])
    assert found["loud"] == pytest.approx(np.sqrt((3 * found["calm"] ** 2 + 0.02) / 4), rel=1e-3)


def test_unevenness_is_what_no_curve_over_the_micro_batch_explains():
    sizes = (1, 2, 4, 8, 16)
    smooth = [10 + 2 * b + 5 / b for b in sizes]
    assert scores.unevenness(scored(smooth, smooth))[1] == pytest.approx(0, abs=1e-9)
    rough = [t * x for t, x in zip(smooth, (1.05, 0.95, 1.05, 0.95, 1.05))]
    families, found = scores.unevenness(scored(rough, rough))
    assert families == 1 and 0.03 < found < 0.1
    assert scores.unevenness(scored(rough[:3], rough[:3])) == (0, 0.0)
