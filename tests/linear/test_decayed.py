"""Linear attention that forgets: its chunks, its recurrence, and what a masked token is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import DecayedLinearAttention, Shape, TokenMixer, Unsupported, catalogue, core
from fast_attention.engine import trace
from fast_attention.feature_maps.features import Custom, EluPlusOne, Identity, Quadratic
from fast_attention.functional import decayed_linear_attention, linear_attention
from fast_attention.mechanisms.linear import compiled
from fast_attention.nn.positions import Rotary, rotate_by
from tests.cases import bind, qkv, some_keys


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "DecayedLinearAttention(gate='token')",
        "DecayedLinearAttention(Identity(), 'learned', normalize=False)",
        "DecayedLinearAttention(gate='channel')",
    ],
)
@pytest.mark.skipif(bool(core.unavailable()), reason="no compiled core")
def test_compiled(text: str, is_causal: bool) -> None:
    """A mechanism by the compiled core, and by the reference in float64: outputs and all gradients agree."""
    bound, mask = bind(catalogue.parse(text)), some_keys(2, 331)
    wide, found = qkv(331), []
    for dtype in (torch.float32, torch.float64):
        bound, x = bound.to(dtype), [t.to(dtype).requires_grad_() for t in wide]
        with trace.recorded() as steps:
            out = bound(*x, is_causal=is_causal, key_mask=mask)
        assert (steps[0].path == compiled.PATH) == (dtype == torch.float32)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*x, *bound.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-5 * (1 + float(b.detach().abs().max())))


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """``S_t = g_t S_{t-1} + k_t v_t^T``, token by token."""
    state, rows = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[-2]):
        state = decay[..., t, None, None] * state + k[..., t, :, None] * v[..., t, None, :]
        rows.append((q[..., t, None, :] @ state)[..., 0, :])
    return torch.stack(rows, -2)


def test_retention_is_its_recurrence() -> None:
    """RetNet's Eq. 1 with its decays, not normalised."""
    q, k, v = qkv(150)
    mechanism = DecayedLinearAttention(Identity(), normalize=False)
    gates = mechanism.weights(Shape(2, 8))
    decay = gates.logit.double().sigmoid()
    torch.testing.assert_close(decay, 1 - 2.0 ** -(5 + torch.arange(2, dtype=torch.float64)), rtol=1e-6, atol=0)
    out = mechanism(q, k, v, gates, is_causal=True)
    torch.testing.assert_close(out, recurrence(q, k, v, decay[:, None].expand(2, 2, 150)), rtol=1e-6, atol=1e-6)


def test_retention_is_its_parallel_form_with_the_published_decays() -> None:
    """RetNet, arXiv 2307.08621: Eq. 5, ``(Q K^T * D) V`` with D of ``1 - 2^(-5-h)``, queries and keys rotated."""
    heads, length, width = 8, 70, 16
    q, k, v = qkv(length, heads=heads, width=width)
    published = [31 / 32, 63 / 64, 127 / 128, 255 / 256, 511 / 512, 1023 / 1024, 2047 / 2048, 4095 / 4096]
    t = torch.arange(length, dtype=torch.float64)
    sin_cos = Rotary().sin_cos(t, width)
    q, k = rotate_by(q, sin_cos), rotate_by(k, sin_cos)
    rows = []
    for head, gamma in enumerate(published):
        decay = torch.where(
            t[:, None] >= t, gamma ** (t[:, None] - t), torch.zeros(length, length, dtype=torch.float64)
        )
        rows.append(((q[:, head] @ k[:, head].mT) * decay) @ v[:, head])
    mechanism = DecayedLinearAttention(feature_map=Identity(), normalize=False)
    out = mechanism(q, k, v, mechanism.weights(Shape(heads, width)), is_causal=True)
    torch.testing.assert_close(out, torch.stack(rows, 1), rtol=1e-5, atol=1e-5)  # logits are float32


