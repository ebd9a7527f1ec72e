"""Rows of very different magnitudes: nothing overflows or vanishes, and nobody is moved by what he does not see."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from fast_attention import catalogue
from tests.cases import bind, some_keys
from tests.engine.test_large_inputs import HOMOGENEOUS, POSITIVE, definition, visible
from tests.fuzz.kit import fuzz

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
LENGTHS = st.integers(1, 150)


def rows(length: int, low: float, high: float, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v whose rows have magnitudes between 10^low and 10^high, every one its own; v's are ordinary."""
    made = [torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(3)]
    scales = [10.0 ** torch.empty(1, 2, length, 1, dtype=torch.float64).uniform_(low, high) for _ in range(2)]
    return [(x * s).to(dtype) for x, s in zip(made, [*scales, torch.ones(())], strict=True)]


@fuzz(
    "rows of many magnitudes, positive features",
    examples=25,
    text=st.sampled_from(POSITIVE),
    length=LENGTHS,
    high=st.floats(0.0, 4.0),
    is_causal=st.booleans(),
    masked=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
def test_positive_features(
    text: str, length: int, high: float, is_causal: bool, masked: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    bound = bind(catalogue.parse(text))
    torch.manual_seed(seed)
    inputs = rows(length, -3.0, high, dtype)
    key_mask = some_keys(1, length) if masked else None
    expected = definition(bound, *(x.double() for x in inputs), visible(length, is_causal, key_mask))
    leaves = [x.requires_grad_() for x in inputs]
    out = bind(catalogue.parse(text), dtype=dtype)(*leaves, is_causal=is_causal, key_mask=key_mask)
    out.double().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    assert torch.equal((out != 0).any(-1), (expected != 0).any(-1))
    if dtype == torch.float64:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@fuzz(
    "rows of many magnitudes, sums that overflow",
    examples=25,
    text=st.sampled_from(HOMOGENEOUS),
    length=LENGTHS,
    high=st.floats(0.0, 18.0),
    is_causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sums_that_would_overflow(text: str, length: int, high: float, is_causal: bool, seed: int) -> None:
    """In float32 as in float64, gradients finite; rows whose scores nearly cancel are nobody's."""
    torch.manual_seed(seed)
    mechanism = catalogue.parse(text)
    inputs = rows(length, -1.0, high, torch.float32)
    expected = mechanism(*(x.double() for x in inputs), is_causal=is_causal)
    leaves = [x.requires_grad_() for x in inputs]
    out = mechanism(*leaves, is_causal=is_causal)
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
    off = (out - expected).abs().amax(-1) > 1e-3 * (1 + expected.abs().amax(-1))
    assert int(off.sum()) <= 0.02 * off.numel() + 1
    if is_causal:
        streamed, state = mechanism.decode(*(x[..., : length // 2, :] for x in inputs))
        streamed = torch.cat(
            [streamed, mechanism.decode(*(x[..., length // 2 :, :] for x in inputs), state=state)[0]], -2
        )
        off = (streamed - expected).abs().amax(-1) > 1e-3 * (1 + expected.abs().amax(-1))
        assert int(off.sum()) <= 0.02 * off.numel() + 1


@fuzz(
    "an enormous future",
    examples=25,
    text=st.sampled_from([*POSITIVE, *HOMOGENEOUS, "Favor(num_features=8)", "Hybrid(near=BlockLocal(block_size=3))"]),
    length=st.integers(2, 150),
    value=st.sampled_from([1e10, 1e15, 1e19, -1e19]),
    which=st.integers(1, 2),
    seed=st.integers(0, 2**31),
    cut=st.floats(0.0, 1.0),
)
def test_an_enormous_future(text: str, length: int, value: float, which: int, seed: int, cut: float) -> None:
    bound = bind(catalogue.parse(text), dtype=torch.float32)
    torch.manual_seed(seed)
    inputs = rows(length, -1.0, 0.5, torch.float32)
    at = 1 + int(cut * (length - 2))
    found = []
    for changed in (False, True):
        leaves = [x.clone() for x in inputs]
        if changed:
            leaves[which][..., at:, :] = value
        leaves = [x.requires_grad_() for x in leaves]
        out = bound(*leaves, is_causal=True)[..., :at, :]
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        found.append([out.detach(), *(x[..., :at, :] for x in gradients)])
    for before, after in zip(*found, strict=True):  # a query that sees one key has gradients of zero, but for rounding
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-5 + 1e-3 * float(before.abs().max()))
