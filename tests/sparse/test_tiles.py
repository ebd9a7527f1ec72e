"""Local, BlockLocal and BigBird against the dense masked softmax: the reference in float64, the core in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import BigBird, BlockLocal, Local, core
from fast_attention.engine import tiles, trace
from tests.cases import bind
from tests.sparse.test_bigbird import pattern
from tests.sparse.test_local import near

SIZES = [(63, 63), (64, 64), (129, 129), (257, 257), (1000, 1000), (64, 200), (200, 64)]
VALUES = [
    Local(20), Local(128), Local((0, 3)), Local(20, dilation=3), BlockLocal(), BlockLocal(5, 2, 1),
    BlockLocal(150, 1, 0),
]  # fmt: skip


IN_TILES = "softmax in blocks" if core.unavailable() else f"{trace.CORE}: softmax in tiles"


def agree(run: Callable[..., Tensor], mask: Tensor, given: tuple[Tensor, ...], path: str = IN_TILES) -> None:
    """Outputs and gradients are those of the dense masked softmax in float64.

    Those of the reference up to its rounding; and those of float32, on ``path`` unless that is empty.
    """
    theirs = F.scaled_dot_product_attention(*given, mask)
    gradient = torch.randn_like(theirs)
    wanted = theirs, *torch.autograd.grad(theirs, given, gradient)
    single = tuple(x.detach().float().requires_grad_() for x in given)
    for inputs, tolerance in ((given, 1e-10), (single, 5e-6)):
        with trace.recorded() as steps:
            out = run(*inputs)
        if inputs is single and path:
            assert path in [step.path for step in steps]
        for a, b in zip((out, *torch.autograd.grad(out, inputs, gradient.to(out))), wanted, strict=True):
            assert a.shape == b.shape
            error, largest = (float(x.detach().abs().max()) for x in (a.double() - b, b))
            assert error <= tolerance * max(largest, 1.0)


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
            run = partial(m, is_causal=is_causal, key_mask=seen)
            agree(run, mask.expand(*lead, length, keys), tensors, path=IN_TILES if keys == 1000 else "")


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
            agree(partial(bound, is_causal=is_causal, key_mask=seen), mask, tensors)


@pytest.mark.parametrize("length", [160, 257])
def test_global_rows_inside_the_tiles(length: int) -> None:
    """Equal widths, and second derivatives of what the core gives."""
    torch.manual_seed(3)
    m = BigBird(block_size=16)
    bound, single = bind(m), bind(m, dtype=torch.float32)
    tensors = inputs((2, 2), length, length, values=8)
    agree(bound, pattern(m, bound, length, None, False), tensors)
    found = []
    for run, dtype in ((bound, torch.float64), (single, torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        first = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_the_path_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "leads", lambda dtype, is_causal: is_causal)
    q = torch.randn(1, 2, 300, 8)
    expected = {
        Local(299): "torch's fused kernel",
        BlockLocal(300): "torch's fused kernel",
        BigBird(): "torch's fused kernel",
        Local(9): IN_TILES,
        BigBird(block_size=8): IN_TILES,
        Local(290): IN_TILES,
    }
    for m, what in expected.items():
        with trace.recorded() as steps:
            bind(m, dtype=torch.float32)(q, q, q)
        assert [step.path for step in steps] == [what], m
