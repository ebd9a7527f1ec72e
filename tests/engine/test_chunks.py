"""Passes over chunks of the sequence against the same function on whole tensors, forward and gradients.

Under a function transform every mechanism runs its plain form, whose gradient is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import catalogue
from fast_attention.engine import chunks, scan, trace
from fast_attention.mechanisms.dense import rows
from tests.cases import qkv, some_keys

LENGTHS = [1, 2, 63, 64, 65, 127, 129, 257, 1000]
SIGNED = [
    "LogAttention()",
    "LogAttention(score='sum')",
    "LogAttention(normalize='none')",
    "LogAttention(score='sum', normalize='none', feature_map=PositiveExp())",
    "LogAttention(feature_map=PositiveSoftplus(eps=0.0))",
    "Manhattan()",
    "Manhattan(normalize='none', feature_map=PositiveElu())",
    "Manhattan(query_dim=None, feature_map=PositiveSoftplus(eps=0.0))",
    "Manhattan(key_dim=1, feature_map=PositiveRelu())",
]
SORTED = [
    "Manhattan(distance='l1')",
    "Manhattan(distance='l1', normalize='l1', key_dim=1)",
    "Manhattan(distance='laplacian')",
    "Manhattan(distance='laplacian', normalize='l1', temperature=0.3)",
    "Manhattan(distance='laplacian', temperature=0.001)",
]
RELUS = ["ReLUAttention()", "ReLUAttention(norm='length', power=2)", "ReLUAttention(norm='none')"]


def same_as_plain(call: Callable[..., Tensor], inputs: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    """Outputs and all gradients of both forms, and of one input alone."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out = call(*leaves)
    g = torch.randn_like(out)
    expected, pull = torch.func.vjp(call, *inputs)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    found, grads = torch.autograd.grad(out, leaves, g, allow_unused=True, materialize_grads=True), pull(g)
    for mine, theirs in zip(found, grads, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine / scale, theirs / scale, rtol=tolerance, atol=tolerance)
    (alone,) = torch.autograd.grad(call(*inputs[:-1], leaves[-1]), leaves[-1], g)
    torch.testing.assert_close(alone, found[-1], rtol=tolerance, atol=tolerance)


def masked(n: int, mask: bool) -> Tensor | None:
    seen = some_keys(2, n) if mask else None
    if seen is not None and n > 3:
        seen[0, :3] = False
    return seen


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SIGNED)
def test_chunks_equal_the_plain_form(name: str, is_causal: bool, mask: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(chunks, "NUMBERS", 1)
    m: Any = catalogue.parse(name)
    for n in LENGTHS:
        q, k, v = qkv(n, scale=2.0)
        k = k.mT.contiguous().mT  # strides of their own
        seen = masked(n, mask)

        def call(*x: Tensor, seen: Tensor | None = seen) -> Tensor:
            return m(*x, is_causal=is_causal, key_mask=seen)

        same_as_plain(call, (q, k, v))
        if "query_dim" not in name:
            same_as_plain(call, (q[..., :1], k[..., :1], v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_of_other_sizes(is_causal: bool, monkeypatch: Any) -> None:
    """Fewer keys than queries and more, values of another width, no batch axis, more than one."""
    monkeypatch.setattr(chunks, "NUMBERS", 1)
    for name, sizes in (
        ("LogAttention(score='sum')", ((130, 300), (300, 130))),
        ("Manhattan(key_dim=1)", ((300, 300),)),
    ):
        m: Any = catalogue.parse(name)
        for length, keys in sizes:
            q, k, v = qkv(length, keys)
            for x in ((q, k, v[..., :5]), (q[0], k[0], v[0]), (q[:, None], k[:, None], v[:, None])):
                same_as_plain(lambda *y, m=m: m(*y, is_causal=is_causal), x)


@pytest.mark.parametrize("name", ["LogAttention()", "Manhattan(feature_map=PositiveExp())", "Manhattan()"])
def test_chunks_at_any_scale(name: str, monkeypatch: Any) -> None:
    """Finite in float32 for inputs 100 times as large; the path is the one that explains itself."""
    monkeypatch.setattr(chunks, "NUMBERS", 1)
    m: Any = catalogue.parse(name)
    for is_causal in (False, True):
        x = [(100 * y.float()).requires_grad_() for y in qkv(300)]
        with trace.recorded() as steps:
            out = m(*x, is_causal=is_causal)
        assert any("chunk by chunk" in step.path and step.sizes == {"chunk": 128} for step in steps)
        out.sum().backward()
        assert bool(out.isfinite().all())
        assert all(bool(y.grad.isfinite().all()) for y in x if y.grad is not None)


@pytest.mark.parametrize("width", [1, 3, 200])
def test_prefix_sums_and_maxima(width: int) -> None:
    for n in (*LENGTHS, 4099):
        x = torch.randn(2, 3, n, width, dtype=torch.float64, requires_grad=True)
        g = torch.randn_like(x)
        y = scan.prefix_sums(x)
        torch.testing.assert_close(y, x.cumsum(-2), rtol=1e-12, atol=1e-12)
        (found,) = torch.autograd.grad(y, x, g)
        torch.testing.assert_close(found, g.flip(-2).cumsum(-2).flip(-2), rtol=1e-12, atol=1e-12)
        assert torch.equal(scan.running_max(x), x.cummax(-2).values)


def test_long_sums_keep_their_digits() -> None:
    """A quarter of a million terms in float32: less than 1e-6 of every prefix sum is lost."""
    x = torch.rand(1, 1, 1 << 18, 8)
    exact = x.double().cumsum(-2)
    assert float(((scan.prefix_sums(x) - exact) / exact).abs().max()) < 1e-6
    m: Any = catalogue.parse("LogAttention()")
    low, high = (m(y, y, y, is_causal=True) for y in (x, x.double()))
    assert float(((low - high) / high).abs().max()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", SORTED)
def test_sorted_passes_equal_the_plain_form(name: str, mask: bool) -> None:
    m: Any = catalogue.parse(name)
    for n in (2, 64, 129, 400):
        seen = masked(n, mask)
        for is_causal in (False, True):
            same_as_plain(lambda *x, c=is_causal, s=seen: m(*x, is_causal=c, key_mask=s), qkv(n), 1e-9)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", RELUS)
def test_relu_by_rows_equals_the_plain_form(name: str, mask: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(rows, "BLOCK", 1 << 10)
    monkeypatch.setattr(rows, "ROWS", 16)
    m: Any = catalogue.parse(name)
    for length, keys in ((2, 2), (15, 17), (64, 64), (129, 65), (65, 129), (200, 200)):
        seen = masked(keys, mask)
        for is_causal in (False, True):
            q, k, v = qkv(length, keys, heads=3)
            same_as_plain(lambda *x, c=is_causal, s=seen: m(*x, is_causal=c, key_mask=s), (q, k, v[..., :5]))
