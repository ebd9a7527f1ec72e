"""``fast-attention advise``: recommends a mechanism for one length, on this machine, for this model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention.lab import capture, compare, inputs, measure, progress, sources
    from fast_attention.lab.advice.measuring import Plan, investigate
    from fast_attention.lab.advice.ranking import Question, Row, advice, furthest, ranked
    from fast_attention.lab.advice.transferring import candidates, transfer
    from fast_attention.lab.comparison import Comparison
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.measure import Setting
    from fast_attention.lab.numbers import bytes_of, factor, milliseconds, percent
    from fast_attention.lab.records import plain
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import Row as Line
    from fast_attention.lab.tables import Table, show

STAND_INS = "Gaussian stand-ins"


def advise_command(
    model: Annotated[
        str | None, typer.Argument(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    batch: options.Batch = 1,
    budget: Annotated[
        float, typer.Option(min=0.0, help="The largest median relative error of a head's outputs, zero-shot.")
    ] = 0.1,
    mechanisms: options.Mechanisms = None,
    text: options.Text = None,
    fasta: options.Fasta = None,
    causal: options.Direction = None,
    training: Annotated[bool, typer.Option("--training", help="Rank by forward and backward pass.")] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    seconds: options.Seconds = 120,
    transfer_minutes: Annotated[
        float, typer.Option(min=0.0, help="Attention transfer for each of the first three that are fast but inexact.")
    ] = 0.0,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> int:
    """Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep exact.

    [dim]fast-attention advise MODEL_DIR --length 4096 --budget 0.05[/dim]
    """
    inputs.threads(threads or measure.useful_threads())
    where, kind = inputs.device(device), inputs.dtype(dtype)
    chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
    source = sources.source(model, text, fasta, seed, length)
    is_causal = source.is_causal if causal is None else causal
    if source.is_causal and not is_causal:
        raise InputError("--no-causal: the model is a decoder, whose attention is causal")
    if transfer_minutes and not isinstance(source, capture.HuggingFace):
        raise InputError("--transfer-minutes trains a Hugging Face model: name one")
    setting = Setting(source.heads, source.head_dim, where, kind, is_causal, training, seed, batch)
    question = Question(length, budget, "training" if training else "forward")
    record = Comparison(_meta(source, setting, question, dtype))
    _carry_out(Plan(source, chosen, setting, question, seconds), record, transfer_minutes)
    rows = ranked(record, chosen, question)
    sentences = advice(record, rows, question)
    if as_json:
        print(json.dumps(as_object(record, rows, sentences, question), indent=1, allow_nan=False))
    else:
        _tell(record, rows, sentences, question)
    return 0


def _meta(source: capture.Source, setting: Setting, question: Question, dtype: str) -> dict[str, Any]:
    gaussian = isinstance(source, capture.Gaussian)
    return begun(
        setting.device, source=source.title,
        quality=STAND_INS if gaussian else "the model's own tensors, zero-shot", heads=setting.heads,
        head_dim=setting.head_dim, length=question.length, batch=setting.batch, causal=setting.is_causal,
        budget=question.budget, dtype=dtype, seed=setting.seed, **{"pass": question.which},
    )  # fmt: skip


def _carry_out(plan: Plan, record: Comparison, transfer_minutes: float) -> None:
    with progress.counted(plan.steps) as watch:
        investigate(plan, record, watch)
        if transfer_minutes and isinstance(plan.source, capture.HuggingFace):
            chosen = candidates(ranked(record, plan.mechanisms, plan.question))
            transfer(plan.source, chosen, plan.question.length, transfer_minutes, record, watch)
    record.finish("complete")


def as_object(record: Comparison, rows: list[Row], sentences: list[str], question: Question) -> dict[str, Any]:
    """``{"advice": {"use", "words", "measured_up_to"}, "ranking": [...], "meta", "rows", "errors"}``; ``use`` may be
    exact attention."""
    best = rows[0]
    return {
        "advice": {"use": best.mechanism, "words": sentences, "measured_up_to": furthest(record, question)},
        "ranking": [plain(asdict(row)) for row in rows],
        **plain(record.parts()),
    }


def _tell(record: Comparison, rows: list[Row], sentences: list[str], question: Question) -> None:
    parts = [Text(words, style="" if number else "bold") for number, words in enumerate(sentences)]
    parts += ["", table([row for row in rows if row.kind not in ("unknown", "cannot")])]
    for title, kind in (("No error is known of", "unknown"), ("Not measured", "cannot")):
        lines = [_line(row) for row in rows if row.kind == kind]
        if lines:
            parts += ["", f"{title}:", *lines]
    if tried := record.meta.get("transfer"):
        parts += ["", *_transfers(record, tried)]
    meta, read = record.meta, "; ".join(record.meta["error_tensors"].values())
    side = "causal" if meta["causal"] else "both sides"
    passes = "forward" if question.which == "forward" else "forward and backward"
    words = [f"\nErrors on {meta['quality']}: {meta['source']}, {read}."]
    if meta["quality"] == STAND_INS:
        words.append("They say little of a trained model's heads: name a model to know.")
    words.append(
        f"Times of {passes}, {meta['batch']} x {meta['heads']} heads of width {meta['head_dim']}, {side}, "
        f"{meta['dtype']}, {meta['hardware']}, {meta['threads']} of {meta['cores']} threads."
    )
    show(*parts, Text("\n".join(words), style="dim"))


def _transfers(record: Comparison, tried: dict[str, Any]) -> list[str]:
    """The transfers' results: errors of the layers' outputs, behind their projections, on held-out text."""
    lines = [f"Error of the median layer's output, before and after {record.meta['transfer_minutes']:g} minutes:"]
    for name, result in tried.items():
        words = result.get("note") or f"{percent(result['before'])} -> {percent(result['after'])}"
        lines.append(f"  {name}: {words}")
    return lines


def _line(row: Row) -> str:
    """A mechanism that is not ranked, and why."""
    speed = "" if row.ratio is None else f"{factor(row.ratio)}, "
    return f"  {row.mechanism}: {speed}{row.note}"


def table(rows: list[Row]) -> Table:
    """The ranking as a table."""
    lines = []
    for number, row in enumerate(rows, 1):
        error = "-" if row.median_error is None else f"{percent(row.median_error)} / {percent(row.worst_error)}"
        error = "0" if row.kind == "exact" else error
        measured = [error, milliseconds(row.milliseconds), factor(row.ratio), bytes_of(row.peak_bytes)]
        cells = [str(number), row.mechanism, *measured, row.note, ", ".join(row.cannot)]
        lines.append(Line(cells, {"use": "chosen", "exact": "exact"}.get(row.kind, "")))
    heads = ["", "mechanism", "error: median / worst", "time", "speed", "memory", "why here", "cannot"]
    return Table(heads, lines, left=(1, 6, 7))
