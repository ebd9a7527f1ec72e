"""Declares what a mechanism can do, and the sizes that its weights are for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fast_attention.engine.tracing import symbolic
from fast_attention.value import plain_numbers, typed

Memory = Literal["constant", "window", "growing"]
Places = Literal["relative", "absolute", "grid"]
# What computes a mechanism on a GPU: ``explain`` says it, and the documentation.
KERNELS = "kernels of this library, in Triton"
FUSED = "torch's fused attention"
FLEX = "torch's FlexAttention in 16 bits; else torch's fused attention over blocks of queries with the keys they see"
SORTED = "torch's FlexAttention in 16 bits, tokens sorted by bucket; else products of torch, chunk by chunk"
BLOCKS = "torch's fused attention over blocks of queries with the keys they see"
SCORES = "products of all pairs, and elementwise operations"
PLAIN = "products and elementwise operations of torch, chunk by chunk"
SUMS = "elementwise operations and running sums of torch"
NEAR_FAR = "torch's FlexAttention in 16 bits for near keys, products block by block for far ones; else products for all"
FOURIER = "torch's FFT"
TOKENS = "products over all tokens"
PARTS = "what its parts run by"


class Unsupported(NotImplementedError):
    """The mechanism cannot do what was asked. The message names the mechanism, the trait and what would work."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Abilities of a mechanism: read by validation, modules, laws, tables and docs.

    Attributes:
        paper: Authors, year and arXiv number, or the title of the source.
        formula: One line of mathematics in plain text.
        cost: Time, in n tokens, d width, m features, w window, b block, r rank.
        complexity_exponent: The exponent of n in time and memory, checked by counted operations.
        gpu: What computes it on a GPU, in words.
        inputs: The inputs that it uses. Modules build no other projection.
        causal: Takes ``is_causal=True``.
        bidirectional: Takes ``is_causal=False``.
        padding: Takes a ``key_mask``.
        cross: Takes any number of queries, of another sequence than the keys.
        mask: Takes any ``attn_mask``, boolean or additive, and attention dropout.
        rotary: Scores are, or estimate, a function of ``q . k``, which rotary positions make relative.
        memory: What decoding keeps: constant, a window, growing. None: it does not decode.
        positions: Positions are offsets or none; or count from the first visible token; or are places of a grid.
        needs_max_len: Its weights are for at most ``max_len`` tokens.
        random: It holds random draws, in buffers.
        matrix: The output is ``A v``: A can be read by attending to the identity.
        learned: It has parameters to train, and estimates nothing before that.
        compile: Works in ``torch.compile(fullgraph=True)``.
        export: Works in ``torch.export`` and ONNX with a dynamic length.
        sees_padding: It is laid out over the padded length: a padded input is not computed as the shorter one.
        approximates: The mechanism that its error is measured against.
    """

    paper: str
    formula: str
    cost: str
    complexity_exponent: float
    gpu: str = ""
    inputs: Literal["qkv", "kv", "qv", "v", "x"] = "qkv"
    causal: bool = False
    bidirectional: bool = True
    padding: bool = False
    cross: bool = False
    mask: bool = False
    rotary: bool = False
    memory: Memory | None = None
    positions: Places = "relative"
    needs_max_len: bool = False
    random: bool = False
    matrix: bool = True
    learned: bool = False
    compile: bool = True
    export: bool = True
    sees_padding: bool = False
    approximates: str | None = None

    @property
    def modes(self) -> list[bool]:
        """The values of ``is_causal`` that it can be called with."""
        return [False] * self.bidirectional + [True] * self.causal

    def denying(self, is_causal: bool) -> str:
        """The trait that denies calls with this ``is_causal``; empty where none does."""
        return "" if is_causal in self.modes else "causal" if is_causal else "bidirectional"

    def shared(self, others: Traits) -> int:
        """How many traits are the same in ``others``, but for those that are words or grant nothing."""
        words = ("paper", "formula", "cost", "gpu", "positions")
        return sum(getattr(self, x.name) == getattr(others, x.name) for x in fields(self) if x.name not in words)


@dataclass(frozen=True)
class Shape:
    """The sizes that a mechanism's weights are for: ``heads`` heads of width ``head_dim``, up to ``max_len`` tokens."""

    heads: int
    head_dim: int
    max_len: int = 0

    def __post_init__(self) -> None:
        if not symbolic():
            plain_numbers(self)
            typed(self)
        if self.heads < 1 or self.head_dim < 1 or self.max_len < 0:
            raise ValueError(f"{self}: heads and head_dim must be at least 1, max_len at least 0")

    @property
    def width(self) -> int:
        """Width of a whole token, ``heads * head_dim``."""
        return self.heads * self.head_dim
