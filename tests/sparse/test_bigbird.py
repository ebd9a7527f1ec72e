"""BigBird beyond the oracle: the dense masked softmax at length, special cases, the random blocks, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import BigBird, Bound, Softmax, catalogue
from fast_attention.mechanisms.sparse.bigbird import distinct
from fast_attention.mechanisms.sparse.gathered import gathered_softmax
from tests.cases import bind, qkv, some_keys
from tests.oracles.bigbird import visible

VALUES = [
    BigBird(block_size=4),
    BigBird(block_size=3, window_blocks=1, num_random_blocks=2, num_global_blocks=3),
    BigBird(block_size=5, num_random_blocks=1, num_global_blocks=0, num_global_tokens=7),
    BigBird(block_size=4, num_random_blocks=0, num_global_blocks=0),
]


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def pattern(m: BigBird, bound: Bound, length: int, key_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The dense mask (2, heads, length, length), from the sets of the oracle."""
    mask = torch.zeros(2, 2, length, length, dtype=torch.bool)
    for b in range(2):
        seen = [True] * length if key_mask is None else key_mask[b].tolist()
        for head, seed in enumerate(bound.w.seeds.tolist()):
            for i, keys in enumerate(visible(m, length, seen, seed, is_causal)):
                mask[b, head, i, [j for j in keys if seen[j]]] = True
    return mask.to(bound.w.seeds.device)


def matrix(m: Any, bound: Bound, length: int, is_causal: bool = False) -> Tensor:
    """Which keys have a weight, read by attending to the identity."""
    q, k, _ = qkv(length, batch=1, device=bound.w.seeds.device)
    v = torch.eye(length, dtype=torch.float64, device=q.device).expand(1, 2, -1, -1)
    return bound(q, k, v, is_causal=is_causal)[0] > 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_12_is_the_dense_masked_softmax(m: BigBird, is_causal: bool, masked: bool, device: torch.device) -> None:
    bound = bind(m, device=device)
    for length in (3, 31, 64, 73):
        q, k, v = (x.requires_grad_() for x in qkv(length, device=device))
        key_mask = some_keys(2, length, device) if masked else None
        mask = pattern(m, bound, length, key_mask, is_causal)
        ours, theirs = (
            bound(q, k, v, is_causal=is_causal, key_mask=key_mask),
            F.scaled_dot_product_attention(q, k, v, mask),
        )
        same(ours, theirs)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
            same(a, b)


@pytest.mark.parametrize("is_causal", [False, True])
def test_12_all_blocks_are_softmax(is_causal: bool, device: torch.device) -> None:
    q, k, v = qkv(47, device=device)
    whole = Softmax()(q, k, v, is_causal=is_causal)
    for m in (
        BigBird(block_size=4, num_random_blocks=12),
        BigBird(block_size=4, num_random_blocks=0, window_blocks=23),
        BigBird(block_size=4, num_random_blocks=0, num_global_blocks=24),
        BigBird(block_size=4, num_random_blocks=0, num_global_tokens=47),
        BigBird(),
    ):
        same(bind(m, device=device)(q, k, v, is_causal=is_causal), whole)


@pytest.mark.parametrize("g", [0, 1, 5, 8])
def test_12_etc_puts_g_full_rows_and_columns_before_the_matrix_of_the_rest(g: int, device: torch.device) -> None:
    rest = BigBird(block_size=4, num_random_blocks=0, num_global_blocks=0)
    etc = BigBird(block_size=4, num_random_blocks=0, num_global_blocks=0, num_global_tokens=g)
    a, b = matrix(rest, bind(rest, device=device), 30), matrix(etc, bind(etc, device=device), 30 + g)
    assert (b[:, g:, g:] == a).all()
    assert b[:, :g].all()
    assert b[:, :, :g].all()


@pytest.mark.parametrize(("blocks", "density"), [(16, 0.555), (64, 0.152), (256, 0.0388)])
def test_density_is_the_published_one(blocks: int, density: float) -> None:
    """Blocks of 64, 3 random ones: the share of 1024, 4096 and 16384 tokens that a query sees (blocks of 1 here)."""
    m = BigBird(block_size=1)
    assert matrix(m, bind(m), blocks).double().mean().item() == pytest.approx(density, rel=1e-3)


