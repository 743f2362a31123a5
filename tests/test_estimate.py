"""Transformer math: configurations, closed forms, failures, the command, the page of the docs."""

import doctest
import json
from pathlib import Path

import pytest

from jaxscaler import ConfigError, InfeasibleError, cli, estimate
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.estimate import failures, flops
from jaxscaler.estimate.adapters import adapter_parameters
from jaxscaler.estimate.config import (
    READERS,
    ModelConfig,
    find_model,
    from_hugging_face,
    named_models,
    padded_vocab,
)
from jaxscaler.estimate.constants import Constants, constants_for
from jaxscaler.estimate.memory import (
    leaves_of,
    local_parameters,
    saved_per_layer,
    stages_of,
    states_of,
    training_memory,
)
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig, axes_of, cluster_of, level_of
from jaxscaler.estimate.plot import phase_diagram
from jaxscaler.estimate.search import Point, knee, smallest

GPT = ModelConfig("gpt", "gpt", 1024, 4, 16, vocab=4096, context=512, tied=True, positions=True)


# -- configurations --------------------------------------------------------------------------------

# Fields of the published config.json that matter, and the parameters of the released checkpoint (to
# the digits given; norms and biases that the families do not have leave small differences).
PUBLISHED = [
    ({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257,
      "n_positions": 1024}, 124.44e6),
    ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
      "num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 128256}, 8.030e9),
    ({"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
      "num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000}, 7.242e9),
    ({"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
      "num_hidden_layers": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
      "vocab_size": 152064}, 7.616e9),
    ({"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128,
      "num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288,
      "vocab_size": 151936}, 8.191e9),
    ({"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32,
      "num_hidden_layers": 32, "num_key_value_heads": 32, "intermediate_size": 8192,
      "vocab_size": 32064}, 3.821e9),
    ({"model_type": "gemma", "hidden_size": 2048, "num_attention_heads": 8, "head_dim": 256,
      "num_hidden_layers": 18, "num_key_value_heads": 1, "intermediate_size": 16384,
      "vocab_size": 256000}, 2.506e9),
    ({"model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32,
      "num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}, 46.70e9),
    ({"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64,
      "num_hidden_layers": 44, "intermediate_size": 24576, "vocab_size": 50432}, 20.55e9),
    ({"model_type": "gpt_neo", "hidden_size": 2048, "num_heads": 16, "num_layers": 24,
      "vocab_size": 50257, "max_position_embeddings": 2048}, 1.316e9),
    ({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400,
      "n_positions": 2048}, 6.053e9),
    ({"model_type": "opt", "hidden_size": 768, "num_attention_heads": 12,
      "num_hidden_layers": 12, "ffn_dim": 3072, "vocab_size": 50272}, 125.2e6),
    ({"model_type": "bloom", "n_embed": 1024, "n_head": 16, "n_layer": 24,
      "vocab_size": 250880}, 559.2e6),
    ({"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
      "num_hidden_layers": 32, "vocab_size": 65024, "multi_query": True}, 6.922e9),
    ({"model_type": "t5", "d_model": 512, "num_heads": 8, "d_kv": 64, "num_layers": 6,
      "d_ff": 2048, "vocab_size": 32128}, 60.51e6),
    ({"model_type": "mt5", "d_model": 4096, "num_heads": 64, "d_kv": 64, "num_layers": 24,
      "d_ff": 10240, "vocab_size": 250112, "feed_forward_proj": "gated-gelu",
      "tie_word_embeddings": False}, 12.92e9),
    ({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
      "vocab_size": 50432}, 6.649e9),
]  # fmt: skip


def test_every_model_type_that_is_read_is_tested():
    assert {config["model_type"] for config, _ in PUBLISHED} == set(READERS)


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED, ids=lambda x: str(x)[:30])
def test_a_hugging_face_config_has_the_parameters_of_its_checkpoint(config, parameters):
    assert from_hugging_face(config).parameters == pytest.approx(parameters, rel=2e-3)


def test_a_config_is_read_from_its_file_and_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[0][0]))
    assert from_hugging_face(tmp_path) == from_hugging_face(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known: .*llama"),
        ({"model_type": "llama", "hidden_size": 64}, "num_attention_heads.* is missing"),
        ({}, "model_type 'None'"),
    ],
)
def test_a_config_that_is_not_known_or_lacks_a_field_is_an_error(config, said):
    with pytest.raises(ConfigError, match=said):
        from_hugging_face(config)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"heads": 7}, "heads=7 do not divide hidden=1024"),
        ({"layers": -2}, "layers=-2"),
        ({"hidden": 0}, "hidden=0"),
        ({"kv_heads": 3}, "kv_heads=3 do not divide heads=16"),
        ({"experts": 8}, "experts=8, chosen=0"),
        ({"family": "rnn"}, "family='rnn'"),
        ({"family": "moe", "experts": 4, "chosen": 8}, "experts=4, chosen=8"),
    ],
)
def test_sizes_that_can_not_be_are_named(fields, said):
    sizes = {"family": "llama", "hidden": 1024, "layers": 2, "heads": 16} | fields
    with pytest.raises(ConfigError, match=said):
        ModelConfig("bad", **sizes)


