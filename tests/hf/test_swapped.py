"""What stands around ``swap(model)``: reports, checks on a batch, saving, copies, other tools, refusals."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fast_attention import core, swap, swap_back
from fast_attention.engine import tiles
from fast_attention.integrations import calls
from fast_attention.mechanism import Unsupported
from tests.fresh import told
from tests.hf import families
from tests.hf.test_families import IDS, LEFT, RIGHT, SAME, away, both, first
from tests.integrations.test_fresh_process import SAME as EQUAL

LONG = torch.randint(3, families.VOCABULARY, (2, 300), generator=torch.Generator().manual_seed(1))
HOLES = torch.ones_like(LONG)
HOLES[0, 250:] = HOLES[1, 90:] = 0


@pytest.fixture
def kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full layers that are not causal stay with torch's kernel, as they do on most processors."""
    monkeypatch.setattr(tiles, "leads", lambda dtype, is_causal: is_causal)


def mistral(**settings: Any) -> Any:
    return families.decoder("Mistral", **{"max_position_embeddings": 400, **settings})


def test_the_report_tells_what_is_gained_and_checks_a_batch(kernels_of_torch: None) -> None:
    model = families.encoder("ModernBert", max_position_embeddings=400)
    report = swap(model)
    assert " ".join(str(report).splitlines()[-3:]) == (
        "    -> in tiles from 256 tokens on Same results. Faster: 2 of 3 attention layers from 256 tokens on; padded "
        "batches, without their padding."
    )
    for batch in ({"input_ids": LONG, "attention_mask": HOLES}, LONG):
        result = report.verify(batch)
        assert result.same
        assert result.gradients is None
        assert result.difference < SAME
        assert str(result).startswith("Same results: outputs differ by at most ")
    model.train()
    result = report.verify({"input_ids": LONG, "attention_mask": HOLES})
    assert model.training
    assert result.gradients is not None
    assert result.gradients < SAME
    with pytest.raises(TypeError, match=r"verify\(int\): give the model's arguments by name"):
        report.verify(3)
    with pytest.raises(TypeError, match="needs a model with encode"):
        report.verify(["a text"])


def test_a_check_says_where_results_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from fast_attention.integrations.exact import attention

    report = swap(mistral())
    attend = attention.attend

    def narrower(q: Any, k: Any, v: Any, seen: Any, **settings: Any) -> Any:
        return attend(q, k, v, replace(seen, keys_left=seen.keys_left - 1), **settings)

    monkeypatch.setattr(attention, "attend", narrower)
    result = report.verify({"input_ids": LONG})
    assert not result.same
    assert str(result).startswith("OTHER RESULTS")


def test_a_form_that_gives_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe compares; the model is then as it was."""
    from fast_attention.integrations.exact import attention

    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda q, k, v, **settings: v.repeat(1, 2, 1, 1))
    model = mistral()
    wanted = first(model(IDS))
    report = swap(model)
    assert not report.gains
    assert "gives other outputs in our forms" in str(report)
    assert torch.equal(first(model(IDS)), wanted)


def test_nothing_to_gain_changes_nothing(kernels_of_torch: None) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))
    before = [*vars(model)]
    report = swap(model)
    assert "Nothing to gain without changing results: the model is as it was." in str(report)
    assert [*vars(model)] == before
    assert model.config._attn_implementation == "sdpa"
    report = swap(nn.Linear(2, 2))
    assert "Linear holds no Hugging Face model" in str(report)


def test_options_that_contradict_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="exact_up_to=512 without a mechanism"):
        swap(mistral(), exact_up_to=512)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="max_len=512 without a mechanism"):
        swap(mistral(), max_len=512)  # type: ignore[call-overload]
    with pytest.raises(Unsupported, match="skip_padding=True is for encoders"):
        swap(mistral(), skip_padding=True)
    with torch.device("meta"):
        model = transformers.MistralModel(families.config_of("Mistral"))
    assert "meta device" in str(swap(model))


@torch.no_grad()
def test_padding_is_skipped_where_that_pays_and_can_be_turned_off() -> None:
    model = families.encoder("Bert", max_position_embeddings=400)
    wanted = first(model(LONG, attention_mask=HOLES))
    swap(model)
    got = first(model(LONG, attention_mask=HOLES))
    assert away(wanted, got, HOLES) < SAME
    assert not got[1, 90:].any()
    swap(model, skip_padding=False)
    unpadding = vars(model)
    assert not any("skips" in name for name in unpadding)
    assert away(wanted, first(model(LONG, attention_mask=HOLES)), HOLES) < SAME


@torch.no_grad()
def test_masks_of_the_callers_own_run_what_ran() -> None:
    """A mask of all pairs, holes in a text, a cache of the caller's."""
    model = mistral()
    swap(model)
    pairs = torch.ones(2, 1, 300, 300, dtype=torch.bool).tril()
    holes = HOLES.clone()
    holes[:, 100:110] = 0
    holes[1, 40] = 0
    for settings in ({"attention_mask": pairs}, {"attention_mask": holes}):
        wanted, got = both(lambda settings=settings: first(model(LONG, **settings)))
        assert torch.equal(wanted, got)


