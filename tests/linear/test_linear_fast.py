"""Linear attention of few tokens and many: its definition, its gradients, and numbers far out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import LinearAttention, core
from fast_attention.engine import trace
from fast_attention.feature_maps.features import (
    Custom,
    EluPlusOne,
    FeatureMap,
    Quadratic,
    Relu,
    SoftmaxMap,
    Taylor,
)
from fast_attention.functional import linear_attention
from tests.cases import qkv, some_keys

ELEMENTWISE = [EluPlusOne(), Relu(offset=1e-3), Relu()]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def definition(
    phi: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_mask: Tensor | None, eps: float = 1e-6
) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    seen = seen.tril(k.shape[-2] - q.shape[-2]) if is_causal else seen
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    scores = torch.where(seen, phi(q) @ phi(k).mT, 0.0)
    return scores @ v / (scores.sum(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    "sizes", [(64, 64), (60, 100), (100, 60), (129, 129), (300, 300), (200, 333), (333, 200), (1, 300), (300, 1)]
)
@pytest.mark.parametrize("phi", [EluPlusOne(), SoftmaxMap(), Taylor(), Quadratic(), Custom(torch.sigmoid)], ids=repr)
def test_mechanism_is_its_definition(phi: FeatureMap, sizes: tuple[int, int]) -> None:
    q, k, v = qkv(*sizes)
    inputs = leaves(q, 0.2 * k if phi == Quadratic() else k, v)  # (1 + s)^2 vanishes at s = -1, and divides
    mechanism = LinearAttention(phi)
    for is_causal in (False, True):
        for key_mask in (None, some_keys(2, sizes[1])):
            ours = mechanism(*inputs, is_causal=is_causal, key_mask=key_mask)
            expected = definition(phi, *inputs, is_causal, key_mask)
            probe = torch.randn_like(ours)
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
            for a, b in zip(
                torch.autograd.grad(ours, inputs, probe), torch.autograd.grad(expected, inputs, probe), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sizes", [(60, 100), (100, 60), (300, 300), (333, 200)])
def test_mechanism_is_its_definition_in_float32(sizes: tuple[int, int]) -> None:
    """By the core where it is there; the first of more queries than keys see nothing."""
    q, k, v = qkv(*sizes)
    for key_mask in (None, some_keys(2, sizes[1])):
        for is_causal in (False, True):
            ours = LinearAttention()(q.float(), k.float(), v.float(), is_causal=is_causal, key_mask=key_mask)
            expected = definition(EluPlusOne(), q, k, v, is_causal, key_mask)
            torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


def test_parameters_inside_a_map_learn() -> None:
    weight = torch.randn(8, 12, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv(300)
    for is_causal in (False, True):
        probe = torch.randn_like(v)
        results = [
            torch.autograd.grad(out, weight, probe)[0]
            for phi in [lambda x: (x @ weight).exp()]
            for out in (
                LinearAttention(phi)(q, k, v, is_causal=is_causal),
                definition(phi, q, k, v, is_causal, None),
            )
        ]
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_layouts_and_gradients_of_some(is_causal: bool) -> None:
    """Heads beside channels, no batch at all, and inputs of which not all learn."""
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(300)]
    dense = leaves(*inputs)
    mechanism = LinearAttention()
    out = mechanism(*dense, is_causal=is_causal)
    expected = torch.autograd.grad(out.sum(), dense)
    for chosen in range(3):
        strided = [x.detach() for x in inputs]
        strided[chosen].requires_grad_()
        ours = mechanism(*strided, is_causal=is_causal)
        torch.testing.assert_close(ours, out, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(ours.sum(), strided[chosen])
        torch.testing.assert_close(gradient, expected[chosen], rtol=1e-12, atol=1e-12)
        strided[chosen].requires_grad_(False)
    single = linear_attention(*(x[0, 0] for x in inputs), feature_map=EluPlusOne(), eps=1e-6, is_causal=is_causal)
    torch.testing.assert_close(single, out[0, 0])


@pytest.mark.parametrize("phi", ELEMENTWISE, ids=repr)
def test_large_inputs_stay_finite(phi: FeatureMap) -> None:
    inputs = leaves(*(100 * x for x in qkv(300, dtype=torch.float32)))
    for is_causal in (False, True):
        out = LinearAttention(phi)(*inputs, is_causal=is_causal)
        assert out.isfinite().all()
        assert out.abs().max() <= inputs[2].abs().max() * 1.001
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


def test_nothing_to_divide_by_gives_zeros() -> None:
    """Queries without a feature, with and without a protecting ``eps``; their gradients are zeros as well."""
    q, k, v = leaves(*qkv(200))
    with torch.no_grad():
        q[:, :, 150:] = -1.0
    for is_causal in (False, True):
        out = LinearAttention(Relu(), eps=0.0)(q, k, v, is_causal=is_causal)
        assert not out[:, :, 150:].any()
        assert out[:, :, :150].any(-1).all()
        for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_gradients(is_causal: bool) -> None:
    inputs = leaves(*qkv(130, batch=1, heads=1, width=2))
    assert torch.autograd.gradgradcheck(
        lambda *x: LinearAttention()(*x, is_causal=is_causal), inputs, fast_mode=True
    )  # fmt: skip


def test_stretches_carry_gradients() -> None:
    """A long sequence in stretches: the gradient goes back through the states."""
    inputs = leaves(*qkv(500))
    mechanism, probe = LinearAttention(), torch.randn(2, 2, 500, 8, dtype=torch.float64)
    whole = torch.autograd.grad(mechanism(*inputs, is_causal=True), inputs, probe)
    state, parts = None, []
    for cut in (slice(0, 200), slice(200, 201), slice(201, 220), slice(220, 500)):
        part, state = mechanism.decode(*(x[:, :, cut] for x in inputs), state=state)
        parts.append(part)
    for a, b in zip(torch.autograd.grad(torch.cat(parts, -2), inputs, probe), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_long_sums_lose_nothing() -> None:
    """Positive terms, where rounding adds up: float32 against float64 over 300,000 tokens."""
    length = 300_000
    q, k, v = torch.rand(1, 1, length, 4), torch.rand(1, 1, length, 4), torch.rand(1, 1, length, 4) + 0.5
    for is_causal in (False, True):
        exact = LinearAttention()(q.double(), k.double(), v.double(), is_causal=is_causal)
        for form in (nullcontext, core.switched_off):
            with form():
                ours = LinearAttention()(q, k, v, is_causal=is_causal)
            assert ((ours - exact) / exact).abs().max() < 1e-6


def test_the_path_can_be_asked() -> None:
    """Float64 goes by plain sums; float32 by the core, where it is there."""
    for dtype in (torch.float64, torch.float32):
        for is_causal in (False, True):
            with trace.recorded() as steps:
                LinearAttention()(*(x.to(dtype) for x in qkv(300)), is_causal=is_causal)
            served = dtype == torch.float32 and not core.unavailable()
            assert steps[0].path == ("compiled core, sums over sections" if served else "plain sums")
