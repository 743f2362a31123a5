"""Devices of several kinds side by side: what a pipeline may be cut over, a kind per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxscaler.cluster.cluster import Cluster, link_data, link_from
from jaxscaler.cluster.devices import Device, find_device
from jaxscaler.cluster.links import Link
from jaxscaler.errors import ClusterError


@dataclass(frozen=True)
class Mixed:
    """Clusters one after another in the order of device ids, joined by `link`."""

    parts: tuple[Cluster, ...]
    link: Link

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise ClusterError("devices of several kinds: give two clusters at least")

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def num_devices(self) -> int:
        return sum(part.num_devices for part in self.parts)

    @property
    def device(self) -> Device:
        """That of the first part, whose host dispatches."""
        return self.parts[0].device

    @staticmethod
    def parse(text: str) -> Mixed:
        """The clusters that `text` names, as "a100-80:8+h100:8x2".

        What joins them is the slower of their networks between nodes (`devices.csv`). Raises
        ClusterError as `Cluster.parse`.
        """
        parts = tuple(map(Cluster.parse, text.split("+")))
        networks = [find_device(part.device.name)[1].inter for part in parts]
        return Mixed(parts, min(networks, key=lambda link: link.bandwidth))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        parts = [part.to_dict() for part in self.parts]
        return {"name": self.name, "parts": parts, "link": link_data(asdict(self.link))}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Mixed:
        parts = tuple(map(Cluster.from_dict, data["parts"]))
        return Mixed(parts, link_from("link", data["link"]))

    def first_of(self, device: int) -> tuple[int, Cluster]:
        """(the first device id of the part that holds a device, that part)."""
        first = 0
        for part in self.parts:
            if device < first + part.num_devices:
                return first, part
            first += part.num_devices
        raise ClusterError(f"device {device} of {self.name}, which has {self.num_devices}")
