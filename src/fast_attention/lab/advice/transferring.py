"""Tries a short attention transfer on mechanisms that are fast but too inexact, or unknown before training."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

from fast_attention import catalogue
from fast_attention.conversion import ConversionSettings, Diverged, convert
from fast_attention.lab.advice.ranking import FASTER, Row
from fast_attention.lab.capture import HuggingFace
from fast_attention.lab.comparison import Comparison
from fast_attention.lab.passages import Reading
from fast_attention.lab.refusals import first_line
from fast_attention.mechanism import Attention, Unsupported

MOST = 3  # mechanisms that are tried
BATCH = 4  # passages
HELD = 2  # batches of passages on which errors are taken


def candidates(rows: list[Row]) -> list[Any]:
    """The first in the ranking that are faster, attend with queries and keys, and need training to be of use."""
    faster = [row for row in rows if row.kind in ("inexact", "unknown") and (row.ratio or math.inf) < FASTER]
    chosen = [catalogue.parse(row.mechanism) for row in faster]
    return [mechanism for mechanism in chosen if isinstance(mechanism, Attention)][:MOST]


def transfer(
    source: HuggingFace,
    chosen: list[Any],
    length: int,
    minutes: float,
    record: Comparison,
    watch: Callable[[str], None],
) -> None:
    """Transfer each for so many minutes, into ``record.meta["transfer"]``: every layer's relative RMS error, the median
    of the layers, on held-out text before and after; or why there is none.

    Raises:
        InputError: The text is too short for passages of this length.
    """
    length = min(length, source.context or length)
    seed = record.meta["seed"]
    reading = Reading([source.corpus], source.tokenizer, length, BATCH, seed)
    settings = ConversionSettings(train="model", minutes=minutes, share=1.0, seed=seed)
    results: dict[str, dict[str, Any]] = {}
    record.meta["transfer"] = results
    record.meta["transfer_minutes"] = minutes
    for mechanism in chosen:
        watch(f"transfer of {mechanism!r}")
        held = reading.held_out[:HELD]
        try:
            conversion = convert(
                copy.deepcopy(source.model), mechanism, reading.batch, held, settings=settings, exact_up_to=None
            )
        except (Unsupported, ValueError, Diverged) as error:
            results[repr(mechanism)] = {"note": first_line(error)}
            continue
        if conversion.status != "complete":
            raise KeyboardInterrupt
        before, after = (_median(conversion.errors[when]) for when in ("swapped", "transferred"))
        results[repr(mechanism)] = {"before": before, "after": after, "length": length}


def _median(errors: dict[str, float]) -> float:
    """The median of the layers' relative RMS errors."""
    return statistics.median(math.sqrt(error) for error in errors.values())
