"""Puts a comparison into words: whether anything is better than exact attention, crossovers, what each cannot do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fast_attention import catalogue
from fast_attention.lab.records import EXACT, Cell, Comparison, Pass
from fast_attention.lab.tables import Number, digits, percent
from fast_attention.mechanism import Attention, Mixer

Kind = Literal["use", "exact", "unproven", "slower", "inexact", "open", "unknown", "cannot"]
LATE = ("over budget", "not reached")  # begins the note of what might be timed in more time
UNFIT = ("refused", "failed", "too large")  # begins the note of what no time would help
NOISE = 0.05
BETTER = 1 / 1.1  # of exact attention's time: more than 10 % faster
EVEN = 1.03  # times as fast, below which a gain with the same results is noise
ASKED = 0.1  # median relative error, where no other is asked for
LONG = (  # the decision for texts beyond a model's positions, which docs/build.py repeats in README and docs
    "Read a text that is longer than a model's positions in chunks of as many tokens as it has, with exact attention.",
    "For retrieval keep the embedding of every chunk: the nearest counts. For one vector of the text take their mean.",
    "Only where one pass has to see the whole text, as a decoder does, extend the positions and swap in "
    "BlockLocal(block_size=256).",
)


def even(cell: Cell, which: Pass = "forward") -> bool:
    """Whether a time is exact attention's within noise: by the middle half of the rounds, or within 5 %."""
    times = cell.times(which)
    low, high = (times.ratio if edge is None else edge for edge in (times.low, times.high))
    return times.ratio is not None and (abs(times.ratio - 1) < NOISE or (low or 0.0) <= 1.0 <= (high or 0.0))


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


def interpolated(ratios: Mapping[int, float], won: int) -> tuple[float, bool]:
    """Where time ratios pass 1 before the length ``won``, on log-log lines, and whether that is only an upper bound."""
    shorter = [length for length in ratios if length < won]
    if not shorter:
        return float(won), True
    before = max(shorter)
    slower, faster = max(math.log(ratios[before]), 0.0), -math.log(ratios[won])
    return math.exp(math.log(before) + slower / (slower + faster) * math.log(won / before)), False


def measurable(mechanism: Any) -> bool:
    """Whether a mechanism has an error to measure: it approximates exact attention, and needs no training."""
    return isinstance(mechanism, Attention) and mechanism.traits.approximates is not None


def learns(mechanism: Any) -> bool:
    """Whether a mechanism has weights of its own that can learn to stand in for exact attention's matrix."""
    traits = mechanism.traits
    return traits.learned and traits.matrix and {*"qk"} <= {*traits.inputs}


def kind(mechanism: Any) -> str:
    """The meaning of a mechanism's error, or why it has none."""
    if mechanism == catalogue.default("Softmax"):
        return EXACT
    if mechanism.traits.approximates is not None:
        return f"approximates {mechanism.traits.approximates}"
    if mechanism.traits.learned:
        return "not an approximation: train it"
    return f"another function{' of whole tokens' if isinstance(mechanism, Mixer) else ''}, not an approximation"


def cannot(mechanism: Any) -> list[str]:
    """Abilities that a mechanism's traits deny, in words."""
    traits = mechanism.traits
    denied = {
        "be causal": not traits.causal,
        "see later tokens": not traits.bidirectional,
        "ignore padding": not traits.padding,
        "attend from one sequence to another": not traits.cross,
        "decode token by token": traits.memory is None,
        "decode in constant memory": traits.memory == "growing",
        "take an arbitrary attention mask": not traits.mask,
        "exceed the length its weights are cut for": traits.needs_max_len,
        "show its attention matrix": not traits.matrix,
        "be compiled as one graph": not traits.compile,
        "be exported (torch.export, ONNX) with a dynamic length": not traits.export,
        "be used before training": traits.learned,
    }
    return [words for words, is_denied in denied.items() if is_denied]


def wins(record: Comparison, name: str, which: Pass = "forward") -> str:
    """The crossover in words."""
    won, measured = crossover(record, name, which), record.ratios(name, which)
    end = max(record.ratios(EXACT), default=None)
    if end is None or not measured:
        return "not timed"
    if won is not None:
        return Number(f"from {won:,}", won)
    if end in measured:
        return Number(f"never up to {end:,}", math.inf)
    last = max(measured)
    return f"not up to {last:,}" if measured[last] >= 1.0 else f"not timed beyond {last:,}"


def speed(ratio: float) -> str:
    """A time ratio in words."""
    if abs(ratio - 1) < NOISE:
        return "about as fast"
    return f"{digits(1 / ratio)} times as fast" if ratio < 1 else f"{digits(ratio)} times as slow"