def test_random_blocks_are_different_and_all_equally_likely(device: torch.device) -> None:
    seeds = torch.randint(2**31, (4000, 1)).to(device)
    index, available = torch.arange(8, device=device), torch.tensor([0, 1, 2, 3, 5, 7, 7, 7], device=device)
    picks = distinct(seeds, index, available, 3)
    for i, number in enumerate(available.tolist()):
        rows = picks[:, i].sort(-1).values
        assert ((rows >= 0).sum(-1) == min(3, number)).all()
        assert ((rows[:, 1:] != rows[:, :-1]) | (rows[:, 1:] < 0)).all()
        assert (rows < number).all()
        if number > 3:
            counts = torch.bincount(rows.flatten(), minlength=number).double()
            mean = 4000 * 3 / number
            assert ((counts - mean).abs() < 4.5 * (mean * (1 - 3 / number)) ** 0.5).all()
    same_pair = (picks[:, 5:6] == picks[:, 6:7]).all(-1).double().mean().item()
    assert same_pair < 0.02  # neighbouring blocks choose independently: 1 in 210


def test_random_blocks_differ_by_head_and_draw(device: torch.device) -> None:
    m = BigBird(block_size=1)
    bound = bind(m, device=device)
    first = matrix(m, bound, 64)
    assert (first[0] != first[1]).any()
    assert (matrix(m, bound, 64) == first).all()
    bound.redraw()
    assert (matrix(m, bound, 64) != first).any()


def test_causal_outputs_do_not_depend_on_the_length(device: torch.device) -> None:
    """The last block is not global and random blocks are of the past, so a prefix is computed as if it stood alone."""
    q, k, v = qkv(61, device=device)
    for m in VALUES:
        bound = bind(m, device=device)
        whole = bound(q, k, v, is_causal=True)
        for n in (1, 8, 30):
            same(bound(q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal=True), whole[:, :, :n])


def test_a_block_named_twice_counts_once(device: torch.device) -> None:
    q, k, v = qkv(12, batch=1, heads=1, device=device)
    table = torch.tensor([[0, 1, 0, -1], [1, 1, 1, 1], [2, 0, 2, 0]], device=device)[None, None]
    mask = torch.zeros(3, 3, dtype=torch.bool, device=device)
    mask[0, :2] = mask[1, 1] = mask[2, 0] = mask[2, 2] = True
    seen = torch.ones(1, 12, dtype=torch.bool, device=device)
    dense = F.scaled_dot_product_attention(q, k, v, mask.repeat_interleave(4, 0).repeat_interleave(4, 1))
    same(gathered_softmax(q, k, v, table, seen, size=4), dense)


def test_settings_are_checked() -> None:
    bad = {
        "block_size": 0,
        "window_blocks": 2,
        "num_random_blocks": -1,
        "num_global_blocks": -1,
        "num_global_tokens": -1,
    }
    for setting, value in bad.items():
        with pytest.raises(ValueError, match=setting):
            catalogue.parse(f"BigBird({setting}={value})")


class Fixed(nn.Module):
    def __init__(self, mechanism: Any, is_causal: bool) -> None:
        super().__init__()
        self.bound, self.is_causal = bind(mechanism), is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.bound(q, k, v, is_causal=self.is_causal)


def test_blocks_behind_every_sequence_of_a_batch_have_a_gradient() -> None:
    """They see no key at all: window blocks only, and padding that reaches further than the window."""
    bound = bind(BigBird(block_size=2, num_random_blocks=0, num_global_blocks=0))
    q, k, v = (x.requires_grad_() for x in qkv(11))
    seen = (torch.arange(11) < 4).expand(2, 11)
    weights = torch.randn(2, 2, 4, 8, dtype=q.dtype)
    out = bound(q, k, v, key_mask=seen)
    assert not out[:, :, 6:].any()
    padded = torch.autograd.grad((out[:, :, :4] * weights).sum(), (q, k, v))
    short = [x[:, :, :4] for x in (q, k, v)]
    plain = torch.autograd.grad((bound(*short) * weights).sum(), (q, k, v))
    for a, b in zip(padded, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
