"""Functions beside a pipeline's step, on its state: norms, moving averages, summaries.

No jitted function takes arrays of different devices. So a function is cut here: each equation runs
where most bytes of its operands are, what another place has is sent there, and what runs at one
place without a wait in between is one jitted part.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscaler import _compat
from jaxscaler.errors import PlanError
from jaxscaler.rewrite.apply import flat
from jaxscaler.rewrite.parts import made_by, nbytes, part_of, variables

Place = int
Home = Callable[[str, tuple[int, ...]], tuple[Place, Any] | None]  # path, shape -> where it lies


class Stretch(NamedTuple):
    """A jitted part of a function at one place."""

    place: Place
    run: Callable
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]


def jit_in_places(fn: Callable, meshes: Sequence[jax.sharding.Mesh], home: Home) -> Callable:
    """`fn` on arrays that lie at several places (`meshes`), traced once for all of one type.

    Results that `home` knows (by the end of their path, and shape) go where it says, others stay
    where they are made. Keyword arguments are not taken.
    """
    known: dict[Any, tuple] = {}
    devices = [frozenset(mesh.devices.flat) for mesh in meshes]

    def place_of(x: Any) -> Place | None:
        lies = isinstance(x, jax.Array) and x.committed
        if not lies:
            return None
        found = [p for p, some in enumerate(devices) if x.sharding.device_set <= some]
        if not found:
            raise PlanError(
                f"an argument {x.dtype}{list(x.shape)} lies on {sorted(map(str, x.devices()))}, "
                "which are of no stage: place it first (step.place), or give it as NumPy has it"
            )
        return min(found, key=lambda p: len(devices[p]))

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        places = tuple(map(place_of, leaves))
        kinds = tuple((jnp.shape(x), jax.dtypes.result_type(x), jnp.ndim(x)) for x in leaves)
        key = (tree, kinds, places)
        if key not in known:
            known[key] = _cut(fn, args, places, meshes, home)
        closed, shape, stretches, goals = known[key]
        return _run(closed, shape, stretches, goals, leaves, places, meshes)

    return call


def _cut(
    fn: Callable, args: tuple, places: Sequence, meshes: Sequence, home: Home
) -> tuple[Any, Any, list[Stretch], list]:
    """(jaxpr, tree of the results, stretches in order, where each result goes or None)."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    closed = flat(closed)
    jaxpr, eqns = closed.jaxpr, closed.jaxpr.eqns
    at: dict[Any, Place] = {v: p for v, p in zip(jaxpr.invars, places) if p is not None}
    level: dict[Any, int] = defaultdict(int)
    groups: dict[tuple[int, Place], list[int]] = defaultdict(list)
    for i, eqn in enumerate(eqns):
        weights: Counter[Place] = Counter()
        for v in variables(eqn.invars):
            if v in at:
                weights[at[v]] += max(1, nbytes(v))
        place = max(weights, key=lambda p: (weights[p], -p)) if weights else 0
        wait = max((level[v] + (at.get(v, place) != place) for v in variables(eqn.invars)),
                   default=0)  # fmt: skip
        groups[wait, place].append(i)
        for v in eqn.outvars:
            at[v], level[v] = place, wait
    results = set(variables(jaxpr.outvars))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    goals = [home(path, v.aval.shape) for path, v in zip(paths, jaxpr.outvars)]
    wanted = dict(zip(variables(jaxpr.outvars), (g for v, g in zip(jaxpr.outvars, goals)
                                                 if not _compat.is_literal(v))))  # fmt: skip
    stretches = []
    for (_, place), indices in sorted(groups.items()):
        inside = set(indices)
        late = {v for i, e in enumerate(eqns) if i not in inside for v in variables(e.invars)}
        makes = [v for v in made_by(eqns, indices) if v in late or v in results]
        part = part_of(eqns, indices, makes)
        own = _compat.closed_over_nothing(
            jaxpr, list(part.reads), [eqns[i] for i in indices], list(part.makes)
        )
        here = [g[1] if (g := wanted.get(v)) and g[0] == place else None for v in part.makes]
        run = jax.jit(functools.partial(_emit, own), out_shardings=here)
        stretches.append(Stretch(place, run, part.reads, part.makes))
    return closed, jax.tree.structure(shapes), stretches, goals


def _emit(closed: Any, *args: Any) -> list:
    return _compat.emit(closed, args)


def _run(
    closed: Any, tree: Any, stretches: Sequence[Stretch], goals: Sequence, leaves: Sequence,
    places: Sequence[Place | None], meshes: Sequence[jax.sharding.Mesh],
) -> Any:  # fmt: skip
    jaxpr = closed.jaxpr
    store: dict[tuple[Any, Place | None], Any] = {}
    source: dict[Any, Place | None] = {}
    for v, x, p in (*zip(jaxpr.invars, leaves, places),
                    *((v, x, None) for v, x in zip(jaxpr.constvars, closed.consts))):  # fmt: skip
        store[v, p], source[v] = x, p

    def read(v: Any, place: Place) -> Any:
        if (v, place) not in store:
            whole = jax.sharding.NamedSharding(meshes[place], jax.sharding.PartitionSpec())
            store[v, place] = jax.device_put(store[v, source[v]], whole)
        return store[v, place]

    for stretch in stretches:
        made = stretch.run(*(read(v, stretch.place) for v in stretch.reads))
        for v, x in zip(stretch.makes, made):
            store[v, stretch.place], source[v] = x, stretch.place
    found = []
    for v, goal in zip(jaxpr.outvars, goals):
        x = jnp.asarray(v.val) if _compat.is_literal(v) else store[v, source[v]]
        found.append(x if goal is None else jax.device_put(x, goal[1]))
    return jax.tree.unflatten(tree, found)


def home_of(leaves: Mapping[int, tuple[str, str, tuple[int, ...]]], where: Callable) -> Home:
    """Where leaves of the state lie, by the end of a path and by shape; parameters come first.

    leaves: number -> (path, role, shape). where: number -> (place, sharding).
    """
    from jaxscaler.space.pins import Pin, Pins

    pins = Pins((), tuple(Pin(path, role, shape, ((str(n),),))
                          for n, (path, role, shape) in leaves.items()))  # fmt: skip

    def home(path: str, shape: tuple[int, ...]) -> tuple[Place, Any] | None:
        for end in (path, path.rpartition("/")[0]):  # a Variable of flax.nnx has its array below
            if (pin := pins.find(end, tuple(shape))) is not None:
                return where(int(pin.spec[0][0]))
        return None

    return home
