"""`op_order` on a graph: what program order already keeps, and what data flow forbids."""

from __future__ import annotations

from jaxscaler.errors import ConstraintError
from jaxscaler.graph.ir import CARRY, OpGraph
from jaxscaler.program import Order
from jaxscaler.space.subjects import Subjects


def check_order(order: Order, graph: OpGraph, subjects: Subjects) -> str:
    """What is to be reported of a line that changes nothing.

    Ops that depend on one another run in that order in every plan; so do, in effect, all others:
    one device runs its program in program order, and within one step a plan does not reorder it.
    Raises ConstraintError, naming two ops, where data flow contradicts the line, and where the
    program has it the other way round, since no plan carries out another order.
    """
    said = f"constraint {order} ({order.source})"
    if isinstance(order.first, tuple) or isinstance(order.then, tuple):
        raise ConstraintError(f"{said}: tasks are for micro_batches= (docs/pipelines.md)")
    first, then = subjects.ops(order.first), subjects.ops(order.then)
    if not first or not then:
        return f"{said} matches nothing"
    if first[-1] < then[0]:
        return f"{said} changes nothing: program order is so already"
    early, late = set(first), set(then)
    needs: dict[int, int] = {}  # value -> an op of `then` that it depends on
    for op in graph.ops:
        primitive = graph.kinds[op.kind].primitive
        reads = op.inputs[:1] if primitive == CARRY else op.inputs
        cause = next((needs[v] for v in reads if v in needs), None)
        if cause is not None and op.id in early and cause != op.id:
            raise ConstraintError(
                f"{said}: data flow has it the other way round: {_name(graph, op.id)} needs what "
                f"{_name(graph, cause)} makes; swap the two, or select fewer ops"
            )
        if op.id in late:
            cause = op.id
        if cause is not None:
            needs.update((v, cause) for v in op.outputs if v >= 0)
    wrong = next(o for o in reversed(first) if o >= then[0])
    raise ConstraintError(
        f"{said}: {_name(graph, wrong)} comes after {_name(graph, then[0])} in the program, and no "
        "plan of one program per device reorders ops: leave the line out, or select fewer ops"
    )


def _name(graph: OpGraph, o: int) -> str:
    op = graph.ops[o]
    where = f" ({op.source})" if op.source else ""
    return f"{op.phase}:{op.scope}:{graph.kinds[op.kind].primitive}{where}"
