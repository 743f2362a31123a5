"""Published measurements of training, one form for all sources.

A table has the columns of `COLUMNS`; what a source says beside them is in `notes`, in words. Here
it becomes columns: `_published.csv` is the reviewed mapping (a column, a pattern, its value, and
why; of the rows of a column the first that matches counts). A pattern is looked for, in any case,
in source, model, device, notes, "zero" with that column and "step" with the seconds, in this order:
facts that a source has of some of its rows alone find those by their seconds.

A step's seconds are those measured, or follow from tokens a second, or from TFLOP/s by the source's
own way of counting. Rows that say two things that cannot both be are named (`faults`), rows that
leave out what a price needs list it (`missing`), rows that cannot be read are named and left out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import isfinite
from pathlib import Path

from jaxscaler.cluster.devices import find_device
from jaxscaler.errors import JaxscalerError

COLUMNS = (
    "source", "model", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq",
    "global_batch", "micro_batch", "device", "n_devices", "tp", "pp", "dp", "zero", "recompute",
    "measured_tflops_per_device", "measured_step_s", "measured_mem_gb", "notes",
)  # fmt: skip
# Columns that a table may do without: then no row says anything there.
OPTIONAL = {"kv_heads", "micro_batch", "tp", "pp", "dp", "zero", "recompute", "notes",
            "measured_tflops_per_device", "measured_step_s", "measured_mem_gb"}  # fmt: skip
DEVICES = {  # as tables write them -> rows of the device table, besides its own names and aliases
    "h100-96hbm2e": "h100-96", "tpuv3": "v3", "tpuv4": "v4", "tpuv5e": "v5e", "tpuv5p": "v5p",
    "tpuv6e": "v6e", "tpuv7x": "v7x",
}  # fmt: skip
AGREE = 0.10  # two ways to the seconds of a step may differ by that share


@dataclass(frozen=True)
class Published:
    """One measured training step.

    Sizes as counts, memory in bytes a device, seconds a step. `None`: the source does not say,
    a head_size of 0: hidden / heads.
    `experts` and `experts_used`: 0 for dense models. `node_gbs`: GB/s of a node's network, one way,
    `fabric_gbs`: of a device inside it; None: as the device table has it.
    `shard`: devices that ZeRO splits among, 0 for all. `gradient`: dtype that gradients are summed
    up in. `setup`: what changed between rows of a source that it says are not to be compared.
    `blocking`: launches wait until kernels are done. `embed_norm`: a norm follows the table.
    `seconds_from`: "step", "tokens" or "TFLOP/s".
    `memory_at`: the pipeline stages that it was read on, "first", "ends" or "" for the fullest.
    `out_of_memory`: the run did not fit.
    """

    source: str
    model: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    seq: int
    gated: bool
    experts: int
    experts_used: int
    global_batch: int | None
    micro_batch: float | None
    device: str
    devices: int | None
    per_node: int | None
    node_gbs: float | None
    fabric_gbs: float | None
    tp: int | None
    pp: int | None
    dp: int | None
    cp: int
    ep: int
    chunks: int
    zero: int | None
    shard: int
    recompute: str | None
    dtype: str
    attention: str
    schedule: str
    stack: str
    gradient: str
    setup: str
    compiled: bool
    blocking: bool
    embed_norm: bool
    sequence: bool
    overlap: str
    seconds: float | None
    seconds_from: str
    tflops: float | None
    memory: float | None
    memory_kind: str
    memory_at: str
    out_of_memory: bool
    faults: tuple[str, ...]
    missing: tuple[str, ...]
    doubt: str
    notes: str

    @property
    def group(self) -> tuple:
        """Rows of one group differ in their plan alone: model, devices and batch are the same."""
        return (self.source, self.device, self.devices, self.hidden, self.layers, self.heads,
                self.ffn, self.vocab, self.seq, self.global_batch, self.dtype,
                self.setup)  # fmt: skip

    @property
    def plan(self) -> tuple:
        """What a group's rows differ in; rows of one plan are repeated measurements."""
        return (self.tp, self.pp, self.dp, self.cp, self.ep, self.micro_batch, self.zero,
                self.recompute, self.chunks, self.schedule, self.compiled,
                self.overlap)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """`unread`: a line per row that is no measurement of a training step, and why. `ignored`:
    columns that are not looked at."""

    rows: list[Published]
    unread: list[str]
    ignored: list[str]


