"""Chosen blocks at lengths of many tiles: both passes are one function, and so are decoding and one pass."""

from __future__ import annotations

import pytest
import torch

from fast_attention import Hybrid, LinearAttention, Selected
from fast_attention.functional import implementation
from fast_attention.mechanisms.sparse import fast_past_blocks, past_blocks, selected
from tests.cases import qkv


@pytest.mark.parametrize(("queries", "number"), [(150, 3), (37, 3), (1, 5), (150, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_both_paths_of_chosen_past_blocks_agree(queries: int, number: int, masked: bool) -> None:
    """With values of another width, blocks that are cut off at both ends, and queries that find nothing visible."""
    torch.manual_seed(0)
    size, keys = 16, 150
    q, k, v = qkv(queries, keys)
    q, k, v = (x.requires_grad_() for x in (q, k, torch.cat([v, v[..., :3]], -1)))
    mask = torch.rand(2, 1, keys) > (0.5 if masked else -1.0)
    mask[0, :, 112:150] &= not masked
    visible = selected.shown(k, mask, size)
    choices = selected.of_tokens(
        q, selected.pooled(k, visible), visible.any(-1), size=size, start=keys - queries, number=number
    )
    settings = {"size": size, "start": keys - queries, "scale": 0.3}
    outs = [f.chosen_softmax(q, k, v, choices, mask, None, **settings) for f in (fast_past_blocks, past_blocks)]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(outs[0])
    gradients = [torch.autograd.grad((out * probe).sum(), (q, k, v)) for out in outs]
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_of_many_blocks_is_one_pass(dtype: torch.dtype) -> None:
    """Step by step in float32 and in bfloat16, where means rounded to it would choose other blocks."""
    mechanism, length = Selected(block_size=8, topk=3), 203
    q, k, v = qkv(length, dtype=dtype)
    one_pass, state, outs = mechanism(q, k, v, is_causal=True), None, []
    for part in (slice(0, 90), *(slice(i, i + 1) for i in range(90, 110)), slice(110, length)):
        out, state = mechanism.decode(*(x[..., part, :] for x in (q, k, v)), state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, -2), one_pass, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert state is not None
    assert state.held.means.shape[-2] == length // 8


def test_a_padded_sequence_chooses_as_the_shorter_one() -> None:
    mechanism, length, padded = Selected(block_size=8, topk=3), 100, 131
    q, k, v = qkv(padded)
    mask = (torch.arange(padded) < length).expand(2, padded)
    for is_causal in (False, True):
        out = mechanism(q, k, v, is_causal=is_causal, key_mask=mask)[..., :length, :]
        torch.testing.assert_close(out, mechanism(*(x[..., :length, :] for x in (q, k, v)), is_causal=is_causal))


def test_the_chosen_blocks_are_those_that_weigh_most() -> None:
    """Where each block of keys points one way and a query that way, it finds that block wherever it is."""
    size, blocks = 8, 16
    direction = 10 * torch.eye(blocks, dtype=torch.float64)
    k = direction.repeat_interleave(size, 0).expand(1, 1, -1, -1)
    q = direction[torch.randperm(blocks)].repeat_interleave(size, 0).expand(1, 1, -1, -1)
    v = torch.randn(1, 1, size * blocks, 4, dtype=torch.float64)
    for is_causal in (False, True):
        exact = Selected(block_size=size, topk=blocks)(q, k, v, is_causal=is_causal)
        found = Selected(block_size=size, topk=2)(q, k, v, is_causal=is_causal)
        past = (q @ k.mT).argmax(-1) < torch.arange(size * blocks)  # where causal, only what is past can be found
        error = (exact - found).abs().amax(-1)[past if is_causal else ...]
        assert error.max() < 1e-9


def test_far_sums_keep_their_digits_where_chosen_blocks_dominate() -> None:
    """Added up, not subtracted: float32 differs from float64 by rounding where the far part is a millionth."""
    torch.manual_seed(0)
    mechanism = Hybrid(near=Selected(block_size=8, topk=2), far=LinearAttention(), first=0, last=0)
    q, k, v = qkv(160)
    k[..., :8, :] *= 6
    exact = mechanism(q, k, v)
    torch.testing.assert_close(mechanism(q.float(), k.float(), v.float()).double(), exact, rtol=2e-5, atol=2e-5)
    with implementation("reference"):
        torch.testing.assert_close(mechanism(q, k, v), exact)
