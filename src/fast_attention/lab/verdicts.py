"""Puts a comparison into words: crossovers, one sentence per mechanism, what it cannot do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fast_attention import catalogue
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.numbers import Number, bytes_of, digits, percent
from fast_attention.lab.records import EXACT, Cell, Pass
from fast_attention.mechanism import Mixer

TRAIN_IT = "not an approximation: train it"
NOISE = 0.05


def even(cell: Cell, which: Pass = "forward") -> bool:
    """Whether a time is exact attention's within noise: by the middle half of the rounds, or within 5 %."""
    times = cell.times(which)
    low, high = (times.ratio if edge is None else edge for edge in (times.low, times.high))
    return times.ratio is not None and (abs(times.ratio - 1) < NOISE or (low or 0.0) <= 1.0 <= (high or 0.0))


def order(record: Comparison) -> list[str]:
    """Exact attention and all others, the fastest first: at the greatest length, then those measured up to less."""

    def rank(name: str) -> tuple[float, float]:
        measured = record.ratios(name)
        last = max(measured, default=0)
        return -last, measured.get(last, math.inf)

    return sorted([EXACT, *record.mechanisms], key=rank)


def crossover(record: Comparison, name: str, which: Pass = "forward") -> int | None:
    """The shortest measured length from which it beats exact attention there and at every greater length asked for.

    A greater length at which it was not measured (over budget, failed) counts as not beaten, and so does a time within
    noise.
    """
    measured, won = record.ratios(name, which), None
    reached = {cell.length for cell in record.cells if cell.mechanism == EXACT and cell.forward_ratio is not None}
    for length in sorted(reached, reverse=True):
        cell = record.cell(name, length)
        if cell is None or measured.get(length, math.inf) >= 1.0 or even(cell, which):
            break
        won = length
    return won


def crossing(record: Comparison, name: str, which: Pass = "forward") -> float | None:
    """The length at which the ratio passes 1, between the crossover and the length before it, on log-log lines."""
    won = crossover(record, name, which)
    return None if won is None else interpolated(record.ratios(name, which), won)[0]


def interpolated(ratios: Mapping[int, float], won: int) -> tuple[float, bool]:
    """Where time ratios pass 1 before the length ``won``, on log-log lines, and whether that is only an upper bound."""
    shorter = [length for length in ratios if length < won]
    if not shorter:
        return float(won), True
    before = max(shorter)
    above, below = max(math.log(ratios[before]), 0.0), -math.log(ratios[won])
    return math.exp(math.log(before) + above / (above + below) * math.log(won / before)), False


def longest(record: Comparison) -> int | None:
    """The greatest length at which exact attention was timed."""
    return max(record.ratios(EXACT), default=None)


def kind(mechanism: Any) -> str:
    """What a mechanism's error means, or why it has none."""
    if mechanism == catalogue.default("Softmax"):
        return EXACT
    if mechanism.traits.approximates is not None:
        return f"approximates {mechanism.traits.approximates}"
    if mechanism.traits.learned:
        return TRAIN_IT
    if isinstance(mechanism, Mixer):
        return "another function of whole tokens, not an approximation"
    return "another function, not an approximation"


def cannot(mechanism: Any) -> list[str]:
    """What a mechanism's traits deny, in words."""
    traits = mechanism.traits
    denied = {
        "be causal": not traits.causal,
        "see later tokens": not traits.bidirectional,
        "ignore padding": not traits.padding,
        "attend from one sequence to another": not traits.cross,
        "decode token by token": traits.memory is None,
        "decode in constant memory": traits.memory == "growing",
        "take an arbitrary attention mask": not traits.mask,
        "exceed the length its weights are cut for": traits.bounded,
        "show its attention matrix": not traits.matrix,
        "be compiled as one graph": not traits.compile,
        "be exported (torch.export, ONNX) with a dynamic length": not traits.export,
        "be used before training": traits.learned,
    }
    return [words for words, is_denied in denied.items() if is_denied]


def wins(record: Comparison, name: str, which: Pass = "forward") -> str:
    """The crossover in words."""
    won, end, measured = crossover(record, name, which), longest(record), record.ratios(name, which)
    if end is None or not measured:
        return "not timed"
    if won is not None:
        return Number(f"from {won:,}", won)
    if end in measured:
        return Number(f"never up to {end:,}", math.inf)
    last = max(measured)
    return f"not up to {last:,}" if measured[last] >= 1.0 else f"not timed beyond {last:,}"


def sentence(record: Comparison, mechanism: Any) -> str:
    """One sentence: from which length on it is faster, and what it costs in accuracy."""
    return f"{_speed(record, repr(mechanism))}; {_accuracy(record, mechanism)}."


