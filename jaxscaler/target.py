"""What commands share: what is named on the command line as objects (a cluster, a setting, the
workload of MODULE:FUNCTION), exit statuses, and how far a command is."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxscaler.cluster.cluster import Cluster

Report = Callable[[str, str], None]  # (phase, detail)
DONE, FAILED, BAD_INPUT, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130  # exit statuses
WORDS = {"true": True, "false": False, "none": None}


class UsageError(Exception):
    """What was typed, or a file that it names, can not be used."""


def cluster_of(text: str) -> Cluster:
    """The cluster of --cluster: h100:8x4 or the like, or a file NAME.toml."""
    if not text.endswith(".toml"):
        return Cluster.parse(text)
    try:
        return Cluster.load(text)
    except OSError as error:
        raise UsageError(f"{text}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{text}: not text: {error}") from error


def traceable(args: argparse.Namespace, report: Report) -> tuple[Any, tuple]:
    """(the workload that is named, its batch as arguments of the step)."""
    import jax

    if not os.environ.get("JAX_PLATFORMS"):
        # Only abstract values are planned with: leave the accelerators of this host alone.
        jax.config.update("jax_platforms", "cpu")
    given = {key: getattr(args, key) for key in ("size", "batch", "seq")}
    settings = [*((k, v) for k, v in given.items() if v is not None), *args.settings]
    report("trace", args.target)
    work = _workload(args.target, settings)
    return work, work.batch if isinstance(work.batch, tuple) else (work.batch,)


def _workload(target: str, settings: Sequence[tuple[str, Any]]) -> Any:
    """Call the target. UsageError if there is none, or it does not take these settings."""
    function = _function(target)
    given = dict(settings)
    if len(given) < len(settings):
        names = [key for key, _ in settings]
        twice = next(key for key in names if names.count(key) > 1)
        raise UsageError(f"{twice} is given more than once")
    parameters = inspect.signature(function).parameters
    kinds = {p.kind for p in parameters.values()}
    unknown = sorted(given.keys() - parameters.keys())
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise UsageError(
            f"{target} takes no {', '.join(unknown)}; it takes {', '.join(parameters) or 'nothing'}"
        )
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise UsageError(f"{target}: {error}; give it with --set NAME=VALUE") from None
    try:
        work = function(**given)
    except ValueError as error:
        raise UsageError(f"{target}: {error}") from error
    lacking = [name for name in ("step", "state", "batch") if not hasattr(work, name)]
    if lacking:
        raise UsageError(
            f"{target} returned a {type(work).__name__} without {', '.join(lacking)}; "
            "a workload has step, state and batch"
        )
    return work


def _function(target: str) -> Callable[..., Any]:
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{target!r} is not of the form MODULE:FUNCTION")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"can not import {module_name}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        close = difflib.get_close_matches(name, functions, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(functions)}"
        raise UsageError(f"{module_name} has no function {name!r}; {hint}")
    return function


def setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE; VALUE is a Python literal, true, false or none, else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    if value in WORDS:
        return key, WORDS[value]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


@contextmanager
def progress(quiet: bool) -> Iterator[Report]:
    """Reports on stderr: a line that changes in place on a terminal, else a line each."""
    console = Console(stderr=True, highlight=False, markup=False)
    if quiet:
        yield lambda phase, detail: None
    elif console.is_terminal:
        with console.status("") as status:
            yield lambda phase, detail: status.update(Text(f"{phase}: {detail}"))
    else:
        start = time.perf_counter()

        def line(phase: str, detail: str) -> None:
            spent = time.perf_counter() - start
            print(f"{spent:7.1f} s  {phase}: {detail}", file=sys.stderr, flush=True)

        yield line
