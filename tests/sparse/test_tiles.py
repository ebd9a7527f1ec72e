"""The tiles behind Local, BlockLocal and BigBird against the dense masked softmax, at the borders of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import BigBird, BlockLocal, Local
from fast_attention.engine import dispatch
from tests.cases import bind
from tests.sparse.test_bigbird import pattern
from tests.sparse.test_local import near

SIZES = [(63, 63), (64, 64), (129, 129), (257, 257), (1000, 1000), (64, 200), (200, 64)]
VALUES = [
    Local(20), Local(128), Local((0, 3)), Local(20, dilation=3), BlockLocal(), BlockLocal(5, 2, 1),
    BlockLocal(150, 1, 0),
]  # fmt: skip


def agree(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    gradient = torch.randn_like(theirs)
    found = [(ours, theirs)]
    found += zip(*(torch.autograd.grad(x, inputs, gradient) for x in (ours, theirs)), strict=True)
    for a, b in found:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def inputs(lead: tuple[int, ...], length: int, keys: int, *, values: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Queries stand as (batch, length, heads, width) in memory; values have their own width."""
    sizes = ((length, 8), (keys, 8), (keys, values))
    q, k, v = (torch.randn(*lead, *size, dtype=torch.float64) for size in sizes)
    return q.transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_(), k.requires_grad_(), v.requires_grad_()


def shown(batch: int, keys: int) -> torch.Tensor:
    """Some keys, the first among them: from there blocks are counted."""
    return (torch.rand(batch, keys) > 0.3) | (torch.arange(keys) == 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_bands(m: Any, is_causal: bool, masked: bool) -> None:
    torch.manual_seed(3)
    for length, keys in SIZES:
        for lead in ((2, 3), (1, 1)):  # heads as the batch of a tile, and stretches of one head
            tensors = inputs(lead, length, keys)
            seen = shown(lead[0], keys) if masked else None
            mask = near(m, length, keys, is_causal, "cpu")
            mask = mask if seen is None else mask & seen[:, None, None]
            dense = F.scaled_dot_product_attention(*tensors, mask.expand(*lead, length, keys))
            agree(m(*tensors, is_causal=is_causal, key_mask=seen), dense, tensors)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gathered_blocks(is_causal: bool, masked: bool) -> None:
    torch.manual_seed(3)
    for m in (BigBird(block_size=16), BigBird(block_size=16, num_global_blocks=1)):
        bound = bind(m)
        for length in (160, 257):
            tensors = inputs((2, 2), length, length)
            seen = shown(2, length) if masked else None
            mask = pattern(m, bound, length, seen, is_causal)
            agree(
                bound(*tensors, is_causal=is_causal, key_mask=seen),
                F.scaled_dot_product_attention(*tensors, mask), tensors,
            )  # fmt: skip


@pytest.mark.parametrize("length", [160, 257])
def test_global_rows_inside_the_tiles(length: int) -> None:
    """Equal widths, for which the fused kernel serves the global rows of the same pass; and second derivatives."""
    torch.manual_seed(3)
    m = BigBird(block_size=16)
    bound, (q, k, _) = bind(m), inputs((2, 2), length, length)
    tensors = q, k, torch.randn_like(k).requires_grad_()
    mask = pattern(m, bound, length, None, False)
    out = bound(*tensors)
    agree(out, F.scaled_dot_product_attention(*tensors, mask), tensors)
    again = torch.autograd.grad(bound(*tensors).sin().sum(), tensors, create_graph=True)
    for ours, theirs in zip(again, torch.autograd.grad(bound(*tensors).sin().sum(), tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert ours.requires_grad


def test_the_path_is_told() -> None:
    q = torch.randn(1, 2, 300, 8)
    expected = {
        Local(299): "torch's fused kernel",
        BlockLocal(300): "torch's fused kernel",
        BigBird(): "torch's fused kernel",
        Local(9): "softmax in tiles",
        BigBird(block_size=8): "softmax in tiles",
    }
    for m, what in expected.items():
        with dispatch.recorded() as steps:
            bind(m, dtype=torch.float32)(q, q, q)
        assert [step.path for step in steps] == [what], m


@pytest.mark.parametrize("masked", [False, True])
def test_windows_over_most_keys_are_a_mask(masked: bool) -> None:
    """Up to a third more keys than a tile reads, the fused kernel runs with the window as mask."""
    torch.manual_seed(3)
    for m, length, keys, is_causal in (
        (Local(100), 150, 150, True), (Local((30, 60)), 150, 180, False), (Local(20), 90, 66, False),
    ):  # fmt: skip
        tensors = inputs((2, 3), length, keys)
        seen = shown(2, keys) if masked else None
        mask = near(m, length, keys, is_causal, "cpu")
        mask = mask if seen is None else mask & seen[:, None, None]
        with dispatch.recorded() as steps:
            out = m(*tensors, is_causal=is_causal, key_mask=seen)
        assert steps[0].path == "exact attention with the window as mask"
        agree(out, F.scaled_dot_product_attention(*tensors, mask.expand(2, 3, length, keys)), tensors)
    with dispatch.recorded() as steps:
        Local(100)(*inputs((2, 3), 400, 400))
    assert [step.path for step in steps] == ["softmax in tiles"]
