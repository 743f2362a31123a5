"""Read and write strategy problems in the JSON format of the IOPDDL contest (ASPLOS 2025).

{"problem": {"name", "nodes": {"intervals": [[lo, hi], …], "costs": [[…], …], "usages": [[…], …]},
"edges": {"nodes": [[i, j], …], "costs": [[row-major k_i * k_j], …]}, "usage_limit"}}. An empty
interval takes no memory; a cost of 10**18 forbids. Arrays of numbers are scanned straight into
int64, with no Python object per number.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from numba import njit

from jaxscaler.errors import SolveError
from jaxscaler.solve.build import validate
from jaxscaler.solve.problem import StrategyProblem

Lists = tuple[np.ndarray, np.ndarray]  # (ptr, values): list n is values[ptr[n]:ptr[n + 1]]

_FAULTS = {
    1: "expected a list of lists of whole numbers",
    2: "a number is not whole or does not fit 64 bits",
    3: "the file ends too early",
}
_SPACE = b" \t\r\n"


def read_problem(path: str | Path) -> StrategyProblem:
    """The problem in a .json or .json.gz file.

    SolveError names the file, the place and the fault.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise SolveError(f"{path}: cannot be read: {error}") from error
    try:
        fields, _ = _value(data, np.frombuffer(data, np.uint8), 0)
        return _problem(fields, path.name)
    except SolveError as error:
        raise SolveError(f"{path}: {error}") from None


def write_problem(problem: StrategyProblem, path: str | Path) -> None:
    """Write the problem; gzipped when the name ends in .gz.

    The format has one usage entry per node: a node with several is followed by helper nodes that
    carry the others, tied to it by an edge of 0 on the diagonal and 10**18 elsewhere. Without a
    usage limit the intervals are written empty.
    """
    k = np.diff(problem.node_ptr)
    costs = _lists(problem.node_ptr, problem.node_costs)
    intervals = [[0, 0] for _ in costs]
    usages = [[0] * len(row) for row in costs]
    edge_nodes = problem.edge_nodes.tolist()
    edge_costs = _lists(problem.edge_ptr, problem.edge_costs)
    taken = np.zeros(problem.num_nodes, bool)
    entries = zip(
        problem.usage_node.tolist(),
        problem.usage_lo.tolist(),
        problem.usage_hi.tolist(),
        _lists(problem.usage_ptr, problem.usages),
        strict=True,
    )
    for node, lo, hi, row in entries:
        if problem.usage_limit is None or lo == hi:
            continue
        if taken[node]:
            edge_nodes.append([node, len(costs)])
            table = np.where(np.eye(k[node], dtype=bool), 0, 10**18)
            edge_costs.append(table.ravel().tolist())
            costs.append([0] * int(k[node]))
            intervals.append([lo, hi])
            usages.append(row)
        else:
            intervals[node], usages[node] = [lo, hi], row
        taken[node] = True
    limit = 0 if problem.usage_limit is None else problem.usage_limit
    fields = {
        "name": problem.name,
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": edge_nodes, "costs": edge_costs},
        "usage_limit": limit,
    }
    data = json.dumps({"problem": fields}, separators=(",", ":")).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _lists(ptr: np.ndarray, values: np.ndarray) -> list[list[int]]:
    flat = values.tolist()
    ends = ptr.tolist()
    return [flat[a:b] for a, b in pairwise(ends)]


def _problem(fields: object, file_name: str) -> StrategyProblem:
    def part(holder: object, key: str, kind: type | tuple[type, ...], where: str):
        if not isinstance(holder, dict) or key not in holder:
            raise SolveError(f"{where} has no {key!r}")
        if not isinstance(holder[key], kind):
            raise SolveError(f"{where}[{key!r}] is not of the expected kind")
        return holder[key]

    body = part(fields, "problem", dict, "the file")
    nodes = part(body, "nodes", dict, "problem")
    edges = part(body, "edges", dict, "problem")
    intervals = _pairs(part(nodes, "intervals", tuple, "nodes"), "nodes.intervals")
    node_ptr, costs = part(nodes, "costs", tuple, "nodes")
    usage_ptr, usages = part(nodes, "usages", tuple, "nodes")
    edge_nodes = _pairs(part(edges, "nodes", tuple, "edges"), "edges.nodes")
    edge_ptr, edge_costs = part(edges, "costs", tuple, "edges")
    n, e = len(node_ptr) - 1, len(edge_ptr) - 1
    if len(intervals) != n or len(usage_ptr) - 1 != n:
        raise SolveError(
            f"nodes: {n} lists of costs, {len(intervals)} intervals and {len(usage_ptr) - 1} lists "
            "of usages; there must be as many of each"
        )
    if len(edge_nodes) != e:
        raise SolveError(f"edges: {len(edge_nodes)} pairs of nodes but {e} lists of costs")
    problem = StrategyProblem(
        name=str(body.get("name", file_name)),
        node_ptr=node_ptr,
        node_costs=costs,
        edge_nodes=edge_nodes,
        edge_ptr=edge_ptr,
        edge_costs=edge_costs,
        usage_node=np.arange(n, dtype=np.int64),
        usage_lo=intervals[:, 0].copy(),
        usage_hi=intervals[:, 1].copy(),
        usage_ptr=usage_ptr,
        usages=usages,
        usage_limit=part(body, "usage_limit", int, "problem"),
    )
    validate(problem)
    return problem


