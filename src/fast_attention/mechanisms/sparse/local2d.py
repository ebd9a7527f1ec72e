"""Local attention in two dimensions: a query weighs the keys of rows and columns around it, a window or a block.

The window is that of neighborhood attention (Hassani et al. 2022, arXiv 2204.07143), dilated as in DiNAT (2209.15001).
The blocks, and their shift from layer to layer, are Swin's (Liu et al. 2021, arXiv 2103.14030).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.mechanism import Traits
from fast_attention.mechanisms.sparse.grid import Axis, InGrid, grid_softmax, pair
from fast_attention.traits import BLOCKS

ROWS, COLUMNS = 4, 8  # of queries in a tile


def local2d_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    width: int = 14,
    window: int | tuple[int, int] = 7,
    dilation: int | tuple[int, int] = 1,
    num_prefix_tokens: int = 0,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
    scale: float | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the ``window`` of rows and columns around the query's, moved inwards at the borders of the grid.

    Token t, counted behind the prefix, stands at row ``t // width`` and column ``t % width``. Along an axis of n places
    the query at i sees the w from ``min(max(i - w // 2, 0), n - w)`` on (arXiv 2204.07143, section 3.1), all n where
    they are fewer; with ``dilation`` d the same among the places i modulo d, d apart (arXiv 2209.15001, section 3.2).
    The first ``num_prefix_tokens`` see everything and are seen by all. O(n w^2 d) time, O(n d) memory.
    The exponentials of ``sinks`` (H,) add to normalisers.
    """
    (rows, columns), (down, across) = pair(window), pair(dilation)
    return grid_softmax(
        q, k, v, key_mask, sinks, width=width, down=Axis(rows, down, tile=ROWS),
        across=Axis(columns, across, tile=COLUMNS), leading=num_prefix_tokens, scale=scale,
    )  # fmt: skip


TRAITS = Traits(
    paper="Hassani et al. 2022, arXiv 2204.07143; dilated: Hassani and Shi 2022, arXiv 2209.15001",
    formula="softmax over j in the w x w tokens around i, as a grid, of q_i k_j^T / sqrt(d), times v",
    cost="n w^2 d",
    complexity_exponent=1.0,
    gpu=BLOCKS,
    padding=True,
    rotary=True,
    positions="grid",
    sees_padding=True,
    approximates="Softmax",
)


@dataclass(frozen=True, repr=False)
class Local2d(InGrid):
    """A window of a grid: a query sees the keys of the rows and columns around its own, as in NATTEN.

    Tokens are those of an image or a spectrogram row by row: token t stands at (t // width, t % width). At the borders
    the window moves inwards, so that every query sees as many keys; a grid smaller than the window is seen as a whole.

    Args:
        height: Rows of the grid. None: as many as there are tokens for, and the last may end early.
        width: Columns of the grid.
        window: Rows and columns that a query sees, its own in the middle: an odd number, or a pair (rows, columns).
        dilation: Steps between rows and columns that are seen, one number or a pair.
        num_prefix_tokens: The first so many tokens, such as a class token and registers, stand outside the grid: they
            see everything and are seen by all.
        scale: Factor on the dot products; None means 1/sqrt(head_dim).
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    height: int | None = None
    width: int = 14
    window: int | tuple[int, int] = 7
    dilation: int | tuple[int, int] = 1
    num_prefix_tokens: int = 0
    scale: float | None = None
    sinks: bool = False

    base_traits = TRAITS

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.check_sides("window", 1)
        self.check_sides("dilation", 1)
        if not all(side % 2 for side in pair(self.window)):
            raise ValueError(f"Local2d(window={self.window!r}): window must be odd, with the query in its middle")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Softmax inside the window."""
        self.check_length(q.shape[-2])
        return local2d_attention(
            q, k, v, width=self.width, window=self.window, dilation=self.dilation,
            num_prefix_tokens=self.num_prefix_tokens, key_mask=key_mask, scale=self.scale,
            sinks=self.sinks_of(w),
        )  # fmt: skip


def block_local2d_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    width: int = 14,
    block_size: int | tuple[int, int] = 7,
    shift: int | tuple[int, int] = 0,
    num_prefix_tokens: int = 0,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
    scale: float | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys of the query's block of ``block_size`` rows and columns (arXiv 2103.14030, section 3.2).

    Blocks begin at row and column ``shift``; before the first and behind the last one are smaller ones, which is what
    Swin's cyclic shift with its mask gives. Tokens stand as in ``local2d_attention``. O(n b^2 d) time, O(n d) memory.
    The exponentials of ``sinks`` (H,) add to normalisers.
    """
    (rows, columns), (down, across) = pair(block_size), pair(shift)
    return grid_softmax(
        q, k, v, key_mask, sinks, width=width, down=Axis(rows, shift=down), across=Axis(columns, shift=across),
        leading=num_prefix_tokens, scale=scale,
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class BlockLocal2d(InGrid):
    """Blocks of a grid: a query sees the keys of its own rectangle, as in Swin, without its bias of positions.

    Tokens are those of an image or a spectrogram row by row: token t stands at (t // width, t % width). Layers with
    ``shift=0`` and with half a block in turns connect neighbouring blocks.

    Args:
        height: Rows of the grid. None: as many as there are tokens for, and the last may end early.
        width: Columns of the grid.
        block_size: Rows and columns of a block, one number or a pair (rows, columns).
        shift: The row and the column at which blocks begin, less than a block; those at the borders are smaller.
        num_prefix_tokens: The first so many tokens, such as a class token and registers, stand outside the grid: they
            see everything and are seen by all.
        scale: Factor on the dot products; None means 1/sqrt(head_dim).
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    height: int | None = None
    width: int = 14
    block_size: int | tuple[int, int] = 7
    shift: int | tuple[int, int] = 0
    num_prefix_tokens: int = 0
    scale: float | None = None
    sinks: bool = False

    base_traits = replace(
        TRAITS,
        paper="Liu et al. 2021, arXiv 2103.14030",
        formula="softmax over j in the block of i, as a grid, of q_i k_j^T / sqrt(d), times v",
        cost="n b^2 d",
        sees_padding=False,
    )

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.check_sides("block_size", 1)
        self.check_sides("shift", 0)
        if not all(side < size for side, size in zip(pair(self.shift), pair(self.block_size), strict=True)):
            raise ValueError(f"{self!r}: shift must be less than block_size, at which blocks begin again")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Softmax inside the block."""
        self.check_length(q.shape[-2])
        return block_local2d_attention(
            q, k, v, width=self.width, block_size=self.block_size, shift=self.shift,
            num_prefix_tokens=self.num_prefix_tokens, key_mask=key_mask, scale=self.scale,
            sinks=self.sinks_of(w),
        )  # fmt: skip
