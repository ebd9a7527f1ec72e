"""Visibility of a call's tokens in structured form, and whether a mechanism can keep to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from fast_attention import left_padding
from fast_attention.engine import masks
from fast_attention.mechanism import Unsupported
from fast_attention.mechanisms.hybrid.adapted import Adapted
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.mechanisms.hybrid.hybrid import Hybrid
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.packed import Packing


@dataclass(frozen=True)
class Visibility:
    """The mask of a call in structured form: causal, windowed, padded, packed.

    ``dense`` makes the mask (B, 1, L, S), True = may be seen, for mechanisms that take one; where ``complete`` is
    False, the other fields do not describe all of it.
    """

    dense: Callable[[], Tensor]
    tokens: Bool[Tensor, "batch all"] | None = None  # which positions so far are tokens; None: all
    is_causal: bool = False
    sequences: Int[Tensor, "batch keys"] | None = None  # of a packed row: each key's sequence; None: one in each row
    keys_left: int | None = None  # earlier keys that a query sees; None: all
    keys_right: int | None = None  # later keys; None: all, or none if causal
    reach: int | None = None  # earlier tokens that are seen of all so far, those in a state too; None: all
    begin: int = 0  # the position of the first key; more where a cache has dropped those before
    packing: Packing | None = None  # of rows whose borders were given beside the mask; texts run on from row to row
    borders: tuple[Mapping[str, Tensor], ...] = ()  # of packed rows, as the model was told, the innermost call first
    complete: bool = True
    harmless: set[str] | None = None  # names of tensors beside it that the model was given itself; exact forms add some
    valid: Bool[Tensor, ""] | None = None  # in a compiled model: whether the fields hold, computed at each call

    @property
    def is_whole(self) -> bool:
        """Whether every query sees all tokens, or all up to its own."""
        is_one_text = self.sequences is None and self.packing is None and self.valid is None
        return is_one_text and self.complete and self.keys_left is None and self.keys_right is None

    def key_mask(self, keys: int) -> Bool[Tensor, "batch keys"] | None:
        """Which of the last ``keys`` positions are tokens."""
        return None if self.tokens is None else self.tokens[:, -keys:]

    def __getitem__(self, index: tuple[Any, ...]) -> Visibility | Tensor:
        """A part of the dense mask, for models that cut the last queries out of theirs; itself where all are kept."""
        is_all = all(part in (slice(None), slice(0, None)) for part in index)
        return self if is_all else self.dense()[index]

    def to(self, dtype: torch.dtype) -> Visibility:
        """Itself: MPT casts its mask, whatever it is."""
        return self


def from_mask(module: nn.Module, q: Tensor, k: Tensor, mask: Any, is_causal: bool | None) -> Visibility:
    """The model's mask argument, of whatever form, as a ``Visibility``."""
    if isinstance(mask, Visibility):
        return mask
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    causal = causal and q.shape[-2] > 1

    def dense() -> Tensor:
        causal_mask = masks.visible(q.shape[-2], k.shape[-2], is_causal=causal, key_mask=None, device=q.device)
        full_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        return (full_mask if causal_mask is None else causal_mask).expand(len(q), 1, -1, -1)

    if mask is None:
        return Visibility(dense, is_causal=causal)
    if mask.ndim == 2:
        return Visibility(dense, mask.bool(), is_causal=causal)
    tokens = _one_row(mask) if q.shape[-2] > 1 and not torch.compiler.is_compiling() else None
    if tokens is not None:
        return Visibility(lambda: mask, None if bool(tokens.all()) else tokens.expand(len(q), -1))
    return Visibility(lambda: mask, complete=False)


def _one_row(mask: Tensor) -> Tensor | None:
    """Which keys a mask (B, 1, 1, S), the same for all heads and queries, shows; None for others, and for biases."""
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    row = mask[:, 0, 0]
    if row.dtype == torch.bool:
        return row
    shown, hidden = row == 0, row <= torch.finfo(row.dtype).min / 2
    return shown if bool((shown | hidden).all()) else None


def order(mechanism: Any, visibility: Visibility, mask: Tensor, queries: int) -> tuple[int, dict[str, Any]]:
    """How many keys there are, and how a call says where they begin, for a mechanism that counts positions from there.

    A cache of a fixed size has room behind the last key, which the mask (B, H, L, S) alone tells.

    Raises:
        Unsupported: The mask does not tell.
    """
    keys = mask.shape[-1]
    if visibility.begin:
        raise positions_refused(mechanism, f"this cache has dropped the first {visibility.begin} tokens")
    if visibility.complete:
        return keys, {"is_causal": visibility.is_causal, "key_mask": visibility.key_mask(keys)}
    if queries == keys:  # a mask of the model's own, without a cache
        return keys, {}
    if visibility.keys_left is not None:
        raise positions_refused(mechanism, f"a cache of {keys} places may have dropped some before this layer's window")
    if torch.compiler.is_compiling():
        raise positions_refused(mechanism, f"compiled code cannot tell them of {queries} queries among {keys} places")
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    places = torch.arange(keys, device=mask.device)
    last = seen[:, 0, -1]
    number = int((places * last).max()) + 1
    tokens = (places >= left_padding.begins(last)[:, None]) & (places < number)
    ends = places[number - queries : number] if queries <= number else None
    if ends is None or not torch.equal(seen, (tokens[:, None, None] & (places <= ends[:, None])).expand_as(seen)):
        raise positions_refused(mechanism, f"the mask of {queries} queries among {keys} places does not tell them")
    return number, {"is_causal": True, "key_mask": tokens[:, :number]}


