"""LSH by the compiled core against the reference: buckets, who meets whom, gradients, layouts, threads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import core
from fast_attention.engine import trace
from fast_attention.mechanisms.lsh import compiled
from fast_attention.mechanisms.lsh.compiled import hashed_attention
from fast_attention.mechanisms.lsh.lsh import LSH
from fast_attention.mechanisms.lsh.reference import Rules, buckets, hashed_softmax
from fast_attention.traits import Shape
from tests.cases import qkv, some_keys
from tests.oracles.lsh import lsh

served = pytest.mark.skipif(bool(core.unavailable()), reason="needs the compiled core")
KINDS = {
    "causal": Rules(8, 16, True, False, True, True, 1.0),
    "both sides": Rules(8, 16, True, False, False, True, 0.7),
    "once per round": Rules(4, 5, True, False, True, False, 1.0),
    "sorted": Rules(8, 16, False, False, False, True, 1.0),
    "across": Rules(8, 16, False, True, False, False, -1.0),
    "chunks of several blocks": Rules(2, 300, True, False, False, True, 1.0),
    "causal chunks of several blocks": Rules(2, 300, True, False, True, True, 1.0),
}


def case(
    rules: Rules, length: int, masked: bool, *, width: int = 8, values: int = 8, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, values, buckets in three rounds, and who is seen; float32, not contiguous."""
    q, v = (
        scale * torch.randn(2, length, 3, width).mT.contiguous().mT.transpose(1, 2),
        torch.randn(2, 3, length, values),
    )
    bucket = torch.randint(0, rules.number, (2, 3, 3, length), dtype=torch.int32)
    seen = some_keys(2, length, q.device) if masked else torch.ones(2, length, dtype=torch.bool)
    return q, v, torch.where(seen[:, None, None, :], bucket, rules.number).int(), seen[:, None, :, None]


def outputs(form: Any, q: Tensor, v: Tensor, bucket: Tensor, seen: Tensor, **rules: Any) -> list[Tensor]:
    """The output, zero where masked, and the gradients of q and v."""
    q, v = q.detach().requires_grad_(), v.detach().requires_grad_()
    out = form(q, v, bucket, **rules).masked_fill(~seen, 0.0)
    return [out, *torch.autograd.grad(out.double().sin().sum(), (q, v))]


def near(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for mine, right in zip(ours, exact, strict=True):
        size = max(1.0, right.abs().max().item())
        torch.testing.assert_close(mine.double(), right.double(), rtol=0.0, atol=tolerance * size)


@served
@pytest.mark.parametrize("length", [1, 2, 63, 129, 333, 1003])
@pytest.mark.parametrize("kind", KINDS)
def test_the_core_is_the_reference(kind: str, length: int) -> None:
    """Against float64; queries times 30 need their largest score taken off. Odd widths fill no whole vectors."""
    rules = KINDS[kind]
    for masked, (width, values) in itertools.product((False, True), ((8, 16), (33, 5))):
        scale = 30.0 if masked == (width == 33) else 1.0
        q, v, bucket, seen = case(rules, length, masked, width=width, values=values, scale=scale)
        exact = outputs(hashed_softmax, q.double(), v.double(), bucket, seen, **vars(rules))
        with trace.recorded() as steps:
            ours = outputs(hashed_attention, q, v, bucket, seen, **vars(rules))
        assert [step.path for step in steps] == ["compiled core: chunks of hashed tokens"]
        near(ours, exact, 5e-6 if scale == 1.0 else 1e-4)


@served
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_segment_of_queries_sees_the_keys_of_others(is_causal: bool, masked: bool) -> None:
    """Long sequences are cut into several items of work."""
    rules = Rules(32, 64, True, False, is_causal, True, 1.0)
    q, v, bucket, seen = case(rules, 4333, masked)
    exact = outputs(hashed_softmax, q.double(), v.double(), bucket, seen, **vars(rules))
    near(outputs(hashed_attention, q, v, bucket, seen, **vars(rules)), exact, 5e-6)


@served
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [100, 300])
def test_the_core_reads_and_writes_16_bits(dtype: torch.dtype, length: int) -> None:
    rules = KINDS["causal"]
    q, v, bucket, seen = case(rules, length, False, width=16, values=16)
    q, v = q.to(dtype), v.to(dtype)
    exact = outputs(hashed_softmax, q.double(), v.double(), bucket, seen, **vars(rules))
    ours = outputs(compiled.hashed_attention, q, v, bucket, seen, **vars(rules))
    assert all(x.dtype == dtype for x in ours)
    near(ours, exact, 2e-2 if dtype == torch.bfloat16 else 2e-3)


