"""Plans that were searched before, kept as files: a restarted program does not search again.

An entry is found by a hash of all that a plan follows from: the graph of the step, the cluster, the
options of the search, and the versions of what reads them. Entries are plan files (`Plan.save`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxscaler.errors import PlanError
from jaxscaler.graph.ir import OpGraph
from jaxscaler.plan import Plan

VARIABLE = "JAXSCALER_CACHE"  # a folder, or OFF
OFF = "off"
ENTRIES = 256  # that are kept; those that were not used for longest go first


@dataclass(frozen=True)
class Cache:
    """A folder of plans."""

    folder: Path

    def load(self, key: str) -> tuple[Plan | None, str]:
        """(the plan kept under `key`, or None; what was wrong with its file, mostly nothing)."""
        path = self._path(key)
        if not path.exists():
            return None, ""
        try:
            found = Plan.load(path)
            os.utime(path)
        except PlanError as error:
            return None, f"plan cache: {error}; searched again"
        except OSError:  # a folder that may only be read: the entry's age does not matter there
            pass
        return found, ""

    def store(self, key: str, plan: Plan) -> str:
        """Keep a plan; what went wrong, mostly nothing. The file appears whole or not at all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".part-") as own:
                plan.save(Path(own) / "plan")
                os.replace(Path(own) / "plan", self._path(key))
            self._forget()
        except OSError as error:
            return f"plan cache: {self.folder}: {error.strerror or error}; the plan is not kept"
        return ""

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _forget(self) -> None:
        aged = []
        for path in self.folder.glob("*.json"):
            try:
                aged.append((path.stat().st_mtime, path))
            except FileNotFoundError:  # another process was faster
                continue
        for _, path in sorted(aged)[: max(0, len(aged) - ENTRIES)]:
            path.unlink(missing_ok=True)


def find_cache(wanted: bool | str | Path) -> Cache | None:
    """The cache that an option asks for: a folder; True for the user's own; False for none.

    The user's own is in `JAXSCALER_CACHE` ("off": none), or where the platform keeps caches.
    """
    if isinstance(wanted, str | Path):
        return Cache(Path(wanted).expanduser())
    said = os.environ.get(VARIABLE, "")
    if not wanted or said == OFF:
        return None
    return Cache(Path(said).expanduser() if said else _folder())


def _folder() -> Path:
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "jaxscaler"


def cache_key(graph: OpGraph, *options: Any) -> str:
    """Hash of a graph, options of which `repr` says all, and the versions that matter."""
    digest = hashlib.sha256()
    for part in (*_versions(), *_lines(graph), *options):
        digest.update(repr(part).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _lines(graph: OpGraph) -> Iterator[Any]:
    """All of a graph in an order that does not change from one process to the next."""
    for kind in graph.kinds:
        yield tuple(kind._replace(traits=frozenset())), sorted(kind.traits)
    for name, part in vars(graph).items():
        if name != "kinds":
            yield name, part


@functools.cache
def _versions() -> tuple[str, ...]:
    """Versions of JAX, and of this package's own files, which change more often than its number."""
    package = Path(__file__).parent
    own = hashlib.sha256()
    for path in sorted((*package.rglob("*.py"), *package.rglob("*.csv"))):
        own.update(path.read_bytes())
    return jax.__version__, jaxlib.__version__, own.hexdigest()
