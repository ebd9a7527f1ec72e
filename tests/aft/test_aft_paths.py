"""AFT's passes in blocks against the plain definitions: outputs and gradients, at the blocks' edges, at any scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.functional import aft_full, aft_local, aft_simple
from fast_attention.mechanisms.aft import aft_full as full
from fast_attention.mechanisms.aft import aft_local as window
from fast_attention.mechanisms.aft import fast

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 129, 257, 1000]
Call = Callable[..., Tensor]


def reference(q: Tensor, k: Tensor, v: Tensor, w: Tensor, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """Every channel's softmax in float64, channel by channel; w (heads or 1, L, S), -inf where nothing is seen."""
    length, keys = q.shape[-2], k.shape[-2]
    hidden = torch.zeros(length, keys, dtype=torch.bool)
    if is_causal:
        hidden = torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1)
    if key_mask is not None:
        key_mask = key_mask[:, None]
        hidden = hidden | ~key_mask[..., None, :]
    rows = []
    for channel in range(v.shape[-1]):
        scores = (k[..., None, :, channel] + w).double().masked_fill(hidden, float("-inf"))
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        values = v[..., channel] if key_mask is None else v[..., channel].masked_fill(~key_mask, 0.0)
        rows.append((weights @ values[..., None].double())[..., 0])
    return q.double().sigmoid() * torch.stack(rows, -1)


def spread_out(band: Tensor, n: int, *, strict: bool) -> Tensor:
    """The biases (heads or 1, n, n) of a band."""
    reach = band.shape[-1] // 2
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    place = (distance + reach).clamp(0, 2 * reach).expand(band.shape[0], n, n)
    w = band.expand(-1, n, -1).gather(-1, place)
    return torch.where(distance.abs() <= reach, w, torch.full_like(w, float("-inf") if strict else 0.0))


def compare(ours: Call, theirs: Call, inputs: tuple[Tensor, ...], limit: float) -> None:
    """Outputs and gradients."""
    low = [x.detach().requires_grad_() for x in inputs]
    high = [x.detach().double().requires_grad_() for x in inputs]
    out, exact = ours(*low), theirs(*high)
    probe = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(out.double(), exact, rtol=limit, atol=limit)
    with torch.no_grad():
        assert torch.equal(ours(*low), out)
    found = torch.autograd.grad(out, low, probe.to(out.dtype))
    expected = torch.autograd.grad(exact, high, probe)
    for a, b in zip(found, expected, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a.double(), b, rtol=10 * limit, atol=10 * limit)