@served
@pytest.mark.parametrize("sizes", [(8,), (2,), (4, 6)])
def test_buckets_and_ties_are_those_of_argmax(sizes: tuple[int, ...]) -> None:
    """Whole numbers, whose scores are exact and often equal, 0 among them."""
    for length in (1, 31, 700):
        q = torch.randint(-2, 3, (2, 3, length, 5)).float().mT.contiguous().mT
        rotations = torch.randint(-1, 2, (3, 4, 5, sum(sizes) // 2)).float()
        with_core = compiled.buckets(q, rotations, sizes, 48)
        assert with_core.dtype == torch.int32
        assert torch.equal(with_core.long(), buckets(q, rotations, sizes))
    both = torch.einsum("bhle,hrec->bhrlc", q, rotations).split([size // 2 for size in sizes], -1)[0]
    assert torch.equal(with_core.long() % sizes[0], torch.cat([both, -both], -1).argmax(-1))


@served
@pytest.mark.parametrize("length", [150, 1000])
def test_equal_bits_for_any_number_of_threads_and_nothing_is_left_of_the_memory(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a call is handed holds NaN: all of an output is written, and nothing of it is read before."""
    rules = KINDS["both sides"]
    q, v, bucket, seen = case(rules, length, True, width=16, values=24)
    rotations, empty = torch.randn(3, 2, 16, 4), torch.empty

    def poisoned(*sizes: Any, dtype: Any) -> Tensor:
        made = empty(*sizes, dtype=dtype)
        return made.fill_(float("nan") if dtype.is_floating_point else -(2**31))

    expected, threads = outputs(hashed_attention, q, v, bucket, seen, **vars(rules)), torch.get_num_threads()
    hashes = compiled.buckets(q, rotations, (8,), 8)
    monkeypatch.setattr(compiled.torch, "empty", poisoned)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(hashes, compiled.buckets(q, rotations, (8,), 8))
            found = outputs(hashed_attention, q, v, bucket, seen, **vars(rules))
            for mine, right in zip(found, expected, strict=True):
                assert torch.equal(mine, right)
    finally:
        torch.set_num_threads(threads)


@served
@pytest.mark.parametrize(
    "mechanism", [LSH(3, 2, 2), LSH(2, 2, 3, correct_duplicates=False), LSH(1, (2, 4), 4)], ids=repr
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_core_agrees_with_the_oracle(mechanism: LSH, masked: bool) -> None:
    """In float32, which the oracle tests do not run."""
    q, k, v = qkv(13, dtype=torch.float32)
    w, seen = mechanism.weights(Shape(heads=2, head_dim=8)), some_keys(2, 13, q.device) if masked else None
    for is_causal in (False, True):
        with trace.recorded() as steps:
            out = mechanism.attend(q, k, v, w, is_causal=is_causal, key_mask=None if seen is None else seen[:, None])
        assert [step.path.split(":")[0] for step in steps] == ["compiled core"]
        for b, h in itertools.product(range(2), range(2)):
            named = {"is_causal": is_causal, "key_mask": None if seen is None else seen[b]}
            right = lsh(mechanism, q[b, h].double(), k[b, h].double(), v[b, h].double(), w, head=h, **named)
            torch.testing.assert_close(out[b, h].double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_gradient_alone_and_twice(dtype: torch.dtype) -> None:
    """Only the values need a gradient; and a gradient that is differentiated again."""
    rules = KINDS["causal"]
    q, _, v = qkv(40, dtype=dtype)
    bucket = buckets(q, torch.randn(2, 2, 8, 4, dtype=q.dtype), (8,)).int()
    v.requires_grad_()
    (ours,) = torch.autograd.grad(hashed_attention(q, v, bucket, **vars(rules)).square().sum(), v, create_graph=True)
    (again,) = torch.autograd.grad(ours.square().sum(), v)
    assert again.isfinite().all()
    (theirs,) = torch.autograd.grad(hashed_softmax(q, v, bucket, **vars(rules)).square().sum(), v)
    torch.testing.assert_close(ours, theirs)


def test_without_the_core_the_reference_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "unavailable", lambda: "nobody built it")
    rules = KINDS["causal"]
    q, v, bucket, _ = case(rules, 40, False)
    with trace.recorded() as steps:
        out = hashed_attention(q, v, bucket, **vars(rules))
    assert [(step.path, step.why) for step in steps] == [("banded products over sorted tokens", "nobody built it")]
    assert torch.equal(out, hashed_softmax(q, v, bucket, **vars(rules)))
