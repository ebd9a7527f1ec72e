"""Attention by features in the compiled core: outputs, states and gradients of the plain form in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import LinearAttention, core
from fast_attention.engine import trace
from fast_attention.engine.operation import NotServed, Operation, always
from fast_attention.feature_maps.features import EluPlusOne, FeatureMap, Identity, Relu
from fast_attention.feature_maps.random_features import draw
from fast_attention.functional import favor_plus_attention, linear_attention
from fast_attention.mechanisms.linear import compiled, sums
from fast_attention.mechanisms.linear.core_map import EXPONENTIAL, TRIGONOMETRIC, CoreMap

pytestmark = pytest.mark.skipif(bool(core.unavailable()), reason="no compiled core")

# queries, keys, their width, that of values: at the borders of steps and sections, in odd widths
SIZES = [(1, 1, 8, 5), (31, 31, 3, 70), (33, 33, 64, 64), (257, 257, 40, 33), (600, 600, 20, 7), (300, 700, 16, 48)]
MAPS = [EluPlusOne(), Relu(offset=1e-3), Identity()]
WIDTHS = [4, 8, 16]  # of vectors, those that are there


def in_core(operation: Operation) -> Operation:
    """The core's passes of an operation, also where others are faster."""
    assert operation.cpu is not None
    return Operation(operation.reference, cpu=replace(operation.cpu, serves=always))


POSITIVE, SINCOS = ({"number": number, "offset": 0.0, "eps": 0.0} for number in (EXPONENTIAL, TRIGONOMETRIC))
ATTEND, ADVANCE = in_core(sums.attend), in_core(sums.advance)


def code(phi: FeatureMap) -> dict[str, Any]:
    made = CoreMap.of(phi)
    assert made is not None
    return made.settings


def leaves(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]


def agree(run: Operation, arguments: list[Any], rtol: float = 4e-5, fixed: int = 9, **settings: Any) -> list[Tensor]:
    """Outputs, states and the gradients of all of them, relative to the largest number; twice the same bits.

    ``fixed`` is the place of a state's scales, which have no gradient.
    """
    results: list[list[Tensor]] = []
    for wide in (False, False, True):
        given = leaves(*(x.double() if wide and x is not None and x.is_floating_point() else x for x in arguments))
        outputs = (run.reference if wide else run)(*given, **settings)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        probes = [torch.randn(x.shape, dtype=torch.float64) for x in outputs]
        pairs = [(x, p.to(x.dtype)) for x, p in zip(outputs, probes, strict=True) if x.requires_grad]
        wanted = [x for i, x in enumerate(given) if i != fixed and x is not None and x.requires_grad]
        ends, probes = zip(*pairs, strict=True)
        results.append([*outputs, *torch.autograd.grad(ends, wanted, probes, materialize_grads=True)])
    for ours, again, plain in zip(*results, strict=True):
        assert torch.equal(ours, again)
        scale = float(plain.detach().abs().max()) + 1.0
        torch.testing.assert_close(ours.double(), plain, rtol=0, atol=rtol * scale)
    return results[0]


def tokens(sizes: tuple[int, int, int, int], scale: float = 1.0, batch: int = 2) -> list[Tensor]:
    length, keys, width, values = sizes
    q, k, v = (torch.randn(batch, 3, *each) for each in ((length, width), (keys, width), (keys, values)))
    return [q * scale, k * scale, v]


def some_keys(keys: int, batch: int = 2) -> Tensor:
    mask = torch.rand(batch, 1, keys) < 0.7
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("phi", MAPS, ids=repr)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_are_the_plain_form(sizes: tuple[int, int, int, int], phi: FeatureMap, width: int) -> None:
    widest = torch.ops.fast_attention_core.use_width(16)
    try:
        if torch.ops.fast_attention_core.use_width(min(width, widest)) != width:
            pytest.skip("no such vectors")
        q, k, v = (x.abs() if phi == Identity() else x for x in tokens(sizes))
        for mask in (None, some_keys(sizes[1])):
            for is_causal in (False, True):
                settings: Any = {**code(phi), "eps": 1e-6, "is_causal": is_causal}
                agree(ATTEND, [q, k, v, mask], **settings)
            if sizes[0] == sizes[1]:
                state = torch.rand(2, 3, sizes[2], sizes[3]), 3 * torch.rand(2, 3, sizes[2]) + 1
                settings["is_causal"] = True
                before = [*state, torch.zeros(2, 3, 1)]
                agree(ADVANCE, [q, k, v, mask, None, None, None, *before], **settings)
    finally:
        core_width()