def test_an_unknown_name_is_an_error_that_offers_close_ones():
    with pytest.raises(ConfigError, match="closest: llama3-70b"):
        find_model("llama3-71b")


@pytest.mark.parametrize(
    ("ways", "devices", "said"),
    [
        ({"tp": 3}, 3, "tp=3 does not divide heads=16"),
        ({"dp": 4, "tp": 4}, 8, "tp=4 .* is 16, not the 8 devices"),
        ({"pp": 8}, 8, "pp=8 .* more than layers=4"),
        ({"dp": 3}, 3, "dp=3 .* does not divide batch=16"),
        ({"dp": 2, "ep": 2}, 2, "ep=2 does not divide experts=0"),
    ],
)
def test_a_way_that_does_not_divide_is_named(ways, devices, said):
    cluster = cluster_of("h100", devices)
    with pytest.raises(ConfigError, match=said):
        estimate(GPT, cluster=cluster, batch=16, seq=512, parallel=ways)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 0}, "tp=0"),
        ({"zero": 4}, "zero=4"),
        ({"schedule": "backwards"}, "schedule='backwards'"),
        ({"dp": 4, "ep": 3}, "ep=3 does not divide dp=4"),
        ({"dp": 4, "shard": 3}, "shard=3 does not divide"),
        ({"chunks": 2}, "chunks=2 needs schedule='interleaved'"),
    ],
)
def test_degrees_that_can_not_be_are_named(fields, said):
    with pytest.raises(ConfigError, match=said):
        ParallelConfig(**fields)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "h1000"}, "unknown device 'h1000'"),
        ({"device": "h100", "cluster": "h100:8"}, "one of device"),
        ({"device": "h100", "batch": -1}, "batch=-1"),
        ({"device": "h100", "tokens": -1.0}, "tokens=-1"),
        ({"device": "h100", "budget": 10.0}, "budget=10.0 needs price_per_hour"),
        ({"device": "h100", "optimzer": "sgd"}, "unknown option optimzer"),
        ({"device": "h100", "devices": 8, "optimizer": "lion"}, "optimizer='lion'"),
        ({"device": "h100", "devices": 8, "stack": "torch"}, "stack='torch'"),
        ({"device": "h100", "mtbf_hours": 0.0, "devices": 1, "micro_batch": 1}, "mtbf_hours=0"),
    ],
)
def test_options_that_can_not_be_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        estimate(GPT, **({"seq": 512, "batch": 16} | options))


def test_a_vocabulary_is_padded_to_rows_of_128_a_part():
    assert padded_vocab(50304, 1) == padded_vocab(50304, 2) == 50304
    assert padded_vocab(50257, 8) == 51200


