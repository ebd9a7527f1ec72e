"""``fast-attention compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention.lab import compare, inputs, measure, progress, report, sources, tables, verdicts
    from fast_attention.lab.comparison import Comparison
    from fast_attention.lab.measure import Setting
    from fast_attention.lab.surroundings import begun


def compare_command(
    model: Annotated[
        str | None, typer.Option(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    text: options.Text = None,
    mechanisms: options.Mechanisms = None,
    lengths: Annotated[list[int] | None, typer.Option(help="Sequence lengths. Default: 128 to 4096.")] = None,
    causal: options.Direction = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    backward: options.Backward = True,
    threads: options.Threads = None,
    budget: options.Seconds = 240,
    head: Annotated[str | None, typer.Option(help="LAYER,HEAD whose attention matrices are drawn.")] = None,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.html and records.json.")] = Path("report"),
    as_json: options.AsJson = False,
) -> int:
    """Compare mechanisms with exact attention: error on a model's real tensors, time, memory, crossover length.

    [dim]fast-attention compare --mechanisms LinearAttention "FavorPlus(num_features=64)" --lengths 512 2048[/dim]
    """
    inputs.threads(threads or measure.useful_threads())
    where, kind = inputs.device(device), inputs.dtype(dtype)
    chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
    sizes, drawn = inputs.lengths(lengths or list(compare.LENGTHS)), inputs.head(head)
    inputs.folder(out)
    source = sources.source(model, text, seed, min(max(sizes), compare.LONGEST_ERROR))
    is_causal = source.is_causal if causal is None else causal
    setting = Setting(source.heads, source.head_dim, where, kind, is_causal, backward, seed)
    plan = compare.Plan(source, chosen, sizes, setting, budget, drawn)
    record = Comparison(_meta(plan, dtype))
    with progress.counted(plan.steps) as watch:
        status = progress.until_stopped(
            lambda: compare.compare(plan, record, watch, lambda: record.save(out / record.data))
        )
    compare.finish(plan, record, status)
    record.leave(out, report.html)
    tables.present(record, out, as_json, report.summary(record), "", *verdicts.headline(record))
    return 0 if status == "complete" else 130


def _meta(plan: compare.Plan, dtype: str) -> dict[str, Any]:
    source, setting = plan.source, plan.setting
    return begun(
        setting.device,
        source=source.title,
        heads=source.heads,
        head_dim=source.head_dim,
        lengths=plan.lengths,
        causal=setting.is_causal,
        backward=setting.backward,
        dtype=dtype,
        seed=setting.seed,
        reference="torch.nn.functional.scaled_dot_product_attention",
    )
