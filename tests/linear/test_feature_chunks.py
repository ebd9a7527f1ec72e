"""Kernelised attention chunk after chunk: outputs and gradients of the plain form for maps of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import LinearAttention, catalogue, explain
from fast_attention.engine.chunked import scan
from fast_attention.feature_maps.features import Custom, Exp, Quadratic, Relu, SoftmaxMap
from fast_attention.functional import generalised_attention, linear_attention
from fast_attention.mechanisms.linear import fast_linear, feature_chunks
from tests.cases import bind, qkv, some_keys


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of some 30 tokens, whatever the map."""
    monkeypatch.setattr(feature_chunks, "LEAST", 20)
    monkeypatch.setattr(feature_chunks, "NUMBERS", 1)
    monkeypatch.setattr(feature_chunks.against, "__kwdefaults__", {"numbers": 1})
    monkeypatch.setattr(fast_linear, "MANY", 1)


def both(monkeypatch: pytest.MonkeyPatch, run: Any, leaves: list[Tensor]) -> list[list[Tensor]]:
    """Output and gradients in chunks, then all at once."""
    found = []
    for least in (20, 10**9):
        monkeypatch.setattr(feature_chunks, "LEAST", least)
        out = run()
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    return found


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(80, 80), (131, 131), (90, 131), (131, 90)])
@pytest.mark.parametrize("kernel", [Relu(), Exp()], ids=repr)
@pytest.mark.usefixtures("small")
def test_trained_projections(
    kernel: Any, length: int, keys: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, W = qkv(length, keys), torch.randn(2, 12, 8, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (*x, W)]
    for mask in (None, some_keys(2, keys)):
        run = lambda m=mask: generalised_attention(*x, W, kernel=kernel, is_causal=is_causal, key_mask=m)  # noqa: E731
        for a, b in zip(*both(monkeypatch, run, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [Quadratic(), SoftmaxMap(), Exp(), Custom(torch.exp)], ids=repr)
@pytest.mark.usefixtures("small")
def test_maps_of_linear_attention(phi: Any, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [t.requires_grad_() for t in qkv(131)]
    run = lambda: linear_attention(*x, feature_map=phi, eps=0.1, is_causal=is_causal)  # noqa: E731
    for a, b in zip(*both(monkeypatch, run, list(x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("small")
def test_large_keys_in_a_later_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that have no room in the units of the chunks before are brought into others."""
    q, k, v = (x.float().requires_grad_() for x in qkv(131))
    large = k.detach().clone()
    large[..., 100:, :] *= 1e15
    for is_causal in (False, True):
        run = lambda c=is_causal: linear_attention(q, large, v, feature_map=Quadratic(), is_causal=c)  # noqa: E731
        chunks, whole = both(monkeypatch, run, [v])
        assert chunks[0].isfinite().all()
        torch.testing.assert_close(chunks, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small")
def test_a_map_with_parameters_of_its_own_is_not_cut() -> None:
    """Autograd could not find them in a function of a chunk: all tokens at once, with their gradient."""
    inside = nn.Linear(8, 12).double()
    mechanism = LinearAttention(Custom(lambda x: inside(x).relu()))
    q, k, v = qkv(131)
    mechanism(q, k, v).square().sum().backward()
    assert inside.weight.grad is not None


def test_the_path_is_said() -> None:
    bound = bind(catalogue.parse("FavorPlus(num_features=512, kernel=Relu())"), heads=8)
    x = qkv(4096, heads=8, batch=1, dtype=torch.float32)
    assert "chunk by chunk" in str(explain(bound.float().mechanism, *x))


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_scan(size: int) -> None:
    """A decaying sum, its weight and its state trained: autograd over the whole, to rounding; twice, too."""
    x, flags = torch.randn(2, 13, 3, dtype=torch.float64), torch.rand(2, 13, 1) < 0.7
    w, first = torch.tensor(0.8, dtype=torch.float64), torch.randn(2, 1, 3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, first)]

    def step(tokens: Any, weights: Any, state: Any) -> Any:
        (own, seen, nothing), (decay,), (before,), rows = tokens, weights, state, []
        assert nothing is None
        for token, flag in zip(own.unbind(-2), seen.unbind(-2), strict=True):
            before = decay * before + (token * flag)[..., None, :]
            rows.append(before)
        return (torch.cat(rows, -2),), (before,)

    (out,), (last,) = scan(step, [x, flags, None], [w], (first,), size=size)
    (whole,), (end,) = step([x, flags, None], [w], (first,))
    ours, theirs = (
        torch.autograd.grad((a.square().sum() + b.exp().sum()), leaves, create_graph=True)
        for a, b in ((out, last), (whole, end))
    )
    torch.testing.assert_close([out, last, *ours], [whole, end, *theirs])
    twice = [torch.autograd.grad(sum(g.square().sum() for g in each), leaves) for each in (ours, theirs)]
    torch.testing.assert_close(*twice)
