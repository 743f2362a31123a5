"""What is trained and how, whatever the devices: what a search prices its ways with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxscaler.errors import ConfigError

ROOM = 0.92  # of a device's memory that may be filled, as the planner has it
# Schedules of pipelines that are searched, the one of least memory first.
SEARCHED = ("1f1b", "interleaved", "zero-bubble", "zero-bubble-2")


@dataclass(frozen=True)
class Options:
    """What is trained and how: the keywords of `price` that do not depend on the devices."""

    batch: int
    seq: int
    dtype: str | None = None
    attention: str | None = None
    stack: str = "jax"
    optimizer: str = "adam"
    master: bool = True
    gradient: str = "float32"
    dropout: bool = False
    lora: int = 0
    base: str = ""
    compress: str = ""
    constants: Any = None
    memory: float = ROOM
    schedules: tuple[str, ...] = SEARCHED  # of pipelines that a search looks at

    def __post_init__(self) -> None:
        unknown = [name for name in self.schedules if name not in SEARCHED]
        if unknown or "1f1b" not in self.schedules:
            raise ConfigError(
                f"schedules={','.join(self.schedules)!r}: 1f1b and any of {', '.join(SEARCHED[1:])}"
            )

    def keywords(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "schedules"}
