"""The attention functions of exact speed-ups: what the model ran before, or its windows, texts and scores in tiles."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fast_attention import core, packed
from fast_attention.engine import heads, tiles
from fast_attention.engine.offsets import Positions
from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls, packed_rows, probing
from fast_attention.integrations.attention import SINKS, changing
from fast_attention.integrations.exact import masks
from fast_attention.integrations.visible import Visibility, no_mask
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.local import local_attention
from fast_attention.packed import Packing

BIAS, CAP, POSITIONS = "position_bias", "softcap", "positions"
SUPPORTED = (CAP, SINKS, POSITIONS)  # what our forms compute of what alters scores; positions: a bias that is no tensor


def attention(
    before: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run the model's own attention function, or a form of ours where the mask is a ``Visibility``."""

    def original(mask: Any, **changes: Any) -> tuple[Tensor, Tensor | None]:
        function: Any = eager(type(module)) if before == "eager" else ALL_ATTENTION_FUNCTIONS[before]
        return function(module, query, key, value, mask, **{**given, **changes})

    if traced():
        return original(attention_mask)
    seen = attention_mask if isinstance(attention_mask, Visibility) else None
    is_causal = given.get("is_causal")
    if probing.recording() is not None:
        causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
        return probing.record(module, query, key, value, seen, changed(given), is_causal=causal), None
    if seen is None and attention_mask is None and query.shape[2] == key.shape[2]:
        borders = next(iter(calls.packed()), None)  # of a packed row, for which the model makes no mask
        seen = None if borders is None else Visibility(no_mask, packing=packed_rows.texts_of(borders))
    changes = changed(given, seen)
    positions, cap = changes.get(POSITIONS), changes.get(CAP)
    takes = getattr(positions, "takes", None)  # of positions that were made before their mask was known
    runs = takes is None or takes(module, query, attention_mask if seen is None else seen)
    if positions is not None and runs and seen is None:
        seen = masks.of_keys(attention_mask, query, key)
    if positions is not None and not (runs and (attention_mask is None or seen is not None)):
        mask = attention_mask if seen is None else seen.dense()
        return original(mask, position_bias=positions.dense(query, key))
    if positions is not None and seen is None:
        causal = query.shape[2] > 1 and before == "sdpa"  # transformers' eager attention sees all without a mask
        causal = causal and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        seen = Visibility(no_mask, is_causal=causal)
        if causal:  # what follows in a cache of a fixed size is empty, as transformers' function has it
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if seen is None:
        return original(attention_mask)
    has_others = seen.packing is not None and query.shape[2] != key.shape[2]  # packed texts with other keys
    if not {*changes} <= {*SUPPORTED} or has_others or (cap is not None and core.unavailable()):
        return original(seen.dense())
    bias = None if positions is None or positions.layer is None else positions
    settings = {"scale": given.get("scaling"), "dropout": given.get("dropout", 0.0) if module.training else 0.0}
    return attend(query, key, value, seen, sinks=given.get(SINKS), bias=bias, cap=cap, **settings), None


