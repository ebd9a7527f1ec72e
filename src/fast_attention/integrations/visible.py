"""Finds out what transformers' mask functions let each token see, with a number of evaluations linear in the length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from fast_attention.engine import masks
from fast_attention.mechanism import Unsupported
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.packed import Packing

Sees = Callable[..., Tensor]  # (batch, head, query, key), positions that broadcast -> may the query see the key?


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
    back: int | None = None  # earlier keys that a query sees; None: all
    ahead: int | None = None  # later keys; None: all, or none if causal
    packing: Packing | None = None  # of rows whose borders were given beside the mask; texts run on from row to row
    complete: bool = True
    valid: Bool[Tensor, ""] | None = None  # in a compiled model: whether the fields hold, computed at each call

    @property
    def is_whole(self) -> bool:
        """Whether every query sees all tokens, or all up to its own."""
        is_one_text = self.sequences is None and self.packing is None and self.valid is None
        return is_one_text and self.complete and self.back is None and self.ahead is None

    def key_mask(self, keys: int) -> Bool[Tensor, "batch keys"] | None:
        """Which of the last ``keys`` positions are tokens."""
        return None if self.tokens is None else self.tokens[:, -keys:]

    def to(self, dtype: torch.dtype) -> Visibility:
        """Itself: MPT casts its mask, whatever it is."""
        return self


@dataclass(frozen=True)
class Positions:
    """The positions of the queries and keys that a mask is about."""

    batch: int
    first_query: int
    queries: int
    first_key: int
    keys: int
    device: torch.device

    def columns(self) -> Int[Tensor, "keys"]:
        """The positions of all keys."""
        return torch.arange(self.first_key, self.first_key + self.keys, device=self.device)

    def rows(self) -> Int[Tensor, "queries"]:
        """The positions of all queries."""
        return torch.arange(self.first_query, self.first_query + self.queries, device=self.device)


def given(module: nn.Module, q: Tensor, k: Tensor, mask: Any, is_causal: bool | None) -> Visibility:
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


def read(sees: Sees, positions: Positions, tokens: Tensor | None, dense: Callable[[], Tensor]) -> Visibility:
    """The structure of a mask function, read from all pairs of neighbours and from the first, middle and last row.

    Args:
        sees: The function.
        positions: Its queries and keys.
        tokens: Which positions so far are tokens, (B, all).
        dense: Makes the dense mask.
    """
    if sees in (causal_mask_function, bidirectional_mask_function):
        return replace(_known(sees, replace(positions, batch=1)), tokens=tokens, dense=dense)
    return replace(_structure(sees, positions), tokens=tokens, dense=dense)


def _structure(sees: Sees, positions: Positions) -> Visibility:
    """What ``read`` finds in the function."""
    batch = torch.arange(positions.batch, device=positions.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=positions.device)

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.as_tensor(sees(batch, head, queries, keys)).expand(positions.batch, len(keys))

    result = Visibility(_unmade)
    columns, rows = positions.columns(), positions.rows()
    if positions.queries > 1:
        causal = not bool(visible(rows[:-1], rows[:-1] + 1).any())
        separate = ~visible(rows[1:], rows[1:] - 1)
        sequences = torch.nn.functional.pad(separate.cumsum(-1), (1, 0)) if bool(separate.any()) else None
        result = replace(result, is_causal=causal, sequences=sequences)
    else:  # a step of decoding, or one query that sees all keys of another sequence
        result = replace(result, is_causal=positions.first_query == positions.first_key + positions.keys - 1)
    probes = {i: visible(rows[i : i + 1], columns) for i in {0, positions.queries // 2, positions.queries - 1}}
    offsets = {i: positions.first_query + i - positions.first_key for i in probes}
    if result.sequences is None:
        last = max(probes)
        back = _leading(probes[last][0, : offsets[last]].flip(0))
        ahead = None if result.is_causal else _leading(probes[0][0, offsets[0] + 1 :])
        result = replace(result, back=back, ahead=ahead)
    elif positions.first_query != positions.first_key or positions.queries != positions.keys:
        return replace(result, complete=False)
    else:
        begins = torch.nn.functional.pad(result.sequences.diff(dim=-1) > 0, (1, 0))
        first = torch.where(begins, rows - rows[0], 0).cummax(-1).values + rows[0]
        reached = torch.as_tensor(sees(batch, head, rows, first)).all()  # each the first of its own sequence
        if not result.is_causal:
            reached = reached & torch.as_tensor(sees(batch, head, first, rows)).all()
        if not bool(reached):
            return replace(result, complete=False)
    distance = columns - positions.first_key
    matches = all(bool((_predicted(result, distance - offsets[i], i) == row).all()) for i, row in probes.items())
    reaches = positions.first_query + positions.queries == positions.first_key + positions.keys  # our sense of causal
    return replace(result, complete=matches and (reaches or not result.is_causal))


_known = functools.lru_cache(256)(_structure)  # of functions that depend on positions alone


def _unmade() -> Tensor:
    raise AssertionError("the structure of a mask has no dense form of its own")


def traced(sees: Sees, longest: int, tokens: Tensor | None, dense: Callable[[], Tensor]) -> Visibility:
    """The structure of a mask function while a model is exported, read at ``longest`` tokens outside of the trace.

    Raises:
        Unsupported: The function depends on the inputs, as for sequences packed in one row.
    """
    try:
        with _disable_current_modes():
            result = read(sees, Positions(1, 0, longest, 0, longest, torch.device("cpu")), None, dense)
    except Exception as error:  # numbers of the trace were asked for, which torch refuses in many ways
        raise Unsupported(
            "what a token sees depends on the inputs (packed sequences, or a model's own mask), which an exported "
            "program cannot follow: pass attention_mask, and no position_ids"
        ) from error
    return replace(result, tokens=tokens, complete=result.complete and result.sequences is None)


def declared(
    sees: Sees, positions: Positions, tokens: Tensor | None, dense: Callable[[], Tensor], *, is_causal: bool,
    window: int | None,
) -> Visibility:  # fmt: skip
    """The structure of a mask while a model is compiled, as transformers declares it. The graph computes at every call
    whether the declaration holds (``valid``); for sequences packed in one row it does not.

    Args:
        sees: The mask function.
        positions: Its queries and keys.
        tokens: Which positions so far are tokens, (B, all).
        dense: Makes the dense mask.
        is_causal: Whether the mask is declared causal, rather than bidirectional.
        window: The declared window: with the token itself if causal, without it otherwise.
    """
    back = None if window is None else window - 1 if is_causal else window
    if back is not None and positions.first_query + positions.queries - 1 - positions.first_key <= back:
        back = None  # the first of all keys is still in the last query's window
    result = Visibility(dense, tokens, is_causal, back=back, ahead=None if is_causal else back)
    batch = torch.arange(positions.batch, device=positions.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=positions.device)
    columns, rows = positions.columns(), positions.rows()
    valid = torch.ones((), dtype=torch.bool, device=positions.device)
    for i in (0, positions.queries // 2, positions.queries - 1):
        row = torch.as_tensor(sees(batch, head, rows[i : i + 1], columns))
        valid = valid & (row == _predicted(result, columns - positions.first_query - i, i)).all()
    if positions.queries > 1 and back != 0:
        valid = valid & torch.as_tensor(sees(batch, head, rows[1:], rows[1:] - 1)).all()
    return replace(result, valid=valid)


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
    return _predicted(unpacked, torch.arange(keys, device=device) - rows, 0)


def _predicted(visibility: Visibility, distance: Tensor, row: int) -> Tensor:
    """A row of the mask that the fields describe."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if visibility.is_causal:
        visible = visible & (distance <= 0)
    if visibility.back is not None:
        visible = visible & (distance >= -visibility.back)
    if visibility.ahead is not None:
        visible = visible & (distance <= visibility.ahead)
    ids = visibility.sequences
    return visible if ids is None else visible & (ids == ids[:, row : row + 1])


