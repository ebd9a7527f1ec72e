"""A swapped Hugging Face model as a folder: transformers' own loading takes it, and nothing takes it for another."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fast_attention import catalogue, files, from_pretrained, swap, swap_back
from fast_attention.integrations.attention import layers_of
from fast_attention.mechanism import Unsupported
from tests.integrations.test_swap import build, inputs, out

transformers = pytest.importorskip("transformers")

AUTO = {
    "Bert": "AutoModel", "ModernBert": "AutoModel", "Albert": "AutoModel", "GPT2": "AutoModelForCausalLM",
    "Llama": "AutoModelForCausalLM", "OPT": "AutoModelForCausalLM", "Bart": "AutoModelForSeq2SeqLM",
    "T5": "AutoModelForSeq2SeqLM", "Vit": "AutoModel", "Bloom": "AutoModelForCausalLM", "Mpt": "AutoModelForCausalLM",
}  # fmt: skip
BIASED = ("T5", "Bloom", "Mpt")  # scores have positions in them, which random features do not form
DRAWN = "FavorPlus(num_features=16)"  # holds random features, which must come back


def bert(mechanism: str = DRAWN, kind: str = "BertModel", **settings: Any) -> Any:
    config = build("Bert", **settings).config
    model = getattr(transformers, kind)(config).eval()
    swap(model, mechanism)
    return model


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@torch.no_grad()
@pytest.mark.parametrize("name", AUTO)
def test_transformers_own_loading_gives_the_same_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    swap(model, {"*": "Softmax" if name in BIASED else DRAWN})
    given = inputs(model)
    before = out(model, given)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    torch.manual_seed(77)
    drawn = torch.get_rng_state()
    for load in (getattr(transformers, AUTO[name]).from_pretrained, type(model).from_pretrained, from_pretrained):
        again = load(tmp_path)
        assert torch.equal(torch.get_rng_state(), drawn), "loading leaves torch's generator alone"
        assert torch.equal(out(again, given), before)
        assert not again.training
        assert {n: repr(x) for n, x in layers_of(again).items()} == {n: repr(x) for n, x in layers_of(model).items()}
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(out(from_pretrained(tmp_path / "again"), given), before)
    assert record(tmp_path / "again")["layers"] == record(tmp_path)["layers"]
    exact = build(name)
    exact.load_state_dict(again.state_dict(), strict=False)
    assert swap_back(again)
    assert torch.equal(out(again, given), out(exact, given)), "with the attention that transformers would take"
    again.save_pretrained(tmp_path / "exact")
    assert "attn_implementation" not in json.loads((tmp_path / "exact" / "config.json").read_text())


@torch.no_grad()
@pytest.mark.parametrize("name", catalogue.names())
def test_every_mechanism_comes_back(name: str, tmp_path: Path) -> None:
    model = build("Bert")
    try:
        swap(model, name)
    except Unsupported:
        return
    given = inputs(model, padded="right")
    model.save_pretrained(tmp_path)
    assert torch.equal(out(transformers.AutoModel.from_pretrained(tmp_path), given), out(model, given))


@torch.no_grad()
def test_a_head_more_or_less(tmp_path: Path) -> None:
    """A model with a head loads from one without, and the reverse: layers have a prefix more or less."""
    body = bert()
    body.save_pretrained(tmp_path / "body")
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "body", num_labels=3)
    given = inputs(body)
    assert torch.equal(out(headed.bert, given), out(body, given))
    headed.save_pretrained(tmp_path / "headed")
    assert torch.equal(out(transformers.AutoModel.from_pretrained(tmp_path / "headed"), given), out(body, given))
    again = from_pretrained(tmp_path / "headed")
    assert torch.equal(again(**given).logits, headed(**given).logits)
    with pytest.raises(ValueError, match=r"BertForSequenceClassification: \{'missing_keys': \['classifier"):
        from_pretrained(tmp_path / "body", architecture=transformers.BertForSequenceClassification)
    with pytest.raises(ValueError, match="GPT2Model has none of the layers"):
        transformers.GPT2Model.from_pretrained(tmp_path / "body", config=_as_gpt2(tmp_path / "body"))


def _as_gpt2(folder: Path) -> Any:
    config = transformers.GPT2Config(attn_implementation="fast_attention")
    config.quantization_config = record(folder)
    return config


@torch.no_grad()
def test_what_transformers_loading_takes(tmp_path: Path) -> None:
    model = bert()
    given = inputs(model)
    model.save_pretrained(tmp_path, safe_serialization=True, max_shard_size="30KB")
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert set(record(tmp_path)["sha256"]) == {*shards, "model.safetensors.index.json"}
    for again in (
        transformers.AutoModel.from_pretrained(tmp_path, device_map={"": "cpu"}),
        from_pretrained(tmp_path, device_map="cpu", local_files_only=True, revision="main"),
    ):
        assert torch.equal(out(again, given), out(model, given))
    half = from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {x.dtype for x in half.state_dict().values() if x.is_floating_point()}
    assert kinds == {torch.bfloat16}
    assert torch.equal(out(half, given), out(copy.deepcopy(model).bfloat16(), given))
    model.save_pretrained(tmp_path, variant="fp32")
    assert torch.equal(out(from_pretrained(tmp_path, variant="fp32"), given), out(model, given))
    with pytest.raises(ValueError, match=r"-of-.*does not belong to the model that config.json names"):
        from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.fp32.safetensors",
        "model.safetensors",
    ]
    assert torch.equal(out(from_pretrained(tmp_path), given), out(model, given))


def test_what_transformers_saving_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    doubled = {name: 2 * x if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "doubled", True, doubled)
    again = from_pretrained(tmp_path / "doubled").state_dict()
    assert all(torch.equal(x, again[name]) for name, x in doubled.items())
    pushed = []
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, *given, **named: pushed.append((given, named)))
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, commit_message="first", private=True)
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="us/ours")
    assert pushed == [(("mine",), {"commit_message": "first", "private": True}), (("us/ours",), {})]
    with pytest.raises(Unsupported, match="distributed_checkpoint"):
        model.save_pretrained(tmp_path / "mine", distributed_checkpoint=True)
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(Unsupported, match=r"BertModel is quantized \(bitsandbytes\)"):
        model.save_pretrained(tmp_path / "mine")


def test_generation_and_tokenizer_stay(tmp_path: Path) -> None:
    model = build("GPT2")
    model.generation_config.max_new_tokens = 7
    model.generation_config.eos_token_id = [5, 9]
    swap(model, "LinearAttention")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    for again in (from_pretrained(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert (again.generation_config.max_new_tokens, again.generation_config.eos_token_id) == (7, [5, 9])
    assert type(transformers.AutoTokenizer.from_pretrained(tmp_path)) is transformers.ByT5Tokenizer


def test_other_attention_is_refused(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    for load in (transformers.AutoModel.from_pretrained, from_pretrained):
        with pytest.raises(ValueError, match="attn_implementation='eager' would run other attention"):
            load(tmp_path, attn_implementation="eager")


@torch.no_grad()
def test_copies_and_pickles_are_swapped(tmp_path: Path) -> None:
    model = bert()
    given = inputs(model)
    wanted = out(model, given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.encoder.layer[0].attention.self.query.weight.data += 1
        assert torch.equal(out(other, given), wanted)
        other.save_pretrained(tmp_path)
        assert torch.equal(out(from_pretrained(tmp_path), given), wanted)
        model.encoder.layer[0].attention.self.query.weight.data -= 1


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a bit": ("model-00002", flipped),
    "a bit in the list": ("model.safetensors.index.json", flipped),
    "cut": ("model-00002", lambda path: path.write_bytes(path.read_bytes()[:-100]) and None),
    "cut in its head": ("model-00001", lambda path: path.write_bytes(path.read_bytes()[:7]) and None),
    "empty": ("model-00001", lambda path: path.write_bytes(b"") and None),
    "longer": ("model-00002", lambda path: path.write_bytes(path.read_bytes() + b"\0") and None),
    "another's": ("model-00002", lambda path: save_file({"x": torch.ones(1)}, path)),
    "gone": ("model-00002", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_named(damage: str, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path, max_shard_size="30KB")
    start, harm = DAMAGES[damage]
    path = next(path for path in tmp_path.iterdir() if path.name.startswith(start))
    harm(path)
    with pytest.raises((ValueError, OSError), match=path.name):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=path.name):
        from_pretrained(tmp_path)


def test_a_config_that_was_changed_is_refused(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    text = place.read_text()

    def refused(old: str, new: str, words: str) -> None:
        assert old in text
        place.write_text(text.replace(old, new))
        for load in (transformers.AutoModel.from_pretrained, from_pretrained):
            with pytest.raises((ValueError, RuntimeError), match=words):
                load(tmp_path)

    refused("swapped model 4", "swapped model 5", "its format is not 'fast-attention swapped model 4'")
    refused('"attn_implementation": "fast_attention"', '"attn_implementation": "sdpa"', "would run other attention")
    refused("num_features=16", "num_features=32", "mismatch")
    refused("FavorPlus(num_features=16)", "LearnedFeatures(num_features=16)", "missing")
    refused("FavorPlus(num_features=16)", "DenseSynthesizer()", "max_len")
    refused("FavorPlus(num_features=16)", "Favor++(num_features=16)", "Favor")
    refused("FavorPlus(num_features=16)", "LARA(num_landmarks=4)", "LARA: not here; nearest is FavorPlus")
    refused('"sha256"', '"sha512"', "sha256")
    place.write_text(text.replace('"sha256"', '"format": "another", "sha256"'))
    with pytest.raises(ValueError, match="'format' stands twice in an object, as 'fast-attenti"):
        from_pretrained(tmp_path)
    place.write_text("[1]")
    with pytest.raises(ValueError, match=str(tmp_path)):
        from_pretrained(tmp_path)


def test_weights_that_lack_the_mechanisms(tmp_path: Path) -> None:
    """Their hash is right, as if somebody else had written them."""
    bert().save_pretrained(tmp_path)
    path, place = tmp_path / "model.safetensors", tmp_path / "config.json"
    kept = {name: x for name, x in load_file(path).items() if "layer.1.attention.self.fast_attention" not in name}
    digest = files.sha256(path)
    save_file(kept, path, metadata={"format": "pt"})
    place.write_text(place.read_text().replace(digest, files.sha256(path)))
    for load in (transformers.AutoModel.from_pretrained, from_pretrained):
        with pytest.raises(ValueError, match=r"missing: encoder.layer.1.attention.self.fast_attention.bound"):
            load(tmp_path)


def test_folders_that_hold_no_swapped_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no swapped model"):
        from_pretrained(tmp_path)
    build("Bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json names no mechanisms"):
        from_pretrained(tmp_path)


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sha256", full)
    with pytest.raises(OSError, match="No space"):
        bert("LinearAttention").save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
