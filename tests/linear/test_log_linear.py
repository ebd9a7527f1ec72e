"""Log-linear attention: blocks and levels beyond what the oracle's lengths reach, decoding across their borders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast_attention import LogLinearAttention, Shape, Unsupported
from fast_attention.feature_maps.features import Identity
from fast_attention.functional import decayed_linear_attention
from fast_attention.mechanisms.linear import log_linear
from tests.cases import bind, qkv, some_keys


def by_pairs(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """All pairs, the level of each by the bits of ``t xor j``."""
    length, last = v.shape[-2], weights.shape[-1] - 1
    level = torch.tensor([[min((t ^ j).bit_length(), last) for j in range(length)] for t in range(length)])
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    each = weights.gather(-1, level.expand(*weights.shape[:-2], -1, -1)).masked_fill(~seen, 0.0)
    each = each if mask is None else each.masked_fill(~mask[:, None, None], 0.0)
    return (q @ k.mT * each) @ v


@pytest.mark.parametrize("num_levels", [2, 9])
@pytest.mark.parametrize("length", [63, 64, 65, 128, 130, 193, 300, 449])
def test_levels_are_those_of_the_pairs(length: int, num_levels: int) -> None:
    inputs = [x.requires_grad_() for x in qkv(length)]
    weights = torch.rand(2, 2, length, num_levels, dtype=torch.float64, requires_grad=True)
    leaves = [*inputs, weights]
    out, expected = log_linear.attend(*leaves), by_pairs(*leaves)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    probe = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, leaves, probe) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", [(1,) * 200, (200,), (64, 136), (65, 1, 134), (127, 2, 71), (3, 100, 97), (199, 1)])
def test_any_split_reads_the_same_blocks(sizes: tuple[int, ...]) -> None:
    """Outputs, their gradients, and a state of a matrix for each bit of the length."""
    bound, mask = bind(LogLinearAttention(num_levels=6)), some_keys(2, 200)
    inputs = [x.requires_grad_() for x in qkv(200)]
    leaves = [*inputs, *bound.parameters()]
    whole = bound(*inputs, is_causal=True, key_mask=mask)
    state, outs = None, []
    for q, k, v, seen in zip(*(x.split(sizes, -2) for x in inputs), mask.split(sizes, -1), strict=True):
        out, state = bound.decode(q, k, v, state, key_mask=seen)
        outs.append(out)
    split = torch.cat(outs, -2)
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-10)
    probe = torch.randn_like(whole)
    for a, b in zip(*(torch.autograd.grad(x, leaves, probe) for x in (split, whole)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    assert state is not None
    assert state.content.sums.shape == (2, 2, 8, 8, 8)  # 200 has eight bits
    empty = [bit for bit in range(8) if not 200 >> bit & 1]
    assert not state.content.sums[:, :, empty].any()


def test_it_begins_as_linear_attention() -> None:
    q, k, v = qkv(150, dtype=torch.float32)
    mechanism = LogLinearAttention()
    out = mechanism(q, k, v, mechanism.weights(Shape(2, 8)), is_causal=True)
    plain = decayed_linear_attention(q, k, v, torch.zeros(150), feature_map=Identity(), normalize=False, is_causal=True)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-3)


def test_later_tokens_are_refused() -> None:
    q, k, v = qkv(9)
    with pytest.raises(Unsupported, match=r"LogLinearAttention\(\) does not support is_causal=False"):
        bind(LogLinearAttention())(q, k, v)
    with pytest.raises(ValueError, match="num_levels"):
        LogLinearAttention(num_levels=0)
