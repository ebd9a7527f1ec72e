"""Rows of attention matrices on demand: exact for every mechanism, in memory that grows as the mechanism's own does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Attention, Shape, Unsupported, attention_rows, cache_argument, catalogue, swap, swap_back
from fast_attention.counting import exponent, peak_bytes
from fast_attention.lab.capture import layers_during
from fast_attention.nn.bound import Bound
from tests.cases import DISTINCT, bind, qkv, some_keys

WITH = [m for m in DISTINCT if isinstance(m, Attention) and m.traits.matrix]
WITHOUT = [m for m in DISTINCT if m not in WITH]
QUERIES = [10, 0, 3, -1, 3, 7, 1, 2, 9, 8, 6]  # more than the width of 8, so that two backward passes are needed


def matrix(bound: Bound, q: Tensor, k: Tensor, **keywords: Any) -> Tensor:
    """All of it, by attending to the identity."""
    return bound(q, k, torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1), **keywords)


@pytest.mark.parametrize("mechanism", WITH, ids=repr)
def test_rows_are_those_of_the_matrix(mechanism: Any, device: torch.device) -> None:
    bound, traits = bind(mechanism, device=device), mechanism.traits
    masked, sizes = (False, True)[: 1 + traits.padding], [(11, 11)] + [(11, 5), (11, 17)] * traits.cross
    for is_causal, hidden, (length, keys) in itertools.product(traits.modes, masked, sizes):
        q, k, _ = qkv(length, keys, device=device)
        rest: dict[str, Any] = {"is_causal": is_causal, "key_mask": some_keys(2, keys, device) if hidden else None}
        found = attention_rows(mechanism, q, k, bound.w, queries=QUERIES, **rest)
        assert found.shape == (2, 2, len(QUERIES), keys)
        assert not found.requires_grad
        torch.testing.assert_close(found, matrix(bound, q, k, **rest)[..., QUERIES, :], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mechanism", [m for m in WITH if m.traits.mask], ids=repr)
def test_rows_under_any_mask(mechanism: Any) -> None:
    bound = bind(mechanism)
    q, k, _ = qkv(11)
    mask = torch.rand(11, 11) > 0.4
    mask[4] = False  # a query that may see nothing
    found = attention_rows(mechanism, q, k, bound.w, queries=range(11), attn_mask=mask)
    torch.testing.assert_close(found, matrix(bound, q, k, attn_mask=mask), rtol=1e-10, atol=1e-10)
    assert not found[..., 4, :].any()


@pytest.mark.parametrize("mechanism", WITHOUT, ids=repr)
def test_no_rows_where_there_is_no_matrix(mechanism: Any) -> None:
    with pytest.raises(Unsupported, match=r"traits\.matrix|mixes whole tokens"):
        attention_rows(mechanism, *qkv(5)[:2], queries=[0])


def test_what_does_not_fit_is_said() -> None:
    q, k, _ = qkv(5)
    with pytest.raises(ValueError, match="queries names 5, and q has 5 tokens: give -5 to 4"):
        attention_rows("Softmax", q, k, queries=[0, 5])
    for queries in (3, [1.5], torch.ones(5, dtype=torch.bool), torch.tensor([[1]]), "12"):
        with pytest.raises(TypeError, match="queries must be a row of whole numbers"):
            attention_rows("Softmax", q, k, queries=queries)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs its weights"):
        attention_rows("FavorPlus", q, k, queries=[0])
    assert attention_rows("Softmax", q, k, queries=[]).shape == (2, 2, 0, 5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_need_no_gradients_from_the_caller(mode: Any) -> None:
    with mode():
        q, k, _ = qkv(9)
        seen = torch.ones(2, 9, dtype=torch.bool)
        found = attention_rows("LinearAttention", q, k, queries=torch.tensor([2, 4]), key_mask=seen)
    scores = torch.nn.functional.elu(q) + 1
    scores = scores @ (torch.nn.functional.elu(k) + 1).mT
    torch.testing.assert_close(found, (scores / scores.sum(-1, keepdim=True))[..., [2, 4], :])


@pytest.mark.parametrize("name", [n for n in catalogue.names() if catalogue.default(n) in WITH])
def test_memory_grows_as_the_mechanisms_own(name: str) -> None:
    """Not with the square of the length, where the mechanism's own does not."""
    mechanism: Any = catalogue.default(name)
    order = mechanism.traits.complexity_exponent
    order = max(order, 1.0) if order < 2 else 1.0 + (name not in ("Softmax",))

    def peak(n: int, is_causal: bool) -> int:
        torch.manual_seed(0)
        w = Bound(mechanism, Shape(1, 16, n)).w
        q, k = torch.randn(2, 1, 1, n, 16)
        return peak_bytes(lambda: attention_rows(mechanism, q, k, w, queries=[0, n // 2], is_causal=is_causal))

    for is_causal in mechanism.traits.modes:
        small, large = peak(1024, is_causal), peak(4096, is_causal)
        assert exponent(small, large, 4) < order + 0.3, f"n^{exponent(small, large, 4):.2f}, is_causal={is_causal}"
        if order < 1.5:
            assert large < 4096 * 4096 * 4, "the matrix"


transformers = pytest.importorskip("transformers")
layers_of = pytest.importorskip("fast_attention.integrations.attention").layers_of
calls = pytest.importorskip("fast_attention.integrations.calls")


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=99
        )
        return transformers.BertModel(config, add_pooling_layer=False).eval()
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()


def given(padded: bool) -> dict[str, Any]:
    seen = torch.ones(2, 13, dtype=torch.long)
    seen[0, 9:] = 0 if padded else 1
    numbers = torch.randint(5, 99, (2, 13), generator=torch.Generator().manual_seed(5))
    return {"input_ids": numbers, "attention_mask": seen}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_swapped_model_shows_exact_attention(kind: str, padded: bool) -> None:
    model, inputs = model_of(kind), given(padded)
    model.set_attn_implementation("eager")
    theirs = model(**inputs, output_attentions=True).attentions
    swap(model, "Softmax")
    ours = model(**inputs, output_attentions=True).attentions
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert not calls.shows(), "the wish is forgotten after the call"
    assert not model(**inputs).get("attentions")
    swap_back(model)
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("mechanism", ["LinearAttention", "Local(window=3)", "FavorPlus(num_features=16)"])
def test_a_swapped_model_shows_the_mechanisms_rows(kind: str, mechanism: str) -> None:
    model, inputs = model_of(kind), given(padded=True)
    swap(model, mechanism)
    before = layers_during(model, lambda: model(**inputs, use_cache=False))
    plain = model(**inputs)
    shown = model(**inputs, output_attentions=True)
    assert [call.name.split(".")[-1] for call in before] == ["self" if kind == "bert" else "attn"] * 2
    for found, call in zip(shown.attentions, before, strict=True):
        rows = attention_rows(
            call.bound.mechanism, call.q, call.k, call.bound.w, queries=range(13), **call.keywords
        )  # fmt: skip
        torch.testing.assert_close(found, rows, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(shown[0], plain[0], atol=1e-5, rtol=1e-4)


def test_what_cannot_be_shown_is_refused() -> None:
    model = model_of("gpt2")
    swap(model, "AFTSimple")
    with pytest.raises(Unsupported, match=r"AFTSimple\(\) does not support output_attentions=True .*traits\.matrix"):
        model(**given(padded=False), output_attentions=True)
    assert model(**given(padded=False)).logits.isfinite().all(), "a refusal leaves nothing behind"
    swap(model, "LinearAttention")
    first = model(**given(padded=False), output_attentions=True, use_cache=True)
    assert first.attentions[1].shape == (2, 4, 13, 13)
    step, name = torch.tensor([[7], [8]]), cache_argument.name_of(model.forward)
    with pytest.raises(Unsupported, match="13 keys before are summed up: pass use_cache=False"):
        model(step, **{name: first[name]}, output_attentions=True)
