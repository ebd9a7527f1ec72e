"""``fast-attention reproduce``: measures a paper's figure or table here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention.lab import inputs, progress
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.reproducing import listing, page
    from fast_attention.lab.reproducing.reproduction import Budget, Reproduced, Reproduction
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import present, say, show


def reproduce_command(
    name: Annotated[str | None, typer.Argument(help="Which; all are listed without.", metavar="NAME")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Time for all of it. Default: its own, at most 30.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Draws or trainings of each setting. Default: its own.")
    ] = None,
    threads: options.Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for reproduction.html and reproduction.json. Default: out/NAME.")
    ] = None,
    resume: options.Resume = False,
    restart: options.Restart = False,
    as_json: options.AsJson = False,
) -> int:
    """Measure a paper's figure or table here: its numbers beside ours, and where they disagree.

    [dim]fast-attention reproduce performer --minutes 5[/dim]
    """
    if name is None:
        show(listing.table())
        say("\nOne of them: fast-attention reproduce NAME")
        return 0
    chosen = listing.named(name)
    if seeds is not None and not chosen.seeds:
        raise InputError(f"--seeds: {name} repeats nothing that is drawn")
    inputs.threads(threads or (1 if chosen.trains else torch.get_num_threads()))
    folder = out or Path("out") / name
    with inputs.alone(folder):
        path = folder / Reproduced.data
        inputs.results([path], folder, "a reproduction", resume=resume, restart=restart)
        meta = _meta(chosen, minutes or chosen.minutes, seeds or chosen.seeds)
        record = Reproduced.resume(path, meta) if resume else Reproduced(meta)
        status = carry_out(chosen, record, folder)
    present(record, folder, as_json, *page.tables(chosen, record), width=160)
    return 130 if status == "interrupted" else 0


def _meta(chosen: Reproduction, minutes: float, seeds: int) -> dict[str, Any]:
    return begun(torch.device("cpu"), reproduction=chosen.name, minutes=minutes, seeds=seeds)


def carry_out(chosen: Reproduction, record: Reproduced, folder: Path) -> str:
    """Run under a progress bar; every row is written as soon as it is measured, and a run that was stopped resumes."""
    clock, spent = chosen.clock, record.meta.get("seconds", 0.0)
    began = clock()
    total = 60 * record.meta["minutes"]

    def keep() -> None:
        record.meta["seconds"] = round(spent + clock() - began, 1)
        record.save(folder / record.data)

    with progress.measured(total) as (update, _):

        def watch(words: str) -> None:
            update(words, min(spent + clock() - began, total))

        def run() -> None:
            budget = Budget(max(total - spent, 0.0), record.meta["seeds"], tuple(record.rows), watch, clock)
            for row in chosen.run(budget):
                record.rows.append(row)
                keep()

        status = progress.until_stopped(run)
    keep()
    record.finish(status)
    record.leave(folder, partial(page.html, chosen))
    return status
