"""A Hugging Face encoder far beyond the length it was trained at, before and after a swap: time and memory.

``python -m benchmarks.long_encoder MODEL --mechanism M`` (or a folder that ``convert`` wrote) repeats the model's table
of positions, which changes what it says and not what it costs, and times original and swapped in turn: the attention
alone and the whole model. Memory is the peak of what a pass allocates.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fast_attention
from fast_attention import files
from fast_attention.counting import peak_bytes
from fast_attention.integrations.attention import layers_of
from fast_attention.lab import capture, records, whole


def stretch(model: Any, length: int) -> None:
    """Room for ``length`` tokens: learned positions again and again, and the buffers that count them."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.num_embeddings < length:
            times = -(-length // table.num_embeddings)
            module.position_embeddings = nn.Embedding.from_pretrained(table.weight.detach().repeat(times, 1))
        for name, held in list(module.named_buffers(recurse=False)):
            if name == "position_ids":
                module.register_buffer(name, torch.arange(length)[None], persistent=False)
            elif name == "token_type_ids":
                module.register_buffer(name, held.new_zeros(1, length), persistent=False)
    model.config.max_position_embeddings = max(length, model.config.max_position_embeddings)


@torch.no_grad()
def medians(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds, median over rounds in which everybody runs once."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[name]) for name in runs}


def compared(original: Any, swapped: Any, length: int, rounds: int) -> dict[str, float]:
    """One length: seconds and peak bytes of the whole model and of one layer's attention, both kinds."""
    device = torch.device("cpu")
    tokens = torch.randint(1000, 2000, (1, length))
    whole_model = {"original": lambda: original(input_ids=tokens), "swapped": lambda: swapped(input_ids=tokens)}
    first = next(part for part in layers_of(swapped).values() if not part.kept)
    config = original.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    q, k, v = (torch.randn(1, heads, length, width) for _ in range(3))

    def exact() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    attention = {"original": exact, "swapped": lambda: first.bound(q, k, v)}
    found: dict[str, float] = {"length": length}
    for title, runs in (("attention", attention), ("model", whole_model)):
        for name, seconds in medians(runs, rounds).items():
            found[f"{title}_{name}_seconds"] = seconds
        for name, run in runs.items():
            with torch.no_grad():
                found[f"{title}_{name}_bytes"] = peak_bytes(run, device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="A folder; without one the MiniLM of the demo.")
    parser.add_argument("--mechanism", help="Swapped in here; not for a folder that holds a swapped model.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Also write the figures to this JSON file.")
    asked = parser.parse_args()
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    swapped = whole.load(asked.model or Path(capture.default_model()))
    if asked.mechanism:
        fast_attention.swap(swapped, asked.mechanism, max_len=max(asked.lengths))
    original = copy.deepcopy(swapped)
    fast_attention.swap_back(original)
    rows = []
    for model in (original, swapped):
        stretch(model, max(asked.lengths))
    for length in asked.lengths:
        row = compared(original, swapped, length, asked.rounds)
        rows.append(row)
        words = [f"{length:6,} tokens:"]
        for title in ("attention", "model"):
            old, new = row[f"{title}_original_seconds"], row[f"{title}_swapped_seconds"]
            size = [row[f"{title}_{name}_bytes"] / 2**20 for name in ("original", "swapped")]
            words.append(f"{title} {old:.3f} s, {new:.3f} s ({old / new:.2f}x), {size[0]:.0f} and {size[1]:.0f} MiB;")
        print(*words, flush=True)
    if asked.out:
        kinds = sorted({repr(part.bound.mechanism) for part in layers_of(swapped).values()})
        meta = {
            "status": "complete", "command": sys.argv[1:], "started": started, "mechanisms": kinds,
            **records.surroundings(torch.device("cpu")),
        }  # fmt: skip
        files.write(asked.out, json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
