"""Conversion: it learns, keeps the best stage, stays exact where it should, resumes, and reports what it measured."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import FavorPlusPlus, from_pretrained, swap
from fast_attention import convert as convert_by_length
from fast_attention.conversion import Chunks, Conversion, ConversionSettings, goals
from fast_attention.integrations import crossover
from fast_attention.integrations.attention import layers_of
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")

convert = partial(convert_by_length, exact_up_to=None)
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
MECHANISM = "LearnedFeatures(num_features=8)"
STEPS = ConversionSettings(train="model", minutes=0.0, steps=4)
TAME = ConversionSettings(minutes=0.0, steps=20, lr=1e-3)
WILD = ConversionSettings(minutes=0.0, steps=3, lr_maps=30.0, lr=30.0)
QUICK = ConversionSettings(minutes=0.0, steps=1)


def bert(*sharp: int) -> Any:
    """A random encoder whose layers ``sharp`` attend to few tokens; the others attend to all alike."""
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    for number in sharp:
        layer = model.encoder.layer[number].attention
        for part, factor in (
            (layer.self.query, 15),
            (layer.self.key, 15),
            (layer.self.value, 8),
            (layer.output.dense, 4),
        ):
            part.weight.data *= factor
    return model


def decoder() -> Any:
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 12
    return model


MODELS: dict[str, Callable[[], Any]] = {"bert": lambda: bert(0, 1, 2), "llama": decoder}


def batch(number: int, length: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    return {"input_ids": torch.randint(5, 99, (2, length), generator=generator)}


def padded(number: int) -> dict[str, Tensor]:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 15:] = 0
    return {**batch(number), "attention_mask": mask}


HELD = [padded(-1), batch(-2)]


def swapped(model: Any, mechanism: str) -> Any:
    torch.manual_seed(0)
    swap(model, mechanism)
    return model.eval()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


def outputs(model: Any, length: int) -> Tensor:
    with torch.no_grad():
        return model(**batch(5, length))[0]


def recomputed(original: Any, model: Any) -> dict[str, float]:
    """The figures of an encoder, from the two models' outputs."""
    sentences, tokens = [], []
    for each in HELD:
        mask = each.get("attention_mask", torch.ones(2, 24, dtype=torch.long))
        with torch.no_grad():
            a, b = (m(**each).last_hidden_state for m in (original, model))
        for row in range(2):
            real = int(mask[row].sum())
            x, y = a[row, :real], b[row, :real]
            sentences.append(float(x.mean(0) @ y.mean(0) / x.mean(0).norm() / y.mean(0).norm()))
            tokens += [float(p @ q / p.norm() / q.norm()) for p, q in zip(x, y, strict=True)]
    mean, worst = sum(sentences) / len(sentences), min(sentences)
    return {
        "loss": 2 - mean, "sentence_cosine": mean, "worst_sentence_cosine": worst,
        "token_cosine": sum(tokens) / len(tokens),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", [MECHANISM, "Local(window=(3, 0))"])
def test_transfer_lowers_every_layers_error(name: str, mechanism: str) -> None:
    settings = ConversionSettings(train="model", minutes=0.0, steps=50, share=1.0)
    told = convert(MODELS[name](), mechanism, batch, HELD, settings=settings)
    before, after = told.errors["swapped"], told.errors["transferred"]
    assert set(before) == set(told.converted) == set(told.layers)
    assert all(after[layer] < 0.95 * before[layer] for layer in told.layers), (before, after)
    assert told.errors["tuned"] == after
    assert told.steps == 50


def test_a_fine_tune_brings_an_encoder_back() -> None:
    model = bert(0, 1, 2)
    original, untrained = copy.deepcopy(model), swapped(copy.deepcopy(model), MECHANISM)
    settings = ConversionSettings(train="model", minutes=0.0, steps=50, share=0.0, lr=1e-3)
    lines: list[dict[str, Any]] = []
    told = convert(model, MECHANISM, batch, HELD, settings=settings, watch=lines.append)
    assert {line["stage"] for line in lines if "stage" in line} == {"fine-tune"}
    assert (
        told.figures["transferred"]
        == told.figures["swapped"]
        == pytest.approx(recomputed(original, untrained), abs=1e-5)
    )
    assert 1 - told.figures["tuned"]["token_cosine"] < 0.8 * (1 - told.figures["swapped"]["token_cosine"])
    assert told.figures["original"]["sentence_cosine"] == pytest.approx(1.0, abs=1e-5)
    assert told.figures["tuned"] == pytest.approx(recomputed(original, model), abs=1e-5)
    assert torch.equal(*(m.get_input_embeddings().weight for m in (original, model)))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_decoder_predicts_labels_and_no_padding() -> None:
    """Those labels alone that are not -100, as in a prompt that is not learnt."""
    model, ids = decoder(), batch(-1)["input_ids"]
    labels = ids.where(torch.arange(ids.shape[1]) > 3, -100)
    labelled = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "labels": labels}
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=labels).loss)
        logits = model(**padded(1)).logits
    losses = [
        F.cross_entropy(logits[row, : real - 1], padded(1)["input_ids"][row, 1:real], reduction="sum")
        for row, real in ((0, 24), (1, 15))
    ]
    held = {"labelled": [labelled], "padded": [padded(1)]}
    told = convert(model, MECHANISM, lambda number: labelled, held, settings=QUICK)
    assert told.by_group["original"]["labelled"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert told.by_group["original"]["padded"]["loss"] == pytest.approx(float(sum(losses)) / (23 + 14), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_mechanism_only(name: str) -> None:
    """Where all weights are trained, the transfer reaches the layers' own projections too, one layer at a time."""
    model, untrained = MODELS[name](), swapped(MODELS[name](), MECHANISM)
    told = convert(model, MECHANISM, batch, HELD, settings=TAME)
    changed = {each for each, x in state(untrained).items() if not torch.equal(x, state(model)[each])}
    if told.best != "swapped":  # random tokens may teach a decoder nothing
        assert changed == {f"{name}.fast_attention.bound.{part}" for name in told.layers for part in ("query", "key")}
    assert name == "llama" or told.best != "swapped"
    original = copy.deepcopy(untrained).requires_grad_(False)
    swap(original, "Softmax")
    goals.layer_errors(untrained, original, told.layers, [padded(0)], Tensor.backward)
    inside = tuple(f"{layer}." for layer in told.layers)
    for each, parameter in untrained.named_parameters():
        assert (parameter.grad is not None) == each.startswith(inside), each


def test_a_training_that_made_it_worse_is_left_out() -> None:
    model = bert(0, 1, 2)
    told = convert(model, MECHANISM, batch, HELD, settings=WILD)
    assert told.figures["tuned"]["loss"] > told.figures["swapped"]["loss"]
    assert told.best == "swapped"
    assert equal(state(model), state(swapped(bert(0, 1, 2), MECHANISM)))


def test_texts_that_are_trained_on_do_not_judge() -> None:
    told = Conversion("", "", [], {}, figures={"tuned": {"loss": 4.0}})
    assert told.held_out_loss("tuned") == 4.0
    told.by_group["tuned"] = {"trained text, 512": {"loss": 9.0}}
    assert told.held_out_loss("tuned") == 9.0
    told.by_group["tuned"] |= {"short": {"loss": 1.0}, "other text, 512": {"loss": 2.0}}
    assert told.held_out_loss("tuned") == 1.5


def test_a_group_has_the_figures_of_its_own_batches() -> None:
    alone = [convert(bert(0, 1), MECHANISM, batch, [each], settings=STEPS).figures for each in HELD]
    whole = convert(bert(0, 1), MECHANISM, batch, HELD, settings=STEPS)
    told = convert(bert(0, 1), MECHANISM, batch, {"short": HELD[:1], "long": HELD[1:]}, settings=STEPS)
    assert whole.by_group == {}
    for when, figures in whole.figures.items():
        assert told.figures[when] == pytest.approx(figures, abs=1e-6)
        for group, wanted in zip(("short", "long"), alone, strict=True):
            assert told.by_group[when][group] == pytest.approx(wanted[when], abs=1e-6)


def by_hand(model: Any, ids: Tensor, size: int) -> Tensor:
    """The mean of the embeddings of chunks of one text, weighted by their tokens."""
    first, content, last = ids[:1], ids[1:-1], ids[-1:]
    total = torch.zeros(model.config.hidden_size)
    for part in content.split(size):
        with torch.no_grad():
            total += len(part) * model(torch.cat([first, part, last])[None]).last_hidden_state[0].mean(0)
    return total / len(content)


def test_chunks_are_read_as_texts_of_their_own() -> None:
    model, given = bert(0, 1, 2), padded(3)
    found = Chunks(tokens=9).read(model, given)
    for row, length in ((0, 24), (1, 15)):
        ids = given["input_ids"][row, :length]
        torch.testing.assert_close(found.sentences[row], by_hand(model, ids, 7), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        ids = given["input_ids"][0]
        second = model(torch.cat([ids[:1], ids[8:15], ids[-1:]])[None])[0][0]
    torch.testing.assert_close(found.states[-1][0, 8:15], second[1:-1], atol=1e-5, rtol=1e-5)
    assert [x.shape for x in found.states] == [(2, 24, 32)] * 4
    assert not found.states[-1][1, 15:].any()
    whole, read = Chunks(tokens=64).read(model, given), goals.read("original", model, given)
    torch.testing.assert_close(whole.sentences, read.sentences, atol=1e-5, rtol=1e-5)


def test_a_model_learns_from_chunks() -> None:
    model = bert(0, 1, 2)
    original = copy.deepcopy(model)
    told = convert(model, MECHANISM, batch, [HELD[1]], settings=TAME, teacher=Chunks(tokens=10))
    reference = torch.stack([by_hand(original, row, 8) for row in HELD[1]["input_ids"]])
    with torch.no_grad():
        means = {told.best: model(**HELD[1]), "original": original(**HELD[1])}
    for when, found in means.items():
        cosine = F.cosine_similarity(found.last_hidden_state.mean(1), reference).mean()
        assert told.figures[when]["sentence_cosine"] == pytest.approx(float(cosine), abs=1e-5)
    assert told.best == "tuned"
    assert (told.steps, told.errors) == (TAME.steps, {})


@pytest.mark.parametrize("name", MODELS)
def test_short_inputs_stay_and_long_ones_learn(name: str, tmp_path: Path) -> None:
    """The passages to learn from are shorter than what exact attention serves in the end."""
    model = MODELS[name]()
    original, held = copy.deepcopy(model), {"short": HELD, "long": [batch(-3, 40)]}
    told = convert(model, MECHANISM, batch, held, settings=TAME, exact_up_to=30)
    assert told.mechanism == f"ByLength(long={MECHANISM}, above=30)"
    assert list(told.figures) == ["original", "swapped", "transferred", "tuned"]
    for groups in told.by_group.values():
        assert groups["short"] == told.by_group["original"]["short"], "the passages have 24 tokens"
    assert told.by_group["tuned"]["long"] != told.by_group["swapped"]["long"]
    assert torch.equal(outputs(model, 30), outputs(original, 30))
    assert not torch.equal(outputs(model, 31), outputs(original, 31))
    learnt = [p for each, p in model.named_parameters() if each.endswith(("long_query", "long_key"))]
    assert len(learnt) == 2 * len(told.converted)
    moved = [not torch.equal(a, b) for a, b in zip(learnt[::2], learnt[1::2], strict=True)]
    assert all(moved) == (told.best != "swapped"), "equal at the start"
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(from_pretrained(tmp_path), 40), outputs(model, 40))


def test_exact_attention_keeps_a_models_positions() -> None:
    torch.manual_seed(4)
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99)
    model = transformers.T5EncoderModel(config).eval()
    original = copy.deepcopy(model)
    convert(model, "Local(window=4)", batch, HELD, settings=QUICK, exact_up_to=12)
    assert torch.allclose(outputs(model, 10), outputs(original, 10), atol=1e-5)


@pytest.mark.parametrize(("teacher", "above"), [("original", 48), (Chunks(tokens=10), 10), (Chunks(tokens=64), 48)])
def test_auto_is_measured_and_within_a_chunk(teacher: Any, above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exact attention is faster, but sees more than the teacher does, the mechanism runs."""
    asked: list[Any] = []

    def measured(mechanism: Any, shape: Any, like: Tensor, *, is_causal: bool) -> int:
        asked.append((repr(mechanism), shape.heads, shape.head_dim, is_causal))
        return 48

    monkeypatch.setattr(crossover, "crossover", measured)
    model, given = bert(0), {"settings": QUICK, "keep": [1], "teacher": teacher}
    told = convert_by_length(model, "Local(window=2)", batch, HELD, **given)
    assert asked == [("Local(window=2)", 4, 8, False)]
    assert told.mechanism == f"ByLength(long=Local(window=2), above={above})"
    assert told.kept == {"encoder.layer.1.attention.self": "asked for"}
    mechanisms = [repr(each.bound.mechanism) for each in layers_of(model).values()]
    assert mechanisms == [told.mechanism, "Softmax()", told.mechanism]


@pytest.mark.parametrize(
    "mechanism", ["FavorPlusPlus(num_features=16)", f"Hybrid(near=BlockLocal(block_size=2), far={MECHANISM})"]
)
def test_weights_are_calibrated_before_the_transfer(mechanism: str) -> None:
    """The damping of FAVOR++, to the queries and keys of the original's own inputs."""
    model, plain = bert(0, 1, 2), swapped(bert(0, 1, 2), mechanism)
    told = convert(model, mechanism, padded, HELD, settings=replace(QUICK, lr_maps=0.0, lr=0.0))
    moved = [name for name, x in state(plain).items() if not torch.equal(x, state(model)[name])]
    damped = [f"{name}.fast_attention.bound.damping" for name in told.layers]
    assert moved == (damped if mechanism.startswith("Favor") else [])
    if moved:
        layer, bound = model.encoder.layer[0].attention.self, layers_of(model)[told.layers[0]].bound
        with torch.no_grad():
            x = model.embeddings(padded(0)["input_ids"])
            q, k = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (layer.query, layer.key))
        mask = padded(0)["attention_mask"].bool()
        asked = FavorPlusPlus(num_features=16).calibrated(q, k, bound.w, key_mask=mask)
        torch.testing.assert_close(bound.damping, asked.damping)


KILLED = """
import os, sys
from tests.conversion.test_conversion import HELD, MECHANISM, WILD, batch, bert, convert
def kill(line):
    if (line.get("stage"), line.get("step")) == ("fine-tune", 2):
        os._exit(9)
convert(bert(0, 1), MECHANISM, batch, HELD, settings=WILD, checkpoint=sys.argv[1], watch=kill)
"""


def test_a_killed_conversion_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """The finished stages are on disk, the best of them too; the one that was killed begins anew."""
    path, root, lines = tmp_path / "checkpoint", Path(__file__).parent.parent.parent, []
    assert subprocess.run([sys.executable, "-c", KILLED, path], cwd=root, check=False).returncode == 9
    given: dict[str, Any] = {"settings": WILD, "checkpoint": path, "resume": True}
    whole, model = bert(0, 1), bert(0, 1)
    wanted = convert(whole, MECHANISM, batch, HELD, settings=WILD)
    assert convert(model, MECHANISM, batch, HELD, **given, watch=lines.append) == wanted
    assert wanted.best == "swapped"
    assert equal(state(model), state(whole))
    assert [line["measured"] for line in lines if "measured" in line] == ["tuned"]
    for other, named in (({"keep": [0]}, "layers that stay exact"), ({"exact_up_to": 20}, "mechanism")):
        with pytest.raises(ValueError, match=rf"is of a conversion with {named} .*, not "):
            convert(bert(0, 1), MECHANISM, batch, HELD, **given, **other)
    before = state(stranger := bert(1))  # another model of the class and size
    with pytest.raises(ValueError, match=r"with weights .*: give the model as it was before that conversion"):
        convert(stranger, MECHANISM, batch, HELD, **given)
    assert equal(state(stranger), before)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    for content, words in ((data, "is damaged"), (b"fast-attention conversion 1\n", "is of another version")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{words}.*: begin anew"):
            convert(bert(0, 1), MECHANISM, batch, HELD, **given)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize(("when", "last"), [("transfer", "swapped"), ("tuned", "transferred")])
def test_ctrl_c_leaves_the_last_finished_stage(when: str, last: str, tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line.get("measuring") == when or (line.get("stage"), line.get("step")) == (when, 2):
            os.kill(os.getpid(), signal.SIGINT)

    given: dict[str, Any] = {"settings": STEPS, "exact_up_to": 20, "checkpoint": tmp_path / "checkpoint"}
    model, whole, again = bert(0, 1), bert(0, 1), bert(0, 1)
    told = convert(model, MECHANISM, batch, HELD, **given, watch=stop)
    assert (told.status, told.best, [*told.figures][-1]) == ("interrupted", last, last)
    assert told.mechanism == f"ByLength(long={MECHANISM}, above=20)"
    assert recomputed(bert(0, 1), model) == pytest.approx(told.figures[last], abs=1e-5)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert convert(again, MECHANISM, batch, HELD, **given, resume=True).status == "complete"
    convert(whole, MECHANISM, batch, HELD, settings=STEPS, exact_up_to=20)
    assert equal(state(again), state(whole))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_model_as_it_was(name: str, error: type[BaseException]) -> None:
    """So does Ctrl-C before the swap is measured."""

    def fails(number: int) -> dict[str, Tensor]:
        if error is KeyboardInterrupt or number == 3:
            raise error("the disk is gone")
        return batch(number)

    ours = MODELS[name]()
    before, kinds = state(ours), [type(part) for part in ours.modules()]
    with pytest.raises(error, match="the disk is gone"):
        convert(ours, MECHANISM, fails, HELD, settings=STEPS)
    assert equal(state(ours), before)
    assert not layers_of(ours)
    assert [type(part) for part in ours.modules()] == kinds
    assert all(p.requires_grad for p in ours.parameters())


def test_minutes_are_kept() -> None:
    lines: list[dict[str, Any]] = []
    convert(bert(0), MECHANISM, batch, HELD, settings=ConversionSettings(minutes=0.03, share=0.5), watch=lines.append)
    for stage in ("transfer", "fine-tune"):
        seconds = [line["seconds"] for line in lines if line.get("stage") == stage]
        assert 0.9 <= seconds[-1] < 1.9
        assert seconds[-2] < 0.9


def test_what_a_program_has_set_stays() -> None:
    """Its random numbers go on, and its weights stay as wide as they are under autocast."""
    model = bert(0).bfloat16()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    told = convert(model, "FavorPlus(num_features=4)", batch, HELD, settings=QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    assert told.figures["original"]["loss"] == pytest.approx(1.0, abs=1e-6), "figures of 16 bits are taken in 32"
    kinds, model = set(), bert(0)
    part = model.encoder.layer[0].output.dense
    part.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    convert(model, MECHANISM, batch, HELD, settings=replace(STEPS, precision="bfloat16"))
    assert (kinds, part.weight.dtype) == ({torch.float32, torch.bfloat16}, torch.float32)


class Silent(nn.Module):
    def forward(self, **inputs: Any) -> Any:
        return None


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one batch": ({"held_out": HELD[0]}, ValueError, "held_out is one batch: give a list"),
    "nothing": ({"held_out": []}, ValueError, "held_out is empty"),
    "no group": ({"held_out": {}}, ValueError, "held_out is empty"),
    "an empty group": ({"held_out": {"short": HELD, "long": []}}, ValueError, r"held_out\['long'\] is empty"),
    "a tensor": ({"held_out": [HELD[0]["input_ids"]]}, ValueError, "a batch is tensors by name.*'torch.Tensor'"),
    "lists": ({"held_out": [{"input_ids": [[1, 2]]}]}, ValueError, "a batch is tensors by name.*'input_ids': 'list'"),
    "all padding": (
        {"held_out": [{**HELD[0], "attention_mask": torch.tensor([[1] * 24, [0] * 24])}]},
        ValueError, "text 1 of a batch has no token",
    ),
    "batches": ({"batches": HELD}, ValueError, "batches is a function of a number.*got <class 'list'>"),
    "resume": ({"resume": True}, ValueError, "resume=True needs the file"),
    "folder": ({"checkpoint": Path()}, ValueError, "checkpoint='.' is a folder"),
    "teacher": ({"teacher": "chunks"}, ValueError, "teacher='chunks': give 'original' or Chunks"),
    "keep": ({"keep": [3]}, ValueError, "keep names layer 3; the model's layers go from 0 to 2"),
    "exact": ({"exact_up_to": "often"}, ValueError, "give a number of tokens, at least 1, or 'auto'"),
    "twice": ({"mechanism": "ByLength()", "exact_up_to": 8}, ValueError, "says itself up to where it is exact"),
    "settings": ({"settings": {}}, TypeError, r"settings are ConversionSettings\(...\); got {}"),
    "chunks": ({"model": decoder, "teacher": Chunks(8)}, ValueError, "is for encoders that give embeddings"),
    "causal": ({"model": decoder, "mechanism": "Linformer(rank=4)"}, Unsupported, r"traits.causal"),
    "one token": (
        {"model": decoder, "batches": lambda number: {"input_ids": torch.ones(2, 1).long()}},
        ValueError, "has no token to predict",
    ),
    "no labels": (
        {"model": decoder, "held_out": [{"inputs_embeds": torch.zeros(2, 4, 32)}]},
        ValueError, "a batch of inputs_embeds names no tokens to predict: give labels",
    ),
    "vectors": (
        {"teacher": Chunks(8), "held_out": [{"inputs_embeds": torch.zeros(2, 4, 32)}]},
        ValueError, "cuts input_ids into chunks, and a batch has inputs_embeds",
    ),
    "diverged": ({"settings": replace(WILD, lr_maps=1e38, lr=1e38)}, ArithmeticError, "the loss is .*: try lower"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_and_changes_nothing(case: str) -> None:
    changed, kind, said = REFUSED[case]
    given = {"model": bert, "mechanism": MECHANISM, "batches": batch, "held_out": HELD, "settings": STEPS, **changed}
    model = given.pop("model")()
    before = state(model)
    with pytest.raises(kind, match=said):
        convert(model, **given)
    assert equal(state(model), before)
    assert not layers_of(model)


def test_what_cannot_be_converted_is_refused() -> None:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
             (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))}  # fmt: skip
    bart = transformers.BartModel(transformers.BartConfig(d_model=16, vocab_size=99, **sizes))
    for model, words in ((nn.Linear(2, 2), "Linear is none"), (bart, "is both. What would work: its encoder")):
        with pytest.raises(Unsupported, match=words):
            convert(model, MECHANISM, batch, HELD)
    with pytest.raises(Unsupported, match="Silent gives no hidden states"):
        goals.hidden(Silent(), {})
    for wrong, words in (({"minutes": 0.0}, "conversion has no end"), ({"share": 1.5}, "share is a fraction")):
        with pytest.raises(ValueError, match=words):
            ConversionSettings(**wrong)
    with pytest.raises(ValueError, match="tokens"):
        Chunks(tokens=2)
