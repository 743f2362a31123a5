"""The worker: compiles one program for one target, in a process of its own.

`python -m jaxscaler.verify.compile FOLDER` reads `job.json` and `program.mlir` there and writes
`hlo.txt` and then `result.json`. Only `worker.py` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from jaxscaler import _compat
from jaxscaler.cluster.mesh import device_grid
from jaxscaler.verify.targets import CPU

MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    """Compile the job of a folder; whatever the compiler raises is in the result."""
    job = json.loads((folder / "job.json").read_text())
    start = time.perf_counter()
    result: dict[str, Any]
    try:
        devices = _devices(job)
        module = _compat.parse_module((folder / "program.mlir").read_bytes())
        executable = _compat.compile_module(
            module,
            device_grid((job["devices"],), devices[: job["devices"]]),
            job["compiler_options"],
        )
        seconds = time.perf_counter() - start
        result = {"memory": memory_of(executable), "seconds": seconds, **_text(executable, folder)}
    except MemoryError:
        raise  # told by the exit status
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    part = folder / "result.part"
    part.write_text(json.dumps(result))
    part.replace(folder / "result.json")


def _devices(job: dict[str, Any]) -> list[Any]:
    if job["platform"] == CPU:
        jax.config.update("jax_num_cpu_devices", job["devices"])
        return jax.devices("cpu")
    options = dict(job["options"])
    return _compat.topology_devices(job["platform"], job["topology"], options)


def memory_of(executable: Any) -> dict[str, int]:
    """Bytes on one device by kind, and on its host."""
    stats = executable.get_compiled_memory_stats()
    found = {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in MEMORY}
    found["host"] = sum(
        getattr(stats, f"host_{kind}_size_in_bytes") for kind in ("argument", "output", "temp")
    )
    found["peak"] = getattr(stats, "peak_memory_in_bytes", 0)
    return found


def _text(executable: Any, folder: Path) -> dict[str, str]:
    """Writes the compiled HLO; some programs can not be printed."""
    try:
        (module,) = executable.hlo_modules()
        (folder / "hlo.txt").write_text(module.to_string())
    except Exception as error:
        return {"no_text": f"{type(error).__name__}: {error}"}
    return {}


def _end_with_parent() -> None:
    """End when the process that asked is gone: nobody waits for the result any more."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    main(Path(sys.argv[1]))
