"""Several processes: one plan for all, each feeds its own part of the batch, a lost one is named.

JAX runs one program in every process, and its collectives wait for all of them. So whatever one
process finds out alone (a plan, an error) is told to the others before any goes on. On one process
nothing here communicates.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxscaler import _compat, errors
from jaxscaler.errors import ClusterError, PlanError
from jaxscaler.lower.interpret import named_sharding
from jaxscaler.lower.layouts import Spec
from jaxscaler.plan import Plan
from jaxscaler.trace import Traced

DIGEST = 16  # characters of `Plan.digest`
NAMED = 4  # lost processes of which all is said
ANSWER = 3.0  # seconds that a process has to answer when another looks for the lost one
MEMBER, ALIVE = "jaxscaler/member", "jaxscaler/alive"  # keys in JAX's coordination service


class LostProcessError(ClusterError):
    """A process of the run is gone; the others can not go on."""


# -- joining ---------------------------------------------------------------------------------------


def join() -> None:
    """Join the other processes of a run, where the environment says that there are some.

    Said by JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID, or by what launched
    the process, as `jax.distributed.initialize` reads it: Slurm, Open MPI, several TPU hosts. To be
    called before any device is asked for.
    """
    if jax.distributed.is_initialized():
        return
    said = os.environ.get
    address, count, index = (
        said(f"JAX_{name}") for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    )
    if address:
        jax.distributed.initialize(
            address, int(count) if count else None, int(index) if index else None
        )
    elif (
        int(said("SLURM_NTASKS", "1")) > 1
        or int(said("OMPI_COMM_WORLD_SIZE", "1")) > 1
        or "," in said("TPU_WORKER_HOSTNAMES", "")
    ):
        jax.distributed.initialize()


# -- one plan --------------------------------------------------------------------------------------


def share(
    search: Callable[[], Any], follow: Callable[[Plan], Any], devices: Sequence[jax.Device]
) -> Any:
    """`search()` on process 0, `follow(its plan)` on the others: what each gives has one plan.

    What the search raises is raised by every process. Both give a `planner.Planned`.
    """
    if not _together(devices):
        return search()
    found, fault, message = None, None, {}
    if jax.process_index() == 0:
        try:
            found = search()
            message = {"plan": found.plan.to_dict()}
        except Exception as error:
            fault, message = error, {"error": type(error).__name__, "text": str(error)}
    message = json.loads(_broadcast(json.dumps(message).encode()))
    if fault is not None:
        raise fault
    if "error" in message:
        kind = getattr(errors, message["error"], PlanError)
        raise kind(f"process 0, which plans for all: {message['text']}")
    return agree(lambda: found or follow(Plan.from_dict(message["plan"])), devices)


def agree(follow: Callable[[], Any], devices: Sequence[jax.Device]) -> Any:
    """`follow()`, a `planner.Planned`, if its plan is the same in every process.

    PlanError in every process if it is not, or if one of them raises.
    """
    if not _together(devices):
        return follow()
    found, fault = None, None
    try:
        found = follow()
    except Exception as error:
        fault = error
    mine = found.plan.digest() if found is not None else ""
    padded = np.frombuffer(mine.ljust(DIGEST).encode(), np.uint8)
    digests = [bytes(row).decode().strip() for row in multihost_utils.process_allgather(padded)]
    if fault is not None:
        raise fault
    if len(set(digests)) > 1:
        said = ", ".join(f"{d or 'none'} on process {i}" for i, d in enumerate(digests))
        raise PlanError(
            f"the processes have different plans: {said}; every process must run the same step on "
            "the same argument types, with the same options and the same plan file"
        )
    _enroll()
    return found


def _together(devices: Sequence[jax.Device]) -> bool:
    """Whether the devices are those of several processes. ClusterError if of some of them only."""
    present = {device.process_index for device in devices}
    if len(present) > 1 and len(present) < jax.process_count():
        raise ClusterError(
            f"the devices are those of processes {sorted(present)} of {jax.process_count()}: a "
            "step runs on the devices of one process, or on devices of every process"
        )
    return len(present) > 1


def _broadcast(message: bytes) -> bytes:
    """The bytes that process 0 gives, in every process."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
    if jax.process_index() != 0:
        message = bytes(size)
    sent = multihost_utils.broadcast_one_to_all(np.frombuffer(message, np.uint8))
    return bytes(np.asarray(sent, np.uint8))


# -- batches ---------------------------------------------------------------------------------------


def feed(
    loader: Iterable[Any],
    traced: Traced,
    wanted: Sequence[int],
    specs: Sequence[Spec | None],
    mesh: jax.sharding.Mesh,
) -> Iterator[Any]:
    """The batches of `loader` as global arrays, one made ahead of the one that is in use.

    `wanted`: the arguments of the step that are a batch; `specs`: a layout per flat input. A leaf
    of the planned shape is the whole batch, the same in every process; else it is this process's
    rows (dim 0), in the order of the processes. Batches of other shapes are split by rows over the
    processes, for the step to plan. PlanError if a batch is of another tree.
    """
    if not wanted:
        raise PlanError("no argument of the step is a batch; `roles` says which are")
    trees = [traced.in_tree.children()[arg] for arg in wanted]
    tree = jax.tree_util.treedef_tuple(trees) if len(trees) > 1 else trees[0]
    at = [i for arg in wanted for i, a in enumerate(traced.arg_of_input) if a == arg]
    planned = [(traced.in_avals[i], named_sharding(mesh, specs[i] or ())) for i in at]
    return _ahead(loader, tree, planned, mesh)


