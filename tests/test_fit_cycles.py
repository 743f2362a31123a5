"""The rates of TPUs: fitted to the compiler's estimates that are kept, and used for TPUs alone."""

from dataclasses import replace

import fit_cycles
import numpy as np
import pytest

from jaxscaler.cluster import find_device, known_devices
from jaxscaler.cost import compute


def price(device, flops, nbytes, op, dtype="bfloat16", kernel=True):
    work = compute.Work(flops, dtype, ((0, nbytes),), (0,), 1, kernel, op)
    ones = np.ones((1, 1), np.int64)
    return float(compute.seconds(work, ones, {0: np.ones(1)}, device)[0])


def test_rates_are_those_of_the_estimates_that_are_kept():
    """What `--write` would write is what is there."""
    for fitted, kept in zip(fit_cycles.fit("v4"), compute._of_tpus()["v4"], strict=True):
        assert (fitted.op, fitted.dtype) == (kept.op, kept.dtype)
        assert fitted.sizes == pytest.approx(kept.sizes, rel=1e-3)
        assert fitted.rates == pytest.approx(kept.rates, rel=1e-3)


def test_no_op_that_is_held_out_is_fitted_to():
    for kind in (*fit_cycles.PRODUCTS, fit_cycles.FUSED):
        test = {at for at, _ in fit_cycles.points("v5e", kind, test=True)}
        assert test and test.isdisjoint(at for at, _ in fit_cycles.points("v5e", kind, test=False))


@pytest.mark.parametrize("name", fit_cycles.DEVICES)
def test_rates_are_below_the_nominal_ones(name):
    device = find_device(name)[0]
    for curve in compute._of_tpus()[name]:
        if curve.op in fit_cycles.PRODUCTS:
            most = device.flops(curve.dtype) if curve.dtype else device.hbm_bandwidth
            assert max(curve.rates) <= most * 1.001, curve
        assert curve.seconds(1e3) <= curve.seconds(1e9)


def test_a_tpu_is_priced_by_its_rates():
    v5e = find_device("v5e")[0]
    matmul = next(c for c in compute._of_tpus()["v5e"] if (c.op, c.dtype) == ("matmul", "bf16"))
    assert price(v5e, 1e12, 8.0, "matmul") == pytest.approx(float(matmul.seconds(1e12)))
    assert price(v5e, 1e12, 8.0, "matmul", "float32") == price(v5e, 1e12, 8.0, "matmul")
    # what has no curve: as ever
    other = replace(v5e, name="other")
    for op in ("elementwise", "gather", "scatter"):
        assert price(v5e, 1e6, 1e8, op) == price(other, 1e6, 1e8, op)
    assert price(v5e, 1e6, 1e8, "conv_reduce") < price(v5e, 1e6, 1e8, "reduce")


def test_other_devices_are_priced_as_ever():
    for name, (device, _) in known_devices().items():
        if device.name in fit_cycles.DEVICES:
            continue
        for op in ("matmul", "conv", "reduce", "conv_reduce"):
            roof = max(1e12 / (device.flops("bf16") * device.achievable),
                       1e9 / (device.hbm_bandwidth * compute.MEMORY_EFFICIENCY))  # fmt: skip
            assert price(device, 1e12, 1e9, op) == pytest.approx(roof + compute.RAMP), name


@pytest.mark.parametrize(
    ("primitive", "options", "op"),
    [
        ("dot_general", {}, "matmul"),
        ("dot_general", {"batched": True}, "batch_matmul"),
        ("conv_general_dilated", {"batched": True}, "conv"),
        ("reduce_sum", {}, "reduce"),
        ("reduce_sum", {"of_conv": True}, "conv_reduce"),
        ("reduce_precision", {"of_conv": True}, "elementwise"),
        ("argmax", {}, "reduce"),
        ("scatter-add", {}, "scatter"),
        ("tanh", {}, "elementwise"),
    ],
)
def test_kinds_of_kernels(primitive, options, op):
    assert compute.op_of(primitive, **options) == op


def test_reductions_after_a_convolution_are_known_as_such():
    of = {case.name: at for at, case in enumerate(fit_cycles.cases())}
    statistics = next(at for name, at in of.items() if name.startswith("fused.statistics"))
    norm = next(at for name, at in of.items() if name.startswith("fused.norm"))
    assert {w.op for w in fit_cycles.works(statistics)} >= {"conv", "conv_reduce"}
    assert "conv_reduce" not in {w.op for w in fit_cycles.works(norm)}
    scores = next(at for name, at in of.items() if name.startswith("batch_matmul.scores"))
    assert "batch_matmul" in {w.op for w in fit_cycles.works(scores)}
