"""AFT in parts: near keys, and one key for all others, give what the whole sequence gives, and the oracle."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fast_attention.mechanisms.aft import reference
from fast_attention.mechanisms.aft.aft_conv import AFTConv
from fast_attention.mechanisms.aft.aft_local import AFTLocal
from tests.cases import bind, qkv, some_keys
from tests.oracles import ORACLES

LENGTH, BORDERS = 13, [0, 4, 5, 11, 13]


def part(m: AFTLocal | AFTConv, qkv: list[Tensor], w: object, first: int, end: int, **options: object) -> Tensor:
    """The queries from ``first`` on, the keys in their windows, and one for the others."""
    (q, k, v), causal, mask = qkv, options["is_causal"], options["key_mask"]
    low, high = max(first - m.reach, 0), end if causal else min(end + m.reach, LENGTH)
    far = [*range(low), *range(LENGTH if causal else high, LENGTH)]
    visible = None if not isinstance(mask, Tensor) else mask[:, None]
    scores, values = reference.masked_scores(k, visible), v if visible is None else v * visible[..., None]
    nothing = torch.full_like(k[..., :1, :], reference.FLOOR), torch.zeros_like(v[..., :1, :])
    rest = [torch.cat([one, x[..., far, :]], -2) for one, x in zip(nothing, (scores, values), strict=True)]
    near = None if visible is None else visible[..., low:high]
    return m.attend_part(
        q[..., first:end, :], k[..., low:high, :], v[..., low:high, :], w, reference.one_key(*rest),  # type: ignore[arg-type]
        start=first, before=first - low, is_causal=bool(causal), key_mask=near,
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "m",
    [AFTLocal(window=1), AFTLocal(window=4), AFTLocal(window=3, strict=True), AFTLocal(), AFTConv(kernel_size=5)],
    ids=repr,
)
def test_parts_are_the_whole(m: AFTLocal | AFTConv, is_causal: bool, masked: bool) -> None:
    bound = bind(m)
    inputs = [x.requires_grad_() for x in qkv(LENGTH)]
    mask = some_keys(2, LENGTH) if masked else None
    options = {"is_causal": is_causal, "key_mask": mask}
    spans = pairwise(BORDERS)
    out = torch.cat([part(m, inputs, bound.w, first, end, **options) for first, end in spans], -2)
    for n, head in ((0, 0), (1, 1)):
        row = None if mask is None else mask[n]
        wanted = ORACLES[type(m).__name__](
            m, *(x[n, head] for x in inputs), bound.w, head=head, is_causal=is_causal, key_mask=row
        )
        torch.testing.assert_close(out[n, head], wanted, rtol=0, atol=1e-12)
    direction, leaves = torch.randn_like(out), [*inputs, *bound.parameters()]
    whole = bound(inputs[0], inputs[1], inputs[2], is_causal=is_causal, key_mask=mask)
    ours, theirs = (torch.autograd.grad(y, leaves, direction) for y in (out, whole))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_one_key_of_huge_and_of_masked_keys() -> None:
    k, v = torch.tensor([[[-900.0], [900.0], [901.0]]]), torch.tensor([[[5.0], [1.0], [2.0]]])
    key, value = reference.one_key(k, v)
    assert torch.allclose(key, torch.logsumexp(k, -2, keepdim=True))
    assert torch.allclose(value, (k.softmax(-2) * v).sum(-2, keepdim=True))
    key, value = reference.one_key(torch.full_like(k, reference.FLOOR), torch.zeros_like(v))
    assert key.item() == torch.tensor(reference.FLOOR).item()
    assert value.item() == 0.0
