"""ALiBi (Press et al. 2021, arXiv 2108.12409): scores fall with the distance, at a slope of each head's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fast_attention.biases.bias import Bias, dtype_of
from fast_attention.engine.offsets import Terms


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of ``heads`` heads, from the steepest on (arXiv 2108.12409, section 3).

    Of a power of two: ``2^(-8 (h + 1) / heads)``. Of another number: those of the next lower power of two, then every
    second one of twice as many, as the authors' code has it.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)]


@dataclass(frozen=True, repr=False)
class ALiBi(Bias):
    """Attention with linear biases: ``-m_h |i - j|``, fixed; no position is given to the model in another way.

    The paper has it causal, where ``i - j`` is never negative. Without causal order the distance counts on both sides
    alike, as BERT-like models with ALiBi have it.

    Args:
        slopes: The m_h, one for each head; None for the paper's, for any number of heads.
    """

    slopes: tuple[float, ...] | None = None

    paper = "Press et al. 2021, arXiv 2108.12409"
    formula = "-m_h |i - j|"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.slopes is not None and not self.slopes:
            raise ValueError("ALiBi(slopes=()): slopes are one number for each head, or None for the paper's")

    def terms(self, offsets: Int[Tensor, "offsets"], w: tuple[()], like: Tensor, *, scale: float) -> Terms:
        """The same for an offset and its negative.

        Raises:
            ValueError: There are slopes for another number of heads.
        """
        heads = like.shape[-3]
        if self.slopes is not None and len(self.slopes) != heads:
            raise ValueError(f"{self!r}: these are slopes of {len(self.slopes)} heads, and q has {heads}")
        slopes = alibi_slopes(heads) if self.slopes is None else self.slopes
        return Terms(_fall(torch.tensor(slopes, dtype=dtype_of(like), device=offsets.device), offsets))

    def of_heads(self, first: int, number: int, heads: int) -> ALiBi:
        """That of ``number`` heads from ``first`` on, of ``heads``."""
        slopes = tuple(alibi_slopes(heads)) if self.slopes is None else self.slopes
        return ALiBi(slopes[first : first + number])


def _fall(slopes: Float[Tensor, "heads"], offsets: Int[Tensor, "offsets"]) -> Float[Tensor, "heads offsets"]:
    return -slopes[:, None] * offsets.abs()
