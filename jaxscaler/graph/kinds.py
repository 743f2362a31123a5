"""What an equation costs and how it behaves: `flops` and `traits`, by primitive name.

The tables here are data; an unknown primitive has no traits and costs one operation per result
element. Names are those of `eqn.primitive.name`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod
from typing import Any

import numpy as np

from jaxscaler import _compat


def names(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


# Cheap elementwise primitives: one operation per result element.
SIMPLE = names(
    "abs add add_any and ceil clamp clz complex conj convert_element_type copy copy_p eq eq_to "
    "floor ge gt imag integer_pow is_finite le le_to lt lt_to max min mul mulhi name ne neg "
    "nextafter not or population_count real reduce_precision round select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign square stop_gradient sub xor"
)
# Elementwise primitives that run on the special function unit or as a short series.
TRANSCENDENTAL = names(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma div erf "
    "erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p log2 "
    "logistic one_minus_square polygamma polynomial pow random_gamma_grad "
    "regularized_incomplete_beta rem rsqrt sin sinh sqrt tan tanh zeta"
)
ELEMENTWISE = SIMPLE | TRANSCENDENTAL
# Operand i is result i, whatever the number of operands.
IDENTITY = names(
    "copy copy_p copy_to_host device_put layout_constraint mesh_cast name optimization_barrier "
    "pvary relayout reshard sharding_constraint stop_gradient"
)
# Calls whose inside the planner does not look into.
OPAQUE = names(
    "custom_call custom_partitioning debug_callback debug_print ffi_call get infeed io_callback "
    "outfeed pallas_call pure_callback run_state shard_map swap tpu_custom_call "
    "triton_kernel_call xla_metadata_call"
)
MOVES = names(
    "all_gather all_to_all bitcast_convert_type broadcast_in_dim concatenate copy copy_p "
    "dynamic_slice dynamic_update_slice empty2 expand_dims gather iota name pad ppermute "
    "random_clone random_unwrap random_wrap reshape rev ring_shift scatter slice split squeeze "
    "stop_gradient transpose"
) | (IDENTITY - {"stop_gradient"})
REDUCTIONS = names(
    "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor"
)
CUMULATIVE = names("cumlogsumexp cummax cummin cumprod cumsum")
HEAVY = names(
    "conv_general_dilated dot_general dot_product_attention_bwd_wrapper "
    "dot_product_attention_fwd_wrapper ragged_dot ragged_dot_general"
)
RANDOM = names(
    "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap "
    "random_wrap rng_bit_generator rng_uniform threefry2x32"
)
ALIAS = names(
    "copy copy_p expand_dims layout_constraint mesh_cast name optimization_barrier pvary reshape "
    "reshard sharding_constraint squeeze stop_gradient"
)
FUSABLE = (
    ELEMENTWISE
    | ALIAS - {"optimization_barrier"}
    | names(
        "bitcast_convert_type broadcast_in_dim concatenate dynamic_slice empty2 gather iota pad "
        "random_bits rev slice split threefry2x32 transpose"
    )
)
# f(sum of parts) == sum of f(parts) in all operands together, whatever the parameters.
LINEAR = names(
    "add_any broadcast_in_dim complex concatenate conj copy copy_p cumsum expand_dims imag name "
    "neg optimization_barrier real reduce_sum reduce_window_sum reshape rev slice split squeeze "
    "stop_gradient transpose"
)

TRANSCENDENTAL_FLOPS = 10.0  # convention: a special-function unit runs at about a tenth of the rate
THREEFRY_FLOPS = 115.0  # 20 rounds of add, rotate (3), xor and 5 key injections of 3, per hash


def traits(eqn: Any) -> frozenset[str]:
    """How the equation behaves.

    "elementwise": shape-preserving, size-1 and scalar operands broadcast. "linear": partial sums of
    all non-literal operands may pass through unreduced. "fusable": XLA would fuse it into its
    reader. "alias": its result needs no buffer of its own. "heavy": matrix unit work. "random",
    "opaque": as they say. The builder adds "manual": each device runs it on its part alone.
    """
    name = eqn.primitive.name
    found = {
        trait
        for trait, names in (
            ("fusable", FUSABLE),
            ("alias", ALIAS),
            ("heavy", HEAVY),
            ("random", RANDOM),
            ("opaque", OPAQUE),
        )
        if name in names
    }
    if is_elementwise(eqn):
        found.add("elementwise")
    if _is_linear(eqn):
        found.add("linear")
    return frozenset(found)


def is_elementwise(eqn: Any) -> bool:
    """Result dim d is computed from dim d of each operand (or from a size-1 dim or a scalar)."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return True
    if name == "bitcast_convert_type":
        return eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return False


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a constant written into it."""
    return hasattr(atom, "val")


def _is_linear(eqn: Any) -> bool:
    name = eqn.primitive.name
    dtypes = [v.aval.dtype for v in eqn.invars]
    literal = [is_literal(v) for v in eqn.invars]
    if all(literal) or any(not _is_number(t) for t in dtypes):
        return False
    if name in LINEAR:
        return not any(literal)
    if name == "convert_element_type":  # rounding aside; float to integer truncates
        return is_inexact(dtypes[0]) and is_inexact(eqn.outvars[0].aval.dtype)
    if name in ("add", "sub"):
        return not any(literal)  # x + 1 of n parts would add 1 n times
    if name == "mul":
        return any(literal)
    if name == "div":
        return literal[1] and is_inexact(dtypes[0])  # integers round towards zero
    return False


def is_inexact(dtype: Any) -> bool:
    """A real or complex floating-point dtype."""
    # bfloat16 and the 8-bit floats are extension types: numpy calls them void.
    return np.issubdtype(dtype, np.inexact) or "float" in np.dtype(dtype).name


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype != np.bool_


def flops(eqn: Any) -> float:
    """Floating-point operations of one run, multiply and add counted apart; 0 for data movement.

    Dense linear algebra follows Golub and Van Loan, *Matrix Computations*; transcendental functions
    count `TRANSCENDENTAL_FLOPS` each, an FFT 5 n log2 n, sorts and scans n log2 n.
    """
    name = eqn.primitive.name
    special = _FLOPS.get(name)
    if special is not None:
        return float(special(eqn))
    if name in MOVES:
        return 0.0
    size = float(sum(_size(v) for v in eqn.outvars))
    if name in TRANSCENDENTAL:
        return size * TRANSCENDENTAL_FLOPS
    if name in REDUCTIONS:
        return float(_size(eqn.invars[0]))
    if name in OPAQUE:
        return _opaque(eqn)
    return size


def _size(atom: Any) -> int:
    return prod(getattr(atom.aval, "shape", ()))


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _dot(eqn: Any) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    lhs = _shape(eqn.invars[0])
    return 2.0 * _size(eqn.outvars[0]) * prod(lhs[d] for d in contract)


def _ragged_dot(eqn: Any) -> float:
    # Each row of the ragged dim meets one group only, so the group dim adds no work.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contract, _), _ = numbers.dot_dimension_numbers
    lhs = _shape(eqn.invars[0])
    out = _size(eqn.outvars[0])
    if set(numbers.lhs_ragged_dimensions) & set(contract):  # each group contracts its own rows
        out //= max(1, eqn.invars[2].aval.shape[-1])
    return 2.0 * out * prod(lhs[d] for d in contract)


def _attention(eqn: Any) -> float:
    """Two products forward, five backward; half of each where the mask is causal."""
    q, k = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    rows = 2 if eqn.params["layout"] == 1 else 1  # the key's sequence dim: BNTH or BTNH
    products = 5 if eqn.primitive.name.endswith("bwd_wrapper") else 2
    causal = str(eqn.params["mask_type"]).upper().endswith("CAUSAL")
    return 2.0 * products * prod(q) * k[rows] * (0.5 if causal else 1.0)


def _conv(eqn: Any) -> float:
    # An output element meets the whole kernel of its feature; with an input dilated by s only
    # every s-th tap falls on a number (transposed convolution).
    kernel = _shape(eqn.invars[1])
    taps = prod(kernel) // max(1, kernel[eqn.params["dimension_numbers"].rhs_spec[0]])
    return 2.0 * _size(eqn.outvars[0]) * taps / prod(eqn.params["lhs_dilation"])


def _log2(n: int) -> float:
    return log2(n) if n > 1 else 1.0


def _fft(eqn: Any) -> float:
    n = prod(eqn.params["fft_lengths"])
    length = max(_size(eqn.invars[0]), _size(eqn.outvars[0]))
    real = not all(
        np.issubdtype(v.aval.dtype, np.complexfloating) for v in (*eqn.invars, *eqn.outvars)
    )
    return (2.5 if real else 5.0) * length * _log2(n)


def _integer_pow(eqn: Any) -> float:  # by repeated squaring, then one division
    y = eqn.params["y"]
    steps = max(1, abs(y).bit_length() + abs(y).bit_count() - 2)
    return _size(eqn.outvars[0]) * (steps + (TRANSCENDENTAL_FLOPS if y < 0 else 0))


def _along(axis: str) -> Callable[[Any], float]:
    def count(eqn: Any) -> float:
        operand = eqn.invars[0]
        return _size(operand) * len(eqn.invars) * _log2(_shape(operand)[eqn.params[axis]])

    return count


def _window(eqn: Any) -> float:
    return float(_size(eqn.outvars[0]) * prod(eqn.params["window_dimensions"]))


def _select_and_scatter(eqn: Any) -> float:  # (source, operand): one window per source element
    return float(_size(eqn.invars[0]) * prod(eqn.params["window_dimensions"]))


def _matrix(power: float) -> Callable[[Any], float]:
    """`power` * batch * rows * columns * min(rows, columns) of the first operand."""

    def count(eqn: Any) -> float:
        *batch, m, n = _shape(eqn.invars[0])
        return power * prod(batch) * m * n * min(m, n)

    return count


def _triangular_solve(eqn: Any) -> float:
    *_, n, _ = _shape(eqn.invars[0])
    return float(_size(eqn.invars[1]) * n)


def _random_bits(eqn: Any) -> float:
    return THREEFRY_FLOPS * _size(eqn.outvars[0])  # one hash makes up to 64 bits


def _opaque(eqn: Any) -> float:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    for key in ("call", "jaxpr", "call_jaxpr"):
        body = eqn.params.get(key)
        if body is not None and hasattr(body, "eqns"):
            # A shard_map's body is what one device does on its part.
            mesh = eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
            times = getattr(mesh, "size", 1) if mesh is not None else 1
            if eqn.primitive.name == "pallas_call":  # the body is what is done for one block
                times = prod(_compat.pallas_grid(eqn))
            return _body(body) * times
    return 0.0


def _body(jaxpr: Any) -> float:
    return sum(flops(e) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _cond(eqn: Any) -> float:
    return max(map(_body, eqn.params["branches"]), default=0.0)


def _call(eqn: Any) -> float:
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return _body(body) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


_FLOPS = {
    "dot_general": _dot,
    "dot_product_attention_fwd_wrapper": _attention,
    "dot_product_attention_bwd_wrapper": _attention,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "fft": _fft,
    "integer_pow": _integer_pow,
    "sort": _along("dimension"),
    "top_k": _along("axis"),
    "approx_top_k": _along("reduction_dimension"),
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    "reduce_window": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "select_and_gather_add": _window,
    "select_and_scatter_add": _select_and_scatter,
    "select_and_scatter": _select_and_scatter,
    **dict.fromkeys(
        ("scatter-add", "scatter-max", "scatter-min", "scatter-mul"), lambda e: _size(e.invars[2])
    ),
    "cholesky": _matrix(1 / 3),
    "lu": _matrix(2 / 3),
    "qr": _matrix(4 / 3),
    "geqrf": _matrix(4 / 3),
    "householder_product": _matrix(4 / 3),
    "hessenberg": _matrix(10 / 3),
    "tridiagonal": _matrix(4 / 3),
    "eigh": _matrix(9.0),
    "eig": _matrix(25.0),
    "schur": _matrix(25.0),
    "svd": _matrix(21.0),
    "triangular_solve": _triangular_solve,
    "cond": _cond,
    "registered_kernel": lambda e: 0.0,  # unless it was said (graph/registry.py)
    "random_bits": _random_bits,
    "threefry2x32": _random_bits,
    **dict.fromkeys(("jit", "pjit", "scan", "remat2", "custom_jvp_call", "custom_vjp_call"), _call),
}