# -- clusters and axes -----------------------------------------------------------------------------


def test_tensor_parallelism_gets_the_innermost_links():
    axes = axes_of(cluster_of("a100", 64), {"pp": 2, "dp": 4, "tp": 8})
    assert [level_of(axes[name]) for name in axes] == ["network", "network", "fabric"]
    assert [axes[name].size for name in axes] == [2, 4, 8]


def test_an_axis_that_does_not_fit_a_node_is_on_the_network():
    axes = axes_of(cluster_of("a100", 96), {"dp": 24, "tp": 4})
    assert axes["dp"].size == 24 and level_of(axes["dp"]) == "network"
    axes = axes_of(cluster_of("a100", 96), {"pp": 8, "dp": 3, "tp": 4})
    assert axes["dp"].size == 3 and level_of(axes["dp"]) == "network"


@pytest.mark.parametrize(
    ("device", "count", "name"),
    [("h100", 4, "h100:4"), ("h100", 64, "h100:8x8"), ("v5p", 8960, "v5p:20x16x28"),
     ("v5e", 512, "v5e:16x16x2"), ("v7x", 128, "v7x:4x4x4")],
)  # fmt: skip
def test_a_number_of_devices_is_whole_nodes_or_a_box(device, count, name):
    cluster = cluster_of(device, count)
    assert (cluster.name, cluster.num_devices) == (name, count)


# -- floating-point work ---------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
def test_the_count_by_component_is_megatrons_closed_form(recompute):
    model = find_model("gpt3-175b")
    ours = flops.training(model, 8, 2048).total
    ours += flops.again(model, 8, 2048, "full") if recompute else 0.0
    assert ours == pytest.approx(flops.megatron(model, 8, 2048, recompute), rel=1e-12)


def test_palms_count_of_a_token_is_ours_without_biases_norms_and_positions():
    model = find_model("llama3-70b")
    products = model.parameters - model.layers * 2 * model.hidden - model.hidden
    products -= model.hidden * model.vocab  # the table, which is looked up
    ours = flops.training(model, 1, 4096).total / 4096
    assert ours == pytest.approx(flops.palm_flops_per_token(model, 4096, products), rel=1e-12)


def test_a_mixture_counts_the_chosen_experts():
    model = find_model("mixtral-8x7b")
    work = flops.forward(model, 1, 4096)
    assert work.mlp == 2 * 4096 * 3 * model.hidden * model.ffn * 2 * model.layers
    assert model.active_parameters == pytest.approx(12.88e9, rel=1e-3)


def test_the_budget_is_solved_for_whichever_is_missing():
    known = {"parameters": 7e9, "tokens": 140e9, "seconds": 1e6, "devices": 64.0}
    known = flops.solve_budget(**known)
    work = known.pop("flops")
    assert work == pytest.approx(6 * 7e9 * 140e9)
    for name, value in known.items():
        rest = {key: x for key, x in known.items() if key != name}
        assert flops.solve_budget(**rest)[name] == pytest.approx(value, rel=1e-12)
    with pytest.raises(ConfigError, match="missing: none"):
        flops.solve_budget(**known)
    with pytest.raises(ConfigError, match="tokens=-1"):
        flops.solve_budget(parameters=1.0, tokens=-1, seconds=1.0, devices=1.0)


def test_adapters_leave_the_gradients_of_frozen_weights_out():
    model = find_model("llama3-8b")
    full = flops.training(model, 1, 4096)
    lean = flops.fine_tuning(model, 1, 4096, adapter_parameters(model, 16))
    assert lean.mlp == pytest.approx(full.mlp * 2 / 3)
    assert lean.scores == full.scores
    assert adapter_parameters(model, 16) == 41_943_040  # as the library peft counts them


# -- memory ----------------------------------------------------------------------------------------


ONE = ParallelConfig()