def core_width() -> None:
    """What the loader chooses."""
    torch.ops.fast_attention_core.use_width(core.native_width())


@pytest.mark.parametrize("scale", [0.5, 6.0])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_exponentials_are_the_plain_form(sizes: tuple[int, int, int, int], trained: bool, scale: float) -> None:
    """With rows of keys and biases of their own, keys far above those before them, and states in other units."""
    q, k, v = tokens(sizes, scale * (8 / sizes[2]) ** 0.25)
    k[..., ::37, :] *= 2
    W = draw(3, 70, sizes[2])
    rows = [W, draw(3, 70, sizes[2]), 2 * torch.randn(3, 1, 70)] if trained else [W, W, None]
    for mask in (None, some_keys(sizes[1])):
        for is_causal in (False, True):
            settings: Any = {**POSITIVE, "is_causal": is_causal, "rtol": 4e-5 * max(1.0, scale)}
            agree(ATTEND, [q, k, v, mask, *rows], **settings)
        if sizes[0] == sizes[1]:
            state = torch.rand(2, 3, 70, sizes[3]), torch.rand(2, 3, 70) + 1, 3 * torch.randn(2, 3, 70)
            settings["is_causal"] = True
            agree(ADVANCE, [q, k, v, mask, *rows, *state], **settings)


@pytest.mark.parametrize("sizes", [x for x in SIZES if x[1] > 256], ids=str)
def test_eight_heads_are_read_from_first_to_last(sizes: tuple[int, int, int, int]) -> None:
    """Fewer are cut into sections, which all threads share."""
    q, k, v = tokens(sizes, (8 / sizes[2]) ** 0.25, batch=4)
    k[..., ::37, :] *= 2
    W = draw(3, 70, sizes[2])
    for mask in (None, some_keys(sizes[1], batch=4)):
        for is_causal in (False, True):
            agree(ATTEND, [q, k, v, mask], **code(EluPlusOne()), eps=1e-6, is_causal=is_causal)
            agree(ATTEND, [q, k, v, mask, W, W, None], **POSITIVE, is_causal=is_causal)
        if sizes[0] == sizes[1]:
            state = torch.rand(4, 3, 70, sizes[3]), torch.rand(4, 3, 70) + 1, 3 * torch.randn(4, 3, 70)
            agree(ADVANCE, [q, k, v, mask, W, W, None, *state], **POSITIVE, is_causal=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("sizes", "batch"), [(x, 2) for x in SIZES] + [((600, 600, 20, 7), 4)], ids=str)
def test_signed_features_are_the_plain_form(sizes: tuple[int, int, int, int], batch: int, width: int) -> None:
    """Cosines and sines of either sign over a scale for each token; short tokens, or a denominator may be near 0."""
    widest = torch.ops.fast_attention_core.use_width(16)
    try:
        if torch.ops.fast_attention_core.use_width(min(width, widest)) != width:
            pytest.skip("no such vectors")
        q, k, v = tokens(sizes, 0.3 * (8 / sizes[2]) ** 0.25, batch=batch)
        k[..., ::37, :] *= 2
        W = draw(3, 35, sizes[2])
        for mask in (None, some_keys(sizes[1], batch=batch)):
            for is_causal in (False, True):
                agree(ATTEND, [q, k, v, mask, W, W, None], **SINCOS, is_causal=is_causal)
            if sizes[0] == sizes[1]:
                state = torch.rand(batch, 3, 70, sizes[3]), torch.rand(batch, 3, 70), torch.randn(batch, 3, 1)
                state[1][..., :35] += 9  # cosines
                agree(ADVANCE, [q, k, v, mask, W, W, None, *state], **SINCOS, is_causal=True)
    finally:
        core_width()


