"""The ops that benchmarks/fit_cycles.py compiles: single ones, and pairs with and without a
reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

FUSED, ALONE = "fused", "alone"  # of a pair: with the reduction, and without
BF16, F32 = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class Case:
    """A single op to be compiled: `run` on arrays of these shapes and dtypes."""

    kind: str
    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.shapes)


@cache
def cases() -> tuple[Case, ...]:
    """The table: single ops, then pairs. `held_out` says which of them nothing is fitted to."""
    return (*singles(), *pairs())


def singles() -> list[Case]:
    """Single ops, by kind."""
    found: list[Case] = []

    def add(kind: str, name: str, run: Callable[..., Any], *shapes: Any, dtype: Any = BF16) -> None:
        typed = tuple(s if isinstance(s[0], tuple) else (s, dtype) for s in shapes)
        tag = "" if dtype == BF16 else "_f32"
        found.append(Case(kind, f"{kind}.{name}{tag}", run, typed))

    for n in (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192):
        add("matmul", f"square_{n}", _matmul, (n, n), (n, n))
    for m, k, n in (
        (8192, 1024, 4096), (8192, 4096, 1024), (16384, 2048, 2048), (4096, 4096, 11008),
        (2048, 768, 3072), (4096, 768, 768), (8192, 1024, 32768), (1024, 512, 512),
        (8, 4096, 4096), (64, 8192, 1024), (256, 4096, 4096), (8192, 128, 1024), (4096, 8192, 256),
    ):  # fmt: skip
        add("matmul", f"{m}x{k}x{n}", _matmul, (m, k), (k, n))
    for t, d, f in ((8192, 1024, 4096), (4096, 4096, 4096), (2048, 768, 768), (16384, 512, 2048)):
        add("matmul", f"weight_gradient_{t}x{d}x{f}", _weight_gradient, (t, d), (t, f))
    for n in (256, 1024, 2048, 4096):
        add("matmul", f"square_{n}", _matmul, (n, n), (n, n), dtype=F32)
    for b, s, h, d in ((2, 512, 8, 64), (4, 1024, 16, 64), (8, 1024, 8, 128), (2, 2048, 16, 128),
                       (16, 256, 12, 64), (32, 196, 12, 64)):  # fmt: skip
        add("batch_matmul", f"scores_{b}x{s}x{h}x{d}", _scores, (b, s, h, d), (b, s, h, d))
        add("batch_matmul", f"mixed_{b}x{s}x{h}x{d}", _mixed, (b, h, s, s), (b, s, h, d))
    for b, size, c, o, k in (
        (32, 56, 64, 64, 3), (32, 28, 128, 128, 3), (32, 14, 256, 256, 3), (64, 7, 512, 512, 3),
        (32, 56, 64, 256, 1), (32, 56, 256, 64, 1), (64, 14, 1024, 256, 1), (8, 56, 64, 64, 3),
        (128, 14, 256, 256, 3), (64, 28, 128, 512, 1), (16, 112, 64, 64, 3),
    ):  # fmt: skip
        name = f"{b}x{size}x{c}x{o}x{k}"
        add("conv", name, _conv, (b, size, size, c), (k, k, c, o))
    for rows in (16, 64, 256, 1024, 4096, 16384):
        shape = (rows, 4096)
        add("elementwise", f"add_{rows}", lambda a, b: a + b, shape, shape)
        add("elementwise", f"gelu_{rows}", jax.nn.gelu, shape)
        add("elementwise", f"scaled_{rows}", lambda a: a * 2 + 1, shape, dtype=F32)
        add("elementwise", f"adam_{rows}", _adam, shape, shape, shape, shape, dtype=F32)
        add("reduce", f"last_{rows}", lambda a: a.sum(-1), shape, dtype=F32)
        add("reduce", f"first_{rows}", lambda a: a.sum(0), shape, dtype=F32)
        add("reduce", f"max_{rows}", lambda a: a.max(-1), shape)
    for rows in (256, 4096):
        ids = ((rows,), jnp.int32)
        add("gather", f"rows_{rows}", lambda t, i: t[i], (32768, 1024), ids)
        add(
            "scatter",
            f"rows_{rows}",
            lambda t, i, u: t.at[i].add(u),
            (32768, 1024),
            ids,
            (rows, 1024),
        )
    return found


def pairs() -> list[Case]:
    """Products and sums with a reduction behind them, each followed by the same without: what the
    reduction takes where it is fused, as in a step."""
    found: list[Case] = []

    def add(name: str, run: Callable, alone: Callable, *shapes: Any, dtype: Any = BF16) -> None:
        typed = tuple((shape, dtype) for shape in shapes)
        found.append(Case(FUSED, f"{FUSED}.{name}", run, typed))
        found.append(Case(ALONE, f"{FUSED}.{name}.{ALONE}", alone, typed))

    for b, size, c, o in ((32, 56, 64, 64), (32, 28, 128, 128), (64, 14, 256, 1024)):
        k = 1 if o > c else 3
        add(f"statistics_{b}x{size}x{c}x{o}", lambda x, w: _statistics(_conv(x, w)), _conv,
            (b, size, size, c), (k, k, c, o))  # fmt: skip
    for t, d, f in ((8192, 1024, 1024), (16384, 768, 768), (4096, 4096, 4096)):
        add(f"norm_{t}x{d}x{f}", lambda x, w: _norm(x @ w), lambda x, w: (x @ w) * 2 + 1,
            (t, d), (d, f))  # fmt: skip
        add(f"bias_{t}x{d}x{f}", lambda x, dy: (_weight_gradient(x, dy), dy.astype(F32).sum(0)),
            _weight_gradient, (t, d), (t, f))  # fmt: skip
        add(f"residual_{t}x{d}", lambda a, b: _norm(a + b), lambda a, b: (a + b) * 2 + 1,
            (t, d), (t, d))  # fmt: skip
    for b, t, h, d in ((4, 1024, 16, 64), (8, 512, 12, 64)):
        add(f"softmax_{b}x{t}x{h}x{d}",
            lambda q, k: jax.nn.softmax(_scores(q, k).astype(F32)).astype(BF16),
            lambda q, k: jnp.exp(_scores(q, k)) * 2, (b, t, h, d), (b, t, h, d))  # fmt: skip
    return found


def _statistics(y):
    y32 = y.astype(F32)
    return y, y32.mean((0, 1, 2)), (y32 * y32).mean((0, 1, 2))


def _norm(y):
    y32 = y.astype(F32)
    mean = y32.mean(-1, keepdims=True)
    spread = (y32 * y32).mean(-1, keepdims=True) - mean * mean
    return ((y32 - mean) * jax.lax.rsqrt(spread + 1e-5)).astype(y.dtype)


def _matmul(a, b):
    return a @ b


def _weight_gradient(x, dy):
    return jnp.einsum("td,tf->df", x, dy)


def _scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def _mixed(p, v):
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def _conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v
