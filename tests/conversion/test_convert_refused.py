"""Conversions of models with dense masks and heads of their own, and what a failure leaves: the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention.conversion import Chunks, reads
from fast_attention.integrations.swapped import layers_of
from fast_attention.mechanism import Unsupported
from fast_attention.nn.models import Model
from fast_attention.tasks import parse
from fast_attention.training import steps
from tests.conversion.plain import convert, settings_of_all

transformers = pytest.importorskip("transformers")
from tests.conversion.test_conversion import HELD, LLAMA, MECHANISM, SIZES, batch, bert, decoder, equal, state  # noqa: E402

STEPS = settings_of_all(minutes=0.0, steps=2)


def built(kind: str, config: str, **sizes: Any) -> Any:
    torch.manual_seed(3)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()


def test_layers_with_a_dense_mask_are_converted() -> None:
    model = built("MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=6)
    told = convert(model, "Local(window=(8, 0))", batch, HELD, settings=STEPS)
    assert (told.status, len(told.converted), told.steps) == ("complete", 3, 4)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_an_encoder_with_a_head_learns_its_hidden_states(kind: str) -> None:
    model = built(kind, "BertConfig", **SIZES)
    body = model.bert
    original = built(kind, "BertConfig", **SIZES).bert
    told = convert(model, MECHANISM, batch, HELD, settings=STEPS)
    assert (told.status, told.goal, told.steps) == ("complete", "likeness to the original", 4)
    with torch.no_grad():
        cosine = torch.cosine_similarity(
            body(**HELD[1]).last_hidden_state.mean(1), original(**HELD[1]).last_hidden_state.mean(1)
        )
    assert float(cosine.min()) >= told.figures[told.best]["worst_sentence_cosine"] - 1e-5


def fails(number: int) -> dict[str, Tensor]:
    if number == 3:
        raise OSError("the disk is gone")
    return batch(number)


@pytest.mark.parametrize("model", [bert, lambda: decoder("llama")])
def test_a_failure_leaves_the_model_as_it_was(model: Callable[[], Any]) -> None:
    ours = model()
    before, kinds = state(ours), [type(part) for part in ours.modules()]
    with pytest.raises(OSError, match="the disk is gone"):
        convert(ours, MECHANISM, fails, HELD, settings=STEPS)
    assert equal(state(ours), before)
    assert not layers_of(ours)
    assert [type(part) for part in ours.modules()] == kinds
    assert all(p.requires_grad for p in ours.parameters())


def test_a_failure_leaves_a_model_of_this_library_as_it_was() -> None:
    torch.manual_seed(0)
    task = parse("Copy(symbols=4, words=3)")
    model = Model(steps.config_for(task, width=16, heads=2, layers=2, positions="learned")).eval()
    before, config = state(model), model.config

    def batches(number: int) -> Any:
        if number == 3:
            raise OSError("the disk is gone")
        return task.batch("train", number, 4)

    with pytest.raises(OSError, match="the disk is gone"):
        convert(model, MECHANISM, batches, [task.batch("valid", 0, 4)], settings=STEPS)
    assert equal(state(model), before)
    assert model.config == config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"held_out": HELD[0]}, r"held_out is one batch: give a list"),
        ({"held_out": [HELD[0]["input_ids"]]}, r"a batch is tensors by name.*got <class 'torch.Tensor'>"),
        ({"held_out": [{"input_ids": [[1, 2]]}]}, r"a batch is tensors by name.*'input_ids': 'list'"),
        ({"batches": HELD}, r"batches is a function of a number.*got <class 'list'>"),
        ({"budget": "1.02"}, r"budget='1.02' is a multiple"),
        ({"resume": True}, r"resume=True needs the file"),
        ({"checkpoint": Path()}, r"checkpoint='.' is a folder"),
        ({"settings": settings_of_all(steps=2, distil=1.0)}, r"distil=1.0 is for language models; BertModel"),
        ({"teacher": "chunks"}, r"teacher='chunks': give"),
        ({"keep": [3]}, r"keep names layer 3"),
        (
            {"held_out": [{**HELD[0], "attention_mask": torch.tensor([[1] * 24, [0] * 24])}]},
            r"text 1 of a batch has no",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(arguments: dict[str, Any], said: str) -> None:
    model = bert()
    before = state(model)
    given = {"batches": batch, "held_out": HELD, "settings": STEPS, **arguments}
    with pytest.raises(ValueError, match=said):
        convert(model, MECHANISM, **given)
    assert equal(state(model), before)
    assert not layers_of(model)


def test_a_decoder_has_no_teacher_that_reads_chunks() -> None:
    model = decoder("llama")
    with pytest.raises(ValueError, match="is for encoders that give embeddings"):
        convert(model, MECHANISM, batch, HELD, settings=STEPS, teacher=Chunks(tokens=8))
    assert not layers_of(model)


def test_a_batch_without_a_token_to_predict_is_refused() -> None:
    with pytest.raises(ValueError, match="has no token to predict"):
        convert(decoder("gpt2"), MECHANISM, lambda number: {"input_ids": torch.ones(2, 1).long()}, HELD, settings=STEPS)


def test_a_decoder_that_reads_vectors_predicts_labels() -> None:
    """Those alone that are not -100, as in a prompt that is not learnt."""
    model, number = decoder("llama"), batch(-1)["input_ids"]
    vectors = model.get_input_embeddings()(number).detach()
    labels = number.where(torch.arange(number.shape[1]) > 3, -100)
    given = {"inputs_embeds": vectors, "labels": labels}
    with torch.no_grad():
        expected = float(model(input_ids=number, labels=labels).loss)
    told = convert(model, MECHANISM, lambda _: given, [given], settings=STEPS)
    assert told.figures["original"]["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="a batch of inputs_embeds names no tokens to predict: give labels"):
        convert(decoder("llama"), MECHANISM, lambda _: given, [{"inputs_embeds": vectors}], settings=STEPS)
    with pytest.raises(ValueError, match="cuts input_ids into chunks, and a batch has inputs_embeds"):
        Chunks(tokens=8).read(bert(), {"inputs_embeds": vectors})


def test_a_model_without_hidden_states_is_refused_in_words() -> None:
    with pytest.raises(Unsupported, match="Silent gives no hidden states"):
        reads.hidden(Silent(), {})


class Silent(nn.Module):
    def forward(self, **inputs: Any) -> Any:
        return None
