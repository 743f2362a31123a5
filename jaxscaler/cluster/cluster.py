"""A cluster: devices of one kind in levels, from the slowest connection in to the fastest."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxscaler.cluster.curves import Curve
from jaxscaler.cluster.devices import Device, Fabric, find_device, known_kinds
from jaxscaler.cluster.host import Host
from jaxscaler.cluster.links import Link
from jaxscaler.errors import ClusterError


@dataclass(frozen=True)
class Level:
    """`size` groups of equal devices joined by `link`: nodes, devices of a node, a torus axis."""

    name: str
    size: int
    link: Link

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.]*", self.name):
            raise ClusterError(
                f"level {self.name!r}: `name` must be letters, digits and dots, letter first"
            )
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ClusterError(
                f"level {self.name!r}: `size` must be an integer above 0; it is {self.size!r}"
            )


@dataclass(frozen=True)
class Cluster:
    """Equal devices in `levels`, outermost first; device ids count row-major through the levels."""

    name: str
    device: Device
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names or len(set(names)) < len(names):
            raise ClusterError(
                f"cluster {self.name!r}: `levels` must be one or more with distinct names; "
                f"they are {names}"
            )

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    @staticmethod
    def parse(text: str, profile: Any = None) -> Cluster:
        """The cluster that `text` names.

        - `h100:8`, `h100:8x4`: 8 devices per node, 4 nodes (levels `node`, `device`).
        - `v5p:4x4x8`, `v5e:16x16`: chips along the axes of a torus (levels `x`, `y`, `z`);
          one number more is the number of such slices (`v5e:16x16x2`: level `slice`). Where a chip
          is two JAX devices (v3, v7x) there is also a level `core` of 2, innermost.
        - `cpu:8`: simulated host devices, to check that plans are right; their times mean nothing.

        `profile`: a `Profile`, or the path of one, of what `jaxscaler calibrate` measured on such
        devices: rates and links are taken from there.
        Raises ClusterError with what is wrong, where, and what may stand there.
        """
        if "+" in text:
            rule = "devices of several kinds are for a pipeline (micro_batches=), a kind per stage"
            raise _error(text, text.index("+"), rule)
        match = re.fullmatch(r"\s*([^:\s]*)\s*(:?)\s*(.*?)\s*", text, re.DOTALL)
        assert match, "every part may be empty"
        name, colon, numbers = match.groups()
        try:
            device, fabric = find_device(name)
        except ClusterError as e:
            raise _error(text, match.start(1), str(e)) from None
        if not colon:
            raise _error(text, match.end(1), f"no number of devices; {_form(device, fabric)}")
        sizes = []
        at = match.start(3)
        for part in re.split(r"[x×]", numbers):
            if not re.fullmatch(r"[1-9][0-9]{0,6}", part):
                rule = (
                    f"expected a number above 0, found {part!r}" if part else "a number is missing"
                )
                raise _error(text, at, f"{rule}; {_form(device, fabric)}")
            sizes.append(int(part))
            at += len(part) + 1
        build = _torus if fabric.torus_rank else _nodes
        canonical = f"{device.name}:{'x'.join(map(str, sizes))}"
        try:
            found = Cluster(canonical, device, build(device, fabric, sizes))
        except ClusterError as e:
            raise _error(text, match.start(3), f"{e}; {_form(device, fabric)}") from None
        if profile is None:
            return found
        from jaxscaler.cluster.profile import calibrated  # which knows clusters

        return calibrated(found, profile)

    @staticmethod
    def local(devices: Sequence[Any] | None = None) -> Cluster:
        """The cluster of `devices` (default: all that JAX sees).

        GPUs are grouped into nodes by slice where JAX knows it, else by process; TPUs by their
        coordinates. Raises ClusterError if the devices differ, are not in the table, or do not fill
        the levels evenly: then name the cluster, or describe it in a file.
        """
        if devices is None:
            import jax  # the only use of JAX here: ask what is present

            devices = jax.devices()
        return _present(devices)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """A cluster from a TOML file.

        ```toml
        name = "lab"
        [device]
        base = "a100-80"           # optional: a device of the table; what follows overrides it
        name = "a100-pcie"
        hbm_bytes = 80e9
        hbm_bandwidth = 1.9e12     # bytes/s
        achievable = 0.7           # of peak_flops
        host_bandwidth = 25e9
        peak_flops = { bf16 = 312e12, f32 = 19.5e12 }
        [[levels]]                 # outermost first
        name = "node"
        size = 4
        link = { kind = "network", bandwidth = 12.5e9, latency = 5e-6 }
        [[levels]]
        name = "device"
        size = 8
        link = { kind = "switch", bandwidth = 25e9, max_efficiency = 0.8, half_bytes = 4e6 }
        ```

        Without `base` every field of `Device` but `devices_per_node`, `vendor`, `curves` and `host`
        must be there.
        A level without `link` takes the link that the base device has there. Links have the fields
        of `Link`. Raises ClusterError naming the file and the field.
        """
        try:
            return Cluster.from_dict(tomllib.loads(Path(path).read_text()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ClusterError) as e:
            raise ClusterError(f"{path}: {e}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        data = asdict(self)
        data["device"]["peak_flops"] = dict(self.device.peak_flops)
        data["device"]["curves"] = list(data["device"]["curves"])
        for field in ("curves", "host"):
            if not data["device"][field]:
                del data["device"][field]
        data["levels"] = [{**level, "link": link_data(level["link"])} for level in data["levels"]]
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_dict`; accepts what `load` documents."""
        _check_keys("cluster", data, ("name", "device", "levels"), required=("device", "levels"))
        raw = dict(_table("device", data["device"]))
        defaults: dict[str, Link] = {}
        if "base" in raw:
            base, fabric = find_device(str(raw.pop("base")))
            defaults = _default_links(fabric)
            known = {f.name: getattr(base, f.name) for f in fields(Device)}
        else:
            known = {"vendor": "", "devices_per_node": None, "curves": (), "host": None}
        if "peak_flops" in raw:
            rates = _table("device.peak_flops", raw["peak_flops"])
            raw["peak_flops"] = tuple(
                (k, _number(f"device.peak_flops.{k}", v)) for k, v in rates.items()
            )
        if "curves" in raw:
            raw["curves"] = tuple(
                curve_from(f"device.curves[{i}]", curve) for i, curve in enumerate(raw["curves"])
            )
        if "host" in raw:
            raw["host"] = host_from("device.host", raw["host"])
        device = _make("device", Device, known | raw)
        if not isinstance(data["levels"], Sequence) or isinstance(data["levels"], str):
            raise ClusterError("`levels` must be a list of tables, outermost first")
        levels = []
        for i, entry in enumerate(data["levels"]):
            where = f"levels[{i}]"
            level = dict(_table(where, entry))
            _check_keys(where, level, ("name", "size", "link"), required=("name", "size"))
            if "link" in level:
                link = link_from(f"{where}.link", level["link"])
            elif level["name"] in defaults:
                link = defaults[level["name"]]
            else:
                raise ClusterError(
                    f"{where}: `link` is missing, and the device has none of its own for a level "
                    f"{level['name']!r} (it has: {', '.join(defaults) or 'none, without `base`'})"
                )
            levels.append(_make(where, Level, level | {"link": link}))
        return Cluster(str(data.get("name", device.name)), device, tuple(levels))


