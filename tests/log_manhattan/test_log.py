"""Log attention: what its normalisations collapse to (mathematics 1.3, 13.4), streaming, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import LinearAttention, catalogue
from fast_attention.feature_maps.positive import Positive, PositiveElu, PositiveExp, PositiveSoftplus
from fast_attention.functional import aft_simple, log_attention
from tests.cases import qkv, some_keys

EVERY = [
    "LogAttention()",
    "LogAttention(score='sum')",
    "LogAttention(normalize='softmax', temperature=0.5)",
    "LogAttention(score='sum', normalize='softmax')",
    "LogAttention(normalize='none')",
    "LogAttention(score='sum', normalize='none')",
    "LogAttention(score='logdot', normalize='softmax')",
]


def eye(k: Tensor) -> Tensor:
    return torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-2], -1, -1)


def test_softmax_weights_are_the_keys_share_for_every_query() -> None:
    """13.4: ``h(k)^(1/t) / sum h(k)^(1/t)``, per channel; their product over channels for score="sum"."""
    q, k, v = qkv(33)
    h = PositiveSoftplus()(k)
    for t in (1.0, 0.5, 3.0):
        share = h.pow(1 / t) / h.pow(1 / t).sum(-2, keepdim=True)
        out = log_attention(q, k, v, normalize="softmax", temperature=t)
        torch.testing.assert_close(out, (share * v).sum(-2, keepdim=True).expand_as(v), rtol=1e-12, atol=1e-12)
        product = h.prod(-1).pow(1 / t)
        matrix = log_attention(q, k, eye(k), score="sum", normalize="softmax", temperature=t)
        share = (product / product.sum(-1, keepdim=True))[..., None, :]
        torch.testing.assert_close(matrix, share.expand_as(matrix), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax_with_exponential_keys_is_ungated_aft_simple(is_causal: bool) -> None:
    """13.4."""
    q, k, v = qkv(67)
    k = 100 * k
    pool = log_attention(q, k, v, normalize="softmax", feature_map=PositiveExp(), is_causal=is_causal)
    torch.testing.assert_close(aft_simple(q, k, v, is_causal=is_causal), q.sigmoid() * pool, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_logdot_is_linear_attention(is_causal: bool) -> None:
    """13.4: ``softmax(log(h(q) . h(k)))`` undoes the logarithm."""
    q, k, v = qkv(67)
    mask = some_keys(2, 67)
    ours: Any = catalogue.parse("LogAttention(score='logdot', normalize='softmax', feature_map=PositiveElu())")
    linear = LinearAttention()
    same = {"rtol": 1e-13, "atol": 1e-13}
    for key_mask in (None, mask):
        call: Any = {"is_causal": is_causal, "key_mask": key_mask}
        torch.testing.assert_close(ours(q, k, v, **call), linear(q, k, v, **call), **same)
    h = PositiveElu()
    scores = (h(q) @ h(k).mT).log()
    if is_causal:
        scores = scores + torch.full((67, 67), float("-inf"), dtype=torch.float64).triu(1)
    torch.testing.assert_close(ours(q, k, v, is_causal=is_causal), scores.softmax(-1) @ v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sum_closed_and_convex_form(is_causal: bool) -> None:
    """13.4: ``(a S0 + S1) / (n a + B)``, which mixes the plain and the key-weighted mean by ``n a / (n a + B)``."""
    n = 29
    q, k, v = qkv(n)
    a, b = (PositiveSoftplus()(x).log1p() for x in (q, k))

    def total(x: Tensor) -> Tensor:
        return x.cumsum(-2) if is_causal else x.sum(-2, keepdim=True)

    count = total(torch.ones_like(v))
    out = log_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(out, (a * total(v) + total(b * v)) / (count * a + total(b)), rtol=1e-12, atol=1e-12)
    mix = count * a / (count * a + total(b))
    assert bool(((mix > 0) & (mix < 1)).all())
    means = total(v) / count, total(b * v) / total(b)
    torch.testing.assert_close(out, mix * means[0] + (1 - mix) * means[1], rtol=1e-12, atol=1e-12)
    matrix = log_attention(q, k, eye(k), score="sum", is_causal=is_causal)
    assert bool((matrix >= 0).all())
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))


def test_scores_have_rank_two() -> None:
    """1.3: ``log h(q_i) + log h(k_j)`` summed over channels, before any normalisation."""
    q, k, _ = qkv(12)
    scores = log_attention(q, k, eye(k), score="sum", normalize="none")
    assert bool((torch.linalg.matrix_rank(scores) == 2).all())
    h = PositiveSoftplus()
    exact = h.log(q).sum(-1)[..., :, None] + h.log(k).sum(-1)[..., None, :]
    torch.testing.assert_close(scores, exact, rtol=1e-12, atol=1e-12)


def test_one_key_for_all_values() -> None:
    q, k, v = qkv(9)
    for normalize in ("sum", "softmax", "none"):
        one = log_attention(q[..., :1], k[..., :1], v, normalize=normalize)
        wide = log_attention(q[..., :1].expand_as(q), k[..., :1].expand_as(k), v, normalize=normalize)
        torch.testing.assert_close(one, wide)


def test_a_map_of_your_own() -> None:
    @dataclass(frozen=True, repr=False)
    class Square(Positive):
        def __call__(self, z: Tensor) -> Tensor:
            return z.square() + 1

        def log(self, z: Tensor) -> Tensor:
            return z.square().log1p()

    q, k, v = qkv(8)
    share = (k.square() + 1) / (k.square() + 1).sum(-2, keepdim=True)
    out = log_attention(q, k, v, normalize="softmax", feature_map=Square())
    torch.testing.assert_close(out, (share * v).sum(-2, keepdim=True).expand_as(v))


def test_keys_that_jump_by_300(device: torch.device) -> None:
    """The softmax in units of a running maximum, in float32, one key for all values included."""
    q, k, v = qkv(71, device=device)
    k = k + 300.0 * torch.randint(-1, 2, (2, 2, 71, 8), device=device)
    mask = some_keys(2, 71, device)
    hidden = torch.ones(71, 71, dtype=torch.bool, device=device).triu(1) | ~mask[:, None, None, :]
    for keys in (k, k[..., :1]):
        keys = keys.float()
        scores = keys.double().unsqueeze(-3).expand(-1, -1, 71, -1, -1).masked_fill(hidden[..., None], float("-inf"))
        exact = (scores.softmax(-2) * v.unsqueeze(-3)).sum(-2)
        m: Any = catalogue.parse("LogAttention(normalize='softmax', feature_map=PositiveExp())")
        out = m(q.float(), keys, v.float(), is_causal=True, key_mask=mask)
        torch.testing.assert_close(out.double(), exact, rtol=2e-4, atol=1e-5)


def test_traits_follow_the_settings() -> None:
    reads = {name: catalogue.parse(name).traits.inputs for name in EVERY}
    assert [name for name in EVERY if reads[name] == "kv"] == [EVERY[2], EVERY[3]]
    q, k, v = qkv(6)
    for name in EVERY:
        m: Any = catalogue.parse(name)
        moved = bool((m(q, k, v) - m(q + 1, k, v)).abs().max() > 1e-6)
        assert moved == (reads[name] == "qkv"), name


def test_settings_and_sizes_are_checked() -> None:
    for text, said in (
        ("LogAttention(score='dot')", "score must be one of 'channel', 'sum', 'logdot'"),
        ("LogAttention(normalize='mean')", "normalize must be one of 'sum', 'softmax', 'none'"),
        ("LogAttention(score='logdot')", "only normalize"),
        ("LogAttention(score='logdot', normalize='none')", "only normalize"),
        ("LogAttention(temperature=2.0)", "a temperature needs"),
        ("LogAttention(score='logdot', normalize='softmax', temperature=2.0)", "a temperature needs"),
        ("LogAttention(normalize='softmax', temperature=0.0)", "at least 1e-06"),
        ("LogAttention(feature_map=EluPlusOne())", "positive map such as PositiveSoftplus"),
    ):
        with pytest.raises(ValueError, match=said):
            catalogue.parse(text)
    q, k, v = qkv(6)
    m: Any = catalogue.parse("LogAttention()")
    with pytest.raises(ValueError, match="keys of width 8 and values of width 4"):
        m(q, k, v[..., :4])
