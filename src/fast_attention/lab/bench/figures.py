"""Derives from a benchmark's numbers: crossovers, the best peer, the geometric mean, slopes of memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fast_attention.lab.bench.competitors import OURS, TORCH
from fast_attention.lab.bench.decoding import flatness
from fast_attention.lab.bench.record import Benchmark, Row
from fast_attention.lab.records import PASSES, Cell, Pass
from fast_attention.lab.verdicts import interpolated


def speed(cell: Cell | None, which: Pass = "forward") -> float | None:
    """The baseline's time over its own, median over rounds: above 1 is faster."""
    if cell is None or cell.status != "measured":
        return None
    ratio = cell.times(which).ratio
    return 1 / ratio if ratio else None


def speeds(record: Benchmark, name: str, which: Pass = "forward") -> dict[int, float]:
    """Speed by length, where it was measured."""
    values = {cell.length: speed(cell, which) for cell in record.cells if cell.mechanism == name}
    return {length: value for length, value in sorted(values.items()) if value}


def crossover(known: Mapping[int, float]) -> tuple[float, bool] | None:
    """The length from which on it is faster at every measured length, and whether it may be shorter still.

    Between the last length at which it was slower and the first of the lasting lead, speeds are joined by a straight
    line on logarithmic scales; where it led from the first length on, that length is an upper bound.
    """
    won = None
    for length in sorted(known, reverse=True):
        if known[length] <= 1.0:
            break
        won = length
    return None if won is None else interpolated({length: 1 / value for length, value in known.items()}, won)


class Match(NamedTuple):
    """Ours against the best peer of the same family, direction and kind, at one length; factor above 1: ours leads."""

    family: str
    is_causal: bool
    kind: str
    peer: str
    ours: float
    theirs: float

    @property
    def factor(self) -> float:
        """Our speed over the peer's."""
        return self.ours / self.theirs


def matches(record: Benchmark, length: int, which: Pass = "forward", *, same: bool = False) -> list[Match]:
    """Every comparison of like with like that was measured at ``length``; ``same``: of the same function only."""
    compared = []
    for row in record.rows:
        ours = speed(record.cell(row.name, length), which) if row.owner == OURS else None
        peers = [peer.name for peer in peers_of(record, row) if peer.same or not same]
        speeds = {name: value for name in peers if (value := speed(record.cell(name, length), which))}
        if ours is not None and speeds:
            best = max(speeds, key=lambda name: speeds[name])
            compared.append(Match(row.family, row.is_causal, row.kind, best, ours, speeds[best]))
    return compared


def peers_of(record: Benchmark, row: Row) -> list[Row]:
    """The peers of one of ours: same family, same direction, same kind."""
    like = (row.family, row.is_causal, row.kind)
    return [r for r in record.rows if r.owner not in (OURS, TORCH) and (r.family, r.is_causal, r.kind) == like]


def hardest(compared: Iterable[Match]) -> list[Match]:
    """One match per family and direction: where it has several kinds, the one with the smallest factor."""
    groups: dict[tuple[str, bool], list[Match]] = {}
    for match in compared:
        groups.setdefault((match.family, match.is_causal), []).append(match)
    return [min(group, key=lambda match: match.factor) for group in groups.values()]


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean, or None where there are no values."""
    known = list(values)
    return statistics.geometric_mean(known) if known else None


def slope(points: Mapping[int, float]) -> float | None:
    """The exponent with which a positive quantity grows with length, by least squares on logarithmic scales."""
    known = {math.log(length): math.log(value) for length, value in points.items() if value > 0}
    return statistics.linear_regression(list(known), list(known.values())).slope if len(known) > 1 else None


def memory_of(record: Benchmark, name: str, which: Pass = "forward") -> dict[int, int]:
    """Peak growth by length in fresh processes."""
    peaks = sorted((peak for peak in record.memory if peak.name == name), key=lambda peak: peak.length)
    return {peak.length: size for peak in peaks if (size := getattr(peak, f"{which}_bytes")) is not None}


def common_length(record: Benchmark) -> int | None:
    """The greatest length with nearly as many comparisons with peers (three quarters) as any; else the greatest."""
    lengths = sorted({cell.length for cell in record.cells if speed(cell) is not None})
    counts = {length: len(matches(record, length)) for length in lengths}
    most = max(counts.values(), default=0)
    return max((length for length in lengths if 4 * counts[length] >= 3 * most), default=None)


def summarise(record: Benchmark) -> dict[str, Any]:
    """The summary of a record: everything that is derived from its numbers."""
    length = common_length(record)
    summary: dict[str, Any] = {"common_length": length, "crossover": {}, "percent_of_gemm": {}, "memory_slope": {}}
    for name in (row.name for row in record.rows if row.owner == OURS):
        summary["crossover"][name] = {which: crossover(speeds(record, name, which)) for which in PASSES}
        slopes = {which: slope(memory_of(record, name, which)) for which in PASSES}
        if slopes["forward"] is not None:
            summary["memory_slope"][name] = slopes
        cell = record.cell(name, length) if length else None
        if cell is not None and cell.status == "measured":
            summary["percent_of_gemm"][name] = {w: percent_of_ceiling(record, cell, w) for w in PASSES}
    for which in PASSES:
        every = matches(record, length or 0, which)
        each, alike = hardest(every), hardest(matches(record, length or 0, which, same=True))
        worst = min(each, key=lambda match: match.factor, default=None)
        summary[f"peers_{which}"] = {
            "geometric_mean": geometric_mean(match.factor for match in each),
            "geometric_mean_of_the_same_function": geometric_mean(match.factor for match in alike),
            "smallest": None if worst is None else {**worst._asdict(), "factor": worst.factor},
            "matches": [{**match._asdict(), "factor": match.factor} for match in every],
        }
    summary["decode_flatness"] = {f"{name}, batch {batch}": v for (name, batch), v in flatness(record.steps).items()}
    return summary


def percent_of_ceiling(record: Benchmark, cell: Cell, which: Pass = "forward") -> float | None:
    """Counted operations per second of the fastest sample, in percent of the best matrix product of the same run."""
    best = cell.times(which).best_ms
    operations = cell.operations if which == "forward" else cell.training_operations
    peak = max((limits["gemm_gflops"] for limits in record.ceilings), default=math.nan)
    if not best or operations is None or not peak > 0:
        return None
    return 100 * operations / (best / 1000) / (peak * 1e9)
