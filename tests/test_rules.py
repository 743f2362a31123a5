"""Rules as text, their cache, and what happens where no rule can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from rule_cases import CASES

from jaxscaler import _compat
from jaxscaler.graph import denied, hazards, kinds, rules
from jaxscaler.graph.ir import FROZEN, PASS, REDUCE, Factor, Rule

F32, I32 = jnp.float32, jnp.int32


def sds(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def equations(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """All equations of a function, calls inlined."""

    def leaves(closed: Any) -> list[Any]:
        found = []
        for eqn in _compat.open_jaxpr(closed)[0].eqns:
            bodies = _compat.subjaxprs(eqn)
            found += leaves(bodies[0]) if bodies else [eqn]
        return found

    return leaves(jax.make_jaxpr(fn)(*args))


def equation(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """The last equation of a function with that primitive."""
    return [e for e in equations(fn, *args) if e.primitive.name == name][-1]


def text(rule: Rule) -> str:
    """Like "[a b] [b c!] -> [a c!]  b:sum": a letter per factor, 1 for no factor.

    "!": FROZEN; "&": by all mesh axes or none.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    mark = ["!" if f.kind == FROZEN else "&" if f.together else "" for f in rule.factors]

    def tensor(dims: Any) -> str:
        return "[" + " ".join("".join(letters[f] + mark[f] for f in d) or "1" for d in dims) + "]"

    reduced = [f"{letters[i]}:{f.combiner}" for i, f in enumerate(rule.factors) if f.kind == REDUCE]
    sides = [" ".join(map(tensor, side)) for side in (rule.operands, rule.results)]
    return " -> ".join(sides) + "".join(f"  {r}" for r in reduced)


