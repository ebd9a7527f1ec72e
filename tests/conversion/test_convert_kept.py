"""What a conversion keeps: whose weights a checkpoint is of, what exact attention adds for positions, precision."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import ConversionSettings, from_pretrained
from fast_attention import convert as convert_by_length
from fast_attention.conversion import ablation
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks import Batch
from tests.conversion.plain import convert
from tests.conversion.test_conversion import HELD, MECHANISM, STEPS, batch, bert, state

transformers = pytest.importorskip("transformers")

SHORT = 12
QUICK = ConversionSettings(minutes=0.0, steps=1)


def t5() -> Any:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99)
    return transformers.T5EncoderModel(config)


def bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99))


@pytest.mark.parametrize("kind", [t5, bloom])
def test_exact_attention_keeps_a_models_positions(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = kind().eval()
    original, short = copy.deepcopy(model), batch(7, SHORT - 2)
    window = "Local(window=4)" if kind is t5 else "Local(window=(4, 0))"
    convert_by_length(model, window, batch, HELD, settings=QUICK, exact_up_to=SHORT)
    with torch.no_grad():
        assert torch.allclose(model(**short)[0], original(**short)[0], atol=1e-5)
        model.save_pretrained(tmp_path)
        assert torch.equal(from_pretrained(tmp_path)(**HELD[0])[0], model(**HELD[0])[0])


def own_batch(number: int) -> Batch:
    tokens = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(number + 9))
    return Batch(tokens, tokens.roll(-1, 1), None)


def test_exact_attention_of_a_model_of_this_library_has_its_bias() -> None:
    torch.manual_seed(0)
    model = Model(ModelConfig(11, "Softmax(bias=T5Buckets())", width=16, heads=4, max_len=64, causal=True)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    original, short = copy.deepcopy(model), own_batch(3).tokens[:, : SHORT - 2]
    convert_by_length(model, "Local(window=(4, 0))", own_batch, [own_batch(1001)], settings=QUICK, exact_up_to=SHORT)
    with torch.no_grad():
        assert torch.equal(model(short), original(short))


def test_a_checkpoint_is_of_the_models_weights(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    model, same = bert(0), bert(0)
    convert(model, MECHANISM, batch, HELD, settings=STEPS, checkpoint=path)
    for other in (bert(1), model):  # another model of the class and size, and this one after its conversion
        before = state(other)
        with pytest.raises(ValueError, match=r"with weights .*: give the model as it was before that conversion"):
            convert(other, MECHANISM, batch, HELD, settings=STEPS, checkpoint=path, resume=True)
        assert all(torch.equal(before[name], x) for name, x in state(other).items())
    assert convert(same, MECHANISM, batch, HELD, settings=STEPS, checkpoint=path, resume=True).status == "complete"


def test_figures_of_a_model_in_half_precision_are_exact() -> None:
    told = convert(bert(0).bfloat16(), MECHANISM, batch, HELD, settings=replace(QUICK, train="mechanism"))
    assert told.figures["original"]["loss"] == pytest.approx(1.0, abs=1e-6)


def test_a_programs_random_numbers_go_on() -> None:
    torch.manual_seed(5)
    model, before = Model(ModelConfig(11, "Softmax()", width=16, heads=4, max_len=64)), torch.get_rng_state()
    convert(model, "FavorPlus(num_features=4)", own_batch, [own_batch(1001)], settings=QUICK)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize("when", ["tuned", "parts"])
def test_a_signal_after_the_training_counts(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line.get("measured") == when:
            os.kill(os.getpid(), signal.SIGINT)

    if when == "parts":
        monkeypatch.setattr(ablation, "measure", lambda *_: stop({"measured": when}) or {})
    given: dict[str, Any] = {"settings": QUICK, "checkpoint": tmp_path / "checkpoint"}
    assert convert(bert(0), MECHANISM, batch, HELD, **given, watch=stop).status == "interrupted"
    monkeypatch.undo()
    assert convert(bert(0), MECHANISM, batch, HELD, **given, resume=True).status == "complete"
