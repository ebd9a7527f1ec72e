"""Random features by kernels, in Triton's interpreter: oracle, gradients of tokens and rows, masks, states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Favor, FavorPlus, FavorPlusPlus, LearnedFeatures, attention, explain
from fast_attention.engine import trace
from fast_attention.functional import implementation
from fast_attention.gpu.configurations import EXPONENTIAL, WIDEST_PROJECTED, exponential
from fast_attention.mechanisms.linear import kernels
from fast_attention.traits import Shape
from tests.gpu.conftest import INTERPRETED
from tests.gpu.heads import KINDS, assert_near, by_torchs_rules, double, poisoned, tensors
from tests.oracles import favor as oracles

pytestmark = pytest.mark.usefixtures("interpreted")
MECHANISMS = [  # with numbers of keys for 30 queries
    (FavorPlus(num_features=20), oracles.favor_plus, 30),
    (FavorPlus(num_features=20), oracles.favor_plus, 37),
    (FavorPlus(num_features=20), oracles.favor_plus, 26),
    (FavorPlus(num_features=9, features="hyperbolic"), oracles.favor_plus, 30),
    (FavorPlusPlus(num_features=20), oracles.favor_plus_plus, 30),
    (LearnedFeatures(num_features=9), oracles.learned_features, 37),
]
SIZES = [(16, 16, 40, 70), (20, 33, 9, 70), (80, 20, 36, 70)]  # width, values, features, tokens


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two blocks where the interpreter runs them, so that few tokens are several chunks."""
    if INTERPRETED:
        for key, rows in EXPONENTIAL.items():
            chunk = 2 * max(row.block for row in rows)
            monkeypatch.setitem(EXPONENTIAL, key, type(rows)(*(row._replace(chunk=chunk) for row in rows)))


