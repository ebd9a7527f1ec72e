"""What a mechanism is: a frozen value, what it declares, and the one gate that every call passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from fast_attention.ops import masks
from fast_attention.ops.value import Value

W = TypeVar("W")
S = TypeVar("S")
Memory = Literal["constant", "window", "growing"]


class Unsupported(NotImplementedError):
    """The mechanism cannot do what was asked. The message names the mechanism, the trait and what would work."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a mechanism can do, said once and read by the gate, the modules, the laws, the tables and the docs."""

    paper: str  # authors, year and arXiv number, or the title of the source
    formula: str  # one line of mathematics in plain text
    cost: str  # time, in n tokens, d width, m features, w window, b block, r rank
    order: float  # exponent of n, checked by counted operations and by measured memory
    reads: Literal["qkv", "kv", "qv", "v", "x"] = "qkv"  # no other projection is built
    causal: bool = False
    padding: bool = False
    cross: bool = False  # as many queries as you like: S != L
    mask: bool = False  # takes an arbitrary attn_mask (boolean or additive) and attention dropout
    rotary: bool = False  # scores are, or estimate, a function of q . k: turned by place, they tell distances only
    memory: Memory | None = None  # of decoding; None: cannot stream
    bounded: bool = False  # its weights are cut for max_len tokens
    random: bool = False  # holds random draws (buffers), which may be drawn again
    matrix: bool = True  # the output is A v: A can be read by attending to the identity
    learned: bool = False  # has parameters to train: not an approximation of anything before that
    compile: bool = True  # torch.compile(fullgraph=True)
    export: bool = True  # torch.export and ONNX with a dynamic length
    spans: bool = False  # laid out over the padded length: a padded input is not computed as the shorter one
    approximates: str | None = None  # the mechanism its error is measured against


@dataclass(frozen=True)
class Shape:
    """The sizes a mechanism's weights are cut for: ``heads`` heads of width ``head_dim``, up to ``max_len`` tokens."""

    heads: int
    head_dim: int
    max_len: int = 0

    def __post_init__(self) -> None:
        if self.heads < 1 or self.head_dim < 1 or self.max_len < 0:
            raise ValueError(f"{self}: heads and head_dim must be at least 1, max_len at least 0")

    @property
    def width(self) -> int:
        """Width of a whole token: ``heads * head_dim``."""
        return self.heads * self.head_dim


class Mechanism(Value, ABC, Generic[W, S]):
    """A frozen value holding settings only: no sizes, no tensors. ``W`` are its weights, ``S`` its decoding state."""

    traits: ClassVar[Traits]

    def weights(self, shape: Shape) -> W:
        """Fresh weights for ``shape``: a NamedTuple of ``nn.Parameter`` (learned) and plain tensors (drawn or fixed).

        The only place that draws random numbers, all from torch's global generator. Without weights: ``()``.
        """
        return ()  # type: ignore[return-value]

    def redrawn(self, w: W, shape: Shape) -> W:
        """``w`` with what is drawn at random drawn again; ``Bound.redraw`` takes all but its parameters."""
        return self.weights(shape)

    @property
    def needs_weights(self) -> bool:
        """Whether a call must bring weights."""
        return type(self).weights is not Mechanism.weights

    def refuse(self, what: str, trait: str) -> Unsupported:
        """The error for a denied trait: who refuses, what, and who grants it."""
        kind = Attention if isinstance(self, Attention) else Mixer
        able = ", ".join(f"{name}()" for name in granting(kind, trait)[:6])
        return Unsupported(
            f"{self!r} does not support {what} (traits.{trait} is {getattr(self.traits, trait)!r}). "
            + (f"What would work: {able}." if able else f"No {kind.__name__.lower()} in the catalogue does.")
        )

    def within(self, length: int, max_len: int) -> None:
        """Raise a ``ValueError`` where ``length`` tokens do not fit weights cut for ``max_len``."""
        if length > max_len:
            need = f"build it with Shape(..., max_len={length}) or more"
            raise ValueError(f"{self!r} was built for at most max_len={max_len} tokens and got {length}: {need}")

    def _check_sides(self, is_causal: bool, key_mask: Tensor | None, lead: tuple[int, ...], keys: int) -> None:
        if is_causal and not self.traits.causal:
            raise self.refuse("is_causal=True", "causal")
        if key_mask is not None:
            if not self.traits.padding:
                raise self.refuse("a key_mask", "padding")
            masks.check(key_mask, lead, keys)

    def _check_weights(self, w: object) -> None:
        if self.needs_weights and isinstance(w, tuple) and not w:
            raise ValueError(
                f"{self!r} needs its weights: pass w=mechanism.weights(Shape(heads=..., head_dim=..., max_len=...)) "
                "or call it through fast_attention.Bound"
            )


