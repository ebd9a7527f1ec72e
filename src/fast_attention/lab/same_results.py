"""Measures what ``swap(model)`` gains without changing results: the whole model's time at every length, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fast_attention.integrations import swap
from fast_attention.lab import loading
from fast_attention.lab.capture import HuggingFace, Source
from fast_attention.lab.tables import digits

EVEN = 1.03  # times as fast, below which a gain is noise
SHARE = 0.25  # of the seconds that a comparison may take


def measure(source: Source, lengths: list[int], seconds: float, watch: Callable[[str], None]) -> dict[str, Any] | None:
    """Measure the gain of exact forms in a model, for the record; None where no model is read.

    Lengths beyond the model's own positions are left out, and none begins after so many seconds.
    """
    if not isinstance(source, HuggingFace):
        return None
    began, model = time.perf_counter(), loading.load(source.name, head="none").float()
    report = swap(model)
    rows: list[dict[str, Any]] = []
    for length in sorted(lengths):
        is_read = source.own_context is None or length <= source.own_context
        if not (report.faster and is_read) or time.perf_counter() - began > seconds:
            continue
        watch(f"same results at {length:,} tokens")
        ids, _ = source.corpus.tokens(source.tokenizer, length)
        inputs = {"input_ids": ids, **({"decoder_input_ids": ids[:, :1]} if model.config.is_encoder_decoder else {})}
        with torch.no_grad():
            measured = report.verify(inputs)
        before, after = measured.seconds
        rows.append({"length": ids.shape[1], "before": before, "after": after, "difference": measured.difference})
    return {"gains": report.gains, "skips_padding": report.skips_padding, "rows": rows}


def words(measured: dict[str, Any] | None) -> list[str]:
    """Tell the measured gain in one or two sentences; none where no model was read."""
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
