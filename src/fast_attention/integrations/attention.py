"""The layers of a swapped model, the attention function that transformers calls in them, and the masks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fast_attention import checks, packed
from fast_attention.engine.tracing import exporting, traced
from fast_attention.integrations import calls, probing, relative, visible
from fast_attention.integrations.cache import StateLayer, layer_of
from fast_attention.integrations.modules import NAME
from fast_attention.integrations.visible import Positions, Visibility
from fast_attention.mechanism import Attention, Mechanism, Unsupported
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.hybrid.by_length import ByLength, Part, covered, exact_for
from fast_attention.nn.bound import Bound
from fast_attention.packed import Packing

CHILD = NAME  # what the module that holds a layer's mechanism is called in the attention module
LONGEST = 1 << 17  # tokens of a model that knows no limit of its own
SINKS = "s_aux"  # a score of each head that takes weight from all keys
CHANGES = ("position_bias", "softcap", SINKS)  # arguments that alter the scores; windows come with the mask
HARMLESS = (  # tensors that do not
    *visible.BORDERS, "max_length_q", "max_length_k", "input_ids", "position_ids", "cache_position"
)  # fmt: skip


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


class Swapped(nn.Module):
    """A layer's mechanism with its weights, in place of transformers' attention function.

    Args:
        bound: The mechanism.
        unchanged: Whether this is exact attention because nothing else was asked for, or nothing else would do.
        positions: What the model's positions add to the layer's scores, where that is known.
    """

    def __init__(self, bound: Bound, *, unchanged: bool = False, positions: relative.Positions | None = None) -> None:
        super().__init__()
        self.bound, self.unchanged, self.positions = bound, unchanged, positions
        self.hooks: tuple[Any, ...] = ()

    def exact(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, cache: StateLayer | None) -> Tensor | None:
        """The outputs of a call, behind a ``cache`` if there is one, that comes to exact attention; None of another.

        The mechanism is not asked for its weights then, nor checked: short texts cost what the original model takes.
        """
        bound, keys = self.bound, k.shape[-2]
        if traced() or not visibility.is_whole or checks.empty(q, k, v):
            return None
        if bound._forward_pre_hooks or bound._forward_hooks or bound.members is not None:
            return None
        if cache is not None:
            is_step = visibility.is_causal or q.shape[-2] == 1
            return cache.exact(q, k, v) if visibility.tokens is None and is_step else None
        if q.shape[:2] != k.shape[:2]:
            return None
        causal, key_mask = visibility.is_causal, visibility.key_mask(keys)
        short = exact_for(bound.mechanism, q.shape[-2], keys, is_causal=causal)
        if short is None:
            return None
        k, v, mask = (k, v, None) if key_mask is None else checks.without_masked(k, v, key_mask, "qkv")
        if isinstance(bound.mechanism, ByLength):
            return covered(q, k, v, mask, Part(short, ()), is_causal=causal)
        return softmax_attention(q, k, v, key_mask=mask, is_causal=causal, scale=short.scale)

    def state_in(self, cache: Any, module: nn.Module) -> StateLayer | None:
        """The layer of transformers' cache that keeps the mechanism's state; None where keys and values are kept."""
        index: Any = getattr(module, "layer_idx", None)
        if index is None or module.training or not keeps_state(self.bound.mechanism):
            return None
        return layer_of(cache, int(index), self.bound)

    def adds_positions(self, visibility: Any) -> bool:
        """Whether the mechanism makes what positions add to the scores, so that the model need not, for all pairs."""
        is_served = isinstance(visibility, Visibility) and visibility.complete
        return is_served and relative.serves(self.bound.mechanism, self.positions)

    def added(self, position_bias: Tensor, visibility: Visibility, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """The arguments that change scores, made of the model's ``position_bias``."""
        positions, tokens = self.positions, visibility.tokens
        if self.adds_positions(visibility):
            assert positions is not None
            if not positions.by_token or tokens is None or visible.contiguous(tokens):
                return {}
        if position_bias.ndim == 0:
            assert positions is not None
            position_bias = positions.dense(q, k)
        return {"position_bias": position_bias}

    def extra_repr(self) -> str:
        """Whether it is the model's own attention."""
        return "unchanged" if self.unchanged else ""


