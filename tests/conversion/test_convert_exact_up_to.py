"""``convert(..., exact_up_to=)``: the mechanism learns, short inputs stay what they were, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import ConversionSettings, convert, from_pretrained
from fast_attention.conversion import Chunks
from fast_attention.integrations import crossover
from fast_attention.integrations.swapped import layers_of
from tests.conversion.test_conversion import HELD, LLAMA, MECHANISM, SIZES, batch, bert, equal, state
from tests.conversion.test_convert_command import SHORT, Converted, bytes_of, folders, run  # noqa: F401
from tests.conversion.test_convert_own import batch as own_batch
from tests.conversion.test_convert_own import model as own_model

transformers = pytest.importorskip("transformers")
STEPS = ConversionSettings(minutes=0.0, steps=8, save_seconds=0.0)


def outputs(model: Any, length: int) -> Tensor:
    with torch.no_grad():
        return model(**batch(5, length))[0]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_short_inputs_stay_and_long_ones_learn(name: str, tmp_path: Path) -> None:
    """The passages to learn from are shorter than what exact attention serves in the end."""
    torch.manual_seed(3)
    model = bert(0, 1) if name == "bert" else transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    original = copy.deepcopy(model)
    held = {"short": HELD, "long": [batch(-3, 40)]}
    told = convert(model, MECHANISM, batch, held, settings=STEPS, exact_up_to=30)
    assert told.mechanism == f"ByLength(long={MECHANISM}, above=30)"
    assert list(told.figures) == ["original", "swapped", "transferred", "tuned"]
    for groups in told.by_group.values():
        assert groups["short"] == told.by_group["original"]["short"], "the passages have 24 tokens"
    assert told.by_group["tuned"]["long"] != told.by_group["swapped"]["long"]
    assert torch.equal(outputs(model, 30), outputs(original, 30))
    assert not torch.equal(outputs(model, 31), outputs(original, 31))
    parameters = dict(model.named_parameters())
    assert all(torch.equal(x, parameters[name]) for name, x in original.named_parameters()), "only maps are trained"
    learnt = [p for name, p in parameters.items() if name.endswith(("long_query", "long_key"))]
    assert len(learnt) == 2 * len(told.converted)
    assert told.best != "swapped" or name == "llama", "random tokens teach a decoder nothing"
    moved = [not torch.equal(a, b) for a, b in zip(learnt[::2], learnt[1::2], strict=True)]
    assert name == "llama" or all(moved), "equal at the start"
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(from_pretrained(tmp_path), 40), outputs(model, 40))


def test_a_stopped_conversion_ends_as_one_that_was_not(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(line: dict[str, Any]) -> None:
        if line.get("stage") == "transfer" and line["step"] == 4:
            raise Killed

    whole, stopped = bert(0), bert(0)
    settings: dict[str, Any] = {"settings": STEPS, "exact_up_to": 20, "checkpoint": tmp_path / "checkpoint"}
    convert(whole, MECHANISM, batch, HELD, settings=STEPS, exact_up_to=20)
    with pytest.raises(Killed):
        convert(stopped, MECHANISM, batch, HELD, watch=kill, **settings)
    other = {**settings, "exact_up_to": 21}
    with pytest.raises(ValueError, match=r"conversion with mechanism .*, exact up to 20, not .*, exact up to 21"):
        convert(bert(0), MECHANISM, batch, HELD, resume=True, **other)
    again = bert(0)
    told = convert(again, MECHANISM, batch, HELD, resume=True, **settings)
    assert told.status == "complete"
    assert equal(state(again), state(whole))


def test_auto_is_measured_at_the_layers_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(mechanism: Any, shape: Any, like: Tensor, *, is_causal: bool) -> int:
        asked.append((repr(mechanism), shape.heads, shape.head_dim, is_causal))
        return 48

    monkeypatch.setattr(crossover, "crossover", measured)
    model = bert(0)
    told = convert(model, "Local(window=2)", batch, HELD, settings=STEPS, exact_up_to="auto", keep=[1])
    assert asked == [("Local(window=2)", SIZES["num_attention_heads"], 8, False)]
    assert told.mechanism == "ByLength(long=Local(window=2), above=48)"
    assert [repr(each.bound.mechanism) for each in layers_of(model).values()].count("Softmax()") == 1


@pytest.mark.parametrize(("tokens", "above"), [(10, 10), (64, 48)])
def test_auto_stays_within_a_chunk_of_the_teacher(tokens: int, above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exact attention is faster, but sees more than the teacher does, the mechanism runs."""
    monkeypatch.setattr(crossover, "crossover", lambda *_, **__: 48)
    told = convert(
        bert(0), "Local(window=2)", batch, HELD, settings=STEPS, exact_up_to="auto", teacher=Chunks(tokens=tokens)
    )
    assert told.mechanism == f"ByLength(long=Local(window=2), above={above})"


