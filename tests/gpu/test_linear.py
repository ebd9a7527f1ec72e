"""Linear attention by kernels, in Triton's interpreter: oracle, gradients, masks, states, operations, NaN in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fast_attention import LinearAttention, attention, explain
from fast_attention.engine import trace
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.functional import implementation
from fast_attention.gpu import configurations, maps
from fast_attention.gpu.configurations import TABLE, WIDEST, configuration
from fast_attention.gpu.tiles import round_tf32
from fast_attention.mechanisms.linear import kernels
from tests.gpu.conftest import INTERPRETED
from tests.gpu.heads import KINDS, assert_near, by_torchs_rules, double, poisoned, tensors
from tests.oracles.linear import linear as oracle

pytestmark = pytest.mark.usefixtures("interpreted")
ELU, RELU = ({"code": code, "offset": 0.0} for code in (maps.ELU, maps.RELU))
LONG = 150 if INTERPRETED else 300  # tokens that are more than one chunk
SIZES = [(16, 16, 64), (20, 33, 70), (64, 64, LONG), (130, 70, 65)]  # width, values, tokens


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two blocks, or four with float32's digits, for Triton's interpreter takes milliseconds a block."""
    if INTERPRETED:
        rows = {width: row._replace(chunk=2 * row.block) for width, row in configurations.TABLE.items()}
        monkeypatch.setattr(configurations, "TABLE", rows)


