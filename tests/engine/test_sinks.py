"""Sinks in long sequences: tiles and blocks of queries against all scores with one column more, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Shape, catalogue, core, explain
from fast_attention.functional import implementation
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.nn.bound import Bound

SUNK = [
    "BigBird(block_size=8, num_random_blocks=1, sinks=True)",
    "BigBird(block_size=8, num_random_blocks=1, num_global_tokens=5, sinks=True)",
    "Selected(block_size=8, topk=3, sinks=True)",
    "Local2d(width=10, window=3, num_prefix_tokens=2, sinks=True)",
    "BlockLocal2d(width=10, block_size=4, shift=1, sinks=True)",
]
HYBRIDS = [
    "Hybrid(near=BlockLocal(block_size=9, sinks=True), far=FavorPlus(num_features=8))",
    "Hybrid(near=BlockLocal(block_size=8, bias=ALiBi(), sinks=True), far=LearnedFeatures(num_features=8))",
    "Hybrid(near=Selected(block_size=8, topk=3, sinks=True), far=FavorPlus(num_features=8))",
]


def scores_of(bound: Bound) -> Tensor:
    """The sinks' scores among a mechanism's weights."""
    return next(x for name, x in bound.named_parameters() if name.endswith("sinks"))


def drawn(mechanism: str, heads: int, length: int, keys: int) -> tuple[Bound, list[Tensor]]:
    torch.manual_seed(4)
    bound = Bound(mechanism, Shape(heads=heads, head_dim=8)).double()
    with torch.no_grad():
        scores_of(bound).normal_()
    sizes = [(2, heads, length, 8), (2, heads, keys, 8), (2, heads, keys, 8)]
    return bound, [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def with_a_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: Tensor) -> Tensor:
    """As gpt-oss has it: the sinks are a column of scores, of which the weights are dropped."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -1e30)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def seen(m: Any, heads: int, length: int, keys: int, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """(B or 1, 1 or H, L, S)."""
    i, j = torch.arange(length)[:, None] + keys - length, torch.arange(keys)
    visible = torch.ones(1, 1, length, keys, dtype=torch.bool)
    if isinstance(m, Local):
        left, right = m.sides
        visible = visible & (j >= i - left) & (j <= i + right)
        if m.dilation != 1:
            steps = [((j - i) % d == 0) & ((j - i).abs() <= 5 * d) for d in m.dilation]  # type: ignore[union-attr]
            visible = visible & torch.stack(steps * (heads // 2))
    elif hasattr(m, "block_size"):
        visible = visible & ((j // m.block_size - i // m.block_size).abs() <= 1)
    visible = visible & (j <= i) if is_causal else visible
    return visible if key_mask is None else visible & key_mask[:, None, None]


@pytest.mark.parametrize(
    "mechanism",
    [
        "Softmax(sinks=True)",
        "Local(window=(9, 3), sinks=True)",
        "Local(window=5, dilation=(1, 3), sinks=True)",
        "BlockLocal(block_size=8, sinks=True)",
    ],
)
@pytest.mark.parametrize(("heads", "length", "keys"), [(4, 150, 150), (2, 33, 150), (2, 1, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_column_more(mechanism: str, heads: int, length: int, keys: int, is_causal: bool, masked: bool) -> None:
    """Also with few heads, whose tiles hold many chunks of one sequence (a batch of one)."""
    bound, inputs = drawn(mechanism, heads, length, keys)
    key_mask = torch.rand(2, keys) > 0.3 if masked else None
    if key_mask is not None:
        key_mask[:, 0] = True  # from where blocks are counted
    if heads == 2 and not masked:
        inputs = [x.detach()[:1].requires_grad_() for x in inputs]
    out = bound(*inputs, is_causal=is_causal, key_mask=key_mask)
    q, k, v = inputs
    wanted = with_a_column(q, k, v, bound.w.sinks, seen(bound.mechanism, heads, length, keys, is_causal, key_mask))
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-9)
    grad, leaves = torch.randn_like(out), [*inputs, *bound.parameters()]
    for a, b in zip(*(torch.autograd.grad(x, leaves, grad) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-8)


@pytest.mark.parametrize("heads", [1, 4])
def test_one_head_of_one_sequence_and_a_bias(heads: int) -> None:
    """Chunks side by side; a bias and sinks together are what a mask of its numbers and sinks are."""
    bound, (q, k, v) = drawn("Local(window=3, bias=ALiBi(), sinks=True)", heads, 200, 200)
    q, k, v = (x.detach()[:1].requires_grad_() for x in (q, k, v))
    unbiased = Bound("Local(window=3, sinks=True)", Shape(heads=heads, head_dim=8)).double()
    unbiased.adopt(unbiased.w._replace(sinks=bound.w.sinks))
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
    apart = (torch.arange(200)[:, None] - torch.arange(200)).abs()
    both = bound(q, k, v), unbiased(q, k, v, attn_mask=-slopes[:, None, None] * apart)
    torch.testing.assert_close(*both, atol=1e-12, rtol=1e-9)
    grad = torch.randn_like(both[0])
    found = torch.autograd.grad(both[0], [q, k, v, bound.w.sinks], grad)
    for a, b in zip(found, torch.autograd.grad(both[1], [q, k, v, unbiased.w.sinks], grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-8)


@pytest.mark.parametrize("mechanism", [*SUNK, *HYBRIDS])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fast_paths_have_the_plain_forms_sinks(mechanism: str, is_causal: bool, masked: bool) -> None:
    """Outputs and all gradients at lengths of many tiles; where keys are chosen, against a column of scores, too."""
    bound, inputs = drawn(mechanism, 2, 150, 150)
    if is_causal not in bound.mechanism.traits.modes:
        pytest.skip("denied by traits")
    mask = torch.rand(2, 150) > 0.3 if masked else None
    out = bound(*inputs, is_causal=is_causal, key_mask=mask)
    with implementation("reference"):
        wanted = bound(*inputs, is_causal=is_causal, key_mask=mask)
    torch.testing.assert_close(out, wanted, atol=1e-11, rtol=1e-8)
    if mechanism in SUNK:
        q, k, v = inputs
        without: Any = replace(bound.mechanism, sinks=False)
        w, everything = bound.w._replace(bias=None) if "BigBird" in mechanism else (), torch.eye(150, dtype=q.dtype)
        weights = without(q, k, everything.expand(2, 2, -1, -1), w, is_causal=is_causal, key_mask=mask)
        column = with_a_column(q, k, v, scores_of(bound), weights.detach() > 0)
        column = column.masked_fill(~(weights.detach() > 0).any(-1, keepdim=True), 0.0)
        torch.testing.assert_close(out, column, atol=1e-11, rtol=1e-8)
    grad, leaves = torch.randn_like(out), [*inputs, *bound.parameters()]
    for a, b in zip(*(torch.autograd.grad(x, leaves, grad) for x in (out, wanted)), strict=True):
        assert bool(b.abs().max() > 0)
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("mechanism", ["Softmax(sinks=True)", "Local(window=9, sinks=True)", *SUNK[2:3]])
def test_sinks_without_weight_and_with_all_of_it(mechanism: str) -> None:
    bound, inputs = drawn(mechanism, 2, 90, 90)
    without = catalogue.parse(mechanism.replace("sinks=True", ""))(*inputs, is_causal=True)
    for sink, wanted in ((-1e4, without), (1e4, torch.zeros_like(without))):
        with torch.no_grad():
            bound.w.sinks.fill_(sink)
        out = bound(*inputs, is_causal=True)
        torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-9)
        grads = torch.autograd.grad(out.sum(), [*inputs, bound.w.sinks])
        assert all(bool(x.isfinite().all()) for x in grads)


@pytest.mark.parametrize("mechanism", ["Softmax()", "Local(window=9)", "BigBird(block_size=2)"])
def test_sinks_of_another_module_are_one_for_each_head(mechanism: str) -> None:
    bound, (q, k, v) = Bound(mechanism, Shape(heads=2, head_dim=8)), torch.randn(3, 2, 2, 20, 8)
    for sinks, what in ((torch.zeros(1, 2), r"shape \(1, 2\)"), (torch.zeros(2, 2), r"shape \(2, 2\)"),
                        (torch.tensor(0.0), r"shape \(\)"), ([0.0, 0.0], "list")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"sinks must be a tensor of shape \(2,\).*got {what}"):
            bound(q, k, v, sinks=sinks)


def test_what_carries_sinks_and_what_does_not() -> None:
    bound, (q, k, v) = drawn("Softmax(sinks=True)", 2, 20, 20)
    short = Bound("ByLength(short=Softmax(sinks=True), long=LinearAttention(), above=64)", Shape(heads=2, head_dim=8))
    short = short.double()
    short.adopt(short.w._replace(short=bound.w))
    mask = torch.arange(20) >= torch.tensor([[3], [0]])
    for key_mask in (None, mask):
        wanted = bound(q, k, v, is_causal=True, key_mask=key_mask)
        torch.testing.assert_close(short(q, k, v, is_causal=True, key_mask=key_mask), wanted, atol=1e-12, rtol=1e-9)
    x = torch.randn(1, 2, 70, 8)
    m: Any = catalogue.parse("Softmax(sinks=True)")
    reason = "all scores at once" if core.unavailable() else "positions or sinks add to the scores"
    assert reason in str(explain(m, x, x, x, is_causal=True))
