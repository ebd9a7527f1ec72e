"""The mask and attention functions of exact speed-ups: what the model ran before, or its windows, texts and scores in
tiles.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fast_attention import core, packed
from fast_attention.engine import heads, offsets, tiles
from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls, probing, visible
from fast_attention.integrations.attention import SINKS, changing
from fast_attention.integrations.visible import Positions, Visibility, no_mask
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.local import local_attention
from fast_attention.packed import Packing

NAMES = {"sdpa": "exact_sdpa", "eager": "exact_eager"}  # what a config named, and what it names after the swap
FORMER = {ours: theirs for theirs, ours in NAMES.items()}
# Tokens below which every layer runs what it ran; twice as many in 16 bits, whose products torch computes faster.
# Measured on one thread, both in turns: T5, BLOOM, MPT, Gemma 2, gpt-oss and Llama's eager attention, whole passes.
SHORTEST = 256
PER_WINDOW = 1.33  # keys over those of a window with a tile's rows, from where on tiles pay: measured on 1, 2 threads
ROWS = 64  # queries of a tile
FAR = 1 << 17  # tokens at which a probe reads what a layer sees
BIAS, CAP, POSITIONS = "position_bias", "softcap", "positions"
SUPPORTED = (CAP, SINKS, POSITIONS)  # what our forms compute of what alters scores; positions: a bias that is no tensor


def shortest(dtype: torch.dtype) -> int:
    """Tokens below which every layer runs what it ran, in a dtype."""
    return SHORTEST if dtype.itemsize >= 4 else 2 * SHORTEST


def is_long(length: int, dtype: torch.dtype) -> bool:
    """Whether a layer may run a form of ours at a length; code that ``torch.compile`` traces must not ask."""
    return calls.runs_ours(length >= shortest(dtype))


def pays_from(keys_left: int | None, keys_right: int | None, dtype: torch.dtype = torch.float32) -> int:
    """From how many keys on a window pays: where it leaves out enough of them."""
    if keys_left is None and keys_right is None:
        return shortest(dtype)
    sides = [0 if side is None else side for side in (keys_left, keys_right)]
    return max(shortest(dtype), -(-int(PER_WINDOW * (sum(sides) + ROWS)) // 64) * 64)


def structured(before: str, **given: Any) -> Any:
    """Call transformers' mask function ``before``, or give a ``Visibility`` where a form of ours pays."""
    is_causal = "allow_is_bidirectional_skip" not in given  # as transformers announces it
    # Gemma 4 cuts queries out of its masks, and leaves causal order to ``sdpa`` only where all are there.
    cuts = is_causal and str(given["config"].model_type).startswith("gemma4")
    q_length, kv_length, mask_function = given["q_length"], given["kv_length"], given["mask_function"]
    q_offset, kv_offset = given.get("q_offset", 0), given.get("kv_offset", 0)
    device, dtype = given.get("device", "cpu"), given.get("dtype", torch.float32)

    def dense(**changes: Any) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS[before](**{**given, **changes})

    def as_before() -> Any:
        mask = dense()
        if mask is not None or q_length < 2 or not cuts:
            return mask
        return whole() if traced() else Visibility(whole, is_causal=True)

    whole = functools.partial(dense, allow_is_causal_skip=False)
    if (
        traced()
        or (given.get("use_vmap") and not _is_of_transformers(mask_function))
        or isinstance(q_offset, Tensor)
        or torch.device(device).type != "cpu"
        or q_length < 2
    ):
        return as_before()
    borders = next(iter(calls.packed()), {}).get("cu_seq_lens_q")  # of a row without padding
    is_shown = calls.shows() and before == "eager"
    if is_shown or not calls.runs_ours(borders is not None or q_length >= shortest(dtype)):
        return as_before()
    recording = probing.recording() is not None
    sizes = (0, FAR, 0, FAR) if recording else (q_offset, q_length, kv_offset, kv_length)
    positions = Positions(given["batch_size"], *sizes, torch.device(device))
    tokens = None
    if (attention_mask := given.get("attention_mask")) is not None:
        first = positions.first_key
        tokens = visible.up_to(attention_mask, first + positions.keys)[:, first:]
        tokens = None if bool(tokens.all()) else tokens
    try:
        seen = visible.read(mask_function, positions, tokens, functools.cache(whole if cuts else dense))
    except (IndexError, RuntimeError):  # a function of the inputs, which end before the probe's positions do
        return as_before()
    seen = replace(seen, harmless=set())  # structures are kept, and shared by models
    if borders is not None:
        return replace(seen, packing=packed.packing(borders, None))
    pays = calls.runs_ours(False) or _pays(seen, positions, before, dtype)
    return seen if recording or (pays and _is_served(seen, positions)) else as_before()


def _is_of_transformers(sees: Any) -> bool:
    """Whether a mask function is made of transformers' own, which go by positions; a caller's may do anything."""
    parts = [cell.cell_contents for cell in sees.__closure__ or ()]
    joined = [part for each in parts if isinstance(each, tuple) for part in each]
    return sees.__module__.startswith("transformers.") and all(map(_is_of_transformers, joined))


