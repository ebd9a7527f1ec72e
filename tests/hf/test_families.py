"""``swap(model)``: every family gives what it gave, in our forms at any length, and runs what it ran below theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import cache_argument, core, swap, swap_back
from fast_attention.engine import tiles
from fast_attention.integrations import calls
from tests.hf import families
from tests.hf.families import DECODERS, ENCODERS, WINDOW

SAME, GRADIENTS = 2e-5, 1e-4  # relative differences that rounding explains
OWN_CODE = ("Bloom", "Mpt")  # which compute attention themselves and know no packed rows
IDS = torch.randint(3, families.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
RIGHT = torch.ones_like(IDS)
RIGHT[0, 33:] = RIGHT[1, 20:] = 0
LEFT = RIGHT.flip(-1)
WINDOWED = [name for name in DECODERS if name not in ("Llama", "GPT2", *OWN_CODE)]


def first(outputs: Any) -> Tensor:
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def away(wanted: Tensor, got: Tensor, mask: Tensor | None = None) -> float:
    if mask is not None:
        wanted, got = wanted[mask.bool()], got[mask.bool()]
    return float((wanted.double() - got.double()).abs().max() / wanted.double().abs().max())


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """What a swapped model gives in its original form, and in ours at any length."""
    with calls.original():
        wanted = run()
    with calls.forced():
        return wanted, run()


@torch.no_grad()
@pytest.mark.parametrize("name", [*DECODERS, *(name for name in ENCODERS if name != "MPNet")])
def test_outputs_are_the_same(name: str) -> None:
    """At odd lengths, beyond the window, padded at either end, in packed rows."""
    model = families.decoder(name) if name in DECODERS else families.encoder(name)
    plain = [first(model(IDS[:, :length])) for length in (5, 13, 39)]
    report = swap(model)
    if name == "Gemma2" and core.unavailable():
        assert not report.gains, "soft caps are computed by the core alone"
        return
    assert report.gains, report
    for wanted in plain:
        ids = IDS[:, : wanted.shape[1]]
        with calls.original():
            assert torch.equal(first(model(ids)), wanted)
        with calls.forced():
            assert away(wanted, first(model(ids))) < SAME
    for mask in (RIGHT, LEFT):
        wanted, got = both(lambda mask=mask: first(model(IDS, attention_mask=mask)))
        assert away(wanted, got, mask) < SAME
    if name in DECODERS and name not in OWN_CODE:
        positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
        wanted, got = both(lambda: first(model(IDS[:1], position_ids=positions, use_cache=False)))
        assert away(wanted, got) < SAME


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_are_the_same(name: str) -> None:
    """Greedy, by beams, assisted, from a cache of a fixed size; padded in front too."""
    model = families.decoder(name)
    swap(model)
    kinds: list[tuple[dict[str, Any], bool]] = [
        ({}, True), ({"num_beams": 3}, True), ({"cache_implementation": "static"}, True),
        ({"prompt_lookup_num_tokens": 3}, False),
    ]  # fmt: skip
    for settings, is_batch in kinds if name != "Mpt" else kinds[:3]:
        ids, mask = (IDS, LEFT) if is_batch else (IDS[:1], torch.ones_like(IDS[:1]))
        wanted, got = both(
            lambda ids=ids, mask=mask, settings=settings: model.generate(
                ids, attention_mask=mask, max_new_tokens=10, do_sample=False, **settings
            )
        )
        assert torch.equal(wanted, got), settings


@torch.no_grad()
@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text", "Llama4Text", "GptOss"])
@pytest.mark.parametrize("sizes", [(10, 20, 10), (3, 1, 30, 6)])
def test_a_prompt_in_parts_is_the_same(family: str, sizes: tuple[int, ...]) -> None:
    """Behind a cache, whose sliding layers keep a window's keys."""
    model = families.decoder(family)
    swap(model)

    def decoded() -> Tensor:
        cache, start, rows, name = None, 0, [], cache_argument.name_of(model.forward)
        for size in sizes:
            found = model(IDS[:, start : start + size], use_cache=True, **{name: cache})
            cache, start = found[name], start + size
            rows.append(found.logits)
        return torch.cat(rows, 1)

    assert away(*both(decoded)) < SAME


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # its name before 5.2x
@pytest.mark.parametrize("name", [*WINDOWED, "ModernBert"])
def test_gradients_are_the_same(name: str) -> None:
    """Of every weight, in training mode, by reentrant checkpoints too."""
    model = families.decoder(name) if name in DECODERS else families.encoder(name)
    weights = [p for p in model.parameters() if p.requires_grad]
    swap(model)
    model.train()

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        settings = {"use_cache": False} if name in DECODERS else {}
        first(model(IDS, attention_mask=RIGHT, **settings))[RIGHT.bool()].square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in weights]

    for checkpoints in (None, False, True):
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        wanted, got = both(gradients)
        largest = max(float(x.abs().max()) for x in wanted if x is not None)
        for a, b in zip(wanted, got, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or float((a - b).abs().max()) < GRADIENTS * largest


@torch.no_grad()
@pytest.mark.parametrize("name", [*WINDOWED, "ModernBert", "Bert"])
def test_bfloat16_is_as_near_as_the_original(name: str) -> None:
    model = families.decoder(name) if name in DECODERS else families.encoder(name)
    exact = first(model(IDS, attention_mask=RIGHT))
    model.bfloat16()
    swap(model)
    wanted, got = both(lambda: first(model(IDS, attention_mask=RIGHT)).float())
    errors = [(x - exact)[RIGHT.bool()].square().mean().sqrt() for x in (wanted, got)]
    assert errors[1] <= 1.1 * errors[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "ModernBert", "Bert", "GptOss"])
