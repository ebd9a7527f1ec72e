"""What a conversion ends with: the best stage on texts that were not trained on, the untrained swap among them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import ConversionSettings, convert, swap
from fast_attention.conversion import Chunks, reads
from fast_attention.conversion.outcome import mean_of_others
from fast_attention.integrations.swapped import layers_of
from fast_attention.lab.converting import page
from fast_attention.lab.converting.record import Converted
from tests.conversion.test_conversion import HELD, MECHANISM, batch, bert, decoder, equal, padded, recomputed, state
from tests.conversion.test_convert_own import model as own_model

HYBRID = f"Hybrid(near=BlockLocal(block_size=4), far={MECHANISM})"
WILD = ConversionSettings(minutes=0.0, steps=3, lr_maps=30.0, lr=30.0)
TAME = ConversionSettings(minutes=0.0, steps=20, lr_maps=2e-2, lr=1e-3)


def swapped(model: Any, mechanism: str) -> Any:
    torch.manual_seed(0)
    swap(model, mechanism)
    return model.eval()


def test_a_training_that_made_it_worse_is_left_out() -> None:
    model, untrained = bert(0, 1, 2), swapped(bert(0, 1, 2), MECHANISM)
    told = convert(model, MECHANISM, batch, HELD, settings=WILD, exact_up_to=None)
    assert told.figures["tuned"]["loss"] > told.figures["swapped"]["loss"]
    assert told.best == "swapped"
    assert equal(state(model), state(untrained))
    words = page.gain(Converted({}, told))
    assert words[0].startswith("6 steps, and nothing was gained on the held-out passages")


def test_nothing_but_the_mechanism_learns_by_default() -> None:
    model, untrained = bert(0, 1, 2), swapped(bert(0, 1, 2), MECHANISM)
    told = convert(model, MECHANISM, batch, HELD, settings=TAME, exact_up_to=None)
    assert told.best in ("transferred", "tuned")
    assert told.judged(told.best) < told.judged("swapped")
    changed = [name for name, x in state(untrained).items() if not torch.equal(x, state(model)[name])]
    assert changed == [f"{name}.fast_attention.bound.{part}" for name in told.layers for part in ("query", "key")]
    assert f"fell from {told.judged('swapped'):.4f}" in page.gain(Converted({}, told))[0]


def test_a_stopped_conversion_knows_the_best_stage(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(line: dict[str, Any]) -> None:
        if line.get("stage") == "fine-tune" and line["step"] == 2:
            raise Killed

    settings: dict[str, Any] = {"settings": WILD, "exact_up_to": None, "checkpoint": tmp_path / "checkpoint"}
    with pytest.raises(Killed):
        convert(bert(0, 1), MECHANISM, batch, HELD, watch=kill, **settings)
    model = bert(0, 1)
    told = convert(model, MECHANISM, batch, HELD, resume=True, **settings)
    assert told.best == "swapped"
    assert told.steps == 2 * WILD.steps
    assert equal(state(model), state(swapped(bert(0, 1), MECHANISM)))


def test_texts_that_are_trained_on_do_not_judge() -> None:
    groups = {"trained text, 512": {"loss": 9.0}, "short": {"loss": 1.0}, "other text, 512": {"loss": 2.0}}
    assert mean_of_others(groups) == 1.5
    assert mean_of_others({"trained text, 512": {"loss": 9.0}}) == 9.0


def by_hand(model: Any, ids: Tensor, size: int) -> Tensor:
    """The mean of the embeddings of chunks of one text, weighted by their tokens."""
    first, content, last = ids[:1], ids[1:-1], ids[-1:]
    total = torch.zeros(model.config.hidden_size)
    for start in range(0, len(content), size):
        part = content[start : start + size]
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
            second = model(torch.cat([ids[:1], ids[8:15], ids[-1:]])[None] if length > 16 else ids[None, : 0 + 9])[0][0]
        if length > 16:
            torch.testing.assert_close(found.states[-1][row, 8:15], second[1:-1], atol=1e-5, rtol=1e-5)
    assert [x.shape for x in found.states] == [(2, 24, 32)] * 4
    assert not found.states[-1][1, 15:].any()
    whole = Chunks(tokens=64).read(model, given)
    with torch.no_grad():
        states = reads.hidden(model, given)
    torch.testing.assert_close(whole.sentences, reads.pooled(states[-1], reads.tokens(given)), atol=1e-5, rtol=1e-5)


def test_a_model_learns_from_chunks() -> None:
    model = bert(0, 1, 2)
    original = copy.deepcopy(model)
    told = convert(model, HYBRID, batch, [HELD[1]], settings=TAME, exact_up_to=None, teacher=Chunks(tokens=10))
    ids, reference = HELD[1], [by_hand(original, row, 8) for row in HELD[1]["input_ids"]]
    with torch.no_grad():
        ours, exact = (m(**ids).last_hidden_state.mean(1) for m in (model, original))
    cosine = torch.nn.functional.cosine_similarity
    assert told.figures[told.best]["sentence_cosine"] == pytest.approx(
        float(cosine(ours, torch.stack(reference)).mean()), abs=1e-5
    )
    assert told.figures["original"]["sentence_cosine"] == pytest.approx(
        float(cosine(exact, torch.stack(reference)).mean()), abs=1e-5
    )
    assert "transfer" not in told.curves
    assert told.errors == {}


def test_a_teacher_that_a_model_has_no_use_for_is_refused() -> None:
    for model in (decoder("llama"), own_model()):
        with pytest.raises(ValueError, match="is for encoders that give embeddings"):
            convert(model, MECHANISM, batch, HELD, settings=TAME, exact_up_to=None, teacher=Chunks(tokens=9))
    with pytest.raises(ValueError, match="give 'original' or Chunks"):
        convert(bert(0), MECHANISM, batch, HELD, settings=TAME, exact_up_to=None, teacher="paper")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens"):
        Chunks(tokens=2)


def test_parts_are_left_out_alone() -> None:
    model = bert(0, 1, 2)
    original = copy.deepcopy(model)
    settings = ConversionSettings(minutes=0.0, steps=1, lr=0.0, lr_maps=0.0)
    told = convert(model, HYBRID, batch, HELD, settings=settings, exact_up_to=None)
    assert {*told.ablations} == {"far part off", "near part off"}
    assert told.by_group == {}
    for words, part in (("far part off", "BlockLocal(block_size=4)"), ("near part off", MECHANISM)):
        alone = swapped(copy.deepcopy(original), part)
        assert told.ablations[words][""] == pytest.approx(recomputed(original, alone), abs=1e-5)
    assert {repr(each.bound.mechanism) for each in layers_of(model).values()} == {HYBRID}
    assert convert(bert(0), MECHANISM, batch, HELD, settings=settings, exact_up_to=None).ablations == {}
    losses = [told.ablations["far part off"][""]["loss"], told.judged(told.best)]
    words = page.gain(Converted({}, told))[-1]
    assert f"without it the loss is {losses[0]:.4f}, with it {losses[1]:.4f}" in words
    assert ("earns nothing" in words) == (losses[0] <= losses[1] + page.LEAST_GAIN)
