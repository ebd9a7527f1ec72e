"""What transformers lets each token see, read off its mask functions in a number of steps linear in the length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fast_attention.mechanism import Unsupported

Sees = Callable[..., Tensor]  # (batch, head, query, key), positions that broadcast -> may the query see the key?


@dataclass(frozen=True)
class Visible:
    """What the queries of a call may see.

    ``dense`` makes the whole mask (B, 1, L, S), True = may be seen, for mechanisms that take one; where ``plain`` is
    False, only that says everything.
    """

    dense: Callable[[], Tensor]
    tokens: Bool[Tensor, "batch all"] | None = None  # which positions so far are tokens; None: all
    is_causal: bool = False
    sequences: Int[Tensor, "batch keys"] | None = None  # packed in one row: their numbers; None: one in each row
    back: int | None = None  # keys before itself that a query sees; None: all
    ahead: int | None = None  # keys behind itself; None: all, or none if causal
    plain: bool = True
    holds: Bool[Tensor, ""] | None = None  # in a compiled model: whether all of this is so, where it may not be

    def key_mask(self, keys: int) -> Bool[Tensor, "batch keys"] | None:
        """Which of the last ``keys`` positions are tokens."""
        return None if self.tokens is None else self.tokens[:, -keys:]


@dataclass(frozen=True)
class Positions:
    """Which queries and keys a mask is about, by their positions in the sequence."""

    batch: int
    first_query: int
    queries: int
    first_key: int
    keys: int
    device: torch.device

    def columns(self) -> Int[Tensor, "keys"]:
        """Of all keys."""
        return torch.arange(self.first_key, self.first_key + self.keys, device=self.device)

    def rows(self) -> Int[Tensor, "queries"]:
        """Of all queries."""
        return torch.arange(self.first_query, self.first_query + self.queries, device=self.device)


def read(sees: Sees, positions: Positions, tokens: Tensor | None, dense: Callable[[], Tensor]) -> Visible:
    """What a mask function allows: by all pairs of neighbours, and by the first, middle and last row.

    Args:
        sees: The function.
        positions: What it is asked about.
        tokens: Which positions so far are tokens, (B, all).
        dense: Makes the whole mask.
    """
    batch = torch.arange(positions.batch, device=positions.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=positions.device)

    def seen(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.as_tensor(sees(batch, head, queries, keys)).expand(positions.batch, len(keys))

    found = Visible(dense, tokens)
    columns, rows = positions.columns(), positions.rows()
    if positions.queries > 1:
        causal = not bool(seen(rows[:-1], rows[:-1] + 1).any())
        apart = ~seen(rows[1:], rows[1:] - 1)
        sequences = torch.nn.functional.pad(apart.cumsum(-1), (1, 0)) if bool(apart.any()) else None
        found = replace(found, is_causal=causal, sequences=sequences)
    else:  # a step of decoding, or a question to all of a memory
        found = replace(found, is_causal=positions.first_query == positions.first_key + positions.keys - 1)
    probes = {i: seen(rows[i : i + 1], columns) for i in {0, positions.queries // 2, positions.queries - 1}}
    at = {i: positions.first_query + i - positions.first_key for i in probes}
    if found.sequences is None:
        last = max(probes)
        back = _reach(probes[last][0, : at[last]].flip(0))
        ahead = None if found.is_causal else _reach(probes[0][0, at[0] + 1 :])
        found = replace(found, back=back, ahead=ahead)
    elif positions.first_query != positions.first_key or positions.queries != positions.keys:
        return replace(found, plain=False)
    else:
        begins = torch.nn.functional.pad(found.sequences.diff(dim=-1) > 0, (1, 0))
        first = torch.where(begins, rows - rows[0], 0).cummax(-1).values + rows[0]
        reach = torch.as_tensor(sees(batch, head, rows, first)).all()  # each the first of its own sequence
        if not found.is_causal:
            reach = reach & torch.as_tensor(sees(batch, head, first, rows)).all()
        if not bool(reach):
            return replace(found, plain=False)
    distance = columns - positions.first_key
    matches = all(bool((_predicted(found, distance - at[i], i) == row).all()) for i, row in probes.items())
    reaches = positions.first_query + positions.queries == positions.first_key + positions.keys  # our sense of causal
    return replace(found, plain=matches and (reaches or not found.is_causal))


def traced(sees: Sees, longest: int, tokens: Tensor | None, dense: Callable[[], Tensor]) -> Visible:
    """The same while a model is exported: read at ``longest`` tokens, outside of the trace, which holds no numbers.

    Raises:
        Unsupported: The function asks the inputs, as for sequences packed in one row.
    """
    try:
        with _disable_current_modes():
            found = read(sees, Positions(1, 0, longest, 0, longest, torch.device("cpu")), None, dense)
    except Exception as error:  # numbers of the trace were asked for, which torch refuses in many ways
        raise Unsupported(
            "what a token sees depends on the inputs (packed sequences, or a model's own mask), which an exported "
            "program cannot follow: pass attention_mask, and no position_ids"
        ) from error
    return replace(found, tokens=tokens, plain=found.plain and found.sequences is None)


def announced(
    sees: Sees, positions: Positions, tokens: Tensor | None, dense: Callable[[], Tensor], *, is_causal: bool,
    window: int | None,
) -> Visible:  # fmt: skip
    """The same while a model is compiled: as transformers announces the mask, of which the graph finds out at every
    call (``holds``) what ``read`` would have read. It is not so for sequences packed in one row above all.

    Args:
        sees: The function.
        positions: What it is asked about.
        tokens: Which positions so far are tokens, (B, all).
        dense: Makes the whole mask.
        is_causal: Whether the mask is announced as causal, rather than as one that sees both sides.
        window: The announced window: with the token itself if causal, without it otherwise.
    """
    back = None if window is None else window - 1 if is_causal else window
    if back is not None and positions.first_query + positions.queries - 1 - positions.first_key <= back:
        back = None  # the first of all keys is still in the last query's window
    found = Visible(dense, tokens, is_causal, back=back, ahead=None if is_causal else back)
    batch = torch.arange(positions.batch, device=positions.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=positions.device)
    columns, rows = positions.columns(), positions.rows()
    holds = torch.ones((), dtype=torch.bool, device=positions.device)
    for i in (0, positions.queries // 2, positions.queries - 1):
        row = torch.as_tensor(sees(batch, head, rows[i : i + 1], columns))
        holds = holds & (row == _predicted(found, columns - positions.first_query - i, i)).all()
    if positions.queries > 1 and back != 0:
        holds = holds & torch.as_tensor(sees(batch, head, rows[1:], rows[1:] - 1)).all()
    return replace(found, holds=holds)


def sure(found: Visible) -> Visible:
    """The same, relied on: a compiled graph ends with an error where it does not hold."""
    if found.holds is not None:
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            found.holds,
            "sequences packed in one row, or a mask of the model's own, in a compiled swapped model. What would work: "
            "the model uncompiled, or with position_ids a mechanism that takes masks, as Softmax or ReLUAttention",
        )
    return replace(found, holds=None)


def _predicted(found: Visible, distance: Tensor, row: int) -> Tensor:
    """A row of the mask as the fields tell it."""
    seen = torch.ones_like(distance, dtype=torch.bool)
    if found.is_causal:
        seen = seen & (distance <= 0)
    if found.back is not None:
        seen = seen & (distance >= -found.back)
    if found.ahead is not None:
        seen = seen & (distance <= found.ahead)
    return seen if found.sequences is None else seen & (found.sequences == found.sequences[:, row : row + 1])


def _reach(side: Tensor) -> int | None:
    """How many neighbours in a row are seen; None: all of them."""
    return None if bool(side.all()) else int((~side).int().argmax())
