"""Batches of short sequences, which are computed side by side, beside a call for each of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fast_attention import Attention
from tests.cases import ATTENTIONS, CASES, bind
from tests.conformance.test_short_sequences import same_as_apart, same_streams_as_apart
from tests.fuzz.kit import fuzz

STREAMING = [m for m in ATTENTIONS if m.traits.memory is not None]


@st.composite
def batches(draw: Any, mechanisms: list[Any]) -> tuple[Any, bool, list[Tensor], Tensor | None]:
    """A mechanism of random settings bound to random sizes, tokens of 2 to 6 sequences, and perhaps padding."""
    mechanism, heads = draw(st.sampled_from(mechanisms)), draw(st.integers(1, 3))
    width, length, batch = draw(st.sampled_from([4, 8])), draw(st.integers(1, 5)), draw(st.integers(2, 6))
    module = bind(mechanism, heads, width)
    torch.manual_seed(draw(st.integers(0, 2**31)))
    if isinstance(mechanism, Attention):
        inputs = [torch.randn(batch, heads, length, width, dtype=torch.float64) for _ in range(3)]
    else:
        inputs = [torch.randn(batch, length, heads * width, dtype=torch.float64)]
    is_causal = draw(st.sampled_from(mechanism.traits.modes))
    key_mask = None
    if mechanism.traits.padding and draw(st.booleans()):
        key_mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1))
    return module, is_causal, inputs, key_mask


@fuzz("batches of short sequences", examples=150, batch=batches(CASES))
def test_a_batch_is_a_call_for_each(batch: tuple[Any, bool, list[Tensor], Tensor | None]) -> None:
    same_as_apart(*batch)


@fuzz("steps of batches of short sequences", examples=60, batch=batches(STREAMING))
def test_a_step_of_a_batch_is_a_step_for_each(batch: tuple[Any, bool, list[Tensor], Tensor | None]) -> None:
    module, _, inputs, key_mask = batch
    same_streams_as_apart(module, inputs, key_mask)
