"""The attention that transformers calls in a swapped model, and the masks it makes for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fast_attention.engine import masks
from fast_attention.engine.heads import repeat
from fast_attention.engine.tracing import exporting
from fast_attention.integrations import calls, visible
from fast_attention.integrations.cache import StateLayer, layer_of
from fast_attention.integrations.visible import Positions, Visible
from fast_attention.mechanism import Unsupported
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.nn.bound import Bound

NAME = "fast_attention"
CHILD = "fast_attention"  # what the module that holds a layer's mechanism is called in the attention module
LONGEST = 1 << 17  # tokens of a model that knows no limit of its own
CHANGES = ("position_bias", "softcap", "s_aux")  # arguments that alter the scores; windows come with the mask


class Call(NamedTuple):
    """What an attention module asked of its attention function."""

    module: nn.Module
    heads: int
    head_dim: int
    scaling: float | None
    is_causal: bool
    crosses: bool  # other keys than queries
    back: int | None
    ahead: int | None
    extra: tuple[str, ...]  # arguments that change the scores
    window: int | None  # the layer's, at any length


_calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


class Swapped(nn.Module):
    """A layer's mechanism with its weights, in place of transformers' attention function.

    Args:
        bound: The mechanism.
        kept: Whether this is exact attention because nothing else was asked for, or nothing else would do.
    """

    def __init__(self, bound: Bound, *, kept: bool = False) -> None:
        super().__init__()
        self.bound, self.kept = bound, kept
        self.hooks: tuple[Any, ...] = ()

    def state_in(self, cache: Any, module: nn.Module) -> StateLayer | None:
        """Where transformers' cache keeps the state of a call of the attention module; None where it keeps none."""
        index, traits = getattr(module, "layer_idx", None), self.bound.mechanism.traits
        keeps = traits.memory in ("constant", "window") or (traits.memory is not None and not traits.cross)
        if not keeps or module.training or not getattr(module, "is_causal", False) or None in (cache, index):
            return None
        return layer_of(cache, int(index or 0), self.bound)

    def extra_repr(self) -> str:
        """Whether it is the model's own attention."""
        return "kept" if self.kept else ""