@pytest.mark.parametrize("phi", [EluPlusOne(), Relu(offset=0.1)], ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keys", [70, 81, 60])
def test_the_oracle(phi: FeatureMap, is_causal: bool, keys: int) -> None:
    mechanism = LinearAttention(feature_map=phi)
    (q, k, v), mask = tensors(5, 3, 70, keys, batch=2, heads=2)
    out = attention(q, k, v, mechanism, is_causal=is_causal, key_mask=mask[:, 0])
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    x = double(q, k, v)
    expected = torch.zeros_like(out, dtype=torch.float64)
    one = oracle(mechanism, *(t[1, 0] for t in x), (), head=0, is_causal=is_causal, key_mask=mask[1, 0])
    assert_near(out[1, 0], one, 1e-6)
    expected = torch.autograd.grad(one, x, grad[1, 0].double())
    for mine, right in zip(found, expected, strict=True):
        assert_near(mine[1, 0], right[1, 0], 2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("is_causal", "masked"), [(True, False), (True, True), (False, True)])
def test_every_configuration(sizes: tuple[int, int, int], is_causal: bool, masked: bool) -> None:
    agree(sizes, torch.float32, is_causal, masked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_low_precision(dtype: torch.dtype, is_causal: bool) -> None:
    agree((20, 33, 70), dtype, is_causal, True)


def agree(sizes: tuple[int, int, int], dtype: torch.dtype, is_causal: bool, masked: bool) -> None:
    """Outputs and gradients are those of the plain form in float64."""
    (q, k, v), mask = tensors(*sizes, dtype=dtype)
    mask = mask if masked else None
    x = double(q, k, v)
    wide = None if mask is None else mask.expand(k.shape[:-1])
    if is_causal:
        out = kernels.chunk_scan(q, k, v, mask, None, None, eps=1e-6, **ELU)[0]
        expected = kernels.plain_scan(*x, wide, None, None, eps=1e-6, **ELU)[0]
    else:
        out = kernels.read_sums(q, kernels.key_sums(k, v, mask, **ELU), eps=1e-6, **ELU)
        expected = kernels.plain_read(x[0], kernels.plain_sums(*x[1:], wide, **ELU), eps=1e-6, **ELU)
    assert out.dtype == dtype
    assert_near(out, expected, KINDS[dtype])
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for mine, right in zip(found, torch.autograd.grad(expected, x, grad.double()), strict=True):
        assert_near(mine, right, KINDS[dtype])


def test_the_table_has_a_row_for_every_width_and_its_sizes_fit() -> None:
    for width, values in itertools.product((1, 16, 17, 64, 80, 128, 200, WIDEST), repeat=2):
        row = configuration(width, values, exact=width == 80)
        assert row.chunk % row.block == 0
        assert min(row.block, row.columns, row.values) >= 16  # what a product on tensor cores takes
    assert [*TABLE] == sorted(TABLE)


def test_hidden_tokens_are_not_read() -> None:
    (q, k, v), mask = tensors(16, 16, 70)
    outs = []
    for rubbish in (0.0, float("nan")):
        with torch.no_grad():
            k.masked_fill_(~mask[..., None], rubbish)
            v.masked_fill_(~mask[..., None], rubbish)
        scanned = kernels.chunk_scan(q, k, v, mask, None, None, eps=1e-6, **ELU)[0]
        sums = kernels.key_sums(k, v, mask, **ELU)
        for out in (scanned, kernels.read_sums(q, sums, eps=1e-6, **ELU)):
            outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for clean, rubbished in zip(outs[:2], outs[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(clean, rubbished, strict=True))
        assert not clean[2][~mask.expand(1, 1, 70)].any()


def test_no_memory_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(1)
        (q, k, v), mask = tensors(20, 33, LONG)
        first = torch.rand(1, 1, 20 * 33 + 20, requires_grad=True)
        scanned = kernels.chunk_scan(q, k, v, mask, first, None, eps=1e-6, **ELU)
        read = kernels.read_sums(q, kernels.key_sums(k, v, mask, **ELU), eps=1e-6, **ELU)
        loss = sum(x.square().sum() for x in (*scanned, read))
        return [*scanned, read, *torch.autograd.grad(loss, (q, k, v, first))]  # type: ignore[arg-type]

    clean = results()
    poisoned(monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(clean, results(), strict=True))


@triton.jit
def _cut(X, OUT, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(OUT + at, round_tf32(tl.load(X + at), "tf32"))


def test_numbers_are_cut_to_the_nearest_and_a_nan_stays() -> None:
    """Also a NaN as GPUs make it, all bits set, which one more bit makes a zero."""
    bits = torch.tensor(
        [0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000, 0x3F800FFF, 0x3F801000, -0x407FEFFF, 0], dtype=torch.int32
    )
    found = torch.empty(8)
    _cut[(1,)](bits.view(torch.float32), found, SIZE=8)
    assert found[:3].isnan().all()
    assert found[3:].tolist() == [float("inf"), 1.0, 1 + 2**-10, -1 - 2**-10, 0.0]


def test_whole_numbers_are_exact() -> None:
    """What is added and multiplied only must come out to the bit, in every part of every tile."""
    q, k, v = (torch.randint(1, 3, (1, 2, 150, n)).float() for n in (20, 20, 33))
    fast = kernels.chunk_scan.cuda
    assert fast is not None
    (out, last), (factors, *_) = fast.forward(q, k, v, None, None, None, keep=True, eps=0.0, **RELU)
    weights = (q.double() @ k.double().mT).tril()
    assert torch.equal(last, kernels.plain_sums(k.double(), v.double(), None, **RELU).float())
    assert torch.equal(factors, 1.0 / weights.sum(-1).float())
    assert torch.equal(out, (weights @ v.double()).float() * factors[..., None])


def test_parts_behind_a_state_are_the_whole() -> None:
    mechanism = LinearAttention(feature_map=Relu(offset=0.1))
    (q, k, v), _ = tensors(8, 12, 90)
    whole = attention(q, k, v, mechanism, is_causal=True)
    state, parts = None, []
    for rows in (slice(0, 33), slice(33, 34), slice(34, 90)):
        out, state = mechanism.advance(q[..., rows, :], k[..., rows, :], v[..., rows, :], (), state, key_mask=None)
        parts.append(out)
    assert_near(torch.cat(parts, -2), whole.double(), 1e-6)
    assert state is not None
    grad = torch.randn_like(whole)
    for mine, right in zip(
        torch.autograd.grad(torch.cat(parts, -2), (q, k, v), grad),
        torch.autograd.grad(whole, (q, k, v), grad),
        strict=True,
    ):
        assert_near(mine, right.double(), 2e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_decoding_is_one_kernel_and_the_causal_call(masked: bool) -> None:
    (q, k, v), mask = tensors(40, 36, 24)
    mask[..., 21] = False
    q, k, v, mechanism = q.detach(), k.detach(), v.detach(), LinearAttention(feature_map=Relu(offset=0.1))
    key_mask = mask if masked else None
    whole = mechanism.attend(q, k, v, (), is_causal=True, key_mask=key_mask)
    out, state = mechanism.advance(
        *(t[..., :20, :] for t in (q, k, v)), (), None, key_mask=None if key_mask is None else key_mask[..., :20]
    )
    for i in range(20, 24):
        one = slice(i, i + 1)
        part = None if key_mask is None else key_mask[..., one]
        with trace.recorded() as steps:
            out, state = mechanism.advance(*(t[..., one, :] for t in (q, k, v)), (), state, key_mask=part)
        assert [step.path for step in steps] == [f"{trace.KERNEL}: one token"]
        assert_near(out, whole[..., one, :].double(), 2e-6)


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    (q, k, v), _ = tensors(6, 4, 20)
    found = []
    for form in (kernels.chunk_scan, kernels.plain_scan):
        out = form(q, k, v, None, None, None, eps=1e-6, **ELU)[0]
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v)))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 1e-5)


def test_second_derivatives_are_of_full_precision_under_autocast() -> None:
    (q, k, v), _ = tensors(6, 4, 20)
    found = []
    for enabled in (False, True):
        with torch.autocast(q.device.type, dtype=torch.bfloat16, enabled=enabled):
            out = kernels.chunk_scan(q, k, v, None, None, None, eps=1e-6, **ELU)[0]
            (first,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["chunk_scan", "key_sums", "read_sums"])
def test_operations_keep_torchs_rules(name: str) -> None:
    (q, k, v), mask = tensors(8, 4, 40)
    first = torch.rand(1, 1, 8 * 4 + 8, requires_grad=True)
    given: dict[str, Any] = {
        "chunk_scan": ((q, k, v, mask, first, None), {"eps": 1e-6, **ELU}),
        "key_sums": ((k, v, mask), ELU),
        "read_sums": ((q, first), {"eps": 1e-6, **ELU}),
    }
    assert by_torchs_rules(getattr(kernels, name), *given[name])


@pytest.mark.parametrize("is_causal", [True, False])
def test_compiled_as_one_graph(is_causal: bool) -> None:
    mechanism = LinearAttention()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, mechanism, is_causal=is_causal).cos()

    (q, k, v), _ = tensors(8, 4, 40)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_near(out, run(q, k, v).double(), 1e-6)
    for mine, right in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(run(q, k, v).sum(), (q, k, v)), strict=True
    ):
        assert_near(mine, right.double(), 1e-6)


