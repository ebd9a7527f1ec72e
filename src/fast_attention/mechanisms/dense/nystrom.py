"""Nystrom attention (Xiong et al. 2021): softmax's matrix of weights, from its rows and columns at a few landmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks, trace
from fast_attention.engine.numerics import no_less
from fast_attention.engine.operation import Operation, like_queries
from fast_attention.engine.tracing import symbolic, traced
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.traits import FUSED
from fast_attention.value import at_least


def through_landmarks(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    key_mask: Bool[Tensor, "*#batch2 length"] | None,
    *,
    num_landmarks: int,
    num_iterations: int,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(Q K~^T / sqrt(d)) Z softmax(Q~ K^T / sqrt(d)) V`` (arXiv 2102.03902).

    The landmarks Q~ and K~ are ``segment_means`` of the visible queries and keys, and Z is ``iterated_inverse`` of A,
    the weights of Q~ for K~. Where no more tokens are visible than there are landmarks, each is one by itself and
    ``A^-1 A`` cancels: what remains is exact attention. Time O(n m d + m^3), memory O(n m).
    """
    if not symbolic() and q.shape[-2] <= num_landmarks:
        return softmax_attention(q, k, v, key_mask=key_mask)
    trace.record("torch's fused kernel on landmarks", "as many at any length", landmarks=num_landmarks)
    (queries, keys), count = segment_means(q, k, number=num_landmarks, key_mask=key_mask)
    visible = None if count is None else count > 0
    scores = queries @ keys.mT * q.shape[-1] ** -0.5
    weights = masks.masked_softmax(scores, None if visible is None else visible[..., None, :])
    values = iterated_inverse(weights, num_iterations) @ softmax_attention(queries, k, v, key_mask=key_mask)
    if count is not None:
        single = count.amax(-1)[..., None, None] <= 1
        if traced() or bool(single.any()):
            values = torch.where(single, segment_means(v, number=num_landmarks, key_mask=key_mask)[0][0], values)
    return softmax_attention(q, keys, values, key_mask=visible)


nystrom_attention = Operation(through_landmarks, compute=torch.float32, empty=like_queries)


def segment_means(
    *tokens: Float[Tensor, "*batch length width"], number: int, key_mask: Bool[Tensor, "*#batch2 length"] | None
) -> tuple[list[Float[Tensor, "*batch number width"]], Int[Tensor, "*#batch2 number"] | None]:
    """Means of queries, keys or values over ``number`` segments of the visible tokens, and how many each holds.

    The r-th of n visible tokens is in segment ``floor(r number / n)``: neighbours in segments whose sizes differ by at
    most one, as if masked tokens were not there. Where n < number, a segment holds one token, or none and zeros.
    The count is None where all hold as many.
    """
    length, device = tokens[0].shape[-2], tokens[0].device
    if key_mask is None and not symbolic() and length % number == 0:
        return [x.unflatten(-2, (number, -1)).mean(-2) for x in tokens], None
    rank, total = torch.arange(length, device=device), length
    if key_mask is not None:
        rank, total = key_mask.cumsum(-1) - 1, key_mask.sum(-1, keepdim=True).clamp_min(1)
    member = (rank * number // total)[..., None, :] == torch.arange(number, device=device)[:, None]
    if key_mask is not None:
        member = member & key_mask[..., None, :]
    count = member.sum(-1)
    share = member.to(tokens[0].dtype) / count.clamp_min(1)[..., None]
    return [share @ masks.drop(x, key_mask) for x in tokens], count


def iterated_inverse(
    weights: Float[Tensor, "*batch count count"], num_iterations: int
) -> Float[Tensor, "*batch count count"]:
    """Z close to the pseudo-inverse of A: ``Z <- Z (13 - A Z (15 - A Z (7 - A Z))) / 4``, so many times.

    The first Z is ``A^T / (|A|_1 |A|_inf)``, with the norms of this head of this sequence. Rows of A sum to one, so
    that |A|_inf is 1 and |A|_1, the largest sum of a column, at least that.
    """
    inverse = weights.mT / no_less(weights.sum(-2).amax(-1), 1.0)[..., None, None]
    identity = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    for _ in range(num_iterations):
        product = weights @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


@dataclass(frozen=True, repr=False)
class Nystrom(Attention[tuple[()], tuple[()]]):
    """Softmax estimated from what landmarks, means of neighbouring tokens, weigh and how they are weighed.

    Nothing is trained or drawn. It is as good as neighbours are alike: what differs among them is lost. Every landmark
    depends on later tokens, so that it cannot be causal; and it is for self-attention, since a ``key_mask`` says of
    queries too which are padding and belong to no landmark. As many tokens as landmarks, or fewer, are attended to
    exactly. The depthwise convolution of values that Nystromformer adds is not in it.

    Args:
        num_landmarks: Segments of neighbouring tokens, each with one landmark of its queries and one of its keys.
        num_iterations: Steps towards the pseudo-inverse of the landmarks' weights; the paper takes 6.
    """

    num_landmarks: int = 64
    num_iterations: int = 6

    traits = Traits(
        paper="Xiong et al. 2021, arXiv 2102.03902",
        formula="softmax(q K~^T / sqrt(d)) pinv(softmax(Q~ K~^T / sqrt(d))) softmax(Q~ k^T / sqrt(d)) v",
        cost="n r d",
        complexity_exponent=1.0,
        gpu=FUSED,
        padding=True,
        rotary=True,
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        at_least(self, "num_landmarks", self.num_landmarks, 1)
        at_least(self, "num_iterations", self.num_iterations, 0)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``nystrom_attention`` with these settings."""
        return nystrom_attention(
            q, k, v, key_mask, num_landmarks=self.num_landmarks, num_iterations=self.num_iterations
        )
