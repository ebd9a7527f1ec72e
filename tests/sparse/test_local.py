"""Local attention beyond the oracle: exact special cases at many lengths, any mask, decoding, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fast_attention import BigBird, BlockLocal, Bound, Local, Shape, Sinkhorn, Softmax, catalogue, core
from fast_attention.functional import block_local_attention, local_attention
from fast_attention.mechanisms.sparse import banded
from tests.cases import qkv, some_keys

LENGTHS = (1, 5, 16, 33, 97)
VALUES = [
    Local(window=5),
    Local(window=(4, 2)),
    Local(window=(0, 3)),
    Local(window=2, dilation=3),
    Local(window=(3, 1), dilation=4),
    BlockLocal(block_size=6),
    BlockLocal(block_size=4, before=2, after=0),
    BlockLocal(block_size=2, before=0, after=2),
]


def near(m: Any, length: int, keys: int, is_causal: bool, device: Any) -> Tensor:
    """The dense mask (length, keys) by the positions."""
    i = torch.arange(length, device=device)[:, None] + keys - length
    j = torch.arange(keys, device=device)[None, :]
    if isinstance(m, Local):
        left, right = m.window if isinstance(m.window, tuple) else (m.window, m.window)
        steps = m.dilation
        mask = (j >= i - left * steps) & (j <= i + right * steps) & ((j - i) % steps == 0)
    else:
        apart = j.div(m.block_size, rounding_mode="floor") - i.div(m.block_size, rounding_mode="floor")
        mask = (apart >= -m.before) & (apart <= m.after)
    return mask & (j <= i) if is_causal else mask


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_11_is_softmax_under_the_mask_of_its_band(m: Any, is_causal: bool, device: torch.device) -> None:
    for length, keys in [(n, n) for n in LENGTHS] + [(20, 61), (61, 20), (1, 40)]:
        q, k, v = qkv(length, keys, device=device)
        key_mask = some_keys(2, keys, device)
        for seen in (None, key_mask):
            mask = near(m, length, keys, is_causal, device).expand(2, 1, length, keys)
            mask = mask if seen is None else mask & seen[:, None, None]
            same(m(q, k, v, is_causal=is_causal, key_mask=seen), F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize("is_causal", [False, True])
def test_11_a_window_over_everything_is_softmax(is_causal: bool, device: torch.device) -> None:
    for length in LENGTHS:
        q, k, v = qkv(length, device=device)
        whole = Softmax()(q, k, v, is_causal=is_causal)
        wide = (
            Local(length - 1),
            Local(10**9),
            BlockLocal(length),
            BlockLocal(length + 7, 0, 0),
            BlockLocal(5, 20, 20),
        )
        for m in wide:
            same(m(q, k, v, is_causal=is_causal), whole)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 50])
def test_the_size_of_blocks_of_queries_moves_nothing(
    block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(41, device=device)
    wanted = local_attention(q, k, v, window=(6, 3))
    monkeypatch.setattr(banded, "SMALLEST_BLOCK", block)
    monkeypatch.setattr(banded, "LARGEST_BLOCK", block)
    same(local_attention(q, k, v, window=(6, 3)), wanted)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("m", [Local(window=64), BlockLocal(), BigBird(), Sinkhorn()], ids=repr)
def test_references_run_torchs_fused_kernel(m: Any, is_causal: bool) -> None:
    """No scores of blocks are held, in inference or in training."""
    module = Bound(m, Shape(2, 16, 640))
    inputs = [torch.randn(1, 2, 640, 16, requires_grad=True) for _ in range(3)]

    class Held(TorchDispatchMode):
        scores = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.is_floating_point() and "bmm" in str(function):
                self.scores = max(self.scores, found.numel())
            return found

    for trains in (False, True):
        with core.switched_off(), Held() as held, torch.set_grad_enabled(trains):
            out = module(*inputs, is_causal=is_causal)
        if trains:
            torch.autograd.grad(out.sum(), inputs)
        assert held.scores <= inputs[0].numel()


@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_any_mask_and_its_gradient(m: Any, device: torch.device) -> None:
    q, k, v = qkv(31, device=device)
    band, key_mask = near(m, 31, 31, False, device), some_keys(2, 31, device)
    for shape in ((31, 31), (2, 1, 31, 31), (2, 2, 31, 31), (1, 31), (2, 1, 1, 31)):
        bias = torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()
        seen = band & key_mask[:, None, None]
        dense = bias.expand(2, 2, 31, 31).masked_fill(~seen, float("-inf"))
        ours = m(q, k, v, key_mask=key_mask, attn_mask=bias)
        theirs = F.scaled_dot_product_attention(q, k, v, dense)
        same(ours, theirs)
        same(*(torch.autograd.grad(out.square().sum(), bias)[0] for out in (ours, theirs)))
        allowed = bias > -0.5
        same(m(q, k, v, attn_mask=allowed), F.scaled_dot_product_attention(q, k, v, allowed & band))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_any_mask_where_queries_and_keys_differ_in_number(m: Any, is_causal: bool, device: torch.device) -> None:
    for length, keys in ((12, 31), (31, 12)):
        q, k, v = qkv(length, keys, device=device)
        for shape in ((length, keys), (2, 1, length, keys), (1, keys)):
            bias = torch.randn(shape, dtype=torch.float64).to(device)
            dense = bias.expand(2, 2, length, keys).masked_fill(
                ~near(m, length, keys, is_causal, device), float("-inf")
            )
            ours = m(q, k, v, is_causal=is_causal, attn_mask=bias)
            same(ours, F.scaled_dot_product_attention(q, k, v, dense))


@pytest.mark.parametrize("heads", [2, 5, 7])
def test_heads_take_rates_in_turn(heads: int, device: torch.device) -> None:
    """As every head alone with its own rate; with a mask for all heads and with one for each."""
    m, length = Local(window=2, dilation=(1, 3, 4)), 29
    q, k, v = qkv(length, heads=heads, device=device)
    key_mask = some_keys(2, length, device)
    for attn_mask in (None, torch.randn(length, length), torch.randn(2, heads, length, length)):
        bias = None if attn_mask is None else attn_mask.double().to(device)
        alone = []
        for h in range(heads):
            each, one = Local(window=2, dilation=(1, 3, 4)[h % 3]), slice(h, h + 1)
            mask = bias if bias is None or bias.ndim < 3 else bias[:, one]
            alone.append(each(q[:, one], k[:, one], v[:, one], key_mask=key_mask, attn_mask=mask))
        same(m(q, k, v, key_mask=key_mask, attn_mask=bias), torch.cat(alone, 1))


@pytest.mark.parametrize("dilation", [(), (1, 0), (2, 1.5), 0, -1])
def test_a_dilation_that_is_none_is_refused(dilation: Any) -> None:
    with pytest.raises(ValueError, match="dilation must be"):
        Local(dilation=dilation)


def test_dropout_drops_weights_and_keeps_their_mean(device: torch.device) -> None:
    q, k, _ = qkv(9, batch=1, heads=1, device=device)
    v, m = torch.eye(9, dtype=torch.float64).to(device)[None, None], Local(window=2)
    weights = m(q, k, v)
    draws = torch.stack([m(q, k, v, dropout=0.25) for _ in range(3000)])
    zero = (draws == 0) & (weights > 0)
    kept = draws / weights.masked_fill(weights == 0, 1.0)
    assert (zero | ((kept - 1 / 0.75).abs() < 1e-9) | (weights == 0)).all()
    assert abs(zero.double().mean().item() / (weights > 0).double().mean().item() - 0.25) < 0.01
    assert (draws.mean(0) - weights).abs().max() < 0.06


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("m", VALUES, ids=repr)
def test_20_decode_in_any_split_is_one_pass(m: Any, masked: bool, device: torch.device) -> None:
    length = 53
    q, k, v = qkv(length, device=device)
    key_mask = some_keys(2, length, device) if masked else None
    whole = m(q, k, v, is_causal=True, key_mask=key_mask)
    longest = m.sides[0] if isinstance(m, Local) else (m.before + 1) * m.block_size
    for sizes in ([length], [1] * length, [7, 1, 20, 25], [2, 50, 1], [26, 27]):
        state, outs, start = None, [], 0
        for size in sizes:
            now = slice(start, start + size)
            seen = None if key_mask is None else key_mask[:, now]
            out, state = m.decode(q[:, :, now], k[:, :, now], v[:, :, now], (), state, key_mask=seen)
            outs.append(out)
            start += size
            assert state is not None
            assert state.content.k.shape[-2] <= longest
            assert state.content.k.untyped_storage().nbytes() <= 2 * 2 * longest * 8 * 8
        same(torch.cat(outs, -2), whole)


def test_a_state_can_be_continued_twice(device: torch.device) -> None:
    q, k, v = qkv(20, device=device)
    m = Local(window=4)
    _, state = m.decode(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    once = m.decode(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], (), state)[0]
    m.decode(v[:, :, 9:], v[:, :, 9:], v[:, :, 9:], (), state)
    same(m.decode(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], (), state)[0], once)


def test_settings_are_checked() -> None:
    for text in ("Local(window=-1)", "Local(window=(1, -2))", "Local(window=(1, 2, 3))", "Local(window=1.5)"):
        with pytest.raises(ValueError, match="window"):
            catalogue.parse(text)
    for setting, value in (("block_size", 0), ("before", -1), ("after", -1)):
        with pytest.raises(ValueError, match=setting):
            catalogue.parse(f"BlockLocal({setting}={value})")
    assert catalogue.parse("Local(window=(3, 0))") == Local(window=(3, 0))
    assert repr(Local(window=64)) == "Local(window=64)"


def test_the_reformers_local_layer(device: torch.device) -> None:
    """Blocks of 64, one before, none after: what transformers' Reformer calls local_num_chunks_before and _after."""
    q, k, v = qkv(150, device=device)
    same(block_local_attention(q, k, v, is_causal=True), block_local_attention(q, k, v, after=0, is_causal=True))