def read(path: str | Path) -> Table:
    """A table. Raises ValueError where it has not the columns that every row needs."""
    rows, unread = [], []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = [c for c in reader.fieldnames or () if c]
        if missing := [c for c in COLUMNS if c not in columns and c not in OPTIONAL]:
            raise ValueError(f"{path}: no column {missing}; a table has {COLUMNS}")
        for row in reader:
            try:
                rows.append(normalised(row))
            except ValueError as error:
                unread.append(f"line {reader.line_num}: {error}")
    return Table(rows, unread, [c for c in columns if c not in COLUMNS])


def device_named(text: str) -> str | None:
    """The row of the device table that a table means; None: there is none."""
    name = re.sub(r"[\s_]+|^nvidia", "", text.lower())
    try:
        return find_device(DEVICES.get(name, name))[0].name
    except JaxscalerError:
        return None


def normalised(given: dict[str, str]) -> Published:
    """One row of a table. Raises ValueError, naming row and column, on what is no number."""
    row = {column: (given.get(column) or "").strip() for column in COLUMNS}
    said = {column: _said(column, row) for column in _mapping()}
    number = _Numbers(row)
    shape = {c: number.count(c) for c in ("hidden", "layers", "heads", "ffn", "vocab", "seq")}
    experts, used = map(int, (said["experts"] or "0/0").split("/"))
    device = device_named(row["device"])
    cp, ep, chunks = (int(said[c] or 1) for c in ("cp", "ep", "chunks"))
    parallel = {c: number.maybe(c) for c in ("tp", "pp", "dp")}
    kv_heads = number.maybe("kv_heads") or shape["heads"]
    sizes = _Sizes(**shape, kv_heads=kv_heads, gated=said["gated"] == "yes", experts=experts,
                   used=used)  # fmt: skip
    batch, devices = number.maybe("global_batch"), number.maybe("n_devices")
    each = int(said["chip"] or 1)  # devices of what the source counts
    recompute = _recompute(row["recompute"])
    work = sizes.work(said["flops"]) if said["flops"] else 0.0
    ways = dict(_seconds(row, number, sizes, batch, devices, work))
    seconds_from = next(iter(ways), "")
    zero = _zero(row["zero"], said["stack"], parallel["pp"])
    micro = number.fraction("micro_batch")
    needed = {
        "device": device, "n_devices": devices, "global_batch": batch, "micro_batch": micro,
        "zero": zero, "recompute": recompute, **parallel, "seconds": seconds_from or None,
    }  # fmt: skip
    memory = number.fraction("measured_mem_gb")
    unit = 2**30 if said["memory"] in ("process", "reserved") else 1e9
    out_of_memory = row["notes"].lower().startswith("oom")
    if out_of_memory:
        needed.pop("seconds")
    if "offload" in row["recompute"].lower():
        needed["offload"] = None  # to the host: no price has it
    return Published(
        source=row["source"], model=row["model"], **shape, kv_heads=sizes.kv_heads,
        head_size=int(said["head_size"] or 0),
        gated=sizes.gated, experts=experts, experts_used=used, global_batch=batch,
        micro_batch=micro, device=device or row["device"], devices=devices and devices * each,
        per_node=int(said["per_node"]) if said["per_node"] else None,
        node_gbs=float(said["node_gbs"]) if said["node_gbs"] else None,
        fabric_gbs=float(said["fabric_gbs"]) if said["fabric_gbs"] else None,
        tp=parallel["tp"], pp=parallel["pp"], dp=parallel["dp"], cp=cp, ep=ep,
        chunks=chunks, zero=zero, shard=int(said["shard"] or 0), recompute=recompute,
        dtype=said["dtype"] or "bf16", attention=said["attention"] or "materialised",
        schedule=(said["schedule"] or "") if (parallel["pp"] or 1) > 1 else "",
        stack=said["stack"] or "torch", setup=said["setup"] or "",
        gradient=said["gradient"] or ("float16" if said["dtype"] == "f16" else "float32"),
        compiled=said["compile"] != "no", blocking=said["launch"] == "blocking",
        embed_norm=said["embed_norm"] == "yes",
        sequence=said["sequence"] == "yes", overlap=said["overlap"] or "",
        seconds=ways.get(seconds_from), seconds_from=seconds_from,
        tflops=number.fraction("measured_tflops_per_device"),
        memory=memory and memory * unit, memory_kind=said["memory"] or "",
        memory_at=said["memory_at"] or "",
        out_of_memory=out_of_memory,
        faults=tuple(
            _faults(sizes, parallel, cp, batch, devices and devices * each, micro, row["device"],
                    device, ways)
        ),
        missing=tuple(name for name, value in needed.items() if value is None),
        doubt=said["doubt"] or "", notes=row["notes"],
    )  # fmt: skip


