"""Kernels that run on a device's own part: cuDNN, Pallas, the shift of a ring."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core as jex

from jaxscaler._compat.jaxprs import Literal, open_jaxpr
from jaxscaler._compat.meshes import spec_dims

# --- kernels ----------------------------------------------------------------------------------

_cudnn_lock = threading.RLock()


@contextlib.contextmanager
def cudnn_on_any_host(capability: str | None = None) -> Iterator[None]:
    """Inside, cuDNN attention traces and lowers for a GPU of this compute capability anywhere.

    None: the capability of the context around, or 9.0. jax asks the host for a cuDNN library and a
    GPU while it traces; a plan is for other devices than the host's. One thread at a time. jax
    traces a call of equal types once in a process, and asks no more.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # has no public home

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    target = capability or _cudnn_capability.get()
    patched = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: numbers(target) >= numbers(least),
        "is_cuda_compute_capability_equal": lambda one: numbers(target) == numbers(one),
    }
    with _cudnn_lock:
        token = _cudnn_capability.set(target)
        kept = {name: getattr(fused, name) for name in patched}
        try:
            for name, function in patched.items():
                setattr(fused, name, function)
            yield
        finally:
            for name, function in kept.items():
                setattr(fused, name, function)
            _cudnn_capability.reset(token)


_cudnn_capability = contextvars.ContextVar("capability", default="9.0")
CUDNN_VERSION = 91100  # the first that runs all attention that jax asks it for


def parse_sharding_rule(text: str, **options: Any) -> Any:
    """JAX's own form of a rule "i k, k j -> i j" (`SdyShardingRule`). ValueError if unreadable."""
    from jax._src import custom_partitioning_sharding_rule as rules  # no public home

    return rules.str_to_sdy_sharding_rule(text, **options)


def new_kernel_primitive(name: str, run: Any, batched: Any) -> Any:
    """A primitive of arrays whose equations say `kernel=`; `run(kernel, *arrays)` is what it does.

    `run` returns a tuple of arrays. `batched(kernel, mapped)`: the kernel under `vmap`, whose
    operands have a leading dim where `mapped` says, and all results. It has no derivative: jax says
    so by name.
    """
    from jax.interpreters import batching, mlir  # rules have no other public home

    primitive = jex.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_impl
    def _(*args, kernel):
        return jax.jit(functools.partial(run, kernel))(*args)

    @primitive.def_abstract_eval
    def _(*avals, kernel):
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        made = jax.eval_shape(functools.partial(run, kernel), *args)
        return [jax.core.ShapedArray(a.shape, a.dtype) for a in made]

    def batch(args, dims, *, kernel):
        mapped = tuple(d is not None for d in dims)
        front = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims)]
        made = primitive.bind(*front, kernel=batched(kernel, mapped))
        return made, [0] * len(made)

    batching.primitive_batchers[primitive] = batch
    lower = mlir.lower_fun(lambda *args, kernel: run(kernel, *args), multiple_results=True)
    mlir.register_lowering(primitive, lower)
    return primitive


def on_shards(eqn, mesh, in_specs, out_specs):
    """A closed jaxpr that runs `eqn` on each device's part alone: a `shard_map` over all of `mesh`.

    The specs are `PartitionSpec`s per operand and result. All axes are manual, as a Mosaic kernel
    wants it. Of equations whose parameters hold global shapes only a `pallas_call` may be cut.
    """

    def part(*args):  # not in the equation's context: its mesh has no manual axes
        if eqn.primitive.name == SHIFT:
            return [_shift_on_part(eqn, spec_dims(in_specs[0]), *args)]
        own = _pallas_on_part(eqn, args)
        made = own.primitive.bind(*args, **own.primitive.get_bind_params(own.params))
        return list(made) if own.primitive.multiple_results else [made]

    run = jax.shard_map(
        part,
        mesh=mesh, in_specs=tuple(in_specs), out_specs=list(out_specs), check_vma=False,
    )  # fmt: skip
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(run)(*avals)


def pallas_grid(eqn) -> tuple[int, ...]:
    """The grid of a `pallas_call`; () if it is known only when it runs."""
    grid = tuple(eqn.params["grid_mapping"].grid)
    return grid if all(isinstance(n, int) for n in grid) else ()


