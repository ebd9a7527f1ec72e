"""Texts padded in front or with holes, the last queries of a call, streams in any split: each as the text alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fast_attention import Attention
from tests.cases import CASES, bind
from tests.fuzz.kit import fuzz

PADDED = [m for m in CASES if m.traits.padding and m.traits.positions != "grid" and not m.traits.sees_padding]
FEW = [m for m in CASES if isinstance(m, Attention) and m.traits.causal and m.traits.cross]
STREAMS = [m for m in CASES if isinstance(m, Attention) and m.traits.memory and m.traits.causal]


@st.composite
def texts(draw: Any, mechanisms: list[Any]) -> tuple[Any, list[Tensor], Tensor, list[int]]:
    """A mechanism, its inputs, a mask with padding in front, holes or nothing visible, and where texts begin."""
    mechanism, length = draw(st.sampled_from(mechanisms)), draw(st.integers(1, 40))
    begins = draw(st.lists(st.integers(0, length), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = (len(begins), 2, length, 8) if isinstance(mechanism, Attention) else (len(begins), length, 16)
    x = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3 if len(size) == 4 else 1)]
    visible = torch.arange(length) >= torch.tensor(begins)[:, None]
    if draw(st.booleans()):
        holes = torch.rand(len(begins), length, generator=generator) < 0.3
        holes[torch.arange(len(begins)), torch.tensor(begins).clamp(max=length - 1)] = False
        visible &= ~holes
    return mechanism, x, visible, begins


def alone(bound: Any, x: list[Tensor], mask: Tensor, row: int, begin: int, is_causal: bool) -> Tensor:
    parts = [t[row : row + 1, ..., begin:, :] for t in x]
    return bound(*parts, is_causal=is_causal, key_mask=mask[row : row + 1, begin:])


def near(got: Tensor, wanted: Tensor, said: str) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-8, msg=lambda text: f"{said}: {text}")


@fuzz("left padding", examples=120, drawn=texts(PADDED), causal=st.booleans())
def test_padding_in_front_is_not_there(drawn: Any, causal: bool) -> None:
    mechanism, x, mask, begins = drawn
    causal = causal if causal in mechanism.traits.modes else not causal
    bound = bind(mechanism, max_len=48)
    out = bound(*x, is_causal=causal, key_mask=mask)
    assert out.isfinite().all()
    for i, begin in enumerate(begins):
        if begin < mask.shape[-1]:
            near(out[i : i + 1, ..., begin:, :], alone(bound, x, mask, i, begin, causal), repr(mechanism))
        elif isinstance(mechanism, Attention):
            assert not out[i].any()


@fuzz("few queries", examples=120, drawn=texts(FEW), share=st.floats(0, 1))
def test_the_last_queries_are_the_last_rows(drawn: Any, share: float) -> None:
    mechanism, (q, k, v), mask, _ = drawn
    bound, queries = bind(mechanism, max_len=48), 1 + int(share * (mask.shape[-1] - 1))
    out = bound(q[..., -queries:, :], k, v, is_causal=True, key_mask=mask)
    near(out, bound(q, k, v, is_causal=True, key_mask=mask)[..., -queries:, :], repr(mechanism))


@fuzz(
    "streams of texts that begin late", examples=80, drawn=texts(STREAMS), cuts=st.sets(st.integers(1, 39), max_size=6)
)
def test_streams_begin_where_their_texts_do(drawn: Any, cuts: set[int]) -> None:
    mechanism, x, mask, _ = drawn
    bound, length, state, outs = bind(mechanism, max_len=48), mask.shape[-1], None, []
    for start, end in pairwise([0, *sorted(cut for cut in cuts if cut < length), length]):
        out, state = bound.decode(*(t[..., start:end, :] for t in x), state, key_mask=mask[:, start:end])
        outs.append(out)
    near(torch.cat(outs, -2), bound(*x, is_causal=True, key_mask=mask), repr(mechanism))
