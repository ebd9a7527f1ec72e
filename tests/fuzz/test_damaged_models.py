"""Saved models of which something was changed: no bit of any weight is loaded as another one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import strategies as st

from fast_attention import swap
from tests.fuzz.kit import fuzz

transformers = pytest.importorskip("transformers")


@cache
def swapped() -> Path:
    folder = Path(mkdtemp())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    swap(model, "FavorPlus(num_features=4)")
    model.save_pretrained(folder, max_shard_size="3KB")
    return folder


def damaged(data: bytes, where: float, bit: int, cut: bool) -> bytes:
    place = int(where * (len(data) - 1))
    if cut:
        return data[:place]
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


PLACES: dict[str, Any] = {"where": st.floats(0, 1), "bit": st.integers(0, 7), "cut": st.booleans()}


def refused(path: Path, load: Any, where: float, bit: int, cut: bool) -> None:
    before = path.read_bytes()
    path.write_bytes(damaged(before, where, bit, cut))
    try:
        with pytest.raises(ValueError, match=path.name):
            load(path.parent)
    finally:
        path.write_bytes(before)


@fuzz("swapped models with a bit flipped or cut short", examples=25, **PLACES, which=st.integers(0, 3))
def test_swapped_models(where: float, bit: int, cut: bool, which: int) -> None:
    files = sorted(path for path in swapped().iterdir() if path.name.startswith("model"))
    refused(files[which], transformers.AutoModel.from_pretrained, where, bit, cut)
