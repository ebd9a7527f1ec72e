"""Favor by kernels, in Triton's interpreter: oracle, signs, scales, masks, states, packed sequences, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, Favor, attention, explain, implementation
from fast_attention.engine import dispatch
from fast_attention.feature_maps.feature_map import Features
from fast_attention.gpu import configurations
from fast_attention.mechanisms.linear import signed_gpu
from fast_attention.traits import Shape
from tests.gpu.heads import KINDS, assert_near, double, tensors
from tests.oracles.favor import favor as oracle

pytestmark = pytest.mark.usefixtures("interpreted")
MECHANISMS = [  # with numbers of keys for 34 queries
    (Favor(num_features=20), 34),
    (Favor(num_features=20, features="phase"), 41),
    (Favor(num_features=20, clamp=0.3), 41),
    (Favor(num_features=20, features="phase", clamp=0.3), 30),
]
TOKEN = f"{dispatch.KERNEL}: one token"


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Chunks of one block: the interpreter takes milliseconds a block."""
    if device.type == "cpu":
        rows = {width: row._replace(chunk=row.block) for width, row in configurations.TABLE.items()}
        monkeypatch.setattr(configurations, "TABLE", rows)


def heads(width: int, values: int, length: int, keys: int | None = None, scale: float = 1.0) -> Any:
    """Queries, keys and values of one sequence and two heads, a mask that hides a fifth."""
    (q, k, v), mask = tensors(width, values, length, keys, batch=2, heads=2)
    return [(x.detach()[:1] * s).requires_grad_() for x, s in ((q, scale), (k, scale), (v, 1.0))], mask[:1]


