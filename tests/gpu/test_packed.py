"""Packed sequences in one launch: decays that let nothing pass, windows that end where a sequence ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast_attention import (
    AFTSimple,
    Attention,
    BlockLocal,
    Bound,
    DecayedLinearAttention,
    FavorPlus,
    FavorPlusPlus,
    LearnedFeatures,
    LinearAttention,
    Local,
    Softmax,
)
from fast_attention.engine import trace
from fast_attention.feature_maps.features import Identity, Relu
from fast_attention.functional import implementation
from fast_attention.gpu import configurations, flex
from fast_attention.gpu.configurations import EXPONENTIAL
from fast_attention.integrations import attention
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanisms.aft import aft_simple as aft
from fast_attention.mechanisms.aft import kernels as pooling
from fast_attention.mechanisms.linear import kernels
from fast_attention.packed import Packing
from fast_attention.traits import Shape
from tests.gpu.heads import assert_near

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
LENGTHS = (40, 0, 1, 50, 33, 0)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Several chunks of few tokens, for Triton's interpreter takes milliseconds a block."""
    if device.type == "cpu":
        rows = {width: row._replace(chunk=row.block) for width, row in configurations.TABLE.items()}
        monkeypatch.setattr(configurations, "TABLE", rows)


def packed_heads(lengths: tuple[int, ...], width: int, rows: int = 1) -> Any:
    """Queries, keys and values of packed sequences, a mask that hides a fifth, and borders."""
    x = [torch.randn(rows, 2, sum(lengths), width).requires_grad_() for _ in range(3)]
    return x, torch.rand(rows, sum(lengths)) > 0.2, torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize(("is_causal", "masked"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "mechanism",
    [
        LinearAttention(), LinearAttention(feature_map=Relu(offset=0.1)), DecayedLinearAttention(gate="token"),
        DecayedLinearAttention(Identity(), normalize=False),
    ],
    ids=repr,
)  # fmt: skip
def test_sums_begin_anew_with_every_sequence(mechanism: Attention[Any, Any], masked: bool, is_causal: bool) -> None:
    x, mask, borders = packed_heads(LENGTHS, 16)
    bound, key_mask, results = Bound(mechanism, Shape(2, 16)), mask if masked else None, []
    for name in ("auto", "reference"):
        with implementation(name), trace.recorded() as steps:  # type: ignore[arg-type]
            out = bound(*x, is_causal=is_causal, key_mask=key_mask, cu_seqlens=borders)
        launched = [step for step in steps if step.path.startswith(trace.KERNEL)]
        assert len(launched) == (2 - is_causal if name == "auto" else 0)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*x, *bound.parameters()])])
    for mine, right in zip(*results, strict=True):
        assert_near(mine, right.detach().double(), 1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", [Local(window=(40, 7)), BlockLocal(block_size=48, before=2), Softmax()], ids=repr)
def test_windows_end_with_their_sequence(
    mechanism: Attention[Any, Any], is_causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        from torch.nn.attention.flex_attention import flex_attention

        monkeypatch.setattr(flex, "compiled", lambda: flex_attention)
    x, mask, borders = packed_heads((500, 0, 90, 1, 700), 16)
    x, bound, results = [t.detach().half() for t in x], Bound(mechanism, Shape(2, 16)), []
    apart = masked and mechanism.traits.positions == "absolute"  # blocks are counted behind the padding of each
    for name in ("auto", "reference"):
        with implementation(name), trace.recorded() as steps:  # type: ignore[arg-type]
            results.append(bound(*x, is_causal=is_causal, key_mask=mask if masked else None, cu_seqlens=borders))
        launched = [step for step in steps if step.path == f"{trace.KERNEL}: FlexAttention"]
        assert (len(launched) == 1) == (name == "auto" and not apart)
    assert float((results[0].double() - results[1].double()).abs().max()) < 3e-3


CHUNKED = [
    FavorPlus(num_features=9), FavorPlusPlus(num_features=9), LearnedFeatures(num_features=5),
    AFTSimple(),
]  # fmt: skip


def chunks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aft, "TOKENS", 16)
    for key, rows in EXPONENTIAL.items():
        monkeypatch.setitem(EXPONENTIAL, key, type(rows)(*(row._replace(chunk=16, block=16) for row in rows)))


@pytest.mark.parametrize("mechanism", CHUNKED, ids=repr)
def test_every_sequence_begins_a_chunk(mechanism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several chunks, of one that is full, of less than one, of none."""
    chunks_of_16(monkeypatch)
    x, mask, borders = packed_heads((20, 0, 1, 32, 9), 6)
    with torch.no_grad():
        x[1][..., :20, :] *= 8  # keys of the first sequence have features of other sizes, and pools
    bound, results = Bound(mechanism, Shape(2, 6)), []
    for name in ("auto", "reference"):
        with implementation(name), trace.recorded() as steps:  # type: ignore[arg-type]
            out = bound(*x, is_causal=True, key_mask=mask, cu_seqlens=borders)
        launched = [step for step in steps if step.path.startswith(trace.KERNEL)]
        assert len(launched) == (1 if name == "auto" else 0)
        trained = [each for each in bound.parameters() if each.requires_grad]
        results.append([out, *torch.autograd.grad(out.square().sum(), [*x, *trained])])
    for mine, right in zip(*results, strict=True):
        assert_near(mine, right.detach().double(), 2e-5)


@pytest.mark.parametrize("name", ["feature_scan", "pool_scan"])
def test_second_derivatives_keep_sequences_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of_16(monkeypatch)
    (q, k, v), _, _ = packed_heads((32,), 4)
    begins, rows, found = torch.tensor([1, 1], dtype=torch.uint8), torch.randn(2, 4, 4), []
    forms: dict[str, Any] = {
        "feature_scan": (kernels.feature_scan, kernels.plain_feature_scan, (rows, None, rows, begins), {}),
        "pool_scan": (pooling.pool_scan, pooling.plain_scan, (begins,), {}),
    }
    kernel, twin, given, settings = forms[name]
    for form in (kernel, twin):
        out = form(q, k, v, None, None, *given, **settings)[0]
        (first,) = torch.autograd.grad(out[..., 16:, :].square().sum(), k, create_graph=True)
        assert not first[..., :16, :].any()
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    assert_near(found[0], found[1].double(), 2e-5)


def test_what_no_kernel_packs_goes_one_by_one() -> None:
    x, _, borders = packed_heads(LENGTHS, 16)
    bound = Bound(LinearAttention(), Shape(2, 16))
    with trace.recorded() as steps:
        bound(*x, cu_seqlens=borders)
    assert sum(step.path.startswith(trace.KERNEL) for step in steps) > 1


def test_rows_of_texts_in_swapped_models_are_one_launch() -> None:
    (q, k, v), mask, _ = packed_heads((124,), 16, rows=2)
    bound, texts = Bound(DecayedLinearAttention(), Shape(2, 16)), Packing((60, 64, 124), (60, 64, 124))
    seen = Visibility(lambda: pytest.fail("no dense mask is wanted"), tokens=mask, is_causal=True)  # (2, tokens) rows
    results = []
    for name in ("auto", "reference"):
        with implementation(name), trace.recorded() as steps:  # type: ignore[arg-type]
            results.append(attention.run_packed(attention.Call(bound, q, k, v, seen), texts))
        assert sum(step.path.startswith(trace.KERNEL) for step in steps) == (1 if name == "auto" else 0)
    assert_near(results[0], results[1].detach().double(), 1e-5)