def saved(parallel=ONE, recompute="none", attention="unfused"):
    """In units of s b h."""
    kept = saved_per_layer(GPT, 2, 512, parallel, recompute, attention, dropout=True)
    return kept / (2 * 512 * GPT.hidden)


def test_activations_are_those_of_korthikanti():
    scores = 5 * GPT.heads * 512 / GPT.hidden
    tp, sp = ParallelConfig(tp=4, sp=False), ParallelConfig(tp=4)
    assert saved() == 34 + scores
    assert saved(tp) == 10 + 24 / 4 + scores / 4
    assert saved(sp) == (34 + scores) / 4
    assert saved(sp, "selective") == saved(sp, attention="flash") == 34 / 4
    assert saved(tp, "full") == 2
    assert saved(sp, "full") == 2 / 4
    assert saved(ParallelConfig(cp=2)) == (34 + scores) / 2


SAVED = 1e10  # bytes that a layer keeps of a micro-batch


def memory(parallel, micro_batches=8, **options):
    states = states_of("adam", "bfloat16", True, "bfloat16", "pytorch")
    given = {"micro": 1, "seq": 512, "recompute": "full", "attention": "flash", "dropout": False}
    given |= {"micro_batches": micro_batches, "overhead": 0.0} | options
    leaves = leaves_of(GPT, parallel.tp, parallel.ep)
    return training_memory(GPT, leaves, SAVED, parallel, states, **given)


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_zero_splits_state_as_its_paper_says(zero, bytes_each):
    found = memory(ParallelConfig(dp=8, zero=zero))
    states = ("parameters", "master parameters", "gradients", "optimizer")
    assert sum(found[name] for name in states) == pytest.approx(bytes_each * GPT.parameters)
    assert ("gathered layers" in found) == (zero == 3)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", 8), ("1f1b", 4)])
def test_a_schedule_holds_its_micro_batches(schedule, held):
    found = memory(ParallelConfig(pp=4, schedule=schedule))
    assert found["activations"] == SAVED * held  # of one layer a stage


def test_layers_go_to_stages_evenly_and_the_rest_to_inner_ones():
    assert [stage.layers for stage in stages_of(8, 4)] == [2, 2, 2, 2]
    assert [stage.layers for stage in stages_of(78, 12)] == [6, *[7] * 6, *[6] * 5]
    assert sum(stage.layers for stage in stages_of(100, 6)) == 100


def test_a_tied_table_stands_on_both_ends_of_a_pipeline():
    leaves = leaves_of(GPT, 1, 1)
    last = local_parameters(leaves, GPT, stages_of(4, 2)[1], 2).all
    table = GPT.hidden * (GPT.vocab + GPT.context)
    assert last == 2 * GPT.layer_parameters + 2 * GPT.hidden + table


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [("sgd", 0), ("momentum", 4), ("adam", 8), ("adam8bit", 2), ("adafactor", 0)],
)
def test_states_of_optimizers(optimizer, nbytes):
    found = states_of(optimizer, "bfloat16", True, "float32", "pytorch")
    assert found.optimizer == pytest.approx(nbytes, abs=0.01)
    assert found.total - found.optimizer == 2 + 4 + 4
    assert states_of(optimizer, "float32", True, "float32", "jax").master == 0


# -- failures --------------------------------------------------------------------------------------


def test_dalys_interval_is_youngs_for_short_writes():
    assert failures.daly(1.0, 1e8) == pytest.approx(failures.young(1.0, 1e8), rel=1e-3)
    assert failures.daly(300.0, 100.0) == 100.0


def test_the_interval_is_near_the_best_one():
    mtbf, write, restart = 3600.0, 30.0, 300.0

    def share(interval):
        lost = ((interval + write) / 2 + restart) / mtbf
        return interval / (interval + write) * (1 - lost)

    best = max(share(x) for x in range(60, 3600, 10))
    assert share(failures.daly(write, mtbf)) == pytest.approx(best, abs=2e-3)


