"""Softmax and ReLU attention: the identities of mathematics section 13, items 1 to 3, and what masks do to each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import Attention, ReLUAttention, Softmax, catalogue, core
from fast_attention.counting import peak_bytes
from fast_attention.engine import tiles, trace
from fast_attention.engine.operation import HALVES
from fast_attention.functional import relu_attention, softmax_attention
from fast_attention.mechanisms.dense import relative
from tests.cases import qkv, some_keys

RELUS = [
    "ReLUAttention()",
    "ReLUAttention(norm='length')",
    "ReLUAttention(norm='none', power=2)",
    "ReLUAttention(eps=0.0)",
]
ALL = ["Softmax()", *RELUS]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def named(text: str) -> Any:
    mechanism = catalogue.parse(text)
    assert isinstance(mechanism, Attention)
    return mechanism


@pytest.mark.skipif(bool(core.unavailable()), reason=core.unavailable() or "it serves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("is_causal", "length", "runs"),
    [(True, 63, False), (True, 64, True), (True, 65, True), (True, 300, True), (False, 127, False), (False, 131, True)],
)
def test_softmax_runs_in_the_core(
    is_causal: bool, length: int, runs: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it leads; outputs and gradients are as near to float64's as those of torch's kernel."""
    monkeypatch.setattr(tiles, "leads", lambda dtype, is_causal: True)
    exact = [x.to(dtype).double().requires_grad_() for x in qkv(length)]
    inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
    for trains in (False, True):
        with trace.recorded() as steps, torch.set_grad_enabled(trains):
            Softmax()(*inputs, is_causal=is_causal)
        served = runs and (is_causal or not trains or dtype != torch.bfloat16)  # float16 is computed in float32
        assert steps[0].path.startswith("compiled core" if served else "torch's fused kernel")

    def results(attend: Any, given: list[Tensor]) -> list[Tensor]:
        out = attend(*given, is_causal=is_causal)
        return [out, *torch.autograd.grad(out.sin().sum(), given)]

    wanted = results(F.scaled_dot_product_attention, exact)
    theirs, ours = (results(each, inputs) for each in (F.scaled_dot_product_attention, Softmax()))
    for a, b, c in zip(wanted, theirs, ours, strict=True):
        assert (c - a).abs().max() <= 2 * (b - a).abs().max() + 1e-6 * a.abs().max()


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("name", "width"), [("AMD EPYC", 16), ("AMD EPYC", 8), ("Intel(R) Xeon(R)", 16), (None, 4)])
def test_torch_keeps_what_it_multiplies_faster(
    name: str | None, width: int, registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bits where it has tile registers, and all keys but where Intel's library is slow."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": registers, "cpu_name": name})
    monkeypatch.setattr(core, "native_width", lambda: width)
    for is_causal in (False, True):
        leads = is_causal or (name == "AMD EPYC" and width == 16)
        told = [tiles.leads.__wrapped__(x, is_causal=is_causal) for x in (torch.float64, torch.float32, *HALVES)]
        assert told == [False, leads, *(leads and not registers for _ in HALVES)]


def test_softmax_does_not_change_where_scores_shift(device: torch.device) -> None:
    """Item 1: a constant on a row of scores, K + 1 u^T, a joint permutation of keys and values."""
    q, k, v = qkv(9, 13, device=device)
    out = softmax_attention(q, k, v)
    close(softmax_attention(q, k, v, attn_mask=torch.randn(9, 1, device=device).expand(9, 13)), out)
    close(softmax_attention(q, k + torch.randn(8, dtype=k.dtype, device=device), v), out)
    order = torch.randperm(13)
    close(softmax_attention(q, k[:, :, order], v[:, :, order]), out)


@pytest.mark.parametrize("is_causal", [False, True])
def test_more_axes_before_the_heads_are_a_larger_batch(is_causal: Any) -> None:
    """In outputs, gradients and memory: torch's kernel of five axes holds all scores."""
    q, k, v = (x.float().unflatten(0, (2, 3)).requires_grad_() for x in qkv(33, batch=6))
    key_mask = torch.rand(2, 3, 33) < 0.5
    attn_mask = torch.rand(2, 1, 2, 33, 33) < 0.5
    for masks in ({}, {"key_mask": key_mask}, {"attn_mask": attn_mask}, {"key_mask": key_mask, "attn_mask": attn_mask}):
        outs = []
        for flat in (False, True):
            given = {
                name: mask.expand(2, 3, *mask.shape[2:]).flatten(0, 1) if flat else mask for name, mask in masks.items()
            }
            tokens = [x.flatten(0, 1) if flat else x for x in (q, k, v)]
            out = softmax_attention(*tokens, is_causal=is_causal, **given).view(q.shape)
            outs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for five, four in zip(*outs, strict=True):
            close(five, four, 0.0)
    long = torch.randn(2, 1, 2, 1024, 8)
    assert peak_bytes(lambda: softmax_attention(long, long, long, is_causal=is_causal)) < 1024 * 1024


def test_softmax_stays_in_the_convex_hull_of_the_values(device: torch.device) -> None:
    q, k, v = qkv(9, 13, device=device, scale=3.0)
    out = softmax_attention(q, k, v)
    assert bool((out <= v.amax(-2, keepdim=True) + 1e-12).all())
    assert bool((out >= v.amin(-2, keepdim=True) - 1e-12).all())


def test_the_lectures_column_form_is_the_row_form_with_scale_one(device: torch.device) -> None:
    """Item 2: tokens as columns, A = K^T Q, softmax over each column, O = V A' (Young and Shen 2024, section 2)."""
    q, k, v = qkv(7, device=device)
    Q, K, V = q.mT, k.mT, v.mT
    A = (K.mT @ Q).softmax(-2)
    close((V @ A).mT, Softmax(scale=1.0)(q, k, v))


@pytest.mark.parametrize("power", [1, 2])
def test_relu_does_not_change_with_the_length_of_a_query(power: Any, device: torch.device) -> None:
    """Item 3, first half: q -> c q leaves the sum-normalised form alone when eps = 0."""
    q, k, v = qkv(9, 13, device=device)
    for factor in (1e-3, 7.0, 1e3):
        close(relu_attention(factor * q, k, v, power=power, eps=0.0), relu_attention(q, k, v, power=power, eps=0.0))
    assert (relu_attention(7 * q, k, v, norm="none") - relu_attention(q, k, v, norm="none")).abs().max() > 0.1


@pytest.mark.parametrize("text", RELUS)
def test_relu_without_a_positive_score_gives_zeros(text: str, device: torch.device) -> None:
    """Item 3, second half, with finite gradients."""
    q, k, v = (x.abs().requires_grad_() for x in qkv(5, 7, device=device))
    out = named(text)(-q, k, v)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


def test_relu_rows_are_weights_and_mostly_nothing(device: torch.device) -> None:
    q, k, _ = qkv(64, device=device)
    eye = torch.eye(64, dtype=q.dtype, device=device).expand(2, 2, 64, 64)
    matrix = ReLUAttention(eps=0.0)(q, k, eye)
    close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    assert bool((matrix >= 0).all())
    assert 0.4 < (matrix == 0).double().mean() < 0.6


def test_relu_length_counts_the_keys_that_may_be_seen(device: torch.device) -> None:
    q, k, v = qkv(13, device=device)
    sums = relu_attention(q, k, v, norm="none", is_causal=True)
    counts = torch.arange(1, 14, dtype=v.dtype, device=device)[:, None]
    close(relu_attention(q, k, v, norm="length", is_causal=True), sums / counts)
    mask = some_keys(2, 13, device)
    sums = relu_attention(q, k, v, norm="none", key_mask=mask)
    close(relu_attention(q, k, v, norm="length", key_mask=mask), sums / mask.sum(-1)[:, None, None, None])


@pytest.mark.parametrize("text", ALL)
def test_masks_remove_and_biases_add(text: str, device: torch.device) -> None:
    """A boolean mask, -inf, and a key mask remove alike; a finite bias is added to the scores."""
    mechanism, (q, k, v) = named(text), qkv(6, 11, device=device)
    keep = some_keys(1, 11, device)[0]
    removed = mechanism(q, k, v, attn_mask=keep.expand(6, 11))
    close(mechanism(q, k, v, attn_mask=torch.zeros(6, 11, device=device).masked_fill(~keep, float("-inf"))), removed)
    close(mechanism(q, k, v, key_mask=keep.expand(2, 11)), removed)
    bias = torch.randn(2, 1, 6, 11, dtype=q.dtype, device=device)
    scores = q @ k.mT / 8**0.5 + bias
    if text == "Softmax()":
        close(mechanism(q, k, v, attn_mask=bias), scores.softmax(-1) @ v)
    else:
        weights = scores.relu() ** mechanism.power
        norm = {"sum": weights.sum(-1, keepdim=True) + mechanism.eps, "length": 11, "none": 1}[mechanism.norm]
        close(mechanism(q, k, v, attn_mask=bias), weights / norm @ v)
    both = mechanism(q, k, v, attn_mask=keep.expand(6, 11), is_causal=True)
    close(both, mechanism(q, k, v, key_mask=keep.expand(2, 11), is_causal=True))


@pytest.mark.parametrize("text", ALL)
def test_dropout_keeps_the_mean(text: str, device: torch.device) -> None:
    mechanism, (q, k, v) = named(text), qkv(8, 16, device=device)
    out = mechanism(q, k, v)
    drawn = torch.stack([mechanism(q, k, v, dropout=0.3) for _ in range(600)])
    assert not torch.equal(drawn[0], drawn[1])
    error = (drawn.mean(0) - out).abs() / (drawn.std(0) / 600**0.5 + 1e-12)
    assert error.mean() < 1.2, "mean of |z| is 0.8 where the mean is kept"


@pytest.mark.parametrize("settings", [{"norm": "mean"}, {"power": 3}, {"eps": -1.0}])
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"ReLUAttention\({next(iter(settings))}="):
        ReLUAttention(**settings)


