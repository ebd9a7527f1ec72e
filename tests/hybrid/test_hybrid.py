"""Hybrid: near blocks and a linear remainder under one normaliser; special cases, states, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fast_attention import BlockLocal, Bound, Hybrid, LinearAttention, Shape, attention, catalogue, core, explain
from fast_attention.engine import trace
from fast_attention.engine.masks import masked_softmax
from fast_attention.feature_maps.feature_map import FeatureMap, Features
from fast_attention.feature_maps.features import Custom, Exp, Quadratic
from tests.cases import ATTENTIONS, bind, qkv, some_keys
from tests.oracles import ORACLES
from tests.test_oracles import same

BLOCKS = [
    "BlockLocal()",
    "BlockLocal(block_size=20, before=2, after=0)",
    "BlockLocal(block_size=50, before=0, after=1)",
]
VARIANTS = [m for m in ATTENTIONS if type(m).__name__ == "Hybrid"]


def expected(m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The oracle over batch and heads."""
    oracle = ORACLES["Hybrid"]
    sequences = []
    for b in range(len(q)):
        seen = None if mask is None else mask[b]
        heads = [
            oracle(m, q[b, h], k[b, h], v[b, h], w, head=h, is_causal=is_causal, key_mask=seen)
            for h in range(q.shape[1])
        ]
        sequences.append(torch.stack(heads))
    return torch.stack(sequences)


@pytest.mark.parametrize("mechanism", [*VARIANTS[1:5], *VARIANTS[-4:]], ids=repr)
def test_many_blocks_agree_with_the_oracle(mechanism: Any) -> None:
    bound = bind(mechanism)
    for length, keys, masked_where_causal in ((13, 13, True), (5, 12, True), (12, 5, False)):
        for is_causal in (False, True):
            mask = some_keys(2, keys) if is_causal == masked_where_causal else None
            q, k, v = (x.requires_grad_() for x in qkv(length, keys))
            ours = bound(q, k, v, is_causal=is_causal, key_mask=mask)
            theirs = expected(mechanism, q, k, v, bound.w, is_causal=is_causal, mask=mask)
            same(f"{length} x {keys}, causal {is_causal}", ours, theirs, (q, k, v, *bound.parameters()))
            with torch.no_grad():
                torch.testing.assert_close(bound(q, k, v, is_causal=is_causal, key_mask=mask), ours.detach())


def dense(bound: Bound, q: Tensor, k: Tensor, v: Tensor, near: Tensor, visible: Tensor) -> Tensor:
    """All weights at once: exact where ``near``, from features elsewhere."""
    queries, keys = bound.mechanism.far.maps(bound.w)
    (fq, a), (fk, b) = queries(q).per_token(), keys(k).per_token()
    far = (fq @ fk.mT).log()
    far = far if a is None or b is None else far + a[..., None] + b[..., None, :]
    return masked_softmax(torch.where(near, q @ k.mT * q.shape[-1] ** -0.5, far), visible) @ v


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", BLOCKS)
def test_long_sequences_are_the_dense_definition(near: str, is_causal: bool) -> None:
    """Some keys masked."""
    n, bound = 333, bind(f"Hybrid(near={near}, far=LearnedFeatures(num_features=6), first=2, last=3)")
    m, mask = bound.mechanism.near, torch.ones(1, n, dtype=torch.bool)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    apart = j // m.block_size - i // m.block_size
    around = (apart >= -m.before) & (apart <= m.after)
    for masked in (False, True):
        q, k, v = (x.requires_grad_() for x in qkv(n, batch=1))
        mask[:, [3, 5, 100, 101, n - 2]] = not masked
        first, last = mask[0].nonzero()[:2, 0], mask[0].nonzero()[-3:, 0]
        exact = around | torch.isin(j, first) | (torch.isin(j, last) & torch.tensor(not is_causal))
        visible = ((j <= i) | torch.tensor(not is_causal)) & mask
        theirs = dense(bound, q, k, v, exact, visible)
        ours = bound(q, k, v, is_causal=is_causal, key_mask=mask if masked else None)
        same(near, ours, theirs, (q, k, v, *bound.parameters()))