def _leading(side: Tensor) -> int | None:
    """How many keys of a row are visible before the first that is not; None: all of them."""
    return None if bool(side.all()) else int((~side).int().argmax())


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


def within_window(mechanism: Any, back: int | None, ahead: int | None) -> bool:
    """Whether the mechanism sees no more than the model's window of ``back`` and ``ahead`` keys."""
    if back is None and ahead is None:
        return True
    if not isinstance(mechanism, Local):
        return False
    left, right = mechanism.sides
    return (back is None or left <= back) and (ahead is None or right <= ahead)


def window_refusal(mechanism: Any, back: int | None, ahead: int | None) -> str:
    """The message that a mechanism cannot serve a layer with a window."""
    sides = [f"{n} tokens {where}" for n, where in ((back, "back"), (ahead, "ahead")) if n is not None]
    least = min(n for n in (back, ahead) if n is not None)
    return (
        f"the layer sees {' and '.join(sides)} only, and {mechanism!r} would see more. What would work: "
        f"Local(window={least}) or less, Softmax(), or keeping the layer"
    )


def counts_from_the_query(mechanism: Any) -> bool:
    """Whether a mechanism's keys are those near the query's own position, which has no meaning in another sequence."""
    if isinstance(mechanism, ByLength):
        return counts_from_the_query(mechanism.short) or counts_from_the_query(mechanism.long)
    return isinstance(mechanism, Local | BlockLocal)