def conv(x: Any, w: Any, stride: int = 1, groups: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def weight_gradient(groups: int) -> Callable[..., Any]:
    return jax.grad(lambda w, x: (conv(x, w, groups=groups) ** 2).sum())


PIXELS = sds(4, 8, 8, 6)

TEXTS = [
    ("dot_general", jnp.dot, (sds(4, 6), sds(6, 8)), "[a b] [b c] -> [a c]  b:sum"),
    (
        "dot_general",
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (sds(2, 4, 6, 8), sds(2, 5, 6, 8)),
        "[a b c d] [a e c d] -> [a c b e]  d:sum",
    ),
    ("add", lambda x: x + 1, (sds(4, 6),), "[a b] [] -> [a b]"),
    ("mul", lambda x, y: lax.mul_p.bind(x, y), (sds(4, 1), sds(4, 6)), "[a 1] [a b] -> [a b]"),
    ("select_n", lax.select_n, (sds(dtype=bool), sds(4), sds(4)), "[] [a] [a] -> [a]"),
    # lookups: masked lookups add up, the gradient writes into its own part
    (
        "gather",
        lambda t, i: jnp.take(t, i, axis=0),
        (sds(50, 8), sds(4, 6, dtype=I32)),
        "[a b] [c d 1] -> [c d b]  a:sum",
    ),
    (
        "gather",  # an integer fill is not its own sum
        lambda t, i: jnp.take(t, i, axis=0, mode="fill"),
        (sds(50, 8, dtype=I32), sds(4, 6, dtype=I32)),
        "[a b] [c d 1] -> [c d b]  a:other",
    ),
    (
        "gather",
        lambda t, i, j: t[i, j],
        (sds(8, 6, 4), sds(5, dtype=I32), sds(5, dtype=I32)),
        "[a b c] [d e!] -> [d c]  a:sum  b:sum",
    ),
    (
        "scatter-add",
        jax.grad(lambda t, i: (t[i] ** 2).sum()),
        (sds(50, 8), sds(4, 6, dtype=I32)),
        "[a b] [c d 1] [c d b] -> [a b]  c:sum  d:sum",
    ),
    (
        "scatter",
        lambda t, i, u: t.at[i].set(u),
        (sds(8, 6), sds(4, dtype=I32), sds(4, 6)),
        "[a b] [c! 1] [d! b] -> [a b]",
    ),
    # shapes
    ("reshape", lambda x: x.reshape(4, 6, 2, 8), (sds(4, 6, 16),), "[a b cd] -> [a b c d]"),
    ("reshape", lambda x: x.reshape(-1), (sds(4, 6, 2),), "[a b c] -> [abc]"),
    ("reshape", lambda x: x.reshape(4, 6), (sds(2, 12),), "[a bc] -> [ab c]"),
    ("reshape", lambda x: x.reshape(4, 9), (sds(9, 4),), "[a! b!] -> [c! d!]"),
    ("reshape", lambda x: x.reshape(4, 6), (sds(6, 4),), "[ab! c!d!] -> [ae! f!d!]"),
    ("transpose", lambda x: x.transpose(2, 0, 1), (sds(4, 6, 8),), "[a b c] -> [c a b]"),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (4, 8)), (sds(1, 8),), "[1 a] -> [b a]"),
    ("squeeze", lambda x: lax.squeeze(x, (1,)), (sds(4, 1, 6),), "[a 1 b] -> [a b]"),
    ("iota", lambda: lax.iota(I32, 6), (), " -> [a]"),
    # reductions
    ("reduce_sum", lambda x: x.sum(0), (sds(4, 6),), "[a b] -> [b]  a:sum"),
    ("reduce_max", lambda x: x.max(1), (sds(4, 6),), "[a b] -> [a]  b:max"),
    ("reduce_min", lambda x: x.min(1), (sds(4, 6),), "[a b] -> [a]  b:min"),
    ("reduce_and", lambda x: x.all(1), (sds(4, 6, dtype=bool),), "[a b] -> [a]  b:and"),
    ("reduce_or", lambda x: x.any(1), (sds(4, 6, dtype=bool),), "[a b] -> [a]  b:or"),
    ("reduce_prod", lambda x: x.prod(1), (sds(4, 6),), "[a b] -> [a]  b:other"),
    ("argmax", lambda x: x.argmax(1), (sds(4, 6),), "[a b] -> [a]  b:other"),
    # hazards: what an operation sorts, scans, cuts or shifts stays whole, the rest is free
    ("sort", lambda x: jnp.sort(x, 1), (sds(4, 6),), "[a b!] -> [a c!]"),
    ("top_k", lambda x: lax.top_k(x, 2), (sds(4, 6),), "[a& b!] -> [a& c!] [a& d!]"),
    ("cumsum", lambda x: jnp.cumsum(x, 0), (sds(4, 6),), "[a! b] -> [c! b]"),
    ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (sds(4, 6),), "[a b!] -> [a c!]"),
    ("fft", jnp.fft.fft, (sds(4, 6, dtype=jnp.complex64),), "[a! b!] -> [a! c!]"),
    ("rev", lambda x: lax.rev(x, (1,)), (sds(4, 6),), "[a b!] -> [a c!]"),
    ("slice", lambda x: x[1:3], (sds(4, 6),), "[a! b] -> [c! b]"),
    (
        "pad",
        lambda x: lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]),
        (sds(4, 6),),
        "[a! b] [] -> [a! b]",
    ),
    ("concatenate", lambda x: jnp.concatenate([x, x]), (sds(4, 6),), "[a! b] [c! b] -> [d! b]"),
    ("split", lambda x: lax.split(x, (2, 4), 1), (sds(4, 6),), "[a b!] -> [a c!] [a d!]"),
    (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, i), (2, 6)),
        (sds(4, 6), sds(dtype=I32)),
        "[a! b] [] [] -> [c! b]",
    ),
    (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)),
        (sds(4, 6), sds(2, 6), sds(dtype=I32)),
        "[a! b] [c! b] [] [] -> [a! b]",
    ),
    (
        "conv_general_dilated",
        conv,
        (PIXELS, sds(3, 3, 6, 10)),
        "[a b! c! d] [e! f! d g] -> [a h! i! g]  d:sum",
    ),
    (
        "conv_general_dilated",
        lambda x, w: conv(x, w, stride=2),
        (PIXELS, sds(3, 3, 6, 10)),
        "[a b!c! d!e! f] [g! h! f i] -> [a j! k! i]  f:sum",
    ),
    (
        "conv_general_dilated",  # the compiler gathers the batch
        lambda x, w: conv(x, w, groups=2),
        (PIXELS, sds(3, 3, 3, 10)),
        "[a! b! c! d!e!] [f! g! e! d!h!] -> [a! i! j! d!h!]",
    ),
    (
        "conv_general_dilated",
        lambda x, w: conv(x, w, groups=6),
        (PIXELS, sds(3, 3, 1, 6)),
        "[a b! c! d!] [e! f! 1 d!] -> [a g! h! d!]",
    ),
    (
        "conv_general_dilated",  # data batch contracted: a sum
        weight_gradient(1),
        (sds(3, 3, 6, 10), PIXELS),
        "[a b! c! d] [a b! c! e] -> [f! g! d e]  a:sum",
    ),
    (
        "conv_general_dilated",  # ... that is miscompiled with batch groups
        weight_gradient(6),
        (sds(3, 3, 1, 6), PIXELS),
        "[a& b! c! d!] [a& b! c! d!] -> [e! f! 1 d!]  a:sum",
    ),
    (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (PIXELS,),
        "[a b! c! d] -> [a e! f! d]",
    ),
    (
        "ragged_dot_general",
        lambda x, w, n: lax.ragged_dot(x, w, n),
        (sds(16, 8), sds(4, 8, 12), sds(4, dtype=I32)),
        "[a! b] [c! b d] [e!] -> [f! d]  b:sum",
    ),
    ("cholesky", jnp.linalg.cholesky, (sds(3, 6, 6),), "[a b! c!] -> [a d! e!]"),
    ("eigh", jnp.linalg.eigh, (sds(3, 6, 6),), "[a b! c!] -> [a d! e!] [a f!]"),
    (
        "custom_linear_solve",
        jnp.linalg.solve,
        (sds(3, 6, 6), sds(3, 6, 2)),
        "[a! b! c!] [d! e! f!] [g h! i!] [g j!] [k! l! m!] [n! o!] [g p! q!] -> [g r! s!]",
    ),
    # random numbers
    (
        "random_bits",
        lambda k: jax.random.bits(jax.random.wrap_key_data(k), (4, 6)),
        (sds(2, dtype=jnp.uint32),),
        "[] -> [a b]",
    ),
]


