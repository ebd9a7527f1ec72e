"""Linear attention whose sums decay, by kernels in Triton's interpreter: oracle, gradients, states, strong decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, DecayedLinearAttention, attention, explain
from fast_attention.engine import trace
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.functional import implementation
from fast_attention.gpu import configurations, maps
from fast_attention.mechanisms.linear import kernels
from fast_attention.traits import Shape
from tests.gpu.heads import KINDS, assert_near, by_torchs_rules, double, poisoned, tensors
from tests.oracles.linear import decayed as oracle

pytestmark = pytest.mark.usefixtures("interpreted")
NUMBERS: Any = {"eps": 1e-6, "code": maps.ELU, "offset": 0.0}
CASES = [  # width, values, tokens; masked, normalized
    ((16, 16, 64), False, True), ((16, 16, 64), True, False), ((20, 33, 70), True, True), ((20, 33, 70), False, False),
    ((64, 64, 150), True, True), ((64, 64, 150), True, False), ((130, 70, 65), True, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Several chunks of few tokens, for Triton's interpreter takes milliseconds a block."""
    if device.type == "cpu":
        rows = {width: row._replace(chunk=row.block) for width, row in configurations.TABLE.items()}
        monkeypatch.setattr(configurations, "TABLE", rows)


def log_decays(length: int, strength: float = 0.1) -> Tensor:
    return (-strength * torch.rand(1, 1, length)).requires_grad_()


@pytest.mark.parametrize(("sizes", "masked", "normalized"), CASES, ids=str)
def test_every_configuration(sizes: tuple[int, int, int], masked: bool, normalized: bool) -> None:
    agree(sizes, torch.float32, masked, normalized)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    agree((20, 33, 70), dtype, True, True)


@pytest.mark.parametrize("strength", [40.0, 3000.0])
def test_decays_that_forget_within_a_few_tokens(strength: float) -> None:
    """Sums of logarithms reach hundreds of thousands; differences between neighbours keep all digits."""
    agree((16, 16, 150), torch.float32, False, True, strength)


def agree(
    sizes: tuple[int, int, int], dtype: torch.dtype, masked: bool, normalized: bool, strength: float = 0.1
) -> None:
    """Outputs, last states and gradients are those of the plain form in float64, behind a first state too."""
    (q, k, v), mask = tensors(*sizes, dtype=dtype)
    logs, first = log_decays(sizes[-1], strength), torch.rand(1, 1, sizes[0] * sizes[1] + sizes[0]).requires_grad_()
    with torch.no_grad():
        logs[..., ::7] *= 1e-3  # keys that weigh nearly as much as the next
    numbers = {**NUMBERS, "normalized": normalized}
    given, x = (q, k, v, first, logs), double(q, k, v, first, logs)
    results = kernels.chunk_scan(q, k, v, mask if masked else None, first, logs, **numbers)
    wide = mask.expand(k.shape[:-1]) if masked else None
    expected = kernels.plain_scan(*x[:3], wide, *x[3:], **numbers)
    for mine, right in zip(results, expected, strict=True):
        assert_near(mine, right, KINDS[dtype])
    grads = [torch.randn_like(y) / y.detach().abs().max() for y in results]
    found = torch.autograd.grad(results, given, grads)
    right = torch.autograd.grad(expected, x, [g.double() for g in grads])
    for mine, theirs in zip(found, right, strict=True):
        assert_near(mine, theirs, 4 * KINDS[dtype])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("gate", "phi", "normalize"),
    [("token", EluPlusOne(), True), ("learned", Relu(offset=0.1), True), ("fixed", Identity(), False)],
    ids=str,
)
def test_the_oracle(gate: str, phi: EluPlusOne | Relu | Identity, normalize: bool, is_causal: bool) -> None:
    mechanism = DecayedLinearAttention(phi, gate=gate, normalize=normalize)  # type: ignore[arg-type]
    w = mechanism.weights(Shape(2, 5))
    (q, k, v), mask = tensors(5, 3, 70, batch=2, heads=2)
    with trace.recorded() as steps:
        out = mechanism.attend(q, k, v, w, is_causal=is_causal, key_mask=mask)
    assert any(step.path.startswith(trace.KERNEL) for step in steps)
    x, wide = double(q, k, v), type(w)(*(None if each is None else each.double() for each in w))
    one = oracle(mechanism, *(t[1, 0] for t in x), wide, head=0, is_causal=is_causal, key_mask=mask[1, 0])
    assert_near(out[1, 0], one, 1e-6)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for mine, right in zip(found, torch.autograd.grad(one, x, grad[1, 0].double()), strict=True):
        assert_near(mine[1, 0], right[1, 0], 4e-6)


def test_hidden_tokens_are_not_read() -> None:
    (q, k, v), mask = tensors(16, 16, 70)
    outs, logs = [], log_decays(70)
    for rubbish in (0.0, float("nan")):
        with torch.no_grad():
            k.masked_fill_(~mask[..., None], rubbish)
            v.masked_fill_(~mask[..., None], rubbish)
        out = kernels.chunk_scan(q, k, v, mask, None, logs, **NUMBERS, normalized=True)[0]
        outs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, logs))])
    assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))


