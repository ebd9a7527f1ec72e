"""Speed of a few mechanisms over exact attention's, length by length, in pairs of calls that take turns.

``python -m benchmarks.against_exact "Hybrid()" "Hybrid(near=BlockLocal(), far=LearnedFeatures(num_features=32))"``
prints for every length the median over the pairs of exact attention's time over the mechanism's: above 1 the mechanism
is the faster one. Exact attention is torch's own, causal where the mechanism is (``--causal``). ``--threads 1`` takes
processor time instead of wall time, which other programs disturb less. ``--out FILE`` leaves a record. Freed memory is
kept (``fast_attention.keep_memory``), also that of exact attention, unless ``--give-memory-back``.

``--baseline`` sets something else in its place, for mechanisms that read the same pairs whatever the tokens are: the
same kernel with these pairs as a boolean mask (``masked``), or the softmax over them written out (``written``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from benchmarks.gates import HEADS, WIDTH, Row, in_turns, seconds, title
from experiments.arguments import Arguments
from fast_attention import Bound, Shape, files, keep_memory
from fast_attention.lab import environment, records

LENGTHS = (128, 512, 1024, 4096, 16384)
BASELINES = {
    "exact": "exact attention",
    "masked": "exact attention with the pairs that are read as a boolean mask",
    "written": "softmax over the pairs that are read, written out",
}
KINDS = {"exact": "against exact", "masked": "window and mask", "written": "window and mask"}  # of records


def passes(attention: Callable[..., Any], inputs: list[Any], weights: list[Any], training: bool) -> Callable[[], Any]:
    """A call forward, or forward and backward."""

    def forward() -> Any:
        with torch.no_grad():
            return attention(*inputs)

    def train() -> Any:
        out = attention(*inputs)
        return torch.autograd.grad(out, [*inputs, *weights], torch.ones_like(out), allow_unused=True)

    return train if training else forward


def pairs(expression: str, row: Row) -> torch.Tensor:
    """Which keys every query reads (n, n): where the identity comes out with a weight."""
    q, k = torch.randn(2, 1, 1, row.length, WIDTH)
    bound = Bound(expression, Shape(1, WIDTH, row.length))
    with torch.no_grad():
        return bound(q, k, torch.eye(row.length)[None, None], is_causal=row.is_causal)[0, 0] > 0


def other(baseline: str, expression: str, row: Row) -> Callable[..., Any]:
    """What stands in place of exact attention."""
    if baseline == "exact":
        return lambda *x: F.scaled_dot_product_attention(*x, is_causal=row.is_causal)
    mask = pairs(expression, row)
    if baseline == "masked":
        return lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask)
    return lambda q, k, v: (WIDTH**-0.5 * (q @ k.mT)).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def measured(expression: str, row: Row, rounds: int, patience: float, baseline: str = "exact") -> Row:
    """``row`` with the times of the baseline (old) and of the mechanism (new)."""
    torch.manual_seed(0)
    bound = Bound(expression, Shape(HEADS, WIDTH, row.length))
    inputs = [torch.randn(1, HEADS, row.length, WIDTH).requires_grad_(row.training) for _ in range(3)]

    def ours(*x: Any) -> Any:
        return bound(*x, is_causal=row.is_causal)

    before = passes(other(baseline, expression, row), inputs, [], row.training)
    after = passes(ours, inputs, list(bound.parameters()), row.training)
    before(), after()
    in_turns(row, before, after, min(seconds(before, 1), seconds(after, 1)), rounds, patience)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("mechanisms", metavar="EXPRESSION", nargs="+", help="Such as Hybrid().")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="Tokens.")
    parser.add_argument("--causal", action="store_true", help="Both causal.")
    parser.add_argument("--threads", type=int, help="Of torch.")
    parser.add_argument("--rounds", type=int, default=11, help="Pairs of samples, three at least.")
    parser.add_argument("--patience", type=float, default=20.0, help="Seconds of rounds for each figure.")
    parser.add_argument("--baseline", choices=BASELINES, default="exact", help="What is beside it.")
    parser.add_argument("--give-memory-back", action="store_true", help="Do not keep freed memory.")
    parser.add_argument("--out", type=Path, help="Also write a record.")
    asked = parser.parse_args(arguments)
    if not asked.give_memory_back:
        keep_memory()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    meta = {"command": arguments or sys.argv[1:], "started": environment.timestamp(), "heads": HEADS, "width": WIDTH}
    found = [
        measured(
            expression, Row(expression, asked.causal, length, training), asked.rounds, asked.patience, asked.baseline
        )
        for expression in asked.mechanisms
        for training in (False, True)
        for length in asked.lengths
    ]
    Console().print(table(found, asked.lengths))
    if asked.out:
        meta |= {
            "status": "complete",
            "old": BASELINES[asked.baseline],
            **environment.environment(torch.device("cpu")),
            "finished": environment.timestamp(),
        }
        held = {"meta": meta, "rows": [asdict(row) for row in found]}
        files.write(asked.out, records.sealed(KINDS[asked.baseline], held) + "\n")


def table(found: list[Row], lengths: Sequence[int]) -> Table:
    """A line for each expression and pass: exact attention's time over the mechanism's, length by length."""
    made = Table("setting", "pass", *(f"{n:,}" for n in lengths), box=None)
    for start in range(0, len(found), len(lengths)):
        rows = found[start : start + len(lengths)]
        cells = [f"{1 / row.ratio:.2f}" for row in rows if row.ratio is not None]
        made.add_row(title(rows[0]), "training" if rows[0].training else "forward", *cells)
    return made


if __name__ == "__main__":
    main()
