"""Small models of transformers with random weights, saved as folders that the commands open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
WORDS = " ".join(f"word{i * i % 37}" for i in range(400))
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 32,
}  # fmt: skip
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 48}


def words() -> Any:
    """A tokenizer of 38 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, **{f"word{i}": i + 1 for i in range(37)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def saved(folder: Path, kind: str, swapped: str = "", **changed: Any) -> Path:
    """A model of a class of transformers, with a mechanism swapped in where one is named, and a tokenizer."""
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    sizes = GPT if kind.startswith("GPT") else {**SIZES, "max_position_embeddings": 48, "initializer_range": 0.4}
    model = made(made.config_class(**{**sizes, **changed})).eval()
    if swapped:
        from fast_attention import swap

        swap(model, swapped)
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    return folder
