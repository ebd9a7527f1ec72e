"""``fast-attention advise``: recommends a mechanism for one length, on this machine, for this model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention.lab import capture, compare, inputs, measure, progress, sources
    from fast_attention.lab.advice import page
    from fast_attention.lab.advice.measuring import Plan, investigate
    from fast_attention.lab.advice.ranking import Question, ranked
    from fast_attention.lab.advice.record import Advised
    from fast_attention.lab.advice.transferring import candidates, transfer
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.measure import Setting
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import present


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
    out: Annotated[Path, typer.Option(help="Folder for advice.html and advice.json.")] = Path("out/advise"),
    as_json: options.AsJson = False,
) -> int:
    """Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep exact.

    [dim]fast-attention advise MODEL_DIR --length 4096 --budget 0.05[/dim]
    """
    inputs.threads(threads or measure.useful_threads())
    where, kind = inputs.device(device), inputs.dtype(dtype)
    chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
    inputs.folder(out)
    source = sources.source(model, text, fasta, seed, length)
    is_causal = source.is_causal if causal is None else causal
    if source.is_causal and not is_causal:
        raise InputError("--no-causal: the model is a decoder, whose attention is causal")
    if transfer_minutes and not isinstance(source, capture.HuggingFace):
        raise InputError("--transfer-minutes trains a Hugging Face model: name one")
    setting = Setting(source.heads, source.head_dim, where, kind, is_causal, training, seed, batch)
    question = Question(length, budget, "training" if training else "forward")
    record = Advised(_meta(source, setting, question, dtype))
    _carry_out(Plan(source, chosen, setting, question, seconds), record, transfer_minutes)
    record.leave(out, page.html)
    present(record, out, as_json, *page.shown(record))
    return 0


def _meta(source: capture.Source, setting: Setting, question: Question, dtype: str) -> dict[str, Any]:
    gaussian = isinstance(source, capture.Gaussian)
    return begun(
        setting.device, source=source.title,
        quality=page.STAND_INS if gaussian else "the model's own tensors, zero-shot", heads=setting.heads,
        head_dim=setting.head_dim, length=question.length, batch=setting.batch, causal=setting.is_causal,
        budget=question.budget, dtype=dtype, seed=setting.seed, **{"pass": question.which},
    )  # fmt: skip


def _carry_out(plan: Plan, record: Advised, transfer_minutes: float) -> None:
    with progress.counted(plan.steps) as watch:
        investigate(plan, record, watch)
        if transfer_minutes and isinstance(plan.source, capture.HuggingFace):
            chosen = candidates(ranked(record, plan.mechanisms, plan.question))
            transfer(plan.source, chosen, plan.question.length, transfer_minutes, record, watch)
    record.answer(plan.mechanisms)
    record.finish("complete")