def pallas_blocks(eqn) -> list[list[tuple[int, int] | None]]:
    """Per operand and result of a `pallas_call`, per dim: (grid axis, block) or None.

    The grid axis that walks the dim block by block, where the kernel's runs along that axis are
    apart: it stands in index maps only as it is, cuts every result, and the kernel never asks where
    it is along it (`program_id`).
    """
    mapping, grid = eqn.params["grid_mapping"], pallas_grid(eqn)
    atoms = (*eqn.invars, *eqn.outvars)
    whole: list[list[tuple[int, int] | None]] = [[None] * len(v.aval.shape) for v in atoms]
    if not grid or mapping.num_index_operands or len(mapping.block_mappings) != len(atoms):
        return whole
    found, used = [], set(_asked_places(eqn.params["jaxpr"]))
    for block, atom in zip(mapping.block_mappings, atoms):
        index = block.index_map_jaxpr.jaxpr
        axis_of = {v: g for g, v in enumerate(index.invars[: len(grid)])}
        dims: list[tuple[int, int] | None] = []
        used.update(axis_of[v] for e in index.eqns for v in e.invars
                    if not isinstance(v, Literal) and v in axis_of)  # fmt: skip
        for out, spec, size in zip(index.outvars, block.block_shape, atom.aval.shape):
            g = None if isinstance(out, Literal) else axis_of.get(out)
            lengths = {"Blocked": getattr(spec, "block_size", 0), "Squeezed": 1}
            length = lengths.get(type(spec).__name__, 0)  # others may overlap
            if g is not None and size != grid[g] * length:
                used.add(g)
            if g is not None and any(d and d[0] == g for d in dims):
                used.add(g)  # a diagonal
            dims.append(None if g is None or g in used else (g, length))
        found.append(dims)
    for dims in found[len(eqn.invars) :]:  # what some result lacks is summed up, or written twice
        used.update(set(range(len(grid))) - {d[0] for d in dims if d})
    return [[d if d and d[0] not in used else None for d in dims] for dims in found]


def _asked_places(jaxpr) -> Iterator[int]:
    """Grid axes along which a kernel's body asks where it is, or how many there are."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for body in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(body):
                yield from _asked_places(body)


def _is_jaxpr(x) -> bool:
    return isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)


def _pallas_on_part(eqn, args):
    """A `pallas_call` for operands that are parts of its own: fewer steps along its grid."""
    shapes = [tuple(a.shape) for a in args]
    if eqn.primitive.name != "pallas_call" or shapes == [v.aval.shape for v in eqn.invars]:
        return eqn
    blocks, mapping = pallas_blocks(eqn), eqn.params["grid_mapping"]
    parts = [1] * len(mapping.grid)
    for dims, var, shape in zip(blocks, eqn.invars, shapes):
        for d, size, part in zip(dims, var.aval.shape, shape):
            if size != part:
                if d is None:
                    raise ValueError(f"a part of {shape} of an operand of shape {var.aval.shape}")
                parts[d[0]] = size // part

    def shrink(aval, dims):
        shape = (n // parts[d[0]] if d else n for n, d in zip(aval.shape, dims))
        return aval.update(shape=tuple(shape))

    outs = tuple(map(shrink, eqn.params["out_avals"], blocks[len(eqn.invars) :]))
    mappings = tuple(
        dataclasses.replace(block, array_aval=shrink(block.array_aval, dims))
        for block, dims in zip(mapping.block_mappings, blocks)
    )
    grid = tuple(n // p for n, p in zip(mapping.grid, parts))
    new = dataclasses.replace(mapping, grid=grid, block_mappings=mappings)
    return eqn.replace(params={**eqn.params, "grid_mapping": new, "out_avals": outs})


# --- a ring of devices ------------------------------------------------------------------------

SHIFT = "ring_shift"


def new_shift_primitive():
    """A primitive of one array: each element of dim `dim` goes to the next place (`by` 1) or the
    one before (-1), around the end.

    Linear. Compiled as it is, it is two slices put together; on parts, `on_shards`.
    """
    from jax.interpreters import ad, batching, mlir  # rules have no other public home

    primitive = jex.Primitive(SHIFT)

    def run(x, *, dim, by):
        return jax.numpy.roll(x, by, dim)

    @primitive.def_impl
    def _(x, **params):
        return jax.jit(functools.partial(run, **params))(x)

    @primitive.def_abstract_eval
    def _(x, *, dim, by):
        return jax.core.ShapedArray(x.shape, x.dtype)

    def transpose(ct, x, *, dim, by):
        return [ct if type(ct) is ad.Zero else primitive.bind(ct, dim=dim, by=-by)]

    def batch(args, dims, *, dim, by):
        (x,), (at,) = args, dims
        return primitive.bind(x, dim=dim + (at <= dim), by=by), at

    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    return primitive


def _shift_on_part(eqn, spec, x):
    """A shift on one device's block: every device along the axes hands its edge to the next."""
    dim, by = eqn.params["dim"], eqn.params["by"]
    axes = spec[dim] if dim < len(spec) else ()
    local, size = x.shape[dim], eqn.invars[0].aval.shape[dim]
    forward = by > 0
    edge = local - 1 if forward else 0
    moved = jax.lax.slice_in_dim(x, edge, edge + 1, axis=dim)
    if count := size // local - 1:
        step = 1 if forward else -1
        ring = [(i, (i + step) % (count + 1)) for i in range(count + 1)]
        moved = jax.lax.ppermute(moved, axes, ring)
    rest = jax.lax.slice_in_dim(x, 0 if forward else 1, local - 1 if forward else local, axis=dim)
    return jax.lax.concatenate([moved, rest] if forward else [rest, moved], dim)