@pytest.mark.parametrize("strength", [0.1, 3.0, 400.0])
def test_decays_by_channel_are_the_recurrence(strength: float) -> None:
    """GLA's Eq. 3: ``S_t = diag(a_t) S_{t-1} + k_t v_t^T``, also where a channel forgets all at once."""
    q, k, v = qkv(150)
    logs = -strength * torch.rand(2, 2, 150, 8, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, logs)]
    state, rows = torch.zeros(2, 2, 8, 8, dtype=torch.float64), []
    for t in range(150):
        state = logs[..., t, :, None].exp() * state + k[..., t, :, None] * v[..., t, None, :]
        rows.append((q[..., t, None, :] @ state)[..., 0, :])
    out = decayed_linear_attention(q, k, v, logs, feature_map=Identity(), normalize=False, is_causal=True)
    expected = torch.stack(rows, -2)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    probe = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(x, inputs, probe) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_decays_by_channel_that_are_alike_are_one_decay() -> None:
    q, k, v = qkv(100)
    logs = -torch.rand(2, 2, 100, dtype=torch.float64)
    for is_causal in (False, True):
        one = decayed_linear_attention(q, k, v, logs, is_causal=is_causal)
        several = decayed_linear_attention(q, k, v, logs[..., None].expand(2, 2, 100, 8), is_causal=is_causal)
        torch.testing.assert_close(several, one, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="under an elementwise map only"):
        DecayedLinearAttention(feature_map=Quadratic(), gate="channel")
    with pytest.raises(ValueError, match="log_decay has shape"):
        decayed_linear_attention(q, k, v, logs[..., None].expand(2, 2, 100, 7))


def test_without_decay_it_is_linear_attention() -> None:
    q, k, v = qkv(100)
    for is_causal in (False, True):
        settings: dict[str, Any] = {"feature_map": EluPlusOne(), "is_causal": is_causal}
        ours = decayed_linear_attention(q, k, v, torch.zeros(100, dtype=torch.float64), **settings)
        torch.testing.assert_close(ours, linear_attention(q, k, v, **settings))


def test_a_masked_token_is_as_if_it_were_not_there() -> None:
    q, k, v = qkv(60)
    seen = torch.rand(60) < 0.6
    decay = -torch.rand(60, dtype=torch.float64)
    for is_causal in (False, True):
        out = decayed_linear_attention(q, k, v, decay, is_causal=is_causal, key_mask=seen.expand(2, 60))
        x = (t[..., seen, :] for t in (q, k, v))
        torch.testing.assert_close(
            out[..., seen, :], decayed_linear_attention(*x, decay[seen], is_causal=is_causal), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_map_with_parameters_of_its_own_learns_in_long_sequences(is_causal: bool) -> None:
    """Through chunks autograd would not find them, and nobody would be told."""
    inside = nn.Linear(8, 12).double()
    mechanism = DecayedLinearAttention(Custom(lambda x: inside(x).exp()))
    q, k, v = qkv(20_000, heads=1, batch=1)
    gates = mechanism.weights(Shape(1, 8))
    mechanism(q, k, v, gates, is_causal=is_causal).square().sum().backward()
    assert inside.weight.grad is not None
    assert inside.weight.grad.any()


def test_growing_sums_and_sizes_that_do_not_fit_are_refused() -> None:
    q, k, v = qkv(9)
    for wrong, said in ((torch.full((9,), 0.1), "above 0"), (torch.zeros(3, 2, 9), r"log_decay has shape \(3, 2, 9\)")):
        with pytest.raises(ValueError, match=said):
            decayed_linear_attention(q, k, v, wrong.double())


def test_retention_takes_rotary_queries_and_keys() -> None:
    mixer = TokenMixer(16, 2, "DecayedLinearAttention(Identity(), normalize=False)", rotary=True)
    assert mixer(torch.randn(2, 9, 16), is_causal=True).isfinite().all()
    with pytest.raises(Unsupported):
        TokenMixer(16, 2, "DecayedLinearAttention", rotary=True)


def test_very_long_and_fast_decays_lose_nothing() -> None:
    """Logarithms of decays add up to 10^5 here; float32 would tell their differences to one in a hundred."""
    q, k, v = qkv(100_000, batch=1, heads=1, dtype=torch.float32)
    decay = torch.full((100_000,), -1.0)
    out = decayed_linear_attention(q, k, v, decay, is_causal=True)
    exact = decayed_linear_attention(*(x.double()[..., -300:, :] for x in (q, k, v)), decay[-300:].double(),
                                     is_causal=True)  # fmt: skip
    torch.testing.assert_close(out[..., -100:, :].double(), exact[..., -100:, :], rtol=1e-5, atol=1e-5)
