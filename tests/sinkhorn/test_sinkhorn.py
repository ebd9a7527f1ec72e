"""Sinkhorn attention: balancing, exact cases, and the leaks it is known for (mathematics section 13, item 15)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Local, Sinkhorn, Softmax, SortCut, Unsupported, core
from fast_attention.engine import heads, trace
from fast_attention.engine.fused import fused_attention
from fast_attention.engine.masks import masked_softmax
from fast_attention.functional import sinkhorn_attention, softmax_attention, sortcut_attention
from fast_attention.mechanisms.sinkhorn import sorting
from fast_attention.mechanisms.sinkhorn.sorting import soft_permutation
from tests.cases import bind, qkv


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def everywhere(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device)


def test_balancing_converges_to_a_doubly_stochastic_matrix(device: torch.device) -> None:
    """Columns are exact after any round; rows within 1e-3 after 20, for scores N(0, 4) of six blocks."""
    scores = 2 * torch.randn(50, 6, 6, dtype=torch.float64, device=device)
    errors = []
    for rounds in (1, 5, 8, 20):
        S = soft_permutation(scores, everywhere(6, device), iterations=rounds)
        close(S.sum(-2), torch.ones_like(S[..., 0]))
        errors.append(float((S.sum(-1) - 1).abs().amax(-1).median()))
    assert errors == sorted(errors, reverse=True)
    assert 0.2 < errors[0] < 1.5
    assert errors[2] < 2e-2
    assert errors[3] < 1e-3
    close(soft_permutation(scores, everywhere(6, device), iterations=0), scores.softmax(-1))


def test_balancing_ignores_what_is_masked(device: torch.device) -> None:
    """Entries outside the mask are exact zeros, and the rest is balanced as if they were not there."""
    scores = torch.randn(6, 6, dtype=torch.float64, device=device)
    held = torch.tensor([True, False, True, True, False, True], device=device)
    mask = held[:, None] & held
    S = soft_permutation(scores.masked_fill(~mask, 1e30), mask, iterations=6)
    assert bool((S[~mask] == 0).all())
    part = soft_permutation(scores[held][:, held], everywhere(4, device), iterations=6)
    close(S[held][:, held], part)


def test_balancing_by_factors_is_balancing_by_logarithms(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same permutation and gradient; where a share of a row is too small for factors, logarithms take over."""
    scores = (2 * torch.randn(5, 7, 7, dtype=torch.float64, device=device)).requires_grad_()
    for rounds in (1, 2, 8):
        found = []
        for smallest, how in ((1e-12, "balancing by factors"), (1.0, "balancing by logarithms")):
            monkeypatch.setattr(sorting, "SMALLEST", smallest)
            with trace.recorded() as steps:
                S = soft_permutation(scores, everywhere(7, device), iterations=rounds)
            assert [step.path for step in steps] == [how]
            found.append((S, *torch.autograd.grad(S.sin().sum(), scores)))
        for ours, theirs in zip(*found, strict=True):
            close(ours, theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_long_sequences(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, and in float32 the core, on strided inputs, against products with masks written out in float64."""
    monkeypatch.setattr(heads, "FEW", 0)  # no sequence is short, which would be one product
    P = torch.randn(3, 8, 9, dtype=torch.float64)
    is_ours = dtype == torch.float32 and not core.unavailable()
    for size, length, start, is_causal in ((4, 36, 0, False), (4, 36, 0, True), (4, 33, 14, True), (130, 390, 0, True)):
        qkv = [torch.randn(2, length, 3, 8, dtype=torch.float64).transpose(1, 2) for _ in "qkv"]
        found = []
        for key_mask, one in ((None, dtype), (torch.ones(2, length, dtype=torch.bool), torch.float64)):
            leaves = [x.to(one).requires_grad_() for x in (*qkv, P)]
            q, k, v, w = leaves
            with trace.recorded() as steps:
                out = sinkhorn_attention(
                    q[:, :, start:], k, v, w, block_size=size, is_causal=is_causal, key_mask=key_mask
                )  # fmt: skip
            paths = [step.path for step in steps]
            assert any(path.startswith(trace.CORE) for path in paths) == (is_ours and key_mask is None)
            found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
        for ours, theirs in zip(*found, strict=True):
            error = (ours.detach().double() - theirs.detach()).abs().max()
            assert float(error) <= tolerance * max(1.0, float(theirs.detach().abs().max()))


@pytest.mark.parametrize("mechanism", [Sinkhorn(block_size=3), SortCut(block_size=3), Softmax(), Local(9)], ids=repr)
def test_gradients_have_gradients(mechanism: Any) -> None:
    """Of the tiles, and of the fused kernel, which has none of its own."""
    bound = bind(mechanism, head_dim=2)
    for is_causal in mechanism.traits.modes:
        inputs = tuple(x.requires_grad_() for x in qkv(9, width=2, batch=1))
        assert torch.autograd.gradgradcheck(partial(bound, is_causal=is_causal), inputs)
        out = bound(*inputs, is_causal=is_causal).sin().sum()
        again, once = (torch.autograd.grad(out, inputs, create_graph=how, retain_graph=True) for how in (True, False))
        for ours, theirs in zip(again, once, strict=True):
            close(ours, theirs)


def test_masks_stay_masks_in_second_derivatives() -> None:
    """A boolean mask, one with an empty row, against the definition, first and second derivatives."""
    seen = torch.rand(1, 2, 5, 6) > 0.4
    seen[..., 2, :] = False
    found = []
    q, k, v = (x.requires_grad_() for x in qkv(5, 6, batch=1))
    for attend in (fused_attention, lambda q, k, v, mask: masked_softmax(q @ k.mT * 8**-0.5, mask) @ v):
        out = attend(q, k, v, seen)
        first = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
        found.append((out, *first, *torch.autograd.grad([x.sin().sum() for x in first], (q, k, v))))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


def test_balancing_is_finite_at_extreme_scores(device: torch.device) -> None:
    scores = (1e4 * torch.randn(6, 6, device=device)).requires_grad_()
    S = soft_permutation(scores, everywhere(6, device).tril(-1), iterations=8)
    S.square().sum().backward()
    assert scores.grad is not None
    assert bool(S.isfinite().all())
    assert bool(scores.grad.isfinite().all())


def test_a_triangle_has_no_balance_but_the_identity(device: torch.device) -> None:
    """Why the causal form is a softmax over rows: off the diagonal, balanced mass dies like 1/rounds (finding 10)."""
    scores, mask = torch.randn(6, 6, dtype=torch.float64, device=device), everywhere(6, device).tril()
    off = [float(soft_permutation(scores, mask, iterations=n).tril(-1).sum()) for n in (200, 2000)]
    assert 0.08 < off[1] / off[0] < 0.12


@pytest.mark.parametrize("length", [1, 5, 8])
def test_one_block_is_softmax(length: int, device: torch.device) -> None:
    """Sorted and own block are one and the same then, and stand beside each other under one softmax."""
    q, k, v = qkv(length, device=device)
    bound = bind(Sinkhorn(block_size=8), device=device)
    close(bound(q, k, v), softmax_attention(q, k, v))
    close(bound(q, k, v, is_causal=True), softmax_attention(q, k, v, is_causal=True))
    close(bind(SortCut(block_size=8, budget=1), device=device)(q, k, v), softmax_attention(q, k, v))


def hard(length: int, order: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs whose last channels say which block a token is in, and P that sorts block ``order[i]`` to place i."""
    blocks, size = len(order), 4
    q, k, v = qkv(length, width=4 + blocks, device=device)
    own = torch.arange(length, device=device) // size
    marks = torch.nn.functional.one_hot(own, blocks).to(k)
    k = torch.cat([k[..., :4], marks.expand(2, 2, -1, -1)], -1)
    P = torch.zeros(2, 4 + blocks, blocks, dtype=k.dtype, device=device)
    P[:, 4 + torch.arange(blocks), order] = 1e6
    return q, k, v, P


@pytest.mark.parametrize("length", [20, 19, 17])
def test_full_sortcut_with_a_hard_permutation_is_softmax(length: int, device: torch.device) -> None:
    """Also where the last block is not full: what was missing from it is masked wherever it is sorted to."""
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    q, k, v, P = hard(length, order, device)
    out = sortcut_attention(q, k, v, P, block_size=4, budget=5, num_iterations=3)
    close(out, softmax_attention(q, k, v))
    first = sortcut_attention(q, k, v, P, block_size=4, budget=2, num_iterations=3)
    kept = torch.cat([torch.arange(12, 16), torch.arange(4)])
    close(first, softmax_attention(q, k[:, :, kept], v[:, :, kept]))


@pytest.mark.parametrize("length", [20, 18])
def test_hard_sorting_shows_every_block_its_own_and_one_more(length: int, device: torch.device) -> None:
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    q, k, v, P = hard(length, order, device)
    own = torch.arange(length, device=device) // 4
    seen = (own == own[:, None]) | (own == order[own][:, None])
    out = sinkhorn_attention(q, k, v, P, block_size=4, num_iterations=3)
    close(out, softmax_attention(q, k, v, attn_mask=seen))


@pytest.mark.parametrize("block_size", [1, 3, 4, 64])
def test_nothing_leaks_from_later_in_the_same_block(block_size: int, device: torch.device) -> None:
    """Every cut, in particular those inside a block, whose sum is the usual leak: bits must not move."""
    q, k, v = qkv(15, device=device)
    bound = bind(Sinkhorn(block_size=block_size), device=device)
    before = bound(q, k, v, is_causal=True)
    for t in range(1, 15):
        later = (torch.arange(15, device=device) >= t)[:, None]
        changed = (torch.where(later, -60 * x.flip(-2), x) for x in (q, k, v))
        assert torch.equal(bound(*changed, is_causal=True)[:, :, :t], before[:, :, :t]), t


def test_causal_sorting_reaches_back(device: torch.device) -> None:
    """Every earlier block reaches every later one; what reaches block 0 is block 0."""
    bound = bind(Sinkhorn(block_size=4), device=device)
    q, k, _ = qkv(16, device=device)
    eye = torch.eye(16, dtype=q.dtype, device=device).expand(2, 2, 16, 16)
    matrix = bound(q, k, eye, is_causal=True)
    assert bool((matrix.tril() > 0).all(0).all(0).equal(torch.ones(16, 16, device=device).tril() > 0))
    close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    close(matrix[..., :4, :4], softmax_attention(q, k, eye, is_causal=True)[..., :4, :4])


@pytest.mark.parametrize("mechanism", [Sinkhorn(block_size=4), SortCut(block_size=4, budget=2)], ids=repr)
def test_padding_is_a_shorter_sequence(mechanism: Any, device: torch.device) -> None:
    """Whole blocks of padding, parts of blocks, holes, and a front that is padding."""
    bound, (q, k, v) = bind(mechanism, device=device), qkv(23, device=device)
    for kept in (1, 9, 12, 22):
        mask = (torch.arange(23, device=device) < kept).expand(2, -1)
        loud = k.masked_fill(~mask[:, None, :, None], 1e4), v.masked_fill(~mask[:, None, :, None], -1e30)
        short = bound(*(x[:, :, :kept] for x in (q, k, v)))
        close(bound(q, *loud, key_mask=mask)[:, :, :kept], short, 1e-10)
    front = (torch.arange(23, device=device) >= 9).expand(2, -1)
    out = bound(q, k, v, key_mask=front)[:, :, 9:]
    assert bool((out.square().sum(-1) > 0).all()), "two leading blocks of padding hide nothing"
    assert bool((bound(q, k, v, key_mask=front & False) == 0).all())


@pytest.mark.parametrize("length", [63, 64, 65, 128, 144, 257])
@pytest.mark.parametrize("mechanism", [Sinkhorn(block_size=16), SortCut(block_size=16)], ids=repr)
def test_without_a_mask_is_with_a_mask_that_hides_nothing(mechanism: Any, length: int, device: torch.device) -> None:
    """The fused kernel against products that write the masks out, outputs and gradients, some queries missing too."""
    bound, mask = bind(mechanism, max_len=512, device=device), torch.ones(2, length, dtype=torch.bool, device=device)
    for is_causal in mechanism.traits.modes:
        for start in (0, 5, 33) if is_causal else (0,):
            q, k, v = (x.requires_grad_() for x in qkv(length, device=device))
            found = []
            for key_mask in (None, mask):
                if mechanism.traits.causal:
                    settings: dict[str, Any] = {"block_size": 16, "is_causal": is_causal, "key_mask": key_mask}
                    out = sinkhorn_attention(q[:, :, start:], k, v, bound.w.P, **settings)
                else:
                    out = bound(q, k, v, key_mask=key_mask)
                found.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v, bound.w.P))))
            for ours, theirs in zip(*found, strict=True):
                close(ours, theirs, 1e-10)


def test_refusals_and_settings() -> None:
    q, k, v = qkv(9)
    with pytest.raises(Unsupported, match=r"traits\.causal"):
        bind(SortCut(block_size=4))(q, k, v, is_causal=True)
    for mechanism in (Sinkhorn(block_size=7), SortCut(block_size=7)):
        with pytest.raises(ValueError, match="max_len=8 tokens and got 9"):
            bind(mechanism, max_len=8)(q, k, v)
    settings: list[dict[str, Any]] = [{"block_size": 0}, {"num_iterations": -1}, {"temperature": 0.0}, {"budget": 0}]
    for setting in settings:
        with pytest.raises(ValueError, match=f"{next(iter(setting))} must be at least"):
            SortCut(**setting)
