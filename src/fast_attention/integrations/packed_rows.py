"""Packed rows in swapped models: several texts in one row, without padding, as transformers' flattening collators do.

transformers says so by ``cu_seq_lens_q`` and ``cu_seq_lens_k``, by ``seq_idx``, or by ``position_ids`` that begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fast_attention import packed
from fast_attention.engine.tracing import exporting
from fast_attention.integrations import calls
from fast_attention.integrations.visible import Visibility, assert_unpacked, band
from fast_attention.mechanism import Attention, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.packed import Packing

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # max_length_q and max_length_k follow from these


class Call(NamedTuple):
    """A call of a layer's mechanism."""

    bound: Bound
    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    dropout: float = 0.0
    sinks: Tensor | None = None
    cache: Any = None  # where the mechanism's state is kept
    changes: Mapping[str, Tensor] = MappingProxyType({})  # arguments that alter the scores, but sinks


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


def declared(q: Tensor, k: Tensor, extra: Mapping[str, Any], visibility: Visibility, cached: int) -> Packing | None:
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


def texts_of(borders: Mapping[str, Tensor]) -> Packing:
    """The packed texts of one row whose padding was skipped, from where each begins and the last one ends."""
    lengths = tuple(borders["cu_seq_lens_q"].diff().tolist())
    return Packing(lengths, lengths)


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


def run(call: Call, texts: Packing, *, windowed: bool = False) -> Tensor:
    """Attend within each text of the rows; ``windowed``: by a mask of the window, which the mechanism has not."""
    bound, q, k, v, visibility, dropout, sinks, *_ = call
    batch, key_mask = len(q), visibility.key_mask(k.shape[-2])

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        order: Any = {"is_causal": visibility.is_causal}
        if windowed:
            order = {"attn_mask": band(visibility, q.shape[-2], k.shape[-2], q.device)}
        return bound(q, k, v, **order, key_mask=key_mask, dropout=dropout, enable_gqa=True, sinks=sinks)

    key_mask = None if key_mask is None else key_mask.reshape(1, -1)
    kernel = None
    if not windowed and dropout == 0.0 and sinks is None and isinstance(bound.mechanism, Attention):
        kernel = packed.packed_kernel(bound.mechanism, bound.w, is_causal=visibility.is_causal)
    out = packed.attend(attend, one_row(q), one_row(k), one_row(v), texts, key_mask, kernel=kernel)
    return out if batch == 1 else out[0].unflatten(1, (batch, -1)).transpose(0, 1)


def per_sequence_mask(mask: Tensor, texts: Packing, batch: int) -> Tensor:
    """A dense mask (..., L, S), True = may be seen or additive, in which texts do not see each other."""
    numbers = [
        torch.repeat_interleave(torch.tensor(lengths, device=mask.device)).view(batch, 1, -1)
        for lengths in (texts.queries, texts.keys)
    ]
    same = numbers[0][..., :, None] == numbers[1][..., None, :]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, float("-inf"))


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
