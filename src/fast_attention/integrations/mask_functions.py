"""Finds out what transformers' mask functions let each token see, with a number of evaluations linear in the length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from fast_attention.integrations.visible import Visibility, predicted
from fast_attention.mechanism import Unsupported

Sees = Callable[..., Tensor]  # (batch, head, query, key), positions that broadcast -> may the query see the key?


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
    if sees in (causal_mask_function, bidirectional_mask_function):
        shifted = replace(positions, batch=1, first_query=positions.first_query - positions.first_key, first_key=0)
        return replace(_known(sees, shifted), tokens=tokens, dense=dense)
    return replace(_structure(sees, positions), tokens=tokens, dense=dense)


def _structure(sees: Sees, positions: Positions) -> Visibility:
    """The structure that ``read`` finds in the function."""
    pairs = positions.pairs(sees)

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return pairs(queries, keys).expand(positions.batch, len(keys))

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
