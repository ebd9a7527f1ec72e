"""What mechanisms of grids share: how the tokens of a grid are laid out."""

from __future__ import annotations

from typing import Any

from fast_attention.biases.sinks import Sunk
from fast_attention.mechanism import Attention
from fast_attention.value import at_least


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """A setting for rows and for columns."""
    return value if isinstance(value, tuple) else (value, value)


class InGrid(Sunk, Attention[Any, None]):  # type: ignore[reportIncompatibleVariableOverride]
    """An attention among the tokens of a grid, row by row, behind ``num_prefix_tokens`` others."""

    height: int | None
    width: int
    num_prefix_tokens: int

    def __post_init__(self) -> None:
        """Check the sizes of the grid."""
        if self.height is not None:
            at_least(self, "height", self.height, 1)
        at_least(self, "width", self.width, 1)
        at_least(self, "num_prefix_tokens", self.num_prefix_tokens, 0)

    def check_sides(self, setting: str, least: int) -> None:
        """Raise a ``ValueError`` unless a setting is a number, or a pair for rows and columns, of at least that."""
        value = getattr(self, setting)
        sides = pair(value)
        if len(sides) != 2 or not all(isinstance(side, int) and side >= least for side in sides):
            call = f"{type(self).__name__}({setting}={value!r})"
            raise ValueError(f"{call}: {setting} must be a number >= {least}, or a pair (rows, columns)")

    def check_length(self, length: int) -> None:
        """Raise a ``ValueError`` unless so many tokens are the grid and its prefix."""
        if self.height is None:
            return
        tokens = self.height * self.width + self.num_prefix_tokens
        if length != tokens:
            prefix = f" behind the first {self.num_prefix_tokens}" if self.num_prefix_tokens else ""
            raise ValueError(
                f"{self!r} is for {tokens} tokens, {self.height} rows of {self.width}{prefix}, and got {length}: give "
                "the grid's own height and width (and num_prefix_tokens), or height=None for any number of rows"
            )