def test_more_devices_fail_more_often():
    few, many = (failures.goodput(n, 1e12) for n in (1024, 16384))
    assert few.mtbf == 16 * many.mtbf and few.share > many.share
    assert failures.goodput(16384, 5.7e12).share > 0.9  # "above 90 %": Llama 3, section 3.3.4
    assert failures.goodput(10**9, 1e12).share == 0.0


# -- the recommended number ------------------------------------------------------------------------


class Speed:
    def __init__(self, speed):
        self.tokens_per_second = speed


def test_the_knee_is_before_the_first_doubling_that_brings_too_little():
    points = [Point(n, Speed(speed), 1.0) for n, speed in ((8, 1.0), (16, 1.9), (32, 3.0))]
    assert knee(points).devices == 16
    assert knee(points[:2]).devices == 16


CONSTANTS = Constants(hidden=0.6)


def small(**options):
    given = {"device": "a100-40", "batch": 16, "seq": 512, "tokens": 1e9, "most": 8}
    return estimate(GPT, **(given | {"constants": CONSTANTS} | options))


@pytest.fixture(scope="module")
def curve():
    return small(price_per_hour=2.0)


def test_an_estimate_of_a_small_model_begins_with_one_device(curve):
    assert curve.smallest == 1
    assert [run.point.devices for run in curve.runs] == [1, 2, 4, 8]
    for run in curve.runs:
        best = run.point.best
        assert best.fits and best.parallel.devices == run.point.devices
        assert run.days == pytest.approx(1e9 / best.tokens_per_second / 86400 / run.goodput.share)
        assert run.cost == pytest.approx(run.days * 24 * run.point.devices * 2.0)
    assert curve.chosen.point.devices == curve.knee


def test_a_deadline_takes_the_fewest_devices_and_a_budget_the_fastest(curve):
    days = sorted((run.days, run.point.devices) for run in curve.runs)
    deadline = (days[1][0] + days[2][0]) / 2
    found = small(deadline_days=deadline)
    assert found.chosen.point.devices == days[1][1]
    rich = small(budget=1e6, price_per_hour=2.0)
    assert rich.chosen.days == days[0][0]
    with pytest.raises(InfeasibleError, match="the fastest run, on 8 devices"):
        small(deadline_days=1e-6)
    with pytest.raises(InfeasibleError, match="the cheapest run"):
        small(budget=1e-6, price_per_hour=2.0)


def test_every_number_is_explained(curve):
    lines = {line.name: line for line in curve.explain()}
    assert all(line.formula for line in lines.values())
    best = curve.best
    assert lines["step"].value == best.seconds == pytest.approx(sum(best.parts.values()))
    steps = [line.value for name, line in lines.items() if name.startswith("step: ")]
    assert sum(steps) == pytest.approx(best.seconds)
    held = [line.value for name, line in lines.items() if name.startswith("memory: ")]
    assert sum(held) == pytest.approx(lines["memory"].value)
    work = [line.value for name, line in lines.items() if name.startswith("FLOPs of a step: ")]
    assert sum(work) == pytest.approx(lines["FLOPs of a step"].value)


def test_an_estimate_is_plain_data(curve):
    data = json.loads(json.dumps(curve.to_dict()))
    assert data["chosen"]["best"]["seconds"] == curve.best.seconds
    assert [run["devices"] for run in data["scaling"]] == [1, 2, 4, 8]


def test_what_one_device_was_measured_at_scales_its_speed():
    found = small(devices=1, measured_tflops=50.0)
    alone = small(devices=1, micro_batch=1, batch=1, measured_tflops=50.0)
    assert alone.best.tflops == pytest.approx(50.0, rel=0.05)  # the update comes on top
    assert "scaled by" in found.notes[-1]
    with pytest.raises(ConfigError, match="measured_tflops=500"):
        small(devices=1, measured_tflops=500.0)


