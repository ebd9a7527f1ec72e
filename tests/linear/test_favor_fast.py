"""FAVOR and FAVOR+ by any path: outputs and gradients of the plain form, with states, and far out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import core
from fast_attention.feature_maps.random_features import draw
from fast_attention.functional import favor_attention, favor_plus_attention
from fast_attention.mechanisms.linear import linear_state, reference, sums
from fast_attention.mechanisms.linear.core_map import CoreMap

D, M, WIDE = 8, 24, 5
# with or without a number of each feature's own in the exponent, and rows for keys
Kind = tuple[str, bool, bool]
EXPONENTIAL: list[Kind] = [("positive", False, False), ("positive", True, True), ("hyperbolic", False, True),
                           ("hyperbolic", True, False)]  # fmt: skip
MAPS: list[Kind] = [*EXPONENTIAL, ("sincos", False, True)]


def plain(made: CoreMap, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None = None) -> Tensor:
    """One piece, in operations that autograd follows."""
    queries, phi = made.maps()
    keys = reference.masked_keys(phi, k, key_mask)
    return linear_state.normalise(reference.attend(queries(q).free, keys, v, is_causal=is_causal))


def some_heads(kind: str, biased: bool, apart: bool, *, learns: bool = False) -> tuple[CoreMap, list[Tensor]]:
    """A map, and its leaves."""
    W, keys, width = draw(2, M, D).double(), draw(2, M, D).double() if apart else None, M * (1 + (kind != "positive"))
    bias = 3 * torch.randn(2, 1, width, dtype=torch.float64) if biased else None
    leaves = [x.requires_grad_(learns) for x in (W, keys, bias) if x is not None]
    if kind == "sincos":
        return CoreMap.trigonometric(W, keys), leaves
    return CoreMap.exponential(W, keys, bias, hyperbolic=kind == "hyperbolic"), leaves


def inputs(length: int, keys: int | None = None, scale: float = 1.0, **kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    kind = {"dtype": torch.float64} | kind
    keys = keys or length
    q, k, v = (torch.randn(2, 2, n, w, **kind) for n, w in ((length, D), (keys, D), (keys, WIDE)))
    return (q * scale).requires_grad_(), (k * scale).requires_grad_(), v.requires_grad_()


def agree(phi: Kind, x: tuple[Tensor, ...], rtol: float = 1e-10, **settings: Any) -> None:
    """Outputs and all gradients, those of rows and biases too, within ``rtol`` of the largest number."""
    made, leaves = some_heads(*phi, learns=True)
    ours, theirs = sums.of_map(made, *x, **settings), plain(made, *x, **settings)
    probe = torch.randn_like(ours)
    leaves = [*x, *leaves]
    ours, theirs = ((out, *torch.autograd.grad(out, leaves, probe)) for out in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=rtol * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", MAPS, ids=str)
@pytest.mark.parametrize(("length", "keys"), [(65, 65), (127, 127), (129, 129), (257, 257), (1100, 1100),
                                              (63, 130), (1, 200), (130, 63), (520, 1030)])  # fmt: skip
def test_blocks(length: int, keys: int, phi: Kind, is_causal: bool) -> None:
    x = inputs(length, keys)
    agree(phi, x, is_causal=is_causal, key_mask=None)
    agree(phi, x, is_causal=is_causal, key_mask=torch.rand(2, 1, keys) < 0.7)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", EXPONENTIAL, ids=str)
def test_keys_of_very_different_scales(phi: Kind, is_causal: bool) -> None:
    """Chunks that one unit does not serve go pair by pair, between others that it does."""
    q, k, v = inputs(400)
    factors = torch.ones(400, 1, dtype=torch.float64)
    factors[::37] = 6.0
    factors[200:300] = 0.1
    agree(phi, (q, (k * factors).detach().requires_grad_(), v), is_causal=is_causal, key_mask=None)
    agree(phi, inputs(300, scale=6.0), rtol=1e-9, is_causal=is_causal, key_mask=torch.rand(2, 1, 300) < 0.7)


def test_keys_that_grow_from_chunk_to_chunk() -> None:
    """Units that rise at every chunk, above all by hundreds: sums must be brought along, there and back."""
    W, v = draw(2, M, D).double(), torch.randn(2, 500, WIDE, dtype=torch.float64)
    direction = torch.nn.functional.normalize(W[:, :1], dim=-1)
    ramp = torch.linspace(0, 6, 500, dtype=torch.float64)[:, None]
    x = tuple(t.detach().requires_grad_() for t in (0.1 * torch.randn_like(v @ v.mT @ v)[..., :1] + direction,
                                                    ramp * direction, v))  # fmt: skip
    for is_causal in (False, True):
        outs = (
            sums.of_map(CoreMap.exponential(W), *x, is_causal=is_causal, key_mask=None),
            plain(CoreMap.exponential(W), *x, is_causal=is_causal),
        )
        probe = torch.randn_like(outs[0])
        ours, theirs = ((out, *torch.autograd.grad(out, x, probe)) for out in outs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [100, 300])
def test_a_later_huge_key_moves_nothing_before_it(length: int) -> None:
    q, k, v = (x.detach() for x in inputs(length, dtype=torch.float32))
    W = draw(2, M, D)
    for factor in (6.0, 60.0, 1e4):
        moved = k.clone()
        moved[..., length - 20 :, :] *= factor
        before, after = (favor_plus_attention(q, keys, v, W, is_causal=True) for keys in (k, moved))
        assert after.isfinite().all()
        torch.testing.assert_close(after[..., : length - 20, :], before[..., : length - 20, :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_inputs_stay_finite(is_causal: bool) -> None:
    x = inputs(200, scale=100.0, dtype=torch.float32)
    for hyperbolic in (False, True):
        out = favor_plus_attention(*x, draw(2, M, D), hyperbolic=hyperbolic, is_causal=is_causal)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), x))


def test_garbage_in_masked_keys_is_inert() -> None:
    q, k, v = inputs(150)
    mask, W = torch.rand(2, 150) < 0.5, draw(2, M, D).double()
    hidden = ~mask[:, None, :, None]
    for is_causal in (False, True):
        results = []
        for fill in (0.0, 1e30):
            x = (q, k.masked_fill(hidden, fill).detach().requires_grad_(), v.masked_fill(hidden, fill))
            out = favor_plus_attention(*x, W, is_causal=is_causal, key_mask=mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), x[:2])))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        nothing = favor_plus_attention(q, k, v, W, is_causal=is_causal, key_mask=torch.zeros_like(mask))
        assert not nothing.any()
        assert not torch.autograd.grad(nothing.sum(), k)[0].any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_layouts_and_second_derivatives(is_causal: bool) -> None:
    """Transposed and shared inputs, one projection for all heads, and gradients of gradients (in plain form)."""
    W = draw(1, M, D).double()
    x = torch.randn(2, 70, 2, D, dtype=torch.float64, requires_grad=True)
    t = x.transpose(1, 2)
    outs = (
        favor_plus_attention(t, t, t, W, is_causal=is_causal),
        plain(CoreMap.exponential(W), t, t, t, is_causal=is_causal),
    )
    ours, theirs = (torch.autograd.grad(out.square().sum(), x, create_graph=True)[0] for out in outs)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    twice = [torch.autograd.grad(g.square().sum(), x)[0] for g in (ours, theirs)]
    torch.testing.assert_close(*twice, rtol=1e-8, atol=1e-8)
    flat = favor_plus_attention(t[0, 0], t[0, 0], t[0, 0], W[0], is_causal=is_causal)
    torch.testing.assert_close(flat, outs[0][0, 0], rtol=1e-10, atol=1e-10)


def test_a_trained_projection_gets_its_gradient() -> None:
    q, k, v = inputs(100)
    W = draw(2, M, D).double().requires_grad_()
    assert torch.autograd.grad(favor_plus_attention(q, k, v, W).square().sum(), W)[0].any()
    assert torch.autograd.grad(favor_attention(q, k, v, W).square().sum(), W)[0].any()


@pytest.mark.parametrize("phi", MAPS, ids=str)
def test_prefill(phi: Kind) -> None:
    """A long stretch after a state, in chunks: outputs and state of the plain form."""
    q, k, v = (x.detach() for x in inputs(300))
    made, mask = some_heads(*phi)[0], torch.rand(2, 1, 300) < 0.7
    mask[..., 0] = True
    whole = plain(made, q, k, v, is_causal=True, key_mask=mask)
    state, outs = None, []
    for at in (slice(0, 70), slice(70, 73), slice(73, 74), slice(74, 300)):
        tokens = [x[..., at, :] for x in (q, k, v)]
        out, state = sums.advance_map(made, *tokens, mask[..., at], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-9, atol=1e-9)
    assert state is not None
    expected = linear_state.summarise(reference.masked_keys(made.maps()[1], k, mask), v)
    for a, b in zip(state, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("phi", EXPONENTIAL, ids=str)
def test_gradients_behind_a_state(phi: Kind, scale: float) -> None:
    """Chunks hand gradients to the state before them, and have them from the state behind them."""
    (q, k, v), mask = inputs(430, scale=scale), torch.rand(2, 1, 430) < 0.7
    mask[..., 0] = True
    made, leaves = some_heads(*phi, learns=True)
    leaves, outs, state = [q, k, v, *leaves], [], None
    for at in (slice(0, 135), slice(135, 137), slice(137, 290), slice(290, 430)):
        tokens = [x[..., at, :] for x in (q, k, v)]
        out, state = sums.advance_map(made, *tokens, mask[..., at], state)
        outs.append(out)
    whole, probe = plain(made, q, k, v, is_causal=True, key_mask=mask), torch.randn(2, 2, 430, WIDE).double()
    ours, theirs = (torch.autograd.grad(out, leaves, probe) for out in (torch.cat(outs, -2), whole))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * max(1.0, b.abs().max().item()))


def test_second_derivatives_behind_a_state() -> None:
    (q, k, v), (made, _) = inputs(290), some_heads("positive", False, False)
    parts = [[x[..., at, :] for x in (q, k, v)] for at in (slice(0, 140), slice(140, 290))]
    first, state = sums.advance_map(made, *parts[0], None, None)
    outs = torch.cat([first, sums.advance_map(made, *parts[1], None, state)[0]], -2)
    once = [torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
            for out in (outs, plain(made, q, k, v, is_causal=True))]  # fmt: skip
    twice = [torch.autograd.grad(sum(g.square().sum() for g in each), (q, k, v)) for each in once]
    for a, b in zip(*twice, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_very_many_terms(is_causal: bool) -> None:
    """Sums of 2^18 equal terms lose nothing in the core, and without it no more than a product of torch's does."""
    n = 2**18
    k, W = torch.full((1, n, 2), 0.3), torch.full((1, 4, 2), 0.7)
    v = torch.linspace(0, 1, n)[None, :, None]
    out = favor_plus_attention(k, k, v, W, is_causal=is_causal)
    assert abs(out[0, -1, 0].item() - 0.5) < (1e-5 if core.unavailable() else 5e-7)
