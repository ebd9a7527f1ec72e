"""``generate()`` of a swapped Hugging Face model: time of a token and memory of the cache, early and late.

``python -m benchmarks.generation`` lets a small Llama of random weights write 16,384 tokens with exact attention and
with mechanisms that keep a state, through transformers' own ``generate``, and prints both at several positions.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import fast_attention
from experiments.arguments import Arguments
from fast_attention import cache_argument, files
from fast_attention.lab import environment, records

AROUND = 64  # tokens whose median stands for a position


class Watch(StoppingCriteria):
    """Never stops; notes when each token was there, and the bytes of the cache at some."""

    def __init__(self, cache: DynamicCache, positions: list[int]) -> None:
        self.cache, self.positions = cache, set(positions)
        self.times: list[float] = []
        self.bytes: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        if input_ids.shape[1] in self.positions:
            self.bytes[input_ids.shape[1]] = sum(held(vars(layer)) for layer in self.cache.layers)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def held(value: Any) -> int:
    """Bytes of the tensors in a cache's layer, whatever they lie in."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(held(part) for part in value.values())
    return sum(map(held, value)) if isinstance(value, list | tuple) else 0


def written(mechanism: str, batch: int, positions: list[int]) -> list[dict[str, float]]:
    """Milliseconds of a token and bytes of the cache at every position."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=positions[-1] + AROUND,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if mechanism != "Softmax()":
        fast_attention.swap(model, mechanism)
    cache = DynamicCache(config=config)
    watch = Watch(cache, positions)
    given = {cache_argument.name_of(model.forward): cache}
    model.generate(
        torch.randint(256, (batch, 8)), **given, do_sample=False, min_new_tokens=positions[-1],
        max_new_tokens=positions[-1], stopping_criteria=StoppingCriteriaList([watch]), pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    steps = [1000 * (b - a) for a, b in zip(watch.times, watch.times[1:], strict=False)]
    return [
        {"position": at, "milliseconds": statistics.median(steps[max(at - AROUND, 8) : at]), "bytes": watch.bytes[at]}
        for at in positions
    ]


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--positions", type=int, nargs="+", default=[256, 1024, 4096, 8192, 16384])
    parser.add_argument("--out", type=Path, help="Also write the figures to this JSON file.")
    mechanisms = [
        "Softmax()", "LinearAttention()", "FavorPlus(num_features=64)", "Local(window=128)",
        "Hybrid(near=BlockLocal(block_size=64), far=LearnedFeatures(num_features=32))",
    ]  # fmt: skip
    parser.add_argument("--mechanisms", nargs="+", default=mechanisms)
    asked = parser.parse_args()
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    found = {}
    for name in asked.mechanisms:
        found[name] = written(name, asked.batch, sorted(asked.positions))
        for row in found[name]:
            size = f"{row['bytes'] / 2**20:9.2f} MiB"
            print(f"{name:67} token {row['position']:6,}: {row['milliseconds']:7.2f} ms  cache {size}", flush=True)
    if asked.out:
        meta = {
            "status": "complete", "command": sys.argv[1:], "started": started, "batch": asked.batch,
            "model": "Llama, 2 layers, width 256, 4 heads, random weights",
            "transformers": transformers.__version__, **environment.environment(torch.device("cpu")),
        }  # fmt: skip
        files.write(asked.out, records.sealed("generation", {"meta": meta, "mechanisms": found}) + "\n")


if __name__ == "__main__":
    main()
