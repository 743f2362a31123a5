"""Compile a lowered step for devices that are not there, in a process with its own environment.

The plugins of the TPU and GPU compilers disturb a process that loads them, and take it with them
when they die: a worker loads them, the user's process never does. Whatever becomes of the worker is
a named status of the result.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxscaler import _compat
from jaxscaler.cache import find_cache
from jaxscaler.cluster.cluster import Cluster
from jaxscaler.errors import PlanError
from jaxscaler.verify import module, targets
from jaxscaler.verify.cycles import op_cycles
from jaxscaler.verify.hlo import hlo_collectives
from jaxscaler.verify.normal_form import Collective
from jaxscaler.verify.targets import Target, target_of

# What may become of a compile.
COMPILED = "compiled"
NO_TEXT = "text unavailable"  # compiled; memory is known, collectives and cycles are not
EXTRAPOLATED = "extrapolated"  # from compiles of fewer layers (depth.py)
TOO_BIG = "does not fit"  # the compiler says so, and how many bytes it needs
REFUSED = "compiler error"
EXTRAS_MISSING = "extras missing"
SKEW = "version skew"
TIMED_OUT = "timed out"
WORKER_MEMORY = "worker out of memory"
KILLED = "worker killed"
ABORTED = "compiler aborted"
_LASTING = (COMPILED, NO_TEXT, TOO_BIG, REFUSED)  # the same the next time: kept

WORKER = (sys.executable, "-P", "-m", "jaxscaler.verify.compile")
TIMEOUT = 3600.0  # seconds of one compile
ENTRIES = 64  # compiled programs that are kept; those that were not used for longest go first
_EVERY = 5.0  # seconds between two reports of progress
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # a topology needs no backend
    "TF_CPP_MIN_LOG_LEVEL": "1",  # warnings: the partitioner's remarks are some
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # of the user, for the compiler: they count

Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by kind, as the compiler lays them out; `host`: in the host's memory."""

    argument: int
    output: int
    alias: int  # of arguments and outputs that share buffers
    temp: int
    generated_code: int = 0
    host: int = 0
    peak: int = 0  # the compiler's own word on the fullest moment, 0 where it has none

    @property
    def total(self) -> int:
        """What the device must hold for the step: arguments, outputs and temporaries."""
        return self.argument + self.output - self.alias + self.temp


@dataclass(frozen=True)
class Compiled:
    """What a target's compiler makes of a program, or what kept it from doing so.

    `collectives` in normal form and `cycles` ((op path, cycles a step), most first; TPU alone) are
    None where the compiled text is not to be had. `needs`: bytes that the compiler says it would
    take, at least, of a program that does not fit. `unknown`: what such a compile can not know.
    `text`: the compiled HLO.
    """

    target: Target
    status: str
    detail: str = ""
    memory: Memory | None = None
    needs: float | None = None
    collectives: tuple[Collective, ...] | None = None
    cycles: tuple[tuple[str, int], ...] | None = None
    seconds: float = 0.0
    cached: bool = False
    versions: Mapping[str, str] | None = None
    remarks: tuple[str, ...] = ()  # of the partitioner: tensors that it makes whole to reshard them
    text: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is a program."""
        return self.status in (COMPILED, NO_TEXT, EXTRAPOLATED)

    @property
    def bytes(self) -> float | None:
        """Bytes that the step needs on one device, where the compiler says so."""
        return self.needs if self.memory is None else self.memory.total

    @property
    def unknown(self) -> tuple[str, ...]:
        here = self.target.topology == targets.PRESENT
        texts = targets.UNKNOWN[self.target.platform]
        return tuple(text for text in texts if not (here and text.startswith("autotuning")))


@dataclass(frozen=True)
class Program:
    """A lowered step as plain data: StableHLO bytecode, mesh axes, runs of its loops by path.

    `digest` is of the program without its source lines: an edit that moves them alone costs no new
    compile, and a kept result names the lines of its day.
    """

    code: bytes
    axes: Mapping[str, int]
    trip_counts: Mapping[str, int]
    digest: str

    @staticmethod
    def of(lowered: Any) -> Program:
        """Of a `jax.stages.Lowered`, lowered for the target's platform."""
        code, ir = _compat.module_bytes(lowered), lowered.compiler_ir("stablehlo")
        digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        return Program(code, module.mesh_axes(ir), module.trip_counts(ir), digest)


