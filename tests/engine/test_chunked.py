"""A sequence in chunks that hand on a state: outputs, states and gradients of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast_attention.engine.advancing import scan


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_scan(size: int) -> None:
    """A decaying sum, its weight and its state trained: autograd over the whole, to rounding; twice, too."""
    x, flags = torch.randn(2, 13, 3, dtype=torch.float64), torch.rand(2, 13, 1) < 0.7
    w, first = torch.tensor(0.8, dtype=torch.float64), torch.randn(2, 1, 3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, first)]

    def step(tokens: Any, weights: Any, state: Any) -> Any:
        (own, seen, nothing), (decay,), (before,), rows = tokens, weights, state, []
        assert nothing is None
        for token, flag in zip(own.unbind(-2), seen.unbind(-2), strict=True):
            before = decay * before + (token * flag)[..., None, :]
            rows.append(before)
        return (torch.cat(rows, -2),), (before,)

    (out,), (last,) = scan(step, [x, flags, None], [w], (first,), size=size)
    (whole,), (end,) = step([x, flags, None], [w], (first,))
    ours, theirs = (
        torch.autograd.grad((a.square().sum() + b.exp().sum()), leaves, create_graph=True)
        for a, b in ((out, last), (whole, end))
    )
    torch.testing.assert_close([out, last, *ours], [whole, end, *theirs])
    twice = [torch.autograd.grad(sum(g.square().sum() for g in each), leaves) for each in (ours, theirs)]
    torch.testing.assert_close(*twice)
