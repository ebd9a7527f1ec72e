"""Computes the encoder attention of Longformer and LED in tiles: a window, and global tokens under the same normaliser.

transformers computes scores for whole chunks, copies them several times into columns of (tokens, window + 1), and
keeps these for the backward pass. Its encoders make a mask of all pairs, to read one row of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import sqrt
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, pad
from transformers import masking_utils
from transformers.models.led import modeling_led
from transformers.models.longformer import modeling_longformer

from fast_attention import core
from fast_attention.engine import tiles
from fast_attention.engine.tiles import FAR, ROWS, Plan
from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls

SHORTEST = 128  # tokens


def attention_form(self: Any) -> tuple[str, int]:
    """Describe the form that runs with the compiled core, and from how many tokens on."""
    return f"window of {self.one_sided_attn_window_size} each side and global tokens, in tiles", SHORTEST


def attention_forward(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None, is_global_attn: bool | None = None, output_attentions: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Same as transformers' module, which is called where attention matrices are returned."""
    if (
        not _pays(hidden_states.shape[1]) or not hidden_states.is_cpu or output_attentions
        or core.unavailable()
        or is_index_masked is None or is_index_global_attn is None or self.dropout >= 1.0
    ):  # fmt: skip
        base: Any = type(self).__bases__[0]
        return base.forward(
            self, hidden_states, attention_mask, is_index_masked, is_index_global_attn, is_global_attn,
            output_attentions,
        )  # fmt: skip
    rows = zip(hidden_states.unbind(), is_index_masked.unbind(), is_index_global_attn.unbind(), strict=True)
    outputs = [_one_sequence(self, *row) for row in rows]
    return (torch.stack(outputs) if len(outputs) > 1 else outputs[0][None],)


def _one_sequence(
    module: Any, x: Float[Tensor, "length width"], masked: Bool[Tensor, "length"], is_global: Bool[Tensor, "length"]
) -> Float[Tensor, "length width"]:
    """Attention over one sequence, without the padding at its ends; padded positions get zeros."""
    length, tokens = len(x), (~masked).nonzero()[:, 0]
    if len(tokens) == 0:
        return pad(module.value(x[:0]), (0, 0, 0, length))
    first, stop = int(tokens[0]), int(tokens[-1]) + 1
    x, masked, is_global = x[first:stop], masked[first:stop], is_global[first:stop]
    padding = masked if len(tokens) < len(x) else None
    columns = is_global.nonzero()[:, 0] if is_global.any() else None
    rate = float(module.dropout) if module.training else 0.0
    q, k, v = (_heads(module, project(x)) for project in (module.query, module.key, module.value))
    near: Any = {"reach": module.one_sided_attn_window_size, "dropout": rate}
    near["columns"] = () if columns is None else intervals(columns.tolist())
    near["seed"] = int(torch.randint(2**62, ())) if rate else 0
    seen = None if padding is None else ~padding[None]
    out = attend(q, k, v, seen, None, None, None, scale=1 / sqrt(module.head_dim), **near).transpose(0, 1).flatten(1)
    if padding is not None:
        out = out.masked_fill(padding[:, None], 0.0)
    if columns is not None:
        out = out.index_copy(0, columns, _global_rows(module, x, columns, padding, rate).to(out.dtype))
    return out if len(out) == length else pad(out, (0, 0, first, length - stop))


Interval = tuple[int, int]  # first position, and one behind the last


def intervals(positions: list[int]) -> tuple[Interval, ...]:
    """Sorted positions as runs of neighbours."""
    runs = list[Interval]()
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return tuple(runs)


@lru_cache(64)
def plan(length: int, reach: int, columns: tuple[Interval, ...]) -> Plan:
    """The plan of a window of ``reach`` keys each side and of global keys, which a window that holds them sees once.

    A tile's ranges are global keys, and between them what is near.
    """
    rows, ranges = list[list[int]](), list[list[int]]()
    for row in range(0, length, ROWS):
        end, first = min(row + ROWS, length), len(ranges)
        at, high = max(row - reach, 0), min(end + reach, length)
        for start, stop in columns:
            if at < min(start, high):
                ranges.append([at, min(start, high), -reach, reach, 0, 1])
            ranges.append([start, stop, -FAR, FAR, 0, 1])
            at = max(at, stop)
        if at < high:
            ranges.append([at, high, -reach, reach, 0, 1])
        rows.append([row, end, first, len(ranges)])
    return Plan(torch.tensor([[rows]], dtype=torch.int32), torch.tensor(ranges, dtype=torch.int32))


