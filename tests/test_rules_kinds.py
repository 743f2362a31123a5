"""Work and traits of equations: closed forms, XLA's count, and linearity by numbers."""

from __future__ import annotations

from math import log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from rule_cases import CASES
from test_rules import conv, equation, equations, sds, weight_gradient

from jaxscaler import _compat
from jaxscaler.graph import kinds

X = sds(8, 16)
SLOW = kinds.TRANSCENDENTAL_FLOPS


def square_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * x_ref[...]


def square(x: Any, cost: Any = None) -> Any:
    return pallas.pallas_call(square_kernel, out_shape=sds(8, 16), cost_estimate=cost)(x)


COST = pallas.CostEstimate(flops=1234, transcendentals=0, bytes_accessed=0)

FLOPS = [
    ("dot_general", jnp.dot, (sds(4, 6), sds(6, 8)), 2 * 4 * 6 * 8),
    (
        "dot_general",
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (sds(2, 4, 6, 8), sds(2, 5, 6, 8)),
        2 * 2 * 6 * 4 * 5 * 8,
    ),
    ("conv_general_dilated", conv, (sds(4, 8, 8, 6), sds(3, 3, 6, 10)), 2 * 4 * 64 * 10 * 54),
    (
        "conv_general_dilated",
        lambda x, w: conv(x, w, groups=2),
        (sds(4, 8, 8, 6), sds(3, 3, 3, 10)),
        2 * 4 * 64 * 10 * 27,
    ),
    (  # the weight gradient of a convolution costs what the convolution costs
        "conv_general_dilated",
        weight_gradient(1),
        (sds(3, 3, 6, 10), sds(4, 8, 8, 6)),
        2 * 4 * 64 * 10 * 54,
    ),
    (
        "conv_general_dilated",
        weight_gradient(6),
        (sds(3, 3, 1, 6), sds(4, 8, 8, 6)),
        2 * 4 * 64 * 6 * 9,
    ),
    (  # three of four taps of a transposed convolution with stride 2 fall on zeros
        "conv_general_dilated",
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (sds(4, 8, 8, 6), sds(4, 4, 6, 10)),
        2 * 4 * 16 * 16 * 10 * 6 * 16 / 4,
    ),
    (
        "ragged_dot_general",
        lambda x, w, n: lax.ragged_dot(x, w, n),
        (sds(16, 8), sds(4, 8, 12), sds(4, dtype=jnp.int32)),
        2 * 16 * 8 * 12,
    ),
    (
        "ragged_dot_general",
        jax.grad(lambda w, x, n: (lax.ragged_dot(x, w, n) ** 2).sum()),
        (sds(4, 8, 12), sds(16, 8), sds(4, dtype=jnp.int32)),
        2 * 16 * 8 * 12,
    ),
    ("add", jnp.add, (X, X), 128),
    ("exp", jnp.exp, (X,), 128 * SLOW),
    ("integer_pow", lambda x: x**2, (X,), 128),
    ("integer_pow", lambda x: x**5, (X,), 128 * 3),
    ("integer_pow", lambda x: x**-1, (X,), 128 * (1 + SLOW)),
    ("reduce_sum", jnp.sum, (X,), 128),
    ("argmax", lambda x: x.argmax(1), (X,), 128),
    ("reshape", lambda x: x.reshape(-1), (X,), 0),
    ("transpose", jnp.transpose, (X,), 0),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 8, 16)), (X,), 0),
    ("gather", lambda x: x[jnp.array([1, 2])], (X,), 0),
    ("scatter-add", lambda x: x.at[jnp.array([1, 2])].add(1.0), (X,), 2 * 16),
    ("sort", lambda x: jnp.sort(x, 1), (X,), 128 * log2(16)),
    ("cumsum", lambda x: jnp.cumsum(x, 0), (X,), 128 * log2(8)),
    ("fft", jnp.fft.fft, (sds(8, 16, dtype=jnp.complex64),), 5 * 128 * log2(16)),
    ("fft", jnp.fft.rfft, (X,), 2.5 * 128 * log2(16)),
    (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2), "VALID"),
        (X,),
        128,
    ),
    ("cholesky", jnp.linalg.cholesky, (sds(3, 6, 6),), 3 * 6**3 / 3),
    ("pallas_call", lambda x: square(x, COST), (X,), 1234),
    ("pallas_call", square, (X,), 128),  # no estimate given: what its body does
]


@pytest.mark.parametrize(("name", "fn", "args", "expected"), FLOPS)
def test_flops(name: str, fn: Any, args: Any, expected: float) -> None:
    assert kinds.flops(equation(name, fn, *args)) == pytest.approx(expected)