@torch.no_grad()
def test_a_swapped_model_saves_as_the_original(tmp_path: Path) -> None:
    """The same files to the byte, which load as an ordinary model."""
    for name, build in (("Mistral", families.decoder), ("ModernBert", families.encoder)):
        model = build(name)
        model.save_pretrained(tmp_path / "plain")
        swap(model)
        model.save_pretrained(tmp_path / "swapped")
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "swapped" / file).read_bytes()
        again = type(model).from_pretrained(tmp_path / "swapped")
        assert again.config._attn_implementation == "sdpa"
        assert torch.equal(first(again(IDS)), first(model(IDS)))


@torch.no_grad()
def test_copies_and_models_of_the_same_config() -> None:
    model = mistral()
    wanted = first(model(LONG))
    other = type(model)(model.config)
    swap(model)
    assert other.config._attn_implementation == "sdpa"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert away(wanted, first(copied(LONG))) < SAME
        assert swap_back(copied)
        assert torch.equal(first(copied(LONG)), wanted)
    built = type(model)(model.config)
    assert first(built(LONG)).isfinite().all()


@torch.no_grad()
def test_a_process_that_knows_nothing(tmp_path: Path) -> None:
    """A saved folder needs nothing of this library; a pickled model finds its functions."""
    model = mistral()
    swap(model)
    seen = {"given": (LONG,), "out": first(model(LONG)), "state": model.state_dict()}
    torch.save(seen, tmp_path / "seen.pt")
    model.save_pretrained(tmp_path)
    torch.save(model, tmp_path / "whole.pt")
    plain = "model = transformers.MistralForCausalLM.from_pretrained('.').eval()"
    alone = (
        f"{plain}{EQUAL}\nimport sys\nassert not [name for name in sys.modules if name.startswith('fast_attention')]"
    )
    pickled = "model = torch.load('whole.pt', weights_only=False)\nassert 'exact_' in model.config._attn_implementation"
    outcomes = told([("folder", str(tmp_path), alone), ("pickle", str(tmp_path), pickled + EQUAL)])
    assert outcomes == {"folder": "", "pickle": ""}


@torch.no_grad()
def test_a_swap_for_a_mechanism_follows_and_is_followed() -> None:
    model = mistral()
    wanted = first(model(LONG))
    swap(model)
    swap(model, "Softmax")
    assert away(wanted, first(model(LONG))) < SAME
    assert "-> in tiles" in str(swap(model))
    assert away(wanted, first(model(LONG))) < SAME
    swap_back(model)
    assert torch.equal(first(model(LONG)), wanted)


@torch.no_grad()
def test_eager_models_give_their_matrices(kernels_of_torch: None) -> None:
    model = families.encoder("Bert", max_position_embeddings=400)
    model.set_attn_implementation("eager")
    wanted = model(LONG, attention_mask=HOLES, output_attentions=True)
    assert "torch's fused kernel in place of plain operations" in str(swap(model))
    got = model(LONG, attention_mask=HOLES, output_attentions=True)
    assert torch.equal(got.last_hidden_state, wanted.last_hidden_state)
    for a, b in zip(wanted.attentions, got.attentions, strict=True):
        assert torch.equal(a, b)
    assert away(wanted.last_hidden_state, first(model(LONG, attention_mask=HOLES)), HOLES) < SAME


@torch.no_grad()
def test_compiled_models_run_what_ran() -> None:
    model = mistral(num_hidden_layers=1)
    wanted = first(model(LONG))
    swap(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    assert away(wanted, first(compiled(LONG))) < SAME


@torch.no_grad()
def test_sentence_transformers_skip_padding() -> None:
    st = pytest.importorskip("sentence_transformers")
    from fast_attention.lab.loading import default_model

    model = st.SentenceTransformer(default_model(), device="cpu")
    texts = ["A short text.", "A longer text, whose padding nobody computes. " * 12, "Another one."]
    wanted = torch.as_tensor(model.encode(texts))
    report = swap(model)
    assert report.skips_padding
    assert float((torch.as_tensor(model.encode(texts)) - wanted).abs().max()) < 1e-5
    assert report.verify(texts).same


def test_padded_in_front_too() -> None:
    with torch.no_grad():
        for name in ("ModernBert", "Bert"):
            model = families.encoder(name)
            swap(model)
            for mask in (LEFT, RIGHT):
                wanted, got = both(lambda model=model, mask=mask: first(model(IDS, attention_mask=mask)))
                assert away(wanted, got, mask) < SAME


def test_what_a_block_forces_ends_with_it() -> None:
    with calls.forced():
        assert calls.runs_ours(False)
        with calls.original():
            assert not calls.runs_ours(True)
        assert calls.runs_ours(False)
    assert not calls.runs_ours(False)
    assert calls.runs_ours(True)


@pytest.mark.parametrize("name", ["Longformer", "BigBird", "Gemma2"])
def test_without_the_core_the_report_promises_no_tiles(name: str) -> None:
    """Their forms are the core's alone; the layers run what they ran, and the report says why."""
    if name == "Gemma2":
        model = families.decoder(name)
    else:
        sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        more = {"attention_window": [16]} if name == "Longformer" else {"block_size": 16}
        config = getattr(transformers, f"{name}Config")(**sizes, intermediate_size=48, **more)
        model = getattr(transformers, f"{name}Model")(config).eval()
    with core.switched_off():
        report = swap(model)
        assert not report.faster
        assert "in tiles" not in str(report)
        words = " ".join(str(report).split())
        assert "what ran before: tiles need the compiled core (turned off here)" in words
        assert "Nothing to gain without changing results" in words or report.skips_padding
        swap_back(model)
    if not core.unavailable():
        assert "in tiles" in str(swap(model))
