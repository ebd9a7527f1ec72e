"""The mask functions of exact speed-ups: transformers' own masks, or what these mean where a form of ours pays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls, packed_rows, probing, visible
from fast_attention.integrations.visible import Positions, Visibility

NAMES = {"sdpa": "exact_sdpa", "eager": "exact_eager"}  # what a config named, and what it names after the swap
FORMER = {ours: theirs for theirs, ours in NAMES.items()}
# Tokens below which every layer runs what it ran; twice as many in 16 bits, whose products torch computes faster.
# Measured on one thread, both in turns: T5, BLOOM, MPT, Gemma 2, gpt-oss and Llama's eager attention, whole passes.
SHORTEST = 256
PER_WINDOW = 1.33  # keys over those of a window with a tile's rows, from where on tiles pay: measured on 1, 2 threads
ROWS = 64  # queries of a tile
FAR = 1 << 17  # tokens at which a probe reads what a layer sees


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
    packed = next(iter(calls.packed()), None)
    is_shown = calls.shows_any() and before == "eager"
    if is_shown or not calls.runs_ours(packed is not None or q_length >= shortest(dtype)):
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
    if packed is not None:
        return replace(seen, packing=packed_rows.texts_of(packed))
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
    return seen.tokens is not None or seen.sequences is not None


for _before, _name in NAMES.items():
    _function: Callable[..., Any] = functools.partial(structured, _before)
    AttentionMaskInterface.register(_name, _function)