@pytest.mark.parametrize(("name", "fn", "args", "expected"), TEXTS)
def test_rule(name: str, fn: Any, args: Any, expected: str) -> None:
    eqn = equation(name, fn, *args)
    rule = rules.rules_for([eqn])[0]
    rule.verify([v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars])
    assert text(rule) == expected


def test_every_case_verifies() -> None:
    eqns = [e for c in CASES for e in equations(c.fn, *c.operands())]
    for eqn, rule in zip(eqns, rules.rules_for(eqns)):
        rule.verify([v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars])
        for factor in rule.factors:
            assert bool(factor.combiner) == (factor.kind == REDUCE), (eqn, rule)


def test_elementwise_by_hand_is_what_the_partitioner_says() -> None:
    """The table spares most lowerings; it must not say anything else."""
    eqns = [
        e
        for c in CASES
        for e in equations(c.fn, *c.operands())
        if kinds.is_elementwise(e) and e.primitive.name not in kinds.IDENTITY
    ]
    asked = rules.read(eqns)
    assert len({e.primitive.name for e in eqns}) > 50
    for eqn, theirs, ours in zip(eqns, asked, rules.rules_for(eqns)):
        assert text(theirs) == text(ours), eqn


# ------------------------------------------------------------------ cache and signatures


def test_equal_equations_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = equation("dot_general", jnp.dot, sds(14, 6), sds(6, 22))
    again = equation("dot_general", jnp.dot, sds(14, 6), sds(6, 22))
    found = rules.rules_for([first, again])
    assert found[0] is found[1]
    monkeypatch.setattr(rules, "_lower", None)  # any lowering would raise
    assert rules.rules_for([again])[0] is found[0]


def test_signature_tells_apart_what_differs() -> None:
    def sig(fn: Callable[..., Any], *args: Any) -> Any:
        return rules.signature(equations(fn, *args)[-1])

    base = sig(lambda x: x.sum(0), sds(4, 6))
    assert base == sig(lambda x: x.sum(0), sds(4, 6))
    assert base != sig(lambda x: x.sum(1), sds(4, 6))
    assert base != sig(lambda x: x.sum(0), sds(4, 8))
    assert base != sig(lambda x: x.sum(0), sds(4, 6, dtype=jnp.int32))
    # x * 2 is linear, x * y is not
    assert sig(lambda x: x * 2.0, sds(4)) != sig(lambda x, y: x * y, sds(4), sds())


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        # a NaN among the parameters, not equal to itself
        (
            lambda t, i: jnp.take(t, i, axis=0, fill_value=float("nan")),
            (sds(9, 4), sds(3, dtype=I32)),
        ),
        # jaxprs among the parameters, other objects each time
        (
            lambda x: lax.reduce(x, jnp.int32(0), lambda a, b: a * b + a, (0,)),
            (sds(4, 6, dtype=I32),),
        ),
        (jnp.linalg.solve, (sds(4, 4), sds(4, 2))),
        (lambda x: jax.pure_callback(np.sin, sds(4), x), (sds(4),)),
    ],
)
def test_signature_compares_parameters_by_what_they_say(fn: Any, args: Any) -> None:
    def fresh() -> list[Any]:
        jax.clear_caches()
        return [rules.signature(e) for e in equations(lambda *a: fn(*a), *args)]

    assert fresh() == fresh()
    hash(tuple(fresh()))


