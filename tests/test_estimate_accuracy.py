"""The benchmark of published steps on a table that no one has seen, and what its prices rest on."""

import csv
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import _published as published
import estimate_accuracy as accuracy

from jaxscaler.cluster import Cluster
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants, constants_for
from jaxscaler.estimate.memory import (
    SOFTWARE,
    leaves_of,
    overhead_bytes,
    saved_per_layer,
    stage_memories,
    states_of,
)
from jaxscaler.estimate.parallel import ParallelConfig, axes_of, cluster_of, over_trees
from jaxscaler.estimate.price import price
from jaxscaler.estimate.waves import MULTIPROCESSORS, idle

SMALL = {
    "source": "A new paper", "model": "GPT-tiny", "hidden": "512", "layers": "4", "heads": "8",
    "ffn": "2048", "vocab": "4096", "seq": "256", "global_batch": "64", "micro_batch": "2",
    "device": "NVIDIA A100-80", "n_devices": "8", "tp": "1", "pp": "2", "dp": "4", "zero": "1",
    "recompute": "full", "measured_step_s": "0.1", "measured_mem_gb": "4",
    "notes": "Megatron-LM bf16", "lab": "elsewhere",
}  # fmt: skip
OTHERS = (
    {"micro_batch": "4", "measured_step_s": "0.09", "measured_mem_gb": ""},
    {"pp": "1", "dp": "8"},
    {"micro_batch": "8", "measured_step_s": "0.08", "measured_mem_gb": "3"},  # less than with 2
    {"micro_batch": "", "recompute": ""},  # completed
    {"device": "abacus"},
    {"hidden": "wide"},
    {"zero": "7"},  # no such stage
    {"recompute": "all_offloaded"},
    {"measured_step_s": ""},
    {"measured_step_s": "", "measured_mem_gb": "", "notes": "OOM; Megatron-LM"},
)


@pytest.fixture
def table(tmp_path, monkeypatch):
    columns = [c for c in published.COLUMNS if c != "kv_heads"] + ["lab"]
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows([SMALL, *(SMALL | other for other in OTHERS)])
    monkeypatch.setattr(accuracy, "OPTIONS", Namespace(table=str(path), fit=False), raising=False)
    return path


def test_any_table_is_scored_and_what_is_not_is_named(table, capsys):
    rows = list(accuracy.measure(quick=False))
    said = capsys.readouterr().err
    total = next(r for r in rows if (r["part"], r["source"]) == ("fitted", "all"))
    assert total["rows"] == 4 and total["mape"] > 0
    assert total["memory_rows"] == 1  # of three, two contradict each other
    late = next(r for r in rows if r["part"] == "completed")
    assert late["rows"] == 1
    broken = next(r for r in rows if r["part"] == "out of memory")
    assert (broken["rows"], broken["called_fitting"]) == (1, 1)
    for line in (
        "columns not looked at: lab",
        "not read: line 8: A new paper, GPT-tiny: hidden 'wide' is no number",
        "not scored: A new paper, GPT-tiny: unknown device 'abacus'",
        "memory not scored: A new paper, GPT-tiny, tp 1 x pp 2 x dp 4: 4 GB with micro-batch 2, "
        "3 GB with 8",
        "not priced: A new paper, GPT-tiny: zero=7: a stage from 0 to 3",
        "not priced: A new paper: 1 rows do not say, or no price has, offload",
        "not priced: A new paper: 1 rows do not say, or no price has, seconds",
    ):
        assert line in said
    assert accuracy.judge(rows)


# -- waves of tiles --------------------------------------------------------------------------------


def test_a_full_wave_loses_nothing_and_one_tile_more_a_wave():
    wave = MULTIPROCESSORS["a100-80"] * 256 * 128
    assert idle("a100-80", 4 * wave) == pytest.approx(0)
    assert 0.05 < idle("a100-80", 4 * wave + 1) <= 0.25
    assert idle("a100-80", 40 * wave + 1) < 0.03
    assert idle("v5e", 4 * wave + 1) == 0


def test_small_products_take_small_tiles():
    """A wave of large tiles would take 1 / 0.3 of the time."""
    assert idle("a100-80", 0.3 * 108 * 256 * 128) < 1 / 0.3 - 1


# -- collectives -----------------------------------------------------------------------------------


def test_trees_pass_what_nodes_have_and_rings_what_devices_have():
    def share(text, size):
        return over_trees(axes_of(Cluster.parse(text), {"a": size})["a"])

    assert share("a100:8x2", 16) == pytest.approx((1 / 2) / (15 / 16))
    assert share("a100:8x32", 256) == pytest.approx((31 / 32) / (255 / 256))
    assert share("a100:8x2", 8) == 1.0  # inside a node


def test_an_axis_takes_that_of_a_torus_which_fits_it():
    cluster = Cluster.parse("v4:12x16x16")
    axes = axes_of(cluster, {"dp": 256, "tp": 12})
    assert [part.size for part in axes["tp"].parts] == [12]
    assert axes["tp"].parts[0].level.size == 12
    assert [part.size for part in axes["dp"].parts] == [16, 16]


