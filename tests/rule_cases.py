"""Small programs, one or more for each primitive whose rule is checked by numbers.

A case's name is the primitive under test, then what is special about it. Extents are even (a factor
is split in two and in four), operands asymmetric (normal numbers, so that no part equals another).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Arg:
    """An operand to be made: "normal", "positive", "unit" (0..1), "complex", "bool", "spd", "key"
    or "int" (below `high`)."""

    what: str
    shape: tuple[int, ...]
    high: int = 0

    def make(self, rng: np.random.Generator) -> Any:
        if self.what == "int":
            return rng.integers(0, self.high, self.shape, dtype=np.int32)
        if self.what == "bool":
            return rng.random(self.shape) < 0.5
        if self.what == "key":
            return np.array([7, 11], np.uint32)
        x = rng.standard_normal(self.shape)
        if self.what == "complex":
            return x + 1j * rng.standard_normal(self.shape)
        if self.what == "positive":
            return np.abs(x) + 0.1
        if self.what == "unit":
            return rng.uniform(0.05, 0.95, self.shape)
        if self.what == "spd":
            return x @ np.swapaxes(x, -1, -2) + 3 * np.eye(self.shape[-1])
        return x


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    args: tuple[Arg, ...]

    @property
    def primitive(self) -> str:
        return self.name.split(":")[0]

    def operands(self) -> list[Any]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [a.make(rng) for a in self.args]


def f(*shape: int) -> Arg:
    return Arg("normal", shape)


def pos(*shape: int) -> Arg:
    return Arg("positive", shape)


def unit(*shape: int) -> Arg:
    return Arg("unit", shape)


def cplx(*shape: int) -> Arg:
    return Arg("complex", shape)


def spd(*shape: int) -> Arg:
    return Arg("spd", shape)


def flag(*shape: int) -> Arg:
    return Arg("bool", shape)


def below(high: int, *shape: int) -> Arg:
    return Arg("int", shape, high)


KEY = Arg("key", (2,))
X = (8, 16)


def grad(fn: Callable[..., Any], *, of: int = 0) -> Callable[..., Any]:
    """The gradient of a sum of squares: cotangents differ from element to element."""
    return jax.grad(lambda *a: (fn(*a) ** 2).sum(), argnums=of)


def conv(stride: int = 1, groups: int = 1, **options: Any) -> Callable[..., Any]:
    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **options,
        )

    return fn


def window(fn: Callable[..., Any], init: float, size: int = 2, stride: int = 2) -> Callable:
    return lambda x: lax.reduce_window(
        x, init, fn, (1, size, size, 1), (1, stride, stride, 1), "SAME"
    )


def window_jvp(x: Any, t: Any) -> Any:
    return jax.jvp(window(lax.max, -jnp.inf), (x,), (t,))


def split_key(key: Any) -> Any:
    return jax.random.split(jax.random.wrap_key_data(key), 8)


def draw(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return lambda key: fn(jax.random.wrap_key_data(key), *args)


def one_hot_loss(logits: Any, labels: Any) -> Any:
    return (jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum()


_UNARY = {
    "unit": "acos asin atanh erf_inv log log1p sqrt rsqrt lgamma digamma cbrt",
    "normal": "abs ceil cos cosh erf erfc exp exp2 expm1 floor is_finite logistic neg round sign "
    "sin sinh square tan tanh atan asinh bessel_i0e bessel_i1e",
}
_BINARY = "add sub mul div max min atan2 rem nextafter eq ne lt le gt ge"

CASES: tuple[Case, ...] = (
    *(
        Case(name, getattr(lax, name), (Arg(what, X),))
        for what, names in _UNARY.items()
        for name in names.split()
    ),
    *(Case(name, getattr(lax, name), (f(*X), f(*X))) for name in _BINARY.split()),
    # elementwise with a difference
    Case("add: literal", lambda x: x + 1.0, (f(*X),)),
    Case("mul: size-1 operand", lambda x, y: lax.mul_p.bind(x, y), (f(8, 1), f(*X))),
    Case("mul: scalar operand", lambda x, y: lax.mul_p.bind(x, y), (f(), f(*X))),
    Case("integer_pow: 3", lambda x: x**3, (f(*X),)),
    Case("integer_pow: -2", lambda x: x**-2, (f(*X),)),
    Case("pow", lax.pow, (pos(*X), f(*X))),
    Case("zeta", lax.zeta, (pos(*X), pos(*X))),
    Case("clamp", lax.clamp, (f(*X), f(*X), f(*X))),
    Case("clamp: scalar bounds", lambda x: lax.clamp(-0.5, x, 0.5), (f(*X),)),
    Case("select_n", jnp.where, (flag(*X), f(*X), f(*X))),
    Case("select_n: scalar predicate", lax.select_n, (flag(), f(*X), f(*X))),
    Case("convert_element_type: narrow", lambda x: x.astype(jnp.float32), (f(*X),)),
    Case("convert_element_type: int", lambda x: x.astype(jnp.float32), (below(9, *X),)),
    Case(
        "bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint32), (below(99, *X),)
    ),
    Case("bitcast_convert_type: wide", lambda x: lax.bitcast_convert_type(x, jnp.int8), (f(*X),)),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), (f(*X),)),
    Case("complex", lax.complex, (f(*X), f(*X))),
    Case("real", lax.real, (cplx(*X),)),
    Case("conj", lax.conj, (cplx(*X),)),
    Case("and", lax.bitwise_and, (below(99, *X), below(99, *X))),
    Case("xor", lax.bitwise_xor, (below(99, *X), below(99, *X))),
    Case("not", lax.bitwise_not, (below(99, *X),)),
    Case("shift_left", lax.shift_left, (below(99, *X), below(5, *X))),
    Case("population_count", lax.population_count, (below(99, *X),)),
    Case("stop_gradient", lambda x: lax.stop_gradient(x) * 2.0, (f(*X),)),
    Case("copy", lambda x: jnp.array(x, copy=True), (f(*X),)),
    Case("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (f(*X), f(4, 6))),
    Case("add_any", grad(lambda x: jnp.sin(x) * jnp.cos(x)), (f(*X),)),
    # contractions
    Case("dot_general", lambda a, b: a @ b, (f(4, 6), f(6, 8))),
    Case("dot_general: batched", lambda a, b: a @ b, (f(2, 4, 6), f(2, 6, 8))),
    Case(
        "dot_general: scores",
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (f(2, 6, 4, 8), f(2, 10, 4, 8)),
    ),
    Case(
        "dot_general: two contractions",
        lambda a, b: jnp.einsum("bshd,hde->bse", a, b),
        (f(2, 6, 4, 8), f(4, 8, 10)),
    ),
    Case("dot_general: outer", lambda a, b: jnp.einsum("i,j->ij", a, b), (f(4), f(6))),
    Case("dot_general: vector", lambda a, b: a @ b, (f(4, 6), f(6))),
    Case(
        "dot_general: weight gradient",
        lambda x, y: jnp.einsum("bsd,bsf->df", x, y),
        (f(2, 4, 6), f(2, 4, 8)),
    ),
    Case(
        "dot_general: experts",
        lambda x, w: jnp.einsum("ecd,edf->ecf", x, w),
        (f(4, 6, 8), f(4, 8, 10)),
    ),
    Case(
        "ragged_dot_general",
        lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 1, 8, 4], jnp.int32)),
        (f(16, 8), f(4, 8, 12)),
    ),
    Case(
        "ragged_dot_general: weight gradient",
        grad(lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 1, 8, 4], jnp.int32))),
        (f(4, 8, 12), f(16, 8)),
    ),
    # convolutions
    Case("conv_general_dilated", conv(), (f(4, 8, 8, 6), f(3, 3, 6, 10))),
    Case("conv_general_dilated: 1x1", conv(), (f(4, 8, 8, 6), f(1, 1, 6, 10))),
    Case("conv_general_dilated: stride", conv(2), (f(4, 8, 8, 6), f(3, 3, 6, 10))),
    Case("conv_general_dilated: patches", conv(4), (f(4, 8, 8, 6), f(4, 4, 6, 10))),
    Case("conv_general_dilated: grouped", conv(groups=2), (f(4, 8, 8, 8), f(3, 3, 4, 12))),
    Case("conv_general_dilated: depthwise", conv(groups=8), (f(4, 8, 8, 8), f(3, 3, 1, 8))),
    Case(
        "conv_general_dilated: dilated", conv(rhs_dilation=(2, 2)), (f(4, 8, 8, 6), f(3, 3, 6, 10))
    ),
    Case(
        "conv_general_dilated: transposed",
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (f(4, 4, 4, 6), f(3, 3, 6, 10)),
    ),
    Case(
        "conv_general_dilated: gradients",
        lambda x, w: jax.grad(lambda *a: (conv(2)(*a) ** 2).sum(), (0, 1))(x, w),
        (f(4, 8, 8, 6), f(3, 3, 6, 10)),
    ),
    Case(
        "conv_general_dilated: grouped gradients",
        lambda x, w: jax.grad(lambda *a: (conv(groups=2)(*a) ** 2).sum(), (0, 1))(x, w),
        (f(8, 8, 8, 8), f(3, 3, 4, 12)),
    ),
    Case(
        "conv_general_dilated: depthwise gradients",
        lambda x, w: jax.grad(lambda *a: (conv(groups=8)(*a) ** 2).sum(), (0, 1))(x, w),
        (f(8, 8, 8, 8), f(3, 3, 1, 8)),
    ),
    Case(
        "conv_general_dilated: 1d causal",
        lambda x, w: lax.conv_general_dilated(x, w, (1,), [(3, 0)]),
        (f(4, 6, 8), f(10, 6, 4)),
    ),
    # lookups
    Case("gather: embedding", lambda t, i: t[i], (f(16, 8), below(16, 4, 6))),
    Case(
        "gather: embedding, fill",
        lambda t, i: jnp.take(t, i, axis=0),
        (f(16, 8), below(20, 4, 6)),  # some indices lie beyond the table
    ),
    Case(
        "gather: embedding, clip",
        lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
        (f(16, 8), below(20, 4, 6)),
    ),
    Case(
        "gather: integers, fill",
        lambda t, i: jnp.take(t, i, axis=0, mode="fill"),
        (below(99, 16, 8), below(20, 4, 6)),
    ),
    Case(
        "gather: labels",
        lambda t, i: jnp.take_along_axis(t, i[..., None], -1),
        (f(4, 6, 8), below(8, 4, 6)),
    ),
    Case("gather: columns", lambda t, i: t[:, i], (f(8, 16), below(16, 4))),
    Case("gather: two indices", lambda t, i, j: t[i, j], (f(8, 6, 4), below(8, 10), below(6, 10))),
    Case(
        "gather: windows",
        lambda t, i: jax.vmap(lambda s: lax.dynamic_slice(t, (s, 0 * s), (4, 6)))(i),
        (f(8, 6), below(5, 4)),
    ),
    Case("scatter-add: embedding", grad(lambda t, i: t[i]), (f(16, 8), below(16, 4, 6))),
    Case(
        "scatter-add: embedding, fill",
        grad(lambda t, i: jnp.nan_to_num(jnp.take(t, i, axis=0))),
        (f(16, 8), below(20, 4, 6)),
    ),
    Case(
        "scatter-add: on values",
        lambda t, i, u: t.at[i].add(u),
        (f(16, 8), below(16, 6), f(6, 8)),
    ),
    Case(
        "scatter-add: labels",
        grad(lambda t, i: jnp.take_along_axis(t, i[..., None], -1)),
        (f(4, 6, 8), below(8, 4, 6)),
    ),
    Case(
        "scatter-add: two indices",
        lambda t, i, j, u: t.at[i, j].add(u),
        (f(8, 6, 4), below(8, 10), below(6, 10), f(10, 4)),
    ),
    Case("scatter: rows", lambda t, u: t.at[jnp.array([1, 6, 3, 4])].set(u), (f(8, 6), f(4, 6))),
    Case("scatter: one row", lambda t, i, u: t.at[i].set(u), (f(8, 6), below(8), f(6))),
    Case("scatter-max", lambda t, i, u: t.at[i].max(u), (f(8, 6), below(8, 4), f(4, 6))),
    Case("scatter-min", lambda t, i, u: t.at[i].min(u), (f(8, 6), below(8, 4), f(4, 6))),
    Case("scatter-mul", lambda t, i, u: t.at[i].mul(u), (f(8, 6), below(8, 4), f(4, 6))),
    Case(
        "dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0 * i), (4, 16)), (f(*X), below(8))
    ),
    Case(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0 * i)),
        (f(*X), f(2, 16), below(8)),
    ),
    Case(
        "dynamic_update_slice: cache",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0 * i, i, 0 * i, 0 * i)),
        (f(2, 8, 4, 6), f(2, 1, 4, 6), below(8)),
    ),
    # shapes
    Case("reshape: merge", lambda x: x.reshape(24, 6), (f(4, 6, 6),)),
    Case("reshape: split", lambda x: x.reshape(4, 4, 6), (f(16, 6),)),
    Case("reshape: heads", lambda x: x.reshape(2, 6, 4, 8), (f(2, 6, 32),)),
    Case("reshape: fused qkv", lambda x: x.reshape(2, 3, 4, 8), (f(2, 96),)),
    Case("reshape: regroup", lambda x: x.reshape(4, 12), (f(2, 24),)),
    Case("reshape: flatten", lambda x: x.reshape(-1), (f(2, 4, 6),)),
    Case("reshape: no common factor", lambda x: x.reshape(9, 4), (f(4, 9),)),
    Case("reshape: size-1 dims", lambda x: x.reshape(8, 1, 6, 1), (f(1, 8, 6),)),
    Case("squeeze", lambda x: lax.squeeze(x, (1,)), (f(8, 1, 6),)),
    Case("broadcast_in_dim: new dims", lambda x: jnp.broadcast_to(x, (4, 8, 6)), (f(8, 6),)),
    Case("broadcast_in_dim: size 1", lambda x: jnp.broadcast_to(x, (8, 6)), (f(1, 6),)),
    Case("broadcast_in_dim: expand", lambda x: lax.expand_dims(x, (1,)), (f(8, 6),)),
    Case("transpose", lambda x: x.transpose(2, 0, 1), (f(4, 6, 8),)),
    Case("rev", lambda x: lax.rev(x, (1,)), (f(*X),)),
    Case("slice", lambda x: x[2:6], (f(*X),)),
    Case("slice: stride", lambda x: lax.slice(x, (0, 0), (8, 16), (2, 1)), (f(*X),)),
    Case("slice: from a roll", lambda x: jnp.roll(x, 3, 0), (f(*X),)),
    Case("pad", lambda x: jnp.pad(x, ((1, 1), (0, 0))), (f(*X),)),
    Case("pad: shift", lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), (f(*X),)),
    Case("pad: dilate", lambda x: lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))), (f(*X),)),
    Case("concatenate", lambda x, y: lax.concatenate([x, y], 0), (f(*X), f(4, 16))),
    Case("concatenate: from a roll", lambda x: jnp.roll(x, 3, 1), (f(*X),)),
    Case("split", lambda x: lax.split(x, (4, 12), 1), (f(*X),)),
    Case("iota", lambda x: x + lax.broadcasted_iota(jnp.int32, X, 1), (f(*X),)),
    # reductions and scans
    Case("reduce_sum", lambda x: x.sum(1), (f(4, 8, 6),)),
    Case("reduce_sum: all", lambda x: x.sum(), (f(4, 8, 6),)),
    Case("reduce_max", lambda x: x.max(-1), (f(4, 8),)),
    Case("reduce_min", lambda x: x.min(0), (f(4, 8),)),
    Case("reduce_prod", lambda x: x.prod(0), (f(4, 8),)),
    Case("reduce_and", lambda x: (x > -1.0).all(0), (f(4, 8),)),
    Case("reduce_or", lambda x: (x > 1.0).any(1), (f(4, 8),)),
    Case("reduce_xor", lambda x: lax.reduce_xor_p.bind(x, axes=(0,)), (below(99, 4, 8),)),
    Case("argmax", lambda x: x.argmax(1), (f(4, 8),)),
    Case("argmin", lambda x: x.argmin(0), (f(4, 8),)),
    Case(
        "reduce: several operands",
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        (f(*X), f(*X)),
    ),
    Case("reduce_max: of logsumexp", jax.nn.logsumexp, (f(4, 8),)),
    Case("reduce_sum: of logsumexp", lambda x: jax.nn.logsumexp(x, 1), (f(4, 8),)),
    Case("eq: one-hot", one_hot_loss, (f(8, 6), below(6, 8))),
    Case("cumsum", lambda x: jnp.cumsum(x, 0), (f(*X),)),
    Case("cumprod", lambda x: jnp.cumprod(x, 1), (f(*X),)),
    Case("cummax", lambda x: lax.cummax(x, 1), (f(*X),)),
    Case("cummin", lambda x: lax.cummin(x, 0), (f(*X),)),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (f(*X),)),
    Case("sort", lambda x: jnp.sort(x, 1), (f(*X),)),
    Case(
        "sort: several operands",
        lambda x, y: lax.sort((x, y), dimension=0, num_keys=1),
        (f(*X), f(*X)),
    ),
    Case("sort: argsort", lambda x: jnp.argsort(x, 1), (f(*X),)),
    Case("top_k", lambda x: lax.top_k(x, 2), (f(8, 6),)),
    Case("reduce_window_max", window(lax.max, -np.inf), (f(4, 8, 8, 6),)),
    Case("reduce_window_sum", window(lax.add, 0.0, 3, 1), (f(4, 8, 8, 6),)),
    Case("reduce_window_min", window(lax.min, np.inf), (f(4, 8, 8, 6),)),
    Case("select_and_scatter_add", grad(window(lax.max, -np.inf)), (f(4, 8, 8, 6),)),
    Case("select_and_gather_add", window_jvp, (f(4, 8, 8, 6), f(4, 8, 8, 6))),
    # random numbers
    Case("random_bits: uniform", draw(jax.random.uniform, (8, 6)), (KEY,)),
    Case("random_bits: normal", draw(jax.random.normal, (496,)), (KEY,)),
    Case("random_bits: bernoulli", draw(jax.random.bernoulli, 0.3, (4, 8, 6)), (KEY,)),
    Case("random_split", split_key, (KEY,)),
    Case("random_fold_in", draw(jax.random.fold_in, 3), (KEY,)),
    # transforms and linear algebra
    Case("fft", lambda x: jnp.fft.fft(x, axis=1), (cplx(*X),)),
    Case("fft: real", lambda x: jnp.fft.rfft(x, axis=1), (f(*X),)),
    Case("fft: two dims", jnp.fft.fft2, (cplx(4, 8, 6),)),
    Case("cholesky", jnp.linalg.cholesky, (spd(4, 6, 6),)),
    Case(
        "triangular_solve",
        lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True),
        (spd(4, 6, 6), f(4, 6, 2)),
    ),
    Case("eigh", jnp.linalg.eigh, (spd(4, 6, 6),)),
    Case("qr", jnp.linalg.qr, (f(4, 6, 6),)),
    Case("svd", lambda x: jnp.linalg.svd(x, compute_uv=False), (f(4, 6, 6),)),
    Case("lu", jax.scipy.linalg.lu_factor, (f(4, 6, 6),)),
)
