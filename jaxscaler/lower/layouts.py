"""What lowering needs of a plan: a spec by position. Plain data, no JAX.

A `Spec` has one entry per dim: the mesh axes that cut it, major first; () leaves it whole.
A constraint is a short tuple of specs put on a value one after another (a storage layout, then the
compute layout, is an all-gather the compiler can not move before the cast that precedes it).
"""

from __future__ import annotations

from dataclasses import dataclass, field

Spec = tuple[tuple[str, ...], ...]
Constraint = tuple[Spec, ...]
Key = tuple[int, ...]  # graph.ir.Op.key


@dataclass(frozen=True)
class Layouts:
    """Specs of a whole step on a mesh with `axes` ((name, size), major first).

    `inputs`, `outputs`: storage layout per flat argument and result (None: leave to the compiler).
    `results[key][r]`: constraint on result r of equation `key`, where it is made.
    `operands[key][i]`: constraint on operand i of equation `key`, for this use only; equal
    constraints on one value are emitted once.
    `kernels[key]`: specs of the operands and results of an equation that every device runs alone.
    `body_inputs[key + (sub,)][i]` / `body_outputs[...]`: on invar / outvar i of a sub-jaxpr.
    """

    axes: tuple[tuple[str, int], ...]
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]
    results: dict[Key, dict[int, Constraint]] = field(default_factory=dict)
    operands: dict[Key, dict[int, Constraint]] = field(default_factory=dict)
    body_inputs: dict[Key, dict[int, Constraint]] = field(default_factory=dict)
    body_outputs: dict[Key, dict[int, Constraint]] = field(default_factory=dict)
    kernels: dict[Key, tuple[tuple[Spec, ...], tuple[Spec, ...]]] = field(default_factory=dict)