def _speed(record: Comparison, name: str) -> str:
    measured, won, end = record.ratios(name), crossover(record, name), longest(record)
    if not measured or end is None:
        notes = [cell.note for cell in record.cells if cell.mechanism == name and cell.note]
        return f"Not timed ({notes[0] if notes else 'not reached'})"
    last = max(measured)
    at_the_end = f"{speed(measured[last])} at {last:,}"
    if won is not None:
        return f"Faster than exact attention from {won:,} tokens on ({at_the_end})"
    if last < end:
        return f"Not timed beyond {last:,} tokens, where it is {speed(measured[last])} as exact attention"
    return f"Not faster than exact attention up to {end:,} tokens ({at_the_end})"


def speed(ratio: float) -> str:
    """A time ratio in words."""
    if abs(ratio - 1) < NOISE:
        return "about as fast"
    return f"{digits(1 / ratio)} times as fast" if ratio < 1 else f"{digits(ratio)} times as slow"


def _accuracy(record: Comparison, mechanism: Any) -> str:
    name = repr(mechanism)
    error, ratio = record.error(name), record.ratios(name).get(record.length or 0)
    summary = error.summary() if error else None
    if mechanism.traits.approximates is None:
        return kind(mechanism)
    if error is None or summary is None:
        return "its error was not measured" + (f" at {record.length:,} tokens" if record.length else "")
    words = f"output error {percent(summary[0])} in the median head and {percent(summary[1])} in the worst"
    there = f", {speed(ratio)} there" if ratio is not None and error.length != longest(record) else ""
    return f"at {error.length:,} tokens {words}{reads(error)}{there}"


def reads(error: Error) -> str:
    """How many of the visible pairs a mechanism weighs, where it leaves any out."""
    share = error.visible_fraction
    return "" if share is None or share == 1.0 else f", from {percent(share)} of the visible pairs"


def headline(record: Comparison) -> list[str]:
    """The main results in a few sentences."""
    end = longest(record)
    if end is None:
        return ["Nothing was timed."]
    return [*_fastest(record, end), *_leanest(record, end)]


def _fastest(record: Comparison, end: int) -> list[str]:
    firsts = {name: crossover(record, name) for name in record.mechanisms}
    won = {name: length for name, length in firsts.items() if length is not None}
    if not any(end in record.ratios(name) for name in record.mechanisms):
        return [f"Nothing but exact attention was timed at {end:,} tokens: more --budget may change that."]
    if not won:
        return [f"Use exact attention: nothing here was faster at {end:,} tokens."]
    sentences = [f"Below {min(won.values()):,} tokens use exact attention: nothing here is faster on this machine."]
    if min(won.values()) == min(record.ratios(EXACT)):
        sentences = []
    ratios = {name: record.ratios(name)[end] for name in won}
    fastest = min(won, key=lambda name: ratios[name])
    sentences.append(f"At {end:,} tokens {fastest} is fastest: {speed(ratios[fastest])} as exact attention.")
    return [*sentences, *_most_accurate(record)]


def _most_accurate(record: Comparison) -> list[str]:
    """The approximation of the least error among those that are faster, error and speed at one length."""
    at = record.length
    errors = {name: error for name in record.mechanisms if (error := record.error(name)) is not None}
    ratios = {name: record.ratios(name).get(at or 0, math.inf) for name in errors}
    faster = [name for name in errors if ratios[name] < 1.0 and not even(_cell(record, name, at or 0))]
    if not faster:
        return [f"No approximation that needs no training is faster at {at:,} tokens."] if errors else []
    medians = {name: (errors[name].summary() or (math.inf,))[0] for name in faster}
    best = min(medians, key=lambda name: medians[name])
    return [
        f"At {at:,} tokens, of the approximations that are faster there, {best} is the most accurate: median error "
        f"{percent(medians[best])}{reads(errors[best])}, {speed(ratios[best])}."
    ]


def _cell(record: Comparison, name: str, length: int) -> Cell:
    return record.cell(name, length) or Cell(name, length)


def _leanest(record: Comparison, end: int) -> list[str]:
    """The main result about memory."""
    cells = [cell for cell in record.cells if cell.length == end and cell.peak_bytes is not None]
    sizes = {cell.mechanism: cell.peak_bytes or 0 for cell in cells}
    exact = sizes.pop(EXACT, None)
    if exact is None or not sizes:
        return []
    passes = "forward and backward" if record.meta.get("backward") else "a forward pass"
    least = min(sizes, key=lambda name: sizes[name])
    kernel = f"exact attention's fused kernel takes {bytes_of(exact)} at {end:,} tokens ({passes})"
    if sizes[least] > exact * (1 - NOISE):
        return [f"Nothing clearly beats exact attention's memory: {kernel}, {least} {bytes_of(sizes[least])}."]
    fewer = sum(size <= exact * (1 - NOISE) for size in sizes.values())
    return [f"Less memory: {fewer} of {len(sizes)}, {least} the least with {bytes_of(sizes[least])}; {kernel}."]
