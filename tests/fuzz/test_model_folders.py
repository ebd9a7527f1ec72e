"""Folders of models, damaged: whatever is loaded is what the files say, and all else is refused in one line."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from fast_attention import swap
from fast_attention.lab import loading, texts
from fast_attention.lab.inputs import InputError
from tests.fuzz.kit import fuzz

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 48, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
VALUES: list[Any] = [
    0, 1, 2, 3, -1, 7, 32, 10**6, 10**9, 10**18, 0.5, 1e300, True, False, None, "", "gelu", "bert", "llama", [], [1],
    {}, {"rope_type": "yarn", "factor": 2.0}, "float16", "../../x", ["BertForMaskedLM"], ["LlamaForCausalLM"],
]  # fmt: skip


@cache
def folder(kind: str) -> Path:
    """A sound model: two of transformers', and a swapped one."""
    place = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    made = transformers.BertForMaskedLM if kind == "bert" else transformers.LlamaForCausalLM
    model = made(made.config_class(**SIZES)).eval()
    if kind == "swapped":
        swap(model, "FavorPlus(num_features=8)")
    model.save_pretrained(place)
    _words().save_pretrained(place)
    return place


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{i}": i + 1 for i in range(40)}}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


KINDS = ("bert", "llama", "swapped")
PARTS = ("config.json", "model.safetensors")
HEADS = st.sampled_from(["none", "language", "saved"])
PLACES = st.floats(0, 1, exclude_max=True)


def flip(path: Path, places: list[float], length: float) -> None:
    """Change bits here and there, and cut the end off."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[int(place * len(data))] ^= 1 << int(place * 1e6) % 8
    path.write_bytes(bytes(data[: int(length * len(data)) or None]) if length < 1 else bytes(data))


def edit(path: Path, place: float, value: Any, gone: bool) -> None:
    """Give one setting another value, or none."""
    held = json.loads(path.read_text())
    name = sorted(held)[int(place * len(held))]
    if gone:
        del held[name]
    else:
        held[name] = value
    path.write_text(json.dumps(held))


def rework(path: Path, place: float, how: str) -> None:
    """Take one tensor out, call it something else, cut it, or turn it."""
    held = safetensors.load_file(path)
    name = sorted(held)[int(place * len(held))]
    x = held.pop(name)
    changed = {"gone": {}, "renamed": {f"{name}x": x}, "cut": {name: x[:-1].clone()}, "whole": {name: x.double()},
               "turned": {name: x.mT.contiguous() if x.ndim == 2 else x[None]}}  # fmt: skip
    safetensors.save_file({**held, **changed[how]}, path, metadata={"format": "pt"})


def tried(what: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, or None and its refusal, which is one line."""
    try:
        return what(), ""
    except InputError as error:
        words = str(error)
    assert "\n" not in words
    return None, words


def judge(kind: str, head: Any, damage: Callable[[Path], None]) -> None:
    """Load a damaged copy."""
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(folder(kind), Path(place) / "model")
        damage(copy)
        found, refusal = tried(lambda: loading.load(copy, head=head))
        if found is None:
            assert refusal.startswith(str(copy))
            return
        said = safetensors.load_file(copy / "model.safetensors")
        bare = {name.removeprefix("bert.").removeprefix("model."): x for name, x in said.items()}
        for name, x in found.named_parameters():
            if "pooler" in name.split("."):
                continue
            wanted = said.get(name, bare.get(name.removeprefix("bert.").removeprefix("model.")))
            assert wanted is not None, f"{name} is in no file"
            torch.testing.assert_close(x.double(), wanted.to(x.dtype).double(), rtol=0, atol=0, equal_nan=True)


@fuzz(
    "model folders with flipped and cut files", examples=20, model=st.sampled_from(KINDS), head=HEADS,
    part=st.sampled_from(PARTS),
    places=st.lists(PLACES, min_size=1, max_size=4), length=st.just(1.0) | PLACES,
)  # fmt: skip
def test_files_with_damage(model: str, head: str, part: str, places: list[float], length: float) -> None:
    judge(model, head, lambda copy: flip(copy / part, places, length))


@fuzz(
    "model folders with other settings", examples=30, model=st.sampled_from(KINDS), head=HEADS, place=PLACES,
    value=st.sampled_from(VALUES), gone=st.booleans(),
)  # fmt: skip
def test_other_settings(model: str, head: str, place: float, value: Any, gone: bool) -> None:
    judge(model, head, lambda copy: edit(copy / "config.json", place, value, gone))


@fuzz(
    "model folders with other weights", examples=15, model=st.sampled_from(KINDS), head=HEADS, place=PLACES,
    how=st.sampled_from(["gone", "renamed", "cut", "whole", "turned"]),
)  # fmt: skip
def test_other_weights(model: str, head: str, place: float, how: str) -> None:
    judge(model, head, lambda copy: rework(copy / "model.safetensors", place, how))


@fuzz(
    "damaged tokenizers", examples=20, part=st.sampled_from(["tokenizer.json", "tokenizer_config.json"]),
    places=st.lists(PLACES, max_size=3), length=st.just(1.0) | PLACES, value=st.sampled_from(VALUES), place=PLACES,
)  # fmt: skip
def test_tokenizers(part: str, places: list[float], length: float, value: Any, place: float) -> None:
    """It reads, or it is refused in one line."""
    words = texts.Corpus("words", (("words", " ".join(f"w{i % 40}" for i in range(60))),))
    with tempfile.TemporaryDirectory() as at:
        copy = shutil.copytree(folder("bert"), Path(at) / "model")
        if places:
            flip(copy / part, places, length)
        else:
            edit(copy / part, place, value, length < 0.5)
        found, _ = tried(lambda: words.tokens(loading.tokenizer(copy), 16))
        assert found is None or found[0].shape[1] <= 16