def tensors(n: int, *, dtype: torch.dtype = torch.float64, keys: int | None = None, seed: int = 0) -> tuple[Any, ...]:
    """Queries, keys and values that are not contiguous, (2, 3, n, 2), and a mask (2, n)."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (n, keys or n, keys or n)
    q, k, v = (torch.randn(2, size, 3, 2, dtype=dtype, generator=draw).transpose(1, 2) for size in sizes)
    mask = torch.rand(2, keys or n, generator=draw) < 0.7
    mask[1, : min(9, n // 2)] = False
    return q, k, v, mask


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks at lengths that a test can afford."""
    monkeypatch.setattr(fast, "NUMBERS", 12 * 64)
    monkeypatch.setattr(window, "NUMBERS", 1 << 10)
    monkeypatch.setattr(full, "ROWS", 64)
    monkeypatch.setattr(fast, "SHORT", 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_simple(n: int, is_causal: bool, masked: bool) -> None:
    q, k, v, mask = tensors(n)
    options: Any = {"is_causal": is_causal, "key_mask": mask if masked else None}
    zero = torch.zeros(1, n, n, dtype=torch.float64)
    for scale in (1.0, 100.0):
        compare(
            lambda *x: aft_simple(*x, **options), lambda *x: reference(*x, zero, **options), (q, scale * k, v), 1e-11
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [n for n in LENGTHS if n < 300])
def test_full(n: int, is_causal: bool, masked: bool) -> None:
    q, k, v, mask = tensors(n)
    options: Any = {"is_causal": is_causal, "key_mask": mask if masked else None}
    w = torch.randn(n + 3, n + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    compare(
        lambda *x: aft_full(*x, **options), lambda q, k, v, w: reference(q, k, v, w[None, :n, :n], **options),
        (q, k, v, w), 1e-11,
    )  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [n for n in LENGTHS if n < 300])
def test_windows(n: int, is_causal: bool, masked: bool, strict: bool) -> None:
    q, k, v, mask = tensors(n)
    options: Any = {"is_causal": is_causal, "key_mask": mask if masked else None}
    draw = torch.Generator().manual_seed(1)
    for heads, rows, reach in ((1, n, 4), (1, 1, 20), (3, 1, 5), (3, 1, 0), (1, n, 70)):
        band = 2 * torch.randn(heads, rows, 2 * reach + 1, dtype=torch.float64, generator=draw)
        compare(
            lambda *x: aft_local(*x, strict=strict, **options),
            lambda q, k, v, b: reference(q, k, v, spread_out(b, n, strict=strict), **options),
            (q, k, v, band), 1e-11,
        )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
def test_other_numbers_of_queries(is_causal: bool) -> None:
    """More and fewer queries than keys; causal ones end where the keys end."""
    for n, keys in ((5, 130), (129, 70)):
        q, k, v, mask = tensors(n, keys=keys)
        for key_mask in (None, mask):
            options: Any = {"is_causal": is_causal, "key_mask": key_mask}
            zero = torch.zeros(1, n, keys, dtype=torch.float64)
            compare(lambda *x: aft_simple(*x, **options), lambda *x: reference(*x, zero, **options), (q, k, v), 1e-11)
            w = torch.randn(140, 140, dtype=torch.float64)
            shift = keys - n if is_causal else 0
            rows = torch.arange(n).add(shift).clamp(min=0)
            compare(
                lambda *x: aft_full(*x, **options),
                lambda q, k, v, w: reference(q, k, v, w[None, rows, :keys], **options),
                (q, k, v, w), 1e-11,
            )  # fmt: skip


@pytest.mark.parametrize("where", [0, 5, 15, 16, 63, 64, 100])
@pytest.mark.parametrize("jump", [-150.0, 20.0, 50.0, 150.0])
def test_a_jump_of_the_keys_anywhere(jump: float, where: int) -> None:
    """In float32: inside a group of tokens, at its edge, at a chunk's edge; for one token and for all from there."""
    n = 150
    q, k, v, _ = tensors(n, dtype=torch.float32)
    w = torch.randn(n, n, generator=torch.Generator().manual_seed(1))
    band = torch.randn(3, 1, 11, generator=torch.Generator().manual_seed(1))
    for until in (where + 1, n):
        keys = k.clone()
        keys[..., where:until, :] += jump
        zero, wide = torch.zeros(1, n, n), spread_out(band, n, strict=False)
        calls: list[tuple[Call, Tensor]] = [
            (lambda q, k, v: aft_simple(q, k, v, is_causal=True), zero),
            (lambda q, k, v: aft_full(q, k, v, w, is_causal=True), w[None]),
            (lambda q, k, v: aft_local(q, k, v, band, is_causal=True), wide),
        ]
        for ours, biases in calls:
            compare(ours, lambda *x, b=biases: reference(*x, b, is_causal=True, key_mask=None), (q, keys, v), 1e-4)


def test_later_tokens_choose_no_earlier_sum() -> None:
    """Whatever follows, in whichever path it ends: what came before moves by rounding only."""
    n, now = 200, 75
    q, k, v, _ = tensors(n, dtype=torch.float32)
    w, band = torch.randn(n, n), torch.randn(1, n, 9)
    for call in (
        lambda *x: aft_simple(*x, is_causal=True),
        lambda *x: aft_full(*x, w, is_causal=True),
        lambda *x: aft_local(*x, band, is_causal=True),
        lambda *x: aft_local(*x, band, is_causal=True, strict=True),
    ):
        before = call(q, k, v)[..., :now, :]
        for factor in (6.0, 60.0, -60.0):
            changed = [torch.cat([x[..., :now, :], factor * x[..., now:, :]], -2) for x in (q, k, v)]
            torch.testing.assert_close(call(*changed)[..., :now, :], before, rtol=3e-5, atol=3e-6)


def test_which_path_ran() -> None:
    q, k, v, _ = tensors(40)
    band = torch.randn(3, 1, 11)
    with trace.recorded() as steps:
        for keys in (k, 100 * k):
            aft_simple(q, keys, v, is_causal=True)
            aft_full(q, keys, v, torch.zeros(40, 40, dtype=torch.float64), is_causal=True)
            aft_local(q, keys, v, band.double(), is_causal=True)
    words = [step.path.split()[0] for step in steps]
    assert words == ["prefix", "products", "products", "running", "triangles", "triangles"]


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_gradients(is_causal: bool) -> None:
    q, k, v, _ = (x[:1, :1, :, :1] if x.ndim == 4 else x for x in tensors(9))
    inputs = tuple(x.contiguous().requires_grad_() for x in (q, k, v))
    band = torch.randn(1, 1, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(9, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *x: aft_simple(*x, is_causal=is_causal), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: aft_full(*x, is_causal=is_causal), (*inputs, w))
    assert torch.autograd.gradgradcheck(lambda *x: aft_local(*x, is_causal=is_causal), (*inputs, band))


def test_long_sums_lose_nothing() -> None:
    """float32 sums over many tokens, in many blocks: within 1e-6 of float64."""
    n = 1 << 17
    k, v = torch.randn(2, 1, 1, n, 2)
    q = torch.full((1, 1, n, 2), 40.0)
    v = v + 1.0
    for is_causal in (False, True):
        low = aft_simple(q, k, v, is_causal=is_causal)
        high = aft_simple(q.double(), k.double(), v.double(), is_causal=is_causal)
        error = (low.double() - high)[..., n // 2 :, :].abs().amax() / high[..., n // 2 :, :].abs().amax()
        assert float(error) < 5e-7


@pytest.mark.parametrize("n", [1, 2, 17, 63, 130, 256])
def test_few_tokens(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In smaller groups; keys far above the first go token by token, with the same outputs."""
    monkeypatch.setattr(fast, "SHORT", 256)
    q, k, v, _ = tensors(n)
    zero = torch.zeros(1, n, n, dtype=torch.float64)
    for scale, offset in ((1.0, 0.0), (1.0, 500.0), (100.0, 0.0)):
        compare(
            lambda *x: aft_simple(*x, is_causal=True), lambda *x: reference(*x, zero, is_causal=True, key_mask=None),
            (q, scale * k + offset, v), 1e-11,
        )  # fmt: skip


def test_few_tokens_know_no_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "SHORT", 256)
    q, k, v, _ = tensors(40)
    before = aft_simple(q, k, v, is_causal=True)
    for x, value in ((k, 1e4), (v, float("inf")), (v, float("nan"))):
        moved = x.clone()
        moved[..., 30:, :] = value
        after = aft_simple(q, moved if x is k else k, moved if x is v else v, is_causal=True)
        torch.testing.assert_close(after[..., :30, :], before[..., :30, :], rtol=1e-12, atol=1e-12)


def test_few_tokens_have_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "SHORT", 256)
    inputs = [x[:1, :1].clone().requires_grad_() for x in tensors(5)[:3]]
    assert torch.autograd.gradgradcheck(lambda *x: aft_simple(*x, is_causal=True), inputs)