# -- memory ----------------------------------------------------------------------------------------

GPT = ModelConfig("gpt", "gpt", 1024, 8, 16, 16, 64, 4096, 50304, 2048, False)
PIPELINE = ParallelConfig(pp=4, dp=2, zero=1, sp=False)


def stages(stack, gradient="float32", model=GPT, **options):
    given = {"micro": 4, "seq": 1024, "micro_batches": 8, "recompute": "full",
             "attention": "unfused", "dropout": True, "overhead": 0.0} | options  # fmt: skip
    states = states_of("adam", "bfloat16", True, gradient, stack)
    saved = saved_per_layer(model, 4, 1024, PIPELINE, "full", "unfused", True)
    leaves = leaves_of(model, 1, 1)
    return stage_memories(model, leaves, saved, PIPELINE, states, stack=stack, **given)


def test_deepspeed_keeps_16_bit_gradients_beside_their_sums():
    plain, deep = (stages(stack)[0] for stack in ("megatron", "megatron-deepspeed"))
    elements = plain["gradients"] / 4
    assert deep["gradients in 16 bits"] == 2 * elements
    assert deep["reduction bucket"] == 4 * min(5e8, elements)
    assert "gradients in 16 bits" not in plain
    assert "gradients in 16 bits" not in stages("megatron-deepspeed", "float16")[0]


def test_fragments_are_a_share_of_all_but_the_framework():
    found = stages("megatron", overhead=1e9)[0]
    rest = sum(found.values()) - found["fragments"] - found["framework"]
    assert found["fragments"] == pytest.approx(SOFTWARE["megatron"].fragments * rest)
    assert "fragments" not in stages("jax")[0]


def test_ends_of_a_pipeline():
    first, inside, last = stages("megatron")
    assert "logits" in last and "logits" not in first
    assert first["activations"] > inside["activations"] > last["activations"]
    cluster = cluster_of("a100-80", 8)
    found = price(GPT, PIPELINE, cluster, batch=64, seq=1024, micro_batch=4, recompute="full",
                  stack="megatron", attention="unfused", dropout=True,
                  constants=Constants())  # fmt: skip
    process = overhead_bytes(0.0, "megatron", "a100-80")
    ends = sum(first.values()) + process, sum(last.values()) + process
    assert found.ends == pytest.approx(ends)
    assert found.memory_bytes >= max(found.ends)


def test_a_norm_after_the_table_keeps_what_it_reads_of_every_micro_batch_under_way():
    bloom = replace(GPT, embed_norm=True)
    plain, kept = (stages("megatron", model=model) for model in (GPT, bloom))
    in_flight = PIPELINE.pp
    more = kept[0]["activations"] - plain[0]["activations"]
    assert more == 2 * 4 * 1024 * GPT.hidden * in_flight
    assert kept[1:] == plain[1:]
    assert stages("jax", model=bloom) == stages("jax")


def test_a_process_takes_memory_before_it_allocates_any():
    found = [overhead_bytes(1.0, "megatron", device) for device in ("v100-32", "a100-80", "h100")]
    assert found == [1e9 + 1113 * 2**20, 1e9 + 1573 * 2**20, 1e9]
    assert overhead_bytes(1.0, "jax", "a100-80") == 1e9


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "attention"), [(16, "unfused"), (16, "flash")])
def test_rows_of_heads_that_are_no_multiple_of_16_bytes_miss_the_tensor_cores(heads, attention):
    def seconds(size: int) -> float:
        model = ModelConfig("m", "gpt", heads * size, 2, heads, vocab=4096, context=512)
        cluster = cluster_of("a100-80", 1)
        found = price(model, ParallelConfig(), cluster, batch=4, seq=512, micro_batch=4,
                      stack="megatron", attention=attention, constants=Constants())  # fmt: skip
        return found.parts["attention"] / found.model_flops

    rates = dict(cluster_of("a100-80", 1).device.peak_flops)
    slower = seconds(108) / seconds(112)
    if attention == "flash":
        assert slower == pytest.approx(1.0, rel=0.1)
    else:
        assert 3 < slower < rates["bf16"] / rates["f32"]


def test_megatron_deepspeed_runs_as_fast_as_megatron():
    device = cluster_of("a100-80", 8).device
    both = [constants_for(device, stack) for stack in ("megatron", "megatron-deepspeed")]
    assert both[0] == both[1]


def test_blocking_launches_cost_what_their_source_measured():
    row = published.normalised(SMALL)
    slow = replace(row, blocking=True)
    given = Constants()
    assert accuracy.constants_of(row, given) == given
    more = accuracy.constants_of(slow, given).launch_us - given.launch_us
    assert more == pytest.approx(accuracy.BLOCKED_US)
    assert accuracy.priced(slow, given).seconds > accuracy.priced(row, given).seconds