def drawn(width: int, features: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    rows = scale * torch.randn(2, 1, features, width)
    return rows[0].requires_grad_(), rows[1].requires_grad_()


@pytest.mark.parametrize(("mechanism", "oracle", "keys"), MECHANISMS, ids=lambda x: "" if callable(x) else repr(x))
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_oracle(mechanism: Any, oracle: Callable[..., Tensor], is_causal: bool, keys: int) -> None:
    (q, k, v), mask = tensors(5, 3, 30, keys, batch=2, heads=2)
    w = mechanism.weights(Shape(2, 5, 40))
    with implementation("triton"):
        out = mechanism.attend(q, k, v, w, is_causal=is_causal, key_mask=mask)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    x = double(q, k, v)
    wide = type(w)(*(t.detach().double() for t in w))
    one = oracle(mechanism, *(t[1, 0] for t in x), wide, head=0, is_causal=is_causal, key_mask=mask[1, 0])
    assert_near(out[1, 0], one, 1e-6)
    for mine, right in zip(found, torch.autograd.grad(one, x, grad[1, 0].double()), strict=True):
        assert_near(mine[1, 0], right[1, 0], 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_of_sixteen_bits_are_taken_as_they_are(dtype: torch.dtype) -> None:
    (q, k, v), _ = tensors(8, 4, 40, dtype=dtype, heads=2)
    mechanism = FavorPlusPlus(num_features=20)
    w = mechanism.weights(Shape(2, 8, 40))
    outs = []
    for impl in ("triton", "reference"):
        with implementation(impl):
            outs.append(mechanism.attend(q, k, v, w, is_causal=True, key_mask=None))
    assert outs[0].dtype == dtype
    assert_near(outs[0], outs[1].double(), 2 * KINDS[dtype])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("is_causal", "masked"), [(True, False), (True, True), (False, True)])
def test_every_configuration(sizes: tuple[int, int, int, int], is_causal: bool, masked: bool) -> None:
    agree(sizes, torch.float32, is_causal, masked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_low_precision(dtype: torch.dtype, is_causal: bool) -> None:
    agree((20, 33, 40, 70), dtype, is_causal, True)


def agree(sizes: tuple[int, int, int, int], dtype: torch.dtype, is_causal: bool, masked: bool) -> None:
    """Outputs and gradients, of rows too, are those of the plain form in float64."""
    width, values, features, length = sizes
    (q, k, v), mask = tensors(width, values, length, dtype=dtype)
    (query_rows, key_rows), bias, mask = drawn(width, features), torch.randn(1, features), mask if masked else None
    mine = q, k, v, query_rows, key_rows
    out = result(kernels.exponential(query_rows, key_rows, bias), q, k, v, mask, is_causal)
    right = x, y, z, *rows = double(*mine)
    expected = result(plain_forms(*rows, bias.double()), x, y, z, mask, is_causal)
    assert out.dtype == dtype
    assert_near(out, expected, KINDS[dtype])
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(expected, right, grad.double())
    for found, wanted in zip(torch.autograd.grad(out, mine, grad), expected, strict=True):
        assert_near(found, wanted, 2 * KINDS[dtype])


def plain_forms(query_rows: Tensor, key_rows: Tensor, bias: Tensor | None) -> Any:
    """The functions of a set of kernels in plain operations."""
    return SimpleNamespace(
        scan=lambda q, k, v, mask, first: kernels.plain_feature_scan(q, k, v, mask, first, query_rows, bias, key_rows),
        sums=lambda k, v, mask: kernels.plain_feature_sums(k, v, mask, key_rows, bias),
        read=lambda q, sums: kernels.plain_feature_read(q, sums, query_rows, bias),
    )


def result(kernel_set: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return kernel_set.scan(q, k, v, mask, None)[0] if is_causal else kernel_set.read(q, kernel_set.sums(k, v, mask))


def far_apart(masked: bool) -> tuple[list[Tensor], Tensor | None]:
    """Long keys, whose features are next to nothing, and behind them in a block a short one, whose are not."""
    (q, k, v), mask = tensors(6, 4, 100)
    with torch.no_grad():
        k *= 20
        k[..., [*range(40, 48), 50, 71], :] /= 200
        mask[..., 32:40] = False
        mask[..., 40:48] = True
    return [q, k, v], mask if masked else None


@pytest.mark.parametrize("masked", [False, True])
def test_keys_far_apart_hide_nothing(masked: bool) -> None:
    """Logarithms more than ``SLACK`` apart are taken one by one: nothing that a query saw before is lost."""
    (q, k, v), mask = far_apart(masked)
    rows, _ = drawn(6, 40)
    logs = k.detach() @ rows.detach().mT * 6**-0.25 - k.detach().square().sum(-1, keepdim=True) * 0.5 * 6**-0.5
    assert float(logs.max() - logs.min()) > 200
    out = result(kernels.exponential(rows, rows, None), q, k, v, mask, True)
    right = x, y, z = double(q, k, v)
    expected = result(plain_forms(rows.double(), rows.double(), None), x, y, z, mask, True)
    assert_near(out, expected, 5e-4)  # logarithms of 500 have that much of rounding
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for mine, wanted in zip(found, torch.autograd.grad(expected, right, grad.double()), strict=True):
        assert_near(mine, wanted, 5e-4)


def test_no_later_key_moves_a_query_by_more_than_rounding() -> None:
    (q, k, v), _ = tensors(6, 4, 70)
    rows, _ = drawn(6, 40)
    kernel_set = kernels.exponential(rows, rows, None)
    with torch.no_grad():
        k *= 10
    before = kernel_set.scan(q, k, v, None, None)[0]
    with torch.no_grad():
        k[..., 45:, :] /= 100
    assert_near(kernel_set.scan(q, k, v, None, None)[0][..., :45, :], before[..., :45, :].double(), 1e-6)


def test_hidden_tokens_are_not_read() -> None:
    (q, k, v), mask = tensors(16, 16, 70)
    rows, _ = drawn(16, 20)
    kernel_set, outs = kernels.exponential(rows, rows, None), []
    for rubbish in (0.0, float("nan")):
        with torch.no_grad():
            k.masked_fill_(~mask[..., None], rubbish)
            v.masked_fill_(~mask[..., None], rubbish)
        for is_causal in (True, False):
            out = result(kernel_set, q, k, v, mask, is_causal)
            outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for clean, rubbished in zip(outs[:2], outs[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(clean, rubbished, strict=True))
        assert not clean[2][~mask.expand(1, 1, 70)].any()


def test_no_memory_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(1)
        (q, k, v), mask = tensors(20, 18, 70)
        rows, _ = drawn(20, 40)
        kernel_set = kernels.exponential(rows, rows, None)
        first = kernel_set.sums(k[:, :, :20], v[:, :, :20], None)
        out, last = kernel_set.scan(q, k, v, mask, first)
        read = kernel_set.read(q, last)
        loss = sum(x.square().sum() for x in (out, last, read))
        return [out, last, read, *torch.autograd.grad(loss, (q, k, v, rows))]  # type: ignore[arg-type]

    clean = results()
    poisoned(monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(clean, results(), strict=True))


def test_nothing_beyond_the_last_query_counts() -> None:
    """Where all queries' logarithms are far below zero, those of empty rows would be the largest."""
    (q, k, v), _ = tensors(6, 4, 70)
    rows, _ = drawn(6, 20, scale=30)
    found, grad = [], torch.randn(1, 1, 70, 4)
    for kernel_set, kind in (
        (kernels.exponential(rows, rows, None), torch.float32),
        (plain_forms(rows.double(), rows.double(), None), torch.float64),
    ):
        x = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
        found.append(torch.autograd.grad(kernel_set.scan(*x, None, None)[0], x, grad.to(kind)))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right, 1e-4)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_none() -> None:
    (q, k, v), mask = tensors(6, 4, 40)
    mask[..., :10] = False
    rows, _ = drawn(6, 20)
    out = kernels.exponential(rows, rows, None).scan(q, k, v, mask, None)[0]
    expected = plain_forms(rows, rows, None).scan(q, k, v, mask, None)[0]
    assert not out[..., :10, :].any()
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, rows), grad)
    assert not found[0][..., :10, :].any()
    for mine, right in zip(found, torch.autograd.grad(expected, (q, k, v, rows), grad), strict=True):
        assert_near(mine, right.double(), 5e-6)


@pytest.mark.parametrize("mechanism", [FavorPlus(num_features=20), LearnedFeatures(num_features=9)], ids=repr)
def test_parts_behind_a_state_are_the_whole(mechanism: Any) -> None:
    (q, k, v), mask = tensors(8, 12, 90, heads=2)
    w = mechanism.weights(Shape(2, 8, 90))
    whole = mechanism.attend(q, k, v, w, is_causal=True, key_mask=mask)
    state, parts = None, []
    for rows in (slice(0, 33), slice(33, 40), slice(40, 41), slice(41, 90)):  # few tokens by plain operations
        out, state = mechanism.advance(
            q[..., rows, :], k[..., rows, :], v[..., rows, :], w, state, key_mask=mask[..., rows]
        )
        parts.append(out)
    assert_near(torch.cat(parts, -2), whole.double(), 1e-6)
    grad = torch.randn_like(whole)
    trained = [x for x in w if x.requires_grad]
    found = torch.autograd.grad(torch.cat(parts, -2), (q, k, v, *trained), grad)
    for mine, right in zip(found, torch.autograd.grad(whole, (q, k, v, *trained), grad), strict=True):
        assert_near(mine, right.double(), 3e-6)


@pytest.mark.parametrize("mechanism", [m for m, *_ in MECHANISMS[2:]], ids=repr)
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_is_one_kernel_and_the_causal_call(mechanism: Any, masked: bool) -> None:
    (q, k, v), mask = tensors(20, 36, 24, heads=2)
    mask[..., 21] = False
    q, k, v = q.detach(), k.detach(), v.detach()
    w = type(x := mechanism.weights(Shape(2, 20, 24)))(*(t.detach() for t in x))
    key_mask = mask if masked else None
    whole = mechanism.attend(q, k, v, w, is_causal=True, key_mask=key_mask)
    out, state = mechanism.advance(
        *(t[..., :20, :] for t in (q, k, v)), w, None, key_mask=None if key_mask is None else key_mask[..., :20]
    )
    for i in range(20, 24):
        one = slice(i, i + 1)
        part = None if key_mask is None else key_mask[..., one]
        with trace.recorded() as steps:
            out, state = mechanism.advance(*(t[..., one, :] for t in (q, k, v)), w, state, key_mask=part)
        assert [step.path for step in steps] == [f"{trace.KERNEL}: one token"]
        assert_near(out, whole[..., one, :].double(), 2e-6)


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    (q, k, v), _ = tensors(6, 4, 20)
    rows, found = drawn(6, 12)[0], []
    for kernel_set in (kernels.exponential(rows, rows, None), plain_forms(rows, rows, None)):
        out = kernel_set.scan(q, k, v, None, None)[0]
        first = torch.autograd.grad(out.square().sum(), (q, k, v, rows), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v, rows)))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 2e-5)


