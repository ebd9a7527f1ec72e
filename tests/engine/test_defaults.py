"""What the caller's program has as default device and dtype moves no result: tensors decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, Mixer, Shape, attention
from tests.cases import DISTINCT, bind, qkv

LENGTH = 70


@pytest.mark.parametrize("mechanism", DISTINCT, ids=repr)
def test_tensors_are_made_beside_those_given(mechanism: Any) -> None:
    """A default device "meta" shows any that is not: it holds no numbers."""
    bound, (q, k, v) = bind(mechanism, max_len=LENGTH), qkv(LENGTH)
    inputs = (q.transpose(1, 2).flatten(2),) if isinstance(mechanism, Mixer) else (q, k, v)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 9]]) if mechanism.traits.padding else None
    for is_causal in mechanism.traits.modes:
        expected = _with_gradients(bound, inputs, is_causal, mask)
        with torch.device("meta"):
            got = _with_gradients(bound, inputs, is_causal, mask)
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    if mechanism.traits.memory is not None:
        state, outs = None, []
        for new in (slice(0, 9), slice(9, 10), slice(10, LENGTH)):
            with torch.device("meta"):
                out, state = bound.decode(*(x[:, :, new] for x in (q, k, v)), state)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, -2), bound(q, k, v, is_causal=True), rtol=1e-9, atol=1e-11)


def _with_gradients(bound: Bound, inputs: Any, is_causal: bool, mask: Tensor | None) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = bound(*leaves, is_causal=is_causal, key_mask=mask)
    wanted = [*leaves, *bound.parameters()]
    return [out, *torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("mechanism", [m for m in DISTINCT if m.traits.random or m.traits.learned], ids=repr)
def test_weights_are_drawn_in_half_precision(mechanism: Any) -> None:
    """transformers and others build models so."""
    dtype = torch.bfloat16
    with _default(dtype):
        bound = Bound(mechanism, Shape(2, 8, max_len=12))
    q, k, v = qkv(12, dtype=dtype)
    inputs = (q.transpose(1, 2).flatten(2),) if isinstance(mechanism, Mixer) else (q, k, v)
    assert {x.dtype for x in bound.parameters()} <= {dtype}
    assert bool(bound(*inputs, is_causal=mechanism.traits.modes[0]).isfinite().all())


def test_random_features_of_a_call_in_half_precision() -> None:
    with _default(torch.bfloat16):
        assert attention(*qkv(6, dtype=torch.bfloat16), "FavorPlus()").dtype == torch.bfloat16


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
