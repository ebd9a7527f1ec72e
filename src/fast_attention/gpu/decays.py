"""How much pairs of one chunk fade between their tokens: what ``DecayedLinearAttention`` adds to the chunks' kernels.

Logarithms of decays are added up from a chunk's first token on, in float64, and kept as two numbers in float32 each, a
rounded one and what rounding took: of a difference between two of them nothing is lost, however far both have fallen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fast_attention.gpu.tiles import row


class Decays(NamedTuple):
    """How sums fade inside and across the chunks of (B, H, n) tokens."""

    logs: Tensor  # (2, B, H, n)
    since: Tensor  # (B, H, n), from before the chunk to every token
    until: Tensor  # (B, H, n), from every token to the end of the chunk
    totals: Tensor  # (B, H, chunks), over all of them

    @classmethod
    def of(cls, log_decay: Tensor, chunk: int) -> Decays:
        """Tables of the logarithms by which every token decays what was before it."""
        length = log_decay.shape[-1]
        logs = F.pad(log_decay.double(), (0, -length % chunk)).unflatten(-1, (-1, chunk)).cumsum(-1)
        totals, flat = logs[..., -1], logs.flatten(-2)[..., :length]
        until = (totals[..., None] - logs).flatten(-2)[..., :length]
        high = flat.float()
        pair = torch.stack([high, (flat - high.double()).float()])
        return cls(pair, flat.exp().float(), until.exp().float().contiguous(), totals.exp().float())


@triton.jit
def between(LOGS, low, queries, keys, length, ROWS: tl.constexpr):
    """Decays from keys (columns) to queries (rows) that come after them; one where they come before."""
    logs = row(LOGS, queries, length, ROWS)[:, None] - row(LOGS, keys, length, ROWS)[None, :]
    logs += row(LOGS + low, queries, length, ROWS)[:, None] - row(LOGS + low, keys, length, ROWS)[None, :]
    return tl.exp(tl.minimum(logs, 0.0))


@triton.jit
def after(LOGS, low, keys, queries, length, ROWS: tl.constexpr):
    """The decays after a key, keys as rows."""
    logs = row(LOGS, queries, length, ROWS)[None, :] - row(LOGS, keys, length, ROWS)[:, None]
    logs += row(LOGS + low, queries, length, ROWS)[None, :] - row(LOGS + low, keys, length, ROWS)[:, None]
    return tl.exp(tl.minimum(logs, 0.0))
