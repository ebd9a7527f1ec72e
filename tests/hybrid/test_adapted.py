"""Adapted: nothing changes before training, deltas act where the long form runs only, refusals."""

from __future__ import annotations

import pytest
import torch

from fast_attention import (
    Adapted,
    Bound,
    ByLength,
    FNet,
    LearnedFeatures,
    Local,
    RandomSynthesizer,
    Shape,
    Softmax,
    Unsupported,
)
from fast_attention.nn.token_mixer import TokenMixer
from tests.cases import bind, qkv


def test_new_deltas_change_nothing() -> None:
    torch.manual_seed(0)
    q, k, v = qkv(20)
    bound = Bound(Adapted(Local(window=3), rank=4), Shape(2, 8)).double()
    assert torch.equal(bound(q, k, v), Local(window=3)(q, k, v))
    assert sorted(dict(bound.named_parameters())) == ["k_down", "k_up", "q_down", "q_up", "v_down", "v_up"]


def test_deltas_round_no_token_to_fewer_digits() -> None:
    w = Adapted(Softmax(), rank=2).weights(Shape(1, 4))
    x = torch.full((1, 1, 3, 4), 1 + 2.0**-12)
    with torch.no_grad(), torch.autocast("cpu"):
        moved = Adapted(Softmax(), rank=2).adapted(x, x, x, w)
    assert all(torch.equal(each, x) for each in moved)


def test_deltas_act_beyond_the_length_that_is_exact() -> None:
    bound = bind(ByLength(Softmax(), Adapted(Local(window=3), rank=2), above=8))
    short, long = qkv(8), qkv(9)
    assert torch.equal(bound(*short), Softmax()(*short))
    assert not torch.allclose(bound(*long), Local(window=3)(*long))


def test_only_what_the_mechanism_reads_and_was_asked_for_gets_a_delta() -> None:
    w = Adapted(Softmax(), adapts="qk").weights(Shape(2, 8))
    assert w.q is not None
    assert w.k is not None
    assert w.v is None
    assert Adapted(Softmax(), adapts="v").traits.rotary
    assert not Adapted(Softmax()).traits.rotary
    assert Adapted(Softmax(), adapts="qk").traits.matrix
    assert not Adapted(Softmax()).traits.matrix


def test_gradients_reach_both_factors_and_the_mechanism() -> None:
    bound = bind(Adapted(LearnedFeatures(num_features=4), rank=2))
    bound(*qkv(11), is_causal=True).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in bound.parameters())


def test_states_are_of_adapted_tokens() -> None:
    bound = bind(Adapted(LearnedFeatures(num_features=4), rank=2))
    q, k, v = qkv(11)
    total = bound.mechanism.summarise(k, v, bound.w)
    assert torch.allclose(bound.mechanism.read(q, k, v, bound.w, total), bound(q, k, v), rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="mixes whole tokens"):
        Adapted(FNet())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adds nothing"):
        Adapted(Softmax(), rank=9).weights(Shape(2, 8))
    with pytest.raises(ValueError, match="adapts"):
        Adapted(Softmax(), adapts="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing would be adapted"):
        Adapted(RandomSynthesizer(), adapts="qk")
    with pytest.raises(Unsupported, match="rotary"):
        TokenMixer(16, 2, Adapted(Softmax()), rotary=True)
    q, k, v = qkv(5)
    wide = torch.cat([v, v], -1)
    with pytest.raises(ValueError, match="last size of v is 16 and the deltas are for width 8"):
        bind(Adapted(Softmax(), adapts="qkv"))(q, k, wide)
    assert bind(Adapted(Softmax(), adapts="qk"))(q, k, wide).shape == wide.shape
