"""Gradients that are narrowed before they are reduced: traffic, credit, price, memory."""

import pytest

from jaxscaler import ConfigError, estimate
from jaxscaler.cost.collective import collective_time
from jaxscaler.estimate.body import LAYER
from jaxscaler.estimate.compared import compared
from jaxscaler.estimate.compression import BLOCK, COMPRESSIONS
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants
from jaxscaler.estimate.memory import leaves_of
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig, axes_of, cluster_of
from jaxscaler.estimate.price import price

GPT = ModelConfig("gpt", "gpt", 512, 2, 8, vocab=4096, context=512, tied=True, positions=True)
SEQ = 512
BF16, INT8 = COMPRESSIONS["bf16"], COMPRESSIONS["int8"]
WIRE = 1 + 4 / BLOCK


def step(compress="", hidden=0.0, devices=32, micro_batch=1, **ways):
    parallel = ParallelConfig(**({"dp": devices, "zero": 1} | ways))
    return price(
        GPT, parallel, cluster_of("a100", devices), batch=parallel.dp * micro_batch, seq=SEQ,
        micro_batch=micro_batch, compress=compress, constants=Constants(hidden=hidden),
    )  # fmt: skip


# -- what passes over links and through memory -----------------------------------------------------


def test_bf16_is_the_same_collective_at_two_bytes():
    axis = axes_of(cluster_of("a100", 32), {"dp": 32})["dp"]
    for kind, streamed in (("all_reduce", 12.0), ("reduce_scatter", 6 + 6 / 32)):
        passes, nbytes = BF16.passes(kind, axis)
        assert [(x.collective, x.axis, x.nbytes) for x in passes] == [(kind, axis, 2.0)]
        assert nbytes == streamed


def test_int8_is_exchanged_inside_nodes_and_its_sums_between_them():
    axis = axes_of(cluster_of("a100", 32), {"dp": 32})["dp"]
    passes, streamed = INT8.passes("reduce_scatter", axis)
    assert [x.collective for x in passes] == ["all_to_all"] * 2
    assert [x.axis.parts for x in passes] == [axis.parts[1:], axis.parts[:1]]
    assert [x.nbytes for x in passes] == [WIRE, WIRE / 8]
    # gradient, error (twice), code (made and read); sums of eight; those quantised again, summed up
    assert streamed == pytest.approx(4 + 8 + 2 * WIRE + 4 / 8 + (4 + 2 * WIRE) / 8 + 4 / 32)


def test_an_all_reduce_in_int8_gathers_the_sums_too():
    axis = axes_of(cluster_of("a100", 8), {"dp": 8})["dp"]
    first, _ = INT8.passes("reduce_scatter", axis)
    passes, _ = INT8.passes("all_reduce", axis)
    assert passes[:-1] == first
    assert (passes[-1].collective, passes[-1].nbytes) == ("all_gather", WIRE)


# -- the price -------------------------------------------------------------------------------------


def test_the_reduction_is_that_of_narrow_gradients():
    plain, narrow = step(), step("bf16")
    axis = axes_of(cluster_of("a100", 32), {"dp": 32})["dp"]
    layer = GPT.parameters / GPT.layers
    wide, less = (
        GPT.layers * float(collective_time("reduce_scatter", axis, nbytes * layer))
        for nbytes in (4.0, 2.0)
    )
    assert plain.parts["dp"] - narrow.parts["dp"] == pytest.approx(wide - less)
    device = cluster_of("a100", 32).device
    streamed = (6 + 6 / 32) * GPT.parameters / (0.85 * device.hbm_bandwidth)
    assert narrow.parts["compress"] == pytest.approx(streamed)
    assert narrow.seconds - plain.seconds == pytest.approx(streamed - (wide - less))


def test_what_hides_beside_compute_is_worth_nothing():
    plain = step(hidden=1.0, devices=2, micro_batch=8)
    assert plain.hidden > 0
    for name in COMPRESSIONS:
        narrow = step(name, hidden=1.0, devices=2, micro_batch=8)
        assert narrow.parts.get("dp", 0.0) == plain.parts.get("dp", 0.0) == 0.0
        assert narrow.seconds == pytest.approx(plain.seconds + narrow.parts["compress"])


@pytest.mark.parametrize("ways", [{}, {"dp": 8, "tp": 4}, {"zero": 3}])
def test_the_error_of_int8_is_kept_whole(ways):
    local = sum(
        leaf.local * (GPT.layers if leaf.where == LAYER else 1)
        for leaf in leaves_of(GPT, ways.get("tp", 1), 1)
    )
    kept = step("int8", **ways).memory_bytes - step(**ways).memory_bytes
    assert kept == 4 * local
    assert step("bf16", **ways).memory_bytes == step(**ways).memory_bytes


def test_one_replica_has_nothing_to_compress():
    plain, narrow = step(devices=1, zero=0), step("int8", devices=1, zero=0)
    assert (narrow.seconds, narrow.memory_bytes) == (plain.seconds, plain.memory_bytes)


def test_what_each_brings_is_compared_and_the_best_that_fits_is_named():
    options = Options(32, SEQ, constants=Constants())
    cluster = cluster_of("a100", 32)
    way = price(GPT, ParallelConfig(dp=32, zero=1), cluster, **options.keywords())
    found = compared(way, cluster, options)
    assert found.plain is way and set(found.narrowed) == {"bf16", "int8"}
    seconds = {"": way.seconds} | {name: x.seconds for name, x in found.narrowed.items()}
    assert found.worth == min(seconds, key=seconds.__getitem__) != ""
    data = found.to_dict()
    assert data["int8"]["error_feedback_bytes"] == found.narrowed["int8"].memory["error feedback"]
    none = options.memory * cluster.device.hbm_bytes
    tight = Options(32, SEQ, constants=Constants(memory_gb=(none - way.memory_bytes) / 1e9 - 0.01))
    way = price(GPT, ParallelConfig(dp=32, zero=1), cluster, **tight.keywords())
    assert way.fits and compared(way, cluster, tight).worth == "bf16"


def test_what_can_not_be_narrowed_is_named():
    with pytest.raises(ConfigError, match="compress='int3'"):
        step("int3")
    with pytest.raises(ConfigError, match=r"compress='bf16', gradient='bfloat16'"):
        estimate(GPT, device="a100", devices=8, batch=16, seq=SEQ, gradient="bfloat16",
                 compress="bf16")  # fmt: skip


def test_an_estimate_says_what_compression_brings():
    given = {"device": "a100", "devices": 32, "batch": 64, "seq": SEQ, "tokens": 1e9}
    found = estimate(GPT, constants=Constants(), only="data", **given)
    assert found.compression.plain.seconds == found.best.seconds
    lines = {line.name: line for line in found.explain()}
    for name, priced in found.compression.narrowed.items():
        assert lines[f"step with gradients in {name}"].value == priced.seconds
    narrow = estimate(GPT, constants=Constants(), only="data", compress="int8", **given)
    assert narrow.best.parts["compress"] > 0 and "error feedback" in narrow.best.memory
    assert narrow.compression.plain.parts.get("compress") is None
