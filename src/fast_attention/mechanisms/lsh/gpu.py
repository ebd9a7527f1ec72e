"""Attends among hashed tokens by torch's FlexAttention: every round sorts them by bucket, so that who meets is near.

A round gives every query the mean of what it reaches there and the logarithm of its weights; a softmax over these
logarithms makes one mean of all rounds. A pair that an earlier round has is left out by its codes there.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import operation
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.lsh.reference import SHORTEST, Arranged, Codes, Rules, Tokens, arrange, permuted

PAIRS = 1 << 24  # of blocks, lanes and rounds together: FlexAttention lists some 20 bytes for each
FAR = 1 << 30  # more than any code


def unsupported_reason(q: Tensor, v: Tensor, rounds: int) -> str:
    """Why FlexAttention does not compute this call; empty where it does."""
    if not symbolic():
        q, v = (_of_rounds(x, rounds) for x in (q, v))
    if why := patterns.unsupported_reason(q, q, v, None, logged=True):
        return why
    if q[..., 0, 0].numel() * (flex.rounded(q.shape[-2]) // flex.SIZE) ** 2 <= PAIRS:
        return ""
    why = f"more than {PAIRS} pairs of blocks in all rounds"
    operation.log_fallback(q, why)
    return why


def hashed_softmax(q: Tokens, v: Tokens, bucket: Codes, *, rules: Rules, dtype: torch.dtype) -> Tokens:
    """``reference.hashed_softmax`` in float32, whose queries, keys and values are rounded to ``dtype``."""
    arranged = arrange(bucket, number=rules.number, size=rules.size, ranked=rules.ranked, across=rules.across)
    rows = (q, F.normalize(q, dim=-1, eps=SHORTEST), v)
    a, b, c = (permuted(_of_rounds(x.to(dtype), bucket.shape[-2]), arranged.order) for x in rows)
    out, log = flex.attend_with_logs(a, b, c, pattern(arranged, rules), None, scale=rules.scale)
    log = permuted(log.clamp(min=FLOOR)[..., None], arranged.back)
    weights = log.softmax(-3)
    mean = (weights * permuted(out, arranged.back)).sum(-3)
    return torch.where((log <= FLOOR).all(-3), v, mean)


@torch.no_grad()
def pattern(arranged: Arranged, rules: Rules) -> flex.Pattern:
    """Which tokens meet in a round and in none before it, both in the order of that round's buckets.

    Its heads are rounds, those of one lane (of batch and heads) together.
    """
    order, codes = (x.flatten(0, -3) for x in (arranged.order, arranged.code))
    lanes, rounds, length = order.shape
    size = flex.rounded(length)
    every = codes[:, None].expand(lanes, rounds, rounds, length)
    every = every.gather(-1, order[:, :, None].expand_as(every))  # of round s in the order of round r
    chunk = every.diagonal(dim1=1, dim2=2).transpose(1, 2).reshape(-1, length)
    lows, highs = _interval(chunk, is_causal=rules.is_causal)
    lows, highs = F.pad(lows, (0, size - length), value=size).int(), F.pad(highs, (0, size - length), value=-1).int()
    known = _known(every, size) if rules.distinct else every.new_zeros(0, lanes * rounds, size)
    earlier = len(known)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        meets = (lows[h, i] <= j) & (j <= highs[h, i]) & (i != j)
        for s in range(earlier):
            difference = known[s, h, i] - known[s, h, j]
            meets = meets & (difference != 0) & (difference != 1)
        return meets

    begins = torch.arange(0, size, flex.SIZE, device=order.device)
    low, high = (x.unflatten(-1, (-1, flex.SIZE)) for x in (lows, highs))
    some = (low.amin(-1, keepdim=True) < begins + flex.SIZE) & (high.amax(-1, keepdim=True) >= begins)
    return flex.Pattern(visible, some, torch.zeros_like(some))


def _interval(code: Int[Tensor, "lanes length"], *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The first and the last sorted position that each one reaches; codes rise, -1 stands behind them and sees none."""
    masked, at = code < 0, torch.arange(code.shape[-1], device=code.device)
    code = code.masked_fill(masked, FAR)
    lows, highs = torch.searchsorted(code, code - 1), torch.searchsorted(code, code, right=True) - 1
    return lows.masked_fill(masked, flex.rounded(code.shape[-1])), highs.minimum(at - 1) if is_causal else highs


def _known(every: Int[Tensor, "lanes rounds codes length"], size: int) -> Int[Tensor, "earlier heads size"]:
    """Codes of rounds but the last, in the orders of all rounds; from its own round on such as never meet."""
    rounds = every.shape[1]
    distinct = 4 * torch.arange(size, device=every.device, dtype=every.dtype)
    later = torch.ones(rounds, rounds, dtype=torch.bool, device=every.device).triu()[:, :-1, None]
    codes = F.pad(every[:, :, :-1], (0, size - every.shape[-1]))
    return torch.where(later, distinct, codes).flatten(0, 1).transpose(0, 1).contiguous()


def _of_rounds(x: Tensor, rounds: int) -> Tensor:
    """(..., L, X) -> (..., rounds, L, X), a view."""
    return x[..., None, :, :].expand(*x.shape[:-2], rounds, *x.shape[-2:])
