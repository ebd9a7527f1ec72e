"""The same bits in any batch and split: how it is asked for, what it reaches, what is refused; the law has the rest."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from fast_attention import (
    Bound,
    LinearAttention,
    Shape,
    Unsupported,
    attention,
    batch_invariant,
    conformance,
    explain,
)
from fast_attention.conformance.bits import bits
from tests.cases import qkv


def inputs(*batch: int, length: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(*batch, 2, length, 8) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("name", ["LinearAttention()", "FavorPlus(num_features=8)", "Local(window=3)"])
def test_bits_hold_for_large_tokens_and_any_leading_axes(name: str) -> None:
    bound, (q, k, v) = Bound(name, Shape(2, 8)), inputs(2, 3)
    k[1, 2, :, 6:] *= 1e3  # one sequence's late keys need another scale
    with batch_invariant():
        whole = bound(q, k, v, is_causal=True)
        assert whole.shape == v.shape
        for i in range(2):
            for j in range(3):
                alone = bound(q[i, j], k[i, j], v[i, j], is_causal=True)
                assert torch.equal(alone, whole[i, j])
        assert torch.equal(bound(q[..., :4, :], k[..., :4, :], v[..., :4, :], is_causal=True), whole[..., :4, :])
        out, state = bound.decode(q[..., :6, :], k[..., :6, :], v[..., :6, :])
        rest, _ = bound.decode(q[..., 6:, :], k[..., 6:, :], v[..., 6:, :], state)
        assert torch.equal(torch.cat([out, rest], -2), whole)
    torch.testing.assert_close(whole, bound(q, k, v, is_causal=True), rtol=1e-4, atol=1e-4)


def test_gradients_pass_and_are_those_of_one_pass() -> None:
    bound, tensors = Bound("DecayedLinearAttention()", Shape(2, 8)), [x.requires_grad_() for x in qkv(7, 7)]
    q, k, v = tensors
    plain = torch.autograd.grad(bound(q, k, v, is_causal=True).sin().sum(), tensors)
    with batch_invariant():
        apart = torch.autograd.grad(bound(q, k, v, is_causal=True).sin().sum(), tensors)
    torch.testing.assert_close(apart, plain)


def test_packed_texts_are_the_bits_of_calls_of_their_own() -> None:
    bound, (q, k, v) = Bound("LinearAttention()", Shape(2, 8)), inputs(1, length=14)
    with batch_invariant():
        for is_causal in (False, True):
            packed = bound(q, k, v, is_causal=is_causal, lengths=(5, 9))
            alone = [bound(*(x[..., at, :] for x in (q, k, v)), is_causal=is_causal)
                     for at in (slice(0, 5), slice(5, 14))]  # fmt: skip
            assert torch.equal(packed, torch.cat(alone, -2))


def test_shared_keys_are_the_bits_of_repeated_ones() -> None:
    q, k, v = torch.randn(1, 8, 33, 64), *(torch.randn(1, 2, 33, 64) for _ in range(2))
    repeated = [x.repeat_interleave(4, 1) for x in (k, v)]
    with batch_invariant():
        assert torch.equal(attention(q, k, v, enable_gqa=True), attention(q, *repeated))


def test_a_mask_of_scores_serves_each_sequence() -> None:
    q, k, v = inputs(3)
    mask = torch.rand(3, 1, 9, 9) > 0.3
    with batch_invariant():
        whole = attention(q, k, v, attn_mask=mask)
        alone = attention(q[1:2], k[1:2], v[1:2], attn_mask=mask[1:2])
    assert torch.equal(alone, whole[1:2])
    torch.testing.assert_close(whole, attention(q, k, v, attn_mask=mask))


def test_explain_hears_of_it_and_only_inside() -> None:
    bound, (q, k, v) = Bound("LinearAttention()", Shape(2, 8)), inputs(1)
    with batch_invariant():
        steps = str(explain(bound, q, k, v, is_causal=True)), str(explain(bound, q, k, v))
    assert "token by token" in steps[0]
    assert "each sequence by itself" in steps[1]
    assert "batch_invariant()" not in str(explain(bound, q, k, v, is_causal=True))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("AFTFull()", {}, r"AFTFull\(\) does not support batch_invariant\(\) in causal calls \(traits.memory is None"),
        ("GMLP()", {}, r"GMLP\(\) does not support batch_invariant\(\) in causal calls"),
        ("Softmax()", {"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "an attn_mask or dropout in a causal call"),
        ("LinearAttention()", {"queries": 4}, "4 queries and 9 keys in a causal call"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    bound, tensors = Bound(name, Shape(2, 8, 16)), list(inputs(1))
    queries = change.pop("queries", 9)
    tensors = [torch.randn(1, 9, 16)] if name == "GMLP()" else [tensors[0][..., :queries, :], *tensors[1:]]
    with batch_invariant(), pytest.raises(Unsupported, match=message):
        bound(*tensors, is_causal=True, **change)


def test_the_law_reports_of_third_parties_and_breaks_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + len(q) * 1e-6

    finding = bits(conformance.third_party(lambda: sums, width=8))
    assert (finding.status, finding.detail) == ("not claimed", "differ: a batch")
    assert bits(conformance.third_party(lambda: lambda q, k, v: q, width=8)).status == "kept"
    plain, calls = LinearAttention.advance, count()

    def advance(self: Any, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        out, state = plain(self, q, *rest, **options)
        return out + next(calls) * 1e-6, state

    monkeypatch.setattr(LinearAttention, "advance", advance)
    assert bits(conformance.of("LinearAttention()")).status == "broken"
