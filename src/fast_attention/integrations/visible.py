"""Visibility of a call's tokens in structured form, read from masks, mask functions and the borders of packed rows.

What a mask function lets each token see is found by a number of evaluations linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fast_attention import left_padding, packed
from fast_attention.engine import masks
from fast_attention.engine.tracing import exporting
from fast_attention.integrations import calls
from fast_attention.mechanism import Unsupported
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.packed import Packing

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # max_length_q and max_length_k follow from these
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


def contiguous(tokens: Bool[Tensor, "batch all"]) -> bool:
    """Whether the tokens of every row stand beside one another; a compiled graph says yes, and fails where it is no."""
    tokens = tokens.bool()
    begins = tokens[:, 1:] & ~tokens[:, :-1]
    holds = (begins.sum(-1) + tokens[:, 0] <= 1).all()
    if not torch.compiler.is_compiling():
        return bool(holds)
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
        holds,
        "an attention_mask with something between the tokens of a row, in a compiled swapped model that counts "
        "positions by tokens. What would work: padding on one side, or the model uncompiled",
    )
    return True


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


# Mask functions of transformers ---------------------------------------------------------------------------------------


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

    def pairs(self, sees: Sees) -> Callable[[Tensor, Tensor], Tensor]:
        """A mask function of queries and keys alone, for each row of the batch."""
        batch = torch.arange(self.batch, device=self.device)[:, None]
        head = torch.zeros((), dtype=torch.long, device=self.device)
        return lambda queries, keys: torch.as_tensor(sees(batch, head, queries, keys))


def up_to(attention_mask: Tensor, keys: int) -> Tensor:
    """A mask of tokens for the keys so far, as transformers reads it: by position, and no token beyond its end."""
    size = attention_mask.shape[-1]
    return attention_mask if size == keys else torch.nn.functional.pad(attention_mask, (0, keys - size))


def read(sees: Sees, positions: Positions, tokens: Tensor | None, dense: Callable[[], Tensor]) -> Visibility:
    """The structure of a mask function, read from all pairs of neighbours and from the first, middle and last row.

    Args:
        sees: The function.
        positions: Its queries and keys.
        tokens: Which positions so far are tokens, (B, all).
        dense: Makes the dense mask.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if sees in (causal_mask_function, bidirectional_mask_function):
        shifted = replace(positions, batch=1, first_query=positions.first_query - positions.first_key, first_key=0)
        return replace(_known(sees, shifted), tokens=tokens, dense=dense)
    return replace(_structure(sees, positions), tokens=tokens, dense=dense)


def _structure(sees: Sees, positions: Positions) -> Visibility:
    """The structure that ``read`` finds in the function."""
    pairs = positions.pairs(sees)

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return pairs(queries, keys).expand(positions.batch, len(keys))

    result = Visibility(no_mask)
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
        keys_left = _leading(probes[last][0, : offsets[last]].flip(0))
        keys_right = None if result.is_causal else _leading(probes[0][0, offsets[0] + 1 :])
        result = replace(result, keys_left=keys_left, keys_right=keys_right)
    elif positions.first_query != positions.first_key or positions.queries != positions.keys:
        return replace(result, complete=False)
    else:
        begins = torch.nn.functional.pad(result.sequences.diff(dim=-1) > 0, (1, 0))
        first = torch.where(begins, rows - rows[0], 0).cummax(-1).values + rows[0]
        result = replace(result, **_windows(pairs, rows, first, is_causal=result.is_causal))
        nearest = first if result.keys_left is None else torch.maximum(first, rows - result.keys_left)
        keys_right = first if result.keys_right is None else torch.maximum(first, rows - result.keys_right)
        reached = pairs(rows, nearest).all()  # each the first that it may see
        if not result.is_causal:
            reached = reached & pairs(keys_right, rows).all()
        if not bool(reached):
            return replace(result, complete=False)
        for side, queries, keys in (
            (result.keys_left, rows, rows - (result.keys_left or 0) - 1),
            (result.keys_right, rows - (result.keys_right or 0) - 1, rows),
        ):
            inside = torch.minimum(queries, keys) >= first
            if side is not None and bool((pairs(queries.clamp(min=0), keys.clamp(min=0)) & inside).any()):
                return replace(result, complete=False)  # something is seen beyond the window
    distance = columns - positions.first_key
    matches = all(bool((predicted(result, distance - offsets[i], i) == row).all()) for i, row in probes.items())
    reaches = positions.first_query + positions.queries == positions.first_key + positions.keys  # our sense of causal
    return replace(result, complete=matches and (reaches or not result.is_causal))


