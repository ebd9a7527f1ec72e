"""Large queries and keys: sums in units of their largest terms, so that no row vanishes and no later key is felt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import catalogue
from fast_attention.feature_maps.feature_map import Logs
from fast_attention.mechanisms.linear import linear_state, reference
from fast_attention.mechanisms.linear.kernelised import Kernelised
from tests.cases import bind, qkv, some_keys

POSITIVE = [
    "FavorPlus(num_features=24)",
    "FavorPlus(num_features=12, features='hyperbolic')",
    "FavorPlusPlus(num_features=24)",
    "LearnedFeatures(num_features=12)",
    "FavorPlus(num_features=24, kernel=Exp(), kernel_epsilon=0.0)",
    "LinearAttention(feature_map=Exp())",
]
HOMOGENEOUS = ["LinearAttention()", "LinearAttention(feature_map=Relu())", "ReLUAttention()", "ReLUAttention(power=2)"]


def definition(bound: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """``softmax_j log sum_c exp(a_ic + b_jc)``, in float64: no exponent is taken before the largest is known."""
    mechanism: Kernelised[Any] = bound.mechanism
    a, b = (phi(x) for phi, x in zip(mechanism.maps(bound.w), (q, k), strict=True))
    assert isinstance(a, Logs)
    assert isinstance(b, Logs)
    scores = (a.logs[..., :, None, :] + b.logs[..., None, :, :]).logsumexp(-1).masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def visible(length: int, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    seen = torch.ones(length, length, dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("text", POSITIVE)
def test_no_scale_makes_rows_vanish(text: str, is_causal: bool, masked: bool) -> None:
    """Outputs and gradients in float64 are those of the definition; in float32 every row is there, and near."""
    for length, scale in ((9, 30.0), (70, 30.0), (70, 3000.0), (150, 8.0)):
        bound = bind(catalogue.parse(text))
        q, k, v = qkv(length, batch=1)
        leaves = [x.requires_grad_() for x in (scale * q, scale * k, v)]
        key_mask = some_keys(1, length) if masked else None
        if key_mask is not None:
            key_mask[:, :2] = False
        probe = torch.randn_like(v)
        expected = definition(bound, *leaves, visible(length, is_causal, key_mask))
        wanted = torch.autograd.grad((expected * probe).sum(), leaves)
        out = bound(*leaves, is_causal=is_causal, key_mask=key_mask)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)
        for mine, theirs in zip(torch.autograd.grad((out * probe).sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
        single = bind(catalogue.parse(text), dtype=torch.float32)
        low = [x.detach().float().requires_grad_() for x in leaves]
        out = single(*low, is_causal=is_causal, key_mask=key_mask)
        assert all(x.isfinite().all() for x in torch.autograd.grad((out * probe).sum(), low))
        assert torch.equal((out != 0).any(-1), (expected != 0).any(-1))
        off = (out - expected).abs().amax(-1) > 0.02 * scale
        assert off.double().mean() < 0.05, "rows that rounding of the exponents alone does not explain"


@pytest.mark.parametrize("text", POSITIVE)
def test_decoding_at_any_scale_is_one_pass(text: str) -> None:
    """One by one, in stretches, and by summaries that combine: all the same rows, none of them zero."""
    bound = bind(catalogue.parse(text))
    q, k, v = (x[:1] for x in qkv(150))
    q, k = 30 * q, 30 * k
    whole = bound(q, k, v, is_causal=True)
    torch.testing.assert_close(whole, definition(bound, q, k, v, visible(150, True, None)), rtol=1e-6, atol=1e-8)
    for sizes in ([1] * 9 + [70, 1, 70], [75, 75]):
        outs, state, at = [], None, 0
        for size in sizes:
            now = slice(at, at + size)
            out, state = bound.decode(q[..., now, :], k[..., now, :], v[..., now, :], state)
            outs.append(out)
            at += size
        torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-6, atol=1e-8)
    parts = [bound.mechanism.summarise(k[..., now, :], v[..., now, :], bound.w) for now in (slice(75), slice(75, 150))]
    for mine, theirs in zip(bound.mechanism.combine(*parts).content, state.content, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk", [1, 7, 16, 128])
@pytest.mark.parametrize("spread", [1.0, 100.0, 1e5])
def test_features_one_by_one_are_the_definition(monkeypatch: pytest.MonkeyPatch, spread: float, chunk: int) -> None:
    """What traced code runs: pairs by halves, whatever is in a chunk; where one unit does, both are the same."""
    q, k = Logs(spread * torch.randn(2, 45, 6).double()), Logs(spread * torch.randn(2, 45, 6).double())
    k.logs[:, [0, 1, 30]] = -torch.inf
    v = torch.randn(2, 45, 3).double()
    scores = (q.logs[:, :, None] + k.logs[:, None]).logsumexp(-1)
    scores = scores.masked_fill(~torch.ones(45, 45, dtype=torch.bool).tril(), -torch.inf)
    expected = torch.cat([torch.zeros(2, 2, 3), scores[:, 2:].softmax(-1) @ v], 1)
    first = linear_state.summarise(Logs(k.logs[:, :20]), v[:, :20])
    for traced in (False, True):
        if traced:
            monkeypatch.setattr(reference, "traced", lambda: True)
        sums, _ = reference.advance(q, k, v, chunk=chunk)
        torch.testing.assert_close(linear_state.normalise(sums), expected, rtol=1e-9, atol=1e-9)
        rest = (Logs(q.logs[:, 20:]), Logs(k.logs[:, 20:]), v[:, 20:])
        sums, _ = reference.advance(*rest, first, chunk=chunk)
        torch.testing.assert_close(linear_state.normalise(sums), expected[:, 20:], rtol=1e-9, atol=1e-9)
        if chunk == 128:
            found = linear_state.normalise(reference.attend(q, k, v, is_causal=True))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_compiled_rows_do_not_vanish_either() -> None:
    bound = bind(catalogue.parse("FavorPlus(num_features=16)"), dtype=torch.float32)
    q, k, v = qkv(140, batch=1, dtype=torch.float32)
    torch.compiler.reset()
    run = torch.compile(bound, fullgraph=True, backend="eager")
    out = run(60 * q, 60 * k, v, is_causal=True)
    torch.testing.assert_close(out, bound(60 * q, 60 * k, v, is_causal=True), rtol=1e-2, atol=2e-2)
    assert out.any(-1).all()


@pytest.mark.parametrize("text", [*POSITIVE, "Favor(num_features=16)", "Favor(num_features=16, features='phase')"])
@pytest.mark.parametrize("length", [12, 150])
def test_a_key_in_the_far_future_has_no_infinite_exponent(text: str, length: int) -> None:
    """Its square fits no float32, at any width: neither the past nor its own row is anything but finite."""
    bound = bind(catalogue.parse(text), dtype=torch.float32)
    q, k, v = qkv(length, batch=1, dtype=torch.float32)
    before = bound(q, k, v, is_causal=True)
    k[..., -1, :] = 1e25
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = bound(*leaves, is_causal=True)
    torch.testing.assert_close(out[..., :-1, :], before[..., :-1, :], rtol=1e-4, atol=1e-5)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


MAGNITUDES = [*itertools.product([60, 300], [1e18, 2e18, 3e18, 6e18])]


@pytest.mark.parametrize("text", [*HOMOGENEOUS, "LinearAttention(feature_map=Quadratic())"])
def test_a_denominator_that_overflows_makes_no_zeros(text: str) -> None:
    """Ordinary values under large queries and keys: the numerators may be finite where the denominators are not."""
    mechanism = catalogue.parse(text)
    for length, scale in MAGNITUDES:
        scale = scale**0.5 if "2" in text or "Quad" in text else scale
        q, k, v = (x.float() for x in qkv(length, batch=1))
        for is_causal in (False, True):
            out = mechanism(scale * q, scale * k, v, is_causal=is_causal)
            expected = mechanism(scale * q.double(), scale * k.double(), v.double(), is_causal=is_causal)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("later", [1.0, 1e16])
@pytest.mark.parametrize("text", [*HOMOGENEOUS[:3], "LinearAttention(feature_map=Identity())"])
def test_decoding_of_enormous_inputs_is_one_pass(text: str, later: float) -> None:
    """Ordinary keys, then enormous ones, then ordinary again; one by one, in stretches, by summaries."""
    mechanism = catalogue.parse(text)
    q, k, v = (x.float() for x in qkv(40, batch=2))
    sizes = torch.ones(40).index_fill_(0, torch.arange(10, 30), 1e18).index_fill_(0, torch.arange(30, 40), later)
    sizes = torch.stack([sizes, torch.ones(40)])[:, None, :, None]  # a sequence beside it is not moved
    asking = torch.where(torch.arange(40) < 30, sizes[..., 0], 1.0)[..., None]  # ordinary, so that nothing overflows
    q, k, v = asking * q, sizes * k, sizes * v
    expected = mechanism(*(x.double() for x in (q, k, v)), is_causal=True)
    near = 1e-4 * expected.abs().amax((1, 3), keepdim=True).clamp_min(1e-3)
    for cuts in ([1] * 40, [15, 15, 10], [40]):
        state, found = None, []
        for parts in zip(*(x.split(cuts, -2) for x in (q, k, v)), strict=True):
            out, state = mechanism.decode(*parts, state=state)
            found.append(out)
        assert ((torch.cat(found, -2) - expected).abs() <= near).all(), cuts
    if mechanism.traits.memory == "constant":
        halves = [mechanism.summarise(k[..., s, :], v[..., s, :]) for s in (slice(0, 20), slice(20, 39))]
        out, _ = mechanism.decode(q[..., 39:, :], k[..., 39:, :], v[..., 39:, :], state=mechanism.combine(*halves))
        assert ((out - expected[..., 39:, :]).abs() <= near[..., 39:, :]).all()


def test_an_additive_mask_beside_enormous_scores() -> None:
    """It is brought down with the scores."""
    q, k, v = (1e18 * x.float() for x in qkv(60, batch=1))
    mask = (1e36 * torch.randn(60, 60)).masked_fill(torch.rand(60, 60) < 0.3, -torch.inf)
    for text in ("ReLUAttention", "ReLUAttention(power=2)"):
        mechanism = catalogue.parse(text)
        out = mechanism(q, k, v, attn_mask=mask)
        expected = mechanism(q.double(), k.double(), v.double(), attn_mask=mask.double())
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e14)