def positions_refused(mechanism: Any, why: str) -> Unsupported:
    """The error for a mechanism that counts positions from the first token, where they are not known."""
    return Unsupported(
        f"{mechanism!r} counts positions from a text's first token (traits.positions is 'absolute'), and {why}. What "
        "would work: use_cache=False"
    )


def asserted(visibility: Visibility) -> Visibility:
    """The visibility without its condition: a compiled graph fails at run time where that does not hold."""
    if visibility.valid is not None:
        assert_unpacked(visibility.valid)
    return replace(visibility, valid=None)


def assert_unpacked(valid: Bool[Tensor, ""]) -> None:
    """Let a compiled graph fail at run time where ``valid`` is False."""
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        valid,
        "sequences packed in one row, or a mask of the model's own, in a compiled swapped model. What would work: "
        "the model uncompiled, or with position_ids a mechanism that takes masks, as Softmax or ReLUAttention",
    )


def band(visibility: Visibility, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """The order and the window of the fields as a mask of one text; its last query is at its last key."""
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    unpacked = replace(visibility, sequences=None)
    return predicted(unpacked, torch.arange(keys, device=device) - rows, 0)


def predicted(visibility: Visibility, distance: Tensor, row: int) -> Tensor:
    """A row of the mask that the fields describe."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if visibility.is_causal:
        visible = visible & (distance <= 0)
    if visibility.keys_left is not None:
        visible = visible & (distance >= -visibility.keys_left)
    if visibility.keys_right is not None:
        visible = visible & (distance <= visibility.keys_right)
    ids = visibility.sequences
    return visible if ids is None else visible & (ids == ids[:, row : row + 1])


def assert_contiguous(tokens: Bool[Tensor, "batch all"]) -> None:
    """Let a compiled graph fail at run time where there is something else between the tokens of a row."""
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        contiguous(tokens),
        "an attention_mask with something between the tokens of a row, in a compiled swapped model that counts "
        "positions by tokens. What would work: padding on one side, or the model uncompiled",
    )


def contiguous(tokens: Bool[Tensor, "batch all"]) -> Bool[Tensor, ""]:
    """Whether the tokens of every row stand beside one another."""
    tokens = tokens.bool()
    begins = tokens[:, 1:] & ~tokens[:, :-1]
    return (begins.sum(-1) + tokens[:, 0] <= 1).all()


def within_window(mechanism: Any, keys_left: int | None, keys_right: int | None) -> bool:
    """Whether the mechanism sees no more than the model's window of ``keys_left`` and ``keys_right`` keys."""
    if keys_left is None and keys_right is None:
        return True
    if not isinstance(mechanism, Local):
        return False
    left, right = mechanism.sides
    return (keys_left is None or left <= keys_left) and (keys_right is None or right <= keys_right)


def window_refusal(mechanism: Any, keys_left: int | None, keys_right: int | None) -> str:
    """The message that a mechanism cannot serve a layer with a window."""
    sides = [f"{n} tokens {where}" for n, where in ((keys_left, "back"), (keys_right, "ahead")) if n is not None]
    least = min(n for n in (keys_left, keys_right) if n is not None)
    return (
        f"the layer sees {' and '.join(sides)} only, and {mechanism!r} would see more. What would work: "
        f"Local(window={least}) or less, Softmax(), or keeping the layer"
    )


def crossing_refusal(mechanism: Any) -> str:
    """The reason why a mechanism cannot attend to another sequence; empty if it can."""
    if not mechanism.traits.cross:
        return f"the layer attends to another sequence, and {mechanism!r} cannot (traits.cross)"
    if counts_from_the_query(mechanism):
        return f"the layer attends to another sequence, in which {mechanism!r} has no place to begin"
    return ""


def counts_from_the_query(mechanism: Any) -> bool:
    """Whether a mechanism's keys are those near the query's own position, which has no meaning in another sequence."""
    if isinstance(mechanism, ByLength):
        return counts_from_the_query(mechanism.short) or counts_from_the_query(mechanism.long)
    if isinstance(mechanism, Hybrid):
        return counts_from_the_query(mechanism.near)
    if isinstance(mechanism, Adapted):
        return counts_from_the_query(mechanism.mechanism)
    return isinstance(mechanism, Local | BlockLocal)
