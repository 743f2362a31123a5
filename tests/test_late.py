"""When weight gradients run: what each collective hides, in programs made by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from jaxscaler.cost.schedule import (
    BESIDE,
    GATHER,
    OF_STATE,
    OPEN,
    REDUCTION,
    SMALL,
    schedule,
)
from jaxscaler.graph.ir import BACKWARD, Kind, Op, OpGraph, Rule, Value

KINDS = (GATHER, REDUCTION, "dot_general")
DOT = KINDS.index("dot_general")


class Program:
    """A backward pass, op by op: products on its way, their collectives, and late products."""

    def __init__(self, size=8):
        self.size = size
        self.values, self.ops, self.inputs = [], [], []
        self.flow = self.argument()

    def value(self, size=None):
        self.values.append(Value(len(self.values), (size or self.size,), "bfloat16", ""))
        return len(self.values) - 1

    def argument(self, size=None):
        self.inputs.append(self.value(size))
        return self.inputs[-1]

    def op(self, kind, *reads, size=None):
        made = self.value(size)
        self.ops.append(Op(len(self.ops), (), kind, reads, (made,), BACKWARD, "", ""))
        return made

    def product(self):
        self.flow = self.op(DOT, self.flow, self.argument())

    def reduction(self):
        self.flow = self.op(KINDS.index(REDUCTION), self.flow)

    def product_of_a_gather(self):
        state = self.op(KINDS.index(GATHER), self.argument(), size=SMALL + 1)
        self.flow = self.op(DOT, self.flow, state)

    def late(self, read=None):
        """A product that nothing of the backward pass reads; its op."""
        self.op(DOT, self.argument(), self.argument() if read is None else read)
        return len(self.ops) - 1

    def placed(self):
        self.product()  # the last one: what comes before it is on its way
        none = Rule((), ((),), ((),))
        kinds = tuple(Kind(name, (), (), (), (), none, 0.0) for name in KINDS)
        graph = OpGraph(tuple(self.ops), tuple(self.values), kinds, tuple(self.inputs), (), (), ())
        heavy = [name == "dot_general" for name in KINDS]
        found = schedule(graph, [False] * 3, heavy, [()] * len(self.ops), BESIDE)
        return found.place


@settings(max_examples=60, deadline=None)
@given(hs.lists(hs.tuples(hs.integers(0, 3), hs.integers(0, 3)), min_size=1, max_size=12))
def test_a_collective_hides_one_product_the_last_ones_first(layers):
    """As late as can be: from the end, each product takes the last collective that is free."""
    program, late, collectives = Program(), [], []
    for products, reductions in layers:
        program.product()
        late += [program.late() for _ in range(products)]
        for _ in range(reductions):
            collectives.append(len(program.ops))
            program.reduction()
    (end,) = (op.id for op in program.ops if op.outputs == (program.flow,))  # of the backward pass
    place = program.placed()
    free = collectives[::-1]
    for op in reversed(late):
        if free and free[0] > op:
            assert place[op] == free.pop(0)
        else:  # none is left: after all else, or in order where there is nothing to hide
            assert place[op] == (max(op, end) if collectives else op)


def test_a_deep_stack_falls_behind_by_its_spare_collectives():
    """Two products and five collectives a layer: those of 20 layers run in the last eight."""
    program, late, starts = Program(), [], []
    for _ in range(20):
        starts.append(len(program.ops))
        program.product()
        late += [program.late(), program.late()]
        for _ in range(5):
            program.reduction()
    place = program.placed()
    assert starts[12] <= min(place[op] for op in late) < starts[13]
    assert [place[op] for op in late] == sorted(place[op] for op in late)


def test_no_more_wait_beside_gathers_of_state_than_are_open():
    """One product and one gather a layer, which would hide three: the lag does not grow."""
    program, late, starts = Program(), [], []
    for _ in range(60):
        starts.append(len(program.ops))
        program.product_of_a_gather()
        late.append(program.late())
    place = program.placed()
    lag = [
        sum(late[n] < start <= place[late[n]] for start in starts) for n in range(len(late) // 2)
    ]
    assert max(lag) <= -(-OPEN // OF_STATE)
    assert min(lag) > 1


@pytest.mark.parametrize(("size", "together"), [(8, True), (1 << 25, False)])
def test_products_of_one_operand_run_as_one_unless_all_are_large(size, together):
    program = Program(size)
    program.product()
    read = program.argument()
    first, second = program.late(read), program.late(read)
    for _ in range(3):
        program.reduction()
    place = program.placed()
    assert (place[first] == place[second]) == together
