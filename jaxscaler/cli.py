"""The command line: `jaxscaler plan | compare | verify | calibrate | estimate | show | solve`.

Results go to stdout, progress and errors to stderr. Exit status: 0 done; 2 bad usage or input; 3 no
plan or choice is feasible; 1 any other error. A command's module is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

import jaxscaler
from jaxscaler.errors import (
    ClusterError,
    ConfigError,
    InfeasibleError,
    JaxscalerError,
    PlanError,
    SolveError,
)
from jaxscaler.target import BAD_INPUT, DONE, FAILED, INFEASIBLE, INTERRUPTED, UsageError

# Its help, and the module whose `add_arguments(command, name)` says what it takes and what runs.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "plan": ("plan a train step; no device of it is needed", "commands"),
    "verify": (
        "compile a planned step with a cluster's own compiler; none of it is needed",
        "commands",
    ),
    "calibrate": (
        "measure the devices present, for --profile; in each process of several",
        "calibrate",
    ),
    "estimate": (
        "what it takes to train or serve a transformer: devices, time, price",
        "estimate.command",
    ),
    "compare": ("well-known plans beside the searched one", "commands"),
    "show": ("print a saved plan", "commands"),
    "solve": ("solve a strategy problem (IOPDDL JSON)", "commands"),
}
STATUS: dict[type[Exception], int] = {  # by class; any other JaxscalerError is FAILED
    UsageError: BAD_INPUT,
    ClusterError: BAD_INPUT,
    ConfigError: BAD_INPUT,
    PlanError: BAD_INPUT,
    SolveError: BAD_INPUT,
    InfeasibleError: INFEASIBLE,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command (default: of `sys.argv`); its exit status. Errors are one message on stderr."""
    gc.set_threshold(100_000)  # tracing makes many objects that stay: seldom look through them
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = _parser(argv).parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except (UsageError, JaxscalerError) as error:
        print(f"jaxscaler: error: {error}", file=sys.stderr)
        return STATUS.get(type(error), FAILED)
    except KeyboardInterrupt:
        print("jaxscaler: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


# -- what may be typed -----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """With the arguments of the command that is asked for."""
    parser = _Parser(prog="jaxscaler", description="Plan how a JAX train step runs on a cluster.")
    parser.add_argument("--version", action="version", version=jaxscaler.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, (said, module) in COMMANDS.items():
        command = commands.add_parser(name, help=said)
        if name == asked:
            import_module(f"jaxscaler.{module}").add_arguments(command, name)
    return parser
