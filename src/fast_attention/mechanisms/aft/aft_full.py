"""AFT-full (Zhai et al. 2021): keys weighed by a learned bias for every pair of positions, channel by channel.

AFT-full in tiles: ``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)``, with its gradient.

The values of all sequences lie side by side, so that a chunk of queries is one wide product of exp(w) with exp(k) v and
exp(k). Causal chunks multiply with the keys up to their end only. There all queries share one log scale per channel,
for keys that never rise far above the first (``one_scale_is_enough``); others take ``reference_biased.full_causal``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast, reference, reference_biased
from fast_attention.mechanisms.aft.reference import same_width
from fast_attention.traits import SCORES
from fast_attention.value import at_least

ROWS = 256  # queries per product
RANGE = 40.0  # keys may rise by this, and biases differ by this: sums stay above exp(-80), float32 ends at exp(-87)


def one_scale_is_enough(k: Tensor, bias: Tensor, *, any_masked: bool) -> bool:
    """Whether one log scale per channel serves every causal query, and the biases need none beside it."""
    if k.shape[-2] == 0:
        return True
    rise = (k.amax(-2) - (fast.smallest(k) if any_masked else k[..., 0, :])).amax()
    low, high = bias.detach().aminmax()
    return bool((rise <= RANGE) & (high - low <= RANGE))


def products(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int
) -> Tensor:
    """AFT-full of as many queries as keys where causal; masked keys at ``scan.FLOOR``, masked values zero.

    ``longest`` as in ``reference_biased.full_causal``.
    """
    values_and_ones = reference.with_ones(k, v)
    if is_causal:
        sums = reference_biased.full_causal(bias, k, values_and_ones, longest=longest)
    else:
        sums = reference_biased.full(bias, k, values_and_ones)
    return q.sigmoid() * reference.mean(sums, v.shape[-1])


def _terms(k: Tensor, v: Tensor) -> Tensor:
    """Weighted values and weights of the keys, (S, ..., 2 D)."""
    terms = k.new_empty(k.shape[-2], *k.shape[:-2], 2 * v.shape[-1])
    fast.weigh(k, v, fast.log_scale(k), terms.movedim(0, -2))
    return terms


def _weights(bias: Tensor, at: slice, is_causal: bool, workspace: Tensor) -> Tensor:
    rows = bias[at, : at.stop] if is_causal else bias[at]
    weights = workspace[: rows.numel()].view(rows.shape)
    exp_(torch.sub(rows, rows.amax(-1, keepdim=True), out=weights))
    if is_causal:
        weights[:, at.start :].tril_()
    return weights


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, keep: bool, is_causal: bool, any_masked: bool, longest: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    terms, out = _terms(k, v), torch.empty_like(q)
    flat = terms.flatten(1)
    saved = torch.empty_like(q) if keep else None
    sums = k.new_empty(min(ROWS, q.shape[-2]), *terms.shape[1:])
    workspace = k.new_empty(len(sums) * k.shape[-2])
    for at in chunks_of(ROWS, q.shape[-2]):
        weights, rows = _weights(bias, at, is_causal, workspace), sums[: at.stop - at.start]
        torch.mm(weights, flat[: weights.shape[1]], out=rows.flatten(1))
        denominators = fast.gate(q[..., at, :], rows.movedim(0, -2), out[..., at, :], any_masked=any_masked)
        if saved is not None:
            saved[..., at, :] = denominators
    return out, () if saved is None else (saved,)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, is_causal: bool, any_masked: bool, longest: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, bias), (out,), (denominators,), (g,) = inputs, outputs, saved, gradients
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_bias = torch.zeros_like(bias) if bias.requires_grad else None
    terms = _terms(k, v)
    flat, d_terms = terms.flatten(1), torch.zeros_like(terms)
    sums = k.new_empty(min(ROWS, q.shape[-2]), *terms.shape[1:])
    workspace = k.new_empty(len(sums) * k.shape[-2])
    for at in chunks_of(ROWS, q.shape[-2]):
        weights, d_sums = _weights(bias, at, is_causal, workspace), sums[: at.stop - at.start]
        keys = weights.shape[1]
        tokens = (x[..., at, :] for x in (q, g, out, denominators, dq))
        fast.gate_vjp(*tokens, d_sums=d_sums.movedim(0, -2))
        d_terms.flatten(1)[:keys].addmm_(weights.mT, d_sums.flatten(1))
        if d_bias is not None:
            torch.mm(d_sums.flatten(1), flat[:keys].mT, out=d_bias[at, :keys]).mul_(weights)
    fast.weigh_vjp(v, terms.movedim(0, -2)[..., v.shape[-1] :], d_terms.movedim(0, -2), dk, dv)
    return dq, dk, dv, d_bias


def _serves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int) -> str:
    fits = not is_causal or one_scale_is_enough(k, bias, any_masked=any_masked)
    return "" if fits else "causal, and keys or biases lie too far apart for one log scale"


def _path(*tensors: Tensor, is_causal: bool, **settings: Any) -> str:
    return "triangles of products by halving" if is_causal else "products of all pairs"


_FAST = Fast(
    _forward, _backward, serves=_serves, path="products of chunks of queries with all that they see",
    why="every pair has a bias", sizes=lambda *tensors, **settings: {"rows": ROWS},
)  # fmt: skip
full = Operation(products, cpu=_FAST, cuda=_FAST, empty=like_queries, path=_path)


@in_float32
def aft_full(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys width"],
    bias: Float[Tensor, "rows columns"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length width"]:
    """``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)`` per channel (arXiv 2105.14103, Eq. 2-3).

    ``bias`` w is shared by all heads and channels and holds at least (length, keys) numbers, (keys, keys) for causal
    calls. There the queries are the last of the sequence: query i has row ``i + keys - length``. Two products of
    matrices, time O(length keys width), memory O(length keys). A query that sees nothing gets zeros.
    """
    length, keys = q.shape[-2], k.shape[-2]
    longest, bias = bias.shape[0], narrow(narrow(bias, keys if is_causal else length, axis=0), keys, axis=1)
    k, v = reference.masked_scores(k, key_mask), masks.drop(v, key_mask)
    if is_causal:
        q = reference.last_rows(q, keys)
    out = full(q, k, v, bias, is_causal=is_causal, any_masked=key_mask is not None, longest=longest)
    return reference.last_rows(out, length) if is_causal else out


class PositionBias(NamedTuple):
    """One bias per query and key position, for all heads and channels."""

    bias: Float[Tensor, "max_len max_len"]


class FactoredBias(NamedTuple):
    """Biases as a product ``rows @ columns^T``."""

    rows: Float[Tensor, "max_len rank"]
    columns: Float[Tensor, "max_len rank"]


@dataclass(frozen=True, repr=False)
class AFTFull(Attention[PositionBias | FactoredBias, None]):
    """AFT with a learned bias for every pair of positions: two n x n products, and no n x n x d tensor.

    Keys, queries and values must have the same width. Causal calls with fewer queries than keys take the queries for
    the last of the sequence; other cross attention starts both at position 0.

    Args:
        rank: Width of the two factors of the bias, 2 max_len rank numbers instead of max_len^2; None: no factors. The
            paper's models use 64 to 128.
    """

    rank: int | None = None

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)",
        cost="n^2 d",
        complexity_exponent=2.0,
        gpu=SCORES,
        causal=True,
        padding=True,
        cross=True,
        positions="absolute",
        needs_max_len=True,
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def __post_init__(self) -> None:
        if self.rank is not None:
            at_least(self, "rank", self.rank, 1, nothing="AFTSimple()")

    def weights(self, shape: Shape) -> PositionBias | FactoredBias:
        """Biases, or both factors of them, from N(0, 0.01^2)."""
        if self.rank is None:
            return PositionBias(nn.Parameter(0.01 * torch.randn(shape.max_len, shape.max_len)))
        rows, columns = (nn.Parameter(0.01 * torch.randn(shape.max_len, self.rank)) for _ in range(2))
        return FactoredBias(rows, columns)

    def heads_of(self, w: PositionBias | FactoredBias) -> None:
        """None: the biases are those of all heads, however many."""

    @in_float32
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: PositionBias | FactoredBias,
        *,
        is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        """``aft_full`` with the learned bias."""
        same_width(self, k, v)
        self.within(q.shape[-2], w[0].shape[0])
        self.within(k.shape[-2], w[0].shape[0])
        bias = w.bias if isinstance(w, PositionBias) else w.rows @ w.columns.mT
        return aft_full(q, k, v, bias, is_causal=is_causal, key_mask=key_mask)
