"""A layer for transformers' cache that keeps a mechanism's decoding state instead of all keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedLayer,
)

from fast_attention import decoding
from fast_attention.integrations import calls
from fast_attention.mechanism import Unsupported
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.nn.bound import Bound

REMEDIES = {  # for what a cache began with and no state is kept of
    "packed texts": "generate from a padded batch, one text in a row",
    "tokens under a mask of every pair": "use_cache=False, or a window no wider than the layer's own",
    "tokens that see later ones": "use_cache=False",
}
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)  # layers that keep keys and values, and nothing else
LONGEST = 256  # tokens that can be taken back at least, however many came since


class Call(NamedTuple):
    """The new tokens of one call: (B, H, N, E), and which of them are real."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None

    def part(self, start: int, end: int) -> Call:
        """Some of its tokens."""
        q, k, v = (x[..., start:end, :] for x in self[:3])
        return Call(q, k, v, None if self.key_mask is None else self.key_mask[..., start:end])


class Past(NamedTuple):
    """A state, and the calls since it up to the next state that is kept.

    A state cannot forget, but it is a value: from an older one and the calls since, any state in between is decoded.
    """

    state: Any
    calls: tuple[Call, ...]

    @property
    def tokens(self) -> int:
        """How many tokens came since the state."""
        return sum(call.q.shape[-2] for call in self.calls)


