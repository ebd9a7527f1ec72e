"""Conversion: it learns, keeps the layers it should, goes on to the bit, and reports what it measured."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import ConversionSettings, FavorPlusPlus, from_pretrained, swap
from fast_attention.conversion import adapters, choosing, goals, transfer
from fast_attention.integrations.swapped import layers_of
from fast_attention.mechanism import Unsupported
from tests.conversion.plain import convert, settings_of_all

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
MECHANISM = "LearnedFeatures(num_features=8)"
STEPS = settings_of_all(minutes=0.0, steps=6, save_seconds=0.0)


def bert(*sharp: int, factor: float = 60.0) -> Any:
    """A random encoder whose layers ``sharp`` attend to few tokens; the others attend to all alike."""
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    for number in sharp:
        layer = model.encoder.layer[number].attention.self
        for part in (layer.query, layer.key):
            part.weight.data *= factor / 4
        layer.value.weight.data *= 8
        model.encoder.layer[number].attention.output.dense.weight.data *= 4
    return model


def decoder(name: str) -> Any:
    torch.manual_seed(4)
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64)
        return transformers.GPT2LMHeadModel(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


def batch(number: int, length: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    return {"input_ids": torch.randint(5, 99, (2, length), generator=generator)}


def padded(number: int) -> dict[str, Tensor]:
    found = batch(number)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 15:] = 0
    return {**found, "attention_mask": mask}


HELD = [padded(-1), batch(-2)]


class Killed(Exception):
    """Stands for a kill: nothing is saved on the way out."""


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


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
    mean = sum(sentences) / len(sentences)
    return {
        "loss": 2 - mean,
        "sentence_cosine": mean,
        "worst_sentence_cosine": min(sentences),
        "token_cosine": sum(tokens) / len(tokens),
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(
    "mechanism",
    [MECHANISM, "FavorPlus(num_features=8)", "Local(window=(3, 0))", f"Hybrid(near=Local(window=2), far={MECHANISM})"],
)
def test_transfer_lowers_every_layers_error(name: str, mechanism: str) -> None:
    model = bert(0, 1, 2) if name == "bert" else decoder(name)
    if name != "bert":
        for key, parameter in model.named_parameters():
            if any(part in key for part in ("q_proj", "k_proj", "c_attn")):
                parameter.data *= 12
    settings = settings_of_all(minutes=0.0, steps=60, share=1.0)
    told = convert(model, mechanism, batch, HELD, settings=settings)
    before, after = told.errors["swapped"], told.errors["transferred"]
    assert set(before) == set(told.converted) == set(told.layers)
    assert all(after[layer] < 0.95 * before[layer] for layer in told.layers), (before, after)
    assert "fine-tune" not in told.curves
    assert told.errors["tuned"] == after


def test_an_error_is_that_of_the_layer_on_the_originals_own_input() -> None:
    model = bert(0, 2)
    original = copy.deepcopy(model)
    told = convert(model, MECHANISM, batch, [HELD[1]], settings=settings_of_all(minutes=0.0, steps=2, share=1.0))
    with torch.no_grad():
        states = original(**HELD[1], output_hidden_states=True).hidden_states
        for number, name in enumerate(told.layers):
            x = states[number]
            wanted = original.get_submodule(name)(x)[0]
            got = model.get_submodule(name)(x)[0]
            error = float((got - wanted).pow(2).mean() / wanted.var())
            assert told.errors["tuned"][name] == pytest.approx(error, rel=1e-3)


def test_a_fine_tune_brings_an_encoder_back() -> None:
    model = bert(0, 1, 2)
    original = copy.deepcopy(model)
    settings = settings_of_all(minutes=0.0, steps=60, share=0.0, lr=1e-3)
    told = convert(model, MECHANISM, batch, HELD, settings=settings)
    assert "transfer" not in told.curves
    assert told.figures["transferred"] == told.figures["swapped"]
    assert 1 - told.figures["tuned"]["token_cosine"] < 0.8 * (1 - told.figures["swapped"]["token_cosine"])
    assert told.figures["original"]["sentence_cosine"] == pytest.approx(1.0, abs=1e-5)
    assert told.figures["tuned"] == pytest.approx(recomputed(original, model), abs=1e-5)
    fixed = (m.get_input_embeddings().weight for m in (original, model))
    assert torch.equal(*fixed)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_figures_before_are_those_of_the_swap_alone() -> None:
    model = bert(0, 1)
    original, swapped = copy.deepcopy(model), copy.deepcopy(model)
    told = convert(model, MECHANISM, batch, HELD, settings=STEPS)
    torch.manual_seed(STEPS.seed)
    swap(swapped, MECHANISM)
    assert told.figures["swapped"] == pytest.approx(recomputed(original, swapped), abs=1e-5)


def test_a_language_model_is_judged_by_its_text() -> None:
    model = decoder("gpt2")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def text(number: int) -> dict[str, Tensor]:
        """Each token is the one six places before."""
        return {"input_ids": batch(number, 6)["input_ids"].repeat(1, 6)}

    for number in range(150):
        model(**text(number), labels=text(number)["input_ids"]).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    held = [text(-1), text(-2)]
    with torch.no_grad():
        wanted = sum(float(model(**each, labels=each["input_ids"]).loss) for each in held) / 2
    settings = settings_of_all(minutes=0.0, steps=40, distil=1.0, lr=1e-3)
    told = convert(model.eval(), MECHANISM, text, held, settings=settings)
    with torch.no_grad():
        after = sum(float(model(**each, labels=each["input_ids"]).loss) for each in held) / 2
    losses = {when: figures["loss"] for when, figures in told.figures.items()}
    assert losses["original"] == pytest.approx(wanted, abs=1e-4)
    assert losses["tuned"] == pytest.approx(after, abs=1e-4)
    assert losses["tuned"] < losses["swapped"]
    assert model.generate(held[0]["input_ids"][:, :9], max_new_tokens=4, do_sample=False).shape == (2, 13)


def test_padding_is_not_told() -> None:
    model = bert(0, 1)
    settings = settings_of_all(minutes=0.0, steps=1)

    def told(filling: int) -> Any:
        held = {**HELD[0], "input_ids": HELD[0]["input_ids"].masked_fill(HELD[0]["attention_mask"] == 0, filling)}
        return convert(copy.deepcopy(model), MECHANISM, padded, [held], settings=settings)

    assert told(7).figures["tuned"] == pytest.approx(told(50).figures["tuned"], abs=1e-5)
    assert told(7).errors["tuned"] == pytest.approx(told(50).errors["tuned"], abs=1e-5)


def test_the_layer_that_matters_stays_exact_for_the_budget() -> None:
    """Only one layer's attention is far from uniform, which untrained features are good at."""
    for sharp in (0, 1, 2):
        model = bert(sharp)
        original = copy.deepcopy(model)
        settings = settings_of_all(minutes=0.0, steps=1, lr_maps=0.0, lr_projections=0.0, lr=0.0)
        told = convert(model, "LearnedFeatures(num_features=4)", batch, HELD, settings=settings, budget=1.005)
        name = f"encoder.layer.{sharp}.attention.self"
        assert min(told.put_back, key=lambda layer: told.put_back[layer]) == name
        assert list(told.chosen) == [name]
        assert told.kept == {name: "for the budget"}
        assert told.chosen[name] == told.put_back[name] <= told.limit < told.whole
        assert told.figures["tuned"]["loss"] == pytest.approx(told.put_back[name], abs=1e-5)
        assert told.limit == pytest.approx(1.005, abs=1e-5)
        ours, theirs = (m.get_submodule(name).query.weight for m in (model, original))
        assert torch.equal(ours, theirs)