def granting(kind: type[Mechanism[Any, Any]], trait: str) -> list[str]:
    """Names of the loaded mechanisms of a kind whose default value grants a trait, in the order they were defined."""
    names = []
    for subclass in [x for x in kind.__subclasses__() if x.__module__.startswith("fast_attention.")]:
        names += granting(subclass, trait)
        if not getattr(subclass, "__abstractmethods__", None) and getattr(subclass().traits, trait):
            names.append(subclass.__name__)
    return names


class Attention(Mechanism[W, S]):
    """Head by head: queries (..., H, L, E), keys (..., H, S, E), values (..., H, S, Ev) to outputs (..., H, L, Ev)."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """The mechanism, past the gate. ``key_mask`` is None or boolean (..., 1, S), True = may be seen."""

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: S | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, S]:
        """Causal outputs of the next stretch of one or more tokens, and the state after it, past the gate."""
        raise self.refuse("decoding", "memory")

    def calibrated(self, q: Tensor, k: Tensor, w: W, *, key_mask: Tensor | None = None) -> W:
        """``w`` suited to these queries and keys; as it is where nothing in it can be. See ``Bound.adopt``."""
        return w

    def summarise(self, k: Tensor, v: Tensor, w: W, *, key_mask: Tensor | None = None) -> S:
        """The state after a stretch of keys and values (``memory="constant"`` only)."""
        raise self.refuse("summarising", "memory")

    def combine(self, earlier: S, later: S) -> S:
        """The state of two neighbouring stretches, associatively (``memory="constant"`` only)."""
        raise self.refuse("combining states", "memory")

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: W | tuple[()] = (),
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries (..., H, L, E).
            k: Keys (..., H, S, E).
            v: Values (..., H, S, Ev).
            w: Weights from ``weights(shape)``; not needed where ``needs_weights`` is False.
            is_causal: Query i sees keys up to i + S - L (aligned to the bottom right).
            key_mask: Boolean (..., S) without the head axis, True = may be seen.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (..., H, L, S).
            dropout: Probability with which an attention weight is dropped.

        Returns:
            Outputs (..., H, L, Ev) in the dtype of ``q``; a query that may see nothing gets zeros.

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes, dtypes or weights do not fit.
        """
        self._check(q, k, v, is_causal=is_causal, key_mask=key_mask)
        self._check_weights(w)
        mask = None if key_mask is None else key_mask[..., None, :]
        if attn_mask is None and dropout == 0.0:
            return self.attend(q, k, v, w, is_causal=is_causal, key_mask=mask)  # type: ignore[arg-type]
        if not isinstance(self, MaskedAttention):
            raise self.refuse("an arbitrary attn_mask" if attn_mask is not None else "attention dropout", "mask")
        masks.check_scores(attn_mask, dropout, (*q.shape[:-1], k.shape[-2]))
        weights: Any = w
        return self.attend_masked(
            q, k, v, weights, is_causal=is_causal, key_mask=mask, attn_mask=attn_mask, dropout=dropout
        )

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: W | tuple[()] = (),
        state: S | None = None,
        *,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, S]:
        """Attend causally to a stretch of one or more new tokens; any split of a sequence gives the same outputs.

        Args:
            q, k, v: The stretch, (..., H, N, E), (..., H, N, E), (..., H, N, Ev).
            w: Weights, as in a call.
            state: What the previous stretch returned; None at the start.
            key_mask: Boolean (..., N), True = may be seen, now and later.

        Returns:
            Outputs (..., H, N, Ev) and the state to hand to the next stretch.

        Raises:
            Unsupported: ``traits.memory`` is None.
            ValueError: Sizes, dtypes or weights do not fit.
        """
        if self.traits.memory is None:
            raise self.refuse("decoding", "memory")
        self._check(q, k, v, is_causal=True, key_mask=key_mask)
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(f"decode takes as many queries as keys; got {q.shape[-2]} queries and {k.shape[-2]} keys")
        self._check_weights(w)
        mask = None if key_mask is None else key_mask[..., None, :]
        return self.advance(q, k, v, w, state, key_mask=mask)  # type: ignore[arg-type]

    def _check(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim < 3:
                raise ValueError(f"{name} must be (..., heads, tokens, width); got shape {tuple(x.shape)}")
            if x.shape[:-2] != q.shape[:-2]:
                raise ValueError(
                    f"q has leading sizes {tuple(q.shape[:-2])} and {name} has {tuple(x.shape[:-2])}: they must be "
                    "equal (grouped keys and values: attention(..., enable_gqa=True), or repeat_interleave first)"
                )
            if x.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
                raise ValueError(f"q is {q.dtype} and {name} is {x.dtype}: give all three the same dtype")
        if k.shape[-2] != v.shape[-2]:
            raise ValueError(f"k has {k.shape[-2]} tokens and v has {v.shape[-2]}: every key needs its value")
        if self.traits.reads == "qkv" and q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q has width {q.shape[-1]} and k has width {k.shape[-1]}: they must be equal")
        if q.shape[-2] != k.shape[-2] and not self.traits.cross:
            raise self.refuse(f"cross attention ({q.shape[-2]} queries, {k.shape[-2]} keys)", "cross")
        self._check_sides(is_causal, key_mask, tuple(q.shape[:-3]), k.shape[-2])


class MaskedAttention(Attention[W, S]):
    """An attention whose scores stand in the open, so that any mask and attention dropout can act on them."""

    @abstractmethod
    def attend_masked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: W,
        *,
        is_causal: bool,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """``attend`` with a boolean or additive mask on the scores and dropout on the weights."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``attend_masked`` without mask and dropout."""
        return self.attend_masked(q, k, v, w, is_causal=is_causal, key_mask=key_mask, attn_mask=None, dropout=0.0)


class Mixer(Mechanism[W, S]):
    """Whole tokens to whole tokens, no queries or heads: (..., N, E) -> (..., N, E) with E = ``Shape.width``."""

    @abstractmethod
    def mix(self, x: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """The mechanism, past the gate. ``key_mask`` is None or boolean (..., N), True = may be seen."""

    def __call__(
        self, x: Tensor, w: W | tuple[()] = (), *, is_causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """Mix tokens; raises ``Unsupported`` and ``ValueError`` as an attention does.

        Args:
            x: Tokens (..., N, E).
            w: Weights from ``weights(shape)``; not needed where ``needs_weights`` is False.
            is_causal: Output i depends on tokens up to i.
            key_mask: Boolean (..., N), True = may be seen.

        Returns:
            Tokens (..., N, E) in the dtype of ``x``.
        """
        if x.ndim < 2:
            raise ValueError(f"x must be (..., tokens, width); got shape {tuple(x.shape)}")
        self._check_sides(is_causal, key_mask, tuple(x.shape[:-2]), x.shape[-2])
        self._check_weights(w)
        return self.mix(x, w, is_causal=is_causal, key_mask=key_mask)  # type: ignore[arg-type]