def same_results(measured: dict[str, Any] | None) -> list[str]:
    """Tell in one or two sentences what ``swap(model)`` gains with the same results; none where no model was read."""
    if measured is None:
        return []
    faster = [row for row in measured["rows"] if row["before"] >= EVEN * row["after"]]
    sentences = []
    if faster:
        gains = "; ".join(
            f"{digits(row['before'] / row['after'])} times as fast at {row['length']:,} tokens" for row in faster
        )
        off = max(row["difference"] for row in faster)
        sentences.append(
            f"Same results, faster: swap(model) makes the whole model {gains} (outputs differ by {off:.0e})."
        )
    if measured["skips_padding"]:
        also = "also " if faster else ""
        sentences.append(f"Same results, faster: swap(model) {also}leaves the padding of batches out.")
    if not sentences and measured["rows"]:
        longest = max(row["length"] for row in measured["rows"])
        sentences.append(f"swap(model) keeps the results, and gains nothing up to {longest:,} tokens.")
    elif not sentences and measured["gains"]:
        sentences.append("swap(model) keeps the results. What it gains was not timed at these lengths.")
    elif not sentences:
        sentences.append("Nothing is faster with the same results: all layers see all tokens, by torch's kernel.")
    return sentences


@dataclass(frozen=True)
class Verdict:
    """A judgement of one mechanism at one length: what was measured, and what follows."""

    mechanism: str
    kind: Kind
    note: str  # why
    milliseconds: float | None = None
    ratio: float | None = None  # of exact attention's time in the same rounds; below 1 is faster
    peak_bytes: int | None = None
    median_error: float | None = None
    worst_error: float | None = None
    error_length: int | None = None  # tokens at which the error was measured; fewer than asked where no more are read
    cannot: tuple[str, ...] = ()
    length: int = 0  # tokens
    is_faster: bool = False  # than exact attention, by enough and beyond noise

    @property
    def at(self) -> str:
        """Name and speed in words."""
        return f"{self.mechanism}, {speed(self.ratio or 1.0)} at {self.length:,} tokens"

    @property
    def untrained(self) -> str:
        """The error before training, in words."""
        if self.median_error is None:
            return "its weights are random before"
        return f"median error {percent(self.median_error)} untrained"


def verdict(
    record: Comparison, mechanism: Any, length: int, asked: float, which: Pass = "forward", *, enough: float = BETTER
) -> Verdict:
    """Judge a mechanism by its time at ``length`` and by its error there, or at the most tokens below that were read.

    Args:
        record: What was measured.
        mechanism: The mechanism.
        length: Tokens of a sequence.
        asked: The largest median error.
        which: The pass whose time counts.
        enough: The fraction of exact attention's time below which it is faster.
    """
    name = repr(mechanism)
    errors = (each for each in record.errors if each.mechanism == name and each.length <= length)
    error = max(errors, key=lambda each: each.length, default=None)
    cell, summary = record.cell(name, length) or Cell(name, length), error.summary() if error else None
    time, ratio = cell.times(which).ms, cell.times(which).ratio
    is_even = even(cell, which)  # a draw within the noise of the rounds
    is_faster = ratio is not None and not is_even and ratio < enough
    words = "" if ratio is None else f"{speed(1.0 if is_even else ratio)} as exact attention"
    is_late = cell.status in LATE if ratio is None else summary is None and is_faster
    may_be_close = summary[0] <= asked if summary else error is None or error.note.startswith(LATE)
    result: tuple[Kind, str]
    if is_late and may_be_close and measurable(mechanism):
        result = "open", f"{cell.status}: {cell.note}" if ratio is None else "its error was not measured"
    elif ratio is None:
        result = "cannot", f"{cell.status}: {cell.note}" if cell.note else cell.status
    elif summary is None or error is None:
        why = (error.note if error else "") or "its error was not measured"
        result = "unknown", kind(mechanism) if mechanism.traits.approximates is None else why
    elif not summary[0] <= asked:
        at = "" if error.length == length else f", {percent(summary[0])} at {error.length:,} tokens"
        result = "inexact", f"median error beyond {percent(asked)}{at}"
    elif not is_faster:
        result = "slower", words
    elif error.length < length:
        known = percent(summary[0])
        result = "unproven", f"{words}; its error is known at {error.length:,} tokens only: {known}"
    else:
        result = "use", words
    tokens, denied = error.length if error else None, tuple(cannot(mechanism))
    return Verdict(
        name, *result, time, ratio, cell.peak_bytes, *summary or (None, None), tokens, denied, length, is_faster
    )