def _pairs(lists: Lists, where: str) -> np.ndarray:
    ptr, values = lists
    wrong = np.flatnonzero(np.diff(ptr) != 2)
    if len(wrong):
        raise SolveError(f"{where}[{wrong[0]}] is not a pair")
    return values.reshape(-1, 2)


def _value(data: bytes, array: np.ndarray, at: int) -> tuple[object, int]:
    """(value, position after it): objects as dicts, lists of lists of numbers as `Lists`."""
    at = _skip(data, at)
    head = data[at : at + 1]
    if head == b"[":
        ptr, values, at, fault = _scan(array, at)
        if fault:
            raise SolveError(f"byte {at}: {_FAULTS[fault]}")
        return (ptr, values), at
    if head != b"{":
        end = at + 1
        if head == b'"':
            while end < len(data) and data[end] != ord('"'):
                end += 2 if data[end] == ord("\\") else 1
            end += 1
        else:
            while end < len(data) and data[end] not in b",}] \t\r\n":
                end += 1
        try:
            return json.loads(data[at:end]), end
        except ValueError:
            raise SolveError(f"byte {at}: not JSON") from None
    fields: dict[str, object] = {}
    at = _skip(data, at + 1)
    while data[at : at + 1] != b"}":
        key, at = _value(data, array, at)
        at = _skip(data, at)
        if not isinstance(key, str) or data[at : at + 1] != b":":
            raise SolveError(f"byte {at}: expected a name and ':'")
        fields[key], at = _value(data, array, at + 1)
        at = _skip(data, at)
        if data[at : at + 1] == b",":
            at = _skip(data, at + 1)
        elif data[at : at + 1] != b"}":
            raise SolveError(f"byte {at}: expected ',' or '}}'")
    return fields, at + 1


def _skip(data: bytes, at: int) -> int:
    while at < len(data) and data[at] in _SPACE:
        at += 1
    return at


@njit(cache=True)
def _scan(text, at):
    """Scan "[[…], …]" from text[at]: (ptr, values, position after it or of the fault, fault)."""
    most, depth, n = 1, 0, at
    while n < len(text):  # count first, so that the arrays are of the right size
        c = text[n]
        if c == 44:
            most += 1
        elif c == 91:
            depth += 1
        elif c == 93:
            depth -= 1
            if depth == 0:
                break
        n += 1
    values, ptr = np.empty(most, np.int64), np.zeros(most + 1, np.int64)
    filled, lists, depth = 0, 0, 0
    wanted = False  # after a comma: something must follow
    ready = True  # something may stand here (not right after a value)
    while at < len(text):
        c = text[at]
        if c == 32 or c == 9 or c == 10 or c == 13:
            at += 1
        elif c == 91:
            if depth == 2 or not ready:
                return ptr, values, at, 1
            depth += 1
            wanted = False
            at += 1
        elif c == 93:
            if wanted:
                return ptr, values, at, 1
            if depth == 2:
                lists += 1
                ptr[lists] = filled
            depth -= 1
            ready = False
            at += 1
            if depth == 0:
                return ptr[: lists + 1].copy(), values[:filled].copy(), at, 0
        elif c == 44:
            if ready:
                return ptr, values, at, 1
            ready = wanted = True
            at += 1
        elif depth == 2 and ready and (c == 45 or 48 <= c <= 57):
            start, sign, number = at, 1, np.int64(0)
            if c == 45:
                sign = -1
                at += 1
            first = at
            while at < len(text) and 48 <= text[at] <= 57:
                number = number * 10 + (np.int64(text[at]) - 48)
                at += 1
            follows = text[at] if at < len(text) else 44
            if at == first or (at - first > 18 and not (number == 10**18 and at - first == 19)):
                return ptr, values, start, 2
            if follows == 46 or follows == 69 or follows == 101:
                return ptr, values, start, 2
            values[filled] = sign * number
            filled += 1
            ready = wanted = False
        else:
            return ptr, values, at, 1
    return ptr, values, at, 3