class StateLayer(CacheLayerMixin):
    """A cache layer that holds a mechanism's state: ``update`` passes keys and values on, ``advance`` decodes.

    After ``activate_past_recording``, which transformers calls where it will take tokens back, it keeps a record of the
    last ones for ``crop``.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, bound: Bound, *, record_past: bool = False) -> None:
        super().__init__()
        self.bound, self.state, self.length, self.batch = bound, None, 0, 0
        self.stateless, self.record_past = "", record_past  # what the cache began with, if no state is kept of that
        self.record: tuple[Past, ...] = ()  # of at most two states, for ``crop``
        self.sinks: Tensor | None = None  # of the attention module

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; the state comes with the first tokens. Mllama counts the keys, Whisper splits them."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = (x.new_empty((*x.shape[:2], 0, x.shape[-1])) for x in (key_states, value_states))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values unchanged: the state holds what came before.

        Raises:
            Unsupported: They come from a layer that does not continue the state.
        """
        if not any(call.cache is self for call in calls.active()):
            raise Unsupported(
                f"this cache keeps a state of {self.bound.mechanism!r} in place of keys and values, and a layer that "
                "keeps none was given it: the model was swapped back or swapped for another mechanism since, or is in "
                "training mode. What would work: a new cache, from the first token on"
            )
        self.lazy_initialization(key_states, value_states)
        self.batch = key_states.shape[0]
        return key_states, value_states

    def advance(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Decode new tokens, queries (B, H, N, E), keys (B, G, N, E): their outputs. The state then includes them.

        Raises:
            Unsupported: The tokens before were several packed texts, or under a mask of every pair.
        """
        if self.stateless:
            raise Unsupported(
                f"{self.bound.mechanism!r} keeps no state of the {self.stateless} that this cache began with, so that "
                f"they cannot be decoded. What would work: {REMEDIES[self.stateless]}"
            )
        outputs: list[Tensor] = []
        call, tokens = Call(q, k, v, key_mask), q.shape[-2]
        self.length += tokens
        self.sinks = sinks
        if self.record_past and tokens > LONGEST:  # the others cannot be taken back
            permanent = tokens - LONGEST
            out, self.state = self._decode(call.part(0, permanent), self.state)
            outputs, self.record, call = [out], (), call.part(permanent, tokens)
        out, state = self._decode(call, self.state)
        if self.record_past:
            self._keep(call)
        self.state = state
        return torch.cat([*outputs, out], -2) if outputs else out

    def exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Result of ``advance`` for new tokens, all visible, that come to exact attention; None for other tokens."""
        mechanism = self.bound.mechanism
        if self.state is None or self.record_past or not isinstance(mechanism, ByLength):
            return None
        step = mechanism.exact_step(q, k, v, self.state)
        if step is None:
            return None
        out, self.state = step
        self.length += q.shape[-2]
        return out

    def _keep(self, call: Call) -> None:
        """Add a call of at most ``LONGEST`` tokens behind the state to the record, copied: a view would hold more.

        The record has the last ``LONGEST`` tokens, or all there were, and fewer than twice as many. A state takes calls
        behind it up to ``LONGEST`` tokens, and the older one goes once the newer has so many.
        """
        copied = Call(*(None if x is None else x.clone() for x in call))  # pyright: ignore[reportArgumentType]
        *earlier, last = self.record or (Past(self.state, ()),)
        if last.tokens + copied.q.shape[-2] <= LONGEST:
            record = (*earlier, Past(last.state, (*last.calls, copied)))
        else:
            record = (*self.record, Past(self.state, (copied,)))
        self.record = record[1:] if sum(past.tokens for past in record[1:]) >= LONGEST else record

    def _decode(self, call: Call, state: Any) -> tuple[Tensor, Any]:
        return self.bound.decode(
            call.q, call.k, call.v, state, key_mask=call.key_mask, sinks=self.sinks, enable_gqa=True
        )

    def pass_over(self, tokens: int, what: str) -> None:
        """Count tokens of which no state is kept, ``what`` in words: ``advance`` refuses from then on.

        Raises:
            Unsupported: There are tokens before them.
        """
        if self.length:
            raise Unsupported(f"{what} behind {self.length} tokens in a cache: pass use_cache=False")
        self.stateless, self.length = what, tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys in a mask: the new tokens only, after all before."""
        return query_length, self.length

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.12

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.length, self.stateless, self.record = None, 0, "", ()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences of the batch, for beam search."""
        if self.state is not None:
            self.state, self.record = decoding.select((self.state, self.record), beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        if self.state is not None:
            self.reorder_cache(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Keep a record of the tokens from now on, so that ``crop`` can take them back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take the last tokens back, -``tokens_to_remove`` of them: at least 256 of those since the last ``crop``.

        What came before the tokens that stay can no longer be taken back.

        Raises:
            ValueError: The number is positive.
            Unsupported: So many tokens were not recorded.
        """
        tokens = -int(tokens_to_remove)  # a tensor up to transformers 5.15
        recorded = sum(past.tokens for past in self.record)
        if tokens and not self.record_past:
            raise Unsupported(
                f"{self.bound.mechanism!r} keeps a state, which can take tokens back only if told beforehand, by "
                "cache.activate_past_recording(). Assisted decoding does so from transformers 5.16 on, with a cache of "
                "its own or DynamicCache(config=model.config); greedy, sampling and beams need no such thing"
            )
        if tokens < 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        if tokens > recorded:
            raise Unsupported(
                f"{self.bound.mechanism!r} keeps a state, out of which the last {recorded} tokens can be taken back, "
                f"not {tokens}: {LONGEST} at least, of those since the last crop"
            )
        if tokens:
            self.state = self._state_behind(recorded - tokens)
            self.length -= tokens
        self.record = ()

    def _state_behind(self, tokens: int) -> Any:
        """The state behind so many tokens of the record: call by call, as it was decoded before."""
        past, *later = self.record
        for each in later:
            if tokens >= past.tokens:
                tokens, past = tokens - past.tokens, each
        state = past.state
        for call in past.calls:
            if tokens > 0:
                state = self._decode(call.part(0, tokens), state)[1]
                tokens -= call.q.shape[-2]
        return state


def _activate_past_recording(layer: Any) -> None:
    """Note that tokens are to be taken back, for the ``StateLayer`` that may follow: ``DynamicLayer`` has none."""
    layer.record_past = True


# The announcement comes before the first tokens, when the cache still has its own layers.
Layer: Any = DynamicLayer
Layer.activate_past_recording = getattr(Layer, "activate_past_recording", _activate_past_recording)


def layer_of(cache: Cache, index: int, bound: Bound) -> StateLayer | None:
    """The ``StateLayer`` of a cache at ``index``, made in place of an empty ``DynamicLayer``; None if that has tokens.

    Raises:
        Unsupported: The cache is of a fixed size, keeps something beside keys and values, or another mechanism's state.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        if layer.bound.mechanism != bound.mechanism:
            raise Unsupported(
                f"this cache keeps a state of {layer.bound.mechanism!r}, and the layer is now {bound.mechanism!r}. "
                "What would work: a new cache, from the first token on"
            )
        return layer
    if not isinstance(layer, DynamicLayer):
        raise Unsupported(
            f"{bound.mechanism!r} keeps a state and {type(layer).__name__} memory for all tokens: generate without "
            "cache_implementation, or with use_cache=False"
        )
    if type(layer) not in PLAIN and not isinstance(layer, QuantizedLayer):
        raise Unsupported(
            f"{bound.mechanism!r} keeps a state, and the model's {type(layer).__name__} more than keys and values, "
            "which would be lost: pass use_cache=False, or swap in a mechanism that keeps these, such as Softmax()"
        )
    if layer.get_seq_length():
        return None
    state_layer = StateLayer(bound, record_past=getattr(layer, "record_past", False))
    cache.layers[index] = state_layer
    return state_layer