def test_a_scale_that_rises_by_hundreds_within_a_section() -> None:
    """Steps end early; no key moves a query before it, and the largest leaves only itself."""
    W, v = draw(3, 64, 8), torch.randn(2, 3, 250, 5)
    k = torch.linspace(1, 400, 250)[:, None] * torch.nn.functional.normalize(torch.randn(2, 3, 250, 8), dim=-1)
    out = ATTEND(k, k, v, None, W, W, None, **SINCOS, is_causal=True)
    torch.testing.assert_close(out[..., 150:, :], v[..., 150:, :], rtol=1e-3, atol=1e-3)
    again = ATTEND(*(x[..., :99, :] for x in (k, k, v)), None, W, W, None, **SINCOS, is_causal=True)
    torch.testing.assert_close(out[..., :99, :], again, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("strength", [0.02, 1.0, 40.0])
@pytest.mark.parametrize(
    ("sizes", "batch"), [(x, 2) for x in SIZES if x[0] == x[1]] + [((600, 600, 20, 7), 4)], ids=str
)
def test_sums_that_decay_are_the_plain_form(
    sizes: tuple[int, int, int, int], batch: int, strength: float, by_channel: bool
) -> None:
    """Slow and fast decays, of tokens and of channels, masked and behind a state: gradients of decays too."""
    for phi, normalize in zip(MAPS, (True, True, False), strict=True):
        q, k, v = (x.abs() if phi == Identity() else x for x in tokens(sizes, batch=batch))
        logs = -strength * torch.rand(batch, 3, sizes[0], sizes[2] if by_channel else 1)
        state = torch.rand(batch, 3, sizes[2], sizes[3]), 3 * torch.rand(batch, 3, sizes[2]) + 1
        settings: Any = {**code(phi), "normalize": normalize, "eps": 0.1, "is_causal": True}
        agree(ATTEND, [q, k, v, None, *[None] * 6, logs], **settings)
        mask, before = some_keys(sizes[1], batch=batch), [*state, torch.zeros(batch, 3, 1)]
        agree(ADVANCE, [q, k, v, mask, None, None, None, *before, logs], **settings)


def test_a_sequence_that_begins_in_another_reads_nothing_before_it() -> None:
    """Decays that leave nothing, even of infinite logarithm; those behind them are as fine as ever."""
    q, k, v = tokens((600, 600, 20, 7))
    logs = -0.01 * torch.rand(2, 3, 600, 1)
    for nothing in (-1e4, float("-inf")):
        cut = logs.clone()
        cut[..., [300, 301, 310], :] = nothing
        settings: Any = {**code(EluPlusOne()), "eps": 1e-6, "is_causal": True}
        out = ATTEND(q, k, v, *[None] * 7, cut, **settings)
        late = ATTEND(*(x[..., 310:, :] for x in (q, k, v)), *[None] * 7, cut[..., 310:, :], **settings)
        torch.testing.assert_close(out[..., 310:, :], late, rtol=1e-5, atol=1e-5)


def test_features_that_grow_to_the_end() -> None:
    """Scales that rise by hundreds within a section, so that steps end early; behind it nothing is summed."""
    W, v = draw(3, 40, 8), torch.randn(2, 3, 250, 5)
    direction = torch.nn.functional.normalize(W[:, :1], dim=-1)
    k = torch.linspace(80, 0, 250)[:, None] * direction + torch.zeros(2, 1, 1, 1)
    q = direction + 0.1 * torch.randn(2, 3, 250, 8)
    agree(ATTEND, [q, k, v, None, W, W, None], **POSITIVE, is_causal=True, rtol=3e-4)


def calls() -> list[Any]:
    W = draw(3, 40, 24)
    return [
        lambda q, k, v, **x: linear_attention(q, k, v, **x),
        lambda q, k, v, **x: favor_plus_attention(q, k, v, W.to(torch.float32), **x),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [0, 1])
def test_halves_are_sums_in_float32(which: int, dtype: torch.dtype) -> None:
    """Outputs and gradients are those of the widened tokens, rounded once."""
    call = calls()[which]
    halves = leaves(*(x.to(dtype) for x in tokens((300, 300, 24, 24), 0.5)))
    wide = leaves(*(x.float() for x in halves))
    for is_causal in (False, True):
        probe = torch.randn(2, 3, 300, 24, dtype=dtype)
        with trace.recorded() as steps:
            ours = call(*halves, is_causal=is_causal)
        assert steps[0].path.startswith("compiled core")
        theirs = call(*wide, is_causal=is_causal)
        assert torch.equal(ours, theirs.to(dtype))
        gradients = torch.autograd.grad(ours, halves, probe), torch.autograd.grad(theirs, wide, probe.float())
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("which", [0, 1])
def test_neither_threads_nor_memory_change_a_bit(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two and three threads, tokens in any layout, and memory that holds NaN before it is written."""
    call, dense = calls()[which], leaves(*tokens((530, 530, 24, 20)))
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in dense]
    mask, probe, before = some_keys(530)[:, 0], torch.randn(2, 3, 530, 20), torch.get_num_threads()
    make = torch.Tensor.new_empty
    for is_causal in (False, True):
        results = []
        for threads, inputs, poisoned in ((1, dense, False), (2, dense, False), (3, dense, True), (1, strided, False)):
            with monkeypatch.context() as patched:
                if poisoned:
                    patched.setattr(torch.Tensor, "new_empty", lambda *x, **y: make(*x, **y).fill_(float("nan")))
                torch.set_num_threads(threads)
                try:
                    out = call(*inputs, is_causal=is_causal, key_mask=mask)
                    results.append((out, *torch.autograd.grad(out, inputs, probe)))
                finally:
                    torch.set_num_threads(before)
        for same in zip(*results, strict=True):
            assert all(torch.equal(same[0], x) for x in same[1:])


@pytest.mark.parametrize("which", [0, 1])
def test_no_number_is_lost_and_none_leaks(which: int) -> None:
    """NaN in a key reaches all queries that see it; masked it reaches none, nor does what a later step holds."""
    call, (q, k, v) = calls()[which], tokens((100, 100, 24, 24))
    for broken in (1, 2):
        given = [q, k.clone(), v.clone()]
        given[broken][:, :, 70, 3] = float("nan")
        out = call(*given, is_causal=True)
        assert out[:, :, 70:].isnan().any(-1).all()
        mask = torch.ones(2, 100, dtype=torch.bool)
        mask[:, 70] = False
        assert call(*given, is_causal=True, key_mask=mask).isfinite().all()


def test_sums_out_of_range_go_by_plain_sums() -> None:
    q, k, v = tokens((300, 300, 24, 24), 1e30)
    for is_causal in (False, True):
        with trace.recorded() as steps:
            out = LinearAttention()(q, k, v, is_causal=is_causal)
        assert out.isfinite().all()
        assert steps[-1].path == "plain sums"
    with pytest.raises(NotServed):
        compiled.forward(q, k, v, None, keep=False, **code(Relu()), eps=0.0, is_causal=False)


def test_very_many_terms() -> None:
    """Sums of 2^18 equal terms lose nothing, forward or backward."""
    n = 2**18
    k, W = torch.full((1, 1, n, 2), 0.3), torch.full((1, 4, 2), 0.7)
    v = torch.linspace(0, 1, n)[:, None].expand(1, 1, n, 1).clone().requires_grad_()
    for is_causal in (False, True):
        for out in (
            favor_plus_attention(k, k, v, W, is_causal=is_causal),
            linear_attention(k, k, v, is_causal=is_causal),
        ):
            assert abs(out[0, 0, -1, 0].item() - 0.5) < 2e-6
            (gradient,) = torch.autograd.grad(out.sum(), v)
            expected = torch.arange(1, n + 1).double().reciprocal().flip(0).cumsum(0).flip(0)
            expected = expected if is_causal else torch.ones(n).double()
            torch.testing.assert_close(gradient[0, 0, :, 0].double(), expected, rtol=2e-5, atol=0)
