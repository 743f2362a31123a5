"""Programs as YAML, in the words of Python: `f(a, b)` is `f: [a, b]`, `f(k=v)` is `f: {k: v}`.

    - hole: [tp, 1, 8]
    - op_trans: [ops: {phase: [forward, backward]}, Split: batch, ALL]
    - op_assign: [{op_trans: [values: {role: parameter}, Split: ANY, tp]}, device]
    - forbid: {op_trans: [ops: h_*/attn, Split: sequence]}
    - tp * 2 <= 8

A list of lines; a hole comes before the lines that it stands in. What a call has by default is left
out, and a call with nothing in it is its name alone (`Replicate`).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from jaxscaler import program as p
from jaxscaler.errors import ConstraintError
from jaxscaler.holes import Hole, Relation, hole
from jaxscaler.program import Line, Order, Statement

SUBJECTS: Mapping[str, Callable[..., p.Subject]] = {
    "ops": p.ops,
    "region": p.region,
    "values": p.values,
}
ALGOS: Mapping[str, Callable[..., p.Algo]] = {
    "Split": p.Split,
    "Replicate": p.Replicate,
    "Cast": p.Cast,
    "Kernel": p.Kernel,
}
LINES = ("hole", "op_trans", "op_assign", "op_order", "forbid", "if_possible")
_Names = Mapping[str, Hole]


def read_program(path: str | Path) -> tuple[Statement, ...]:
    """The lines of a YAML file; their sources are its lines. ConstraintError, with the line."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConstraintError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConstraintError(f"{path}: not text") from error
    return parse_program(text, str(path))


