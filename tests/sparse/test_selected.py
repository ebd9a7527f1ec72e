"""Chosen blocks at lengths of many tiles: core and reference are one function, and so are decoding and one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Hybrid, LinearAttention, Selected
from fast_attention.engine import trace
from fast_attention.functional import implementation
from fast_attention.mechanisms.sparse import selected
from tests.cases import qkv
from tests.engine.test_tiles import BACKWARD, FORWARD, needs_core


def chosen(
    queries: int, keys: int, number: int, size: int, *, heads: int = 2, masked: bool = False, dtype: Any = torch.float32
) -> tuple[list[Any], dict[str, Any]]:
    """Tokens with values of another width, choices as ``Selected`` makes them, a mask, sinks; and settings."""
    torch.manual_seed(0)
    sizes = (heads, queries, 24), (heads, keys, 24), (heads, keys, 35)
    q, k, v = (torch.randn(2, *shape).to(dtype) for shape in sizes)
    mask = torch.rand(2, 1, keys) > (0.5 if masked else -1.0)
    mask[0, :, keys * 3 // 4 :] &= not masked  # whole blocks, and queries that see nothing
    visible = selected.shown(k, mask, size)
    means = selected.pooled(k, visible)
    choices = selected.of_tokens(q, means, visible.any(-1), size=size, start=keys - queries, number=number)
    settings = {"size": size, "start": keys - queries, "scale": 0.3}
    return [q, k, v, choices, mask, torch.randn(heads)], settings


def passes(given: list[Any], settings: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradients of tokens and sinks."""
    leaves: list[Any] = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    q, k, v, choices, mask, *sinks = leaves
    out = selected.chosen_softmax(q, k, v, mask, None, None, *(sinks or [None]), choices, **settings)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], gradient)]


SIZES = [  # queries, keys, choices, tokens of a block
    (150, 150, 3, 16), (37, 150, 3, 16), (1, 150, 5, 16), (150, 150, 0, 16), (2, 3, 1, 1), (1300, 1300, 4, 100),
    (4200, 4500, 2, 37),
]  # fmt: skip


@needs_core
@pytest.mark.parametrize(("queries", "keys", "number", "size"), SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_core_has_the_references_numbers(queries: int, keys: int, number: int, size: int, masked: bool) -> None:
    """With blocks that both ends cut off, that begin in one chunk of keys and end in the next, and several segments."""
    given, settings = chosen(queries, keys, number, size, masked=masked)
    double = [x.double() if x.is_floating_point() else x for x in given]
    for some in (slice(5), slice(6)):
        with trace.recorded() as steps:
            ours = passes(given[some], settings)
        assert [step.path for step in steps] == [f"{trace.CORE}: softmax in tiles of gathered queries"]
        for place, (a, b) in enumerate(zip(ours, passes(double[some], settings), strict=True)):
            error = float((a.double() - b).abs().max() / b.abs().max())
            assert error <= (BACKWARD if place else FORWARD), f"{place}: {error}"


@needs_core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    given, settings = chosen(333, 400, 3, 16, masked=True, dtype=dtype)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    for a, b in zip(passes(given[:5], settings), passes(wide[:5], settings), strict=True):
        assert a.dtype == dtype
        assert float((a.double() - b).abs().max() / b.abs().max()) <= 4 * torch.finfo(dtype).eps


@needs_core
def test_equal_bits_for_any_number_of_threads() -> None:
    """Also where heads of a group add to the same keys, for which each chooses its own blocks."""
    given, settings = chosen(4500, 4500, 3, 16, heads=4, masked=True)
    grouped, before = [given[0], given[1][:, ::2], given[2][:, ::2], *given[3:]], torch.get_num_threads()
    of_threads = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            of_threads.append([*passes(given, settings), *passes(grouped, settings)])
    finally:
        torch.set_num_threads(before)
    for others in of_threads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_threads[0], others, strict=True))
    repeated = [given[0], *(x.repeat_interleave(2, 1) for x in grouped[1:3]), *given[3:]]
    for a, b in zip(passes(grouped, settings), passes(repeated, settings), strict=True):
        torch.testing.assert_close(a, b if a.shape == b.shape else b.unflatten(1, (-1, 2)).sum(2), rtol=1e-5, atol=1e-5)


