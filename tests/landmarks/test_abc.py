"""ABC beyond one block: against all pairs and slots at once, with logits near and far apart, and in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import ABC, Bound, explain, implementation
from fast_attention.mechanisms.landmarks import slots
from tests.cases import bind, qkv, some_keys


def reference(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Slots of every query by all its pairs (..., L, S) at once, held as (..., L, S, m)."""
    logits = (k @ rows.mT)[..., None, :, :].masked_fill(~visible[..., None], float("-inf"))
    phi = logits.softmax(-2).nan_to_num(0.0)
    keys, values = (torch.einsum("...ijm,...jd->...imd", phi, x) for x in (k, v))
    weights = (torch.einsum("...id,...imd->...im", q, keys) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("...im,...imd->...id", weights, values)


def agree(bound: Bound, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> None:
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    ours = bound(q, k, v, is_causal=is_causal, key_mask=key_mask)
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    visible = visible.tril(k.shape[-2] - q.shape[-2]) if is_causal else visible
    visible = visible[None, None] if key_mask is None else visible & key_mask[:, None, None]
    theirs = reference(q, k, v, bound.w.rows, visible)
    theirs = theirs.masked_fill(~visible.any(-1)[..., None], 0.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    leaves = [q, k, v, *bound.parameters()]
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def spread(bound: Bound, factor: float) -> Bound:
    with torch.no_grad():
        bound.w.rows.mul_(factor)
    return bound


@pytest.mark.parametrize("factor", [1.0, 60.0], ids=["near", "far apart"])
@pytest.mark.parametrize("sizes", [(2 * slots.BLOCK + 9, 2 * slots.BLOCK + 9), (70, 150), (150, 70)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_are_all_pairs(sizes: tuple[int, int], is_causal: bool, factor: float, device: torch.device) -> None:
    bound = spread(bind("ABC(num_slots=4)", device=device), factor)
    mask = some_keys(2, sizes[1], device)
    mask[0, :30] = False  # padding in front
    for key_mask in (None, mask):
        agree(bound, qkv(*sizes, device=device), is_causal, key_mask)


@pytest.mark.parametrize("factor", [1.0, 60.0], ids=["near", "far apart"])
def test_all_blocks_at_once_are_block_by_block(factor: float, device: torch.device) -> None:
    """The form of traced code and of second derivatives."""
    length, m = 2 * slots.BLOCK + 5, ABC(num_slots=4)
    bound, (q, k, v) = spread(bind(m, device=device), factor), qkv(length, device=device)
    outs = [bound(q, k, v, is_causal=True), torch.vmap(lambda *x: bound(*x, is_causal=True))(q, k, v)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
    x = q.clone().requires_grad_()
    (once,) = torch.autograd.grad(bound(x, k, v, is_causal=True).square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), x)
    (again,) = torch.autograd.grad(bound(x, k, v, is_causal=True).square().sum(), x)
    torch.testing.assert_close(once, again, rtol=1e-8, atol=1e-9)
    assert bool(twice.isfinite().all())


def test_a_far_larger_logit_late_in_a_block_leaves_earlier_queries_alone(device: torch.device) -> None:
    """In float32, where e^88 is the most."""
    bound = bind("ABC(num_slots=3)", device=device, dtype=torch.float32)
    q, k, v = qkv(slots.BLOCK, device=device, dtype=torch.float32)
    later = k.clone()
    later[..., 40:, :] = 1e4 * bound.w.rows[:, :1].detach()
    one, other = (bound(q, keys, v, is_causal=True)[..., :40, :] for keys in (k, later))
    torch.testing.assert_close(one, other)
    assert float(one.detach().abs().amax(-1).min()) > 0.0


def test_the_state_holds_the_slots_and_nothing_else(device: torch.device) -> None:
    bound, (q, k, v) = bind("ABC(num_slots=5)", device=device), qkv(90, device=device)
    state: Any = None
    for at in (slice(0, 1), slice(1, 2), slice(2, 90)):
        _, state = bound.decode(q[..., at, :], k[..., at, :], v[..., at, :], state)
        assert [tuple(x.shape) for x in state.held] == [(2, 2, 5, 16), (2, 2, 5), (2, 2, 5)]


def test_explain_says_which_form_ran(device: torch.device) -> None:
    q, k, v = qkv(300, device=device)
    if device.type == "cpu":
        assert "block by block" in str(explain(bind("ABC()", device=device), q, k, v, is_causal=True))
    with implementation("reference"):
        assert "all blocks at once" in str(explain(bind("ABC()", device=device), q, k, v, is_causal=True))
    assert "every query reads the same slots" in str(explain(bind("ABC()", device=device), q, k, v))
