"""Compiled beside eager: what ``torch.compile`` gains or costs, mechanism by mechanism, in calls that take turns.

``python -m benchmarks.compiled`` prints, for every mechanism of the catalogue or those named, in every direction that
it has, the compiled call's time over the eager one's, forward and in training (below 1 the compiler gains), and the
seconds that compiling both took. Lengths are fixed (``dynamic=False``); freed memory is kept. ``--threads 1`` takes
processor time, which other programs disturb less. ``--out FILE`` leaves a record.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.against_exact import passes
from benchmarks.gates import HEADS, WIDTH, Row, in_turns, seconds
from experiments.arguments import Arguments
from fast_attention import Attention, Bound, Shape, catalogue, files, keep_memory
from fast_attention.lab import environment, records


def measured(mechanism: Any, is_causal: bool, length: int, rounds: int, patience: float) -> Iterator[dict[str, Any]]:
    """The rows of both passes, eager as old and compiled as new."""
    torch.compiler.reset()
    torch.manual_seed(0)
    bound = Bound(mechanism, Shape(HEADS, WIDTH, length))
    sizes = [(1, HEADS, length, WIDTH)] * 3 if isinstance(mechanism, Attention) else [(1, length, HEADS * WIDTH)]
    compiled = torch.compile(bound, dynamic=False)
    for training in (False, True):
        inputs = [torch.randn(size).requires_grad_(training) for size in sizes]
        row = Row(repr(mechanism), is_causal, length, training)
        old, new = (
            passes(lambda *x, run=run: run(*x, is_causal=is_causal), inputs, list(bound.parameters()), training)
            for run in (bound, compiled)
        )
        old()
        start = time.perf_counter()
        new()
        taken = time.perf_counter() - start
        in_turns(row, old, new, min(seconds(old, 1), seconds(new, 1)), rounds, patience)
        yield {**asdict(row), "compiling_seconds": taken}


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("mechanisms", metavar="EXPRESSION", nargs="*", help="Such as Hybrid(); all by default.")
    parser.add_argument("--length", type=int, default=2048, help="Tokens.")
    parser.add_argument("--threads", type=int, help="Of torch.")
    parser.add_argument("--rounds", type=int, default=7, help="Pairs of samples, three at least.")
    parser.add_argument("--patience", type=float, default=4.0, help="Seconds of rounds for each figure.")
    parser.add_argument("--out", type=Path, help="Also write a record.")
    asked = parser.parse_args(arguments)
    keep_memory()
    torch._inductor.config.force_disable_caches = True  # type: ignore[attr-defined]  # or seconds are those of reading
    if asked.threads:
        torch.set_num_threads(asked.threads)
    meta = {"command": arguments or sys.argv[1:], "started": environment.timestamp(), "heads": HEADS, "width": WIDTH}
    chosen = [catalogue.parse(text) for text in asked.mechanisms or catalogue.names()]
    calls = [(m, is_causal) for m in chosen if m.traits.compile for is_causal in m.traits.modes]
    rows = [
        row
        for mechanism, is_causal in track(calls, "compiling", console=Console(stderr=True))
        for row in measured(mechanism, is_causal, asked.length, asked.rounds, asked.patience)
    ]
    Console().print(table(rows))
    if asked.out:
        meta |= {**environment.environment(torch.device("cpu")), "finished": environment.timestamp()}
        held = {"meta": {"status": "complete", **meta}, "rows": rows}
        files.write(asked.out, records.sealed("compiled", held) + "\n")


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each mechanism and direction: the compiled call's time over the eager one's."""
    made = Table("mechanism", "", "forward", "training", "seconds to compile", box=None)
    for forward, training in zip(rows[::2], rows[1::2], strict=True):
        taken = forward["compiling_seconds"] + training["compiling_seconds"]
        ratios = f"{forward['ratio']:.2f}", f"{training['ratio']:.2f}"
        made.add_row(forward["mechanism"], "causal" if forward["is_causal"] else "", *ratios, f"{taken:.0f}")
    return made


if __name__ == "__main__":
    main()
