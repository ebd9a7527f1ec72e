"""Nystrom attention: exact where tokens are few, nearer to softmax with more landmarks, and of one sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast_attention import Nystrom, Softmax, Unsupported
from fast_attention.mechanisms.dense.nystrom import iterated_inverse, segment_means
from tests.cases import qkv
from tests.oracles.softmax import softmax


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())


def smooth(length: int, device: torch.device) -> list[Tensor]:
    """Tokens that change slowly along the sequence, as landmarks of neighbours want them."""
    noise = torch.randn(3, 1, 1, length + 24, 8, dtype=torch.float64)
    return list((noise.cumsum(-2)[..., 24:, :] - noise.cumsum(-2)[..., :-24, :]).div(24**0.5).to(device).unbind())


def test_the_error_falls_with_the_landmarks(device: torch.device) -> None:
    q, k, v = smooth(96, device)
    exact = softmax(Softmax(), q[0, 0], k[0, 0], v[0, 0], (), head=0, is_causal=False, key_mask=None)
    errors = [error(Nystrom(num_landmarks=m)(q, k, v)[0, 0], exact) for m in (2, 4, 8, 16, 32, 48, 96)]
    print(errors)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.2
    assert errors[-3] < 0.05
    assert errors[-1] < 1e-12


@pytest.mark.parametrize("length", [9, 40])
def test_as_many_visible_tokens_as_landmarks_are_attended_to_exactly(length: int, device: torch.device) -> None:
    """In some sequences of a batch and not in others, whatever the padded length."""
    q, k, v = qkv(length, batch=3, device=device)
    key_mask = torch.rand(3, length).argsort(-1).to(device) < torch.tensor([[9], [5], [0]], device=device)
    key_mask[2] = length > 9
    ours, exact = (m(q, k, v, key_mask=key_mask) for m in (Nystrom(num_landmarks=9), Softmax()))
    torch.testing.assert_close(ours[:2], exact[:2], rtol=1e-12, atol=1e-12)
    assert (error(ours[2], exact[2]) > 0.1) == (length > 9)


def test_more_iterations_come_nearer_to_the_inverse(device: torch.device) -> None:
    weights = (torch.randn(2, 3, 6, 6, dtype=torch.float64) * 2).softmax(-1).to(device)
    exact = torch.linalg.inv(weights)
    errors = [error(iterated_inverse(weights, count), exact) for count in (0, 2, 4, 6, 12, 24)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("length", [64, 61])
def test_segments_are_those_of_the_paper_where_landmarks_divide_the_tokens(length: int, device: torch.device) -> None:
    """Else their sizes differ by one at most; masked tokens are in none, even if they are no numbers."""
    x = torch.randn(2, 2, length, 3, dtype=torch.float64).to(device)
    (means,), count = segment_means(x, number=8, key_mask=None)
    assert count is None or sorted(count.tolist()) == [7, 7, 7, 8, 8, 8, 8, 8]
    if length == 64:
        torch.testing.assert_close(means, x.unflatten(-2, (8, 8)).mean(-2))
    padded = torch.cat([x[..., :20, :], torch.full_like(x[..., :9, :], torch.nan), x[..., 20:, :]], -2)
    key_mask = torch.ones(1, length + 9, dtype=torch.bool, device=device)
    key_mask[:, 20:29] = False
    (same,), _ = segment_means(padded, number=8, key_mask=key_mask)
    torch.testing.assert_close(same, means)


def test_what_it_cannot_do_is_refused_by_name(device: torch.device) -> None:
    q, k, v = qkv(9, 12, device=device)
    with pytest.raises(Unsupported, match=r"Nystrom\(\) does not support cross attention"):
        Nystrom()(q, k, v)
    with pytest.raises(Unsupported, match=r"Nystrom\(\) does not support is_causal=True"):
        Nystrom()(k, k, v, is_causal=True)
    with pytest.raises(ValueError, match="num_landmarks must be at least 1"):
        Nystrom(num_landmarks=0)