@pytest.mark.parametrize("mechanism", ["LearnedFeatures(num_features=4)", "RandomSynthesizer()"])
def test_a_model_of_this_library_keeps_its_projections(mechanism: str) -> None:
    """Also where the mechanism alone reads fewer of them."""
    model = own_model()
    original = copy.deepcopy(model)
    first = own_batch(0)
    told = convert(model, mechanism, own_batch, [own_batch(1001)], settings=STEPS, exact_up_to=first.tokens.shape[1])
    assert told.mechanism.startswith("ByLength(long=")
    assert {*([model.config.mechanism] if isinstance(model.config.mechanism, str) else model.config.mechanism)} == {
        told.mechanism
    }
    with torch.no_grad():
        torch.testing.assert_close(model(first.tokens, first.key_mask), original(first.tokens, first.key_mask))


def test_auto_is_none_where_the_model_never_ran_exact_attention() -> None:
    said: list[dict[str, Any]] = []
    model = own_model(mechanism="FavorPlus(num_features=8)")
    told = convert(model, "Local(window=4)", own_batch, [own_batch(1001)], settings=STEPS, watch=said.append)
    assert told.exact_up_to is None
    assert model.config.mechanism == told.mechanism == "Local(window=4)"
    words = "no exact attention for short inputs: the model was trained with FavorPlus(num_features=8)"
    assert {"message": words} in said


@pytest.mark.parametrize("wrong", [0, "often"])
def test_what_is_no_number_is_refused_before_anything_is_done(wrong: Any) -> None:
    model = bert(0)
    with pytest.raises(ValueError, match="give a number of tokens, at least 1, or 'auto'"):
        convert(model, MECHANISM, batch, HELD, settings=STEPS, exact_up_to=wrong)
    with pytest.raises(ValueError, match="says itself up to where it is exact"):
        convert(model, "ByLength()", batch, HELD, settings=STEPS, exact_up_to=8)
    assert not layers_of(model)


def test_the_command_takes_it(
    folders: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crossover, "crossover", lambda *_, **__: 44)
    given = [str(folders / "encoder"), *SHORT, "--text", str(folders / "text.txt"), "--minutes", "0.02"]
    for limit, above in (("40", 40), ("auto", 44)):
        out = tmp_path / limit
        code, told, err = run(capsys, *given, "--exact-up-to", limit, "--out", str(out))
        assert code == 0, err
        assert " steps" in told
        held = Converted.read(out / "report.json")
        assert held.conversion.mechanism == f"ByLength(long=LearnedFeatures(num_features=4), above={above})"
        assert held.figures("swapped")["sentence_cosine"] == pytest.approx(1.0), "passages have 40 tokens"
        assert f"above={above}" in (out / "report.html").read_text()
        before = transformers.AutoModel.from_pretrained(folders / "encoder").eval()
        ids = torch.randint(3, 300, (2, 40))
        with torch.no_grad():
            assert torch.equal(from_pretrained(out)(ids)[0], before(ids)[0])
    code, told, err = run(capsys, *given, "--exact-up-to", "none", "--teacher", "chunks", "--out", str(tmp_path / "c"))
    assert code == 0, err
    held = Converted.read(tmp_path / "c" / "report.json")
    assert held.meta["teacher"] == "Chunks(tokens=64, before=0)"
    assert held.conversion.mechanism == "LearnedFeatures(num_features=4)"
    code, _, err = run(capsys, *given, "--teacher", "paper", "--out", str(tmp_path / "none"))
    assert code == 2
    assert "this model learns from original or chunks" in err
    for wrong in ("0", "-3", "often", "2.5"):
        code, _, err = run(capsys, *given, "--exact-up-to", wrong, "--out", str(tmp_path / "none"))
        assert code == 2
        assert "write a number of tokens, at least 1, or auto" in err
