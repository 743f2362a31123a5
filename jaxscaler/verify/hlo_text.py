"""Compiled HLO as text: computations, instructions, types, source lines, runs of loops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from jaxscaler.errors import PlanError
from jaxscaler.verify import normal_form as nf


class Instruction(NamedTuple):
    """`attributes`: what follows the operands; of a constant, its value in brackets."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


_HEAD = re.compile(r"^(ENTRY )?%?(?!HloModule)([\w.\-]+) (?:\(.*-> .*)?\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"([\w.\-]+)\s*$")
_LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_INTEGER = re.compile(r"\((\d+)\)")


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(instructions by computation, name of the entry)."""
    found: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if body is None or not line.startswith((" ", "\t", "}")):
            head = _HEAD.match(line)
            if head:
                body = found.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            body = None
        else:
            instruction = _instruction(line)
            if instruction:
                body.append(instruction)
    if not entry:
        raise PlanError("the text is no compiled HLO module: it has no ENTRY computation")
    return found, entry


def _instruction(line: str) -> Instruction | None:
    name = _NAME.match(line)
    if not name:
        return None
    start = name.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    if opcode[1] == "constant":
        value = line[opcode.end() - 1 : opcode.end() + 19]
        return Instruction(name[2], line[start:end], "constant", (), value, bool(name[1]))
    close = _closing(line, opcode.end() - 1)
    operands = tuple(
        m[1] for part in _split(line[opcode.end() : close - 1]) if (m := _OPERAND.search(part))
    )
    return Instruction(name[2], line[start:end], opcode[1], operands, line[close:], bool(name[1]))


def _closing(line: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(line)):
        if line[at] in "({[":
            depth += 1
        elif line[at] in ")}]":
            depth -= 1
            if not depth:
                return at + 1
    raise PlanError(f"the HLO text is cut off in the line {line.strip()[:80]!r}")


def _split(text: str) -> Iterator[str]:
    """The parts of `text` between commas that stand in no bracket."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and not depth:
            yield text[start:at]
            start = at + 1
    if text[start:].strip():
        yield text[start:]


Array = tuple[str, int, int]  # dtype, elements, bytes


def arrays(type_: str) -> Any:
    """The array that a type is, or the list of what is in a tuple."""
    type_ = re.sub(r"/\*.*?\*/", "", type_).strip()
    if type_.startswith("("):
        return [arrays(part) for part in _split(type_[1:-1])]
    leaf = _LEAF.match(type_)
    if not leaf:
        return ("", 0, 0)
    dtype, bits = nf.element(leaf[1])
    elements = prod(int(d.strip().lstrip("<=")) for d in leaf[2].split(",") if d.strip())
    return (dtype, elements, -(-elements * bits // 8))


def sources(text: str) -> dict[str, str]:
    """stack_frame_id -> `file:line (function)`, from the tables at the head of a module."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif line.endswith("{"):
            break
        elif row := re.match(r"(\d+) (.*)", line):
            table[row[1]] = row[2]
    if len(tables) < 4:
        return {}
    lines = {}
    for number, place in tables["FileLocations"].items():
        at = dict(re.findall(r"(\w+)=(\d+)", place))
        file = tables["FileNames"].get(at.get("file_name_id", ""), '""').strip('"')
        function = tables["FunctionNames"].get(at.get("function_name_id", ""), '""').strip('"')
        lines[number] = f"{file}:{at.get('line', '')} ({function})"
    frames = tables["StackFrames"].items()
    return {n: lines.get(m[1], "") for n, f in frames if (m := re.search(r"n_id=(\d+)", f))}


# --- what an instruction says of others -------------------------------------------------------


def called(op: Instruction) -> str:
    """The computation that a fusion or call runs, or "" if there is none."""
    found = _CALLED.search(op.attributes)
    return found[1] if found else ""


def branches(op: Instruction) -> list[str]:
    """The computations of a conditional."""
    names = [n for m in _BRANCHES.findall(op.attributes) for n in ",".join(m).split(",")]
    return [name for name in (n.strip(" %") for n in names) if name]


def loop(op: Instruction) -> tuple[str, str]:
    """(condition, body) of a while: names of computations."""
    condition, body = _CONDITION.search(op.attributes), _BODY.search(op.attributes)
    return (condition[1] if condition else "", body[1] if body else "")


def scope(op: Instruction) -> str:
    """The path of the op that an instruction comes from, in JAX's name stack."""
    name = _OP_NAME.search(op.attributes)
    return re.sub(r"\\(.)", r"\1", name[1]) if name else ""


def trip_count(
    op: Instruction,
    home: str,
    computations: Mapping[str, list[Instruction]],
    trip_counts: Mapping[str, int],
) -> int | None:
    """Runs of the while `op` in the computation `home`: as said by its path in `trip_counts`, or
    in the text, or as its counter goes up from a constant to a constant; None if unknown."""
    if found := trip_counts.get(scope(op)):
        return found
    if known := _TRIPS.search(op.attributes):
        return int(known[1])
    condition, body = (_by_name(computations.get(name, ())) for name in loop(op))
    test = next((i for i in condition.values() if i.root), None)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit = condition.get(test.operands[0]), _integer(condition, test.operands[1])
    at = _INDEX.search(counter.attributes) if counter else None
    ends = next((i for i in body.values() if i.root and i.opcode == "tuple"), None)
    around = _by_name(computations.get(home, ()))
    starts = around.get(op.operands[0]) if op.operands else None
    if limit is None or at is None or ends is None or starts is None or starts.opcode != "tuple":
        return None
    index = int(at[1])
    start, step = _integer(around, starts.operands[index]), _step(body, ends.operands[index], index)
    return None if start is None or not step else max(0, -(-(limit - start) // step))


def _by_name(computation: Iterable[Instruction]) -> dict[str, Instruction]:
    return {i.name: i for i in computation}


def _integer(values: Mapping[str, Instruction], name: str) -> int | None:
    """The value of a constant, through copies."""
    op = values.get(name)
    while op is not None and op.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        op = values.get(op.operands[0])
    value = _INTEGER.match(op.attributes) if op is not None and op.opcode == "constant" else None
    return int(value[1]) if value else None


def _step(body: Mapping[str, Instruction], name: str, index: int) -> int | None:
    """By how much a loop's body raises element `index` of what it carries."""
    total, op = 0, body.get(name)
    while op is not None and op.opcode == "add":
        by = [_integer(body, operand) for operand in op.operands]
        if by.count(None) != 1:
            return None
        total += next(n for n in by if n is not None)
        op = body.get(op.operands[by.index(None)])
    found = _INDEX.search(op.attributes) if op and op.opcode == "get-tuple-element" else None
    return total if found and int(found[1]) == index else None