@pytest.mark.parametrize("name", ["feature_scan", "feature_sums", "feature_read"])
def test_operations_keep_torchs_rules(name: str) -> None:
    (q, k, v), mask = tensors(8, 4, 40)
    (query_rows, key_rows), bias = drawn(8, 12), torch.randn(1, 12)
    with torch.no_grad():
        first = kernels.feature_sums(k, v, mask, key_rows, bias)
    first.requires_grad_()
    given: dict[str, Any] = {
        "feature_scan": (q, k, v, mask, first, query_rows, bias, key_rows, None),
        "feature_sums": (k, v, mask, key_rows, bias),
        "feature_read": (q, first, query_rows, bias),
    }
    assert by_torchs_rules(getattr(kernels, name), given[name], {})


def test_compiled_as_one_graph() -> None:
    mechanism = FavorPlus(num_features=20)
    w = mechanism.weights(Shape(2, 8, 40))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mechanism.attend(q.sin(), k, v, w, is_causal=True, key_mask=None).cos()

    (q, k, v), _ = tensors(8, 4, 40, heads=2)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_near(out, run(q, k, v).double(), 1e-6)
    for mine, right in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(run(q, k, v).sum(), (q, k, v)), strict=True
    ):
        assert_near(mine, right.double(), 1e-6)


