"""How much faster a converted model reads long texts: ``python -m benchmarks.long_texts --model out/minilm-8k``.

Whole models, one text, exact attention with extended positions against what was converted, in turns. Without a model,
the MiniLM of the demo with blocks swapped in, beyond 512 tokens. All freed memory is kept
(``fast_attention.keep_memory``) for both, unless ``--give-memory-back``.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import costs
from experiments.arguments import Arguments
from fast_attention import extend, files, integrations, keep_memory, swap
from fast_attention.lab import environment, loading, records
from fast_attention.lab.tables import Table, show

PATIENCE = 600.0  # seconds that exact attention may take for one text


def models(folder: Path | None, mechanism: str, positions: int) -> dict[str, Any]:
    """The original with as many positions, and the converted or swapped model."""
    original = loading.load(loading.default_model()).float()
    extend(original, positions)
    if folder is None:
        swap(changed := copy.deepcopy(original), mechanism, exact_up_to=512)
        return {"original": original, mechanism: changed}
    changed = loading.load(folder).float()
    if changed.config.max_position_embeddings < positions:
        extend(changed, positions)
    return {"original": original, folder.name: changed}


def main() -> None:
    """Print the table and write the record."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="The folder of a converted model.")
    parser.add_argument("--mechanism", default="BlockLocal(block_size=256)", help="Swapped in where no model is given.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--give-memory-back", action="store_true", help="Do not keep freed memory.")
    parser.add_argument("--out", type=Path, default=Path("out/long-texts.json"))
    asked = parser.parse_args()
    if not asked.give_memory_back:
        keep_memory(None)
    started, longest = environment.timestamp(), max(asked.lengths)
    held = models(asked.model, asked.mechanism, longest)
    layers = [*integrations.attention.layers_of(held[[*held][-1]])]
    with Console(stderr=True).status("") as status:
        prices = costs.measure(held, layers, asked.lengths, longest, status.update, longest=PATIENCE)
    meta = {
        "status": "complete", "command": ["python", "-m", "benchmarks.long_texts", *sys.argv[1:]], "started": started,
        "finished": environment.timestamp(), **environment.environment(torch.device("cpu")),
    }  # fmt: skip
    files.write(asked.out, records.sealed("long texts", {"meta": meta, "rows": [], "prices": prices}) + "\n")
    by = {(row["model"], row["length"]): row for row in prices}
    cells = []
    for length in asked.lengths:
        exact, other = (by[name, length] for name in held)
        cells.append([f"{length:,}", f"{exact['seconds']:.2f} s", f"{other['seconds']:.2f} s",
                      f"{exact['seconds'] / other['seconds']:.2f}", f"{exact['bytes'] / 2**20:,.0f} MiB",
                      f"{other['bytes'] / 2**20:,.0f} MiB"])  # fmt: skip
    first, second = held
    show(Table(["tokens", first, second, "times faster", first, second], cells), f"Record: {asked.out}")


if __name__ == "__main__":
    main()
