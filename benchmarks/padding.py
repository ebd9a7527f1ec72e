"""Sentence embeddings of texts of mixed lengths: a padded batch beside one that skips padding, in pairs.

python -m benchmarks.padding --texts 32 --pairs 3
python -m benchmarks.padding --texts 256 --batch 32 --mechanism LinearAttention
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import time
import warnings
from typing import Any

import torch

from experiments import data
from experiments.arguments import Arguments
from fast_attention import extend, swap
from fast_attention.lab.loading import default_model

SHORTEST, LONGEST = 32, 4096


def texts_of(tokenizer: Any, number: int, seed: int) -> list[str]:
    """English prose in passages of log-uniform length, 32 to 4,096 tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = tokenizer(data.text(), add_special_tokens=False, truncation=False)["input_ids"]
    passages = []
    for fraction in torch.rand(number, generator=draw).tolist():
        length = round(SHORTEST * math.exp(fraction * math.log(LONGEST / SHORTEST)))
        start = int(torch.randint(len(ids) - length, (), generator=draw))
        passages.append(tokenizer.decode(ids[start : start + length]))
    return passages


def model_of(mechanism: str, *, skip_padding: bool) -> Any:
    """MiniLM as a SentenceTransformer, extended to 4,096 tokens and swapped."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(default_model(), device="cpu")
    extend(model, LONGEST)
    torch.manual_seed(0)
    swap(model, mechanism, skip_padding=skip_padding)
    return model


def main() -> None:
    """Print tokens per second of ``encode`` with and without padding, and the ratio of the medians."""
    options = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mechanism", default="Softmax")
    options.add_argument("--texts", type=int, default=32)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(given.threads)
    models = {skip: model_of(given.mechanism, skip_padding=skip) for skip in (False, True)}
    texts = texts_of(models[True].tokenizer, given.texts, given.seed)
    lengths = [len(ids) for ids in models[True].tokenizer(texts)["input_ids"]]
    print(f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all, {given.mechanism}")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    embeddings: dict[bool, torch.Tensor] = {}
    for model in models.values():
        model.encode(texts[:1], show_progress_bar=False)
    for _ in range(given.pairs):
        for skip, model in models.items():
            start = time.process_time()
            embeddings[skip] = torch.as_tensor(model.encode(texts, batch_size=given.batch, show_progress_bar=False))
            seconds[skip].append(time.process_time() - start)
    medians = {skip: statistics.median(values) for skip, values in seconds.items()}
    for skip, values in seconds.items():
        name, rounds = "without padding" if skip else "padded", ", ".join(f"{x:.1f}" for x in values)
        print(f"{name}: {sum(lengths) / medians[skip]:,.0f} tokens per second of processor time ({rounds} s)")
    away = (embeddings[True] - embeddings[False]).abs().max()
    print(f"{medians[False] / medians[True]:.2f} times as fast; embeddings differ by {away:.1e} at most")


if __name__ == "__main__":
    main()