def test_calls_say_what_ran_and_refuse_what_cannot() -> None:
    (q, k, v), _ = tensors(8, 4, 40)
    assert trace.KERNEL in str(explain(FavorPlus(num_features=20), q, k, v, is_causal=True))
    with implementation("reference"):
        assert trace.KERNEL not in str(explain(FavorPlus(num_features=20), q, k, v, is_causal=True))
    wide = [torch.randn(1, 1, 20, n) for n in (WIDEST_PROJECTED + 1, WIDEST_PROJECTED + 1, 4)]
    refused: list[tuple[Any, str]] = [
        ((*wide, FavorPlus(num_features=20)), f"heads of more than {WIDEST_PROJECTED} numbers"),
        ((q, k, v, Favor(num_features=20)), "no Triton kernel ran"),
    ]
    for given, words in refused:
        with pytest.raises(NotImplementedError, match=words):
            attention(*given, impl="triton")


def test_the_table_has_a_row_for_every_width_and_its_sizes_fit() -> None:
    for width, exact in itertools.product((1, 16, 64, 65, WIDEST_PROJECTED), (False, True)):
        rows = exponential(width, exact=exact)
        assert rows.forward.chunk == rows.backward.chunk
        for row in rows:
            assert row.chunk % row.block == 0
            assert min(row.block, row.columns, row.values) >= 16  # what a product on tensor cores takes
    assert {exact for _, exact in EXPONENTIAL} == {False, True}


def test_equal_calls_give_equal_bits() -> None:
    (q, k, v), mask = tensors(33, 20, 70)
    rows, _ = drawn(33, 40)
    kernel_set, results = kernels.exponential(rows, rows, None), []
    for _ in range(2 if q.is_cpu else 1000):
        out = kernel_set.scan(q, k, v, mask, None)[0]
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v, rows))])
    assert all(torch.equal(x, y) for each in results[1:] for x, y in zip(results[0], each, strict=True))
