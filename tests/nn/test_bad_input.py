"""Modules refuse what they cannot take in the caller's words, before torch's kernels say it in theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fast_attention import (
    Bound,
    MultiheadAttention,
    Rotary,
    Shape,
    TokenMixer,
)
from fast_attention.nn import ChunkedFeedForward, Reversible, ReversibleSequence

X = torch.randn(2, 5, 8)


@pytest.mark.parametrize("module", [MultiheadAttention, TokenMixer])
def test_sizes_are_whole_numbers(module: Any) -> None:
    for sizes in ((8.0, 2), (8, 2.0), ("8", 2), (None, 2), (8, 3), (8, 0)):
        with pytest.raises(ValueError, match=f"embed_dim={sizes[0]!r} must be a positive multiple of num_heads="):
            module(*sizes)
    with pytest.raises(ValueError, match=r"num_kv_heads=1\.0 must divide"):
        module(8, 2, num_kv_heads=1.0)
    module(np.int64(8), np.int64(2))


@pytest.mark.parametrize("call", [TokenMixer(8, 2), TokenMixer(8, 2).decode, ChunkedFeedForward(8, chunks=2)])
def test_tokens_are_checked_before_they_are_projected(call: Callable[..., Any]) -> None:
    for x, error, said in (
        (X[..., :4], ValueError, "x has width 4 and this layer was built for 8"),
        (X.long(), ValueError, "x is torch.int64: give float32"),
        (X[0, 0], ValueError, r"x must be \(..., tokens, width\)"),
        (X.numpy(), TypeError, "x must be a torch.Tensor; got ndarray"),
    ):
        with pytest.raises(error, match=said):
            call(x)


def test_multihead_attention_takes_tensors() -> None:
    module: Any = MultiheadAttention(8, 2, batch_first=True, rotary=True)
    for call, said in (
        (lambda: module([1], X, X), "query must be a torch.Tensor; got list"),
        (lambda: module(X, None, None), "key must be a torch.Tensor; got NoneType"),
        (lambda: module(X, X, X, attn_mask=[1]), "attn_mask must be a torch.Tensor; got list"),
        (lambda: module(X, X, X, positions=[0, 1]), "positions must be a torch.Tensor of whole numbers; got list"),
    ):
        with pytest.raises(TypeError, match=said):
            call()


def test_what_modules_are_made_of_is_checked() -> None:
    made: Any
    for made, error, said in (
        (lambda: Bound("Softmax", (2, 4)), TypeError, r"shape is a Shape\(heads=..., .*; got \(2, 4\)"),  # type: ignore[arg-type]
        (lambda: Bound("Softmax", Shape(2, 4))(), TypeError, r"takes q, k, v; got 0 tensors"),
        (lambda: ReversibleSequence([nn.Linear(8, 8)]), TypeError, r"blocks\[0\] is a Linear: give Reversible"),  # type: ignore[list-item]
        (lambda: ChunkedFeedForward(8, chunks=1.5), ValueError, "chunks must be at least 1, a whole number"),  # type: ignore[arg-type]
        (lambda: ChunkedFeedForward(8, activation="gelu"), TypeError, "activation is a function"),  # type: ignore[arg-type]
        (lambda: ChunkedFeedForward(8, dropout=2), ValueError, "dropout is a probability"),
        (lambda: Rotary(attention_factor=0.0), ValueError, "attention_factor must be above 0"),
    ):
        with pytest.raises(error, match=said):
            made()
    ReversibleSequence([Reversible(TokenMixer(8, 2), ChunkedFeedForward(8))])


def test_what_papers_have_and_we_have_not_names_the_nearest() -> None:
    for name, nearest in (("LARA", "FavorPlus()"), ("Agent", "Nystrom()"), ("ABC", "Linformer()")):
        with pytest.raises(ValueError, match=f"{name!r} is not a name of ours.*Write {re.escape(nearest)}"):
            TokenMixer(8, 2, f"Hybrid(far={name}(num_slots=3))")


def test_a_layer_with_positions_takes_its_own_state_only() -> None:
    _, state = TokenMixer(8, 2).decode(X)
    for wrong in (state, 3):
        with pytest.raises(ValueError, match=r"state is a .*: hand over what this layer's decode returned"):
            TokenMixer(8, 2, rotary=True).decode(X, wrong)


def test_turns_of_rotary_positions_are_numbers_of_any_kind() -> None:
    """As transformers' configurations have them: ``beta_fast`` 32.0 beside ``beta_slow`` 1."""
    rotary = Rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_slow=1)
    assert rotary.beta_fast == 32.0
