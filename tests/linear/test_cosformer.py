"""cosFormer's turned features, its state behind positions, and its refusals."""

from __future__ import annotations

import math

import pytest
import torch

from fast_attention import Bound, CosFormer, Shape, core, explain
from tests.cases import qkv

LENGTH = 600


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int, *, is_causal: bool) -> torch.Tensor:
    """All pairs at once."""
    position = torch.arange(q.shape[-2], dtype=q.dtype, device=q.device)
    weights = q.relu() @ k.relu().mT * (math.pi / 2 / longest * (position[:, None] - position)).cos()
    weights = weights.tril() if is_causal else weights
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_turned_features_are_those_of_all_pairs(is_causal: bool, device: torch.device) -> None:
    bound = Bound(CosFormer(), Shape(2, 8, LENGTH + 50)).to(device)
    inputs = [x.requires_grad_() for x in qkv(LENGTH, LENGTH, device=device)]
    q, k, v = inputs
    out, expected = bound(q, k, v, is_causal=is_causal), plain(q, k, v, LENGTH + 50, is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    probe = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs, probe) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    if device.type == "cpu" and not core.unavailable():
        narrow = [x.detach().float() for x in inputs]
        assert "compiled core" in str(explain(bound.float(), *narrow, is_causal=is_causal))
        torch.testing.assert_close(bound(*narrow, is_causal=is_causal).double(), expected, rtol=0, atol=2e-5)


def test_the_last_tokens_after_others_see_them_at_their_distance(device: torch.device) -> None:
    mechanism, (q, k, v) = CosFormer(), qkv(LENGTH, LENGTH, device=device)
    w = mechanism.weights(Shape(2, 8, LENGTH))
    w = type(w)(w.positions.to(device))
    whole = mechanism(q, k, v, w, is_causal=True)
    torch.testing.assert_close(mechanism(q[:, :, 500:], k, v, w, is_causal=True), whole[:, :, 500:])
    head, tail = (mechanism.summarise(k[:, :, s], v[:, :, s], w) for s in (slice(0, 7), slice(7, 500)))
    out, _ = mechanism.decode(q[:, :, 500:], k[:, :, 500:], v[:, :, 500:], w, mechanism.combine(head, tail))
    torch.testing.assert_close(out, whole[:, :, 500:])


def test_positions_beyond_the_longest_are_refused() -> None:
    bound, (q, k, v) = Bound(CosFormer(), Shape(2, 8, 9)), (x.float() for x in qkv(10, 10))
    with pytest.raises(ValueError, match="at most max_len=9 tokens and got 10"):
        bound(q, k, v)
    _, state = bound.decode(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    with pytest.raises(ValueError, match="at most max_len=9 tokens and got 10"):
        bound.decode(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], state)


@torch.no_grad()
def test_compiled_steps_count_positions_without_reading_them() -> None:
    bound, inputs = Bound(CosFormer(), Shape(2, 8, 9)), [x.float() for x in qkv(10, 10)]
    prompt, last, beyond = zip(*(x.split([8, 1, 1], -2) for x in inputs), strict=True)
    _, state = bound.decode(*prompt)
    torch.compiler.reset()
    step = torch.compile(bound.decode, fullgraph=True, backend="eager")
    out, state = step(*last, state=state)
    torch.testing.assert_close(out, bound(*(x[:, :, :9] for x in inputs), is_causal=True)[:, :, 8:])
    with pytest.raises(RuntimeError, match="at most max_len=9 tokens"):
        step(*beyond, state=state)