attend = tiles.operation(None, lambda q, k, **seen: plan(q.shape[-2], **seen))


def _heads(module: Any, x: Float[Tensor, "length width"]) -> Float[Tensor, "heads length head"]:
    return x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(0, 1)


def _global_rows(
    module: Any, x: Float[Tensor, "length width"], columns: Int[Tensor, "number"], padding: Tensor | None, rate: float
) -> Float[Tensor, "number width"]:
    """The outputs of global tokens, which see all tokens, by projections of their own.

    A few queries are projected to where tokens are, which is cheaper than to project all tokens:
    ``q (W x + b) = (q W) x + q b``, and ``sum p (W x + b) = W sum p x + b sum p``.
    """
    q = _heads(module, module.query_global(x[columns])) / sqrt(module.head_dim)
    parts, heads = (module.key_global, module.value_global), module.num_heads
    plain = all(type(part) is nn.Linear and not part._forward_hooks and not part._forward_pre_hooks for part in parts)
    plain = plain and x.dtype.itemsize >= 4 and not torch.is_autocast_enabled("cpu")
    if not plain or 2 * len(columns) * heads > x.shape[-1]:
        k, v = (_heads(module, part(x)) for part in parts)
        out = _weights(q @ k.mT, padding, rate) @ v
    else:
        key, value = ((part.weight.unflatten(0, (heads, -1)), part.bias.view(heads, 1, -1)) for part in parts)
        weights = _weights((q @ key[0]) @ x.T + (q * key[1]).sum(-1, keepdim=True), padding, rate)
        out = (weights @ x) @ value[0].mT + weights.sum(-1, keepdim=True) * value[1]
    return out.transpose(0, 1).flatten(1)


def _weights(scores: Tensor, padding: Tensor | None, rate: float) -> Tensor:
    """Softmax over all keys but padding, with dropout."""
    scores = scores if padding is None else scores.masked_fill(padding, torch.finfo(scores.dtype).min)
    return dropout(torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype), rate)


class LongformerSelfAttention(modeling_longformer.LongformerSelfAttention):
    """Longformer's attention with the same parts."""

    exact_form = attention_form
    forward = attention_forward


class LEDEncoderSelfAttention(modeling_led.LEDEncoderSelfAttention):
    """The attention of LED's encoder with the same parts. Its decoder is left alone, whose attention is full."""

    exact_form = attention_form
    forward = attention_forward


def _pays(length: int) -> bool:
    return not traced() and calls.runs_ours(length >= SHORTEST)


def _bidirectional_mask(*, inputs_embeds: Tensor, attention_mask: Tensor, **settings: Any) -> Any:
    """Same as transformers' function, with one row of the mask for all queries."""
    queries = inputs_embeds[:, :1] if _pays(attention_mask.shape[-1]) else inputs_embeds
    return masking_utils.create_bidirectional_mask(inputs_embeds=queries, attention_mask=attention_mask, **settings)


def _inverted_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Same as transformers' function, with one row of the mask for all queries."""
    return modeling_led._prepare_4d_attention_mask_inverted(mask, dtype, 1 if _pays(mask.shape[-1]) else None)


def _calling(function: Any, **names: Any) -> Callable[..., Any]:
    """A function of transformers' that calls other functions by these global names."""
    code, scope = function.__code__, {**function.__globals__, **names}
    changed = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__, changed.__doc__ = function.__kwdefaults__, function.__doc__
    return changed


class LongformerModel(modeling_longformer.LongformerModel):
    """Longformer with the same parts, whose mask has one row."""

    forward = _calling(modeling_longformer.LongformerModel.forward, create_bidirectional_mask=_bidirectional_mask)


class LEDEncoder(modeling_led.LEDEncoder):
    """LED's encoder with the same parts, whose mask has one row."""

    forward = _calling(modeling_led.LEDEncoder.forward, _prepare_4d_attention_mask_inverted=_inverted_mask)
