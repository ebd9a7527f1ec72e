"""AFT with biases in a window by kernels in Triton's interpreter: oracles, gradients, masks, keys far apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

from fast_attention import AFTConv, AFTLocal, Bound, explain, implementation
from fast_attention.engine import dispatch
from fast_attention.gpu import cases
from fast_attention.gpu.windowed import operations, plain
from fast_attention.traits import Shape
from tests.gpu.heads import KINDS, assert_near, double, poisoned
from tests.gpu.heads import tensors as of_batch
from tests.oracles import ORACLES

pytestmark = pytest.mark.usefixtures("interpreted")
CASES = [  # heads, positions and taps of biases; causal, strict, masked
    ((1, 33, 5), True, False, True),
    ((1, 33, 5), False, True, False),
    ((2, 1, 3), False, False, True),
    ((2, 33, 11), True, True, True),
    ((1, 1, 37), False, False, False),
]


def tensors(width: int, length: int, dtype: torch.dtype = torch.float32) -> Any:
    """Two heads of one sequence: Triton's interpreter takes milliseconds a tile."""
    return of_batch(width, width, length, dtype=dtype, heads=2)


@pytest.fixture(autouse=True)
def few_pools(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Pools are added up two at a time: Triton's interpreter scans number by number."""
    from fast_attention.gpu.windowed import launching

    if device.type == "cpu":
        monkeypatch.setattr(launching, "SCANNED", 2)


def agree(
    band: tuple[int, int, int], dtype: torch.dtype = torch.float32, *, is_causal: bool, strict: bool = False,
    masked: bool = True, far: float = 1.0, biases: float = 1.0, width: int = 5,
) -> None:  # fmt: skip
    """Outputs and gradients, those of biases too, are the plain form's in float64."""
    (q, k, v), mask = tensors(width, 33, dtype)
    with torch.no_grad():
        k.mul_(far)
    w = (biases * torch.randn(band)).requires_grad_()
    mask, x = mask if masked else None, double(q, k, v, w)
    wide = None if mask is None else mask.expand(k.shape[:-1])
    out = operations.window_scan(q, k, v, mask, w, is_causal, strict, True)[0]
    right = plain.scan(*x[:3], wide, x[3], is_causal, strict)
    assert_near(out, right, KINDS[dtype])
    grad, bound = torch.randn_like(out), max(KINDS[dtype], 5e-7 * far)
    theirs = torch.autograd.grad(right, x, grad.double())
    for mine, expected in zip(torch.autograd.grad(out, (q, k, v, w), grad), theirs, strict=True):
        assert_near(mine, expected, 2 * bound)


@pytest.mark.parametrize(("band", "is_causal", "strict", "masked"), CASES, ids=str)
def test_every_configuration(band: tuple[int, int, int], is_causal: bool, strict: bool, masked: bool) -> None:
    agree(band, is_causal=is_causal, strict=strict, masked=masked)


@pytest.mark.parametrize("mechanism", [AFTConv(kernel_size=5), AFTLocal(window=3), AFTLocal(window=3, strict=True)])
def test_the_oracle(mechanism: Any) -> None:
    (q, k, v), mask = tensors(4, 20)
    w = mechanism.weights(Shape(heads=2, head_dim=4, max_len=20))
    w = type(w)(*(torch.randn_like(x).requires_grad_() for x in w))
    for is_causal in (True, False):
        with dispatch.recorded() as steps:
            out = mechanism.attend(q, k, v, w, is_causal=is_causal, key_mask=mask)
        assert any(step.path.startswith(dispatch.KERNEL) for step in steps)
        x, doubled, grad = double(q, k, v), type(w)(*double(*w)), torch.randn_like(out)
        one = ORACLES[type(mechanism).__name__](
            mechanism, *(t[0, 1] for t in x), doubled, head=1, is_causal=is_causal, key_mask=mask[0, 0]
        )  # fmt: skip
        assert_near(out[0, 1], one, 1e-6)
        found = torch.autograd.grad(out[0, 1], (q, k, v, *w), grad[0, 1])
        theirs = torch.autograd.grad(one, (*x, *doubled), grad[0, 1].double())
        for mine, right in zip(found, theirs, strict=True):
            assert_near(mine, right, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    agree((1, 33, 5), dtype, is_causal=True, width=20)


def test_keys_and_biases_far_apart() -> None:
    """Neither a huge key that a query does not see nor a low bias makes its own sums vanish."""
    agree((2, 1, 7), is_causal=True, far=3000.0, biases=12.0)


def test_hidden_tokens_and_fresh_memory_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), mask = tensors(5, 20, torch.float16)
    mask[0, 0, :9] = False  # the first queries see nothing
    w, outs = torch.randn(2, 20, 5).requires_grad_(), []
    poisoned(monkeypatch)
    for rubbish in (0.0, float("nan")):
        with torch.no_grad():
            k.masked_fill_(~mask[..., None], rubbish)
            v.masked_fill_(~mask[..., None], rubbish)
        out = operations.window_scan(q, k, v, mask, w, True, False, True)[0]
        outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, w))])
    assert not outs[0][0][0, :, :9].any()
    assert all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(*outs, strict=True))


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    (q, k, v), _ = tensors(3, 20)
    given = q, k, v, torch.randn(2, 20, 3).requires_grad_()
    found = []
    for kernel in (True, False):
        form = operations.window_scan if kernel else plain.scan
        out = form(q, k, v, None, given[3], False, False, True)
        out = out[0] if kernel else out
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 1e-5)


def test_operations_keep_torchs_rules() -> None:
    (q, k, v), mask = tensors(3, 20)
    given = q, k, v, mask, torch.randn(2, 20, 3).requires_grad_(), True, False, True
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    assert {*library.opcheck(operations.window_scan, given, test_utils=tests).values()} == {"SUCCESS"}


def test_compiled_as_one_graph() -> None:
    mechanism = AFTLocal(window=3)
    w = mechanism.weights(Shape(heads=2, head_dim=4, max_len=20))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mechanism.attend(q.sin(), k, v, w, is_causal=True, key_mask=None).cos()

    (q, k, v), _ = tensors(4, 20)
    results = [form(q, k, v) for form in (torch.compile(run, fullgraph=True, backend="aot_eager"), run)]
    assert_near(results[0], results[1].detach().double(), 1e-6)
    grads = [torch.autograd.grad(x.sum(), (q, k, v, *w)) for x in results]
    for mine, right in zip(*grads, strict=True):
        assert_near(mine, right.double(), 1e-6)


def test_the_self_check_takes_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "TOKENS", 20)
    assert cases.windows(1).compare(4, 4, torch.float16, device, True) == ""
    right = operations.window_scan
    monkeypatch.setattr(operations, "window_scan", lambda *given: (1.1 * right(*given)[0], *right(*given)[1:]))
    assert "causal window's output" in cases.windows(1).compare(4, 4, torch.float16, device, True)


def test_calls_say_what_ran() -> None:
    (q, k, v), _ = tensors(4, 20)
    assert dispatch.KERNEL in str(explain(AFTConv(kernel_size=3), q, k, v, is_causal=True))
    with implementation("triton"):
        Bound(AFTConv(kernel_size=3), Shape(heads=2, head_dim=4))(q, k, v)
