"""The published packages whose leaks are measured: how each makes its layers, and the laws these are held to."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from fast_attention.conformance import AttentionUnderTest, Law, independence, robustness, third_party

WIDTH, HEADS, LENGTH = 64, 4, 64
LAWS: tuple[Law, ...] = (
    independence.future, independence.past, independence.padding, independence.shorter, independence.batch,
    robustness.lengths, robustness.finite,
)  # fmt: skip
MODULES = {
    "performer-pytorch": "performer_pytorch",
    "reformer-pytorch": "reformer_pytorch",
    "sinkhorn-transformer": "sinkhorn_transformer.sinkhorn_transformer",
    "aft-pytorch": "aft_pytorch",
    "nystrom-attention": "nystrom_attention",
}


@dataclass(frozen=True)
class Subject:
    """A layer of a package.

    Args:
        package: On the index of packages.
        name: The class, and how it is called.
        make: Describes it for the laws.
    """

    package: str
    name: str
    make: Callable[[], AttentionUnderTest]


def installed(package: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _layer(package: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(MODULES[package]), name)


def performer(causal: bool) -> AttentionUnderTest:
    """performer-pytorch's ``SelfAttention``."""
    kind = _layer("performer-pytorch", "SelfAttention")
    make = lambda: kind(dim=WIDTH, heads=HEADS, dim_head=16, nb_features=32, causal=causal)  # noqa: E731
    return third_party(make, inputs="x", width=WIDTH, length=LENGTH, causal=causal, mask="mask")


def reformer(causal: bool) -> AttentionUnderTest:
    """reformer-pytorch's ``LSHSelfAttention``; its rotations, drawn at every call, are the same at each."""
    kind = _layer("reformer-pytorch", "LSHSelfAttention")
    make = lambda: kind(dim=WIDTH, heads=HEADS, bucket_size=8, n_hashes=4, causal=causal)  # noqa: E731
    described = third_party(make, inputs="x", width=WIDTH, length=LENGTH, causal=causal, mask="input_mask")

    def call(layer: Any, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return described.call(layer, inputs, is_causal, key_mask)

    return replace(described, call=call)


def sinkhorn(causal: bool) -> AttentionUnderTest:
    """sinkhorn-transformer's ``SinkhornSelfAttention``."""
    kind = _layer("sinkhorn-transformer", "SinkhornSelfAttention")
    make = lambda: kind(WIDTH, 16, LENGTH, heads=HEADS, causal=causal)  # noqa: E731
    return third_party(make, inputs="x", width=WIDTH, length=LENGTH, causal=causal, mask="input_mask")


def aft(name: str) -> AttentionUnderTest:
    """aft-pytorch's layers, which take neither a mask nor causality."""
    kind = _layer("aft-pytorch", name)
    return third_party(lambda: kind(max_seqlen=LENGTH, dim=WIDTH, hidden_dim=WIDTH), width=WIDTH, length=LENGTH)


def nystrom() -> AttentionUnderTest:
    """nystrom-attention's ``NystromAttention``."""
    kind = _layer("nystrom-attention", "NystromAttention")
    make = lambda: kind(dim=WIDTH, dim_head=16, heads=HEADS, num_landmarks=8)  # noqa: E731
    return third_party(make, inputs="x", width=WIDTH, length=LENGTH, mask="mask")


SUBJECTS = (
    Subject("performer-pytorch", "SelfAttention(causal=True)", lambda: performer(True)),
    Subject("performer-pytorch", "SelfAttention()", lambda: performer(False)),
    Subject("reformer-pytorch", "LSHSelfAttention(causal=True)", lambda: reformer(True)),
    Subject("reformer-pytorch", "LSHSelfAttention()", lambda: reformer(False)),
    Subject("sinkhorn-transformer", "SinkhornSelfAttention(causal=True)", lambda: sinkhorn(True)),
    Subject("sinkhorn-transformer", "SinkhornSelfAttention()", lambda: sinkhorn(False)),
    Subject("aft-pytorch", "AFTFull()", lambda: aft("AFTFull")),
    Subject("aft-pytorch", "AFTSimple()", lambda: aft("AFTSimple")),
    Subject("aft-pytorch", "AFTLocal()", lambda: aft("AFTLocal")),
    Subject("nystrom-attention", "NystromAttention()", nystrom),
)
