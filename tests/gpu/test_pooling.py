"""AFT-simple by kernels in Triton's interpreter: oracle, gradients, masks, pools as states, keys far apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import AFTSimple, attention, explain
from fast_attention.engine import trace
from fast_attention.gpu import pools
from fast_attention.mechanisms.aft import kernels
from tests.gpu.heads import KINDS, assert_near, by_torchs_rules, double, poisoned
from tests.gpu.heads import tensors as of_widths
from tests.oracles.aft import simple as oracle

pytestmark = pytest.mark.usefixtures("interpreted")
SIZES = [(5, 16), (16, 17), (70, 40)]  # width, tokens


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Several chunks of few tokens: a walk by Triton's interpreter takes milliseconds a token."""
    if device.type == "cpu":
        monkeypatch.setattr(pools, "SHORTEST", 16)


def tensors(width: int, length: int, keys: int | None = None, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    return of_widths(width, width, length, keys, dtype, **sizes)


def first_pool(width: int) -> Tensor:
    """Of some keys: sums over the exponential of a largest one, and that one."""
    return torch.cat([torch.randn(1, 1, width), 1 + torch.rand(1, 1, width), torch.randn(1, 1, width)], -1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keys", [40, 51, 33])
def test_the_oracle(is_causal: bool, keys: int) -> None:
    (q, k, v), mask = tensors(5, 40, keys, batch=2, heads=2)
    with trace.recorded() as steps:
        out = attention(q, k, v, AFTSimple(), is_causal=is_causal, key_mask=mask[:, 0])
    assert any(step.path.startswith(trace.KERNEL) for step in steps)
    x, grad = double(q, k, v), torch.randn_like(out)
    one = oracle(AFTSimple(), *(t[1, 0] for t in x), (), head=0, is_causal=is_causal, key_mask=mask[1, 0])
    assert_near(out[1, 0], one, 1e-6)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for mine, right in zip(found, torch.autograd.grad(one, x, grad[1, 0].double()), strict=True):
        assert_near(mine[1, 0], right[1, 0], 2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_every_configuration(sizes: tuple[int, int], masked: bool) -> None:
    agree(sizes, torch.float32, masked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    agree((20, 40), dtype, True)


@pytest.mark.parametrize("spread", [60.0, 3000.0])
def test_keys_far_apart(spread: float) -> None:
    """Neither a huge key to come nor one long gone makes a query's own sums vanish.

    Logarithms of denominators are kept in float32: of keys about 100 gradients keep five digits.
    """
    agree((16, 50), torch.float32, False, spread)


def agree(sizes: tuple[int, int], dtype: torch.dtype, masked: bool, spread: float = 1.0) -> None:
    """Outputs, pools and gradients are those of the plain form in float64, behind a first pool too."""
    (q, k, v), mask = tensors(*sizes, dtype=dtype)
    with torch.no_grad():
        k.mul_(spread)
    bound = max(KINDS[dtype], 5e-7 * spread)
    first, mask = first_pool(sizes[0]).requires_grad_(), mask if masked else None
    x, wide = double(q, k, v, first), None if mask is None else mask.expand(k.shape[:-1])
    results = kernels.pool_scan(q, k, v, mask, first, None)
    expected = kernels.plain_scan(*x[:3], wide, x[3], None)
    same((q, k, v, first), x, results, expected, dtype, bound)
    pool, right = kernels.pool_sums(k, v, mask), kernels.plain_sums(*x[1:3], wide)
    results = pool, kernels.pool_read(q, pool)
    same((q, k, v), x[:3], results, (right, kernels.plain_read(x[0], right)), dtype, bound)


def same(given: Any, x: Any, results: Any, expected: Any, dtype: torch.dtype, bound: float) -> None:
    for mine, right in zip(results, expected, strict=True):
        assert_near(mine, right, KINDS[dtype])
    grads = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, given, grads, allow_unused=True, materialize_grads=True)
    right = torch.autograd.grad(expected, x, [g.double() for g in grads], allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(found, right, strict=True):
        assert_near(mine, theirs, 2 * bound)


def test_hidden_tokens_are_not_read() -> None:
    (q, k, v), mask = tensors(16, 40)
    outs: list[Any] = []
    for rubbish in (0.0, float("nan")):
        with torch.no_grad():
            k.masked_fill_(~mask[..., None], rubbish)
            v.masked_fill_(~mask[..., None], rubbish)
        read = kernels.pool_read(q, kernels.pool_sums(k, v, mask))
        for out in (kernels.pool_scan(q, k, v, mask, None, None)[0], read):
            outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for clean, rubbished in zip(outs[:2], outs[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(clean, rubbished, strict=True))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    (q, k, v), _ = tensors(16, 50)
    mask = torch.arange(50).expand(1, 1, 50) >= 35
    out = kernels.pool_scan(q, k, v, mask, None, None)[0]
    assert not out[..., :35, :].any()
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out.square().sum(), (q, k, v)))
    none = torch.zeros(1, 1, 50, dtype=torch.bool)
    assert not kernels.pool_read(q, kernels.pool_sums(k, v, none)).any()


def test_no_memory_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(1)
        (q, k, v), mask = tensors(20, 40, dtype=torch.float16)
        first = first_pool(20).requires_grad_()
        scanned = kernels.pool_scan(q, k, v, mask, first, None)
        read = kernels.pool_read(q, kernels.pool_sums(k, v, mask))
        loss = sum(x.float().square().sum() for x in (*scanned, read))
        return [*scanned, read, *torch.autograd.grad(loss, (q, k, v, first))]  # type: ignore[arg-type]

    clean = results()
    poisoned(monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(clean, results(), strict=True))


def test_parts_behind_a_pool_are_the_whole() -> None:
    mechanism = AFTSimple()
    (q, k, v), mask = tensors(12, 50)
    whole = attention(q, k, v, mechanism, is_causal=True, key_mask=mask[:, 0])
    state, parts, paths = None, [], []
    for rows in (slice(0, 20), slice(20, 21), slice(21, 25), slice(25, 50)):
        with trace.recorded() as steps:
            out, state = mechanism.advance(
                *(x[..., rows, :] for x in (q, k, v)), (), state, key_mask=mask[..., rows]
            )  # fmt: skip
        parts.append(out)
        paths.append(steps[0].path)
    assert_near(torch.cat(parts, -2), whole.detach().double(), 1e-6)
    assert all(path.startswith(trace.KERNEL) for path in paths)
    assert state is not None
    summary = mechanism.summarise_keys(k, v, (), key_mask=mask)
    for mine, right in zip(state, summary, strict=True):
        assert_near(mine, right.detach().double(), 2e-6)
    grad = torch.randn_like(whole)
    for mine, right in zip(
        torch.autograd.grad(torch.cat(parts, -2), (q, k, v), grad),
        torch.autograd.grad(whole, (q, k, v), grad), strict=True,
    ):  # fmt: skip
        assert_near(mine, right.double(), 2e-6)


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    (q, k, v), _ = tensors(4, 20)
    found = []
    for form in (kernels.pool_scan, kernels.plain_scan):
        out = form(q, k, v, None, None, None)[0]
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v)))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 1e-5)


@pytest.mark.parametrize("name", ["pool_scan", "pool_sums", "pool_read"])
def test_operations_keep_torchs_rules(name: str) -> None:
    (q, k, v), mask = tensors(8, 40)
    first = first_pool(8).requires_grad_()
    given: dict[str, Any] = {
        "pool_scan": (q, k, v, mask, first, None),
        "pool_sums": (k, v, mask),
        "pool_read": (q, first),
    }
    assert by_torchs_rules(getattr(kernels, name), given[name], {})


@pytest.mark.parametrize("is_causal", [True, False])
def test_compiled_as_one_graph(is_causal: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, AFTSimple(), is_causal=is_causal).cos()

    (q, k, v), _ = tensors(8, 40)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_near(out, run(q, k, v).detach().double(), 1e-6)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, run(q, k, v))]
    for mine, right in zip(*grads, strict=True):
        assert_near(mine, right.double(), 1e-6)


def test_calls_say_what_ran() -> None:
    (q, k, v), _ = tensors(8, 40)
    assert trace.KERNEL in str(explain(AFTSimple(), q, k, v, is_causal=True))
    attention(q, k, v, "AFTSimple", impl="triton")