def parse_program(text: str, name: str = "program") -> tuple[Statement, ...]:
    """The same of a text; `name` is what its lines' sources say."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return ()
        if not isinstance(root, yaml.SequenceNode):
            raise ConstraintError(f"{name}: a program is a list of lines, each begun with '- '")
        _no_twins(root)
        data = [(n.start_mark.line + 1, loader.construct_object(n, deep=True)) for n in root.value]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConstraintError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from error
    except _Twin as error:
        raise ConstraintError(f"{name}:{error}") from error
    out: list[Statement] = []
    holes: dict[str, Hole] = {}
    for number, item in data:
        source = f"{name}:{number}"
        try:
            made = _statement(item, holes)
        except ConstraintError as error:
            raise ConstraintError(f"{source}: {error}") from error
        if isinstance(made, Hole):
            if made.name in holes:
                raise ConstraintError(f"{source}: hole {made.name!r} is there already")
            holes[made.name] = made
        else:
            out.append(replace(made, source=source))
    used = {h.name for line in out for h in p.holes_of(line)}
    if idle := [name for name in holes if name not in used]:
        raise ConstraintError(f"{name}: hole {idle[0]!r} stands in no line")
    return tuple(out)


def dump_program(program: Iterable[Statement]) -> str:
    """The YAML of a program; reading it gives the same lines, but for their sources."""
    lines: list[Any] = []
    known: set[str] = set()
    for line in program:
        for h in p.holes_of(line):
            if h.name not in known:
                known.add(h.name)
                lines.append({"hole": [h.name, h.low, h.high]})
        lines.append(line.text(names=True) if isinstance(line, Relation) else _data(line))
    if not lines:
        return "[]\n"
    flow = (
        yaml.safe_dump(line, default_flow_style=True, width=10**6, sort_keys=False)
        .removesuffix("\n")
        .removesuffix("\n...")
        for line in lines
    )
    return "".join(f"- {_open(text)}\n" for text in flow)


def as_program(constraints: Any) -> tuple[Statement, ...]:
    """Lines as they may be given: one, several, or the path of a YAML file."""
    if isinstance(constraints, str | Path):
        return read_program(constraints)
    if isinstance(constraints, Statement):
        return (constraints,)
    found = tuple(constraints)
    for line in found:
        if not isinstance(line, Statement):
            hint = ": use op_trans(subject, algo, num)" if isinstance(line, p.Subject) else ""
            shown = line if hint else repr(line)
            raise ConstraintError(f"{shown} is no line of a program{hint}")
    return found


# -- data -> lines ---------------------------------------------------------------------------------


def _statement(item: Any, holes: _Names) -> Statement | Hole:
    if isinstance(item, str):
        return _relation(item, holes)
    word, value = _call(item, LINES)
    if word == "hole":
        return hole(*_list(word, value, 3, 3))
    if word in ("forbid", "if_possible"):
        line = _statement(value, holes)
        if not isinstance(line, Line):
            raise ConstraintError(f"{word}: {value!r} is no op_trans or op_assign line")
        return p.forbid(line) if word == "forbid" else p.if_possible(line)
    if word == "op_trans":
        subject, algo, *num = _list(word, value, 2, 3)
        return p.op_trans(_subject(subject), _algo(algo), *(_num(n, holes) for n in num))
    first, second = _list(word, value, 2, 2)
    if word == "op_order":
        named = (_task(x) or _subject(x) for x in (first, second))
        return p.op_order(*named)  # type: ignore[arg-type]
    inner = isinstance(first, dict) and next(iter(first), None) == "op_trans"
    subject = _statement(first, holes) if inner else _subject(first)
    return p.op_assign(subject, _place(second))  # type: ignore[arg-type]


def _task(item: Any) -> Any:
    """`{task: [stage, micro, phase]}`; None for anything else."""
    if isinstance(item, dict) and list(item) == ["task"]:
        return tuple(_list("task", item["task"], 3, 3))
    return None


def _subject(item: Any) -> p.Subject:
    word, value = _call(item, SUBJECTS)
    if value is None:
        return SUBJECTS[word]()
    if not isinstance(value, dict):
        return SUBJECTS[word](value)
    known = p.Values if word == "values" else p.Ops
    given = {
        k: tuple(v) if isinstance(v, list) else _subject(v) if k == "to" else v
        for k, v in value.items()
    }
    for k in given:
        if k not in vars(known()):
            raise ConstraintError(f"{word} has no {k!r}{_near(k, vars(known()))}")
    return SUBJECTS[word](**given)


def _algo(item: Any) -> p.Algo:
    word, value = _call(item, ALGOS)
    if word == "Replicate":
        if value is not None:
            raise ConstraintError(f"Replicate takes nothing, not {value!r}")
        return p.Replicate()
    if value is None and word != "Split":
        raise ConstraintError(f"{word} needs a name")
    given = () if value is None else (tuple(value) if isinstance(value, list) else value,)
    return ALGOS[word](*given)


def _num(item: Any, holes: _Names) -> Any:
    if isinstance(item, list):
        return tuple(item)
    if isinstance(item, str) and item != p.ALL:
        if item not in holes:
            raise ConstraintError(f"no hole {item!r} before this line{_near(item, holes)}")
        return holes[item]
    return item


def _place(item: Any) -> Any:
    if isinstance(item, dict):
        _, value = _call(item, ("Stage",))
        if not isinstance(value, int):
            raise ConstraintError(f"Stage: {value!r} is no number")
        return p.Stage(value)
    return tuple(item) if isinstance(item, list) else item


def _relation(text: str, holes: _Names) -> Relation:
    try:
        made = _arithmetic(ast.parse(text.strip(), mode="eval").body, holes)
    except SyntaxError as error:
        raise ConstraintError(f"{text!r} is no line and no relation of holes") from error
    if not isinstance(made, Relation):
        raise ConstraintError(f"{text!r} is no line and no relation of holes, as tp * 2 <= dp")
    return made


def _arithmetic(node: ast.expr, holes: _Names) -> Any:
    """Holes, whole numbers, + - * and one comparison; nothing else is evaluated."""
    match node:
        case ast.Constant(value=int() as n) if not isinstance(n, bool):
            return n
        case ast.Name(id=name):
            if name not in holes:
                raise ConstraintError(f"no hole {name!r} before this line{_near(name, holes)}")
            return holes[name]
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return -_arithmetic(x, holes)
        case ast.BinOp(left=a, op=ast.Add(), right=b):
            return _arithmetic(a, holes) + _arithmetic(b, holes)
        case ast.BinOp(left=a, op=ast.Sub(), right=b):
            return _arithmetic(a, holes) - _arithmetic(b, holes)
        case ast.BinOp(left=a, op=ast.Mult(), right=b):
            return _arithmetic(a, holes) * _arithmetic(b, holes)
        case ast.Compare(left=a, ops=[ast.LtE()], comparators=[b]):
            return _arithmetic(a, holes) <= _arithmetic(b, holes)
        case ast.Compare(left=a, ops=[ast.GtE()], comparators=[b]):
            return _arithmetic(a, holes) >= _arithmetic(b, holes)
        case ast.Compare(left=a, ops=[ast.Eq()], comparators=[b]):
            return _arithmetic(a, holes) == _arithmetic(b, holes)
    raise ConstraintError(
        f"{ast.unparse(node)!r}: a relation is sums of holes times numbers, with <=, >= or =="
    )


def _call(item: Any, words: Iterable[str]) -> tuple[str, Any]:
    """(word, what it is given) of `word` or `{word: given}`."""
    words = tuple(words)
    if isinstance(item, str):
        word, value = item, None
    elif isinstance(item, dict) and len(item) == 1:
        ((word, value),) = item.items()
    else:
        raise ConstraintError(f"{item!r}: expected one of {', '.join(words)}, and what it is given")
    if word not in words:
        raise ConstraintError(
            f"no {word!r} here: it is one of {', '.join(words)}{_near(word, words)}"
        )
    return word, value


def _list(word: str, value: Any, least: int, most: int) -> list:
    if not isinstance(value, list) or not least <= len(value) <= most:
        count = str(least) if least == most else f"{least} or {most}"
        raise ConstraintError(f"{word} is given a list of {count}, not {value!r}")
    return value


def _near(word: Any, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class _Twin(Exception):
    pass


def _no_twins(node: yaml.Node) -> None:
    """A key that is given twice would silently count once."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise _Twin(f"{key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
            _no_twins(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _no_twins(value)


# -- lines -> data ---------------------------------------------------------------------------------


def _data(line: Line | Order) -> Any:
    if isinstance(line, Order):
        return {"op_order": [_order_data(line.first), _order_data(line.then)]}
    data: Any = _subject_data(line.subject)
    if line.algo is not None:
        num = [] if line.num == p.AT_LEAST_TWO else [_num_data(line.num)]
        data = {"op_trans": [data, _algo_data(line.algo), *num]}
    if line.place is not None:
        place = line.place
        data = {"op_assign": [data, {"Stage": place.index} if isinstance(place, p.Stage)
                              else _plain(place)]}  # fmt: skip
    if line.forbidden:
        data = {"forbid": data}
    return {"if_possible": data} if line.yielding else data


def _order_data(of: Any) -> Any:
    return {"task": list(of)} if isinstance(of, tuple) else _subject_data(of)


def _subject_data(subject: p.Subject) -> Any:
    word, default = type(subject).__name__.lower(), type(subject)()
    given = {
        k: _subject_data(v) if isinstance(v, p.Ops) else _plain(p.short(v))
        for k, v in vars(subject).items()
        if v != getattr(default, k)
    }
    if not given:
        return word
    return {word: given["path"] if list(given) == ["path"] else given}


def _algo_data(algo: p.Algo) -> Any:
    word, given = type(algo).__name__, [_plain(v) for v in vars(algo).values()]
    return {word: given[0]} if given else word


def _num_data(num: Any) -> Any:
    return num.name if isinstance(num, Hole) else _plain(num)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _open(text: str) -> str:
    """A line without its outer braces: `op_trans: [...]` for `{op_trans: [...]}`."""
    return text[1:-1] if text.startswith("{") and text.endswith("}") else text