@cache
def _mapping() -> dict[str, list[tuple[re.Pattern, str]]]:
    columns: dict[str, list[tuple[re.Pattern, str]]] = {}
    with open(Path(__file__).with_name("_published.csv"), newline="") as file:
        for line in csv.DictReader(file):
            pattern = re.compile(line["pattern"], re.I)
            columns.setdefault(line["column"], []).append((pattern, line["value"]))
    return columns


def _said(column: str, row: dict[str, str]) -> str | None:
    text = " | ".join(row[c] for c in ("source", "model", "device", "notes"))
    text += f" | zero {row['zero']} | step {row['measured_step_s']}"
    for pattern, value in _mapping()[column]:
        if found := pattern.search(text):
            return found.expand(value)
    return None


@dataclass(frozen=True)
class _Numbers:
    row: dict[str, str]

    def fraction(self, column: str) -> float | None:
        text = self.row[column]
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{self._row()}: {column} {text!r} is no number") from None
        if not (value > 0 and isfinite(value)):
            raise ValueError(f"{self._row()}: {column} {text!r} is not positive")
        return value

    def maybe(self, column: str) -> int | None:
        value = self.fraction(column)
        if value is not None and value != int(value):
            raise ValueError(f"{self._row()}: {column} {value!r} is no whole number")
        return value if value is None else int(value)

    def count(self, column: str) -> int:
        value = self.maybe(column)
        if value is None:
            raise ValueError(f"{self._row()}: no {column}")
        return value

    def _row(self) -> str:
        return f"{self.row['source']}, {self.row['model']}"


