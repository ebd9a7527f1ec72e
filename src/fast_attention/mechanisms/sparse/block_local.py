"""Local attention in blocks: a query weighs the keys of its block and of neighbouring ones.

The blocks are those of the Reformer's local layers (Kitaev et al. 2020, arXiv 2001.04451).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.biases.bias import Bias
from fast_attention.engine.offsets import Positions
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanisms.sparse import banded
from fast_attention.mechanisms.sparse.local import TRAITS, NearKeys
from fast_attention.value import at_least


def block_local_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    block_size: int = 64,
    before: int = 1,
    after: int = 1,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys of the query's block, of ``before`` blocks before it and of ``after`` blocks after it.

    Blocks are counted from the first key, and query i stands at i + S - L. Causal: later keys are masked and ``after``
    is 0. No block has itself or a wrapped one for its missing neighbour (trax wraps the first round to the last).
    ``bias`` gives what scores gain by offsets j - i, as ``engine.offsets`` has them; the exponentials of ``sinks`` (H,)
    add to normalisers.
    """
    m = BlockLocal(block_size, before, after) if symbolic() else _checked(block_size, before, after)
    return banded.attend(
        q, k, v, left=m.before, right=m.after, size=m.block_size, is_causal=is_causal, key_mask=key_mask,
        attn_mask=attn_mask, dropout=dropout, scale=scale, bias=bias, sinks=sinks,
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class BlockLocal(NearKeys):
    """Neighbouring blocks: a query sees its own block, ``before`` blocks before it and ``after`` blocks after it.

    Args:
        block_size: Tokens per block.
        before: Blocks seen before the own one.
        after: Blocks seen after the own one; none with is_causal=True (the Reformer's local layers have 1 and 0).
        scale: Factor on the dot products; None means 1/sqrt(width).
        bias: What scores gain by the distance of query and key: ``ALiBi()``, ``T5Buckets()`` or ``TransformerXL()``.
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    block_size: int = 64
    before: int = 1
    after: int = 1
    scale: float | None = None
    bias: Bias | None = None
    sinks: bool = False

    base_traits = replace(TRAITS, positions="absolute")

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "block_size", self.block_size, 1)
        at_least(self, "before", self.before, 0)
        at_least(self, "after", self.after, 0)

    @property
    def reach(self) -> tuple[int, int, int]:
        """Blocks before and after the query's own, and their tokens."""
        return self.before, self.after, self.block_size

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any,
        *, is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax over the neighbouring blocks under any mask."""
        q, bias = self.positions(q, w, self.scale)
        return banded.attend(
            q, k, v, left=self.before, right=self.after, size=self.block_size, is_causal=is_causal, key_mask=key_mask,
            attn_mask=attn_mask, dropout=dropout, scale=self.scale, bias=bias, sinks=self.sinks_of(w),
        )  # fmt: skip


_checked = lru_cache(256)(BlockLocal)  # compilers do not take a cache