def _judged(record: Comparison, lengths: list[int], asked: float) -> tuple[list[Verdict], list[Verdict]]:
    """Verdicts of all mechanisms at these lengths, and of those that estimate exact attention and can be timed."""
    mechanisms = [catalogue.parse(name) for name in record.mechanisms]
    rows = [verdict(record, mechanism, length, asked) for length in lengths for mechanism in mechanisms]
    return rows, [row for row in rows if row.error_length == row.length and not row.note.startswith(UNFIT)]


def undecided(record: Comparison, length: int, asked: float) -> list[str]:
    """Mechanisms that may be better than exact attention at a length, and were not measured for lack of time."""
    return [row.mechanism for row in _judged(record, [length], asked)[1] if row.kind == "open"]


def beyond(record: Comparison, lengths: Iterable[int]) -> list[str]:
    """Advice for lengths beyond the model's own positions, where exact attention is no reference.

    Empty where the model has positions of its own for all of them.
    """
    context = record.meta.get("context")
    far = [] if context is None else [length for length in lengths if length > context]
    why = record.meta.get("extension") or f"the model has {context:,} positions" if far else ""
    return [f"Exact attention at {_lengths(far)} is no reference: {why}.", *LONG] if far else []


def answer(record: Comparison) -> list[str]:
    """Whether anything here is better than exact attention; what would have to be trained; at which length.

    Only what stands in for a pretrained model's exact attention is an answer: untrained, what estimates it; trained,
    also what has weights that learn to. Another function is none, however fast. Beyond the model's own positions exact
    attention is no reference: that is said first, and what to do there.
    """
    lengths = [*record.ratios(EXACT)]
    far = beyond(record, lengths)
    context = record.meta["context"] if far else math.inf
    if far and min(lengths) > context:
        return far
    return [*far, *_answer(record, [length for length in lengths if length <= context])]


def _answer(record: Comparison, lengths: list[int]) -> list[str]:
    """The answer for lengths at which exact attention is the reference."""
    asked = record.meta.get("asked", ASKED)
    rows, known = _judged(record, lengths, asked)
    winners, open_ones = ([row for row in known if row.kind == kind] for kind in ("use", "open"))
    inexact = [row for row in known if row.kind == "inexact" and row.is_faster]
    learning = [row for row in rows if row.is_faster and learns(catalogue.parse(row.mechanism))]
    nearest = max(inexact, key=lambda row: (row.length, -(row.median_error or 0.0)), default=None)
    quickest = max(learning, key=lambda row: (row.length, -(row.ratio or 1.0)), default=None)
    to_train = [row for row in (nearest, quickest) if row]
    better = (
        f"better than exact attention here (more than 10 % faster, median error at most {percent(asked)}, untrained)"
    )
    if not lengths:
        return ["Undecided: nothing was timed."]
    if winners:
        best = max(winners, key=lambda row: (row.length, -(row.ratio or 1.0)))
        error = record.error(best.mechanism, best.length)
        share = error.visible_fraction if error else None
        pairs = "" if share is None or share == 1.0 else f", from {percent(share)} of the visible pairs"
        first = f"Yes, {best.at}, is {better}: its median error is {percent(best.median_error)}{pairs}."
        to_train = [best, *to_train]
    elif open_ones:
        names, seconds = list(dict.fromkeys(row.mechanism for row in open_ones)), record.meta.get("would_do")
        first = (
            f"Undecided whether anything is {better}: {few(names)} may be, at "
            f"{_lengths(row.length for row in open_ones)}, but not all of it was measured"
            f"{f': give --budget {seconds}' if seconds else ''}."
        )
    elif known:
        first = f"No, nothing is {better}, at {_lengths(row.length for row in known)}."
    else:
        first = f"No, nothing is {better}: nothing that was compared estimates exact attention."
    words = [f"{row.at} ({row.untrained})" for row in to_train if row not in winners]
    second = "; or ".join(words) or "nothing that was timed is more than 10 % faster"
    faster = [f"{row.mechanism} is faster {_from(record, row.mechanism)}" for row in to_train]
    third = "; ".join(faster) or f"none of {_lengths(lengths)}"
    return [first, f"To be trained first: {second}.", f"At which length: {third}."]


def few(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _from(record: Comparison, name: str) -> str:
    """From which length on it is faster."""
    won, measured = crossover(record, name), record.ratios(name)
    if won is None:
        return f"at {_lengths(length for length, ratio in measured.items() if ratio < BETTER)}"
    where, is_bound = interpolated(measured, won)
    return (
        f"from {won:,} tokens on, the shortest timed"
        if is_bound
        else f"from about {float(f'{where:.2g}'):,.0f} tokens on"
    )


def _lengths(lengths: Iterable[int]) -> str:
    """``256, 1,024 and 4,096 tokens``."""
    *first, last = [f"{length:,}" for length in sorted({*lengths})]
    return f"{', '.join(first)} and {last} tokens" if first else f"{last} tokens"
