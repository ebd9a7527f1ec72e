"""What tests of kernels share: heads as they lie in memory, twins in float64, and how near is near enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library

from fast_attention.engine.node import arguments
from fast_attention.engine.operation import Operation
from fast_attention.gpu import flex

KINDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}  # errors, of the largest number


def tensors(
    width: int, values: int, length: int, keys: int | None = None, dtype: torch.dtype = torch.float32, *,
    batch: int = 1, heads: int = 1,
) -> Any:  # fmt: skip
    """Queries as heads of a projection lie in memory, keys, values, and a mask that hides a fifth."""
    keys = length if keys is None else keys
    q = torch.randn(batch, length, heads, width).transpose(1, 2)
    k, v = torch.randn(batch, heads, keys, width), torch.randn(batch, heads, keys, values)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], torch.rand(batch, 1, keys) > 0.2


def by_torchs_rules(kernels: Operation, tensors: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    """Whether what a compiler has of kernels keeps torch's rules for operations."""
    told = library.opcheck(kernels._node.operation, arguments(tensors, settings))
    return {*told.values()} == {"SUCCESS"}


def double(*given: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in given]


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach()
    assert float((found - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


def softmax_of_pairs(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, return_aux: Any = None
) -> Any:
    """FlexAttention's function, pair by pair, with gradients on a CPU too."""
    b, h = (torch.arange(n).view(-1, *[1] * m) for n, m in ((len(q), 3), (q.shape[1], 2)))
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    visible = block_mask.mask_mod(b, h, i, j)
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores, nothing = scores.masked_fill(~visible, float("-inf")), ~visible.any(-1)
    logs = scores.masked_fill(nothing[..., None], 0.0).logsumexp(-1).masked_fill(nothing, float("-inf"))
    weights = (scores - logs.masked_fill(nothing, 0.0)[..., None]).exp()
    out = (weights @ v.float()).to(q.dtype)
    return out if return_aux is None else (out, type("Aux", (), {"lse": logs}))


def flex_by_pairs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Let ``softmax_of_pairs`` stand for FlexAttention on a CPU, for short sequences too."""
    monkeypatch.setattr(flex, "_kinds", set())
    if device.type == "cpu":
        monkeypatch.setattr(flex, "SHORTEST", 64)
        monkeypatch.setattr(flex, "compiled", lambda: softmax_of_pairs)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all fresh memory hold NaN."""

    def filled(taken: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*given: Any, **named: Any) -> Tensor:
            x = taken(*given, **named)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