@dataclass(frozen=True, repr=False)
class Doubled(Elementwise):
    """A map that no kernel knows."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x.abs()

    def fill(self, x: Tensor, out: Tensor, workspace: Tensor) -> None:
        torch.abs(x, out=out).mul_(2)

    def vjp(self, x: Tensor, values: Tensor, gradient: Tensor, out: Tensor) -> None:
        torch.mul(gradient, 2 * x.sign(), out=out)


def test_any_elementwise_map_runs_on_its_features() -> None:
    (q, k, v), mask = tensors(8, 4, 40)
    found = attention(
        q, k, v, LinearAttention(feature_map=Doubled()), is_causal=True, key_mask=mask[:, 0], impl="triton"
    )
    with implementation("reference"):
        expected = attention(q, k, v, LinearAttention(feature_map=Doubled()), is_causal=True, key_mask=mask[:, 0])
    assert_near(found, expected.double(), 1e-6)


def test_calls_say_what_ran_and_keep_to_what_was_asked() -> None:
    (q, k, v), _ = tensors(8, 4, 40)
    assert trace.KERNEL in str(explain(LinearAttention(), q, k, v, is_causal=True))
    with implementation("reference"):
        assert trace.KERNEL not in str(explain(LinearAttention(), q, k, v, is_causal=True))
    attention(q, k, v, "LinearAttention", impl="triton")
    wide = [torch.randn(1, 1, 20, n) for n in (WIDEST + 1, WIDEST + 1, 4)]
    refused: list[tuple[Callable[..., Any], str]] = [
        (lambda: attention(q, k, v, "ReLUAttention", impl="triton"), "no Triton kernel ran"),
        (lambda: attention(*wide, "LinearAttention", impl="triton"), f"heads of more than {WIDEST} numbers"),
        (lambda: attention(*(x.double() for x in (q, k, v)), "LinearAttention", impl="triton"), "more than 32 bits"),
        (lambda: attention(q, k, v, LinearAttention(feature_map=Identity()), impl="cuda"), "impl='cuda'"),
    ]
    for call, words in refused:
        with pytest.raises((NotImplementedError, ValueError), match=words):
            call()


def test_without_a_gpu_a_kernel_that_is_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (q, k, v), _ = tensors(8, 4, 40)
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    with pytest.raises(NotImplementedError, match="not on a GPU"):
        attention(q, k, v, "LinearAttention", impl="triton")


def test_equal_calls_give_equal_bits() -> None:
    (q, k, v), mask = tensors(33, 20, 130)
    outs = [
        attention(q, k, v, "LinearAttention", is_causal=True, key_mask=mask[:, 0])
        for _ in range(3 if q.is_cpu else 1000)
    ]
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in outs]
    assert all(torch.equal(outs[0], out) for out in outs)
    assert all(torch.equal(x, y) for each in grads[1:] for x, y in zip(grads[0], each, strict=True))
