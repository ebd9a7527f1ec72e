"""LogAttention and Manhattan by kernels in Triton's interpreter: oracle, gradients, masks, sums as states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

from fast_attention import Bound, attention, catalogue, explain, implementation
from fast_attention.engine import dispatch
from fast_attention.gpu import channels
from fast_attention.gpu.summing import operations, plain
from fast_attention.gpu.summing.plain import COUNT, NOTHING, SCORES
from fast_attention.mechanisms.log_manhattan import gpu
from fast_attention.traits import Shape
from tests.gpu.heads import KINDS, assert_near, double, poisoned
from tests.oracles.log import log_attention
from tests.oracles.manhattan import manhattan

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Several chunks of few tokens: a tile takes Triton's interpreter milliseconds."""
    if device.type == "cpu":
        monkeypatch.setattr(channels, "SHORTEST", 16)


def tensors(
    width: int, length: int, dtype: torch.dtype = torch.float32, kinds: tuple[int, int] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Scores of queries and keys, values as heads of a projection lie in memory, and a mask that hides a fifth."""
    wide = kinds or (width, width)
    q, k = (torch.rand(1, 2, length, n).requires_grad_() for n in wide)
    v = torch.randn(1, length, 2, width).transpose(1, 2).to(dtype).requires_grad_()
    return [q, k, v], torch.rand(1, 1, length) > 0.2


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores as wide as values."""
    return q.expand(*q.shape[:-1], v.shape[-1]), k.expand(*k.shape[:-1], v.shape[-1]), v


def first_sums(width: int) -> Tensor:
    """Of three keys."""
    sums = [torch.rand(1, 2, width) for _ in range(3)]
    return torch.cat([*sums, torch.full((1, 2, width), 3.0)], -1).requires_grad_()


@pytest.mark.parametrize(
    ("sizes", "masked", "divisor", "kinds"),
    [
        ((5, 16), False, SCORES, (5, 5)), ((70, 37), True, SCORES, (70, 70)), ((3, 33), True, SCORES, (1, 3)),
        ((3, 33), False, NOTHING, (3, 1)), ((8, 37), True, NOTHING, (8, 8)), ((8, 37), True, COUNT, (1, 1)),
        ((1, 17), False, COUNT, (1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_every_configuration(sizes: tuple[int, int], masked: bool, divisor: int, kinds: tuple[int, int]) -> None:
    agree(sizes, torch.float32, masked, divisor, kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    agree((20, 24), dtype, True, SCORES, (20, 20))


def agree(
    sizes: tuple[int, int], dtype: torch.dtype, masked: bool, divisor: int, kinds: tuple[int, int]
) -> None:  # fmt: skip
    """Outputs, sums and gradients are those of the plain form in float64, behind first sums too."""
    x, mask = tensors(*sizes, dtype=dtype, kinds=kinds)
    first, mask = first_sums(sizes[0]), mask if masked else None
    given, twins = [*x, first], double(*x, first)
    results, expected = [], []
    for form, to, kind in ((operations, results, dtype), (plain, expected, torch.float64)):
        q, k, v, one = given if to is results else twins
        q, k, v = spread(q, k, v)
        names = ("score_scan", "score_sums", "score_read") if form is operations else ("scan", "sums", "read")
        scan, sums, read = (getattr(form, name) for name in names)
        to += scan(q, k, v, mask, one, None, divisor, kind)
        state = sums(k, v, mask)
        to += [state, read(q, state, divisor, kind)]
    for mine, right in zip(results, expected, strict=True):
        assert_near(mine, right, KINDS[mine.dtype])
    grads = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, given, grads)
    right = torch.autograd.grad(expected, twins, [g.double() for g in grads])
    for mine, theirs in zip(found, right, strict=True):
        assert_near(mine, theirs, 2 * KINDS[mine.dtype])


LOGS = [
    "LogAttention()", "LogAttention(score='sum')", "LogAttention(normalize='none')",
    "LogAttention(score='sum', normalize='none', feature_map=PositiveElu())",
]  # fmt: skip
MANHATTANS = ["Manhattan()", "Manhattan(normalize='none', key_dim=1)", "Manhattan(reference='first', query_dim=None)"]


def heads(width: int, length: int, keys: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor]:
    """Queries, keys and values, and a mask (1, keys) that hides the first two and a fifth of the others."""
    sizes = (length, keys or length, keys or length)
    x = [torch.randn(1, 2, n, width, dtype=dtype).requires_grad_() for n in sizes]
    return x, (torch.rand(1, sizes[1]) > 0.2) & (torch.arange(sizes[1]) > 1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keys", [23, 17])
def test_the_oracle_of_other_keys(keys: int, is_causal: bool) -> None:
    like_the_oracle(LOGS[0], keys, is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", [*LOGS, *MANHATTANS])
def test_the_oracle(name: str, is_causal: bool) -> None:
    like_the_oracle(name, 20, is_causal)


def like_the_oracle(name: str, keys: int, is_causal: bool) -> None:
    mechanism: Any = catalogue.parse(name)
    oracle = log_attention if name in LOGS else manhattan
    (q, k, v), mask = heads(3, 20, keys)
    with dispatch.recorded() as steps:
        out = attention(q, k, v, mechanism, is_causal=is_causal, key_mask=mask)
    assert any(step.path.startswith(dispatch.KERNEL) for step in steps)
    x, grad = double(q, k, v), torch.randn_like(out)
    one = oracle(mechanism, *(t[0, 0] for t in x), (), head=0, is_causal=is_causal, key_mask=mask[0])
    assert_near(out[0, 0], one, 2e-6)
    found = torch.autograd.grad(out, (q, k, v), grad, allow_unused=True, materialize_grads=True)
    right = torch.autograd.grad(one, x, grad[0, 0].double(), allow_unused=True, materialize_grads=True)
    for mine, theirs in zip(found, right, strict=True):
        assert_near(mine[0, 0], theirs[0, 0], 5e-6)


@pytest.mark.parametrize("name", [LOGS[0], MANHATTANS[0]])
@pytest.mark.parametrize("is_causal", [True, False])
def test_sixteen_bits_are_as_good_as_the_plain_form(name: str, is_causal: bool) -> None:
    (q, k, v), mask = heads(8, 24, dtype=torch.float16)
    grad, results = torch.randn_like(v), []
    for kind, impl in ((torch.float16, "auto"), (torch.float16, "reference"), (torch.float64, "reference")):
        x = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
        with implementation(impl):  # type: ignore[arg-type]
            out = attention(*x, name, is_causal=is_causal, key_mask=mask)
        found = torch.autograd.grad(out, x, grad.to(kind), allow_unused=True, materialize_grads=True)
        results.append([out, *found])
    for mine, plainly, right in zip(*results, strict=True):
        assert mine.dtype == torch.float16
        errors = [float((y.detach().double() - right.detach()).norm()) for y in (mine, plainly)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6, errors


def test_hidden_tokens_are_not_read() -> None:
    (q, k, v), mask = tensors(16, 24)
    outs: list[Any] = []
    for rubbish in (0.0, float("nan")):
        with torch.no_grad():
            k.masked_fill_(~mask[..., None], rubbish)
            v.masked_fill_(~mask[..., None], rubbish)
        read = operations.score_read(q, operations.score_sums(k, v, mask), SCORES, None)
        for out in (operations.score_scan(q, k, v, mask, None, None, SCORES, None)[0], read):
            outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for clean, rubbished in zip(outs[:2], outs[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(clean, rubbished, strict=True))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    (q, k, v), _ = tensors(16, 30)
    mask = torch.arange(30).expand(1, 1, 30) >= 19
    for divisor in (NOTHING, SCORES, COUNT):
        out = operations.score_scan(q, k, v, mask, None, None, divisor, None)[0]
        assert not out[..., :19, :].any()
        assert out[..., 19:, :].all()
        assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out.square().sum(), (q, k, v)))
    none = torch.zeros(1, 1, 30, dtype=torch.bool)
    assert not operations.score_read(q, operations.score_sums(k, v, none), SCORES, None).any()


@pytest.mark.parametrize("divisor", [NOTHING, SCORES])
def test_no_memory_is_read_that_was_not_written(divisor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(1)
        (q, k, v), mask = tensors(20, 24, torch.float16)
        first = first_sums(20)
        scanned = operations.score_scan(q, k, v, mask, first, None, divisor, torch.float16)
        read = operations.score_read(q, operations.score_sums(k, v, mask), divisor, torch.float16)
        loss = sum(x.float().square().sum() for x in (*scanned, read))
        return [*scanned, read, *torch.autograd.grad(loss, (q, k, v, first))]  # type: ignore[arg-type]

    clean = results()
    poisoned(monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(clean, results(), strict=True))


@pytest.mark.parametrize("name", [LOGS[0], LOGS[3], *MANHATTANS[::2]])
def test_parts_behind_sums_are_the_whole(name: str) -> None:
    mechanism: Any = catalogue.parse(name)
    (q, k, v), mask = heads(6, 36)
    whole, mask = attention(q, k, v, mechanism, is_causal=True, key_mask=mask), mask[:, None]
    tokens = [q, *(x.masked_fill(~mask[..., None], 0.0) for x in (k, v))]  # as validation leaves them
    state, parts, paths = None, [], []
    for rows in (slice(0, 2), slice(2, 18), slice(18, 19), slice(19, 36)):
        with dispatch.recorded() as steps:
            out, state = mechanism.advance(*(x[..., rows, :] for x in tokens), (), state, key_mask=mask[..., rows])
        parts.append(out)
        paths.append(steps[0].path)
    assert_near(torch.cat(parts, -2), whole.detach().double(), 2e-6)
    assert all(path.startswith(dispatch.KERNEL) for path in paths)
    assert state is not None
    for mine, right in zip(state, mechanism.summary(*tokens[1:], (), key_mask=mask), strict=True):
        assert_near(mine, right.detach().double(), 2e-6)
    grad, found = torch.randn_like(whole), []
    for out in (torch.cat(parts, -2), whole):
        found.append(torch.autograd.grad(out, (q, k, v), grad, allow_unused=True, materialize_grads=True))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 5e-6)


@pytest.mark.parametrize("name", [LOGS[1], MANHATTANS[0]])
def test_token_by_token(name: str) -> None:
    mechanism: Any = catalogue.parse(name)
    (q, k, v), _ = heads(6, 19)
    right, state, outs = attention(q, k, v, mechanism, is_causal=True), None, []
    with torch.no_grad():
        for rows in (slice(0, 17), slice(17, 18), slice(18, 19)):
            with dispatch.recorded() as steps:
                out, state = mechanism.advance(*(x[..., rows, :] for x in (q, k, v)), (), state, key_mask=None)
            outs.append(out)
        assert steps[0].path == f"{dispatch.KERNEL}: one token"
    assert_near(torch.cat(outs, -2), right.detach().double(), 2e-6)


@pytest.mark.parametrize("name", [LOGS[0], LOGS[3]])
def test_sums_begin_anew_with_every_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TOKENS", 16)
    lengths = (20, 0, 1, 16)
    x, mask = heads(4, sum(lengths))
    borders, bound, results = torch.tensor([0, *lengths]).cumsum(0).int(), Bound(catalogue.parse(name), Shape(2, 4)), []
    for impl in ("auto", "reference"):
        with implementation(impl), dispatch.recorded() as steps:  # type: ignore[arg-type]
            out = bound(*x, is_causal=True, key_mask=mask, cu_seqlens=borders)
        launched = [step for step in steps if step.path.startswith(dispatch.KERNEL)]
        assert len(launched) == (1 if impl == "auto" else 0)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    for mine, right in zip(*results, strict=True):
        assert_near(mine, right.detach().double(), 1e-5)


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    (q, k, v), _ = tensors(4, 20)
    begins, found = torch.tensor([1, 1], dtype=torch.uint8), []
    for form in (operations.score_scan, plain.scan):
        results = []
        for packed in (None, begins):
            x = [t[..., : 20 if packed is None else 16, :] for t in (q, k, v)]
            x = x if packed is None else [torch.cat([t, t], -2) for t in x]
            out = form(*x, None, None, packed, SCORES, None)[0]
            first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
            results += torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))
        found.append(results)
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 1e-5)


@pytest.mark.parametrize("name", ["score_scan", "score_sums", "score_read"])
def test_operations_keep_torchs_rules(name: str) -> None:
    (q, k, v), mask = tensors(4, 10, torch.float16)
    first = first_sums(4)
    given: dict[str, Any] = {
        "score_scan": (q, k, v, mask, first, None, SCORES, torch.float16),
        "score_sums": (k, v, mask),
        "score_read": (q, first, SCORES, torch.float16),
    }
    assert {*library.opcheck(getattr(operations, name), given[name]).values()} == {"SUCCESS"}


@pytest.mark.parametrize(("name", "is_causal"), [(LOGS[1], False), (MANHATTANS[0], True)])
def test_compiled_as_one_graph(name: str, is_causal: bool) -> None:
    mechanism = catalogue.parse(name)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, mechanism, is_causal=is_causal).cos()

    (q, k, v), _ = heads(4, 10)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_near(out, run(q, k, v).detach().double(), 1e-6)
    grads = [torch.autograd.grad(x.sum(), (k, v)) for x in (out, run(q, k, v))]
    for mine, right in zip(*grads, strict=True):
        assert_near(mine, right.double(), 2e-6)


def test_calls_say_what_ran() -> None:
    (q, k, v), _ = heads(4, 10)
    assert dispatch.KERNEL in str(explain(catalogue.parse("Manhattan()"), q, k, v, is_causal=True))
    attention(q, k, v, "LogAttention", impl="triton")
    for name in ("LogAttention(normalize='softmax')", "Manhattan(distance='l1')", "Manhattan(normalize='l1')"):
        with pytest.raises(NotImplementedError, match="no kernel has"):
            attention(q, k, v, name, impl="triton")