def layers_of(model: nn.Module) -> dict[str, Swapped]:
    """The mechanisms in a swapped model, by the names of their attention modules."""
    end = f".{CHILD}"
    return {name.removesuffix(end): part for name, part in model.named_modules() if isinstance(part, Swapped)}


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """All calls within, of which none is carried out: outputs are zeros."""
    found: list[Call] = []
    token = _calls.set(found)
    try:
        yield found
    finally:
        _calls.reset(token)


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, *,
    mask_function: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, device: Any = "cpu",
    **settings: Any,
) -> Visible | Tensor:  # fmt: skip
    """What the queries see, instead of a mask of every query for every key; that mask for a cache of a fixed size."""
    dropped = ("allow_is_causal_skip", "allow_is_bidirectional_skip", "local_size", "dtype", "config")
    rest = {name: value for name, value in settings.items() if name not in dropped}

    def dense() -> Tensor:
        found = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap=use_vmap,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device, **rest,
        )  # fmt: skip
        assert found is not None
        return found

    causal = "allow_is_bidirectional_skip" not in settings  # as transformers announces it
    if isinstance(q_offset, Tensor) or (causal and q_offset + q_length < kv_offset + kv_length):
        return dense()  # a cache with room for more tokens than there are
    traced = torch.compiler.is_compiling()  # or exporting: no number can be asked for
    tokens = attention_mask if traced or attention_mask is None or not bool(attention_mask.all()) else None
    if use_vmap:  # somebody's own function, which may do anything
        return Visible(dense, tokens, plain=False)
    if exporting():
        longest = getattr(settings["config"].get_text_config(), "max_position_embeddings", None) or LONGEST
        return visible.traced(mask_function, int(longest), tokens, dense)
    device = torch.device(device) if isinstance(device, str) else device
    positions = Positions(batch_size, q_offset, q_length, kv_offset, kv_length, device)
    if traced:
        window = settings.get("local_size")
        found = visible.announced(mask_function, positions, tokens, dense, is_causal=causal, window=window)
        return found if calls.positions() and attention_mask is None else visible.sure(found)
    return visible.read(mask_function, positions, tokens, dense)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **extra: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Queries (B, H, L, E), keys and values (B, G, S, E) with G a divisor of H, to outputs (B, L, H, E).

    Beside them the attention matrices (B, H, L, S), where the model was called with ``output_attentions=True``.

    Raises:
        Unsupported: The layer's mechanism cannot do what the model asks for.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (repeat(x, groups) if groups > 1 else x for x in (key, value))
    seen = _seen(module, query, key, attention_mask, is_causal)
    changes = {name: x for name, x in extra.items() if x is not None and name in CHANGES}
    recording = None if torch.compiler.is_compiling() else _calls.get()
    if recording is not None:
        crosses = query.shape[-2] != key.shape[-2]
        recording.append(
            Call(
                module, query.shape[1], query.shape[-1], scaling, seen.is_causal, crosses, seen.back, seen.ahead,
                tuple(changes), extra.get("sliding_window"),
            )
        )  # fmt: skip
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    swapped = module._modules.get(CHILD)
    if not isinstance(swapped, Swapped):
        raise RuntimeError(f"{type(module).__name__} has no mechanism: swap the model by fast_attention.swap(...)")
    call = calls.present(module)
    cache = None if call is None else call.cache
    if call is not None:
        call.attended = True
    own = query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - own) > 1e-6 * own:
        query = query * (scaling / own)
    given = (swapped.bound, cache, query, key, value, seen, changes, dropout)
    out, weights = _shown(*given) if calls.shows(swapped) else (_run(*given), None)
    return out.transpose(1, 2).contiguous(), weights


def _seen(module: nn.Module, q: Tensor, k: Tensor, given: Any, is_causal: bool | None) -> Visible:
    """What the model says about visibility, in one form."""
    if isinstance(given, Visible):
        return given
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    causal = causal and q.shape[-2] > 1

    def dense() -> Tensor:
        found = masks.visible(q.shape[-2], k.shape[-2], is_causal=causal, key_mask=None, device=q.device)
        everything = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        return (everything if found is None else found).expand(len(q), 1, -1, -1)

    if given is None:
        return Visible(dense, is_causal=causal)
    if given.ndim == 2:
        return Visible(dense, given.bool(), is_causal=causal)
    return Visible(lambda: given, plain=False)


