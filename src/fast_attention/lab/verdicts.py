"""Puts a comparison into words: whether anything is better than exact attention, crossovers, what each cannot do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fast_attention import catalogue
from fast_attention.lab.records import EXACT, Cell, Comparison, Error, Pass
from fast_attention.lab.tables import Number, digits, percent
from fast_attention.mechanism import Mixer

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


class Candidate(NamedTuple):
    """A mechanism that may replace exact attention at one length, untrained or trained."""

    name: str
    length: int
    ratio: float  # of exact attention's time; not a number: not timed, for lack of time
    error: Error | None = None  # None: it has none before training

    @property
    def median(self) -> float:
        """The median error; not a number where none was measured."""
        summary = self.error.summary() if self.error else None
        return summary[0] if summary else math.nan

    @property
    def at(self) -> str:
        """Name and speed in words."""
        return f"{self.name}, {speed(self.ratio)} at {self.length:,} tokens"

    def could_be(self, asked: float) -> bool:
        """Whether it is better than exact attention, as far as is known of time and error."""
        return not (self.ratio >= BETTER or self.median > asked)

    @property
    def untrained(self) -> str:
        """The error before training, in words."""
        return f"median error {percent(self.median)} untrained" if self.error else "its weights are random before"

    @property
    def is_known(self) -> bool:
        """Whether time and error were measured."""
        return not math.isnan(self.ratio + self.median)


def candidates(record: Comparison) -> list[Candidate]:
    """All that estimates exact attention, at every length at which that was timed and errors were asked for."""
    errors = {(error.mechanism, error.length): error for error in record.errors}
    known = []
    for length in record.ratios(EXACT):
        for name in record.mechanisms:
            cell, error = record.cell(name, length), errors.get((name, length))
            if cell is None or error is None or cell.status in ("refused", "failed", "too large"):
                continue
            if error.output or error.note.startswith("over budget"):
                known.append(Candidate(name, length, _ratio(cell), error))
    return known


def undecided(record: Comparison, length: int, asked: float) -> list[str]:
    """Mechanisms that may be better than exact attention at a length, and were not measured for lack of time."""
    known = (each for each in candidates(record) if each.length == length)
    return [each.name for each in known if each.could_be(asked) and not each.is_known]


def beyond(record: Comparison, lengths: Iterable[int]) -> list[str]:
    """Advice for lengths beyond the model's own positions, where exact attention is no reference.

    Empty where the model has positions of its own for all of them.
    """
    context = record.meta.get("context")
    far = [] if context is None else [length for length in lengths if length > context]
    why = record.meta.get("extension") or f"the model has {context:,} positions" if far else ""
    return [f"Exact attention at {_lengths(far)} is no reference: {why}.", *LONG] if far else []


def _ratio(cell: Cell) -> float:
    """A cell's time by exact attention's, 1 within noise."""
    return 1.0 if even(cell) else math.nan if cell.forward_ratio is None else cell.forward_ratio


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
    known = [each for each in candidates(record) if each.length in lengths]
    could = [each for each in known if each.could_be(asked)]
    winners, open_ones = [each for each in could if each.is_known], [each for each in could if not each.is_known]
    to_train = _to_train(record, known, lengths, asked)
    better = (
        f"better than exact attention here (more than 10 % faster, median error at most {percent(asked)}, untrained)"
    )
    if not lengths:
        return ["Undecided: nothing was timed."]
    if winners:
        best = max(winners, key=lambda each: (each.length, -each.ratio))
        share = best.error.visible_fraction if best.error else None
        pairs = "" if share is None or share == 1.0 else f", from {percent(share)} of the visible pairs"
        first = f"Yes, {best.at}, is {better}: its median error is {percent(best.median)}{pairs}."
        to_train = [best, *to_train]
    elif open_ones:
        names, seconds = list(dict.fromkeys(each.name for each in open_ones)), record.meta.get("would_do")
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        first = (
            f"Undecided whether anything is {better}: {', '.join(names[:3])}{more} may be, at "
            f"{_lengths(each.length for each in open_ones)}, but not all of it was measured"
            f"{f': give --budget {seconds}' if seconds else ''}."
        )
    elif known:
        first = f"No, nothing is {better}, at {_lengths(each.length for each in known)}."
    else:
        first = f"No, nothing is {better}: nothing that was compared estimates exact attention."
    words = [f"{each.at} ({each.untrained})" for each in to_train if each not in winners]
    second = "; or ".join(words) or "nothing that was timed is more than 10 % faster"
    faster = [f"{each.name} is faster {_from(record, each.name)}" for each in to_train]
    third = "; ".join(faster) or f"none of {_lengths(lengths)}"
    return [first, f"To be trained first: {second}.", f"At which length: {third}."]


def _to_train(record: Comparison, known: list[Candidate], lengths: list[int], asked: float) -> list[Candidate]:
    """The most accurate that is faster, and the fastest with weights to learn, each at the greatest length with one."""
    inexact = [each for each in known if each.ratio < BETTER and each.median > asked]
    learning = [
        Candidate(cell.mechanism, cell.length, _ratio(cell))
        for cell in record.cells
        if cell.length in lengths
        and cell.mechanism != EXACT
        and learns(catalogue.parse(cell.mechanism))
        and _ratio(cell) < BETTER
    ]
    nearest = max(inexact, key=lambda each: (each.length, -each.median), default=None)
    quickest = max(learning, key=lambda each: (each.length, -each.ratio), default=None)
    return [each for each in (nearest, quickest) if each]


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