def _error(text: str, at: int, rule: str) -> ClusterError:
    return ClusterError(f"cluster {text!r}, position {at}: {rule}\n  {text}\n  {' ' * at}^")


def _form(device: Device, fabric: Fabric) -> str:
    if fabric.torus_rank:
        axes = "x".join("XYZ"[: fabric.torus_rank])
        example = "x".join(["4"] * fabric.torus_rank)
        return (
            f"write {device.name}:{axes} or {device.name}:{axes}xSLICES, as {device.name}:{example}"
        )
    return f"write {device.name}:DEVICES or {device.name}:DEVICESxNODES, as {device.name}:8x4"


def _nodes(device: Device, fabric: Fabric, sizes: Sequence[int]) -> tuple[Level, ...]:
    if len(sizes) > 2:
        raise ClusterError(f"{len(sizes)} numbers, at most 2 mean something")
    if device.devices_per_node and sizes[0] > device.devices_per_node:
        raise ClusterError(
            f"{sizes[0]} devices per node, but {device.name} has at most {device.devices_per_node}"
        )
    inner = Level("device", sizes[0], fabric.intra)
    return (Level("node", sizes[1], fabric.inter), inner) if len(sizes) == 2 else (inner,)


def _torus(device: Device, fabric: Fabric, sizes: Sequence[int]) -> tuple[Level, ...]:
    rank = fabric.torus_rank
    if not rank <= len(sizes) <= rank + 1:
        raise ClusterError(
            f"{device.name} is a {rank}D torus: {rank} or {rank + 1} numbers, not {len(sizes)}"
        )
    dims = sizes[:rank]
    if fabric.max_chips and math.prod(dims) > fabric.max_chips:
        raise ClusterError(
            f"{math.prod(dims)} chips, but a slice of {device.name} has at most {fabric.max_chips}"
        )
    cube = fabric.wrap_unit is not None and all(d % fabric.wrap_unit == 0 for d in dims)
    levels = [
        Level(name, d, replace(fabric.intra, wrap=cube or d == fabric.wrap_size))
        for name, d in zip("xyz", dims, strict=False)
    ]
    if len(sizes) > rank:
        levels.insert(0, Level("slice", sizes[rank], fabric.inter))
    if fabric.chip is not None:
        levels.append(Level("core", fabric.chip_devices, fabric.chip))
    return tuple(levels)


def _default_links(fabric: Fabric) -> dict[str, Link]:
    if not fabric.torus_rank:
        return {"node": fabric.inter, "device": fabric.intra}
    links = {"slice": fabric.inter} | dict.fromkeys("xyz"[: fabric.torus_rank], fabric.intra)
    return links | ({"core": fabric.chip} if fabric.chip else {})


