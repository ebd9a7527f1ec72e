"""``fast-attention maps``: draws attention maps of a model's heads before and after a mechanism is put in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention.lab import inputs, progress
    from fast_attention.lab.calls import Call
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.loading import default_model
    from fast_attention.lab.maps import page
    from fast_attention.lab.maps.heads import Head, Maps, compared, sampled
    from fast_attention.lab.maps.models import ModelAndText
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import present


def maps_command(
    model: Annotated[str | None, typer.Argument(help=f"What to open: {KINDS}. Default: MiniLM.")] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="What is put in place. Not needed for a model that was swapped before.")
    ] = None,
    text: options.Text = None,
    fasta: options.Fasta = None,
    ids: Annotated[str | None, typer.Option(help="Token numbers to read, such as 5,17,3.")] = None,
    length: Annotated[int, typer.Option(min=1, help="The most tokens to read.")] = 256,
    layers: Annotated[str | None, typer.Option(help="Layers to draw, such as 0,5. Default: all.")] = None,
    rows: Annotated[
        str | None, typer.Option(help="Queries whose rows are drawn as curves, such as 0,100. Default: two.")
    ] = None,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for maps.html and maps.json.")] = Path("maps"),
    as_json: options.AsJson = False,
) -> int:
    """Draw every head's attention map before and after a mechanism is put in, and measure how far apart they are.

    [dim]fast-attention maps MODEL_DIR --mechanism "Local(window=64)" --rows 0,100 --out maps[/dim]
    """
    chosen = inputs.mechanisms([mechanism])[0] if mechanism else None
    wanted = None if layers is None else inputs.numbers("--layers", layers)
    inputs.folder(out)
    torch.manual_seed(seed)
    given = None if ids is None else inputs.numbers("--ids", ids)
    opened = ModelAndText(model or default_model(), text=text, fasta=fasta, ids=given, length=length)
    before, after = opened.calls(chosen)
    tokens = before[0].q.shape[-2]
    drawn = (
        sampled(tokens, 4)[1:3]
        if rows is None
        else _within("--rows", inputs.numbers("--rows", rows), tokens, "queries")
    )
    kept = range(len(before)) if wanted is None else _within("--layers", wanted, len(before), "layers")
    layer_heads = _compared([before[i] for i in kept], [after[i] for i in kept], drawn)
    runs = [" + ".join(dict.fromkeys(repr(call.bound.mechanism) for call in calls)) for calls in (before, after)]
    meta = begun(
        torch.device("cpu"), model=opened.name, read=opened.read, tokens=tokens, before=runs[0], after=runs[1],
        rows=drawn, seed=seed,
    )  # fmt: skip
    record = Maps(meta, layer_heads)
    record.finish("complete")
    record.leave(out, page.html)
    present(record, out, as_json, _distances(record))
    return 0


def _within(option: str, chosen: list[int], count: int, what: str) -> list[int]:
    wrong = [number for number in chosen if number >= count]
    if wrong:
        raise InputError(f"{option} {wrong[0]}: {what} go from 0 to {count - 1}")
    return chosen


def _compared(before: list[Call], after: list[Call], drawn: list[int]) -> list[list[Head]]:
    with progress.counted(len(before)) as watch:
        layers = []
        for one, other in zip(before, after, strict=True):
            watch(one.layer)
            with inputs.refusing(where=f"{one.layer}: "):
                layers.append(compared(one, other, drawn))
    return layers


def _distances(record: Maps) -> str:
    """The distance of every head, a line for each layer."""
    width = max(len(heads[0].layer) for heads in record.layers)
    lines = [f"{record.meta['before']} and {record.meta['after']} on {record.meta['read']}: distance of every head"]
    for heads in record.layers:
        lines.append(f"{heads[0].layer:<{width}}  " + " ".join(f"{head.distance:.2f}" for head in heads))
    return "\n".join([*lines, f"median {record.median:.2f}; 0: equal, 1: nothing in common"])