def compile_for(
    target: str | Cluster | Target,
    program: Any,
    *,
    compiler_options: Mapping[str, Any] = {},
    timeout: float = TIMEOUT,
    cache: bool | str | Path = True,
    progress: Progress | None = None,
    worker: Sequence[str] = WORKER,
) -> Compiled:
    """Compile a program for a target with the target's own compiler; no device is needed.

    `program`: a `jax.stages.Lowered`, lowered for the target's platform (`PlannedStep.lower`), or a
    `Program`. `timeout`: seconds, after which the worker is ended. `cache`: whether, or in which
    folder, results are kept by program, target, options and versions. `worker`: the command that
    does it, given a folder. Raises PlanError for a target that no compiler is known for; all else
    that goes wrong is the result's `status`.
    """
    target = target if isinstance(target, Target) else target_of(target)
    program = program if isinstance(program, Program) else Program.of(program)
    if lacking := targets.missing(target):
        extra = targets.EXTRA[target.platform]
        detail = f"{', '.join(lacking)} not installed: pip install 'jaxscaler[{extra}]'"
        return Compiled(target, EXTRAS_MISSING, detail)
    if skew := targets.skewed(target):
        return Compiled(target, SKEW, f"{skew}: install packages of one version")
    key = _key(target, program, compiler_options)
    kept = find_cache(cache)
    entry = None if kept is None else kept.folder / "compiled" / key
    found = None if entry is None else _load(entry)
    if found is not None:
        return _report(target, program, *found, cached=True)
    with tempfile.TemporaryDirectory(prefix="jaxscaler-compile-") as name:
        folder = Path(name)
        (folder / "program.mlir").write_bytes(program.code)
        job = {
            "platform": target.platform, "topology": target.topology, "devices": target.devices,
            "options": dict(target.options), "compiler_options": dict(compiler_options),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        result = _run([*worker, name], folder, timeout, progress or (lambda phase, detail: None),
                      target)  # fmt: skip
        text = folder / "hlo.txt"
        made = _report(target, program, result, text.read_text() if text.exists() else None)
        if entry is not None and made.status in _LASTING:
            _store(entry, result, made.text)
    return made


# --- the worker's process ---------------------------------------------------------------------


def _run(
    command: Sequence[str], folder: Path, timeout: float, say: Progress, target: Target
) -> dict[str, Any]:
    """The worker's result, or `status` and `detail` of what became of it."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path}
    ends, killed_before = time.monotonic() + timeout, _oom_kills()
    start = time.monotonic()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            while True:
                say("compile", f"for {target.name}, {time.monotonic() - start:.0f} s")
                left = ends - time.monotonic()
                try:
                    status = process.wait(max(0.0, min(_EVERY, left)))
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= ends:
                        detail = f"the compiler was not done after {timeout:g} s"
                        return {"status": TIMED_OUT, "detail": detail}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    result = folder / "result.json"
    log_text = (folder / "log").read_text(errors="replace")
    if status == 0 and result.exists():
        return {**json.loads(result.read_text()), "remarks": _remarks(log_text)}
    return _death(status, log_text, _oom_kills() > killed_before)


def _remarks(log: str) -> list[str]:
    """Reshards for which the partitioner says that it makes the whole tensor on every device."""
    lines = [line for line in log.splitlines() if "full rematerialization" in line]
    said = (_PREFIX.sub("", line) for line in lines)
    return list(dict.fromkeys(text[:400] for text in said))


_PREFIX = re.compile(r"^[IWEF]\d{4}[^\]]*\] ?")
_NO_MEMORY = re.compile(r"MemoryError|std::bad_alloc|Cannot allocate memory|out of memory", re.I)


def _death(status: int, log: str, oom_killed: bool) -> dict[str, str]:
    """What became of a worker that left no result; `status` as `subprocess` gives it."""
    last = "; ".join([line for line in log.splitlines() if line.strip()][-3:])[-600:]
    by = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    if oom_killed or _NO_MEMORY.search(last):
        detail = "the host's memory was not enough to compile; compile elsewhere, or fewer layers"
        return {"status": WORKER_MEMORY, "detail": f"{detail} ({by}) {last}".strip()}
    if -status in (signal.SIGKILL, signal.SIGTERM):
        return {"status": KILLED, "detail": f"{by}: another process ended the worker"}
    return {"status": ABORTED, "detail": f"{by}: {last or 'it said nothing'}"}


def _oom_kills() -> int:
    """Processes that Linux has killed for memory since it started; 0 elsewhere."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


# --- its result -------------------------------------------------------------------------------

_HBM = re.compile(
    r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"
    r"|required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_VERSIONS = re.compile(
    r"version mismatch|incompatible version|unsupported.{0,40}version|PJRT.{0,40}version"
    r"|failed to (?:parse|deserialize).{0,40}portable",
    re.IGNORECASE,
)


def _report(
    target: Target,
    program: Program,
    result: Mapping[str, Any],
    text: str | None,
    cached: bool = False,
) -> Compiled:
    made = Compiled(target, COMPILED, cached=cached, versions=targets.versions(target))
    if "status" in result:
        return replace(made, status=result["status"], detail=result["detail"])
    if "error" in result:
        status, needs = status_of(result["error"])
        return replace(made, status=status, detail=result["error"][:2000], needs=needs)
    remarks = tuple(result.get("remarks", ()))
    made = replace(
        made, memory=Memory(**result["memory"]), seconds=result["seconds"], remarks=remarks,
        text=text,
    )  # fmt: skip
    if text is None:
        return replace(made, status=NO_TEXT, detail=result.get("no_text", ""))
    try:
        merge = target.platform == targets.CPU  # which merges nothing by itself
        moved = hlo_collectives(text, program.axes, program.trip_counts, merge)
    except PlanError as error:
        return replace(made, status=NO_TEXT, detail=str(error))
    cycles = op_cycles(text, program.trip_counts) if target.platform == targets.TPU else None
    return replace(made, collectives=moved, cycles=cycles)


def status_of(message: str) -> tuple[str, float | None]:
    """(status, bytes needed if it says so) of what the compiler raised."""
    if used := _HBM.search(message):
        size, unit = [part for part in used.groups() if part is not None]
        return TOO_BIG, float(size) * _UNITS[unit]
    if "CompileTimeHbmOom" in message or "memory space hbm" in message:
        return TOO_BIG, None
    return (SKEW if _VERSIONS.search(message) else REFUSED), None


# --- kept on disk -----------------------------------------------------------------------------


def _key(target: Target, program: Program, options: Mapping[str, Any]) -> str:
    flags = [os.environ.get(name, "") for name in _FLAGS]
    what = [vars(target), program.digest, dict(options), targets.versions(target), flags]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _load(entry: Path) -> tuple[dict[str, Any], str | None] | None:
    """(result, compiled text) of an earlier compile; None if there is none to be read."""
    try:
        result = json.loads((entry / "result.json").read_text())
        text = entry / "hlo.txt.gz"
        os.utime(entry)
        return result, gzip.decompress(text.read_bytes()).decode() if text.exists() else None
    except (OSError, ValueError, EOFError):
        return None


def _store(entry: Path, result: Mapping[str, Any], text: str | None) -> None:
    """Keep a result, whole or not at all; a folder that can not be written to keeps nothing."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".part-") as name:
            part = Path(name) / "entry"
            part.mkdir()
            (part / "result.json").write_text(json.dumps(result))
            if text is not None:
                (part / "hlo.txt.gz").write_bytes(gzip.compress(text.encode(), 6))
            if not entry.exists():
                part.rename(entry)
        _forget(entry.parent)
    except OSError:
        pass


def _forget(folder: Path) -> None:
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    for path in sorted(entries, key=lambda p: p.stat().st_mtime)[: max(0, len(entries) - ENTRIES)]:
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()
