"""``fast-attention advise``: recommends a mechanism for one length, on this machine, for this model; or none.

It measures as ``compare`` does, at one length; ``lab/advice.py`` turns that into a ranking.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention.lab import advice, capture, compare, inputs, measure, progress, tables
    from fast_attention.lab.advice import Advised, Question
    from fast_attention.lab.compare import Plan
    from fast_attention.lab.environment import begun
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.measure import Setting


def advise_command(
    model: Annotated[
        str | None, typer.Argument(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    budget: Annotated[
        float, typer.Option(min=0.0, help="The largest median relative error of a head's outputs, zero-shot.")
    ] = 0.1,
    mechanisms: options.Mechanisms = None,
    text: options.Text = None,
    causal: options.Direction = None,
    training: Annotated[bool, typer.Option("--training", help="Rank by forward and backward pass.")] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    seconds: options.Seconds = 120,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for advice.html and advice.json.")] = Path("out/advise"),
    as_json: options.AsJson = False,
) -> int:
    """Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep exact.

    [dim]fast-attention advise MODEL_DIR --length 4096 --budget 0.05[/dim]
    """
    with measure.by_threads(threads) as conditions:
        where, kind = inputs.device(device), inputs.dtype(dtype)
        chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
        inputs.folder(out)
        source = capture.source(model, text, seed, length)
        is_causal = source.is_causal if causal is None else causal
        if source.is_causal and not is_causal:
            raise InputError("--no-causal: the model is a decoder, whose attention is causal")
        setting = Setting(source.heads, source.head_dim, where, kind, is_causal, training, seed, batch)
        question = Question(length, budget, "training" if training else "forward")
        plan = Plan(source, chosen, [length], setting, seconds)
        quality = advice.STAND_INS if isinstance(source, capture.Gaussian) else "the model's own tensors, zero-shot"
        meta = begun(
            where, source=source.title, quality=quality, heads=source.heads, head_dim=source.head_dim, length=length,
            batch=batch, causal=is_causal, budget=budget, dtype=dtype, seed=seed, **{"pass": question.which},
        )  # fmt: skip
        record = Advised(meta)
        with progress.counted(plan.steps) as watch:
            compare.compare(plan, record, watch)
        record.answer(chosen)
        record.meta["conditions"] = conditions()
    record.finish("complete")
    record.leave(out, advice.html)
    tables.present(record, out, as_json, *advice.shown(record))
    return 0
