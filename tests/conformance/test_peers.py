"""The laws bite: they find the known faults of the published packages (``make test-peers`` installs those)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fast_attention import conformance
from fast_attention.conformance import AttentionUnderTest, independence, robustness, third_party

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def peer(package: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package, exc_type=ImportError)
        return getattr(importlib.import_module(package), name)


def performer(causal: bool) -> AttentionUnderTest:
    kind = peer("performer_pytorch", "SelfAttention")
    make = lambda: kind(dim=64, heads=4, dim_head=16, nb_features=32, causal=causal)  # noqa: E731
    return third_party(make, name="performer", inputs="x", width=64, length=48, causal=causal, mask="mask")


def reformer(causal: bool) -> AttentionUnderTest:
    kind = peer("reformer_pytorch", "LSHSelfAttention")
    make = lambda: kind(dim=64, heads=4, bucket_size=8, n_hashes=4, causal=causal)  # noqa: E731
    described = third_party(make, name="reformer", width=64, length=64, causal=causal, mask="input_mask")

    def call(made: Any, inputs: tuple[torch.Tensor, ...], is_causal: bool, key_mask: Any) -> torch.Tensor:
        torch.manual_seed(5)  # its rotations are drawn at every call
        return described.call(made, inputs, is_causal, key_mask)

    return AttentionUnderTest(**{**described.__dict__, "call": call})


def sinkhorn(causal: bool) -> AttentionUnderTest:
    kind = peer("sinkhorn_transformer.sinkhorn_transformer", "SinkhornSelfAttention")
    make = lambda: kind(64, 16, 64, heads=4, causal=causal)  # noqa: E731
    return third_party(make, name="sinkhorn", width=64, length=64, causal=causal, mask="input_mask")


def aft(kind: str) -> AttentionUnderTest:
    module = peer("aft_pytorch", kind)
    return third_party(lambda: module(max_seqlen=64, dim=64, hidden_dim=64), name=kind, width=64, length=64)


def nystrom() -> AttentionUnderTest:
    kind = peer("nystrom_attention", "NystromAttention")
    make = lambda: kind(dim=64, dim_head=16, heads=4, num_landmarks=8)  # noqa: E731
    return third_party(make, name="nystrom", inputs="x", width=64, length=48, mask="mask")


FAULTS: list[tuple[str, Callable[[], AttentionUnderTest], conformance.Law]] = [
    ("performer-pytorch: the future leaks", lambda: performer(True), independence.future),
    ("performer-pytorch: padding leaks", lambda: performer(False), independence.padding),
    ("performer-pytorch: padded is not shorter", lambda: performer(False), independence.shorter),
    ("reformer-pytorch: the future leaks through the buckets", lambda: reformer(True), independence.future),
    ("reformer-pytorch: padding leaks", lambda: reformer(False), independence.padding),
    ("reformer-pytorch: odd lengths fail", lambda: reformer(False), robustness.lengths),
    ("sinkhorn-transformer: padding leaks", lambda: sinkhorn(False), independence.padding),
    ("sinkhorn-transformer: odd lengths fail", lambda: sinkhorn(False), robustness.lengths),
    ("nystrom-attention: one sequence moves another", nystrom, independence.batch),
    ("nystrom-attention: padded is not shorter", nystrom, independence.shorter),
    ("aft-pytorch: large inputs overflow", lambda: aft("AFTFull"), robustness.finite),
    ("aft-pytorch: lengths beyond its maximum fail", lambda: aft("AFTFull"), robustness.lengths),
]


@pytest.mark.parametrize(("fault", "make", "law"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_known_faults_are_found(fault: str, make: Callable[[], AttentionUnderTest], law: conformance.Law) -> None:
    finding = law(make())
    print(f"{fault}: size {finding.size:.3g}, limit {finding.limit:.0e} ({finding.detail})")
    assert finding.status == "broken", finding


def test_what_they_do_right_is_kept() -> None:
    """The laws are not mere pessimists."""
    assert independence.future(sinkhorn(True)).status == "kept"
    assert independence.batch(performer(False)).status == "kept"
    assert robustness.lengths(performer(False)).status == "kept"
    assert independence.padding(nystrom()).status == "kept"
    assert robustness.lengths(nystrom()).status == "kept"
