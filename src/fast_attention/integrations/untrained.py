"""Quality of a swapped layer's outputs before anything is trained, for the report of a swap."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

from fast_attention.mechanism import Mechanism
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.mechanisms.hybrid.adapted import Adapted
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.mechanisms.hybrid.hybrid import Hybrid
from fast_attention.mechanisms.sparse.local import Local

EXACT, ESTIMATE, NOTHING = "exact", "an estimate", "nothing before training"  # how what ``quality`` returns begins
# Cosines of MiniLM's embeddings to its own, by length in tokens: a table of the newest records; a test compares.
TABLE = Path(__file__).with_name("untrained.csv")


@cache
def cosines() -> dict[str, dict[int, str]]:
    """The table of cosines: by expression, by length."""
    table: dict[str, dict[int, str]] = {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            table.setdefault(row["mechanism"], {})[int(row["length"])] = row["cosine"]
    return table


def quality(
    mechanism: Mechanism[Any, Any], parameters: int, *, window: int | None = None, is_causal: bool = False
) -> str:
    """Quality of a mechanism's outputs, untrained, in a layer that was trained with exact attention.

    Args:
        mechanism: As it was asked for, before it was given a layer's own positions.
        parameters: Numbers of its weights that training would change.
        window: Of the layer's own, as transformers counts it: a query's token and those before it.
        is_causal: Whether the layer is.
    """
    if isinstance(mechanism, ByLength):
        short, long = (quality(m, parameters, window=window, is_causal=is_causal)
                       for m in (mechanism.short, mechanism.long))  # fmt: skip
        return short if short == long else f"{short} for queries that see at most {mechanism.above:,} keys, then {long}"
    if isinstance(mechanism, Adapted):
        return f"{quality(mechanism.mechanism, parameters, window=window, is_causal=is_causal)}; deltas begin at zero"
    if mechanism == Softmax() or _is_window(mechanism, window, is_causal):
        return EXACT
    measured = ", ".join(f"{cosine} at {length:,}" for length, cosine in cosines().get(repr(mechanism), {}).items())
    known = f"; cosine to MiniLM's own embeddings {measured} tokens" if measured else ""
    traits = mechanism.traits
    if traits.approximates is not None:
        return f"{ESTIMATE} of exact attention{known or ', of which no record has the error'}"
    if isinstance(mechanism, Hybrid) and mechanism.bias is None and not mechanism.near.needs_weights:
        return f"{EXACT} near each query, of far keys {NOTHING}: {parameters:,} new numbers{known}"
    why = f"{parameters:,} new numbers, drawn at random" if traits.learned else "another function than the layer's own"
    return f"{NOTHING}: {why}{known}"


def _is_window(mechanism: Any, window: int | None, is_causal: bool) -> bool:
    """Whether a mechanism is the window that the layer had."""
    if window is None or not isinstance(mechanism, Local) or mechanism != Local(window=mechanism.window):
        return False
    left, right = mechanism.sides
    return left == window - 1 and (is_causal or right == window - 1)