# ------------------------------------------------------------------ opaque and unknown


def check_frozen(rule: Rule, *words: str) -> None:
    assert all(f.kind == FROZEN for f in rule.factors)
    for word in words:
        assert word in rule.note


def unknown_primitive(lowered: Callable[..., Any] | None = None) -> Primitive:
    p = Primitive("never_heard_of_it")
    p.def_abstract_eval(lambda x: x)
    if lowered is not None:
        mlir.register_lowering(p, mlir.lower_fun(lowered, multiple_results=False))
    return p


def test_unknown_primitive_is_frozen_and_spoils_nothing() -> None:
    p = unknown_primitive()
    eqns = equations(lambda x, y: p.bind(x @ y).sum(0), sds(4, 10), sds(10, 6))
    dot, mystery, total = rules.rules_for(eqns)
    assert text(dot) == "[a b] [b c] -> [a c]  b:sum"
    assert text(total) == "[a b] -> [b]  a:sum"
    check_frozen(mystery, "never_heard_of_it", "cannot be lowered")


def test_unknown_primitive_that_lowers_has_the_partitioners_rule() -> None:
    p = unknown_primitive(jnp.tanh)
    (eqn,) = equations(p.bind, sds(4, 12))
    assert text(rules.rules_for([eqn])[0]) == "[a b] -> [a b]"


def test_operation_without_rule_is_frozen_with_a_note() -> None:
    p = unknown_primitive(lambda x: lax.fori_loop(0, 3, lambda i, y: y * 2, x))
    (eqn,) = equations(p.bind, sds(4, 16))
    check_frozen(rules.rules_for([eqn])[0], "never_heard_of_it", "stablehlo.while")


