"""Manhattan attention: the identities of Eq. 12 and of its sorted forms (mathematics 1.4, 1.5, 13.5, 13.6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import catalogue
from fast_attention.feature_maps.positive import PositiveElu, PositiveExp, PositiveRelu, PositiveSoftplus
from fast_attention.functional import (
    absolute_manhattan,
    laplacian_manhattan,
    manhattan_attention,
    signed_manhattan,
    vector_manhattan,
)
from fast_attention.mechanisms.log_manhattan import sorting
from tests.cases import qkv, some_keys

EVERY = [
    "Manhattan()",
    "Manhattan(reference='first')",
    "Manhattan(normalize='l1', query_dim=1)",
    "Manhattan(distance='l1', query_dim=None)",
    "Manhattan(distance='l1', normalize='l1', key_dim=1)",
    "Manhattan(distance='laplacian', normalize='l1')",
    "Manhattan(distance='laplacian', temperature=0.5)",
]
SUMS: dict[str, Any] = {
    "signed": (signed_manhattan, lambda d: d),
    "l1": (absolute_manhattan, torch.abs),
    "laplacian": (laplacian_manhattan, lambda d: torch.exp(-d.abs())),
}


def pairs(l: Tensor, v: Tensor, weight: Any, *, is_causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """``sum_j weight(l_j - l_i) v_j``, all n x n x d weights of it."""
    n = l.shape[-2]
    weights = weight(l.unsqueeze(-3) - l.unsqueeze(-2))
    if is_causal:
        weights = weights * torch.ones(n, n, dtype=l.dtype, device=l.device).tril()[..., None]
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :, None]
    return (weights * v.unsqueeze(-3)).sum(-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("distance", SUMS)
def test_sums_equal_all_pairs(distance: str, is_causal: bool, device: torch.device) -> None:
    """13.5, 13.6: closed and sorted forms, masked, one key for all values, at lengths beyond every block."""
    function, weight = SUMS[distance]
    for n in (1, 2, 5, 17, 63, 65, 257):
        _, k, v = qkv(n, width=3, batch=2, device=device)
        for keys in (k, k[..., :1], k.round()):  # rounded: many ties
            for mask in (None, some_keys(2, n, device)):
                ours = function(keys, v, is_causal=is_causal, key_mask=mask)
                entered = keys if mask is None else keys.masked_fill(~mask[:, None, :, None], 0.0)
                exact = pairs(PositiveSoftplus().log(entered), v, weight, is_causal=is_causal, key_mask=mask)
                torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-10)


def test_signed_laws() -> None:
    """13.5: one token, constant keys, shift, scale, permutation, centred values, leak of an offset, Cov identity."""
    _, k, v = qkv(23)
    m: Any = catalogue.parse("Manhattan(normalize='none', feature_map=PositiveExp())")
    mean: Any = catalogue.parse("Manhattan(feature_map=PositiveExp())")
    close: Any = torch.testing.assert_close
    h, l = k.exp(), k
    out = m(k, k, v)
    close(m(k[:, :, :1], k[:, :, :1], v[:, :, :1]), (h * v)[:, :, :1])
    constant = k[:, :, :1].expand_as(k)
    close(m(k, constant, v), constant.exp() * v)
    close(m(k, k + 0.7, v) - (k + 0.7).exp() * v, out - h * v)  # only the own term notices the scale of the keys
    close(m(k, k + 1000.0, v) - PositiveExp()(k + 1000.0) * v, out - h * v, rtol=1e-8, atol=1e-8)
    order = torch.randperm(23)
    close(m(k, k[:, :, order], v[:, :, order]), out[:, :, order])
    centred = v - v.mean(-2, keepdim=True)
    related = m(k, k, centred) - h * centred
    close(related, related[:, :, :1].expand_as(related))
    u = torch.randn(8, dtype=torch.float64)
    close(m(k, k, v + u) - out, h * u + 23 * u * (l.mean(-2, keepdim=True) - l))
    covariance = ((l - l.mean(-2, keepdim=True)) * centred).mean(-2, keepdim=True)
    average = (l.mean(-2, keepdim=True) - l) * v.mean(-2, keepdim=True)
    close(mean(k, k, v), h * v + covariance + average)


def test_signed_weights_are_antisymmetric_of_rank_two() -> None:
    m: Any = catalogue.parse("Manhattan(normalize='none', key_dim=1)")
    _, k, _ = qkv(9)
    matrix = m(k, k, torch.eye(9, dtype=k.dtype).expand(2, 2, 9, 9))
    h = PositiveSoftplus()(k.mean(-1))
    delta = matrix - torch.diag_embed(h)
    torch.testing.assert_close(delta, -delta.mT)
    assert bool((torch.linalg.matrix_rank(delta) == 2).all())
    torch.testing.assert_close(delta.sum(-1), 9 * (h.log().mean(-1, keepdim=True) - h.log()))


def test_first_reference() -> None:
    """1.4: ``k_1 v_1 + S1 - l_1 S0``, the same for all tokens unless causal; the first visible key counts."""
    m: Any = catalogue.parse("Manhattan(normalize='none', reference='first')")
    q, k, v = qkv(12)
    out = m(q, k, v)
    torch.testing.assert_close(out, out[:, :, :1].expand_as(out))
    causal = m(q, k, v, is_causal=True)
    torch.testing.assert_close(causal[:, :, -1], out[:, :, -1])
    mask = torch.arange(12).expand(2, -1) >= 3
    late = m(q, k, v, is_causal=True, key_mask=mask)
    torch.testing.assert_close(late[:, :, 3:], m(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], is_causal=True))
    assert bool((late[:, :, :3] == 0).all())


def test_laplacian_is_a_ratio_and_a_mean() -> None:
    """13.6: ``w = (min / max)^(1 / t)`` of two keys; with normalize="l1" the weights sum to one."""
    m: Any = catalogue.parse("Manhattan(distance='laplacian', normalize='l1', key_dim=1, temperature=0.7)")
    _, k, _ = qkv(11)
    for is_causal in (False, True):
        matrix = m(k, k, torch.eye(11, dtype=k.dtype).expand(2, 2, 11, 11), is_causal=is_causal)
        h = PositiveSoftplus()(k.mean(-1))
        ratio = torch.minimum(h[..., :, None], h[..., None, :]) / torch.maximum(h[..., :, None], h[..., None, :])
        weights = ratio.pow(1 / 0.7)
        weights = weights.tril() if is_causal else weights
        torch.testing.assert_close(matrix, weights / weights.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))


@pytest.mark.parametrize("is_causal", [False, True])
def test_whole_vectors(is_causal: bool) -> None:
    """1.5: one weight for all values, ``W_ij = sum_a |l_ja - l_ia|``; keys and values of different widths."""
    _, k, v = qkv(29, width=5)
    mask = some_keys(2, 29)
    l = PositiveSoftplus().log(k.masked_fill(~mask[:, None, :, None], 0.0))
    W = (l.unsqueeze(-3) - l.unsqueeze(-2)).abs().sum(-1) * mask[:, None, None, :]
    W = W.tril() if is_causal else W
    ours = vector_manhattan(k, v[..., :3], is_causal=is_causal, key_mask=mask)
    torch.testing.assert_close(ours, W @ v[..., :3], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sums", [sorting.absolute, sorting.laplacian])
def test_gradients_of_the_sorted_forms(sums: Any) -> None:
    """13.6: by finite differences, away from ties."""
    l = (torch.randperm(9)[:, None].double() + 0.3 * torch.rand(9, 2, dtype=torch.float64)).requires_grad_()
    x = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda a, b, c=is_causal: sorting.over(a, b, sums, is_causal=c), (l, x), check_batched_grad=False
        )


def test_scalar_keys_and_gates() -> None:
    """Keys 1 wide, or their mean; gates on the whole output."""
    q, k, v = qkv(10)
    plain, scalar = (catalogue.parse(name) for name in ("Manhattan()", "Manhattan(key_dim=1)"))
    single = k.mean(-1, keepdim=True)
    torch.testing.assert_close(scalar(q, k, v), plain(q, single, v))  # type: ignore[operator]
    torch.testing.assert_close(plain(q, single, v), plain(q, single.expand_as(k), v))  # type: ignore[operator]
    out = plain(q, k, v)  # type: ignore[operator]
    assert plain.traits.inputs == "kv"
    for text, gate in (("query_dim=1", q.mean(-1, keepdim=True)), ("query_dim=None", q)):
        m: Any = catalogue.parse(f"Manhattan({text})")
        assert m.traits.inputs == "qkv"
        torch.testing.assert_close(m(q, k, v), gate.sigmoid() * out)
        again = manhattan_attention(q, k, v, query_dim=m.query_dim)
        torch.testing.assert_close(again, m(q, k, v), rtol=0, atol=0)


def test_float32_sums_do_not_cancel(device: torch.device) -> None:
    """Log keys far from zero, 4,096 of them: the sums are taken relative to one of the keys."""
    _, k, v = qkv(4096, batch=1, heads=1, width=2, device=device)
    k = k + 1000.0
    for name in ("Manhattan(feature_map=PositiveExp())", "Manhattan(distance='l1', feature_map=PositiveExp())"):
        m: Any = catalogue.parse(name)
        for is_causal in (False, True):
            exact = m(k, k.float().double(), v.float().double(), is_causal=is_causal)
            low = m(k.float(), k.float(), v.float(), is_causal=is_causal)
            own = PositiveExp()(k) * v
            error = ((low.double() - exact) / own.abs().max()).abs().max()
            assert float(error) < 1e-6, (name, is_causal, float(error))
            related = (exact - own).abs().max()
            sums: Any = absolute_manhattan if "l1" in name else signed_manhattan
            low = sums(k.float(), v.float(), feature_map=PositiveExp(), is_causal=is_causal)
            exact = sums(k.float().double(), v.float().double(), feature_map=PositiveExp(), is_causal=is_causal)
            assert float((low.double() - exact).abs().max() / exact.abs().max()) < 1e-5, (name, is_causal, related)


@pytest.mark.parametrize(
    "h", [PositiveSoftplus(), PositiveSoftplus(eps=0.0), PositiveExp(), PositiveElu(), PositiveRelu()]
)
def test_positive_maps(h: Any) -> None:
    """1.6: the logarithm is the map's, stable where h underflows, with a bounded gradient."""
    z = torch.cat([torch.linspace(-30, 14, 400), torch.tensor([0.0, -0.0, -15.0, 15.0])]).double().requires_grad_()
    torch.testing.assert_close(h.log(z), h(z).log(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(h.log1p(z), h(z).log1p(), rtol=1e-9, atol=1e-12)
    assert bool((h(z) > 0).all())
    (slope,) = torch.autograd.grad(h.log(z).sum(), z)
    if not isinstance(h, PositiveRelu):
        assert bool(((slope >= 0) & (slope <= 1 + 1e-12)).all())
    (one,) = torch.autograd.grad(h(z).log().sum(), z)
    torch.testing.assert_close(slope, one, rtol=1e-6, atol=1e-9)
    far = torch.tensor([-1e4, 1e4, -300.0, 300.0]).requires_grad_()
    for y in (h.log(far), h.log1p(far), h(far)):
        assert bool(y.isfinite().all())
        assert bool(torch.autograd.grad(y.sum(), far)[0].isfinite().all())


def test_settings_and_sizes_are_checked() -> None:
    for text, said in (
        ("Manhattan(distance='l2')", "distance must be one of 'signed', 'l1', 'laplacian'"),
        ("Manhattan(normalize='softmax')", "normalize must be one of"),
        ("Manhattan(reference='last')", "reference must be one of"),
        ("Manhattan(query_dim=2)", "query_dim must be one of 0, 1, None"),
        ("Manhattan(key_dim=2)", "key_dim must be one of"),
        ("Manhattan(feature_map='elu')", "positive map such as PositiveSoftplus"),
        ("Manhattan(reference='first', distance='l1')", 'reference="first" needs distance="signed"'),
        ("Manhattan(reference='first', normalize='l1')", 'reference="first" needs distance="signed"'),
        ("Manhattan(temperature=2.0)", "a temperature needs"),
        ("Manhattan(distance='laplacian', temperature=0.0)", "at least 1e-06"),
        ("Manhattan(feature_map=PositiveRelu(eps=0.0))", "eps must be at least 1e-30"),
        ("Manhattan(feature_map=PositiveSoftplus(eps=-1.0))", "at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            catalogue.parse(text)
    q, k, v = qkv(6)
    m: Any = catalogue.parse("Manhattan()")
    with pytest.raises(ValueError, match="keys of width 8 and values of width 4"):
        m(q, k, v[..., :4])
    m = catalogue.parse("Manhattan(query_dim=None, key_dim=1)")
    with pytest.raises(ValueError, match="queries of width 8 and values of width 4"):
        m(q, k, v[..., :4])