def keeps_state(mechanism: Mechanism[Any, Any]) -> bool:
    """Whether transformers' cache holds a mechanism's own state, not keys and values."""
    traits = mechanism.traits
    return traits.memory in ("constant", "window") or (traits.memory is not None and not traits.cross)


def adds_positions(module: nn.Module, visibility: Any) -> bool:
    """Whether a module's mechanism makes what positions add to its scores, under a mask."""
    swapped = module._modules.get(CHILD)
    return isinstance(swapped, Swapped) and swapped.adds_positions(visibility)


def layers_of(model: nn.Module) -> dict[str, Swapped]:
    """The mechanisms in a swapped model, by the names of their attention modules."""
    end = f".{CHILD}"
    return {name.removesuffix(end): part for name, part in model.named_modules() if isinstance(part, Swapped)}


# Masks and attention --------------------------------------------------------------------------------------------------


def mask(**given: Any) -> Any:
    """The mask function for transformers: a ``Visibility`` instead of a dense mask; a dense one for a static cache."""
    q_length, kv_length, mask_function = given["q_length"], given["kv_length"], given["mask_function"]
    q_offset, kv_offset = given.get("q_offset", 0), given.get("kv_offset", 0)
    attention_mask, device = given.get("attention_mask"), given.get("device", "cpu")

    def dense() -> Any:
        return sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    causal = "allow_is_bidirectional_skip" not in given  # as transformers announces it
    if isinstance(q_offset, Tensor) or (causal and q_offset + q_length < kv_offset + kv_length):
        return dense()  # a cache of a fixed size, longer than the tokens so far
    compiling = torch.compiler.is_compiling()  # or exporting: values of tensors cannot be read
    tokens = None if attention_mask is None else visible.up_to(attention_mask, kv_offset + kv_length)
    tokens = tokens if compiling or tokens is None or not bool(tokens.all()) else None
    if given.get("use_vmap"):  # a mask function of the caller's, which may do anything
        return Visibility(dense, tokens, complete=False)
    if exporting():
        longest = getattr(given["config"].get_text_config(), "max_position_embeddings", None) or LONGEST
        return visible.exported(mask_function, int(longest), tokens, dense)
    device = torch.device(device) if isinstance(device, str) else device
    positions = Positions(given["batch_size"], q_offset, q_length, kv_offset, kv_length, device)
    ids = None if attention_mask is not None or q_length != kv_length else calls.position_ids()
    if compiling:
        window = given.get("local_size")
        visibility = visible.declared(mask_function, positions, tokens, dense, is_causal=causal, window=window)
        return visibility if ids is not None and causal else visible.asserted(visibility)
    visibility = replace(visible.read(mask_function, positions, tokens, dense), borders=(*calls.packed(),))
    visibility = replace(visibility, begin=int(kv_offset))
    if q_length == 1 and not causal:  # of one query a mask says nothing of the order
        visibility = replace(visibility, is_causal=False)
    if causal and kv_offset:  # a state may hold the keys before, which the mask is not about
        visibility = replace(visibility, reach=visible.reach(mask_function, positions))
    if visibility.sequences is None:  # transformers tells packed texts apart in causal masks without a cache only
        visibility = replace(visibility, packing=visible.from_position_ids(ids, given["batch_size"], q_length))
    return visibility


