"""Names of factors that people plan by: which factor of an op is the batch, which the sequence.

The names start at the batch's own dims and follow the factors through the graph: "batch" from dim 0
of batch arrays, "sequence" from dim 1 of those that are tokens [batch, sequence] or features
[batch, sequence, features]; "stage" at what a pipeline shifts (rewrite/ring.py). A contracted
factor without such a name is "contraction".
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxscaler.graph.fold import Folded
from jaxscaler.graph.ir import BATCH, REDUCE, SHIFT, OpGraph, Value

CONTRACTION, STAGE = "contraction", "stage"


def dim_names(value: Value) -> tuple[str, ...]:
    """Names of the leading dims of a batch array."""
    tokens = len(value.shape) == 2 and value.dtype.startswith(("int", "uint"))
    return ("batch", "sequence") if tokens or len(value.shape) == 3 else ("batch",)


def factor_labels(
    graph: OpGraph, folded: Folded, more: Mapping[tuple[int, int], str] = {}
) -> list[dict[int, str]]:
    """Per op class: factor -> name, for the factors that have one.

    `more`: names of (value, dim)s to begin from besides those of the batch.
    """
    # (value class, dim) -> name of its major factor
    dims = {(int(folded.value_class[v]), d): name for (v, d), name in more.items()}
    for v in graph.inputs:
        value = graph.values[v]
        if value.role == BATCH:
            for d, name in enumerate(dim_names(value)[: len(value.shape)]):
                dims[int(folded.value_class[v]), d] = name
    labels: list[dict[int, str]] = [{} for _ in range(folded.num_classes)]
    for c, o in enumerate(folded.representatives):
        for f, factor in enumerate(graph.kinds[graph.ops[o].kind].rule.factors):
            if factor.combiner == SHIFT:
                labels[c][f] = STAGE
    sweeps = [folded.representatives, folded.representatives[::-1]] * 2
    for sweep in sweeps:
        for o in sweep:
            op = graph.ops[o]
            rule = graph.kinds[op.kind].rule
            named = labels[folded.op_class[o]]
            tensors = list(zip(op.inputs, rule.operands)) + list(zip(op.outputs, rule.results))
            spots = [
                ((int(folded.value_class[v]), d), factors[0])
                for v, layout in tensors
                if v >= 0
                for d, factors in enumerate(layout)
                if factors
            ]
            for spot, factor in spots:
                if spot in dims:
                    named.setdefault(factor, dims[spot])
            for spot, factor in spots:
                if factor in named:
                    dims.setdefault(spot, named[factor])
    for c, o in enumerate(folded.representatives):
        factors = graph.kinds[graph.ops[o].kind].rule.factors
        for f, factor in enumerate(factors):
            if factor.kind == REDUCE:
                labels[c].setdefault(f, CONTRACTION)
    return labels