def _windows(
    pairs: Callable[[Tensor, Tensor], Tensor], rows: Tensor, first: Tensor, *, is_causal: bool
) -> dict[str, int | None]:
    """How far queries see back, and ahead, in packed texts: read at the last token of the longest text."""
    depth = (rows - first).flatten()
    place = int(depth.argmax())
    text, end = place // len(rows), place % len(rows)
    earlier, last = rows[end - int(depth[place]) : end].flip(0), rows[end : end + 1]

    def seen(queries: Tensor, keys: Tensor) -> int | None:
        return _leading(pairs(queries, keys).expand(len(first), len(earlier))[text])

    return {"keys_left": seen(last, earlier), "keys_right": None if is_causal else seen(earlier, last)}


_known = functools.lru_cache(256)(_structure)  # of functions that depend on distances alone


def no_mask() -> Tensor:
    """Refuse to make a dense mask, of structures and packed rows that have none."""
    raise AssertionError("there is no dense mask")


def exported(sees: Sees, longest: int, tokens: Tensor | None, dense: Callable[[], Tensor]) -> Visibility:
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

    The declared ``window`` has the token itself in it if the mask is causal, and not otherwise.
    """
    keys_left = None if window is None else window - 1 if is_causal else window
    last = positions.first_query + positions.queries - 1
    has_past = is_causal and positions.first_key > 0  # a state may hold the keys before
    reach = keys_left if has_past and keys_left is not None and last > keys_left else None
    if keys_left is not None and last - positions.first_key <= keys_left:
        keys_left = None  # the first of all keys is still in the last query's window
    result = Visibility(
        dense, tokens, is_causal, keys_left=keys_left, keys_right=None if is_causal else keys_left, reach=reach
    )
    pairs, columns, rows = positions.pairs(sees), positions.columns(), positions.rows()
    valid = torch.ones((), dtype=torch.bool, device=positions.device)
    for i in (0, positions.queries // 2, positions.queries - 1):
        row = pairs(rows[i : i + 1], columns)
        valid = valid & (row == predicted(result, columns - positions.first_query - i, i)).all()
    if positions.queries > 1 and keys_left != 0:
        valid = valid & pairs(rows[1:], rows[1:] - 1).all()
    if has_past and keys_left is None:
        valid = valid & pairs(rows, (rows - (reach or last)).clamp(min=0)).all()
    return replace(result, valid=valid)


def reach(sees: Sees, positions: Positions) -> int | None:
    """How many of all earlier tokens the first and the last query both see without a gap; None: all of them."""
    from transformers.masking_utils import causal_mask_function

    if sees is causal_mask_function:
        return None
    pairs = positions.pairs(sees)
    reached: list[int] = []
    for query in {positions.first_query, positions.first_query + positions.queries - 1}:
        row = torch.tensor([query], device=positions.device)
        earlier = torch.arange(query, device=positions.device).flip(0)
        count = _leading(pairs(row, earlier).expand(positions.batch, -1).all(0))
        reached += [] if count is None else [count]
    return min(reached, default=None)


def _leading(side: Tensor) -> int | None:
    """How many keys of a row are visible before the first that is not; None: all of them."""
    return None if bool(side.all()) else int((~side).int().argmax())


# Packed rows ----------------------------------------------------------------------------------------------------------
#
# Several texts in one row, without padding, as transformers' flattening collators make them. transformers says so by
# ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by ``seq_idx``, or by ``position_ids`` that begin anew.


def borders_in(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read a description of packed rows from a model's keyword arguments.

    Raises:
        Unsupported: They say something in compiled code, which cannot read it.
    """
    borders = {name: arguments[name] for name in BORDERS if arguments.get(name) is not None}
    if borders and torch.compiler.is_compiling():
        raise Unsupported(
            f"{', '.join(borders)} in a compiled swapped model, which cannot read their numbers. What would work: the "
            "model uncompiled, or position_ids alone with a causal model and a mechanism that takes masks, as Softmax"
        )
    return borders