@dataclass(frozen=True)
class _Sizes:
    """Work of a decoder. Sources: the closed forms of the scaling papers; a token's 6 P, of a
    mixture the parameters that it uses."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int
    gated: bool
    experts: int
    used: int

    def work(self, way: str) -> float:
        """Floating-point operations of a token, as a source counts them."""
        h, s = self.hidden, self.seq
        if way == "recompute":
            return (
                96 * self.layers * h * h * (1 + s / (6 * h) + self.vocab / (16 * self.layers * h))
            )
        mlp = (3 if self.gated else 2) * h * self.ffn * max(self.used, 1)
        attention = (2 + 2 * self.kv_heads / self.heads) * h * h
        dense = self.layers * (attention + mlp) + self.vocab * h
        return 6 * dense + (12 * self.layers * h * s if way == "attention" else 0)


def _seconds(
    row: dict, number: _Numbers, sizes: _Sizes, batch: int | None, devices: int | None, work: float
) -> Iterator[tuple[str, float]]:
    """Ways to the seconds of a step, the most direct first."""
    if (step := number.fraction("measured_step_s")) is not None:
        yield "step", step
    if batch is None or devices is None:
        return
    tokens = batch * sizes.seq
    if found := re.search(r"(\d[\d,]*\.?\d*) tok/s/(?:gpu|chip|device)", row["notes"], re.I):
        yield "tokens", tokens / (devices * float(found[1].replace(",", "")))
    tflops = number.fraction("measured_tflops_per_device")
    if tflops and work and not sizes.experts:
        yield "TFLOP/s", tokens * work / (devices * tflops * 1e12)


def _recompute(text: str) -> str | None:
    """ "none", "selective" (attention alone) or "full"; None: not told, or some other choice."""
    text = text.strip().lower()
    return text if text in ("none", "selective", "full") else None


def _zero(text: str, stack: str | None, pp: int | None) -> int | None:
    text = text.strip().lower()
    stage = 3 if text.startswith("2d fsdp") else int(text[0]) if text[:1].isdigit() else None
    if stage == 3 and stack == "torch" and (pp or 1) > 1:
        return 1  # FSDP2 leaves a stage's parameters gathered between micro-batches
    return 0 if not text and (stack or "").startswith("megatron") else stage


def _faults(
    sizes: _Sizes, parallel: dict, cp: int, batch: int | None, devices: int | None,
    micro: float | None, said: str, device: str | None, ways: dict[str, float],
) -> Iterator[str]:  # fmt: skip
    """What cannot both be."""
    if device is None:
        yield f"unknown device {said!r}"
    if sizes.hidden % sizes.heads and not sizes.experts:
        yield f"{sizes.heads} heads do not divide hidden {sizes.hidden}"
    if sizes.heads % sizes.kv_heads:
        yield f"{sizes.kv_heads} key heads do not divide {sizes.heads} heads"
    tp, pp, dp = (parallel[c] for c in ("tp", "pp", "dp"))
    if tp and pp and dp and devices and tp * pp * dp * cp != devices:
        yield f"tp {tp} x pp {pp} x dp {dp} x cp {cp} is not {devices} devices"
    if micro and micro > 1 and micro != int(micro):
        yield f"micro-batch {micro:g} is no whole number"
    elif dp and batch and micro and micro >= 1 and batch % (dp * micro):
        yield f"dp {dp} x micro-batch {micro:g} does not divide batch {batch}"
    if not ways:
        return
    first, *others = ways.items()
    for name, value in others:
        if abs(value / first[1] - 1) > AGREE:
            yield f"{value:.3g} s by {name} against {first[1]:.3g} s by {first[0]}"


def problems(rows: Iterable[Published]) -> list[str]:
    """A line per contradictory row."""
    return [f"{r.source}, {r.model}: {fault}" for r in rows for fault in r.faults]


def settled(rows: list[Published]) -> tuple[list[Published], list[str]]:
    """(rows, a line per contradiction): readings of memory that cannot both be are taken out of
    both rows: of one plan, apart by more than `AGREE`; of two that differ in their micro-batch
    alone, less by that for the larger one."""
    alike: dict = {}
    for at, row in enumerate(rows):
        if row.memory and row.micro_batch:
            key = (row.group, replace(row, micro_batch=None).plan)
            alike.setdefault(key, []).append((row.micro_batch, row.memory, at))
    lines, out = [], set()
    for (_, _), found in alike.items():
        for (small, low, a), (large, high, b) in combinations(sorted(found), 2):
            if high < low * (1 - AGREE) or (small == large and high > low * (1 + AGREE)):
                row = rows[a]
                lines.append(
                    f"{row.source}, {row.model}, tp {row.tp} x pp {row.pp} x dp {row.dp}: "
                    f"{low / 1e9:.3g} GB with micro-batch {small:g}, {high / 1e9:.3g} GB with "
                    f"{large:g}"
                )
                out |= {a, b}
    return [replace(r, memory=None) if i in out else r for i, r in enumerate(rows)], lines