def test_no_memory_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(1)
        (q, k, v), mask = tensors(20, 33, 150)
        first, logs = torch.rand(1, 1, 20 * 33 + 20, requires_grad=True), log_decays(150)
        scanned = kernels.chunk_scan(q, k, v, mask, first, logs, **NUMBERS, normalized=True)
        loss = sum(x.square().sum() for x in scanned)
        return [*scanned, *torch.autograd.grad(loss, (q, k, v, first, logs))]  # type: ignore[arg-type]

    clean = results()
    poisoned(monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(clean, results(), strict=True))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_behind_a_state_are_the_whole_and_one_token_is_one_kernel(normalize: bool, masked: bool) -> None:
    mechanism = DecayedLinearAttention(gate="token", normalize=normalize)
    w = mechanism.weights(Shape(2, 8))
    (q, k, v), mask = tensors(8, 12, 90, heads=2)
    mask[..., 41] = False
    q, k, v, key_mask = q.detach(), k.detach(), v.detach(), mask if masked else None
    whole = mechanism.attend(q, k, v, w, is_causal=True, key_mask=key_mask)
    state, parts, paths = None, [], []
    for rows in (slice(0, 40), slice(40, 41), slice(41, 42), slice(42, 45), slice(45, 90)):
        part = None if key_mask is None else key_mask[..., rows]
        with trace.recorded() as steps, torch.no_grad():
            out, state = mechanism.advance(*(x[..., rows, :] for x in (q, k, v)), w, state, key_mask=part)
        parts.append(out)
        paths.append(steps[0].path)
    assert_near(torch.cat(parts, -2), whole.detach().double(), 2e-6)
    chunks, token = f"{trace.KERNEL}: chunks side by side", f"{trace.KERNEL}: one token"
    assert paths == [chunks, token, token, "plain operations", chunks]
    assert state is not None
    summary = mechanism.summarise_keys(k, v, w, key_mask=key_mask)
    assert_near(state.log_decay, summary.log_decay.detach().double(), 1e-5)
    assert_near(state.k, (summary.k * summary.log_scale.exp()).detach().double(), 2e-6)


def test_second_derivatives_are_those_of_the_plain_form() -> None:
    (q, k, v), _ = tensors(6, 4, 20)
    found, logs = [], log_decays(20)
    for form in (kernels.chunk_scan, kernels.plain_scan):
        out = form(q, k, v, None, None, logs, **NUMBERS, normalized=True)[0]
        first = torch.autograd.grad(out.square().sum(), (q, k, v, logs), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v, logs)))
    for mine, right in zip(*found, strict=True):
        assert_near(mine, right.double(), 1e-5)


def test_operations_keep_torchs_rules() -> None:
    (q, k, v), mask = tensors(8, 4, 40)
    first, logs = torch.rand(1, 1, 8 * 4 + 8, requires_grad=True), log_decays(40)
    for normalized in (True, False):
        assert by_torchs_rules(kernels.chunk_scan, (q, k, v, mask, first, logs), NUMBERS | {"normalized": normalized})


def test_compiled_as_one_graph() -> None:
    mechanism = DecayedLinearAttention(Identity(), normalize=False)
    w = mechanism.weights(Shape(2, 8))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mechanism.attend(q.sin(), k, v, w, is_causal=True, key_mask=None).cos()

    (q, k, v), _ = tensors(8, 4, 40, heads=2)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_near(out, run(q, k, v).detach().double(), 1e-6)


def test_both_sides_of_few_tokens_and_of_sixteen_bits() -> None:
    """One token has no neighbour, two have one; in 16 bits no more is lost than by plain operations."""
    for length, dtype in ((1, torch.float32), (2, torch.float32), (70, torch.float16)):
        (q, k, v), mask = tensors(8, 12, length, dtype=dtype)
        results: list[list[Tensor]] = []
        for kind, impl in ((dtype, "triton"), (dtype, "reference"), (torch.float64, "reference")):
            x = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
            out = attention(*x, "DecayedLinearAttention", key_mask=mask[:, 0], impl=impl)  # type: ignore[arg-type]
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
        for mine, plainly, right in zip(*results, strict=True):
            errors = [float((x.double() - right).detach().abs().max()) for x in (mine, plainly)]
            assert errors[0] <= 1.05 * errors[1] + 2e-6 * max(1.0, float(right.detach().abs().max()))


def test_calls_say_what_ran() -> None:
    (q, k, v), _ = tensors(8, 8, 40)
    assert trace.KERNEL in str(explain(DecayedLinearAttention(), q, k, v, is_causal=True))
    attention(q, k, v, "DecayedLinearAttention", is_causal=True, impl="triton")
    attention(q, k, v, "DecayedLinearAttention", impl="triton")
    with pytest.raises(NotImplementedError, match="a decay for every channel"), implementation("triton"):
        Bound(DecayedLinearAttention(gate="channel"), Shape(1, 8))(q, k, v)