def test_a_layer_put_back_is_the_originals_and_comes_off_again() -> None:
    model = bert(0, 1, 2)
    original = copy.deepcopy(model)
    convert(model, MECHANISM, batch, HELD, settings=STEPS)
    swap(original, "Softmax")
    names, before = [*layers_of(model)], state(model)
    with choosing.put_back(model, original, names[:2]), torch.no_grad():
        put = model(**HELD[1]).last_hidden_state
    assert equal(state(model), before)
    adapters.of(model).keep(model, original, MECHANISM, names, names[:2])
    with torch.no_grad():
        torch.testing.assert_close(model(**HELD[1]).last_hidden_state, put, atol=1e-6, rtol=1e-5)
    own = f"{names[2]}.fast_attention.bound.query"
    assert torch.equal(state(model)[own], before[own])


def test_the_choice_is_greedy_and_stops_in_time() -> None:
    worth = {"a": 1.0, "b": 4.0, "c": 2.5}

    def loss_with(kept: Sequence[str]) -> float:
        together = 3.0 if {"a", "c"} <= set(kept) else 0.0  # two that help only together are not found at first
        return 10.0 - sum(worth[name] for name in kept) - together

    assert choosing.choose(loss_with, "abc", 10.0) == ((), (), True)
    assert choosing.choose(loss_with, "abc", 6.5) == (("b",), (6.0,), True)
    assert choosing.choose(loss_with, "abc", 3.5) == (("b", "c"), (6.0, 3.5), True)
    assert choosing.choose(loss_with, "abc", -9.0) == (("b", "c", "a"), (6.0, 3.5, -0.5), False)


