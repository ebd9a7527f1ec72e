"""LogAttention and Manhattan by kernels in Triton's interpreter: oracle, gradients, masks, sums as states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast_attention.gpu import channels
from fast_attention.gpu.summing import operations, plain
from fast_attention.gpu.summing.plain import COUNT, NOTHING, SCORES
from tests.gpu.heads import KINDS, assert_near, double

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Several chunks of few tokens: a tile takes Triton's interpreter milliseconds."""
    if device.type == "cpu":
        monkeypatch.setattr(channels, "SHORTEST", 16)


def tensors(
    width: int, length: int, dtype: torch.dtype = torch.float32, kinds: tuple[int, int] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Scores of queries and keys, values as heads of a projection lie in memory, and a mask that hides a fifth."""
    wide = kinds or (width, width)
    q, k = (torch.rand(1, 2, length, n).requires_grad_() for n in wide)
    v = torch.randn(1, length, 2, width).transpose(1, 2).to(dtype).requires_grad_()
    return [q, k, v], torch.rand(1, 1, length) > 0.2


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores as wide as values."""
    return q.expand(*q.shape[:-1], v.shape[-1]), k.expand(*k.shape[:-1], v.shape[-1]), v


def first_sums(width: int) -> Tensor:
    """Of three keys."""
    sums = [torch.rand(1, 2, width) for _ in range(3)]
    return torch.cat([*sums, torch.full((1, 2, width), 3.0)], -1).requires_grad_()


@pytest.mark.parametrize(
    ("sizes", "masked", "divisor", "kinds"),
    [
        ((5, 16), False, SCORES, (5, 5)), ((70, 37), True, SCORES, (70, 70)), ((3, 33), True, SCORES, (1, 3)),
        ((3, 33), False, NOTHING, (3, 1)), ((8, 50), True, NOTHING, (8, 8)), ((8, 50), True, COUNT, (1, 1)),
        ((1, 17), False, COUNT, (1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_every_configuration(sizes: tuple[int, int], masked: bool, divisor: int, kinds: tuple[int, int]) -> None:
    agree(sizes, torch.float32, masked, divisor, kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    agree((20, 40), dtype, True, SCORES, (20, 20))


def agree(
    sizes: tuple[int, int], dtype: torch.dtype, masked: bool, divisor: int, kinds: tuple[int, int]
) -> None:  # fmt: skip
    """Outputs, sums and gradients are those of the plain form in float64, behind first sums too."""
    x, mask = tensors(*sizes, dtype=dtype, kinds=kinds)
    first, mask = first_sums(sizes[0]), mask if masked else None
    given, twins = [*x, first], double(*x, first)
    results, expected = [], []
    for form, to, kind in ((operations, results, dtype), (plain, expected, torch.float64)):
        q, k, v, one = given if to is results else twins
        q, k, v = spread(q, k, v)
        names = ("score_scan", "score_sums", "score_read") if form is operations else ("scan", "sums", "read")
        scan, sums, read = (getattr(form, name) for name in names)
        to += scan(q, k, v, mask, one, None, divisor, kind)
        state = sums(k, v, mask)
        to += [state, read(q, state, divisor, kind)]
    for mine, right in zip(results, expected, strict=True):
        assert_near(mine, right, KINDS[mine.dtype])
    grads = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, given, grads)
    right = torch.autograd.grad(expected, twins, [g.double() for g in grads])
    for mine, theirs in zip(found, right, strict=True):
        assert_near(mine, theirs, 2 * KINDS[mine.dtype])