def test_hand_rule_for_a_new_primitive(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Primitive("my_attention")
    p.def_abstract_eval(lambda q, k: q)
    (eqn,) = equations(p.bind, sds(2, 8, 16), sds(2, 6, 16))
    monkeypatch.setitem(
        hazards.HAND, "my_attention", lambda e: hazards.write(e, ["bqd", ("b", None, "d")], ["bqd"])
    )
    assert text(rules.rules_for([eqn])[0]) == "[a b c] [a d! c] -> [a b c]"

    monkeypatch.setitem(hazards.HAND, "my_attention", lambda e: hazards.write(e, ["bq"], ["bqd"]))
    (other,) = equations(p.bind, sds(2, 8, 18), sds(2, 6, 18))
    check_frozen(rules.rules_for([other])[0], "my_attention", "does not fit")


def test_opaque_calls_are_frozen_with_a_note(devices: list[jax.Device]) -> None:
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    def everything(x: Any) -> Any:
        x = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)
        x = pallas.pallas_call(kernel, out_shape=sds(8, 6))(x)
        return jax.pure_callback(np.cos, sds(8, 6), x)

    eqns = equations(everything, sds(8, 6))
    names = [e.primitive.name for e in eqns]
    assert names == ["shard_map", "pallas_call", "pure_callback"]
    for name, rule in zip(names, rules.rules_for(eqns)):
        check_frozen(rule, name, "opaque")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # k stands in operands only and is no reduction: it must stay whole
        (dict(sharding_rule="b i k, b k j -> b i j"), "[a b c!] [a c! d] -> [a b d]"),
        (
            dict(sharding_rule="b i k, b k j -> b i j", reduction_factors=("k",)),
            "[a b c] [a c d] -> [a b d]  c:sum",
        ),
        (
            dict(
                sharding_rule="... i k, ... k j -> ... i j",
                reduction_factors=("k",),
                need_replication_factors=("j",),
            ),
            "[a b c] [a c d!] -> [a b d!]  c:sum",
        ),
        # only known once there is a mesh
        (
            dict(sharding_rule=lambda mesh, ins, outs: "b i k, b k j -> b i j"),
            "[a! b! c!] [d! e! f!] -> [g! h! i!]",
        ),
    ],
)
def test_custom_partitioning_is_planned_by_its_rule(options: Any, expected: str) -> None:
    @custom_partitioning
    def product(a: Any, b: Any) -> Any:
        return a @ b

    product.def_partition(
        partition=lambda mesh, args, result: (mesh, jnp.matmul, result, args),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        **options,
    )
    (eqn,) = equations(product, sds(2, 4, 6), sds(2, 6, 8))
    assert eqn.primitive.name == "custom_partitioning"
    rule = rules.rules_for([eqn])[0]
    assert text(rule) == expected
    assert ("opaque" in rule.note) == callable(options["sharding_rule"])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_fused_attention(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch and key heads are free in the forward and backward kernels, sequence and size whole."""
    from jax._src.cudnn import fused_attention_stablehlo as fused  # traces without a GPU

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused, "check_compute_capability", lambda c: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda c: c == "9.0")

    def loss(q: Any, k: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn").sum()

    q, k = sds(2, 64, 4, 32, dtype=jnp.bfloat16), sds(2, 64, kv_heads, 32, dtype=jnp.bfloat16)
    found = equations(jax.grad(loss), q, k)
    eqns = [e for e in found if e.primitive.name.startswith("dot_product_attention")]
    assert [e.primitive.name[-11:] for e in eqns] == ["fwd_wrapper", "bwd_wrapper"]
    for eqn, rule in zip(eqns, rules.rules_for(eqns)):
        rule.verify([v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars])
        assert not rule.note
        free = [f for f, x in enumerate(rule.factors) if x.kind == PASS]
        assert sorted(rule.factors[f].size for f in free) == sorted((2, kv_heads))
        batch, heads = free
        for dims in (*rule.operands[:3], rule.results[0]):
            assert dims[0] == (batch,) and dims[2][0] == heads
    # QK, PV and, backward, five products; half of them masked
    product = 2 * 2 * 4 * 64 * 64 * 32 / 2
    assert [kinds.flops(e) for e in eqns] == [2 * product, 5 * product]


def test_random_bits_that_depend_on_the_split_are_frozen() -> None:
    def bits(key: Any) -> Any:
        return jax.random.bits(key, (8,))

    rbg = equation("random_bits", bits, jax.eval_shape(lambda: jax.random.key(0, impl="rbg")))
    check_frozen(rules.rules_for([rbg])[0], "rbg")
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.threefry_partitionable(False):
        serial = equation("random_bits", bits, key)
    check_frozen(rules.rules_for([serial])[0], "jax_threefry_partitionable")
    free = equation("random_bits", bits, key)
    assert text(rules.rules_for([free])[0]) == "[] -> [a]"


def test_deny_list_knows_versions_and_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    eqn = equation("reduce_sum", lambda x: x.sum(0), sds(4, 6))
    rule = Rule((Factor(4, REDUCE, "sum"), Factor(6, PASS)), (((0,), (1,)),), (((1,),),))
    entry = denied.Hazard("reduce_sum", "reduced", (0, 9), (0, 11), "tpu", "made up")
    monkeypatch.setattr(denied, "DENIED", (entry,))
    monkeypatch.setattr(denied, "_LISTED", frozenset(("reduce_sum",)))

    def is_denied(backend: str, *version: int) -> bool:
        found = denied.deny(eqn, rule, backend, version)
        assert found.factors[1] == rule.factors[1]
        return found.factors[0].kind == FROZEN and "made up" in found.note

    assert is_denied("tpu", 0, 9, 0)
    assert is_denied("", 0, 10, 2)  # for any backend: also for this one
    assert not is_denied("cpu", 0, 10, 2)
    assert not is_denied("tpu", 0, 8, 9)
    assert not is_denied("tpu", 0, 11)


def test_unifying_splits_factors_and_freezes_what_does_not_divide() -> None:
    u = rules._Factors()
    a, b, c = u.new(24), u.new(4), u.new(6)
    u.unify([a], [b, c])
    assert [u.size[x] for x in u.leaves([a])] == [4, 6]
    assert u.leaves([a]) == u.leaves([b, c])
    d, e = u.new(8), u.new(3, REDUCE, "sum")
    u.unify([a], [d, e])  # 4 x 6 as 8 x 3: 4, then 2 of the 6, then 3
    assert [u.size[x] for x in u.leaves([a])] == [4, 2, 3]
    assert [u.kind[x] for x in u.leaves([a])] == [PASS, PASS, REDUCE]
    u.mark([d], FROZEN)
    assert [u.kind[x] for x in u.leaves([a])] == [FROZEN, FROZEN, REDUCE]
    x, y = u.new(6), u.new(4)
    u.unify([x, y], [u.new(4), u.new(6)])  # 6 and 4 share no leading factor
    assert {u.kind[z] for z in u.leaves([x, y])} == {FROZEN}
