"""Which blocks and windows, untrained, keep a model's embeddings of long texts: ``python -m benchmarks.chosen_blocks``.

The MiniLM of the demo with more positions reads passages of the shipped prose. At up to 512 tokens its embeddings are
set beside the original's, beyond beside the mean of those of its 512-token chunks, as ``docs/long.md`` does, and in
brackets beside those of exact attention over all of the passage. All models read every passage in turns; seconds are
those of the processor, on one thread, so that other work disturbs them little.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional as F

from experiments import data
from experiments.arguments import Arguments
from fast_attention import extend, files, swap
from fast_attention.conversion import Chunks, goals
from fast_attention.lab import environment, loading, records, texts
from fast_attention.lab.tables import Table, show
from fast_attention.lab.texts import Corpus

MECHANISMS = (
    "Selected(topk=4)",
    "Selected()",
    "Selected(topk=16)",
    "Local()",
    "Local(window=256)",
    "BigBird()",
    "BlockLocal(block_size=256)",
    "Hybrid(near=Selected())",
    "Hybrid(near=Selected(), far=LearnedFeatures(num_features=32, scale=0.5))",
)
EXACT = "exact attention, extended"
CHUNK = 512


def models(mechanisms: list[str], positions: int) -> dict[str, Any]:
    """The original with as many positions, and a copy of it for every mechanism."""
    original = loading.load(loading.default_model()).float()
    extend(original, positions)
    held = {EXACT: original}
    for text in mechanisms:
        torch.manual_seed(0)
        swap(changed := copy.deepcopy(original), text, max_len=positions)
        held[text] = changed
    return held


@torch.no_grad()
def measured(held: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, tuple[float, float, float]]:
    """For each model the cosines to the mean of the chunks' embeddings and to the first model's, and its seconds."""
    chunks = Chunks(CHUNK).read(held[EXACT], batch).sentences
    rows: dict[str, tuple[float, float, float]] = {}
    exact = None
    for name, model in held.items():
        started = time.process_time()
        states = goals.hidden(model, batch)
        took = time.process_time() - started
        sentence = goals.pooled(states[-1], goals.tokens(batch)).float()
        exact = sentence if exact is None else exact
        to_chunks, to_exact = (float(F.cosine_similarity(sentence, each).mean()) for each in (chunks, exact))
        rows[name] = (to_chunks, to_exact, took)
    return rows


def _words(row: dict[str, Any]) -> str:
    return f"{row['cosine']:.3f} ({row['to_exact']:.3f}), {row['seconds']:.2f} s"


def main() -> None:
    """Print the table and write the record."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=[*MECHANISMS])
    parser.add_argument("--lengths", type=int, nargs="+", default=[480, 2048, 8192])
    parser.add_argument("--passages", type=int, nargs="+", default=[12, 6, 3], help="Of each length.")
    parser.add_argument("--out", type=Path, default=Path("out/chosen-blocks.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started, held = environment.timestamp(), models(asked.mechanisms, max(asked.lengths))
    reader = texts.TextChunks(loading.tokenizer(loading.default_model()))
    document = reader.document(Corpus("the Jargon File", (("the Jargon File", data.text()),)))
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("") as status:
        for length, number in zip(asked.lengths, asked.passages, strict=True):
            chosen, found = texts.spread(reader.split(document, length), number), []
            for i, passage in enumerate(chosen):
                status.update(f"{length:,} tokens, passage {i + 1} of {len(chosen)}")
                found.append(measured(held, reader.batch([passage])))
            rows += [
                {"model": name, "length": length, "passages": len(chosen),
                 "cosine": statistics.mean(each[name][0] for each in found),
                 "lowest": min(each[name][0] for each in found),
                 "to_exact": statistics.mean(each[name][1] for each in found),
                 "seconds": statistics.median(each[name][2] for each in found)}
                for name in held
            ]  # fmt: skip
    meta = {
        "status": "complete", "command": ["python", "-m", "benchmarks.chosen_blocks", *sys.argv[1:]],
        "started": started, "finished": environment.timestamp(), "threads": 1,
        **environment.environment(torch.device("cpu")),
    }  # fmt: skip
    files.write(asked.out, records.sealed("chosen blocks", {"meta": meta, "rows": rows}) + "\n")
    by = {(row["model"], row["length"]): row for row in rows}
    cells = [[name, *(_words(by[name, n]) for n in asked.lengths)] for name in held]
    show(Table(["", *(f"{n:,} tokens" for n in asked.lengths)], cells), f"Record: {asked.out}")


if __name__ == "__main__":
    main()