def _shown(
    bound: Bound, cache: StateLayer | None, q: Tensor, k: Tensor, v: Tensor, seen: Visible,
    changes: dict[str, Tensor], dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and matrices: A [v, I] = [A v, A] of one pass, hence of the same dropped weights."""
    mechanism, width = bound.mechanism, v.shape[-1]
    if not mechanism.traits.matrix:
        raise mechanism.refuse("output_attentions=True", "matrix")
    if cache is not None and cache.length:
        raise Unsupported(
            f"output_attentions=True, and {mechanism!r} keeps a state in which the {cache.length} keys before are "
            "summed up: pass use_cache=False"
        )
    identity = torch.eye(k.shape[-2], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)
    if cache is None:
        both = _run(bound, None, q, k, torch.cat([v, identity], -1), seen, changes, dropout)
        return both[..., :width], both[..., width:]
    out = _run(bound, cache, q, k, v, seen, changes, dropout)
    return out, _run(bound, None, q, k, identity, seen, changes, dropout)  # no part of what is remembered


def _run(
    bound: Bound, cache: StateLayer | None, q: Tensor, k: Tensor, v: Tensor, seen: Visible,
    changes: dict[str, Tensor], dropout: float,
) -> Tensor:  # fmt: skip
    """By the cheapest form that computes what was asked: the mechanism's own, a state, packed rows, a whole mask."""
    mechanism, key_mask = bound.mechanism, seen.key_mask(k.shape[-2])
    dropout = dropout if mechanism.traits.mask else 0.0  # the report says which layers drop nothing
    if seen.holds is not None:  # compiled, with position_ids: perhaps packed rows
        if mechanism.traits.mask and cache is None:
            return _masked(bound, q, k, v, seen, changes, dropout)
        seen = visible.sure(seen)
    if changes or not seen.plain or not narrower(mechanism, seen.back, seen.ahead):
        if mechanism.traits.mask:
            return _masked(bound, q, k, v, seen, changes, dropout)
        if changes:
            raise mechanism.refuse(f"scores with {', '.join(changes)}", "mask")
        if not seen.plain:
            raise mechanism.refuse("a mask of the model's own", "mask")
        raise Unsupported(window_words(mechanism, seen.back, seen.ahead))
    if seen.sequences is not None:
        return _packed(bound, q, k, v, seen, dropout)
    if cache is not None:
        return cache.advance(q, k, v, key_mask)
    return bound(q, k, v, is_causal=seen.is_causal, key_mask=key_mask, dropout=dropout)


def _masked(
    bound: Bound, q: Tensor, k: Tensor, v: Tensor, seen: Visible, changes: dict[str, Tensor], dropout: float
) -> Tensor:
    """A mechanism whose scores stand in the open takes every mask and bias."""
    if others := [name for name in changes if name != "position_bias"]:
        raise Unsupported(f"{bound.mechanism!r} takes no scores with {', '.join(others)}: keep the model's attention")
    given = seen.dense()
    if "position_bias" in changes:
        bias = changes["position_bias"].to(q.dtype)
        given = bias + given if given.is_floating_point() else bias.masked_fill(~given, float("-inf"))
    return bound(q, k, v, attn_mask=given, dropout=dropout)


def _packed(bound: Bound, q: Tensor, k: Tensor, v: Tensor, seen: Visible, dropout: float) -> Tensor:
    """Sequences that stand one behind the other in a row, each by itself: out of the row, padded, and back again."""
    assert seen.sequences is not None
    numbers = seen.sequences + seen.sequences.new_tensor(range(len(q)))[:, None] * (int(seen.sequences.max()) + 1)
    _, lengths = numbers.flatten().unique_consecutive(return_counts=True)
    room = torch.arange(int(lengths.max()), device=q.device) < lengths[:, None]

    def apart(x: Tensor) -> Tensor:
        found = x.new_zeros(*room.shape, *x.shape[1::2])
        found[room] = x.transpose(1, 2).flatten(0, 1)
        return found.transpose(1, 2)

    out = bound(apart(q), apart(k), apart(v), is_causal=seen.is_causal, key_mask=room, dropout=dropout)
    return out.transpose(1, 2)[room].unflatten(0, (len(q), -1)).transpose(1, 2)


def narrower(mechanism: Any, back: int | None, ahead: int | None) -> bool:
    """Whether the mechanism sees no more than a window of the model's."""
    if back is None and ahead is None:
        return True
    own = getattr(mechanism, "window", None)
    if not isinstance(mechanism, Local) or own is None:
        return False
    left, right = own if isinstance(own, tuple) else (own, own)
    return (back is None or left <= back) and (ahead is None or right <= ahead)


def window_words(mechanism: Any, back: int | None, ahead: int | None) -> str:
    """Why a mechanism cannot serve a layer with a window."""
    sides = [f"{n} tokens {where}" for n, where in ((back, "back"), (ahead, "ahead")) if n is not None]
    least = min(n for n in (back, ahead) if n is not None)
    return (
        f"the layer sees {' and '.join(sides)} only, and {mechanism!r} would see more. What would work: "
        f"Local(window={least}) or less, Softmax(), or keeping the layer"
    )


AttentionInterface.register(NAME, attention)  # a swapped model that was pickled finds them in any process
AttentionMaskInterface.register(NAME, mask)
