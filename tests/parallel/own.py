"""Mechanisms as a user writes them, one for each strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fast_attention import Attention, Shape, Traits
from fast_attention.mechanism import MaskedAttention
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.local import local_attention

PAPER = "a test"


class Mean(NamedTuple):
    """Sums of values and their number."""

    total: Tensor  # (..., H, 1, Ev)
    number: Tensor  # (..., H, 1, 1)


@dataclass(frozen=True, repr=False)
class OwnMean(Attention[tuple[()], Mean]):
    """The mean of the values, times the mean of the query: a state of constant size."""

    traits = Traits(
        paper=PAPER,
        formula="mean(q_i) mean_j v_j",
        cost="n d",
        complexity_exponent=1.0,
        causal=True,
        padding=True,
        memory="constant",
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        if is_causal:
            return self.advance(q, k, v, w, None, key_mask=key_mask)[0]
        return self._of(q, self.summarise_keys(k, v, w, key_mask=key_mask))

    def advance(self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: Mean | None, *, key_mask: Tensor | None) -> Any:
        seen = torch.ones_like(v[..., :1]) if key_mask is None else key_mask[..., None].to(v).expand_as(v[..., :1])
        sums = Mean((v * seen).cumsum(-2), seen.cumsum(-2))
        if state is not None:
            sums = self.merge_states(state, sums)
        return self._of(q, sums), Mean(*(x[..., -1:, :] for x in sums))

    def summarise_keys(self, k: Tensor, v: Tensor, w: Any, *, key_mask: Tensor | None) -> Mean:
        return self.advance(k, k, v, w, None, key_mask=key_mask)[1]

    def merge_states(self, earlier: Mean, later: Mean) -> Mean:
        return Mean(earlier.total + later.total, earlier.number + later.number)

    def _of(self, q: Tensor, sums: Mean) -> Tensor:
        return q.mean(-1, keepdim=True) * sums.total / sums.number.clamp(min=1.0)


@dataclass(frozen=True, repr=False)
class OwnWindow(MaskedAttention[tuple[()], Any]):
    """Softmax over the keys at most two positions away: a bounded distance."""

    traits = Traits(
        paper=PAPER,
        formula="softmax over |i - j| <= 2",
        cost="n d",
        complexity_exponent=1.0,
        causal=True,
        padding=True,
        cross=True,
    )

    def key_range(self, first: int, end: int) -> tuple[int, int]:
        return first - 2, end + 2

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, w: Any, **options: Any) -> Tensor:
        return local_attention(q, k, v, window=2, **options)


class Slopes(NamedTuple):
    """A slope for each head."""

    slopes: Tensor


@dataclass(frozen=True, repr=False)
class OwnSlopes(Attention[Slopes, Any]):
    """Softmax whose heads have learned temperatures of their own: independent heads."""

    traits = Traits(
        paper=PAPER,
        formula="softmax(s_h q k^T) v",
        cost="n^2 d",
        complexity_exponent=2.0,
        causal=True,
        padding=True,
        learned=True,
    )

    def weights(self, shape: Shape) -> Slopes:
        return Slopes(nn.Parameter(torch.ones(shape.heads)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Slopes, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        return softmax_attention(q * w.slopes[:, None, None], k, v, is_causal=is_causal, key_mask=key_mask)