@dataclass(frozen=True, repr=False)
class Gated(FeatureMap):
    """A map whose only parameter stands in the scale of its features."""

    gate: ClassVar[Tensor] = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def __call__(self, x: Tensor) -> Tensor:
        values, scale = self.features(x).per_token()
        return values if scale is None else values * scale.exp()[..., None]

    def features(self, x: Tensor) -> Features:
        return Features(torch.nn.functional.elu(x) + 1, self.gate * x.square().mean(-1))


def test_a_parameter_of_scales_gets_its_gradient() -> None:
    """Known from the slope of the loss; in float32, which the core takes, as well."""
    bound, (q, k, v) = Bound(Hybrid(near=BlockLocal(block_size=5), far=LinearAttention(Gated())), Shape(2, 8)), qkv(80)

    def loss(gate: float) -> Tensor:
        with torch.no_grad():
            Gated.gate.fill_(gate)
        return bound(q, k, v).square().sum()

    with torch.no_grad():
        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    found = torch.autograd.grad(loss(0.0), Gated.gate)[0]
    assert found.abs() > 1e-3
    torch.testing.assert_close(found, slope, rtol=1e-6, atol=1e-8)
    found_in_float32 = torch.autograd.grad(bound(q.float(), k.float(), v.float()).square().sum(), Gated.gate)[0]
    torch.testing.assert_close(found_in_float32, found, rtol=1e-4, atol=1e-4)


def test_parameters_inside_a_users_map_get_their_gradient() -> None:
    """They are no weights of the mechanism's: only the plain form, which autograd follows, can reach them."""
    inside = torch.nn.Linear(8, 5).double()
    far = LinearAttention(feature_map=Custom(lambda x: inside(x).exp()))
    bound = Bound(Hybrid(near=BlockLocal(block_size=5), far=far), Shape(2, 8))
    q, k, v = (x.requires_grad_() for x in qkv(80))

    def run(bias: Tensor) -> Tensor:
        with torch.no_grad():
            inside.bias.copy_(bias)
        return bound(q, k, v).square().sum()

    start, step = inside.bias.detach().clone(), 1e-5
    found = torch.autograd.grad(run(start), inside.bias)[0]
    with torch.no_grad():
        for i in range(5):
            nudge = step * torch.eye(5, dtype=torch.float64)[i]
            slope = (run(start + nudge) - run(start - nudge)) / (2 * step)
            torch.testing.assert_close(found[i], slope, rtol=1e-5, atol=1e-7)


needs_core = pytest.mark.skipif(bool(core.unavailable()), reason=core.unavailable() or "it serves")
NARROW = "Hybrid(near=BlockLocal(block_size=64), far=LearnedFeatures(num_features=16))"


