"""Linformer: exact cases (mathematics section 13, item 10), its slots, its sharing, and what projections refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, Linformer, Shape, Unsupported, catalogue
from fast_attention.functional import convolved_attention, linformer_attention, pooled_attention, softmax_attention
from fast_attention.mechanisms.dense.projections import Convolution, LearnedProjection, MaxPool, MeanPool
from fast_attention.mechanisms.dense.reference import assign
from tests.cases import bind, qkv, some_keys

PROJECTIONS = [
    "LearnedProjection()",
    "LearnedProjection(sharing='key-value')",
    "MeanPool()",
    "MaxPool()",
    "Convolution()",
]
MECHANISMS = [catalogue.parse(f"Linformer(rank=5, projection={projection})") for projection in PROJECTIONS]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_identity_and_permutation_are_softmax(device: torch.device) -> None:
    """k = L and E = F the identity or any permutation of slots."""
    q, k, v = qkv(9, 13, device=device)
    exact, eye = softmax_attention(q, k, v), torch.eye(13, dtype=q.dtype, device=device)
    close(linformer_attention(q, k, v, eye), exact)
    close(linformer_attention(q, k, v, eye[torch.randperm(13)]), exact)
    order = torch.stack([torch.randperm(13), torch.randperm(13)])
    close(linformer_attention(q, k, v, eye[order], eye[order]), exact)
    apart = linformer_attention(q, k, v, eye, eye[torch.arange(12, -1, -1)])
    assert (apart - exact).abs().max() > 0.1, "E and F must agree"


@pytest.mark.parametrize(("length", "rank"), [(12, 4), (12, 12), (13, 5), (24, 8), (17, 16)])
def test_means_of_constant_slots_are_softmax(length: int, rank: int, device: torch.device) -> None:
    """Keys and values constant within their slot; a slot counts once for each token, so slots of two sizes do too."""
    q, k, v = qkv(7, length, device=device)
    slot = torch.arange(length, device=device) * rank // length
    k, v = (x[:, :, :rank][:, :, slot] for x in (k, v))
    for pool in (MeanPool(), MaxPool()):
        close(Linformer(rank=rank, projection=pool)(q, k, v), softmax_attention(q, k, v))


@pytest.mark.parametrize("pool", [MeanPool(), MaxPool()])
@pytest.mark.parametrize("length", [1, 2, 13, 32])
def test_pools_are_exact_up_to_their_rank(pool: Any, length: int, device: torch.device) -> None:
    q, k, v = qkv(length, device=device)
    mask = some_keys(2, length, device)
    pooled = Linformer(rank=32, projection=pool)
    close(pooled(q, k, v), softmax_attention(q, k, v))
    close(pooled(q, k, v, key_mask=mask), softmax_attention(q, k, v, key_mask=mask))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "rank"), [(1, 3), (7, 3), (13, 13), (64, 7), (97, 96), (5, 64)])
def test_every_visible_token_is_in_one_slot(length: int, rank: int, masked: bool, device: torch.device) -> None:
    mask = some_keys(3, length, device)[:, None] if masked else None
    index, filled = assign(length, rank, mask, device)
    visible = torch.ones(3, length, dtype=torch.bool, device=device) if mask is None else mask[:, 0]
    for sequence in range(3):
        where = index if mask is None else index[sequence, 0]
        used = filled if mask is None else filled[sequence, 0]
        tokens = where[used]
        assert tokens.tolist() == visible[sequence].nonzero()[:, 0].tolist(), "all, once, in order"
        sizes = used.sum(-1)
        assert sizes.max() - sizes.min() <= 1


def test_convolution_is_a_projection_with_shifted_rows(device: torch.device) -> None:
    q, k, v = qkv(12, device=device)
    E, F = torch.randn(2, 2, 4, dtype=q.dtype, device=device)
    matrices = [torch.stack([torch.block_diag(*[row[None]] * 3) for row in kernel]) for kernel in (E, F)]
    close(convolved_attention(q, k, v, E, F), linformer_attention(q, k, v, *matrices))
    half = torch.full((2, 4), 0.25, dtype=q.dtype, device=device)
    close(convolved_attention(q, k, v, half, half), pooled_attention(q, k, v, rank=3))


def test_the_attention_matrix_has_rank_k(device: torch.device) -> None:
    for mechanism in MECHANISMS:
        if mechanism.traits.matrix:
            q, k, _ = qkv(24, device=device)
            eye = torch.eye(24, dtype=q.dtype, device=device).expand(2, 2, 24, 24)
            matrix = bind(mechanism, device=device)(q, k, eye)
            assert int(torch.linalg.matrix_rank(matrix, rtol=1e-9).max()) <= 5


def test_sharing_counts_distinct_matrices() -> None:
    """24 layers x heads of 12: 288, 24, 12 and 1 matrices (arXiv 2006.04768, section 4)."""
    counts = {}
    for sharing in ("none", "headwise", "key-value", "layerwise"):
        mechanism = Linformer(rank=4, projection=LearnedProjection(sharing=sharing))
        first = Bound(mechanism, Shape(12, 2, 8))
        tied = first if sharing == "layerwise" else None
        layers = [first, *(Bound(mechanism, Shape(12, 2, 8), tied=tied) for _ in range(11))]
        parameters = {id(p): p for layer in layers for p in layer.parameters()}.values()
        counts[sharing] = sum(p.numel() for p in parameters) // (4 * 8)
    assert counts == {"none": 288, "headwise": 24, "key-value": 12, "layerwise": 1}


def test_weights_start_with_the_variance_of_their_rank() -> None:
    E = Linformer(rank=50).weights(Shape(2, 8, 400)).E.detach()
    assert E.abs().max() <= 50**-0.5
    assert abs(float(E.var()) * 3 * 50 - 1) < 0.05


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_masked_keys_leave_no_trace(mechanism: Any, device: torch.device) -> None:
    bound, (q, k, v) = bind(mechanism, device=device), qkv(23, device=device)
    mask = torch.ones(2, 23, dtype=torch.bool, device=device)
    mask[0, 17:], mask[1, 3:9] = False, False
    out = bound(q, k, v, key_mask=mask)
    hidden = ~mask[:, None, :, None]
    close(bound(q, k.masked_fill(hidden, 1e4), v.masked_fill(hidden, -1e30), key_mask=mask), out)
    close(bound(q[:1], k[:1, :, :17], v[:1, :, :17]), out[:1], 1e-10)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_causality_and_excess_length_are_refused(mechanism: Any) -> None:
    bound, (q, k, v) = bind(mechanism, max_len=20), qkv(21)
    with pytest.raises(Unsupported, match=r"traits\.causal"):
        bound(q, k, v, is_causal=True)
    if mechanism.traits.needs_max_len:
        with pytest.raises(ValueError, match="max_len=20"):
            bound(q, k, v)
    else:
        assert bound(q, k, v).shape == v.shape


def test_traits_follow_the_projection() -> None:
    for projection in (LearnedProjection(), Convolution()):
        traits = Linformer(projection=projection).traits
        assert (traits.learned, traits.needs_max_len, traits.approximates) == (True, True, None)
    for projection in (MeanPool(), MaxPool()):
        traits = Linformer(projection=projection).traits
        assert (traits.learned, traits.needs_max_len, traits.approximates) == (False, False, "Softmax")
    assert not Linformer(projection=MeanPool()).needs_weights


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1"):
        Linformer(rank=0)
    with pytest.raises(ValueError, match="sharing must be one of 'none', 'headwise'"):
        LearnedProjection(sharing="both")  # type: ignore[arg-type]
