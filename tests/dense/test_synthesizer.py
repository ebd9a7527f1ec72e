"""Synthesizers: what their scores are (mathematics section 13, item 16), and masks, slices and decoding of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import (
    DenseSynthesizer,
    FactorizedDenseSynthesizer,
    FactorizedRandomSynthesizer,
    MixtureSynthesizer,
    RandomSynthesizer,
    Shape,
    Softmax,
    Unsupported,
    core,
)
from fast_attention.engine import trace
from fast_attention.functional import softmax_attention, synthesizer_attention
from fast_attention.mechanisms import DotProduct
from fast_attention.mechanisms.dense import relative, rows
from fast_attention.mechanisms.dense.scores import Scores
from tests.cases import bind, qkv, some_keys

DENSE = [DenseSynthesizer(), FactorizedDenseSynthesizer(), FactorizedDenseSynthesizer(factor=5)]
RANDOM = [RandomSynthesizer(), RandomSynthesizer(trainable=False), FactorizedRandomSynthesizer()]
MIXTURES = [MixtureSynthesizer(), MixtureSynthesizer(components=(DenseSynthesizer(), FactorizedRandomSynthesizer()))]
ALL: list[Any] = [*DENSE, *RANDOM, *MIXTURES]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def eye(size: int, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=torch.float64, device=device).expand(2, 2, size, size)


def test_random_mixes_by_one_row_stochastic_matrix(device: torch.device) -> None:
    """The same for every input: softmax(R), or softmax(R1 R2^T)."""
    q, k, v = qkv(13, device=device)
    for mechanism in RANDOM:
        bound = bind(mechanism, device=device)
        R = bound.w.R if isinstance(mechanism, RandomSynthesizer) else bound.w.R1 @ bound.w.R2.mT
        matrix = R[:, :13, :13].softmax(-1)
        close(bound(q, k, v), matrix @ v)
        close(bound(-q, 9 * k, v), matrix @ v)
        close(bound(q, k, eye(13, device)).sum(-1), torch.ones(2, 2, 13, dtype=v.dtype, device=device))


def test_a_random_synthesizer_can_be_any_mixing_matrix(device: torch.device) -> None:
    """R = log A gives A, for any row-stochastic A: a linear MLP-Mixer with W2 W1 = A."""
    v = qkv(7, device=device)[2]
    W1, W2 = torch.rand(2, 5, 7, dtype=v.dtype, device=device), torch.rand(2, 7, 5, dtype=v.dtype, device=device)
    A = W2 @ W1
    A = A / A.sum(-1, keepdim=True)
    close(synthesizer_attention(v, A.log()), A @ v)


def test_dense_without_its_first_layer_has_one_row_for_all(device: torch.device) -> None:
    q, k, _ = qkv(11, device=device)
    bound = bind(DenseSynthesizer(), device=device)
    matrix = bound(-q.abs(), k, eye(11, device))
    close(matrix, bound.w.b[:, None, :11].softmax(-1).expand(2, 2, 11, 11))
    moved = bound(q, 5 * k, eye(11, device))
    close(moved, bound(q, k, eye(11, device)))
    assert (moved[..., 0, :] - moved[..., 1, :]).abs().max() > 1e-2, "rows are a token's own"


def test_factorised_dense_indexes_an_outer_product(device: torch.device) -> None:
    """Key j = ja b + jb has score A_ja B_jb, in the repeat and tile form of the paper too."""
    q, k, _ = qkv(29, device=device)
    bound = bind(FactorizedDenseSynthesizer(factor=4), max_len=30, device=device)
    A, B = ((q.relu() @ layer.W + layer.b[:, None]) for layer in bound.w)
    assert (A.shape[-1], B.shape[-1]) == (4, 8)
    scores = A.repeat_interleave(8, -1) * B.repeat(1, 1, 1, 4)
    close(bound(q, k, eye(29, device)), scores[..., :29].softmax(-1))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_mixture_with_one_share_is_its_component(which: int, device: torch.device) -> None:
    parts = (DenseSynthesizer(), RandomSynthesizer(), DotProduct())
    mixture, (q, k, v) = bind(MixtureSynthesizer(components=parts), device=device), qkv(9, device=device)
    with torch.no_grad():
        mixture.w.alpha.fill_(-1e4)[:, which] = 0.0
    alone: Any = Softmax() if which == 2 else parts[which]
    close(mixture(q, k, v), alone(q, k, v, mixture.w.parts[which]))
    close(mixture(q, k, v, is_causal=True), alone(q, k, v, mixture.w.parts[which], is_causal=True))


def test_a_mixture_takes_the_traits_of_its_components() -> None:
    plain = MixtureSynthesizer(components=(DotProduct(),))
    assert (plain.traits.inputs, plain.traits.needs_max_len, plain.traits.cross) == ("qkv", False, True)
    assert MixtureSynthesizer(components=(RandomSynthesizer(), FactorizedRandomSynthesizer())).traits.inputs == "v"
    dense = MixtureSynthesizer(components=(DenseSynthesizer(), RandomSynthesizer(trainable=False))).traits
    assert (dense.inputs, dense.cross, dense.random, dense.needs_max_len) == ("qv", False, True, True)
    q, k, v = qkv(7)
    close(plain(q, k, v, plain.weights(Shape(2, 8))), softmax_attention(q, k, v))
    for bad in ((), (Softmax(),)):
        with pytest.raises(ValueError, match="components must be one or more Synthesizers and DotProduct"):
            MixtureSynthesizer(components=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_shorter_sequences_use_the_corner_of_the_weights(mechanism: Any, device: torch.device) -> None:
    """Cutting the weights to the length changes nothing; excess length is refused."""
    bound, (q, k, v) = bind(mechanism, max_len=20, device=device), qkv(13, device=device)
    padded = [torch.cat([x, torch.randn_like(x[:, :, :7])], -2) for x in (q, k, v)]
    close(bound(*padded, is_causal=True)[:, :, :13], bound(q, k, v, is_causal=True))
    mask = (torch.arange(20, device=device) < 13).expand(2, -1)
    close(bound(*padded, key_mask=mask)[:, :, :13], bound(q, k, v))
    with pytest.raises(ValueError, match="max_len="):
        bound(*qkv(31, device=device))


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_masks_and_biases(mechanism: Any, device: torch.device) -> None:
    bound, (q, k, v) = bind(mechanism, device=device), qkv(11, device=device)
    matrix, keep = bound(q, k, eye(11, device)), some_keys(1, 11, device)[0]
    left = matrix * keep
    left = left / left.sum(-1, keepdim=True)
    close(bound(q, k, v, attn_mask=keep.expand(11, 11)), left @ v)
    close(bound(q, k, v, attn_mask=torch.zeros(11, 11, device=device).masked_fill(~keep, float("-inf"))), left @ v)
    close(bound(q, k, v, key_mask=keep.expand(2, 11)), left @ v)
    bias = torch.randn(2, 1, 11, 11, dtype=v.dtype, device=device)
    close(bound(q, k, v, attn_mask=bias), (matrix.log() + bias).softmax(-1) @ v)
    drawn = bound(q, k, v, dropout=0.5)
    assert not torch.equal(drawn[0], bound(q, k, v)[0])
    twice = bound(*(x[:1].expand(2, -1, -1, -1) for x in (q, k, v)), dropout=0.5)
    assert not torch.equal(twice[0], twice[1]), "every sequence drops its own"


def test_random_crosses_and_dense_refuses(device: torch.device) -> None:
    q, k, v = qkv(5, 9, device=device)
    for mechanism in RANDOM:
        bound = bind(mechanism, device=device)
        R = bound.w.R if isinstance(mechanism, RandomSynthesizer) else bound.w.R1 @ bound.w.R2.mT
        close(bound(q, k, v), R[:, :5, :9].softmax(-1) @ v)
    with pytest.raises(Unsupported, match=r"traits\.cross"):
        bind(DenseSynthesizer(), device=device)(q, k, v)


KINDS = ["QK", "R", "R share", "XY", "QK R share XY"]


def summands(kinds: str, length: int, keys: int, device: torch.device) -> Scores:
    """Scores of the kinds asked for; K for all sequences, the table for each."""

    def some(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64, device=device, requires_grad=True)

    Q, K = (some(2, 3, length, 4), some(1, 3, keys, 4)) if "QK" in kinds else (None, None)
    R = some(1 + ("QK" in kinds), 3, length, keys) if "R" in kinds else None
    X, Y = (some(2, 3, length, 8), some(2, 3, length, -(-keys // 8))) if "XY" in kinds else (None, None)
    return Scores(Q, K, R, some(3) if "share" in kinds else None, X, Y)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("length", "keys"), [(64, 64), (65, 65), (129, 129), (40, 70), (70, 40)])
def test_blocks_of_queries_are_the_whole(
    kinds: str, length: int, keys: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Forward and every gradient, masked at both ends, in the middle, throughout or not at all, causal or not."""
    monkeypatch.setattr(rows, "BLOCK", 1 << 10)
    monkeypatch.setattr(rows, "ROWS", 16)
    scores, v = summands(kinds, length, keys, device), torch.randn(2, keys, 3, 5, dtype=torch.float64, device=device)
    v = v.transpose(1, 2).requires_grad_()
    inputs, slope = (
        [x for x in (v, *scores) if x is not None],
        torch.randn(2, 3, length, 5, dtype=v.dtype, device=device),
    )
    ends = (torch.arange(keys, device=device) > 4) & (torch.arange(keys, device=device) < keys - 5)
    gone = torch.zeros(1, keys, dtype=torch.bool, device=device)
    for mask in (None, ends.expand(2, -1), some_keys(2, keys, device), torch.cat([gone, ends[None]])):
        for is_causal in (False, True):
            seen = None if mask is None else mask[:, None]
            ours = rows.attend(v, scores, is_causal=is_causal, key_mask=seen)
            theirs = synthesizer_attention(v, scores.whole(keys), is_causal=is_causal, key_mask=mask)
            close(ours, theirs, 1e-10)
            grads = [torch.autograd.grad(y, inputs, slope) for y in (ours, theirs)]
            for a, b in zip(*grads, strict=True):
                close(a, b, 1e-10)
            with torch.no_grad():
                assert torch.equal(rows.attend(v, scores, is_causal=is_causal, key_mask=seen), ours)


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_long_sequences_are_the_definition(
    mechanism: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At lengths that run in blocks: against all scores at once, gradients of inputs and weights too."""
    monkeypatch.setattr(relative, "SCORES", 1 << 16)
    for length, masked, is_causal in ((257, False, False), (257, True, True), (1031, False, True)):
        bound, (q, k, v) = bind(mechanism, max_len=1040, device=device), qkv(length, device=device)
        wanted = [x.requires_grad_() for x in (q, k, v)] + list(bound.parameters())
        mask = some_keys(2, length, device) if masked else None
        with trace.recorded() as steps:
            ours = bound(q, k, v, is_causal=is_causal, key_mask=mask)
        assert device.type != "cpu" or [step.path for step in steps] == ["softmax in blocks of queries"]
        scores = mechanism.scores(q, k, bound.w, first=0, keys=length).whole(length)
        theirs = synthesizer_attention(v, scores, is_causal=is_causal, key_mask=mask)
        close(ours, theirs, 1e-10)
        grads = [torch.autograd.grad(y.square().sum(), wanted, allow_unused=True) for y in (ours, theirs)]
        for a, b in zip(*grads, strict=True):
            close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, 1e-9)


@pytest.mark.skipif(bool(core.unavailable()), reason="needs the compiled core")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_dense_scores_in_the_core_are_the_definition(is_causal: bool, masked: bool) -> None:
    """Outputs, and gradients of queries, values and both weights; without these, torch's kernel where nothing hides."""
    bound = bind(DenseSynthesizer(), max_len=300)
    q, k, v = (x.requires_grad_() for x in qkv(257))
    mask = some_keys(2, 257) if masked else None
    scores = bound.mechanism.scores(q, k, bound.w, first=0, keys=257).whole(257)
    theirs = synthesizer_attention(v, scores, is_causal=is_causal, key_mask=mask)
    grads = torch.autograd.grad(theirs.square().sum(), [q, v, *bound.parameters()])
    bound = bound.float()
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    with trace.recorded() as steps:
        ours = bound(q, k, v, is_causal=is_causal, key_mask=mask)
        with torch.no_grad():
            untrained = bound(q, k, v, is_causal=is_causal, key_mask=mask)
    inference = trace.CORE if is_causal or masked else "torch's fused kernel"
    assert [step.path.startswith(name) for step, name in zip(steps, (trace.CORE, inference), strict=True)] == [True] * 2
    close(ours.double(), theirs, 2e-5)
    close(untrained.double(), theirs, 2e-5)
    found = torch.autograd.grad(ours.square().sum(), [q, v, *bound.parameters()])
    for a, b in zip(found, grads, strict=True):
        close(a.double(), b, 1e-4)


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_long_and_loud_stays_finite_and_causal(mechanism: Any, device: torch.device) -> None:
    bound = bind(mechanism, max_len=600, device=device).to(torch.float32)
    q, k, v = (100 * x for x in qkv(600, device=device, dtype=torch.float32))
    v.requires_grad_()
    whole = bound(q, k, v, is_causal=True)
    (grad,) = torch.autograd.grad(whole.sum(), v)
    assert bool(whole.isfinite().all())
    assert bool(grad.isfinite().all())
    later = [torch.cat([x[:, :, :413], 60 * x[:, :, 413:]], -2) for x in (q, k, v)]
    assert torch.equal(bound(*later, is_causal=True)[:, :, :413], whole[:, :, :413])


def test_decoding_keeps_only_what_is_read(device: torch.device) -> None:
    q, k, v = qkv(5, device=device)
    for mechanism in ALL:
        state = bind(mechanism, device=device).decode(q, k, v)[1]
        assert state.content.k.shape[-1] == (8 if mechanism.traits.inputs == "qkv" else 0)


def test_weights_start_where_scores_have_order_one() -> None:
    shape = Shape(4, 64, 200)
    assert abs(float(RandomSynthesizer().weights(shape).R.detach().var()) - 1) < 0.02
    R1, R2 = (x.detach() for x in FactorizedRandomSynthesizer().weights(shape))
    assert abs(float((R1 @ R2.mT).var()) - 1) < 0.2
    layer = DenseSynthesizer().weights(shape)
    assert abs(float((torch.randn(4, 100, 64).relu() @ layer.W.detach()).var()) - 0.5) < 0.1


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="factor must be at least 1"):
        FactorizedDenseSynthesizer(factor=0)
    with pytest.raises(ValueError, match="rank must be at least 1"):
        FactorizedRandomSynthesizer(rank=0)
