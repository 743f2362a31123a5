"""A model traced once, and its graph at any batch.

The model of `models/` is traced with prime numbers for the batch, the layers and the vocabulary: a
dim that such a prime divides is the batch's (or …), so the graph is brought to any batch, and to a
table with any padding, by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any

import jax

from jaxscaler.cost.memory import Lives, live_buffers, rules_for
from jaxscaler.errors import JaxscalerError
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.graph import ir
from jaxscaler.graph.build import build
from jaxscaler.graph.fold import Folded, fold
from jaxscaler.graph.labels import factor_labels
from jaxscaler.graph.registry import PRIMITIVE as KERNEL
from jaxscaler.space.build import build_space
from jaxscaler.space.nodes import PARTIAL, Space
from jaxscaler.space.problem import Model, model
from jaxscaler.trace import trace

PRIMES = (509, 521, 523, 541, 547, 557, 563, 569, 571, 577, 587, 593)
TABLES = (65537, 65539, 65543, 65551)  # primes that stand for a vocabulary
TP_DIM, HIDDEN, EXPERT, BUCKET = "model", "hidden", "expert", "bucket"

# What each dim of a parameter is, by its path: split by tp, by ep, or by neither.
DIMS: Mapping[str, tuple[tuple[str, tuple[str | None, ...]], ...]] = {
    "gpt": (
        ("wte/embedding", (TP_DIM, HIDDEN)),
        ("wpe", (None, HIDDEN)),
        ("head/kernel", (HIDDEN, TP_DIM)),
        ("attn/qkv/kernel", (None, HIDDEN, None, TP_DIM, None)),
        ("attn/qkv/bias", (None, None, TP_DIM, None)),
        ("attn/out/kernel", (None, TP_DIM, None, HIDDEN)),
        ("up/kernel", (None, HIDDEN, TP_DIM)),
        ("up/bias", (None, TP_DIM)),
        ("down/kernel", (None, TP_DIM, HIDDEN)),
        ("h/*", (None, HIDDEN)),
        ("ln_f/*", (HIDDEN,)),
    ),
    "llama": (
        ("embed/embedding", (TP_DIM, HIDDEN)),
        ("head/kernel", (HIDDEN, TP_DIM)),
        ("attn/[qkv]/kernel", (None, HIDDEN, TP_DIM)),
        ("attn/[qkv]/bias", (None, TP_DIM)),
        ("attn/out/kernel", (None, TP_DIM, HIDDEN)),
        ("experts/router/kernel", (None, HIDDEN, None)),
        ("experts/down", (None, EXPERT, TP_DIM, HIDDEN)),
        ("experts/*", (None, EXPERT, HIDDEN, TP_DIM)),
        ("down/kernel", (None, TP_DIM, HIDDEN)),
        ("*/kernel", (None, HIDDEN, TP_DIM)),
        ("layers/*", (None, HIDDEN)),
        ("norm/scale", (HIDDEN,)),
    ),
    "t5": (
        ("embed/embedding", (TP_DIM, HIDDEN)),
        ("head/kernel", (HIDDEN, TP_DIM)),
        ("*_bias/table", (BUCKET, TP_DIM)),
        ("[ed][ne]coder_norm/scale", (HIDDEN,)),
        ("*/out/kernel", (None, TP_DIM, HIDDEN)),
        ("*/down/kernel", (None, TP_DIM, HIDDEN)),
        ("*/kernel", (None, HIDDEN, TP_DIM)),
        ("*/scale", (None, HIDDEN)),
    ),
}


@dataclass(frozen=True)
class Task:
    """What is traced. `training`: with gradients, else the forward pass alone."""

    model: ModelConfig
    kv_heads: int  # as traced: where tp is more, each has a copy
    vocab: int  # with padding
    seq: int
    dtype: str = "bfloat16"
    attention: str = "flash"
    recompute: str = "none"
    training: bool = True
    kept: str = "float32"  # dtype of parameters, which products cast to theirs
    weights: str = ""  # dtype in which products read them and widen them; empty: as they are kept


@dataclass(frozen=True)
class Template:
    """A traced model before it has a batch."""

    graph: ir.OpGraph
    folded: Folded
    space: Space
    lives: Lives
    batch: int  # the prime that stands for it
    layers: int
    vocab: int
    in_layer: tuple[bool, ...]  # per op
    edge_in_layer: tuple[bool, ...]


def _family(config: ModelConfig) -> str:
    return "llama" if config.family == "moe" else config.family


def template_of(task: Task, cp: bool, vendor: str) -> Template:
    """The task traced, whatever its vocabulary. cp: queries may be split."""
    return _template(replace(task, vocab=0), cp, vendor)


@lru_cache(maxsize=64)
def _template(task: Task, cp: bool, vendor: str) -> Template:
    graph, batch, layers, vocab = _traced(replace(task, weights=""))
    if task.weights:
        graph = _read_as(graph, task.weights)
    if cp:
        graph = _queries_apart(graph)
    folded = fold(graph, merge=False)
    named = {
        (v, d): name
        for v in graph.inputs
        if graph.values[v].role == ir.PARAMETER
        for d, name in enumerate(dims_of(task.model, graph.values[v].path))
        if name
    }
    space = build_space(graph, folded, factor_labels(graph, folded, named))
    return Template(
        graph, folded, space, live_buffers(graph, folded, rules_for(vendor)), batch, layers, vocab,
        tuple(op.repeat % layers == 0 for op in graph.ops),
        tuple(edge.times % layers == 0 for edge in space.edges),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _traced(task: Task) -> tuple[ir.OpGraph, int, int, int]:
    """(the graph, the primes in it for batch, layers and vocabulary)."""
    work, batch, layers, vocab = _workload(replace(task, recompute="", training=True, kept=""))
    model = work.state.apply_fn.__self__
    remat = {"remat": task.recompute == "full"}
    if task.model.family != "t5":  # which has no remat of its attention
        remat["remat_attention"] = task.recompute == "selective"
    forward = model.clone(config=replace(model.config, **remat)).apply
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, task.kept), work.state.params
    )
    if task.training:
        traced = trace(work.step, work.state.replace(params=params, apply_fn=forward), work.batch)
    else:

        def infer(params: Any, tokens: Any) -> Any:
            return forward({"params": params}, tokens)

        traced = trace(infer, params, work.batch["inputs"])
        traced = replace(traced, roles=(("params/*", ir.PARAMETER), ("tokens", ir.BATCH)))
    return build(traced), batch, layers, vocab


@lru_cache(maxsize=64)
def _workload(task: Task) -> tuple[Any, int, int, int]:
    """(the workload, whatever is recomputed, and the primes in it)."""
    import optax

    config = task.model
    taken = (
        config.hidden, config.heads, task.kv_heads, config.head_size, config.ffn, config.context,
        task.seq, config.experts or 1,
    )  # fmt: skip
    batch, layers = [p for p in PRIMES if all(n % p for n in taken)][:2]
    vocab = next(p for p in TABLES if all(n % p for n in taken))
    options = config.workload_options(layers, task.kv_heads)
    options |= {"vocab": vocab, "context": max(config.context, task.seq)}
    if config.family != "t5":  # which has no kernels
        options["attention"] = "xla" if task.attention == "unfused" else "flash"
    module = import_module(f"models.{config.family}")
    work = module.workload(
        "tiny", batch=batch, seq=task.seq, dtype=task.dtype, tx=optax.sgd(1.0), **options,
    )  # fmt: skip
    return work, batch, layers, vocab


def dims_of(config: ModelConfig, path: str) -> tuple[str | None, ...]:
    for pattern, dims in DIMS[_family(config)]:
        if fnmatchcase(path, f"*params/{pattern}") or fnmatchcase(path, f"*params/*/{pattern}"):
            return dims
    raise JaxscalerError(f"{path}: no row of DIMS says how it is split")


def _read_as(graph: ir.OpGraph, dtype: str) -> ir.OpGraph:
    """Parameters stored in a narrower dtype, which products widen as they read them."""
    narrow = {v for v in graph.inputs if graph.values[v].role == ir.PARAMETER}
    for op in graph.ops:
        if graph.kinds[op.kind].primitive == ir.SLICE and op.inputs[0] in narrow:
            narrow.update(op.outputs)
    return replace(
        graph,
        values=tuple(
            v._replace(dtype=dtype) if v.id in narrow and len(v.shape) > 1 else v
            for v in graph.values
        ),
    )


def _queries_apart(graph: ir.OpGraph) -> ir.OpGraph:
    """Attention kernels that may be split by queries: ring attention, with causal work balanced.

    The kernel of `models/attention.py` takes a query's position from its place, so that it must not
    be split so; one that is told its positions can be.
    """
    kinds = []
    for kind in graph.kinds:
        if kind.primitive == KERNEL:
            queries = kind.rule.operands[0][1][0]
            factors = list(kind.rule.factors)
            factors[queries] = factors[queries]._replace(kind=ir.REDUCE, combiner="sum")
            kind = kind._replace(rule=replace(kind.rule, factors=tuple(factors)))
        kinds.append(kind)
    return replace(graph, kinds=tuple(kinds))


# -- from primes to a batch ------------------------------------------------------------------------


class Sized:
    """A template's numbers with batch and vocabulary in place of their primes, and one layer."""

    def __init__(self, template: Template, batch: int, vocab: int):
        t = template
        self.template, self.instead = t, ((t.batch, batch), (t.layers, 1), (t.vocab, vocab))

    def number(self, n: int) -> int:
        for prime, instead in self.instead:
            times = 0
            while n % prime == 0 and n:
                n, times = n // prime, times + 1
            n *= instead**times
        return n

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(self.number, shape))

    def factor(self, factor: ir.Factor) -> ir.Factor:
        if factor.kind == PARTIAL:
            return factor
        return factor._replace(size=self.number(factor.size))

    def kind(self, kind: ir.Kind) -> ir.Kind:
        factors = tuple(map(self.factor, kind.rule.factors))
        share = prod(n.size / o.size for n, o in zip(factors, kind.rule.factors))
        return kind._replace(
            operand_shapes=tuple(map(self.shape, kind.operand_shapes)),
            result_shapes=tuple(map(self.shape, kind.result_shapes)),
            rule=replace(kind.rule, factors=factors),
            flops=kind.flops * share,
            nbytes=None if kind.nbytes is None else kind.nbytes * share,
        )

    def model(self) -> Model:
        template = self.template
        graph = replace(
            template.graph,
            ops=tuple(op._replace(repeat=self.number(op.repeat)) for op in template.graph.ops),
            values=tuple(v._replace(shape=self.shape(v.shape)) for v in template.graph.values),
            kinds=tuple(map(self.kind, template.graph.kinds)),
            loops=tuple(x._replace(trips=self.number(x.trips)) for x in template.graph.loops),
        )
        space = replace(
            template.space,
            nodes=tuple(
                replace(node, factors=tuple(map(self.factor, node.factors)))
                for node in template.space.nodes
            ),
            edges=tuple(
                edge._replace(times=self.number(edge.times)) for edge in template.space.edges
            ),
        )
        return model(graph, template.folded, space, template.lives)