@needs_core
def test_the_core_reads_no_block_that_is_not_past() -> None:
    """Whatever the choices name: blocks of the future, and none at all, are not among the keys."""
    (q, k, v, choices, mask, _), settings = chosen(150, 150, 3, 16)
    tokens = q, k, v, mask, None, None, None
    out = selected.chosen_softmax(*tokens, choices, **settings)
    own = torch.arange(150)[:, None] // 16
    more = torch.cat([choices, own.expand(2, 2, -1, 1), torch.full_like(choices, 99)], -1)
    assert torch.equal(selected.chosen_softmax(*tokens, more, **settings), out)
    with pytest.raises(RuntimeError, match="choices do not fit"):
        selected.chosen_softmax(*tokens, choices[..., :-1, :], **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_of_many_blocks_is_one_pass(dtype: torch.dtype) -> None:
    """Step by step in float32 and in bfloat16, where means rounded to it would choose other blocks."""
    mechanism, length = Selected(block_size=8, topk=3), 203
    q, k, v = qkv(length, dtype=dtype)
    one_pass, state, outs = mechanism(q, k, v, is_causal=True), None, []
    for part in (slice(0, 90), *(slice(i, i + 1) for i in range(90, 110)), slice(110, length)):
        out, state = mechanism.decode(*(x[..., part, :] for x in (q, k, v)), state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, -2), one_pass, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert state is not None
    assert state.content.means.shape[-2] == length // 8


def test_a_padded_sequence_chooses_as_the_shorter_one() -> None:
    mechanism, length, padded = Selected(block_size=8, topk=3), 100, 131
    q, k, v = qkv(padded)
    mask = (torch.arange(padded) < length).expand(2, padded)
    for is_causal in (False, True):
        out = mechanism(q, k, v, is_causal=is_causal, key_mask=mask)[..., :length, :]
        torch.testing.assert_close(out, mechanism(*(x[..., :length, :] for x in (q, k, v)), is_causal=is_causal))


def test_the_chosen_blocks_are_those_that_weigh_most() -> None:
    """Where each block of keys points one way and a query that way, it finds that block wherever it is."""
    size, blocks = 8, 16
    direction = 10 * torch.eye(blocks, dtype=torch.float64)
    k = direction.repeat_interleave(size, 0).expand(1, 1, -1, -1)
    q = direction[torch.randperm(blocks)].repeat_interleave(size, 0).expand(1, 1, -1, -1)
    v = torch.randn(1, 1, size * blocks, 4, dtype=torch.float64)
    for is_causal in (False, True):
        exact = Selected(block_size=size, topk=blocks)(q, k, v, is_causal=is_causal)
        found = Selected(block_size=size, topk=2)(q, k, v, is_causal=is_causal)
        past = (q @ k.mT).argmax(-1) < torch.arange(size * blocks)  # where causal, only what is past can be found
        error = (exact - found).abs().amax(-1)[past if is_causal else ...]
        assert error.max() < 1e-9


def test_far_sums_keep_their_digits_where_chosen_blocks_dominate() -> None:
    """Added up, not subtracted: float32 differs from float64 by rounding where the far part is a millionth."""
    torch.manual_seed(0)
    mechanism = Hybrid(near=Selected(block_size=8, topk=2), far=LinearAttention(), first=0, last=0)
    q, k, v = qkv(160)
    k[..., :8, :] *= 6
    exact = mechanism(q, k, v)
    torch.testing.assert_close(mechanism(q.float(), k.float(), v.float()).double(), exact, rtol=2e-5, atol=2e-5)
    with implementation("reference"):
        torch.testing.assert_close(mechanism(q, k, v), exact)
