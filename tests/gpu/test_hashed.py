"""LSH by FlexAttention: who meets whom against all pairs, blocks that are read, outputs and gradients, limits.

FlexAttention has gradients on a GPU only; on a CPU plain softmax with its logarithms stands for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import LSH, attention
from fast_attention.engine import trace
from fast_attention.functional import implementation
from fast_attention.gpu import flex
from fast_attention.mechanisms.lsh import gpu
from fast_attention.mechanisms.lsh.reference import Rules, arrange
from fast_attention.traits import Shape
from tests.gpu.heads import assert_near, flex_by_pairs, softmax_of_pairs

pytestmark = pytest.mark.usefixtures("interpreted")
RULES = [
    Rules(4, 16, True, False, True, True, 1.0),
    Rules(4, 16, True, False, False, True, 1.0),
    Rules(4, 16, True, False, True, False, 1.0),
    Rules(4, 24, False, False, False, True, 1.0),
    Rules(4, 24, False, True, False, True, 1.0),
    Rules(4, 24, False, True, False, False, 1.0),
]
SMALL = {"num_hashes": 3, "num_buckets": 4, "bucket_size": 16}
MECHANISMS = [
    LSH(**SMALL), LSH(**SMALL, correct_duplicates=False, scale=0.5), LSH(**SMALL, layout="sorted"),
    LSH(**SMALL, layout="sorted", attend_across_buckets=True), LSH(num_hashes=1, num_buckets=64, bucket_size=4),
]  # fmt: skip


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    flex_by_pairs(monkeypatch, device)


@pytest.mark.parametrize("rules", RULES, ids=repr)
@pytest.mark.parametrize("length", [300, 256])
def test_all_rounds_together_meet_whom_they_should(rules: Rules, length: int) -> None:
    bucket = torch.randint(0, rules.number, (1, 2, 3, length), dtype=torch.int32)
    bucket = torch.where(torch.rand(1, 2, 1, length) > 0.1, bucket, rules.number)
    arranged = arrange(bucket, number=rules.number, size=rules.size, ranked=rules.ranked, across=rules.across)
    pattern = gpu.pattern(arranged, rules)
    heads, at, b = torch.arange(6).view(6, 1, 1), torch.arange(flex.rounded(length)), torch.zeros((), dtype=torch.long)
    seen = pattern.visible(b, heads, at[:, None], at)
    read = pattern.some.repeat_interleave(flex.SIZE, -1).repeat_interleave(flex.SIZE, -2)
    assert not bool((seen & ~read).any())
    assert not bool(pattern.every.any())
    assert not bool(seen[:, length:].any() | seen[:, :, length:].any())
    found, back = torch.zeros(2, length, length, dtype=torch.uint8), arranged.back.view(6, length)
    for h in range(6):
        found[h // 3] += seen[h][back[h]][:, back[h]]
    visible = bucket[0, :, 0] < rules.number
    expected = meetings(arranged.code[0], is_causal=rules.is_causal) * visible[:, :, None] * visible[:, None]
    assert torch.equal(found, expected.clamp(max=1) if rules.distinct else expected)
    assert int(found.sum()) > length


def meetings(code: Tensor, *, is_causal: bool) -> Tensor:
    """In how many rounds query i reaches key j; what masked queries reach means nothing."""
    apart = code[..., :, None] - code[..., None, :]
    often = ((apart == 0) | (apart == 1)).sum(-3)
    return often.tril(-1) if is_causal else often - often.diagonal(dim1=-2, dim2=-1).diag_embed()


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_plain_form(mechanism: LSH, is_causal: bool, masked: bool, device: torch.device) -> None:
    if is_causal and not mechanism.traits.causal:
        pytest.skip("this layout is not causal")
    length = 290 if device.type == "cpu" else 1100
    q, v = torch.randn(2, 2, length, 16).half(), torch.randn(2, 2, length, 32).half()
    mask = torch.rand(2, 1, length) > 0.2
    clean = [q.clone().requires_grad_(), v.clone().requires_grad_()]
    if masked:
        q, v = (x.masked_fill(~mask[..., None], float("nan")) for x in (q, v))
    heads = [q.requires_grad_(), v.requires_grad_()]
    w, grad = mechanism.weights(Shape(heads=2, head_dim=16)), torch.randn(2, 2, length, 32).half()
    named: dict[str, Any] = {"is_causal": is_causal, "key_mask": mask if masked else None}
    with trace.recorded() as steps:
        results = [mechanism.attend(q, q, v, w, **named)]
    assert any(step.path == f"{trace.KERNEL}: FlexAttention" for step in steps)
    with implementation("reference"):
        results.append(mechanism.attend(clean[0], clean[0], clean[1], w, **named))
    gradients = [torch.autograd.grad(x, given, grad) for x, given in zip(results, (heads, clean), strict=True)]
    assert_near(results[0], results[1].double(), 3e-3)
    for mine, right in zip(*gradients, strict=True):
        assert bool(mine.isfinite().all())
        assert_near(mine, right.double(), 6e-3)


def test_a_token_that_meets_nobody_keeps_its_value(device: torch.device) -> None:
    """More buckets than tokens: most tokens are alone in theirs."""
    x = torch.randn(1, 1, 100 if device.type == "cpu" else 1100, 16).half()
    out = attention(x, x, x, LSH(num_hashes=1, num_buckets=4096, bucket_size=1), is_causal=True, impl="triton")
    assert bool((out == x).all(-1).sum() > 50)


def test_what_it_does_not_serve_runs_by_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 1100, 16).half()
    refused = [(x.float(), "float32"), (x[..., :60, :], "fewer than 64"), (x.repeat(1, 1, 1, 3), "other widths")]
    for heads, words in refused[: 3 if flex.SHORTEST == 64 else 1]:
        with trace.recorded() as steps:
            attention(heads, heads, heads, LSH(**SMALL))
        assert any(words in step.why for step in steps)
        assert not any(step.path.startswith(trace.KERNEL) for step in steps)
    monkeypatch.setattr(gpu, "PAIRS", 6 * 10**2)
    attention(x, x, x, LSH(**SMALL), impl="triton")
    monkeypatch.setattr(gpu, "PAIRS", 6 * 10**2 - 1)
    with pytest.raises(NotImplementedError, match="more than 599 pairs of blocks in all rounds"):
        attention(x, x, x, LSH(**SMALL), impl="triton")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_compiles(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("compiled for a CPU here; on a GPU the other tests compile it")
    monkeypatch.undo()
    q, v = torch.randn(1, 2, 3, 300, 16), torch.randn(1, 2, 3, 300, 16)
    for seed in range(2):
        torch.manual_seed(seed)
        bucket = torch.randint(0, 4, (1, 2, 3, 300), dtype=torch.int32)
        arranged = arrange(bucket, number=4, size=16, ranked=True)
        pattern = gpu.pattern(arranged, RULES[1])
        results = []
        for run in (flex.compiled(), softmax_of_pairs):
            monkeypatch.setattr(flex, "compiled", lambda run=run: run)
            results.append(flex.attend(q, q, v, pattern, None, scale=1.0))  # on a CPU logarithms do not compile
        monkeypatch.undo()
        assert_near(results[0], results[1].double(), 1e-5)
