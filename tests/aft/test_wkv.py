"""WKV: RWKV-4's own loop, large keys, long sequences, float32, and what its passes in groups do at their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import WKV, Bound, Shape, Unsupported
from fast_attention.engine import trace
from fast_attention.functional import wkv_attention
from fast_attention.mechanisms.aft import fast, wkv
from tests.cases import qkv


def by_token(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, mask: Tensor | None) -> Tensor:
    """The recurrence in float64, one token after the other, without masked ones; w and u (heads, 1, width)."""
    q, k, v, w, u = (x.double() for x in (q, k, v, w, u))
    rows = []
    num = den = torch.zeros_like(v[..., :1, :])
    for t in range(k.shape[-2]):
        now = slice(t, t + 1)
        key, value = k[..., now, :], v[..., now, :]
        seen = torch.ones_like(key) if mask is None else mask[:, None, now, None].to(key).expand_as(key)
        sums = num + seen * (key + u).exp() * value, den + seen * (key + u).exp()
        nothing = sums[1] == 0
        rows.append(q[..., now, :].sigmoid() * (sums[0] / sums[1].masked_fill(nothing, 1.0)))
        decay = (-w * seen).exp()
        num, den = decay * num + seen * key.exp() * value, decay * den + seen * key.exp()
    return torch.cat(rows, -2)


def drawn(length: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(3)
    inputs = [x.requires_grad_() for x in qkv(length, heads=3, width=4, dtype=dtype, scale=scale)]
    log_decay, bonus = (torch.randn(3, 1, 4, dtype=dtype).requires_grad_() for _ in range(2))
    mask = torch.rand(2, length) < 0.7
    mask[1, : min(20, length // 2)] = False
    return [*inputs, log_decay, bonus], mask


def agree(length: int, masked: bool, dtype: torch.dtype, limit: float, path: str) -> None:
    """Outputs and gradients of all inputs, w and u, and the path that was taken."""
    inputs, mask = drawn(length, dtype)
    q, k, v, log_decay, bonus = inputs
    with trace.recorded() as steps:
        out = wkv.causal(q, k, v, log_decay.exp(), bonus, mask[:, None] if masked else None)
    assert path in steps[0].path
    high = [x.detach().double().requires_grad_() for x in inputs]
    exact = by_token(high[0], high[1], high[2], high[3].exp(), high[4], mask if masked else None)
    torch.testing.assert_close(out.double(), exact, rtol=limit, atol=limit)
    probe = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(out, inputs, probe.to(dtype))
    for a, b in zip(
        gradients, torch.autograd.grad(exact, high, probe, materialize_grads=True, allow_unused=True), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=20 * limit, atol=20 * limit * float(b.abs().max().clamp_min(1)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 300])
def test_groups_of_tokens_are_the_recurrence(length: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "NUMBERS", 2 * 3 * 4 * 160)  # chunks of ten groups: sums of groups are grouped again
    agree(length, masked, torch.float64, 1e-11, "groups")


@pytest.mark.parametrize("masked", [False, True])
def test_single_precision_keeps_its_digits_over_many_tokens(masked: bool) -> None:
    agree(3000, masked, torch.float32, 1e-5, "groups")


@pytest.mark.parametrize("what", ["keys", "bonus", "decay"])
def test_nothing_overflows(what: str) -> None:
    """Keys hundreds apart, bonuses and decays that float32's exponentials cannot hold: float64's loop in logarithms."""
    inputs, _ = drawn(70, torch.float32)
    q, k, v, log_decay, bonus = (x.detach() for x in inputs)
    w = log_decay.exp()
    if what == "keys":
        k = 200 * k
    elif what == "bonus":
        bonus = 150 * bonus
    else:
        w = 300 * w
    out = wkv.causal(q, k, v, w, bonus, None)
    assert out.isfinite().all()
    t = torch.arange(70.0, dtype=torch.float64)
    scores = k.double()[..., None, :, :] - ((t[:, None] - 1 - t)[..., None] * w.double()[:, None])
    scores = torch.where(torch.eye(70)[..., None] > 0, (k.double() + bonus.double())[..., None, :, :], scores)
    scores = scores.masked_fill((t[:, None] < t)[..., None], float("-inf"))
    exact = q.double().sigmoid() * (scores.softmax(-2) * v.double()[..., None, :, :]).sum(-2)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def test_transformers_computes_the_same() -> None:
    """RWKV-4's operator as transformers has it, with a state handed on, beside ``decode``; there without the gate."""
    rwkv = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    bound = Bound(WKV(), Shape(2, 8))
    with torch.no_grad():
        for parameter in bound.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    q, k, v = qkv(50, dtype=torch.float32)
    tokens = [x.transpose(1, 2).flatten(2) for x in (k, v)]
    time_decay, time_first = (x.detach().flatten() for x in bound.w)
    theirs, _ = rwkv.rwkv_linear_attention_cpu(time_decay, time_first, *tokens)
    theirs = theirs.unflatten(-1, (2, 8)).transpose(1, 2) * q.sigmoid()
    torch.testing.assert_close(bound(q, k, v, is_causal=True), theirs, rtol=1e-5, atol=1e-5)
    held, state, outs = None, None, []
    for a, b in ((0, 20), (20, 21), (21, 50)):
        part, held = rwkv.rwkv_linear_attention_cpu(
            time_decay, time_first, *(x[:, a:b] for x in tokens), state=held, return_state=True
        )
        out, state = bound.decode(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], state)
        outs.append(out)
        torch.testing.assert_close(
            out, part.unflatten(-1, (2, 8)).transpose(1, 2) * q[:, :, a:b].sigmoid(), rtol=1e-5, atol=1e-5
        )


def test_the_weights_begin_as_those_of_rwkvs_first_layer() -> None:
    rwkv = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    config = rwkv.RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=8)
    layer: Any = rwkv.RwkvModel(config).blocks[0].attention
    w = WKV().weights(Shape(2, 8))
    torch.testing.assert_close(w.log_decay.detach().flatten(), layer.time_decay.detach())
    zigzag = torch.tensor([0.0, 0.5, -0.5])  # transformers' ``ones_like`` of the whole sum loses it
    torch.testing.assert_close(w.bonus.detach().flatten()[:6], math.log(0.3) + zigzag.repeat(2))


def test_the_function_is_the_mechanism_and_later_tokens_are_refused() -> None:
    q, k, v = qkv(9)
    w = WKV().weights(Shape(2, 8))
    out = wkv_attention(q, k, v, w.log_decay.double().exp(), w.bonus.double())
    torch.testing.assert_close(out, WKV()(q, k, v, w, is_causal=True))
    with pytest.raises(Unsupported, match=r"WKV\(\) does not support is_causal=False \(traits.bidirectional"):
        WKV()(q, k, v, w)
    with pytest.raises(ValueError, match="widths must be equal; got keys of width 8 and values of width 4"):
        WKV()(q, k, v[..., :4], w, is_causal=True)