@pytest.mark.parametrize("at", [("transfer", 3), ("choice", 0), ("fine-tune", 1), ("fine-tune", 6)])
def test_a_killed_conversion_goes_on_to_the_bit(tmp_path: Path, at: tuple[str, int]) -> None:
    settings: dict[str, Any] = {"settings": STEPS, "keep": [1], "choosing": HELD[:1]}
    found = convert(bert(0, 1, 2), "LearnedFeatures(num_features=4)", padded, HELD, **settings)
    assert found.whole is not None
    settings["budget"] = 0.5 * (found.whole + min(found.put_back.values()))  # one layer is to stay exact
    whole = bert(0, 1, 2)
    wanted = convert(whole, "LearnedFeatures(num_features=4)", padded, HELD, **settings)
    assert len(wanted.chosen) == 1

    def kill(line: dict[str, Any]) -> None:
        choice = "exact" in line.get("measuring", "") and "no layer" not in line["measuring"]
        if (line.get("stage"), line.get("step")) == at or (at[0] == "choice" and choice):
            raise Killed

    model, path = bert(0, 1, 2), tmp_path / "checkpoint"
    with pytest.raises(Killed):
        convert(model, "LearnedFeatures(num_features=4)", padded, HELD, **settings, checkpoint=path, watch=kill)
    model = bert(0, 1, 2)
    told = convert(model, "LearnedFeatures(num_features=4)", padded, HELD, **settings, checkpoint=path, resume=True)
    assert equal(state(model), state(whole))
    assert (told.figures, told.errors, told.chosen) == (wanted.figures, wanted.errors, wanted.chosen)
    assert told.status == "complete"
    with pytest.raises(ValueError, match=r"is of a conversion with budget .*, not None"):
        convert(
            bert(0, 1, 2), "LearnedFeatures(num_features=4)", padded, HELD, settings=STEPS, keep=[1],
            checkpoint=path, resume=True,
        )  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize("stage", ["transfer", "fine-tune"])
def test_a_signal_leaves_a_model_and_a_way_on(tmp_path: Path, stage: str) -> None:
    def stop(line: dict[str, Any]) -> None:
        if (line.get("stage"), line.get("step")) == (stage, 2):
            os.kill(os.getpid(), signal.SIGINT)

    settings = settings_of_all(minutes=0.0, steps=4)
    model, path = bert(0, 1), tmp_path / "checkpoint"
    told = convert(model, MECHANISM, batch, HELD, settings=settings, checkpoint=path, watch=stop)
    assert told.status == "interrupted"
    assert len(told.figures) == (2 if stage == "transfer" else 3)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "model")(**HELD[0])[0], model(**HELD[0])[0])
    model, whole = bert(0, 1), bert(0, 1)
    assert convert(
        model, MECHANISM, batch, HELD, settings=settings, checkpoint=path, resume=True
    ).status == "complete"  # fmt: skip
    convert(whole, MECHANISM, batch, HELD, settings=settings)
    assert equal(state(model), state(whole))


