"""Windows and blocks of a grid against the dense masked softmax, Swin as its paper does it, and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import BlockLocal2d, Local2d, Unsupported, catalogue
from fast_attention.functional import implementation
from tests.cases import qkv
from tests.oracles.local2d import block_of, pair_of, window_of
from tests.sparse.test_tiles import agree, inputs, shown

GRIDS = [
    (Local2d(30, 26, window=3), 780),
    (Local2d(17, 41, window=(5, 3), num_prefix_tokens=5), 702),
    (Local2d(width=19, window=3, dilation=(2, 3)), 631),
    (Local2d(width=100, window=(1, 3), num_prefix_tokens=1), 450),
    (Local2d(width=3, window=5, dilation=(4, 1)), 700),
    (BlockLocal2d(28, 35), 980),
    (BlockLocal2d(24, 24, block_size=8, shift=4), 576),
    (BlockLocal2d(width=31, block_size=(2, 9), shift=(1, 3), num_prefix_tokens=2), 1000),
    (BlockLocal2d(width=20, block_size=(20, 4), shift=(17, 2)), 595),
]


def visible_keys(m: Any, length: int) -> Tensor:
    """Which keys the oracle lets every query see (length, length)."""
    prefix, mask = m.num_prefix_tokens, torch.zeros(length, length, dtype=torch.bool)
    height = -(-(length - prefix) // m.width)
    rule, wide, how = (window_of, m.window, m.dilation) if isinstance(m, Local2d) else (block_of, m.block_size, m.shift)
    grid = torch.zeros(height, m.width, height, m.width, dtype=torch.bool)
    for row in range(height):
        rows = torch.tensor(rule(row, height, pair_of(wide)[0], pair_of(how)[0]))
        for column in range(m.width):
            columns = torch.tensor(rule(column, m.width, pair_of(wide)[1], pair_of(how)[1]))
            grid[row, column, rows[:, None], columns] = True
    mask[prefix:, prefix:] = grid.flatten(2, 3).flatten(0, 1)[: length - prefix, : length - prefix]
    mask[:prefix], mask[:, :prefix] = True, True
    return mask


@pytest.mark.parametrize(("m", "length"), GRIDS, ids=repr)
def test_the_dense_masked_softmax(m: Any, length: int) -> None:
    """Outputs and gradients, with and without a mask of keys, many heads and one; the core's and the reference's."""
    torch.manual_seed(3)
    mask = visible_keys(m, length)
    for lead, masked, values in (((2, 3), True, 5), ((1, 1), False, 5), ((1, 18), False, 8)):
        tensors = inputs(lead, length, length, values=values)
        keys = shown(lead[0], length) if masked else None
        visible = (mask if keys is None else mask & keys[:, None, None]).expand(*lead, length, length)
        agree(partial(m, key_mask=keys), visible, tensors)
        if masked:
            with implementation("reference"):
                agree(partial(m, key_mask=keys), visible, tensors, path="softmax in blocks")


def test_a_window_over_the_whole_grid_is_exact_attention() -> None:
    q, k, v = inputs((2, 3), 49, 49)
    torch.testing.assert_close(Local2d(7, 7)(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("shift", [0, 3])
def test_swin_rolls_the_image_and_masks_what_did_not_meet(shift: int) -> None:
    """The paper's cyclic shift: blocks of the rolled image, in which only tokens of the same part see each other."""
    torch.manual_seed(3)
    side, size = 28, 7
    q, k, v = qkv(side * side)
    part = torch.zeros(side, dtype=torch.long)
    if shift:
        part[-size:-shift], part[-shift:] = 1, 2
    parts = (part[:, None] * 3 + part).flatten()

    def blocks(x: Tensor) -> Tensor:
        x = x.unflatten(-2, (side // size, size, side // size, size)).transpose(-4, -3)
        return x.flatten(-3, -2).flatten(-4, -3)

    rolled = (x.unflatten(-2, (side, side)).roll((-shift, -shift), (-3, -2)).flatten(-3, -2) for x in (q, k, v))
    q2, k2, v2 = (blocks(x) for x in rolled)
    same = blocks(parts[:, None])[..., 0]
    out = F.scaled_dot_product_attention(q2, k2, v2, (same[:, :, None] == same[:, None]).expand(2, 2, -1, -1, -1))
    out = out.unflatten(-3, (side // size, side // size)).unflatten(-2, (size, size)).transpose(-4, -3)
    out = out.flatten(-5, -4).flatten(-3, -2).roll((shift, shift), (-3, -2)).flatten(-3, -2)
    torch.testing.assert_close(BlockLocal2d(side, side, shift=shift)(q, k, v), out)


def test_second_derivatives_and_low_precision() -> None:
    torch.manual_seed(3)
    m, tensors = Local2d(20, 12, window=3, num_prefix_tokens=1), inputs((1, 2), 241, 241)
    q, k, v = (x.bfloat16() for x in tensors)
    ours = torch.autograd.grad(m(*tensors).sin().sum(), tensors, create_graph=True)
    mask = visible_keys(m, 241).expand(1, 2, 241, 241)
    scores = (tensors[0] @ tensors[1].mT * 8**-0.5).masked_fill(~mask, float("-inf"))
    theirs = torch.autograd.grad((scores.softmax(-1) @ tensors[2]).sin().sum(), tensors, create_graph=True)
    for which in range(3):
        a, b = (torch.autograd.grad(x[which].square().sum(), tensors, retain_graph=True) for x in (ours, theirs))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)
    single = [x.detach().float().requires_grad_() for x in tensors]
    once = torch.autograd.grad(m(*single).sin().sum(), single, create_graph=True)
    again = torch.autograd.grad(sum(x.square().sum() for x in once), single)
    wanted = torch.autograd.grad(sum(x.square().sum() for x in theirs), tensors)
    for x, y in zip(again, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
    half = m(q, k, v)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), m(*tensors), atol=0.03, rtol=0.03)


def test_what_does_not_fit_is_refused() -> None:
    q = torch.randn(1, 2, 100, 8)
    with pytest.raises(ValueError, match=r"for 64 tokens, 8 rows of 8, and got 100"):
        Local2d(8, 8)(q, q, q)
    with pytest.raises(ValueError, match=r"for 101 tokens, 10 rows of 10 behind the first 1, and got 100"):
        BlockLocal2d(10, 10, num_prefix_tokens=1)(q, q, q)
    with pytest.raises(Unsupported, match=r"is_causal=True \(traits\.causal is False\)"):
        Local2d(10, 10)(q, q, q, is_causal=True)
    with pytest.raises(Unsupported, match="cross attention"):
        Local2d(10, 10)(q[:, :, :10], q, q)
    for how, words in (
        ("window=4", "window must be odd"), ("window=(3, 0)", "window must be a number >= 1, or a pair"),
        ("height=0", "height must be"), ("width=0", "width must be"), ("dilation=0", "dilation must be"),
        ("num_prefix_tokens=-1", "num_prefix_tokens must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            catalogue.parse(f"Local2d({how})")
    with pytest.raises(ValueError, match="shift must be less than block_size"):
        BlockLocal2d(block_size=(7, 3), shift=(0, 3))
