"""A million tokens: right at sampled positions, sums without loss, memory that grows with the length and no faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import Bound, Shape, catalogue
from fast_attention.counting import exponent, peak_bytes

pytestmark = pytest.mark.slow

PRIME = 999_983
SAMPLED = [0, 128, 65_537, 999_982]
WIDTH = 8


def elu_plus_one(w: Any, x: Tensor) -> Tensor:
    return F.elu(x) + 1


def linear(w: Any, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
    weights = k @ elu_plus_one(w, q)
    return weights @ v / (weights.sum() + 1e-6)


def positive(w: Any, x: Tensor) -> Tensor:
    x = x * x.shape[-1] ** -0.25
    return (x @ w.projection[0].double().mT - x.square().sum(-1, keepdim=True) / 2).exp()


def favor_plus(w: Any, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
    weights = k @ positive(w, q[None])[0]
    return weights @ v / weights.sum()


def local(w: Any, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
    near = slice(max(i - 128, 0), i + 129)
    return (k[near] @ q / k.shape[-1] ** 0.5).softmax(0) @ v[near]


def aft_simple(w: Any, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
    return q.sigmoid() * (k.softmax(0) * v).sum(0)


def log(w: Any, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
    scores = log_softplus(w, q) + k
    return (scores * v).sum(0) / scores.sum(0)


def log_softplus(w: Any, x: Tensor) -> Tensor:
    return torch.log(1 + F.softplus(x) + 1e-6)


def softplus(w: Any, x: Tensor) -> Tensor:
    return F.softplus(x) + 1e-6


def manhattan(w: Any, q: Tensor, h: Tensor, v: Tensor, i: int) -> Tensor:
    return h[i] * v[i] + ((h.log() - h[i].log()) * v).sum(0) / len(h)


ROWS: dict[str, Callable[..., Tensor]] = {
    "LinearAttention()": linear,
    "FavorPlus(num_features=32)": favor_plus,
    "Local()": local,
    "AFTSimple()": aft_simple,
    "LogAttention()": log,
    "Manhattan()": manhattan,
}
KEYS = {  # the map of single keys, which all rows share
    "LinearAttention()": elu_plus_one,
    "FavorPlus(num_features=32)": positive,
    "LogAttention()": log_softplus,
    "Manhattan()": softplus,
}
BOTH = pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])


@BOTH
@pytest.mark.parametrize("expression", ROWS)
def test_a_prime_million_at_sampled_positions(expression: str, is_causal: bool) -> None:
    """Against the definition in float64: outputs to 1e-6, gradients (differences of sums) to 1e-4, of the largest."""
    bound = Bound(expression, Shape(1, WIDTH, PRIME))
    q, k = (0.5 * torch.randn(1, 1, PRIME, WIDTH) for _ in range(2))
    v = 0.5 + (2 * k).sigmoid()  # follows the keys, so that gradients are no differences of nearly equal sums
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = bound(*inputs, is_causal=is_causal)[0, 0, SAMPLED]
    ways = torch.randn(out.shape)
    found = torch.autograd.grad(out, inputs, ways, allow_unused=True, materialize_grads=True)

    exact = [x.detach()[0, 0].double().requires_grad_() for x in inputs]
    keys = KEYS.get(expression, lambda w, x: x)(bound.w, exact[1])
    rows = []
    for i in SAMPLED:
        # a window to the right sees the future unless causal, so rows are cut here and nowhere else
        seen = slice(0, i + 1) if is_causal else slice(None)
        rows.append(ROWS[expression](bound.w, exact[0][i], keys[seen], exact[2][seen], i))
    wanted = torch.autograd.grad(torch.stack(rows), exact, ways.double(), allow_unused=True, materialize_grads=True)

    _near(out, torch.stack(rows), 1e-6, "outputs")
    for name, ours, theirs in zip("qkv", found, wanted, strict=True):
        _near(ours[0, 0], theirs, 1e-4, f"gradient of {name}")


def _near(ours: Tensor, exact: Tensor, limit: float, what: str) -> None:
    error = float((ours.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max().clamp(min=1e-30))
    assert error <= limit, f"{what} are off by {error:.2g} of the largest; allowed {limit:g}"


LINEAR_KINDS = [*ROWS, "FNet()"]


def _peaks(expression: str, length: int, is_causal: bool, width: int = 64) -> tuple[int, int, int]:
    """Peak bytes of a forward and of a training pass, and the bytes of what goes in and comes out."""
    torch.manual_seed(0)
    bound = Bound(expression, Shape(1, width, length))
    mixer = bound.mechanism.traits.inputs == "x"
    inputs = [torch.randn((1, length, width) if mixer else (1, 1, length, width)) for _ in range(1 if mixer else 3)]
    with torch.no_grad():
        forward = peak_bytes(lambda: bound(*inputs, is_causal=is_causal))
    way = torch.randn(inputs[0].shape)
    for x in inputs:
        x.requires_grad_()

    def train() -> None:
        bound(*inputs, is_causal=is_causal).backward(way)

    return forward, peak_bytes(train), sum(x.nbytes for x in [*inputs, way])


@BOTH
@pytest.mark.parametrize("expression", LINEAR_KINDS)
def test_memory_grows_with_the_length_and_stays_small(expression: str, is_causal: bool) -> None:
    if is_causal and not catalogue.parse(expression).traits.causal:
        pytest.skip("denied by its traits")
    small, large = (_peaks(expression, length, is_causal) for length in (4_096, 65_536))
    for name, first, last, times in zip(("forward", "training"), small, large, (4, 8), strict=False):
        assert exponent(first, last, 16) <= 1.05, f"{name}: {first:,} bytes grew to {last:,}"
        assert last <= times * large[2], f"{name}: {last / large[2]:.1f} times the bytes of inputs and output"
    assert 16 * large[1] < 8 * 2**30, "a million tokens of width 64 would not fit into 8 GiB"
