"""Spreads packed sequences: those that one process holds stay there, those over borders are spread one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention import packed
from fast_attention.packed import CuSeqlens, Lengths, Packing
from fast_attention.parallel.shards import Shards, shards
from fast_attention.parallel.strategy import Call, Sizes, Strategy


class Part(NamedTuple):
    """How many queries and keys of one packed sequence each process holds."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def is_over_a_border(self) -> bool:
        """Whether several processes hold some of it, and there are keys to see."""
        return any(self.keys) and len({rank for sizes in self for rank, n in enumerate(sizes) if n}) > 1


def parts(sequences: Packing, everyone: Shards) -> list[Part]:
    """The packed sequences, in their order, but for those without a token."""
    queries = _overlaps(sequences.queries, everyone.borders(keys=False))
    keys = _overlaps(sequences.keys, everyone.borders())
    return [Part(*each) for each in zip(queries, keys, strict=True) if any(map(sum, each))]


def longest(
    group: Any, queries: int, keys: int, device: torch.device, cu_seqlens: CuSeqlens | None, lengths: Lengths | None
) -> int:
    """The most queries or keys that a sequence has on all processes together, for weights that depend on it.

    Args:
        group: The ``ProcessGroup``, or the ``Shards`` of it.
        queries: Of this process.
        keys: Of this process.
        device: Where the numbers are exchanged.
        cu_seqlens: The borders of packed sequences, as in ``attend``.
        lengths: Instead of it the number of tokens of each sequence.
    """
    everyone = group if isinstance(group, Shards) else shards(group, queries, keys, device)
    sequences = packed.packing(cu_seqlens, lengths, everyone.length, everyone.num_keys)
    return max(everyone.length, everyone.num_keys) if sequences is None else sequences.longest


def _overlaps(lengths: tuple[int, ...], borders: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """How many tokens of each sequence every process holds."""
    ends = [0, *accumulate(lengths)]
    return [tuple(max(0, min(b, last) - max(a, first)) for first, last in borders) for a, b in pairwise(ends)]


def packed_over(inner: Strategy, sequences: Packing) -> Strategy:
    """The strategy of packed sequences, from that of one."""

    def attend(call: Call, *inputs: Tensor) -> Tensor:
        rank, each = call.shards.rank, parts(sequences, call.shards)
        sizes = [[part.queries[rank] for part in each], *([part.keys[rank] for part in each] for _ in inputs[1:])]
        cuts = [x.split(lengths, -2) for x, lengths in zip(inputs, sizes, strict=True)]
        masks = [None] * len(each) if call.key_mask is None else call.key_mask.split(sizes[-1], -1)
        outs: dict[int, Tensor] = {}
        for i, part in enumerate(each):
            if part.is_over_a_border:
                over = call._replace(shards=call.shards.of(*part), key_mask=masks[i])
                outs[i] = inner.attend(over, *(cut[i] for cut in cuts))
        whole = [i for i, part in enumerate(each) if not part.is_over_a_border]
        if whole:
            rows = [torch.cat([cut[i] for i in whole], -2) for cut in cuts]
            mask = None if call.key_mask is None else torch.cat([masks[i] for i in whole], -1)  # type: ignore[misc]
            lengths = Packing(*(tuple(size[i] for i in whole) for size in (sizes[0], sizes[-1])))
            out = _alone(call, rows, lengths, mask)
            outs |= dict(zip(whole, out.split(list(lengths.queries), -2), strict=True))
        return torch.cat([outs[i] for i in sorted(outs)], -2)

    def sends(call: Call, sizes: Sizes) -> int:
        over = [part for part in parts(sequences, call.shards) if part.is_over_a_border]
        return sum(inner.sends(call._replace(shards=call.shards.of(*part)), sizes) for part in over)

    return Strategy(f"packed, {inner.name}", f"for each sequence over a border: {inner.collectives}", attend, sends)


def _alone(call: Call, rows: list[Tensor], lengths: Packing, mask: Tensor | None) -> Tensor:
    """Outputs of the packed sequences that this process holds whole."""

    def run(*inputs: Tensor, key_mask: Tensor | None) -> Tensor:
        return call.mechanism(*inputs, call.w, is_causal=call.is_causal, key_mask=key_mask)

    act: Callable[..., Tensor] = packed.mix if len(rows) == 1 else packed.attend
    return act(run, *rows, lengths, mask)