def _is_served(seen: Visibility, positions: Positions) -> bool:
    """Whether our forms compute a mask: whole, or of texts without holes, whose queries are their keys.

    As many keys of another sequence, some of them padding, would be taken for the queries' own.
    """
    if not seen.complete:
        return False
    if seen.tokens is None and seen.sequences is None:
        return True
    others = positions.queries != positions.keys
    if calls.is_argument("encoder_hidden_states") and not seen.is_causal:  # attention to another sequence
        return others and seen.is_whole and _runs_on(seen) and bool(seen.tokens is None or seen.tokens.any(-1).all())
    return not others and _runs_on(seen)


def of_keys(mask: Any, q: Tensor, k: Tensor) -> Visibility | None:
    """The keys that a mask (B, 1, 1, S) lets each query of a text see; None for other masks."""
    if not isinstance(mask, Tensor) or mask.shape[1:3] != (1, 1) or not 1 < q.shape[-2] == k.shape[-2]:
        return None
    seen = visible.from_mask(torch.nn.Module(), q, k, mask, is_causal=False)
    return seen if seen.complete and _runs_on(seen) else None


def _runs_on(seen: Visibility) -> bool:
    """Whether the tokens of every text stand beside one another."""
    if seen.tokens is None:
        return True
    texts, tokens = numbers(seen, seen.tokens.shape), seen.tokens
    joined = tokens[:, 1:] & tokens[:, :-1] & (texts[:, 1:] == texts[:, :-1])
    return int(tokens.sum() - joined.sum()) == len(texts[tokens].unique())


def numbers(seen: Visibility, shape: torch.Size) -> Tensor:
    """The number of the text that each position of (batch, keys) is in."""
    rows = torch.arange(shape[0])[:, None] * shape[1]
    return (rows if seen.sequences is None else rows + seen.sequences).expand(shape)


def _pays(seen: Visibility, positions: Positions, before: str, dtype: torch.dtype) -> bool:
    """Whether a form of ours is faster than what ran before, by sizes alone."""
    if before == "eager":
        return True
    if seen.keys_left is not None or seen.keys_right is not None:
        return positions.keys >= pays_from(seen.keys_left, seen.keys_right, dtype)
    return seen.tokens is not None or seen.sequences is not None or in_tiles(seen, dtype)


def in_tiles(seen: Visibility, dtype: torch.dtype) -> bool:
    """Whether the core computes attention to all keys, where that takes it less time than torch's kernel."""
    return seen.is_whole and not core.unavailable() and tiles.leads(dtype, is_causal=seen.is_causal)


# Attention -----------------------------------------------------------------------------------------------------------


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
        borders = next(iter(calls.packed()), {}).get("cu_seq_lens_q")  # of a packed row, for which there is no mask
        seen = None if borders is None else Visibility(no_mask, packing=packed.packing(borders, None))
    if seen is None and isinstance(given.get(BIAS), (Tensor, type(None))):  # at once: short texts cost no more
        return original(attention_mask)
    changes = changed(given, seen)
    positions, cap = changes.get(POSITIONS), changes.get(CAP)
    takes = getattr(positions, "takes", None)  # of positions that were made before their mask was known
    runs = takes is None or takes(module, query, attention_mask if seen is None else seen)
    if positions is not None and runs and seen is None:
        seen = of_keys(attention_mask, query, key)
    if positions is not None and not (runs and (attention_mask is None or seen is not None)):
        mask = attention_mask if seen is None else seen.dense()
        return original(mask, position_bias=positions.dense(query, key))
    if seen is None:
        causal = query.shape[2] > 1 and before == "sdpa"  # transformers' eager attention sees all without a mask
        causal = causal and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        seen = Visibility(no_mask, is_causal=causal)
        if causal:  # what follows in a cache of a fixed size is empty, as transformers' function has it
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
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
    bias: offsets.Positions | None = None,
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
        texts = numbers(seen, size).flatten()
        tokens = None if seen.tokens is None else seen.tokens[:, -size[1] :].flatten().nonzero()[:, 0]
        packing, query_tokens = visible.numbered((texts if tokens is None else texts[tokens])[None]), tokens
        if q.shape[2] != k.shape[2]:  # of another sequence, each of which is one text
            packing, query_tokens = Packing((q.shape[2],) * len(q), packing.keys), None
    if packing is None:
        return call(q, k, v).transpose(1, 2).contiguous()
    q_row, k_row, v_row = (visible.one_row(x, at) for x, at in ((q, query_tokens), (k, tokens), (v, tokens)))
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
    sinks: Tensor | None, bias: offsets.Positions | None, cap: float | None,
) -> Tensor:  # fmt: skip
    """Attention of texts of equal length, (B, H, L, E), each of which is one row."""
    keys_left, keys_right, causal = seen.keys_left, seen.keys_right, seen.is_causal
    length, keys = q.shape[-2], k.shape[-2]
    right = max(length, keys) - 1 if keys_right is None else keys_right  # the first query may be before all keys
    right = 0 if causal else right
    left = keys - 1 if keys_left is None else keys_left
    is_whole = left >= keys - 1 and (causal or keys_right is None or keys_right >= length - 1)
    is_plain = is_whole and sinks is None and bias is None and cap is None
    if is_plain and (length == keys or not causal) and not tiles.pays(q, k, v, is_causal=causal):
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


_compiled = tiles.operation(None, lambda q, k, **sides: tiles.window(q.shape[-2], k.shape[-2], **sides))

for _before, _name in NAMES.items():
    AttentionMaskInterface.register(_name, functools.partial(structured, _before))
    AttentionInterface.register(_name, functools.partial(attention, _before))