@pytest.mark.parametrize(("mechanism", "keys"), MECHANISMS, ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_oracle(mechanism: Any, keys: int, is_causal: bool) -> None:
    (q, k, v), mask = heads(5, 3, 34, keys)
    w = mechanism.weights(Shape(2, 5))
    with implementation("triton"):
        out = mechanism.attend(q, k, v, w, is_causal=is_causal, key_mask=mask)
    x, grad = double(q, k, v), torch.randn_like(out)
    wide = type(w)(*(None if t is None else t.double() for t in w))
    one = oracle(mechanism, x[0][0, 1], x[1][0, 1], x[2][0, 1], wide, head=1, is_causal=is_causal, key_mask=mask[0, 0])
    assert_near(out[0, 1], one, 1e-5)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for mine, right in zip(found, torch.autograd.grad(one, x, grad[0, 1].double()), strict=True):
        assert_near(mine[0, 1], right[0, 1], 5e-5)  # denominators cancel


@pytest.mark.parametrize("scale", [2.0, 30.0])
def test_signs_and_scales_are_those_of_the_plain_form(scale: float) -> None:
    """Denominators of either sign; keys whose scales lie hundreds apart; none moves a query before it, to the bit."""
    mechanism: Any = Favor(num_features=9)
    (q, k, v), _ = heads(6, 4, 70, scale=scale)
    w, x = mechanism.weights(Shape(2, 6)), double(q, k, v)
    with implementation("triton"):
        out = mechanism.attend(q, k, v, w, is_causal=True, key_mask=None)
    expected = mechanism.attend(*x, type(w)(w.projection.double(), None), is_causal=True, key_mask=None)
    phi = mechanism.maps(type(w)(w.projection.double(), None))[0]
    queries, keys = phi(x[0].detach()), phi(x[1].detach())
    assert isinstance(keys, Features)
    assert keys.log_scale is not None
    factors = (keys.log_scale[..., None, :] - keys.log_scale.cummax(-1).values[..., None]).exp()
    weights = (queries.free @ keys.values.mT * factors).tril()  # type: ignore[operator]
    assert bool((weights.sum(-1) < 0).any())
    cancels = weights.abs().sum(-1) / weights.sum(-1).abs()  # by how much denominators do
    error = (out - expected).detach().abs().amax(-1) / expected.detach().abs().amax(-1).clamp_min(1.0)
    assert float((error / cancels).max()) < 1e-5 * scale
    with torch.no_grad():
        k[..., 45:, :] *= 3
    with implementation("triton"):
        again = mechanism.attend(q, k, v, w, is_causal=True, key_mask=None)
    assert torch.equal(again[..., :45, :], out[..., :45, :])
    assert not torch.equal(again[..., 45:, :], out[..., 45:, :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_that_of_the_plain_form(dtype: torch.dtype) -> None:
    (q, k, v), mask = heads(8, 4, 40, scale=0.5)
    mechanism: Any = Favor(num_features=20)
    outs: list[Tensor] = []
    w = mechanism.weights(Shape(2, 8))
    for impl in ("triton", "reference"):
        with implementation(impl), torch.no_grad():  # type: ignore[arg-type]
            x = [t.to(dtype) for t in (q, k, v)]
            outs.append(mechanism.attend(*x, w, is_causal=True, key_mask=mask))
    assert outs[0].dtype == dtype
    assert_near(outs[0], outs[1].double(), KINDS[dtype])


@pytest.mark.parametrize("mechanism", [Favor(num_features=9), Favor(num_features=9, clamp=0.3)], ids=repr)
def test_parts_behind_a_state_are_the_whole_and_one_token_is_one_kernel(mechanism: Any) -> None:
    (q, k, v), mask = heads(6, 5, 60, scale=0.5)
    q, k, v, w = q.detach(), k.detach(), v.detach(), mechanism.weights(Shape(2, 6))
    whole = mechanism.attend(q, k, v, w, is_causal=True, key_mask=mask)
    state, parts, paths = None, [], []
    for rows in (slice(0, 33), slice(33, 34), slice(34, 36), slice(36, 60)):
        with dispatch.recorded() as steps:
            out, state = mechanism.advance(*(x[..., rows, :] for x in (q, k, v)), w, state, key_mask=mask[..., rows])
        parts.append(out)
        paths.append(steps[-1].path if "plain" not in steps[0].path else "plain")
    assert_near(torch.cat(parts, -2), whole.double(), 1e-5)
    assert paths == [paths[0], TOKEN, "plain", paths[0]]
    assert state is not None
    assert_near(state.k, mechanism.summary(k, v, w, key_mask=mask).k.double(), 1e-5)


@pytest.mark.parametrize("mechanism", [Favor(num_features=9), Favor(num_features=9, clamp=0.3)], ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
def test_pieces_of_which_features_are_held_are_the_whole(
    mechanism: Any, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v), mask = heads(6, 5, 40, scale=0.5)
    w, results = mechanism.weights(Shape(2, 6)), []
    for least in (2048, 24):
        monkeypatch.setattr(signed_gpu, "LEAST", least)
        monkeypatch.setattr(signed_gpu, "NUMBERS", 2**27 if least > 24 else 1)
        out = mechanism.attend(q, k, v, w, is_causal=is_causal, key_mask=mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for whole, pieces in zip(*results, strict=True):
        assert_near(pieces, whole.double(), 2e-5)


@pytest.mark.parametrize("mechanism", [Favor(num_features=9), Favor(num_features=9, clamp=0.3)], ids=repr)
def test_packed_sequences_begin_anew(mechanism: Any) -> None:
    lengths = (20, 0, 1, 39, 9)
    x, mask = heads(6, 5, sum(lengths), scale=0.5)
    with torch.no_grad():
        x[1][..., :20, :] *= 20  # nothing of the first sequence's scale may reach the next
    bound, borders = Bound(mechanism, Shape(2, 6)), torch.tensor([0, *lengths]).cumsum(0).int()
    results = []
    for name in ("auto", "reference"):
        with implementation(name), dispatch.recorded() as steps:  # type: ignore[arg-type]
            out = bound(*x, is_causal=True, key_mask=mask[:, 0], cu_seqlens=borders)
        assert sum(step.path.startswith(dispatch.KERNEL) for step in steps) == (1 if name == "auto" else 0)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    for mine, right in zip(*results, strict=True):
        assert_near(mine, right.detach().double(), 1e-3)


def test_compiled_as_one_graph() -> None:
    mechanism, ((q, k, v), _) = Favor(num_features=9), heads(6, 4, 40, scale=0.5)
    w = mechanism.weights(Shape(2, 6))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mechanism.attend(q.sin(), k, v, w, is_causal=True, key_mask=None).cos()

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_near(out, run(q, k, v).detach().double(), 1e-5)


def test_calls_say_what_ran_and_refuse_what_cannot() -> None:
    (q, k, v), _ = heads(8, 4, 20)
    assert dispatch.KERNEL in str(explain(Favor(num_features=9), q, k, v, is_causal=True))
    with implementation("reference"):
        assert dispatch.KERNEL not in str(explain(Favor(num_features=9), q, k, v, is_causal=True))
    with pytest.raises(NotImplementedError, match="more than 32 bits"):
        attention(q.double(), k.double(), v.double(), Favor(num_features=9), impl="triton")