def _ahead(
    loader: Iterable[Any], tree: Any, planned: Sequence[tuple[Any, Any]], mesh: jax.sharding.Mesh
) -> Iterator[Any]:
    ahead: list[Any] = []
    for batch in loader:
        leaves, found = jax.tree.flatten(batch)
        if found != tree:
            raise PlanError(f"the loader gives {found}, the step is planned for {tree}")
        made = [_global(leaf, *where, mesh) for leaf, where in zip(leaves, planned, strict=True)]
        ahead.append(jax.tree.unflatten(found, made))
        if len(ahead) > 1:
            yield ahead.pop(0)
    yield from ahead


def _global(leaf: Any, aval: Any, sharding: jax.sharding.Sharding, mesh: jax.sharding.Mesh) -> Any:
    local, make = np.asarray(leaf), jax.make_array_from_process_local_data
    count = len({device.process_index for device in mesh.devices.flat})
    if local.shape == aval.shape:
        return make(sharding, local, aval.shape)
    if count == 1:
        return local
    if local.ndim == 0:
        raise PlanError(f"the loader gives a scalar where {aval.shape} is planned")
    shape = (local.shape[0] * count, *local.shape[1:])
    if shape == aval.shape and _cut_by_process(sharding, shape):
        return make(sharding, local, shape)
    rows = make(_by_process(mesh, count), local, shape)
    return jax.device_put(rows, sharding) if shape == aval.shape else rows


def _cut_by_process(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
    """Whether every process holds its own rows and no others."""
    index_of: Any = sharding.devices_indices_map(shape)
    rows = shape[0] // len({device.process_index for device in index_of})
    held = {device: index[0].indices(shape[0]) for device, index in index_of.items()}
    return all(
        device.process_index * rows <= start and stop <= (device.process_index + 1) * rows
        for device, (start, stop, _) in held.items()
    )


def _by_process(mesh: jax.sharding.Mesh, count: int) -> jax.sharding.NamedSharding:
    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    grid = np.array(devices, object).reshape(count, -1)
    spec = jax.sharding.PartitionSpec("process")
    return jax.sharding.NamedSharding(jax.sharding.Mesh(grid, ("process", "local")), spec)


# -- a process that is lost ------------------------------------------------------------------------


@contextmanager
def watch_processes() -> Iterator[None]:
    """Errors of the runtime within, while another process does not answer, say which it is.

    JAX hands out results before they are computed: what a lost process breaks is found where a
    result is read, so the training loop stands within this. LostProcessError, from JAX's error.
    What stands after it in the program runs, but the process ends with status 1, at once: the
    runtime would wait for collectives that can not come to an end.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # out of memory is this process's own affair, while the others wait for it
        if "RESOURCE_EXHAUSTED" not in str(error) and (lost := _lost()):
            atexit.register(_end)
            raise LostProcessError(
                f"lost {_names(lost)}: gone, or not answering within {ANSWER:g} s of the error. "
                f"The other {jax.process_count() - len(lost)} can not go on without. Start all "
                "processes again, and let them restore the last checkpoint into "
                "step.abstract_state() (docs/processes.md)"
            ) from error
        raise


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _enroll() -> None:
    """Leave word of this process with the coordinator, for the day that it is lost."""
    client = _compat.coordination_client()
    name = f"{socket.gethostname()}, pid {os.getpid()}"
    client.key_value_set(f"{MEMBER}/{jax.process_index()}", name, allow_overwrite=True)


def _lost() -> list[int]:
    """The processes that do not say, within `ANSWER` seconds, that they have met an error too."""
    client, me = _compat.coordination_client(), jax.process_index()
    if client is None or jax.process_count() == 1:
        return []
    client.key_value_set(f"{ALIVE}/{me}", "yes", allow_overwrite=True)
    end = time.monotonic() + ANSWER
    others = [i for i in range(jax.process_count()) if i != me]
    return [i for i in others if not _said(f"{ALIVE}/{i}", max(end - time.monotonic(), 0.01))]


def _said(key: str, seconds: float) -> str:
    """What a process left under `key`, once it is there; "" if it is not in time."""
    try:
        client = _compat.coordination_client()
        return client.blocking_key_value_get(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError:
        return ""


def _names(lost: Sequence[int]) -> str:
    said = "; ".join(f"process {i} ({_said(f'{MEMBER}/{i}', 0.1)})" for i in lost[:NAMED])
    return said + (f" and {len(lost) - NAMED} more" if len(lost) > NAMED else "")
