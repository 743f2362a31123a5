"""What was measured on devices of one kind: the file that `jaxscaler calibrate` writes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxscaler.cluster.cluster import Cluster, curve_from, host_from, link_data, link_from
from jaxscaler.cluster.curves import Curve
from jaxscaler.cluster.devices import known_kinds
from jaxscaler.cluster.host import Host
from jaxscaler.cluster.links import Link
from jaxscaler.errors import ClusterError

VERSION = 1  # of the file


@dataclass(frozen=True)
class Moved:
    """One measured point: a collective among `size` neighbours of a level.

    `nbytes`, seconds: as in `cost.collective.collective_time`.
    """

    kind: str
    level: str
    size: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Curves of kernels, and per level the link as each kind of collective finds it.

    `device_kind`: JAX's name of the devices. `cluster`: those that were measured. `moved`: the
    points that the links were fitted to. `host`: what dispatching takes. `file`: where it was read
    from.
    """

    device_kind: str
    cluster: str
    devices: int
    processes: int
    curves: tuple[Curve, ...]
    links: tuple[tuple[str, tuple[tuple[str, Link], ...]], ...]
    moved: tuple[Moved, ...]
    versions: tuple[tuple[str, str], ...]
    command: str
    file: str = ""
    host: Host | None = None  # of a profile of several devices

    @property
    def device(self) -> str:
        """The device of the table that was measured, or JAX's name of one that is not in it."""
        return known_kinds().get(self.device_kind, self.device_kind)

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with what was measured in place of the table's rates and links.

        Levels over which nothing was measured keep their links, with a warning. Raises ClusterError
        for a cluster of other devices.
        """
        where = f"profile {self.file}" if self.file else "profile"
        if cluster.device.name != self.device:
            raise ClusterError(
                f"{where} is of {self.device} ({self.device_kind}), the devices of {cluster.name} "
                f"are {cluster.device.name}: run `jaxscaler calibrate` on those, or leave the "
                "profile out"
            )
        links = dict(self.links)
        left = [lv.name for lv in cluster.levels if lv.size > 1 and lv.name not in links]
        if left:
            warnings.warn(
                f"{where} has nothing of links over {', '.join(left)} of {cluster.name}: those are "
                "the table's",
                stacklevel=3,
            )
        levels = tuple(
            replace(level, link=replace(level.link, measured=links[level.name]))
            if level.name in links
            else level
            for level in cluster.levels
        )
        device = replace(cluster.device, curves=self.curves, host=self.host)
        return replace(cluster, device=device, levels=levels)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        return {
            "version": VERSION, "device_kind": self.device_kind, "cluster": self.cluster,
            "devices": self.devices, "processes": self.processes, "versions": dict(self.versions),
            "command": self.command, "curves": [asdict(curve) for curve in self.curves],
            "links": {level: {kind: link_data(asdict(link)) for kind, link in kinds}
                      for level, kinds in self.links},
            "moved": [asdict(point) for point in self.moved],
            "host": asdict(self.host) if self.host else None,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: Mapping[str, Any], file: str = "") -> Profile:
        """The inverse of `to_dict`. Raises ClusterError, naming the file, for anything else."""
        where = f"profile {file}" if file else "profile"
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            raise ClusterError(
                f"{where}: version {version!r}, this jaxscaler reads {VERSION}: calibrate again"
            )
        try:
            return Profile(
                device_kind=data["device_kind"],
                cluster=data["cluster"],
                devices=data["devices"],
                processes=data["processes"],
                curves=tuple(
                    curve_from(f"curves[{i}]", curve) for i, curve in enumerate(data["curves"])
                ),
                links=tuple(
                    (level, tuple((kind, link_from(f"links.{level}.{kind}", link))
                                  for kind, link in kinds.items()))
                    for level, kinds in data["links"].items()
                ),
                moved=tuple(Moved(**point) for point in data["moved"]),
                versions=tuple(data["versions"].items()),
                command=data["command"],
                file=file,
                host=host_from("host", data["host"]) if data.get("host") else None,
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ClusterError(f"{where}: it is no profile of `calibrate`: {error!r}") from None
        except ClusterError as error:
            raise ClusterError(f"{where}: {error}") from None

    @staticmethod
    def load(path: str | Path) -> Profile:
        """A profile from its file. ClusterError if it can not be read, or is none."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise ClusterError(f"profile {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise ClusterError(f"profile {path}: not JSON: {error}") from None
        return Profile.from_dict(data, str(path))

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def calibrated(cluster: Cluster, profile: Profile | str | Path | None) -> Cluster:
    """A cluster as a profile, or the file of one, says of its devices; as it is without."""
    if profile is None:
        return cluster
    known = profile if isinstance(profile, Profile) else Profile.load(profile)
    return known.applied(cluster)