def test_short_inputs_run_what_ran(name: str) -> None:
    """Never slower: below the length where a form pays, outputs are those of the original to the bit."""
    model = families.decoder(name, max_position_embeddings=600) if name in DECODERS else families.encoder(name)
    swap(model)
    for length in (16, 100) if name == "Bert" else (16, 100, 255):
        ids = IDS[:1].repeat(1, 7)[:, :length]
        with calls.original():
            wanted = first(model(ids))
        assert torch.equal(first(model(ids)), wanted)
    padded = torch.ones_like(IDS)
    padded[:, 37:] = 0
    with calls.original():
        wanted = first(model(IDS, attention_mask=padded))
    assert torch.equal(first(model(IDS, attention_mask=padded)), wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mistral", "ModernBert", "Llama4Text", "GptOss"])
def test_long_inputs_run_ours_without_a_mask_of_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the length on that the report names; what transformers would make of it is not made."""
    settings = {"max_position_embeddings": 600}
    model = families.decoder(name, **settings) if name in DECODERS else families.encoder(name, **settings)
    report = swap(model)
    start = max(layer.faster_from or 0 for layer in report.layers)
    ids = torch.randint(3, families.VOCABULARY, (2, max(start, 300)))
    mask = torch.ones_like(ids)
    mask[1, 200:] = 0
    with calls.original():
        wanted = first(model(ids, attention_mask=mask))

    def refuse(*args: Any, **settings: Any) -> Any:
        raise AssertionError("a mask of all pairs was made")

    from fast_attention.integrations.exact import attention as exact

    for before in exact.NAMES:
        monkeypatch.setitem(exact.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, before, refuse)
    assert away(wanted, first(model(ids, attention_mask=mask)), mask) < SAME


@torch.no_grad()
@pytest.mark.parametrize("keep", [0, 1, 5])
def test_models_that_cut_queries_out_of_their_masks(keep: int) -> None:
    """Gemma 4's last layers share keys, and compute only the queries whose logits are kept."""
    model = families.decoder("Gemma4Text", num_kv_shared_layers=1)
    wanted = model(IDS, logits_to_keep=keep).logits
    swap(model)
    assert away(wanted, model(IDS, logits_to_keep=keep).logits) < SAME
    with calls.forced():
        assert away(wanted, model(IDS, logits_to_keep=keep).logits) < SAME


def test_swap_back_restores_the_model() -> None:
    for name in ("Mistral", "Bert"):
        model = families.decoder(name) if name in DECODERS else families.encoder(name)
        kinds, named, config = (
            [type(m) for m in model.modules()],
            model.config._attn_implementation,
            model.config.to_dict(),
        )
        state = [*vars(model)]
        assert swap(model).gains
        assert model.config.to_dict() == config
        assert swap_back(model)
        assert not swap_back(model)
        assert [type(m) for m in model.modules()] == kinds
        assert model.config._attn_implementation == named
        assert [*vars(model)] == state


@torch.no_grad()
@pytest.mark.parametrize(("name", "leads"), [("Llama", True), ("Bert", True), ("Bert", False)])
def test_full_layers_run_in_the_core(name: str, leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leads, from the length on that the report names; without the core they run what ran."""
    monkeypatch.setattr(tiles, "leads", lambda dtype, is_causal: leads)
    make = families.decoder if name == "Llama" else families.encoder
    model = make(name, max_position_embeddings=600)
    layer = swap(model).layers[0]
    runs = leads and not core.unavailable()
    kind = "causal attention" if name == "Llama" else "full attention"
    assert (layer.computes, layer.faster_from) == (kind, 256 if runs else None)
    for length in (255, 256, 300):
        ids = torch.randint(3, families.VOCABULARY, (2, length))
        with calls.original():
            wanted = first(model(ids))
        assert torch.equal(got := first(model(ids)), wanted) != (runs and length >= 256)
        assert away(wanted, got) < SAME


def test_windows_are_counted_as_the_model_does() -> None:
    """Mistral's 8 are the token itself and seven before it; ModernBERT's 16 are eight on either side."""
    layer = swap(families.decoder("Mistral")).layers[0]
    assert layer.computes == f"causal attention in a window of {WINDOW - 1} tokens back"
    layer = swap(families.encoder("ModernBert")).layers[1]
    assert layer.computes == f"attention in a window of {WINDOW} tokens back and {WINDOW} ahead"
    assert layer.faster_from is not None
    layer = swap(families.decoder("Llama4Text")).layers[0]
    assert layer.computes == f"causal attention in chunks of {WINDOW} tokens"
