"""BigBird (Zaheer et al. 2020, arXiv 2007.14062): windows, a few random blocks, and tokens that everyone sees.

The paper has it bidirectional only. Causal is ours: the same sets without later keys, global blocks at the start only
and random blocks from the past only, so that what comes later, or whether anything does, changes nothing before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.biases.bias import Bias, BiasMixin
from fast_attention.engine.blocks import count
from fast_attention.engine.offsets import Positions
from fast_attention.engine.operation import Operation
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.gathered import gathered_softmax
from fast_attention.traits import FLEX
from fast_attention.value import at_least

WORD = 0xFFFFFFFF


def _empty(
    seeds: Tensor, total: Tensor, *, number: int, first: int, last: int, half: int, draws: int, is_causal: bool
) -> Tensor:
    batch_shape = torch.broadcast_shapes(total.shape[:-2], seeds.shape[:-1])
    return seeds.new_empty(*batch_shape, number, 2 * half + 1 + first + last + draws, dtype=torch.int64)


def blocks_seen(
    seeds: Tensor, total: Tensor, *, number: int, first: int, last: int, half: int, draws: int, is_causal: bool
) -> Int[Tensor, "*#batch heads blocks choices"]:
    """Choose the blocks that each of ``number`` query blocks sees of ``total`` (..., 1, 1) blocks; -1 names none.

    ``half`` blocks on both sides and the own one, the ``first`` and the ``last`` blocks, and ``draws`` random ones.
    """
    block = torch.arange(number, device=seeds.device)
    top = block if is_causal else (total[..., 0] - last).clamp(min=first)
    low, high = (torch.minimum(x.clamp(min=first), top) for x in (block - half, block + half + 1))
    top = low if is_causal else top  # random blocks of the past only
    choices = [torch.arange(-half, half + 1, device=seeds.device) + block[:, None]]
    choices += [torch.full_like(block, i)[:, None] for i in range(first)]
    choices += [total - last + i for i in range(last)]
    if draws > 0:
        gap = high - low if not is_causal else torch.zeros_like(low)
        picks = distinct(seeds, block, top - first - gap, draws)
        picks = picks.where(picks < 0, picks + first + torch.where(picks < (low - first)[..., None], 0, gap[..., None]))
        choices.append(picks)
    batch_shape = torch.broadcast_shapes(total.shape[:-2], seeds.shape[:-1])
    table = torch.cat([x.expand(*batch_shape, number, x.shape[-1]) for x in choices], -1)
    return table.masked_fill((table < 0) | (table >= (number if is_causal else total)), -1)


_blocks_seen = Operation(blocks_seen, empty=_empty)


def mixed(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A hash of 32-bit integers held in int64: two rounds of shift, exclusive or and multiplication."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & WORD  # below 2^59: exact, and the same on every device
    return (x >> 16) ^ x


def distinct(
    seeds: Int[Tensor, "..."], index: Int[Tensor, "..."], available: Int[Tensor, "..."], number: int
) -> Int[Tensor, "... number"]:
    """``min(number, available)`` different numbers below ``available`` for each index, in slots filled up with -1.

    Floyd's sampling (Bentley and Floyd 1987), driven by a hash of the seed, the index and the draw: the same seeds give
    the same choice at any length, and every set is equally likely.
    """
    start = mixed(mixed(seeds) ^ index)
    chosen: list[Tensor] = []
    for draw in range(number):
        last = available - number + draw
        pick = mixed(start ^ draw) % (last + 1).clamp(min=1)
        for earlier in chosen:
            pick = torch.where(pick == earlier, last, pick)
        chosen.append(torch.where(last >= 0, pick, -1))
    return torch.stack(torch.broadcast_tensors(*chosen), -1)


def bigbird_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length values"],
    seeds: Int[Tensor, "heads"],
    *,
    block_size: int = 64,
    window_blocks: int = 3,
    num_random_blocks: int = 3,
    num_global_blocks: int = 2,
    num_global_tokens: int = 0,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
    scale: float | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """Softmax over the union of window, random and global keys (arXiv 2007.14062, section 2 and appendix D).

    Query block i of ``block_size`` tokens sees the ``window_blocks`` around itself, ``num_random_blocks`` different
    ones outside window and global blocks (all of them where fewer are left), and the global ones; global blocks see
    everything. ITC: the first ``ceil(num_global_blocks / 2)`` and the last ``floor(num_global_blocks / 2)`` blocks are
    global. ETC: the first ``num_global_tokens`` tokens are the prepended ones of the matrix B, and blocks are counted
    from the token after them. A key counts once however often it is reached, as in the dense masked softmax.

    A sequence ends at its last key that may be seen, so padding moves neither the last block nor the random ones.
    ``bias`` gives what scores gain by offsets j - i, as ``engine.offsets`` has them; the exponentials of ``sinks`` (H,)
    add to normalisers.
    """
    length, half = q.shape[-2], window_blocks // 2
    front, first, last = global_blocks(block_size, num_global_blocks, num_global_tokens, is_causal=is_causal)
    if not symbolic():
        blocks = (length + front + block_size - 1) // block_size
        left = blocks - first - (half + 1 if key_mask is None or is_causal else 0)  # that the random blocks must reach
        if left - last <= num_random_blocks:
            return softmax_attention(
                q, k, v, is_causal=is_causal, key_mask=key_mask, scale=scale, bias=bias, sinks=sinks
            )
    visible = torch.ones(1, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    if front > 0:
        q, k, v = (F.pad(x, (0, 0, front, 0)) for x in (q, k, v))
        visible = F.pad(visible, (front, 0))
    end = torch.where(visible, torch.arange(1, length + front + 1, device=q.device), 0).amax(-1)
    total = ((end + block_size - 1) // block_size)[..., None, None]
    number = count(length + front, block_size)
    settings = {"first": first, "last": last, "half": half, "draws": num_random_blocks, "is_causal": is_causal}
    blocks = _blocks_seen(seeds[:, None], total, number=number, **settings)
    table = blocks.expand(*q.shape[:-2], *blocks.shape[-2:])
    begin, full = 2 * half + 1, None
    if first + last > 0 and not is_causal:  # causal: all that the first blocks may see is in the first blocks
        full = table[..., :1, begin : begin + first + last]  # the blocks that all see
    added: Any = {"scale": scale, "bias": bias, "sinks": sinks}
    out = gathered_softmax(q, k, v, table, visible, size=block_size, is_causal=is_causal, full=full, **added)
    return out[..., front:, :]


def global_blocks(size: int, num_blocks: int, num_tokens: int, *, is_causal: bool) -> tuple[int, int, int]:
    """Positions missing before the first token, and how many blocks are global at the start and at the end."""
    front = -num_tokens % size  # the prepended tokens fill whole blocks of their own
    return front, (num_tokens + front) // size + (num_blocks + 1) // 2, 0 if is_causal else num_blocks // 2


class Seeds(NamedTuple):
    """One number per head (H,), from which the random blocks follow at any length; the weights of sinks and bias."""

    seeds: Tensor
    bias: Any = None


@dataclass(frozen=True, repr=False)
class BigBird(BiasMixin, Attention[Seeds, None]):  # type: ignore[reportIncompatibleVariableOverride]
    """Window, random and global blocks: the paper's ITC by default, its ETC with ``num_global_tokens``.

    Random blocks differ from head to head. They follow from the weights, and only ``Bound.redraw`` draws them anew.

    Args:
        block_size: Tokens per block; the last block may be shorter.
        window_blocks: Blocks of the sliding window, the own one in the middle: an odd number.
        num_random_blocks: Random blocks that each block of queries sees.
        num_global_blocks: Blocks that see everything and are seen by all, the first half of them at the start, the
            other half at the end (at the start only with is_causal=True). 0 for the paper's ETC.
        num_global_tokens: The first so many tokens see everything and are seen by all (ETC's g extra tokens, to be
            prepended by the caller). Blocks are counted from the token after them.
        scale: Factor on the dot products; None means 1/sqrt(width).
        bias: What scores gain by the distance of query and key: ``ALiBi()``, ``T5Buckets()`` or ``TransformerXL()``.
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    block_size: int = 64
    window_blocks: int = 3
    num_random_blocks: int = 3
    num_global_blocks: int = 2
    num_global_tokens: int = 0
    scale: float | None = None
    bias: Bias | None = None
    sinks: bool = False

    base_traits = Traits(
        paper="Zaheer et al. 2020, arXiv 2007.14062",
        formula="softmax over window, random and global blocks of q_i k_j^T / sqrt(d), times v",
        cost="n b (w + r + g) d",
        complexity_exponent=1.0,
        gpu=FLEX,
        causal=True,
        padding=True,
        rotary=True,
        positions="absolute",
        random=True,
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "block_size", self.block_size, 1)
        at_least(self, "window_blocks", self.window_blocks, 1)
        for setting in ("num_random_blocks", "num_global_blocks", "num_global_tokens"):
            at_least(self, setting, getattr(self, setting), 0)
        if self.window_blocks % 2 == 0:
            raise ValueError(f"BigBird(window_blocks={self.window_blocks}): window_blocks must be odd (1, 3, 5, ...)")

    @property
    def needs_weights(self) -> bool:
        """Always: the seeds."""
        return True

    def weights(self, shape: Shape) -> Seeds:
        """A random seed per head, and the weights of sinks and bias."""
        learned = super().needs_weights
        return Seeds(torch.randint(2**31, (shape.heads,)), super().weights(shape) if learned else None)

    def with_sinks(self, sinks: Tensor, w: Seeds) -> tuple[Any, Any]:
        """Beside the seeds stand the sinks."""
        mechanism, scores = super().with_sinks(sinks, () if w.bias is None else w.bias)
        return mechanism, w._replace(bias=scores)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Seeds, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Softmax over the pattern of each block."""
        q, bias = self.positions(q, () if w.bias is None else w.bias, self.scale)
        return bigbird_attention(
            q, k, v, w.seeds, block_size=self.block_size, window_blocks=self.window_blocks,
            num_random_blocks=self.num_random_blocks, num_global_blocks=self.num_global_blocks,
            num_global_tokens=self.num_global_tokens, is_causal=is_causal, key_mask=key_mask, scale=self.scale,
            bias=bias, sinks=self.sinks_of(w.bias),
        )  # fmt: skip