def test_shard_map_counts_every_device(devices: list[jax.Device]) -> None:
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    fn = jax.shard_map(lambda x: x * 2.0, mesh=mesh, in_specs=spec, out_specs=spec)
    assert kinds.flops(equation("shard_map", fn, sds(16, 4))) == 64


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jnp.dot, (sds(64, 32), sds(32, 48))),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (sds(4, 8, 16), sds(4, 16, 8))),
        (
            lambda x, w: lax.conv_general_dilated(
                x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (sds(2, 8, 8, 4), sds(3, 3, 4, 8)),
        ),
        (jnp.add, (sds(64, 32), sds(64, 32))),
    ],
)
def test_flops_are_xlas(fn: Any, args: Any) -> None:
    cost = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert sum(kinds.flops(e) for e in equations(fn, *args)) == pytest.approx(cost["flops"])


TRAITS = [
    ("add", jnp.add, (X, X), "elementwise fusable linear"),
    ("add", lambda x: x + 1.0, (X,), "elementwise fusable"),
    ("mul", lambda x: x * 2.0, (X,), "elementwise fusable linear"),
    ("mul", jnp.multiply, (X, X), "elementwise fusable"),
    ("div", lambda x: x / 2.0, (X,), "elementwise fusable linear"),
    ("div", lambda x: 2.0 / x, (X,), "elementwise fusable"),
    ("neg", jnp.negative, (X,), "elementwise fusable linear"),
    ("exp", jnp.exp, (X,), "elementwise fusable"),
    ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (X,), "elementwise fusable linear"),
    ("convert_element_type", lambda x: x.astype(jnp.int32), (X,), "elementwise fusable"),
    ("select_n", jnp.where, (sds(8, 16, dtype=bool), X, X), "elementwise fusable"),
    ("reshape", lambda x: x.reshape(-1), (X,), "alias fusable linear"),
    ("squeeze", lambda x: lax.squeeze(x, (0,)), (sds(1, 8),), "alias fusable linear"),
    ("transpose", jnp.transpose, (X,), "fusable linear"),
    ("reduce_sum", jnp.sum, (X,), "linear"),
    ("reduce_max", jnp.max, (X,), ""),
    ("dot_general", jnp.dot, (X, sds(16, 4)), "heavy"),
    ("iota", lambda: lax.iota(jnp.int32, 4), (), "fusable"),
    ("sort", lambda x: jnp.sort(x, 1), (X,), ""),
    ("optimization_barrier", lax.optimization_barrier, (X,), "alias linear"),
    ("random_bits", lambda k: jax.random.bits(k, (4,)), (jax.random.key(0),), "fusable random"),
    ("pallas_call", square, (X,), "opaque"),
]


@pytest.mark.parametrize(("name", "fn", "args", "expected"), TRAITS)
def test_traits(name: str, fn: Any, args: Any, expected: str) -> None:
    assert kinds.traits(equation(name, fn, *args)) == set(expected.split())


def test_linear_means_linear() -> None:
    """Whatever is called linear: f(a + b) == f(a) + f(b), in all operands that are not literals."""
    rng = np.random.default_rng(0)
    seen = set()
    with jax.enable_x64(True):
        for case in CASES:
            for eqn in equations(case.fn, *case.operands()):
                key = (eqn.primitive.name, tuple(map(kinds.is_literal, eqn.invars)))
                if "linear" not in kinds.traits(eqn) or key in seen:
                    continue
                seen.add(key)
                first, second = (
                    [v.val if kinds.is_literal(v) else number(rng, v.aval) for v in eqn.invars]
                    for _ in range(2)
                )
                both = [
                    a if kinds.is_literal(v) else a + b
                    for v, a, b in zip(eqn.invars, first, second)
                ]
                parts = zip(*(_compat.bind_equation(eqn, x) for x in (first, second)))
                for whole, (a, b) in zip(_compat.bind_equation(eqn, both), parts):
                    tolerance = 1e-4 if whole.dtype.itemsize == 4 else 1e-10
                    np.testing.assert_allclose(whole, a + b, tolerance, tolerance, err_msg=str(eqn))
    assert {"add_any", "mul", "reshape", "reduce_sum", "cumsum", "concatenate"} <= {
        name for name, _ in seen
    }


def number(rng: np.random.Generator, aval: Any) -> Any:
    x = rng.integers(-9, 9, aval.shape) if aval.dtype.kind in "iu" else rng.normal(size=aval.shape)
    return jnp.asarray(x, aval.dtype)
