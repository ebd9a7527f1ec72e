"""A layer of transformers' cache that keeps a mechanism's state instead of all keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from fast_attention import decoding
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound


class StateLayer(CacheLayerMixin):
    """What a mechanism remembers. ``update`` hands the new keys and values through; ``advance`` takes them in."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, bound: Bound) -> None:
        super().__init__()
        self.bound, self.state, self.length, self.batch = bound, None, 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the state comes with the first tokens."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The same keys and values: the state stands for those before."""
        self.lazy_initialization(key_states, value_states)
        self.batch = key_states.shape[0]
        return key_states, value_states

    def advance(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Outputs of the new tokens (B, H, N, E), which the state then holds."""
        out, self.state = self.bound.decode(q, k, v, self.state, key_mask=key_mask)
        self.length += q.shape[-2]
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are for the new tokens only, behind all before."""
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
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with other sequences: beam search."""
        if self.state is not None:
            self.state = decoding.select(self.state, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        if self.state is not None:
            self.reorder_cache(torch.arange(self.batch, device=self.device).repeat_interleave(repeats))

    def offload(self) -> None:
        """Stay: a state is small."""

    def prefetch(self) -> None:
        """Be here already."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a state cannot forget its last tokens, which assisted decoding may ask at any step.

        On Apple's GPUs ordinary generation asks for 0 tokens to be taken away, and gets that.

        Raises:
            Unsupported: In every other case.
        """
        if tokens_to_remove or self.device.type != "mps":
            raise Unsupported(
                f"{self.bound.mechanism!r} keeps a state, out of which the last tokens cannot be taken again: assisted "
                "decoding does not work; greedy, sampling and beams do"
            )


def layer_of(cache: Any, index: int, bound: Bound) -> StateLayer | None:
    """The state's layer in a cache, put where an empty growing layer stood; None where a growing one holds tokens.

    Raises:
        Unsupported: The cache is of a fixed size.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        return None
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if not isinstance(layer, DynamicLayer):
        raise Unsupported(
            f"{bound.mechanism!r} keeps a state and {type(layer).__name__} room for all tokens: generate without "
            "cache_implementation, or with use_cache=False"
        )
    if layer.get_seq_length():
        return None
    made = StateLayer(bound)
    cache.layers[index] = made
    return made