@pytest.mark.parametrize(("length", "keys"), [(600, 600), (513, 700), (700, 513), (1, 600)])
def test_long_masked_softmax_is_the_definition(
    length: int, keys: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of queries, forward and backward, against all scores at once; rows that see nothing give zeros."""
    monkeypatch.setattr(relative, "SCORES", 1 << 18)
    q, k, v = (x.requires_grad_() for x in qkv(length, keys, device=device))
    mask = some_keys(2, keys, device)
    mask[0, :7] = False
    for is_causal in (False, True):
        for seen in (mask, torch.ones_like(mask), torch.zeros_like(mask)):
            hidden = ~seen[:, None, None, :]
            if is_causal:
                hidden = hidden | torch.ones(length, keys, dtype=torch.bool, device=device).triu(keys - length + 1)
            scores = (q @ k.mT * 0.3).masked_fill(hidden, float("-inf"))
            empty = hidden.all(-1, keepdim=True)
            expected = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v
            out = softmax_attention(q, k, v, is_causal=is_causal, key_mask=seen, scale=0.3)
            close(out, expected, 1e-10)
            slope = torch.randn_like(out)
            grads = [torch.autograd.grad(y, (q, k, v), slope) for y in (out, expected)]
            for a, b in zip(*grads, strict=True):
                close(a, b, 1e-10)
            single = [x.detach().float().requires_grad_() for x in (q, k, v)]  # in the core, where there is one
            out = softmax_attention(*single, is_causal=is_causal, key_mask=seen, scale=0.3)
            close(out.double(), expected, 1e-5)
            for a, b in zip(torch.autograd.grad(out, single, slope.float()), grads[1], strict=True):
                close(a.double(), b, 1e-4)


def test_softmax_in_float16_is_softmax_in_float32_rounded() -> None:
    q, k, v = (x.half() for x in qkv(70, scale=3.0))
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": torch.randn(70, 70).half()}):
        low: Any = kwargs
        wide = {name: x.float() if isinstance(x, Tensor) else x for name, x in low.items()}
        expected = softmax_attention(q.float(), k.float(), v.float(), **wide)
        assert torch.equal(softmax_attention(q, k, v, **low), expected.half())
