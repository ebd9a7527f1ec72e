"""LSH in chunks of slots against the plain form that autograd follows: borders of chunks, masks, scales, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fast_attention import conformance
from fast_attention.engine import dispatch
from fast_attention.mechanisms.lsh import fast
from fast_attention.mechanisms.lsh.fast import hashed_attention
from fast_attention.mechanisms.lsh.lsh import LSH
from fast_attention.mechanisms.lsh.reference import Rules, buckets, hashed_softmax
from tests import test_oracles
from tests.cases import ATTENTIONS, qkv, some_keys

KINDS = {
    "causal": Rules(8, 16, True, False, True, True, 1.0),
    "both sides": Rules(8, 16, True, False, False, True, 0.7),
    "once per round": Rules(4, 5, True, False, True, False, 1.0),
    "sorted": Rules(8, 16, False, False, False, True, 1.0),
    "across": Rules(8, 16, False, True, False, True, 1.0),
}
LSHS = [mechanism for mechanism in ATTENTIONS if isinstance(mechanism, LSH)]
LAWS = [law for law in conformance.LAWS if "torch" not in law.name]  # those cost seconds


@pytest.mark.parametrize("length", [63, 64, 65, 129, 257, 1003])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_plain_form(kind: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients in float64; inputs times 1000 need their largest score taken off."""
    monkeypatch.setattr(fast, "SHORT", 0)
    for masked, scale in itertools.product((False, True), (1.0, 1000.0)):
        is_the_plain_form(kind, length, masked, scale)


@pytest.mark.parametrize("length", [1, 2, 63, 129])
@pytest.mark.parametrize("kind", KINDS)
def test_all_pairs_are_the_plain_form(kind: str, length: int) -> None:
    for masked, scale in itertools.product((False, True), (1.0, 1000.0)):
        with dispatch.recorded() as steps:
            is_the_plain_form(kind, length, masked, scale)
        assert [step.path for step in steps] == ["one product of all tokens, masked by their buckets"]


def test_many_short_sequences_go_chunk_by_chunk() -> None:
    """All pairs of a large batch would take much memory."""
    rules, lanes = KINDS["causal"], fast.PAIRS // 64**2 + 1
    x = torch.randn(lanes, 1, 64, 2)
    with dispatch.recorded() as steps:
        hashed_attention(x, x, torch.zeros(lanes, 1, 1, 64, dtype=torch.int32), **vars(rules))
    assert [step.path for step in steps] == ["chunks of hashed tokens, gathered once a round"]


@pytest.mark.parametrize("mechanism", LSHS, ids=repr)
def test_chunks_agree_with_the_oracle(mechanism: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short forms serve the lengths of oracles and laws; what serves longer ones is held to both as well."""
    monkeypatch.setattr(fast, "SHORT", 0)
    with dispatch.recorded() as steps:
        test_oracles.test_heads_and_sequences(mechanism, device)
    assert {step.path for step in steps} == {"chunks of hashed tokens, gathered once a round"}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_chunks_keep_the_laws(law: conformance.Law, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "SHORT", 0)
    for mechanism in LSHS:
        finding = law(conformance.of(mechanism), str(device))
        assert finding.status != "broken", finding


def is_the_plain_form(kind: str, length: int, masked: bool, scale: float) -> None:
    rules = KINDS[kind]
    q, _, v = qkv(length)
    q, v = scale * q.mT.contiguous().mT, v  # not contiguous
    bucket = buckets(q, torch.randn(2, 3, 8, rules.number // 2, dtype=q.dtype), (rules.number,))
    seen = some_keys(2, length, q.device) if masked else torch.ones(2, length, dtype=torch.bool)
    bucket = torch.where(seen[:, None, None, :], bucket, rules.number)
    q, v = q.requires_grad_(), v.requires_grad_()
    found = []
    for form in (hashed_attention(q, v, bucket, **vars(rules)), hashed_softmax(q, v, bucket, rules=rules)):
        out = form.masked_fill(~seen[:, None, :, None], 0.0)
        found.append((out, *torch.autograd.grad(out.sin().sum(), (q, v))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("few", [0, 64])
def test_one_gradient_alone_and_twice(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the values need a gradient; and a gradient that is differentiated again."""
    monkeypatch.setattr(fast, "SHORT", few)
    rules = KINDS["causal"]
    q, _, v = qkv(40)
    bucket = buckets(q, torch.randn(2, 2, 8, 4, dtype=q.dtype), (8,))
    v.requires_grad_()
    (ours,) = torch.autograd.grad(hashed_attention(q, v, bucket, **vars(rules)).square().sum(), v, create_graph=True)
    (again,) = torch.autograd.grad(ours.square().sum(), v)
    assert again.isfinite().all()
    (theirs,) = torch.autograd.grad(hashed_softmax(q, v, bucket, rules=rules).square().sum(), v)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