def packed_texts(q: Tensor, k: Tensor, extra: Mapping[str, Any], visibility: Visibility, cached: int) -> Packing | None:
    """The packed texts that an attention call is told of by ``extra``, or a call of the model around it.

    Texts run on from row to row; ``cached``: the tokens in a cache that the queries continue.

    Raises:
        Unsupported: The queries continue a cache, which holds the texts before as one.
        ValueError: The borders do not rise, or do not end at the number of tokens.
    """
    queries, keys = q.shape[0] * q.shape[-2], k.shape[0] * k.shape[-2]
    borders = borders_in(extra)
    if torch.compiler.is_compiling():
        _assert_one_text(q, k, extra, visibility)
        return None
    if not borders:  # some models do not pass all arguments on, and in the backward pass the model's call is over
        noted = (*calls.packed(), *visibility.borders)
        borders = next((each for each in noted if _length(each) == queries), {})
    if not borders:
        return None
    if cached:
        raise Unsupported(
            f"{q.shape[-2]} new tokens behind {cached} in a cache, in a packed row ({', '.join(borders)}): packed "
            "texts cannot be decoded. What would work: generate from a padded batch, one text in a row"
        )
    if "seq_idx" in borders and len(borders) == 1:
        numbers = borders["seq_idx"]
        if queries != keys or numbers.shape[-1] != q.shape[-2] or numbers.numel() not in (queries, q.shape[-2]):
            raise ValueError(f"seq_idx has shape {tuple(numbers.shape)}; it must be {(len(q), q.shape[-2])}")
        return numbered(numbers.expand(len(q), -1))
    first = borders.get("cu_seq_lens_q", borders.get("cu_seq_lens_k"))
    assert first is not None
    return packed.packing((first, borders.get("cu_seq_lens_k", first)), None, queries, keys, name="cu_seq_lens")


def numbered(texts: Int[Tensor, "batch length"]) -> Packing:
    """The packed texts of rows in which every token has its text's number; no text runs on into the next row."""
    lengths = tuple(n for row in texts for n in row.unique_consecutive(return_counts=True)[1].tolist())
    return Packing(lengths, lengths)


def one_row(x: Tensor, places: Tensor | None = None) -> Tensor:
    """The tokens of rows (B, H, L, E), one behind another, as one row (1, H, T, E): all, or those at some places."""
    row = x if len(x) == 1 else x.transpose(0, 1).flatten(1, 2)[None]
    return row if places is None else row[:, :, places]


def from_position_ids(position_ids: Tensor | None, batch: int, length: int) -> Packing | None:
    """The packed texts of rows whose positions begin anew: where one is smaller than that before it, a text begins."""
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[-1] != length or length < 2:
        return None
    steps = position_ids.diff(dim=-1)
    if not bool((steps < 0).any()):
        return None
    texts = torch.nn.functional.pad((steps <= 0).cumsum(-1), (1, 0))
    return numbered(texts.expand(batch, -1))


def _assert_one_text(q: Tensor, k: Tensor, extra: Mapping[str, Any], visibility: Visibility) -> None:
    """Let a compiled graph fail where positions begin anew that no mask of transformers looks at: in encoders."""
    ids = extra.get("position_ids")
    ids = calls.position_ids() if ids is None else ids
    looked_at = visibility.is_causal or visibility.tokens is not None or exporting()
    if ids is not None and not looked_at and ids.ndim == 2 and ids.shape[-1] == q.shape[-2] == k.shape[-2]:
        assert_unpacked((ids.diff(dim=-1) >= 0).all())


def _length(borders: Mapping[str, Tensor]) -> int:
    """The number of queries that borders are about."""
    border = borders.get("cu_seq_lens_q", borders.get("cu_seq_lens_k"))
    return borders["seq_idx"].numel() if border is None else int(border[-1])
