"""Bits per byte by position of a decoder that was trained on 512 tokens and reads 4,096: exact, swapped, converted.

    python -m benchmarks.small_llama --minutes 8 --longest 512 --out out/small-llama
    python -m benchmarks.by_position --folder out/small-llama --threads 1 --out out/by-position.json

Every row reads the same passages of the text that the model never saw. What a model makes of what came before shows in
how its bits per byte fall with the position.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.arguments import Arguments
from fast_attention import extend, files, swap
from fast_attention.lab import environment, loading, records, texts
from fast_attention.lab.tables import Table, counted, show
from fast_attention.lab.texts import TextChunks, spread

EDGES = (0, 128, 256, 512, 1024, 2048, 4096)  # positions
MECHANISMS = (
    "Hybrid(near=BlockLocal(), far=LearnedFeatures(num_features=32))",
    "Hybrid(far=LearnedFeatures(num_features=32, scale=0.5))",
    "Local(window=64)",
    "BlockLocal(block_size=256)",
)


class Reader(NamedTuple):
    """A model under a name, and the longest passage that it reads."""

    name: str
    model: Any
    length: int


@torch.no_grad()
def nats(reader: Reader, passage: Tensor) -> Tensor:
    """Nats of every token but the first, (length - 1,); what is longer than the reader's passages is read in those."""
    parts = []
    for rows in passage.split(reader.length):
        logits = reader.model(input_ids=rows[None], use_cache=False).logits[0, :-1].float()
        parts.append(F.cross_entropy(logits, rows[1:], reduction="none"))
    return torch.stack(parts).mean(0)


def by_position(values: Tensor, edges: Sequence[int]) -> list[float | None]:
    """The means between neighbouring edges; None beyond the last value. ``values[i]`` is of position i + 1."""
    means: list[float | None] = []
    for first, last in itertools.pairwise(edges):
        part = values[max(first - 1, 0) : last - 1]
        means.append(float(part.mean()) if len(part) == last - max(first, 1) else None)
    return means


def readers(asked: argparse.Namespace, length: int) -> Iterator[Reader]:
    """What is compared, one after another: as it is, extended, and with other attention in it."""
    original = loading.load(asked.folder).float()
    known = int(original.config.max_position_embeddings)
    yield Reader(f"original, passages of {known:,}", original, known)
    yield Reader("original, beyond its positions", original, length)
    extended = copy.deepcopy(original)
    extend(extended, length)
    yield Reader("extended, exact", extended, length)
    for mechanism in asked.mechanisms:
        torch.manual_seed(0)
        swap(swapped := copy.deepcopy(extended), mechanism)
        yield Reader(f"extended, untrained {mechanism}", swapped, length)
    for folder in asked.converted:
        yield Reader(f"converted: {Path(folder).name}", loading.load(folder).float(), length)


def table(rows: Sequence[dict[str, Any]], edges: Sequence[int]) -> Table:
    """What the terminal shows."""
    spans = [f"{a:,} to {b:,}" for a, b in itertools.pairwise(edges)]
    cells = [
        [
            row["reader"],
            *("" if x is None else f"{x:.3f}" for x in row["bits_per_byte"]),
            f"{row['tokens_per_second']:,.0f}",
        ]
        for row in rows
    ]
    return Table(["bits per byte at positions", *spans, "tokens per second"], cells)


def main() -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/small-llama", help="The decoder, with unseen.txt beside it.")
    parser.add_argument("--mechanisms", nargs="*", default=[*MECHANISMS], help="Swapped in, untrained.")
    parser.add_argument("--converted", nargs="*", default=[], help="Folders of converted models.")
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/by-position.json"))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tokenizer, length = loading.tokenizer(asked.folder), EDGES[-1]
    text = texts.read(str(Path(asked.folder) / "unseen.txt"))
    passages = TextChunks(tokenizer)
    document = passages.document(text)
    cut = passages.split(document, length + passages.special_tokens)
    chosen = [torch.tensor(each) for each in spread(cut, asked.passages)]
    bits = len(document) / text.facts["bytes"] / math.log(2)  # per byte, of a nat per token
    about = {
        "status": "running", "command": ["python", "-m", "benchmarks.by_position", *sys.argv[1:]],
        "started": environment.timestamp(), "passages": len(chosen), "edges": EDGES, "bits_per_byte_of_a_nat": bits,
        "text": {"name": "files of Python's standard library (PSF licence)", "sha256": text.sha256},
        **environment.environment(torch.device("cpu")),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with counted((3 + len(asked.mechanisms) + len(asked.converted)) * len(chosen)) as step:
        for reader in readers(asked, length):
            began, sums = time.perf_counter(), []
            for passage in chosen:
                step(reader.name)
                sums.append(bits * nats(reader, passage))
            seconds = time.perf_counter() - began
            values = by_position(torch.stack(sums).mean(0), EDGES)
            rows.append(
                {"reader": reader.name, "bits_per_byte": values, "tokens_per_second": len(chosen) * length / seconds}
            )
    about |= {"status": "complete", "finished": environment.timestamp()}
    files.write(asked.out, records.sealed("by position", {"meta": about, "rows": rows}) + "\n")
    show(table(rows, EDGES), f"Record: {asked.out}")


if __name__ == "__main__":
    main()
