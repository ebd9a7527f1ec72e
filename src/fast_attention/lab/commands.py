"""The commands ``compare`` and ``list``; ``command_line.MODULES`` lists where the others are."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention import catalogue
    from fast_attention.known_names import known
    from fast_attention.lab import compare, inputs, measure, progress, report, sources, tables, verdicts
    from fast_attention.lab.command_line import run as run
    from fast_attention.lab.comparison import Comparison
    from fast_attention.lab.measure import Setting
    from fast_attention.lab.surroundings import begun
    from fast_attention.mechanism import Mixer


def compare_command(
    model: Annotated[
        str | None, typer.Option(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    text: options.Text = None,
    fasta: options.Fasta = None,
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
    source = sources.source(model, text, fasta, seed, min(max(sizes), compare.LONGEST_ERROR))
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


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="A mechanism, ours or as a paper calls it (Performer), for all about it.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the mechanisms with what they can do, or show all about one."""
    meant = known(name) if name else None
    if meant and not as_json:
        print(f"{meant}\n")
    chosen = (
        inputs.mechanisms([meant.write if meant else name])
        if name
        else [catalogue.default(each) for each in catalogue.names()]
    )
    if as_json:
        print(json.dumps([_described(mechanism) for mechanism in chosen], indent=1))
    elif name:
        for mechanism in chosen:
            _detail(mechanism)
    else:
        tables.show(_catalogue(chosen))
        print("\nOther names (Performer, Longformer, Mamba ...): fast-attention list NAME")


def _catalogue(chosen: list[Any]) -> tables.Table:
    """The mechanisms with what they can do."""
    rows = []
    for mechanism in chosen:
        traits = mechanism.traits
        weights = "learned" if traits.learned else "random" if traits.random else "-"
        yes = ["yes" if granted else "-" for granted in (traits.causal, traits.padding, traits.cross)]
        does = [traits.cost, traits.reads, *yes, traits.memory or "-"]
        rows.append([type(mechanism).__name__, *does, weights, traits.paper])
    heads = ["mechanism", "cost", "reads", "causal", "padding", "cross", "decodes", "weights", "source"]
    return tables.Table(heads, rows, left=range(1, len(heads)))


def _described(mechanism: Any) -> dict[str, Any]:
    held = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
    plain = int | float | str | None
    return {
        "name": type(mechanism).__name__,
        "expression": repr(mechanism),
        "kind": "mixer" if isinstance(mechanism, Mixer) else "attention",
        "settings": {key: value if isinstance(value, plain) else repr(value) for key, value in held.items()},
        "traits": asdict(mechanism.traits),
    }


def _detail(mechanism: Any) -> None:
    traits = mechanism.traits
    print(f"{mechanism!r}\n\n{inspect.getdoc(type(mechanism))}\n")
    rows = {"formula": traits.formula, "source": traits.paper, "cost": traits.cost, "error": verdicts.kind(mechanism)}
    rows["settings"] = ", ".join(f"{f.name}={getattr(mechanism, f.name)!r}" for f in fields(mechanism)) or "none"
    rows["cannot"] = ", ".join(verdicts.cannot(mechanism)) or "-"
    declared = {key: value for key, value in asdict(traits).items() if key not in (*rows, "paper")}
    rows["traits"] = ", ".join(f"{key}={value!r}" for key, value in declared.items())
    for title, words in rows.items():
        print(f"{title + ':':<10}{words}")
