"""Hybrid in the compiled core: the reference's outputs and gradients, equal bits for any number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import BlockLocal, Bound, Hybrid, LinearAttention, Shape, core
from fast_attention.engine import trace
from fast_attention.mechanisms.hybrid import compiled
from tests.cases import bind, qkv, some_keys

pytestmark = pytest.mark.skipif(bool(core.unavailable()), reason="no compiled core")

SIZES = [(1, 65, 8, 8), (333, 333, 16, 5), (70, 700, 20, 33), (130, 40, 64, 64)]  # queries, keys, widths
TEXTS = [
    "Hybrid(near=BlockLocal(block_size=8), far=LearnedFeatures(num_features=9), first=2)",
    "Hybrid(near=BlockLocal(block_size=20, before=2, after=0), far=FavorPlus(num_features=40), first=0, last=3)",
    "Hybrid(near=BlockLocal(block_size=70, before=0, scale=0.3), far=FavorPlusPlus(num_features=8), first=3)",
    "Hybrid(near=BlockLocal(block_size=140, before=0, after=0), far=LinearAttention(), last=0)",
    "Hybrid(near=BlockLocal(block_size=3, before=0, after=0), far=LinearAttention(feature_map=Relu(offset=0.01)))",
    "Hybrid(near=BlockLocal(block_size=9, bias=T5Buckets(), sinks=True), far=LearnedFeatures(5), first=2)",
]  # fmt: skip


def results(bound: Any, tokens: tuple[Tensor, ...], wide: bool = False, **visible: Any) -> list[Tensor]:
    """Outputs and gradients of all tokens and weights."""
    bound, dtype = (bound.double(), torch.float64) if wide else (bound.float(), tokens[0].dtype)
    given = [x.detach().to(dtype).requires_grad_() for x in tokens]
    with trace.recorded() as steps:
        out = bound(*given, **visible)
    assert steps[0].path.startswith("exact" if "covers" in steps[0].why else "near" if wide else trace.CORE), steps
    torch.manual_seed(1)
    probe = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    wanted = [*given, *bound.parameters()]
    return [out.detach(), *torch.autograd.grad(out, wanted, probe, allow_unused=True, materialize_grads=True)]


def agree(ours: list[Tensor], exact: list[Tensor], tolerance: float = 3e-5) -> None:
    """Relative to the largest number."""
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * (float(b.abs().max()) + 0.1))


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("text", TEXTS)
def test_outputs_and_gradients_are_the_references(text: str, width: int) -> None:
    """Causal or not, masked or not, with more keys than queries and fewer, by vectors of every width that is there."""
    widest = torch.ops.fast_attention_core.use_width(16)
    try:
        if torch.ops.fast_attention_core.use_width(min(width, widest)) != width:
            pytest.skip("no such vectors")
        for length, keys, head_dim, values in SIZES if width == widest else SIZES[1:3]:
            bound = bind(text, head_dim=head_dim)
            q, k, _ = qkv(length, keys, width=head_dim, dtype=torch.float32)
            tokens = q, k, torch.randn(2, 2, keys, values)
            for is_causal in (False, True):
                for mask in (None, some_keys(2, keys)):
                    visible: Any = {"is_causal": is_causal, "key_mask": mask}
                    agree(results(bound, tokens, **visible), results(bound, tokens, wide=True, **visible))
    finally:
        torch.ops.fast_attention_core.use_width(core.native_width())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", TEXTS[:2])
def test_halves_are_sums_in_float32(text: str, dtype: torch.dtype) -> None:
    """The error is that of rounding the result."""
    bound, tokens = bind(text, head_dim=16), tuple(x.to(dtype) for x in qkv(200, width=16))
    for is_causal in (False, True):
        ours, exact = (
            results(bound, tokens, is_causal=is_causal),
            results(bound, tokens, wide=True, is_causal=is_causal),
        )
        assert all(x.dtype == dtype for x in ours[:4])
        agree(ours, exact, tolerance=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("text", TEXTS)
def test_neither_threads_nor_memory_change_a_bit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a thread does all of a head or sections of it, with sums in its memory or in the call's."""
    bound, tokens, threads = bind(text, head_dim=16), qkv(400, width=16, dtype=torch.float32), torch.get_num_threads()
    expected = results(bound, tokens)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for most in (0, compiled.MOST):
                monkeypatch.setattr(compiled, "MOST", most)
                for a, b in zip(results(bound, tokens), expected, strict=True):
                    assert torch.equal(a, b)
                with torch.no_grad():
                    assert torch.equal(bound(*tokens), expected[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("far", ["FavorPlus(num_features=16)", "LearnedFeatures(num_features=16)"])
def test_features_that_grow_to_the_end(far: str) -> None:
    """By hundreds, as powers of two: every block of keys has scales of its own."""
    bound = bind(f"Hybrid(near=BlockLocal(block_size=16), far={far})", head_dim=16)
    q, k, v = qkv(300, width=16, dtype=torch.float32)
    for growing in (torch.linspace(0, 12, 300), torch.linspace(12, 0, 300)):
        tokens = q, k * growing[:, None], v
        for is_causal in (False, True):
            agree(
                results(bound, tokens, is_causal=is_causal),
                results(bound, tokens, wide=True, is_causal=is_causal),
                1e-4,
            )


def test_sums_out_of_range_go_by_the_reference() -> None:
    bound = Bound(Hybrid(near=BlockLocal(block_size=8), far=LinearAttention()), Shape(2, 8))
    q, k, v = qkv(100, dtype=torch.float32)
    with trace.recorded() as steps:
        out = bound(1e6 * q, 1e31 * k, v)
    assert "not finite" in steps[-1].why
    assert out.isfinite().all()


def test_what_is_not_finite_stays_in_its_head_and_is_not_lost() -> None:
    bound = bind(TEXTS[1], head_dim=16, dtype=torch.float32)
    q, k, v = qkv(300, width=16, dtype=torch.float32)
    q[0, 1, 250, 3] = float("nan")
    out = bound(q, k, v)
    assert out[0, 1, 250].isnan().all()
    out[0, 1, 250] = 0.0
    assert out.isfinite().all()


def test_gradients_of_gradients_are_the_references() -> None:
    bound = bind(TEXTS[0], head_dim=8, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv(60, dtype=torch.float32))
    sides = []
    for switched in (False, True):
        with trace.implementation("reference" if switched else "auto"):
            out = bound(q, k, v)
            first = torch.autograd.grad(out.sin().sum(), (q, k, v, *bound.parameters()), create_graph=True)
            sides.append(torch.autograd.grad(sum(x.sin().sum() for x in first), (q, k, v, *bound.parameters())))
    for a, b in zip(*sides, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_a_prompt_is_read_by_the_core() -> None:
    """With the state that the reference makes of it."""
    bound = bind(TEXTS[0], dtype=torch.float32)
    q, k, v = qkv(90, dtype=torch.float32)
    with trace.recorded() as steps:
        out, state = bound.decode(q[..., :80, :], k[..., :80, :], v[..., :80, :], None)
    assert steps[0].path == compiled.PATH
    rest = bound.decode(q[..., 80:, :], k[..., 80:, :], v[..., 80:, :], state)[0]
    torch.testing.assert_close(torch.cat([out, rest], -2), bound(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5)