def test_the_smallest_cluster_is_the_first_that_fits():
    model = ModelConfig("m", "llama", 4096, 8, 32, ffn=11008, vocab=32000, gated=True)
    options = Options(32, 2048, constants=CONSTANTS)
    cluster, ways = smallest(model, "l4", options)
    assert cluster.num_devices > 1 and ways[0].fits
    least = 16 * model.parameters / (0.92 * cluster.device.hbm_bytes)
    assert least < cluster.num_devices <= 2 * least + 1
    with pytest.raises(InfeasibleError, match="fits no 1 l4"):
        smallest(model, "l4", options, most=1)


def test_constants_come_from_a_table_or_are_the_planners_own(tmp_path):
    table = tmp_path / "efficiency.csv"
    table.write_text("device,stack,matmul,source\na100-80,jax,0.5,here\n*,pytorch,0.7,all\n")
    device = Cluster.parse("a100:8").device
    assert constants_for(device, "jax", table) == Constants(matmul=0.5, hidden=0.6, source="here")
    assert constants_for(device, "pytorch", table).matmul == 0.7
    assert "planner" in constants_for(Cluster.parse("h100:8").device, "jax", table).source


def test_the_fastest_family_is_found_over_devices_and_tokens(curve):
    found = phase_diagram(curve)
    assert {n for n, _ in found} >= {1, 2, 4, 8} and found[1, 1024] == "data"
    assert set(found.values()) <= {"data", "tensor", "pipeline", "tensor+pipeline"}


def test_a_picture_is_written(curve, tmp_path):
    with pytest.raises(ConfigError, match=r"one of \.png, \.svg"):
        curve.plot(tmp_path / "estimate.gif")
    pytest.importorskip("matplotlib")
    for name in ("estimate.png", "estimate.svg"):
        curve.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000


# -- the command and the page ----------------------------------------------------------------------

SIZES = ["--hidden", "512", "--layers", "2", "--heads", "8", "--vocab", "4096", "--quiet"]
RUN = ["--batch", "8", "--seq", "256"]


def test_the_command_prints_plain_data(capsys):
    run = ["estimate", *SIZES, *RUN, "--cluster", "h100:2", "--dp", "2", "--zero", "1", "--json"]
    assert cli.main(run) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"]["devices"] == 2 and data["explain"]
    assert data["model"]["hidden"] == 512


def test_the_command_prints_tables(capsys):
    run = ["estimate", *SIZES, *RUN, "--cluster", "h100:2", "--explain", "--price-per-hour", "2"]
    assert cli.main(run) == 0
    text = capsys.readouterr().out
    assert "memory of a device" in text and "where the numbers are from" in text


def test_the_command_serves(capsys):
    run = ["estimate", *SIZES, "--device", "h100", "--serve", "--batch", "4", "--json"]
    assert cli.main(run) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] and data["decode"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give one of device"),
        (["--device", "h100", "--tp", "3", "--dp", "2"], "tp=3 does not divide heads=8"),
        (["--device", "h1000"], "unknown device 'h1000'"),
        (["--device", "h100", "--layers", "-1"], "layers=-1"),
    ],
)
def test_what_can_not_be_is_bad_input(options, said, capsys):
    assert cli.main(["estimate", *SIZES, *RUN, *options]) == 2
    assert said in capsys.readouterr().err


def test_a_model_needs_a_name_or_sizes(capsys):
    assert cli.main(["estimate", "--device", "h100"]) == 2
    assert "--hidden, --layers, --heads" in capsys.readouterr().err


def test_the_answers_on_the_page_are_true():
    page = Path(__file__).parent.parent / "docs" / "transformer-math.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert tried > 40 and not failed


def test_named_models_have_their_published_parameters():
    counts = {"gpt2-xl": 1.558e9, "bloom-176b": 176.2e9, "llama3-405b": 405.9e9,
              "opt-175b": 174.6e9, "mixtral-8x7b": 46.7e9}  # fmt: skip
    for name, count in counts.items():
        assert named_models()[name].parameters == pytest.approx(count, rel=1e-3)
