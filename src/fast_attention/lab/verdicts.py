"""What the numbers say, in words: crossovers, one sentence per mechanism, what it cannot do."""

from __future__ import annotations

import math
from typing import Any, Literal

from fast_attention.lab.records import EXACT, Record
from fast_attention.mechanism import Mixer

Pass = Literal["forward", "training"]
TRAIN_IT = "not an approximation: train it"


def ratios(record: Record, name: str, which: Pass = "forward") -> dict[int, float]:
    """Time relative to exact attention by length, where it was measured."""
    found = {}
    for cell in sorted((c for c in record.cells if c.mechanism == name), key=lambda c: c.length):
        ratio = cell.forward_ratio if which == "forward" else cell.training_ratio
        if ratio is not None:
            found[cell.length] = ratio
    return found


def crossover(record: Record, name: str, which: Pass = "forward") -> int | None:
    """The shortest measured length from which it beats exact attention there and at every greater length asked for.

    A greater length at which it was not measured (over budget, failed) counts as not beaten.
    """
    measured, won = ratios(record, name, which), None
    reached = {cell.length for cell in record.cells if cell.mechanism == EXACT and cell.forward_ratio is not None}
    for length in sorted(reached, reverse=True):
        if measured.get(length, math.inf) >= 1.0:
            break
        won = length
    return won


def crossing(record: Record, name: str, which: Pass = "forward") -> float | None:
    """The length at which the ratio passes 1, between the crossover and the length before it, on log-log lines."""
    won, measured = crossover(record, name, which), ratios(record, name, which)
    shorter = [length for length in measured if won is not None and length < won]
    if won is None or not shorter:
        return None if won is None else float(won)
    before = max(shorter)
    above, below = math.log(measured[before]), -math.log(measured[won])
    return math.exp(math.log(before) + above / (above + below) * math.log(won / before))


def longest(record: Record) -> int | None:
    """The greatest length at which exact attention was timed."""
    return max(ratios(record, EXACT), default=None)


def kind(mechanism: Any) -> str:
    """What its error means, or why none is given."""
    if mechanism.traits.approximates is not None:
        return f"approximates {mechanism.traits.approximates}"
    if mechanism.traits.learned:
        return TRAIN_IT
    if isinstance(mechanism, Mixer):
        return "another function of whole tokens, not an approximation"
    return "another function, not an approximation"


def cannot(mechanism: Any) -> list[str]:
    """What its traits deny, in words."""
    traits = mechanism.traits
    denied = {
        "be causal": not traits.causal,
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


def wins(record: Record, name: str, which: Pass = "forward") -> str:
    """The crossover in words."""
    won, end, measured = crossover(record, name, which), longest(record), ratios(record, name, which)
    if end is None or not measured:
        return "not timed"
    if won is not None:
        return f"from {won:,}"
    if end in measured:
        return f"never up to {end:,}"
    last = max(measured)
    return f"not up to {last:,}" if measured[last] >= 1.0 else f"not timed beyond {last:,}"


def sentence(record: Record, mechanism: Any) -> str:
    """One sentence: when it is worth its time, and what it costs in accuracy."""
    name, error = repr(mechanism), record.error(repr(mechanism))
    return f"{_speed(record, name)}; {_accuracy(mechanism, error.summary() if error else None)}."


def _speed(record: Record, name: str) -> str:
    measured, won, end = ratios(record, name), crossover(record, name), longest(record)
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
    if 0.95 < ratio < 1.05:
        return "about as fast"
    return f"{1 / ratio:.2g} times as fast" if ratio < 1 else f"{ratio:.2g} times as slow"


def _accuracy(mechanism: Any, summary: tuple[float, float] | None) -> str:
    if mechanism.traits.approximates is None:
        return kind(mechanism)
    if summary is None:
        return "its error was not measured"
    return f"output error {percent(summary[0])} in the median head and {percent(summary[1])} in the worst"


def percent(value: float) -> str:
    """A relative error as a percentage of two digits."""
    if not math.isfinite(value):
        return "not finite"
    hundredths = 100 * value
    if hundredths < 1e-3:
        return "0 %" if value == 0 else f"{hundredths:.0e} %"
    return f"{float(f'{hundredths:.2g}'):,.10g} %"


def headline(record: Record) -> list[str]:
    """What to take away, in a few sentences."""
    end = longest(record)
    if end is None:
        return ["Nothing was timed."]
    approximate = [name for name in record.mechanisms if record.error(name) is not None]
    firsts = {name: crossover(record, name) for name in record.mechanisms}
    won = {name: length for name, length in firsts.items() if length is not None}
    if not won:
        return [f"Use exact attention: nothing here was faster at {end:,} tokens."]
    said = [f"Below {min(won.values()):,} tokens use exact attention: nothing here is faster on this machine."]
    if min(won.values()) == min(ratios(record, EXACT)):
        said = []
    fastest = min(won, key=lambda name: ratios(record, name)[end])
    said.append(f"At {end:,} tokens {fastest} is fastest: {speed(ratios(record, fastest)[end])} as exact attention.")
    accurate = [name for name in approximate if name in won]
    if accurate:
        found = {name: error for name in accurate if (error := record.error(name)) is not None}
        errors = {name: (error.summary() or (math.inf,))[0] for name, error in found.items()}
        best = min(errors, key=lambda name: errors[name])
        said.append(
            f"Of the approximations that are faster there, {best} is the most accurate: median error "
            f"{percent(errors[best])} at {found[best].length:,} tokens, {speed(ratios(record, best)[end])} at {end:,}."
        )
    elif approximate:
        said.append("No approximation that needs no training is faster than exact attention at these lengths.")
    return said