def attend(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch groups keys width"],
    v: Float[Tensor, "batch groups keys values"],
    seen: Visibility,
    *,
    scale: float | None,
    dropout: float = 0.0,
    sinks: Float[Tensor, "heads"] | None = None,
    bias: Positions | None = None,
    cap: float | None = None,
) -> Float[Tensor, "batch queries heads values"]:
    """Softmax attention of the keys that each query sees: windows in tiles, each text of a row by itself.

    Args:
        q: Queries, the last of them at the last key; or of another sequence, and padding is among the keys.
        k: Keys; query head h reads those of head h // (heads / groups).
        v: Values.
        seen: Windows, texts and padding. Queries of padding give zeros.
        scale: Factor on the dot products; None means 1/sqrt(width).
        dropout: Probability with which an attention weight is dropped.
        sinks: A score of each head that takes weight and has no value.
        bias: What scores gain by the offset of the key, its position in a text less the query's.
        cap: A soft cap on scores.
    """
    call = functools.partial(_one_text, seen=seen, scale=scale, dropout=dropout, sinks=sinks, bias=bias, cap=cap)
    packing, tokens, query_tokens = seen.packing, None, None  # places of tokens in the rows; None: all places
    if packing is None and (seen.tokens is not None or seen.sequences is not None):
        size = torch.Size((k.shape[0], k.shape[2]))
        texts = masks.numbers(seen, size).flatten()
        tokens = None if seen.tokens is None else seen.tokens[:, -size[1] :].flatten().nonzero()[:, 0]
        packing, query_tokens = packed_rows.counted(texts if tokens is None else texts[tokens]), tokens
        if q.shape[2] != k.shape[2]:  # of another sequence, each of which is one text
            packing, query_tokens = Packing((q.shape[2],) * len(q), packing.keys), None
    if packing is None:
        return call(q, k, v).transpose(1, 2).contiguous()
    q_row, k_row, v_row = (packed_rows.one_row(x, at) for x, at in ((q, query_tokens), (k, tokens), (v, tokens)))
    out = packed.attend(call, q_row, k_row, v_row, packing, None)[0].transpose(0, 1)  # (tokens, heads, values)
    if query_tokens is not None:
        out = out.new_zeros(q.shape[0] * q.shape[2], *out.shape[1:]).index_copy(0, query_tokens, out)
    return out.reshape(q.shape[0], q.shape[2], *out.shape[1:])


def changed(extra: dict[str, Any], seen: Visibility | None = None) -> dict[str, Any]:
    """The arguments that alter the scores of a layer; positions that are no tensor have a name of their own."""
    changes = changing(extra, None if seen is None else seen.harmless)
    if BIAS in changes and not isinstance(changes[BIAS], Tensor):
        changes[POSITIONS] = changes.pop(BIAS)
    return changes


@functools.lru_cache(256)
def eager(kind: type) -> Callable[..., Any]:
    """The attention function in plain torch of the file that a class of attention modules is written in."""
    for base in kind.__mro__:
        forward = inspect.unwrap(base.__dict__.get("forward", eager))
        function = getattr(forward, "__globals__", {}).get("eager_attention_forward")
        function = function or getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise RuntimeError(f"{kind.__name__} has no eager_attention_forward in its file: call swap_back(model)")


def _one_text(
    q: Tensor, k: Tensor, v: Tensor, key_mask: None = None, *, seen: Visibility, scale: float | None, dropout: float,
    sinks: Tensor | None, bias: Positions | None, cap: float | None,
) -> Tensor:  # fmt: skip
    """Attention of texts of equal length, (B, H, L, E), each of which is one row."""
    keys_left, keys_right, causal = seen.keys_left, seen.keys_right, seen.is_causal
    length, keys = q.shape[-2], k.shape[-2]
    right = max(length, keys) - 1 if keys_right is None else keys_right  # the first query may be before all keys
    right = 0 if causal else right
    left = keys - 1 if keys_left is None else keys_left
    is_whole = left >= keys - 1 and (causal or keys_right is None or keys_right >= length - 1)
    if is_whole and sinks is None and bias is None and cap is None and (not causal or length == keys):
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, is_causal=causal and keys > 1, scale=scale, dropout_p=dropout, enable_gqa=grouped
        )
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    terms = (None, None)
    if not tiles.unsupported(q, k, v):
        if bias is not None:
            terms = bias(torch.arange(1 - length, keys) - (keys - length))
        settings: Any = {"left": left, "right": right, "first": 1 - length, "scale": factor, "cap": float(cap or 0.0)}
        if dropout:
            settings |= {"dropout": dropout, "seed": int(torch.randint(2**62, ()))}
        return _compiled(q, k, v, None, *terms, sinks, **settings)
    k, v = heads.repeated(q.shape[1], k=k, v=v)
    given: Any = {"is_causal": causal, "scale": scale, "dropout": dropout, "sinks": sinks, "bias": bias}
    return softmax_attention(q, k, v, **given) if is_whole else local_attention(q, k, v, window=(left, right), **given)


def _plan(q: Tensor, k: Tensor, *, left: int, right: int) -> tiles.Plan:
    return tiles.window(q.shape[-2], k.shape[-2], left, right)


_compiled = tiles.operation(None, _plan)


for _before, _name in masks.NAMES.items():
    _function: Callable[..., Any] = functools.partial(attention, _before)
    AttentionInterface.register(_name, _function)