def test_minutes_are_kept() -> None:
    settings = settings_of_all(minutes=0.03, share=0.5)
    lines: list[dict[str, Any]] = []
    convert(bert(0), MECHANISM, batch, HELD, settings=settings, watch=lines.append)
    for stage in ("transfer", "fine-tune"):
        seconds = [line["seconds"] for line in lines if line.get("stage") == stage]
        assert 0.9 <= seconds[-1] < 1.9
        assert seconds[-2] < 0.9


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    convert(bert(0), MECHANISM, batch, HELD, settings=STEPS, checkpoint=path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        convert(bert(0), MECHANISM, batch, HELD, settings=STEPS, checkpoint=path, resume=True)


def test_layers_that_are_asked_for_stay_exact() -> None:
    model = bert(0, 1, 2)
    told = convert(model, MECHANISM, batch, HELD, settings=STEPS, keep=[0, 2])
    assert told.converted == ["encoder.layer.1.attention.self"]
    assert set(told.kept.values()) == {"asked for"}
    assert [repr(layers_of(model)[name].bound.mechanism) for name in told.layers] == [
        "Softmax()",
        MECHANISM,
        "Softmax()",
    ]


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(Unsupported, match="Linear is neither"):
        convert(nn.Linear(2, 2), MECHANISM, batch, HELD)
    bart = transformers.BartModel(transformers.BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=99, max_position_embeddings=64,
    ))  # fmt: skip
    with pytest.raises(Unsupported, match="is both"):
        convert(bart, MECHANISM, batch, HELD)
    with pytest.raises(ValueError, match="layers go from 0 to 2"):
        convert(bert(), MECHANISM, batch, HELD, keep=[3])
    with pytest.raises(ValueError, match="held_out is empty"):
        convert(bert(), MECHANISM, batch, [])
    with pytest.raises(ValueError, match=r"at least 1, such as 1.02"):
        convert(bert(), MECHANISM, batch, HELD, budget=0.98)
    with pytest.raises(Unsupported, match=r"no layer can run.*a larger budget"):
        convert(bert(0, 1, 2), MECHANISM, batch, HELD, budget=1.0000001, settings=STEPS)
    with pytest.raises(Unsupported, match=r"traits.causal"):
        convert(decoder("gpt2"), "Linformer(rank=4)", batch, HELD)
    with pytest.raises(ValueError, match="conversion has no end"):
        ConversionSettings(minutes=0.0)
    with pytest.raises(TypeError, match=r"settings are ConversionSettings\(...\); got {}"):
        convert(None, "Local", lambda i: {}, [], settings={})  # type: ignore[arg-type]


def test_a_language_models_padding_is_not_predicted() -> None:
    model = decoder("llama")
    held = goals.LanguageModel().prepare(model, [padded(1)])
    with torch.no_grad():
        logits = model(**padded(1)).logits
    losses = [
        F.cross_entropy(logits[row, : real - 1], padded(1)["input_ids"][row, 1:real], reduction="sum")
        for row, real in ((0, 24), (1, 15))
    ]
    assert goals.LanguageModel().measure(model, held)["loss"] == pytest.approx(float(sum(losses)) / (23 + 14), rel=1e-5)


def test_one_layer_at_a_time_in_memory() -> None:
    """The transfer's gradients reach every layer, and no other parameter."""
    model = bert(0, 1, 2)
    original = copy.deepcopy(model).requires_grad_(False)
    swap(original, "Softmax")
    swap(model, MECHANISM)
    names = [*layers_of(model)]
    transfer.train(model, original, names, padded(0))
    inside = tuple(f"{name}." for name in names)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith(inside), name


@pytest.mark.parametrize(
    "mechanism", ["FavorPlusPlus(num_features=16)", "Hybrid(near=Local(window=2), far=FavorPlusPlus(num_features=16))"]
)
def test_damping_is_fitted_before_the_transfer(mechanism: str) -> None:
    """To the queries and keys of the original's own inputs; with nothing trained, that is all the transfer does."""
    settings = settings_of_all(minutes=0.0, steps=1, lr_projections=0.0, lr=0.0)
    model, plain = bert(0, 1, 2), bert(0, 1, 2)
    told = convert(model, mechanism, padded, HELD, settings=settings)
    torch.manual_seed(settings.seed)
    swap(plain, mechanism)
    fitted, before = state(model), state(plain)
    moved = [name for name, x in before.items() if not torch.equal(x, fitted[name])]
    assert moved == [f"{name}.fast_attention.bound.damping" for name in told.layers]
    bound = layers_of(model)[told.layers[0]].bound
    estimator = FavorPlusPlus(num_features=16)
    asked = estimator.calibrated(
        *_queries_and_keys(model, padded(0)), bound.w, key_mask=padded(0)["attention_mask"].bool()
    )
    torch.testing.assert_close(bound.damping, asked.damping)


def _queries_and_keys(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the first layer, (B, H, L, E)."""
    layer = model.encoder.layer[0].attention.self
    with torch.no_grad():
        x = model.embeddings(given["input_ids"])
        q, k = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (layer.query, layer.key))
    return q, k
