"""Kernelised attention: the primitive, feature maps, and what LinearAttention, Favor and FavorPlus share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import LinearAttention
from fast_attention.engine.decay import GROUP, state_sums
from fast_attention.engine.scan import FLOOR
from fast_attention.feature_maps.features import (
    DPFP,
    Custom,
    EluPlusOne,
    Exp,
    FeatureMap,
    Features,
    Identity,
    Quadratic,
    Relu,
    SoftmaxMap,
    Taylor,
)
from fast_attention.functional import linear_attention
from fast_attention.mechanisms.linear import linear_state, reference
from tests.cases import bind, qkv, some_keys

MAPS = [EluPlusOne(), Relu(), Relu(offset=1e-3), Identity(), SoftmaxMap(), Exp(), Quadratic(), Taylor(), DPFP(nu=2)]
MECHANISMS = [
    "LinearAttention()",
    "LinearAttention(feature_map=Exp())",
    "LinearAttention(feature_map=Quadratic())",
    "Favor(num_features=64)",
    "Favor(num_features=64, features='phase', clamp=0.3)",
    "FavorPlus(num_features=32)",
    "FavorPlus(num_features=16, features='hyperbolic')",
    "FavorPlusPlus(num_features=16)",
    "FavorPlus(num_features=32, kernel=Relu())",
    "FavorPlus(num_features=32, kernel=Exp(), kernel_epsilon=0.01)",
]
POSITIVE = [m for m in MECHANISMS if not m.startswith("Favor(")]


def masked_product(q: Tensor, keys: Features, v: Tensor, is_causal: bool) -> Tensor:
    """The definition: all pairs, in units of the largest scale that a query sees."""
    seen = torch.ones(q.shape[-2], v.shape[-2], dtype=torch.bool)
    seen = seen.tril(v.shape[-2] - q.shape[-2]) if is_causal else seen
    scores = torch.where(seen, q @ keys.values.mT, 0.0)
    if keys.log_scale is not None:
        scale = torch.where(seen, keys.log_scale[..., None, :], -math.inf)
        scores = scores * (scale - scale.amax(-1, keepdim=True).clamp(min=FLOOR)).exp()
    total = scores.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, scores @ v / torch.where(total == 0, 1.0, total))


def features(length: int, keys: int, *, spread: float | None, dtype: Any = torch.float64) -> tuple[Tensor, ...]:
    q, k = torch.rand(2, length, 6, dtype=dtype), torch.rand(2, keys, 6, dtype=dtype)
    log_scale = None if spread is None else spread * torch.randn(2, keys, dtype=dtype)
    return q, Features(k, log_scale), torch.randn(2, keys, 3, dtype=dtype)  # type: ignore[return-value]


@pytest.mark.parametrize("spread", [None, 1.0, 1e3, 1e5])
@pytest.mark.parametrize("chunk", [1, 7, 16, 128])
def test_chunked_is_parallel(chunk: int, spread: float | None) -> None:
    """Identity 7 of the specification; with chunk 1 and 1100 tokens the states are combined in two rounds."""
    for length in (1, 5, 67) if chunk > 1 else (67, GROUP, GROUP + 1, 1100):
        q, keys, v = features(length, length, spread=spread)
        sums, state = reference.advance(q, keys, v, chunk=chunk)
        torch.testing.assert_close(
            linear_state.normalise(sums), masked_product(q, keys, v, True), rtol=1e-11, atol=1e-11
        )
        whole = linear_state.summarise(keys, v)
        for ours, direct in zip(state, whole, strict=True):
            torch.testing.assert_close(ours, direct, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("spread", [None, 30.0])
@pytest.mark.parametrize("sizes", [(9, 9), (4, 9), (9, 4), (1, 9), (9, 1)])
def test_alignment(sizes: tuple[int, int], spread: float | None) -> None:
    q, keys, v = features(*sizes, spread=spread)
    for is_causal, chunk in ((False, 4), (True, 4), (True, None)):
        ours = linear_state.normalise(reference.attend(q, keys, v, is_causal=is_causal, chunk=chunk))
        torch.testing.assert_close(ours, masked_product(q, keys, v, is_causal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [reference.CHUNK + 1, reference.SHORT + 1])
def test_as_many_features_as_tokens_are_one_product(length: int) -> None:
    """Up to ``SHORT`` tokens; the numbers and gradients are those of chunks."""
    q, v = torch.randn(length, 300, dtype=torch.float64), torch.randn(length, 3, dtype=torch.float64)
    leaves = [x.exp().requires_grad_() for x in (q, torch.randn_like(q), v)]
    keys, found = Features(leaves[1], 9.0 * torch.randn(length, dtype=torch.float64)), []
    for chunk in (None, 16):
        out = linear_state.normalise(reference.attend(leaves[0], keys, leaves[2], is_causal=True, chunk=chunk))
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("level", [None, 3.0, 1e6])
@pytest.mark.parametrize("count", [1, GROUP, GROUP + 1, 3 * GROUP, GROUP * GROUP + 5])
def test_state_sums(count: int, level: float | None) -> None:
    x = torch.randn(count, 4, dtype=torch.float64, requires_grad=True)
    levels = None if level is None else (level * torch.rand(count, dtype=torch.float64)).cumsum(0) - 5 * level
    rows, total = [], torch.zeros(4, dtype=torch.float64)
    for i in range(count):
        fade = 1.0 if levels is None or i == 0 else (levels[i - 1] - levels[i]).exp()
        total = fade * total + x[i]
        rows.append(total)
    ours = state_sums(x, levels)
    torch.testing.assert_close(ours, torch.stack(rows), rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(ours)
    mine, theirs = (torch.autograd.grad((y * probe).sum(), x)[0] for y in (ours, torch.stack(rows)))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("constant", [-1e5, 1e5])
def test_units_are_those_of_the_keys_seen(constant: float) -> None:
    """A common scale cancels (identity 8): neither masked keys nor the padding of a block set a unit."""
    q, keys, v = features(150, 150, spread=1.0)
    key_mask = torch.rand(2, 150) > 0.4
    results = []
    for added in (0.0, constant):
        scale = keys.log_scale + added * key_mask
        every = reference.masked_keys(lambda k: Features(k, scale), keys.values, key_mask)
        outs, state = [], None
        for now in (slice(0, 100), slice(100, 150)):
            stretch = Features(every.values[:, now], every.log_scale[:, now])
            sums, state = reference.advance(q[:, now], stretch, v[:, now], state, chunk=64)
            outs.append(linear_state.normalise(sums))
        whole = reference.attend(q, every, v, is_causal=False)
        results.append([*outs, linear_state.normalise(whole)])
    for near, far in zip(*results, strict=True):
        torch.testing.assert_close(far, near, rtol=1e-9, atol=1e-9)
        assert near.any(-1).all(-1).any()


@pytest.mark.parametrize("factor", [6.0, 300.0, 1e6])
def test_a_huge_key_leaves_the_rest_of_its_block(factor: float) -> None:
    """Causal in value, not only in dependence: nothing before it underflows, to the last bit, in float32."""
    q, keys, v = features(100, 100, spread=1.0, dtype=torch.float32)
    for place in (0, 40, 99):
        scale = keys.log_scale.clone()
        scale[:, place] += factor
        sums, _ = reference.advance(q, Features(keys.values, scale), v, chunk=64)
        same, _ = reference.advance(q, keys, v, chunk=64)
        assert torch.equal(linear_state.normalise(sums)[:, :place], linear_state.normalise(same)[:, :place])
        exact = masked_product(q.double(), Features(keys.values.double(), scale.double()), v.double(), True)
        torch.testing.assert_close(linear_state.normalise(sums).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
def test_features_are_the_call(feature_map: FeatureMap) -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found = feature_map.features(x)
    values, log_scale = found if isinstance(found, Features) else (found.logs.exp(), None)
    scale = 1.0 if log_scale is None else log_scale[..., None].exp()
    torch.testing.assert_close(values * scale, feature_map(x))


def test_polynomial_maps_are_their_kernels() -> None:
    """Identity 7: degree-2 and Taylor features; the Taylor kernel is at least 1/2."""
    x, y = torch.randn(2, 50, 8, dtype=torch.float64).mul(3)
    s = x @ y.T / math.sqrt(8)
    torch.testing.assert_close(Quadratic()(x) @ Quadratic()(y).T, (1 + s) ** 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Taylor()(x) @ Taylor()(y).T, 1 + s + s**2 / 2, rtol=1e-12, atol=1e-12)
    assert Quadratic()(x).shape[-1] == Taylor()(x).shape[-1] == 1 + 8 + 64
    assert (Taylor()(x) @ Taylor()(y).T).min() >= 0.5 - 1e-12


def test_products_of_neighbours() -> None:
    """Worked by hand; with all products of two numbers, different signs are orthogonal; too many are refused."""
    x = torch.tensor([[2.0, -3.0, 5.0]], dtype=torch.float64)  # halves [2, 0, 5, 0, 3, 0]
    torch.testing.assert_close(DPFP()(x), torch.zeros(1, 6, dtype=torch.float64))
    second = [10.0, 0.0, 15.0, 0.0, 6.0, 0.0]  # 2 * 5, 5 * 3 and, around the end, 3 * 2
    assert DPFP(nu=2)(x)[0].tolist() in ([0.0] * 6 + second, [0.0] * 6 + second[4:] + second[:4])
    signs = torch.tensor([[a, b] for a in (-1.0, 1.0) for b in (-1.0, 1.0)])
    gram = DPFP(nu=3)(signs) @ DPFP(nu=3)(signs).T
    assert torch.equal(gram, gram.diagonal().diag())
    assert (gram.diagonal() > 0).all()
    with pytest.raises(ValueError, match="nu must be less than twice the width"):
        DPFP(nu=4)(signs)


def test_identity_is_normalised_dot_products() -> None:
    """And softmax(log(q . k)) on positive inputs, which is the same (identity 4)."""
    q, k, v = (torch.rand(1, 1, 9, 8, dtype=torch.float64) + 0.1 for _ in range(3))
    ours = linear_attention(q, k, v, feature_map=Identity(), eps=0.0)
    torch.testing.assert_close(ours, (q @ k.mT).log().softmax(-1) @ v)


def test_elu_is_nearly_uniform() -> None:
    """The regression number of section 3: entropy 6.233 nats of log 512 = 6.238 where softmax has 5.756."""
    q, k = torch.randn(2, 512, 64, dtype=torch.float64)
    eye = torch.eye(512, dtype=torch.float64)
    A = linear_attention(q[None], k[None], eye[None], eps=0.0)
    softmax = (q @ k.T / 8).softmax(-1)
    entropy, exact = (-(a * a.log()).sum(-1).mean().item() for a in (A, softmax))
    assert abs(entropy - 6.233) < 0.002
    assert abs(exact - 5.756) < 0.03


def test_plain_functions_are_wrapped() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x.relu() + 0.5

    q, k, v = qkv(7)
    mechanism = LinearAttention(shifted)
    assert mechanism.feature_map == Custom(shifted)
    assert mechanism == LinearAttention(feature_map=Custom(shifted))
    assert hash(mechanism) == hash(LinearAttention(shifted))
    assert "shifted" in repr(mechanism)
    assert "Custom(torch" in repr(LinearAttention(torch.sigmoid))
    expected = LinearAttention(Relu(offset=0.5))(q, k, v, is_causal=True)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=True), expected)
    for wrong in (3, "EluPlusOne", None):
        with pytest.raises(ValueError, match="must be a feature map such as"):
            LinearAttention(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Relu is a class: write Relu\(\)"):
        LinearAttention(Relu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        LinearAttention(eps=-1.0)
    with pytest.raises(ValueError, match="at least 0"):
        Relu(offset=-1.0)
    with pytest.raises(ValueError, match="callable"):
        Custom(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", MECHANISMS)
def test_any_split_decodes_as_one_pass(text: str, device: torch.device) -> None:
    """Identity 20; 150 tokens span two blocks."""
    bound = bind(text, device=device)
    q, k, v = qkv(150, device=device)
    for key_mask in (None, some_keys(2, 150, device)):
        whole = bound(q, k, v, is_causal=True, key_mask=key_mask)
        for sizes in ([150], [1] * 20 + [130], [149, 1], [3, 64, 83]):
            state, parts = None, []
            for now in torch.arange(150).split(sizes):
                now = slice(int(now[0]), int(now[-1]) + 1)
                seen = None if key_mask is None else key_mask[:, now]
                part, state = bound.decode(q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=seen)
                parts.append(part)
            torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", MECHANISMS)
def test_low_precision(text: str, dtype: torch.dtype, device: torch.device) -> None:
    """Against float64 on the same rounded inputs: one rounding of the result, no more (section 5.2 of reliability)."""
    inputs = [x.to(dtype) for x in qkv(70, device=device, dtype=torch.float32, scale=0.5)]
    bound = bind(text, device=device)
    for is_causal in (False, True):
        exact = bound(*(x.double() for x in inputs), is_causal=is_causal)
        ours = bind(text, device=device).to(torch.float32)(*inputs, is_causal=is_causal)
        assert ours.dtype == dtype
        error = (ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < torch.finfo(dtype).eps / 2
    out, state = bound.float().decode(*inputs)
    assert out.dtype == dtype
    summed = bound.mechanism.summarise(inputs[1], inputs[2], bound.w)
    assert {part.dtype for part in (*state.content, *summed.content)} == {torch.float32}
    with torch.autocast(device.type, dtype=dtype):
        cast = bound(*(x.float() for x in inputs), is_causal=True)
    torch.testing.assert_close(cast.double(), exact, rtol=2e-2, atol=2e-2)


def test_half_precision_sums_do_not_overflow(device: torch.device) -> None:
    q, k, v = (torch.full((1, 1, 4096, 8), 8.0, dtype=torch.float16, device=device) for _ in range(3))
    for is_causal in (False, True):
        out = linear_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(out, v)


@pytest.mark.parametrize("text", MECHANISMS)
def test_masked_keys_are_inert_and_empty_rows_zero(text: str, device: torch.device) -> None:
    """Whatever finite values they hold, for outputs and gradients; padding equals a shorter sequence."""
    bound = bind(text, device=device).float()
    q, k, v = qkv(150, device=device, dtype=torch.float32)
    key_mask = torch.ones(2, 150, dtype=torch.bool, device=device)
    key_mask[0, 139:] = key_mask[0, :3] = key_mask[1] = False
    for is_causal in (False, True):
        results = []
        for garbage in (0.0, 1e30):
            inputs = [x.clone() for x in (q, k, v)]
            for x in inputs[1:]:
                x.masked_fill_(~key_mask[:, None, :, None], garbage)
            leaves = [x.requires_grad_() for x in inputs]
            out = bound(*leaves, is_causal=is_causal, key_mask=key_mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean, dirty)
            assert clean.isfinite().all()
        out = results[0][0]
        assert not out[1].any()
        if is_causal:
            assert not out[0, :, :3].any()
        shorter = bound(q[:1, :, 3:139], k[:1, :, 3:139], v[:1, :, 3:139], is_causal=is_causal)
        torch.testing.assert_close(out[:1, :, 3:139], shorter, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("scale", [30.0, 1e3, 1e4])
@pytest.mark.parametrize("text", MECHANISMS)
def test_extreme_inputs_stay_finite(text: str, scale: float, device: torch.device) -> None:
    bound = bind(text, device=device).float()
    q, k, v = qkv(140, device=device, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (scale * q, scale * k, v)]
    for is_causal in (False, True):
        out = bound(*leaves, is_causal=is_causal)
        assert out.isfinite().all()
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all()
        if text in POSITIVE:
            assert out.abs().max() <= leaves[2].abs().max() * 1.001, "not an average of values"


@pytest.mark.parametrize("factor", [6.0, 300.0])
@pytest.mark.parametrize("text", MECHANISMS)
def test_a_huge_key_moves_nothing_before_it(text: str, factor: float, device: torch.device) -> None:
    """Identity 9, in float32 and inside one block; the official scheme moves by 0.8."""
    bound = bind(text, device=device).float()
    q, k, v = qkv(100, device=device, dtype=torch.float32)
    before = bound(q, k, v, is_causal=True)
    for place in (99, 50, 1):
        longer = k.clone()
        longer[:, :, place] *= factor
        after = bound(q, longer, v, is_causal=True)
        torch.testing.assert_close(after[:, :, :place], before[:, :, :place], rtol=0, atol=1e-6)
        assert (after[:, :, place:] - before[:, :, place:]).abs().max() > 1e-3
