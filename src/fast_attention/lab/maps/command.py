"""``fast-attention maps``: attention maps of a model's heads beside those of a mechanism in their place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from fast_attention.lab.maps.heads import Head, compared, sampled
    from fast_attention.lab.maps.models import ModelAndText
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import say
    from fast_attention.mechanism import Unsupported


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
    """Draw every head's attention map before and after a mechanism is put in, and say how far apart they are.

    [dim]fast-attention maps MODEL_DIR --mechanism "Local(window=64)" --rows 0,100 --out maps[/dim]
    """
    chosen = inputs.mechanisms([mechanism])[0] if mechanism else None
    wanted = None if layers is None else inputs.numbers("--layers", layers)
    inputs.folder(out)
    torch.manual_seed(seed)
    given = None if ids is None else inputs.numbers("--ids", ids)
    subject = ModelAndText(model or default_model(), text=text, fasta=fasta, ids=given, length=length)
    before, after = subject.calls(chosen)
    tokens = before[0].q.shape[-2]
    drawn = (
        sampled(tokens, 4)[1:3]
        if rows is None
        else _within("--rows", inputs.numbers("--rows", rows), tokens, "queries")
    )
    kept = range(len(before)) if wanted is None else _within("--layers", wanted, len(before), "layers")
    found = _compared([before[i] for i in kept], [after[i] for i in kept], drawn)
    runs = [" + ".join(dict.fromkeys(repr(call.bound.mechanism) for call in calls)) for calls in (before, after)]
    meta = begun(
        torch.device("cpu"), model=subject.name, read=subject.read, tokens=tokens, before=runs[0], after=runs[1],
        rows=drawn, seed=seed,
    )  # fmt: skip
    meta["status"] = "complete"
    written = page.save(meta, found, out)
    _tell(meta, found, written, as_json)
    return 0


def _within(option: str, chosen: list[int], count: int, what: str) -> list[int]:
    wrong = [number for number in chosen if number >= count]
    if wrong:
        raise InputError(f"{option} {wrong[0]}: {what} go from 0 to {count - 1}")
    return chosen


def _compared(before: list[Call], after: list[Call], drawn: list[int]) -> list[list[Head]]:
    with progress.counted(len(before)) as watch:
        found = []
        for one, other in zip(before, after, strict=True):
            watch(one.layer)
            try:
                found.append(compared(one, other, drawn))
            except (Unsupported, ValueError) as error:
                raise InputError(f"{one.layer}: {error}") from error
    return found


def _tell(meta: dict[str, Any], layers: list[list[Head]], written: Path, as_json: bool) -> None:
    if as_json:
        print(page.as_json(meta, layers))
    else:
        print(f"{meta['before']} and {meta['after']} on {meta['read']}: distance of every head")
        width = max(len(heads[0].layer) for heads in layers)
        for heads in layers:
            print(f"{heads[0].layer:<{width}}  " + " ".join(f"{head.distance:.2f}" for head in heads))
        print(f"median {page.median(layers):.2f}; 0: equal, 1: nothing in common")
    say(f"\nMaps: {written.resolve()}\nNumbers: {written.resolve().with_suffix('.json')}")
