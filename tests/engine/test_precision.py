"""Dtypes that differ: weights as wide as the tokens ask, outputs in the tokens' dtype whatever autocast is on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Mixer, catalogue
from tests.cases import CASES, bind, qkv

MECHANISMS = [
    *CASES[: len(catalogue.names())],
    catalogue.parse("ByLength(long=LinearAttention(), above=4)"),
    catalogue.parse("Adapted(mechanism=LinearAttention())"),
]


def inputs(mechanism: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(2, 7, 16).to(dtype),) if isinstance(mechanism, Mixer) else qkv(7, dtype=dtype)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.needs_weights], ids=repr)
def test_weights_of_another_dtype_are_cast_beside_the_tokens(mechanism: Any) -> None:
    """Beside float64 to it, and from float64 to float32 beside all others."""
    pairs = (torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16, torch.float64)
    for dtype, other in pairs:
        bound, x = bind(mechanism, dtype=other), inputs(mechanism, dtype)
        got = bound(*x, is_causal=mechanism.traits.modes[-1])
        alike = bind(mechanism, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        alike.adopt(bound.w)
        assert got.dtype == dtype
        assert torch.equal(got, alike(*x, is_causal=mechanism.traits.modes[-1]))


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_outputs_have_the_dtype_of_the_tokens_under_any_autocast(mechanism: Any) -> None:
    """Also where autocast asks for the half precision that the tokens do not have."""
    traits = mechanism.traits
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        bound, x = bind(mechanism, dtype=torch.float32), inputs(mechanism, dtype)
        for is_causal in traits.modes:
            expected = bound(*x, is_causal=is_causal)
            with torch.autocast("cpu", other):
                got = bound(*x, is_causal=is_causal)
                torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
                if is_causal and traits.memory is not None:
                    first, state = bound.decode(*(y[..., :3, :] for y in x))
                    rest, state = bound.decode(*(y[..., 3:, :] for y in x), state=state)
                    assert first.dtype == rest.dtype == dtype


def test_adapted_tokens_read_a_state_of_their_dtype_under_autocast() -> None:
    bound, (q, k, v) = bind("Adapted(mechanism=LinearAttention())", dtype=torch.float32), qkv(7, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        got = bound.mechanism.read(q, k, v, bound.w, bound.mechanism.summarise(k, v, bound.w))
    torch.testing.assert_close(got, bound(q, k, v), rtol=0.05, atol=0.05)