def held_by(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result, and the bytes that are kept for its gradient."""
    held: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run()
    return out, sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())


@needs_core
def test_a_training_step_keeps_sums_and_no_scores() -> None:
    """Beside inputs, mask and output only the sums of every 64 keys, half of q for 32 features, and of sections."""
    bound = bind(NARROW, head_dim=64, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv(4096, width=64, dtype=torch.float32))
    assert held_by(lambda: bound(q, k, v))[1] < 5 * q.numel() * 4


@needs_core
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_few_queries_of_many_keys_keep_few_sums(queries: int, is_causal: bool) -> None:
    """Blocks of keys are as large as ever: the outputs are the last ones of all queries, and little is kept."""
    n, bound = 1000, bind(NARROW, head_dim=64, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv(n, width=64, dtype=torch.float32))
    all_of_them = bound(q, k, v, is_causal=is_causal)[..., n - queries :, :]
    ours, kept = held_by(lambda: bound(q[..., n - queries :, :], k, v, is_causal=is_causal))
    assert kept < 5 * q.numel() * 4
    probe, tensors = torch.randn_like(ours), (q, k, v, *bound.parameters())
    sides = [torch.autograd.grad((out * probe).sum(), tensors) for out in (ours, all_of_them)]
    for a, b in zip((ours, *sides[0]), (all_of_them, *sides[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_window_over_all_but_one_pair_is_nearly_softmax() -> None:
    """The first query and the last key alone are far from each other, and sink tokens make them near."""
    q, k, v = qkv(40)
    exact = attention(q, k, v, "Softmax")
    torch.testing.assert_close(
        attention(q, k, v, "Hybrid(near=BlockLocal(block_size=1, before=38, after=38))"), exact, rtol=1e-10, atol=1e-10
    )
    far = attention(q, k, v, "Hybrid(near=BlockLocal(block_size=1, before=38, after=38), first=0, last=0)")
    torch.testing.assert_close(far[..., 1:-1, :], exact[..., 1:-1, :], rtol=1e-10, atol=1e-10)
    assert (far - exact)[..., 0, :].abs().max() > 1e-4


@pytest.mark.parametrize("text", ["FavorPlus(num_features=9)", "LinearAttention(eps=0.0)", "LearnedFeatures()"])
def test_queries_beyond_every_window_get_the_far_mechanism(text: str) -> None:
    bound = bind(f"Hybrid(near=BlockLocal(block_size=2), far={text}, first=0, last=0)")
    alone = Bound(text, bound.shape).double()
    alone.load_state_dict(bound.state_dict())
    q, k, v = qkv(90, 20)  # aligned to the bottom right: the first 68 queries stand more than 2 before the first key
    ours, theirs = bound(q, k, v), alone(q, k, v)
    torch.testing.assert_close(ours[..., :68, :], theirs[..., :68, :], rtol=1e-10, atol=1e-10)
    assert (ours - theirs)[..., 68:, :].abs().max() > 1e-3


def test_many_features_come_near_softmax() -> None:
    q, k, v = qkv(200, scale=0.5)
    exact, errors = attention(q, k, v, "Softmax"), []
    for features in (16, 4096):
        text = f"Hybrid(near=BlockLocal(block_size=10), far=FavorPlus(num_features={features}))"
        errors.append((attention(q, k, v, text) - exact).square().mean().item())
    assert errors[1] < errors[0] / 30
    assert errors[1] < 3e-3 * exact.square().mean()


@pytest.mark.parametrize("far", ["FavorPlus(num_features=16)", "LearnedFeatures(num_features=16)"])
def test_logits_of_hundreds_stay_finite(far: str) -> None:
    bound = bind(f"Hybrid(near=BlockLocal(block_size=8), far={far})", dtype=torch.float32)
    for is_causal in (False, True):
        q, k, v = (x.requires_grad_() for x in qkv(300, dtype=torch.float32, scale=15.0))
        assert (q @ k.mT * 8**-0.5).max() > 500
        out = bound(q, k, v, is_causal=is_causal)
        assert out.isfinite().all()
        assert out.abs().max() <= v.abs().max()
        grads = torch.autograd.grad(out.square().sum(), (q, k, v, *bound.parameters()))
        assert all(x.isfinite().all() for x in grads)


def test_a_kernel_that_rounds_below_zero_gives_numbers() -> None:
    """``(1 + s)^2`` from features of order two: about -1e-8 near s = -1."""
    far = LinearAttention(feature_map=Quadratic())
    bound, (q, k, v) = Bound(Hybrid(near=BlockLocal(), far=far), Shape(2, 8)), qkv(1000, dtype=torch.float32)
    assert (Quadratic()(q) @ Quadratic()(k).mT).min() < 0
    for is_causal in (False, True):
        with torch.no_grad():
            assert bound(q, k, v, is_causal=is_causal).isfinite().all()
        assert bound(q.requires_grad_(), k, v, is_causal=is_causal).isfinite().all()


@pytest.mark.parametrize("size", [1e-9, 1e-10, 1e-14])
@pytest.mark.parametrize("switch", [nullcontext, core.switched_off], ids=["core", "reference"])
def test_small_sums_have_finite_gradients(size: float, switch: Any) -> None:
    """The far keys alone are seen, and their sum is far below one."""
    near = "BlockLocal(block_size=1, before=0, after=0)"
    bound = bind(f"Hybrid(near={near}, far=LinearAttention(feature_map=Relu()), first=0, last=0)", 1, 4)
    q, k = (torch.full((1, 1, n, 4), size, requires_grad=True) for n in (100, 1))
    v = torch.ones(1, 1, 1, 4, requires_grad=True)
    bound = bound.float()
    with switch():
        out = bound(q, k, v)[..., :1, :]
    assert (out - 1).abs().max() < 1e-6
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), (q, k, v)))


def test_one_far_key_that_rounds_below_zero_gives_numbers() -> None:
    """Pairs of tokens, each of which is far from the other: the sum of far keys is one product, -1e-8 for some."""
    near, phi = BlockLocal(block_size=1, before=0, after=0), Quadratic()
    bound = Bound(Hybrid(near=near, far=LinearAttention(feature_map=phi), first=0, last=0), Shape(2, 8))
    q, k, v = qkv(2, batch=50_000, dtype=torch.float32)
    below = ((phi(q) * phi(k.flip(-2))).sum(-1) < 0).flatten(1).any(1)
    assert below.any()
    q, k, v = (x[below].requires_grad_() for x in (q, k, v))
    out = bound(q, k, v)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_keys_of_very_different_size_keep_their_weights() -> None:
    """The key before the second query has e^-150 of the features of the one behind it: no scale serves both."""
    far = LinearAttention(feature_map=Exp())
    bound = Bound(Hybrid(near=BlockLocal(block_size=1, before=0, after=0), far=far, first=0, last=0), Shape(1, 1))
    q, v = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1).requires_grad_()
    k = torch.tensor([-100.0, -100.0, 50.0]).view(1, 1, 3, 1).requires_grad_()
    weights = torch.tensor([math.e, 1.0]) / (1 + math.e)
    out = bound(q, k, v, is_causal=True)[0, 0, 1, 0]
    assert abs(out - weights @ torch.tensor([1.0, 2.0])) < 1e-5
    dk, dv = torch.autograd.grad(out, (k, v))
    torch.testing.assert_close(dv[0, 0, :2, 0], weights, rtol=1e-4, atol=1e-4)
    slope = -(weights[0] * weights[1]).item()
    torch.testing.assert_close(dk.flatten(), torch.tensor([slope, -slope, 0.0]), rtol=1e-4, atol=1e-4)


def test_what_the_blocks_cover_is_softmax() -> None:
    q, k, v = qkv(40, dtype=torch.float32)
    mask = some_keys(2, 40)
    for text in ("BlockLocal(block_size=20)", "BlockLocal(block_size=8, before=4, after=4)"):
        for is_causal in (False, True):
            ours = attention(q, k, v, f"Hybrid(near={text})", is_causal=is_causal, key_mask=mask)
            assert torch.equal(ours, attention(q, k, v, "Softmax", is_causal=is_causal, key_mask=mask))
        assert "covers everything" in str(explain(f"Hybrid(near={text})", q, k, v))
    with trace.recorded() as steps:
        attention(q, k, v, "Hybrid(near=BlockLocal(block_size=8, before=4, after=3))")
    assert steps[0].why.startswith("BlockLocal(block_size=8, before=4, after=3) leaves keys out")


@pytest.mark.parametrize("kept", [10, 70, 270])
def test_padding_on_either_side_gives_the_shorter_sequence(kept: int) -> None:
    """In front by whole blocks."""
    bound = bind("Hybrid(near=BlockLocal(block_size=10), far=LearnedFeatures(num_features=4), first=2, last=2)")
    q, k, v = qkv(300)
    for side in (slice(0, kept), slice(300 - kept, 300)):
        mask = torch.zeros(2, 300, dtype=torch.bool)
        mask[:, side] = True
        for is_causal in (False, True):
            ours = bound(q, k, v, is_causal=is_causal, key_mask=mask)[..., side, :]
            short = bound(*(x[..., side, :] for x in (q, k, v)), is_causal=is_causal)
            torch.testing.assert_close(ours, short, rtol=1e-9, atol=1e-9)


def test_the_state_stays_small_and_sees_left_padding() -> None:
    bound = bind("Hybrid(near=BlockLocal(block_size=4), far=LearnedFeatures(num_features=4), first=2)")
    q, k, v = qkv(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :17] = mask[1, 30:33] = False
    whole, state, parts = bound(q, k, v, is_causal=True, key_mask=mask), None, []
    sizes, late, others = set[int](), set[int](), set[Any]()
    for start, stop in [(0, 1), (1, 7), *((i, i + 1) for i in range(7, 40)), (40, 60)]:
        now = slice(start, stop)
        part, state = bound.decode(q[..., now, :], k[..., now, :], v[..., now, :], state, key_mask=mask[:, now])
        parts.append(part)
        for number, held in enumerate(state.content.states if stop >= 7 else ()):  # the second text begins first
            (late if number else sizes).add(held.near.k.shape[-2])
            others.add(tuple(tuple(x.shape) for part in (held.far, held.sinks) for x in part))
    torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-9, atol=1e-9)
    assert sizes == {4, 5, 6, 7}
    assert late == {1, 2, 3, 4, 5, 6, 7}
    assert len(others) == 1


def test_a_decoded_prompt_carries_gradients() -> None:
    bound = bind("Hybrid(near=BlockLocal(block_size=3), far=LearnedFeatures(num_features=4))")
    q, k, v = (x.requires_grad_() for x in qkv(30))
    whole, state, parts = bound(q, k, v, is_causal=True), None, []
    for now in (slice(0, 20), slice(20, 30)):
        part, state = bound.decode(q[..., now, :], k[..., now, :], v[..., now, :], state)
        parts.append(part)
    same("decoded", torch.cat(parts, -2), whole, (q, k, v, *bound.parameters()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Hybrid(far=Favor())", "negative weights"),
        ("Hybrid(far=LinearAttention(feature_map=Identity()))", "negative weights"),
        ("Hybrid(far=FavorPlus(kernel=Identity()))", "negative weights"),
        ("Hybrid(far=Softmax())", "far must be linear"),
        ("Hybrid(near=Softmax())", r"near must be BlockLocal\(\) or Selected\(\)"),
        ("Hybrid(near=Local(window=(5, 9)))", r"What would work: near=BlockLocal\(block_size=9\)"),
        ("Hybrid(first=-1)", "first must be at least 0"),
        ("Hybrid(last=1.5)", "last must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        catalogue.parse(text)


def test_traits_follow_the_far_part() -> None:
    drawn, learned, plain = (
        catalogue.parse(f"Hybrid(far={far})").traits
        for far in ("FavorPlus()", "LearnedFeatures()", "LinearAttention()")
    )
    assert (drawn.random, drawn.learned, drawn.approximates, drawn.rotary) == (True, False, "Softmax", True)
    assert (learned.random, learned.learned, learned.approximates, learned.rotary) == (False, True, None, False)
    assert (plain.random, plain.learned, plain.approximates) == (False, False, None)
    assert not catalogue.parse("Hybrid(far=LinearAttention())").needs_weights


def test_nested_values_print_and_parse() -> None:
    text = "Hybrid(near=BlockLocal(block_size=32), far=FavorPlus(num_features=64), first=4)"
    assert repr(catalogue.parse(text)) == text
    assert dict(Bound("Hybrid(far=LearnedFeatures())", Shape(2, 8)).named_parameters()).keys() == {"query", "key"}


def test_it_tells_its_path() -> None:
    with trace.recorded() as steps:
        attention(*qkv(300), "Hybrid(near=BlockLocal(block_size=20))")
    assert steps[0].why.startswith("BlockLocal(block_size=20) leaves keys out; ")
