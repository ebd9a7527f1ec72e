"""Runs mechanisms over processes of this machine: how each is spread, how many bytes it sends, and its time."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from fast_attention import files
from fast_attention.lab.measure import Setting
from fast_attention.lab.records import Record
from fast_attention.lab.tables import Table
from fast_attention.mechanism import Mixer, Shape, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.parallel import Shards, attend, counted, mix, strategy
from fast_attention.parallel.strategy import Call, Sizes

ROUNDS = 3


@dataclass
class Spread:
    """A mechanism over processes at one length: bytes that the busiest process sends forward, and seconds."""

    mechanism: str
    length: int
    is_causal: bool
    strategy: str = ""
    collectives: str = ""
    declared: int | None = None
    counted: int | None = None
    seconds: float | None = None
    note: str = ""


@dataclass
class SpreadRecord(Record):
    """What ``bench --processes`` measured."""

    kind: ClassVar[str] = "bench over processes"
    noun: ClassVar[str] = "benchmark over processes"
    data: ClassVar[str] = "processes.json"
    page: ClassVar[str] = ""
    rows: list[Spread] = field(default_factory=list)


def measure(world: int, mechanisms: Sequence[Any], lengths: Sequence[int], setting: Setting) -> list[Spread]:
    """A row for each mechanism and length, from ``world`` processes of one thread each, joined by gloo."""
    calls = [
        (mechanism, length, setting.is_causal)
        for length in lengths for mechanism in mechanisms if setting.is_causal in mechanism.traits.modes
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (world, calls, setting, folder), nprocs=world, daemon=True)  # type: ignore[attr-defined]
        every = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
    return [_busiest([Spread(**row) for row in rows]) for rows in zip(*every, strict=True)]


def _busiest(rows: list[Spread]) -> Spread:
    """One row from those of all processes: the most bytes, the longest time."""
    row = max(rows, key=lambda each: each.declared or 0)
    row.seconds = max((each.seconds for each in rows if each.seconds is not None), default=None)
    return row


def _process(rank: int, world: int, calls: list[tuple[Any, int, bool]], setting: Setting, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    rows = [asdict(_row(*call, rank, world, setting)) for call in calls]
    Path(folder, str(rank)).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # an ordinary exit was seen to abort, rarely, while threads of gloo end


def _row(mechanism: Any, length: int, is_causal: bool, rank: int, world: int, setting: Setting) -> Spread:
    row = Spread(repr(mechanism), length, is_causal)
    lengths = tuple((length + world - 1 - each) // world for each in range(world))
    group = Shards(dist.group.WORLD, rank, lengths, lengths)
    torch.manual_seed(setting.seed)
    is_mixer = isinstance(mechanism, Mixer)
    shape = (
        Shape(1, setting.heads * setting.head_dim, length)
        if is_mixer
        else Shape(setting.heads, setting.head_dim, length)
    )
    w = Bound(mechanism, shape).to(dtype=setting.dtype).w
    inputs = [setting.tokens(lengths[rank])] if is_mixer else list(setting.tensors(lengths[rank]))
    heads, width = (1, inputs[0].shape[-1]) if is_mixer else (setting.heads, setting.head_dim)
    sizes = Sizes(setting.batch, heads, width, width, inputs[0].element_size())
    try:
        chosen = strategy(mechanism, is_causal)
        row.strategy, row.collectives = chosen.name, chosen.collectives
        row.declared = chosen.sends(Call(mechanism, w, group, is_causal), sizes)
        row.counted, row.seconds = _timed(mechanism, inputs, w, group, is_causal)
    except Unsupported as error:
        row.note = str(error)
    return row


def _timed(mechanism: Any, inputs: list[Tensor], w: Any, group: Shards, is_causal: bool) -> tuple[int, float]:
    """Bytes sent in one forward pass, and the median of its seconds."""
    run: Any = mix if isinstance(mechanism, Mixer) else attend
    times, sums = [], 0
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            dist.barrier()
            began = time.perf_counter()
            with counted() as traffic:
                run(mechanism, *inputs, w, group=group, is_causal=is_causal)
            times.append(time.perf_counter() - began)
            sums = traffic.bytes
    return sums, statistics.median(times[1:])


def table(record: SpreadRecord) -> Table:
    """The rows, for the terminal."""
    rows = [
        [row.mechanism, f"{row.length:,}", row.strategy, row.note or row.collectives, *_numbers(row)]
        for row in record.rows
    ]
    heads = ["mechanism", "tokens", "spread by", "sends", "MB a process and layer, declared", "counted", "ms"]
    processes, order = record.meta["processes"], "causal" if record.meta["causal"] else "not causal"
    return Table(heads, rows, left=(2, 3), title=f"Forward over {processes} processes of one thread, {order}")


def _numbers(row: Spread) -> list[str]:
    mega = ("" if n is None else f"{n / 1e6:.3f}" for n in (row.declared, row.counted))
    return [*mega, "" if row.seconds is None else f"{row.seconds * 1e3:.1f}"]


def leave(record: SpreadRecord, folder: Path) -> Path:
    """Write the record, whole or not at all."""
    path = folder / record.data
    files.write(path, record.to_json())
    return path