def changing(extra: dict[str, Any], harmless: set[str] | None = None) -> dict[str, Any]:
    """The arguments of a layer's that alter its scores: so does any tensor that is not known to do nothing.

    What the model was given itself, labels say, passes through some models to their attention functions.

    Args:
        extra: Arguments of the attention function.
        harmless: What a mask keeps for a layer that is computed again: names of such tensors of the model's.
    """
    tensors = {name for name, x in extra.items() if isinstance(x, Tensor) and name not in (*CHANGES, *HARMLESS)}
    if harmless is not None and calls.computed_again():
        unknown = tensors - harmless
    else:
        unknown = {name for name in tensors if not calls.is_argument(name)}
        if harmless is not None:
            harmless.update(tensors - unknown)
    return {name: x for name, x in extra.items() if x is not None and (name in CHANGES or name in unknown)}


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **extra: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention function for transformers: runs the layer's mechanism.

    Queries are (B, H, L, E), keys and values (B, G, S, E) with G a divisor of H, outputs (B, L, H, E). Attention
    matrices (B, H, L, S) are returned where the model was called with ``output_attentions=True``.

    Raises:
        Unsupported: The layer's mechanism cannot do what the model asks for.
    """
    visibility = visible.from_mask(module, query, key, attention_mask, is_causal)
    changes = changing(extra)
    if not torch.compiler.is_compiling() and probing.recording() is not None:
        window = extra.get("sliding_window")
        return probing.record(module, query, key, value, visibility, changes, window=window), None
    swapped = module._modules.get(CHILD)
    if not isinstance(swapped, Swapped):
        raise RuntimeError(f"{type(module).__name__} has no mechanism: swap the model by fast_attention.swap(...)")
    if not visibility.complete:  # a cache of the window's size may hold its keys
        window = extra.get("sliding_window") or getattr(module, "sliding_window", None)
        visibility = replace(visibility, keys_left=visibility.keys_left if window is None else int(window) - 1)
    call = calls.present(module)
    cache = None if call is None else call.cache
    if call is not None:
        call.attended = True
    cached = key.shape[-2] - query.shape[-2] if visibility.is_causal else 0
    texts = visible.packed_texts(query, key, extra, visibility, cached if cache is None else cache.length)
    visibility = visibility if texts is None else replace(visibility, packing=texts)
    if "position_bias" in changes:
        changes |= swapped.added(changes.pop("position_bias"), visibility, query, key)
    default_scale = query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - default_scale) > 1e-6 * default_scale:
        query = query * (scaling / default_scale)
    shown = calls.shows()
    is_simple = not (shown or changes or dropout)
    out, weights = swapped.exact(query, key, value, visibility, cache) if is_simple else None, None
    if out is None:
        dropout = dropout if swapped.bound.mechanism.traits.mask else 0.0  # the report says which layers drop nothing
        sinks = changes.pop(SINKS, None)
        layer_call = Call(swapped.bound, query, key, value, visibility, dropout, sinks, cache, changes)
        out, weights = _run_with_matrices(layer_call) if shown else (_run(layer_call), None)
    return out.transpose(1, 2).contiguous(), weights


def _run_with_matrices(call: Call) -> tuple[Tensor, Tensor]:
    """Outputs and attention matrices, from one pass with the same dropped weights: A [v, I] = [A v, A]."""
    mechanism, cache, v = call.bound.mechanism, call.cache, call.v
    if not mechanism.traits.matrix:
        raise mechanism.refuse("output_attentions=True", "matrix")
    if cache is not None and cache.length:
        raise Unsupported(
            f"output_attentions=True, and {mechanism!r} keeps a state in which the {cache.length} keys before are "
            "summed up: pass use_cache=False"
        )
    identity = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)
    if cache is None:
        outputs_and_matrices = _run(call._replace(v=torch.cat([v, identity], -1)))
        return outputs_and_matrices[..., : v.shape[-1]], outputs_and_matrices[..., v.shape[-1] :]
    return _run(call), _run(call._replace(cache=None, v=identity))  # which is not added to the state


def _run(call: Call) -> Tensor:
    """Run the mechanism in the cheapest form that serves: as it is, with a state, in packed rows, with a dense mask."""
    bound, q, k, v, visibility, dropout, sinks, cache, changes = call
    mechanism, key_mask = bound.mechanism, visibility.key_mask(k.shape[-2])
    if visibility.valid is not None:  # compiled, with position_ids: perhaps packed rows
        if mechanism.traits.mask and cache is None:
            return _run_masked(call)
        visibility = visible.asserted(visibility)
    texts = visibility.packing
    keys_left = visibility.keys_left if visibility.keys_left is not None or cache is None else visibility.reach
    if changes or not visibility.complete or not visible.within_window(mechanism, keys_left, visibility.keys_right):
        if mechanism.traits.mask and texts is not None and visibility.complete and not changes:
            return run_packed(call, texts, windowed=True)
        if cache is not None and mechanism.traits.mask:
            cache.pass_over(q.shape[-2], "tokens under a mask of every pair")
        if mechanism.traits.mask:
            return _run_masked(call._replace(visibility=visibility))
        if changes:
            raise mechanism.refuse(f"scores with {', '.join(changes)}", "mask")
        if not visibility.complete:
            raise mechanism.refuse("a mask of the model's own", "mask")
        raise Unsupported(visible.window_refusal(mechanism, keys_left, visibility.keys_right))
    if texts is None and visibility.sequences is not None:
        texts = visible.numbered(visibility.sequences)
    if texts is not None:
        if cache is not None:
            cache.pass_over(q.shape[-2], "packed texts")
        return run_packed(call, texts)
    causal = visibility.is_causal
    if cache is None and visibility.begin and mechanism.traits.positions == "absolute":
        raise visible.positions_refused(mechanism, f"this cache has dropped the first {visibility.begin} tokens")
    if causal and cache is None and k.shape[-2] != q.shape[-2] and not mechanism.traits.cross:
        raise Unsupported(
            f"{mechanism!r} cannot decode {q.shape[-2]} tokens behind {k.shape[-2] - q.shape[-2]} in a cache of keys "
            "and values: pass use_cache=False, or swap in a mechanism with traits.memory, such as Hybrid()"
        )
    if cache is not None and (causal or q.shape[-2] == 1):
        return cache.advance(q, k, v, key_mask, sinks)
    if cache is not None:
        cache.pass_over(q.shape[-2], "tokens that see later ones")
    return bound(q, k, v, is_causal=causal, key_mask=key_mask, dropout=dropout, enable_gqa=True, sinks=sinks)


def run_packed(call: Call, texts: Packing, *, windowed: bool = False) -> Tensor:
    """Attend within each text of the rows; ``windowed``: by a mask of the window, which the mechanism has not."""
    bound, q, k, v, visibility, dropout, sinks, *_ = call
    batch, key_mask = len(q), visibility.key_mask(k.shape[-2])

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        order: Any = {"is_causal": visibility.is_causal}
        if windowed:
            order = {"attn_mask": visible.band(visibility, q.shape[-2], k.shape[-2], q.device)}
        return bound(q, k, v, **order, key_mask=key_mask, dropout=dropout, enable_gqa=True, sinks=sinks)

    key_mask = None if key_mask is None else key_mask.reshape(1, -1)
    kernel = None
    if not windowed and dropout == 0.0 and sinks is None and isinstance(bound.mechanism, Attention):
        kernel = partial(packed.packed_kernel, bound.mechanism, w=bound.w, is_causal=visibility.is_causal)
    out = packed.attend(
        attend, visible.one_row(q), visible.one_row(k), visible.one_row(v), texts, key_mask, kernel=kernel
    )
    return out if batch == 1 else out[0].unflatten(1, (batch, -1)).transpose(0, 1)


def _run_masked(call: Call) -> Tensor:
    """Run a mechanism with ``traits.mask`` with the model's dense mask and position bias."""
    bound, q, k, v, visibility, dropout, sinks, _, changes = call
    if unknown := [name for name in changes if name != "position_bias"]:
        raise Unsupported(f"{bound.mechanism!r} takes no scores with {', '.join(unknown)}: keep the model's attention")
    mask, order = visibility.dense(), {}
    if visibility.packing is not None:
        mask = _per_sequence_mask(mask, visibility.packing, len(q))
    elif bound.mechanism.traits.positions == "absolute":
        keys, order = visible.order(bound.mechanism, visibility, mask, q.shape[-2])
        k, v, mask = k[..., :keys, :], v[..., :keys, :], mask[..., :keys]
        changes = {name: x[..., :keys] for name, x in changes.items()}
    if "position_bias" in changes:
        bias = changes["position_bias"].to(q.dtype)
        mask = bias + mask if mask.is_floating_point() else bias.masked_fill(~mask, float("-inf"))
        if relative.carries(bound.mechanism):  # which is in the mask already
            return relative.with_bias(bound.mechanism, None)(q, k, v, attn_mask=mask, dropout=dropout, **order)
    return bound(q, k, v, attn_mask=mask, dropout=dropout, enable_gqa=True, sinks=sinks, **order)


def _per_sequence_mask(mask: Tensor, texts: Packing, batch: int) -> Tensor:
    """A dense mask (..., L, S), True = may be seen or additive, in which texts do not see each other."""
    numbers = [
        torch.repeat_interleave(torch.tensor(lengths, device=mask.device)).view(batch, 1, -1)
        for lengths in (texts.queries, texts.keys)
    ]
    same = numbers[0][..., :, None] == numbers[1][..., None, :]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, float("-inf"))


AttentionInterface.register(NAME, attention)  # a swapped model that was pickled finds them in any process
AttentionMaskInterface.register(NAME, mask)