def _present(devices: Sequence[Any]) -> Cluster:
    kinds = sorted({d.device_kind for d in devices})
    if len(kinds) != 1:
        raise ClusterError(f"devices of one kind are needed; present: {kinds or 'none'}")
    name = known_kinds().get("cpu" if devices[0].platform == "cpu" else kinds[0])
    if name is None:
        raise ClusterError(
            f"device kind {kinds[0]!r} is not in the table; describe it in a file and pass "
            "Cluster.load(path)"
        )
    device, fabric = find_device(name)
    torus = fabric.torus_rank > 0
    groups: dict[int, list[Any]] = {}
    sliced = len({getattr(d, "slice_index", None) for d in devices} - {None}) > 1
    for d in devices:
        group = d.slice_index if sliced else 0 if torus else d.process_index
        groups.setdefault(group, []).append(d)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) > 1:
        raise ClusterError(f"groups of {name} devices differ in size: {sorted(sizes)}")
    count = sizes.pop()
    if torus:
        dims = _torus_dims(name, fabric, groups)
    elif count == 1 and len(groups) > 1 and device.devices_per_node != 1:
        raise ClusterError(
            f"{len(groups)} processes with one {name} each: JAX does not say which share a node; "
            f"pass the cluster by name, as cluster='{name}:8x{max(1, len(groups) // 8)}'"
        )
    else:
        dims = [count]
    return Cluster.parse(f"{name}:" + "x".join(map(str, dims + [len(groups)] * (len(groups) > 1))))


def _torus_dims(name: str, fabric: Fabric, groups: Mapping[int, list[Any]]) -> list[int]:
    shapes = set()
    for group in groups.values():
        coords = {tuple(d.coords) for d in group}
        dims = [max(c) - min(c) + 1 for c in zip(*coords, strict=True)]
        full = math.prod(dims) * fabric.chip_devices == len(group)
        if not full or any(d != 1 for d in dims[fabric.torus_rank :]):
            raise ClusterError(
                f"{len(group)} {name} devices at {len(coords)} coordinates do not fill a box of "
                f"{'x'.join(map(str, dims))} chips; pass the cluster by name"
            )
        shapes.add(tuple(dims[: fabric.torus_rank]))
    if len(shapes) > 1:
        raise ClusterError(f"slices of {name} differ in shape: {sorted(shapes)}")
    return list(shapes.pop())


def link_from(where: str, value: Any) -> Link:
    """A link from plain data; errors name the field, which stands at `where`."""
    data = dict(_table(where, value))
    if "measured" in data:
        kinds = _table(f"{where}.measured", data["measured"])
        data["measured"] = tuple(
            (kind, link_from(f"{where}.measured.{kind}", link)) for kind, link in kinds.items()
        )
    return _make(where, Link, data)


def link_data(link: Mapping[str, Any]) -> dict[str, Any]:
    """A link as plain data: the measured ones by name, and only where there are any."""
    data = {key: value for key, value in link.items() if key != "measured"}
    measured = {kind: link_data(one) for kind, one in link["measured"]}
    return {**data, "measured": measured} if measured else data


def curve_from(where: str, value: Any) -> Curve:
    """A curve from plain data; errors name the field, which stands at `where`."""
    data = dict(_table(where, value))
    for key in ("sizes", "rates"):
        data[key] = tuple(_number(f"{where}.{key}", x) for x in data.get(key, ()))
    return _make(where, Curve, data)


def host_from(where: str, value: Any) -> Host:
    """What a host takes to dispatch, from plain data."""
    return _make(where, Host, _table(where, value))


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ClusterError(f"`{where}` must be a table; it is {value!r}")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"`{where}` must be a number; it is {value!r}")
    return value


def _check_keys(
    where: str, data: Mapping[str, Any], known: Sequence[str], required: Sequence[str] = ()
) -> None:
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise ClusterError(f"`{where}` has no field `{key}`{hint} (fields: {', '.join(known)})")
    for key in required:
        if key not in data:
            raise ClusterError(f"`{where}` lacks the field `{key}`")


def _make(where: str, cls: type, data: Mapping[str, Any]) -> Any:
    """`cls(**data)`, with every error naming the field."""
    known = [f.name for f in fields(cls)]
    required = [f.name for f in fields(cls) if f.default is MISSING]
    _check_keys(where, data, known, required)
    for f in fields(cls):
        if f.name in data and f.type in ("float", "int"):
            _number(f"{where}.{f.name}", data[f.name])
        if f.name in data and f.type in ("str", "bool") and type(data[f.name]).__name__ != f.type:
            raise ClusterError(f"`{where}.{f.name}` must be a {f.type}; it is {data[f.name]!r}")
    try:
        return cls(**data)
    except ClusterError as e:
        raise ClusterError(f"`{where}`: {e}") from None
