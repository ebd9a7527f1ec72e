"""Pure functions in ``scaled_dot_product_attention``'s layout, and ``attention``, which takes any mechanism."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fast_attention import catalogue, checks, left_padding, packed, parallel
from fast_attention.checks import Function, checked
from fast_attention.engine.precision import rebuild
from fast_attention.engine.trace import Implementation, implementation
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.mechanisms.aft import aft_conv, wkv
from fast_attention.mechanisms.aft import aft_full as full
from fast_attention.mechanisms.aft import aft_local as window
from fast_attention.mechanisms.aft import aft_simple as simple
from fast_attention.mechanisms.dense import linformer, reference, relu, softmax
from fast_attention.mechanisms.linear import decayed, favor, favor_plus, favor_plus_plus
from fast_attention.mechanisms.linear import linear_attention as linear
from fast_attention.mechanisms.log_manhattan import log_attention as log
from fast_attention.mechanisms.log_manhattan import manhattan
from fast_attention.mechanisms.lsh import lsh
from fast_attention.mechanisms.mixers import fnet, gmlp, mlp_mixer
from fast_attention.mechanisms.sinkhorn import sinkhorn
from fast_attention.mechanisms.sparse import bigbird, block_local, local, local2d
from fast_attention.packed import CuSeqlens, Lengths


def _counted(function: Function, kind: type[Mechanism[Any, Any]], *, settings: bool = True) -> Function:
    """Check a function whose positions count from the first visible token, as those of its mechanism do."""
    return checked(function, kind if settings else None, masked=partial(left_padding.of_function, kind()))


# Their ``key_mask`` is (..., S), one flag per key and no head axis, as everywhere; the mechanism checks the settings.
# The tables of ``aft_full``, ``aft_local`` and ``synthesizer_attention`` are of the tokens at hand, padding among them.
aft_full = checked(full.aft_full)
aft_simple = checked(simple.aft_simple)
aft_local = checked(window.aft_local, window.AFTLocal)
wkv_attention = checked(wkv.wkv_attention)
conv_band = aft_conv.conv_band
bigbird_attention = _counted(bigbird.bigbird_attention, bigbird.BigBird)
favor_attention = checked(favor.favor_attention, favor.Favor)
favor_plus_attention = checked(favor_plus.favor_plus_attention)
generalised_attention = checked(favor_plus.generalised_attention, favor_plus.FavorPlus)
favor_plus_plus_attention = checked(favor_plus_plus.favor_plus_plus_attention)
optimal_damping = favor_plus_plus.optimal_damping
fourier_mix = checked(fnet.fourier_mix, fnet.FNet)
gated_mlp = _counted(gmlp.gated_mlp, gmlp.GMLP, settings=False)
linear_attention = checked(linear.linear_attention, linear.LinearAttention)
decayed_linear_attention = checked(decayed.decayed_linear_attention, decayed.DecayedLinearAttention)
block_local_attention = _counted(block_local.block_local_attention, block_local.BlockLocal)
block_local2d_attention = _counted(local2d.block_local2d_attention, local2d.BlockLocal2d)
local_attention = checked(local.local_attention, local.Local)
local2d_attention = _counted(local2d.local2d_attention, local2d.Local2d)
log_attention = checked(log.log_attention, log.LogAttention)
lsh_attention = checked(lsh.lsh_attention, lsh.LSH)
manhattan_attention = checked(manhattan.manhattan_attention, manhattan.Manhattan)
token_mlp = _counted(mlp_mixer.token_mlp, mlp_mixer.MLPMixer, settings=False)
relu_attention = checked(relu.relu_attention, relu.ReLUAttention)
sinkhorn_attention = _counted(sinkhorn.sinkhorn_attention, sinkhorn.Sinkhorn)
sortcut_attention = _counted(sinkhorn.sortcut_attention, sinkhorn.SortCut)
softmax_attention = checked(softmax.softmax_attention, softmax.Softmax)
absolute_manhattan = checked(manhattan.absolute_manhattan, manhattan.Manhattan)
laplacian_manhattan = checked(manhattan.laplacian_manhattan, partial(manhattan.Manhattan, distance="laplacian"))
signed_manhattan = checked(manhattan.signed_manhattan, manhattan.Manhattan)
vector_manhattan = checked(manhattan.vector_manhattan, manhattan.Manhattan)
convolved_attention = _counted(reference.convolved_attention, linformer.Linformer, settings=False)
linformer_attention = _counted(reference.linformer_attention, linformer.Linformer, settings=False)
pooled_attention = _counted(reference.pooled_attention, linformer.Linformer)
synthesizer_attention = checked(reference.synthesizer_attention)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: Mechanism[Any, Any] | str = "Softmax",
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    lengths: Lengths | None = None,
    impl: Implementation = "auto",
    group: Any = None,
) -> Tensor:
    """Attend with any mechanism that needs no learned weights.

    The arguments are those of ``torch.nn.functional.scaled_dot_product_attention`` and mean the same, but for the
    causal order of L != S and for ``is_causal`` beside an ``attn_mask``, which torch refuses and which hides here what
    either hides. ``mechanism`` and what follows ``enable_gqa`` are ours.

    Args:
        q, k, v: Queries (..., H, L, E), keys (..., H, S, E), values (..., H, S, Ev).
        mechanism: A mechanism, its name (``"LinearAttention"``) or its repr (``"FavorPlus(num_features=64)"``).
            Random features and tables are drawn anew at each call from torch's global generator; to keep them,
            use ``Bound``. In code compiled as one graph give the mechanism itself: a text cannot be read there.
        attn_mask: Boolean (True = may be seen) or additive, broadcastable to (..., H, L, S); mechanisms with
            ``traits.mask``.
        dropout_p: Probability with which an attention weight is dropped, in evaluation too; mechanisms with
            ``traits.mask``.
        is_causal: Query i sees keys up to i + S - L: aligned to the bottom right (torch: to the top left).
        scale: Factor on the dot products instead of 1/sqrt(E); mechanisms whose scores have one, or that approximate
            exact attention.
        enable_gqa: Let keys and values have fewer heads than queries, a divisor of H: each serves H / G queries' heads
            in a row. They are not copied by mechanisms without weights of their heads and without positions, given
            neither ``attn_mask`` nor dropout: ``Softmax`` and ``ReLUAttention``; without causal order or for one
            query ``LinearAttention`` and ``LogAttention``. Else they are repeated in memory.
        key_mask: Boolean (..., S), True = may be seen.
        cu_seqlens: The L tokens are several sequences one after another, which do not see each other: where each begins
            and the last one ends, (sequences + 1,), int32 or int64, from 0 to L; equal entries are an empty sequence. A
            pair ``(cu_seqlens_q, cu_seqlens_k)`` where keys are packed otherwise than queries. The result is that of
            one call for each sequence; no ``attn_mask`` beside it.
        lengths: Instead of ``cu_seqlens`` the number of tokens of each sequence, or a pair: as a tuple of Python's ints
            also in compiled and exported code, which cannot read ``cu_seqlens``.
        impl: ``"auto"`` runs what is fastest, ``"reference"`` plain operations, ``"triton"`` a kernel for GPUs, or
            raises. ``implementation(...)`` says the same for all calls of a block.
        group: A ``ProcessGroup``, whose processes' tokens together are the sequence, in the order of ranks: each hands
            in its tokens and gets their outputs (docs/parallel.md). What is drawn must be drawn alike: seed alike.

    Returns:
        Outputs (..., H, L, Ev).

    Raises:
        Unsupported: The mechanism is a mixer, has learned weights, its traits deny what was asked, or no kernel serves.
        ValueError: No such mechanism, sizes that do not fit, or ``cu_seqlens`` that do not rise from 0 to L.
    """
    mechanism = catalogue.parse(mechanism)
    if not isinstance(mechanism, Attention):
        raise Unsupported(f"{mechanism!r} mixes whole tokens and takes no queries: use TokenMixer or Bound")
    if mechanism.traits.learned:
        raise Unsupported(f"{mechanism!r} has learned weights: use MultiheadAttention, TokenMixer or Bound")
    checks.tensors(q=q, k=k, v=v)
    checks.heads(q, k, v, same_width=False, grouped=enable_gqa)
    if scale is not None:
        mechanism, q = _scaled(mechanism, q, scale)
    w: Any = ()
    if mechanism.needs_weights:
        if group is not None and mechanism.traits.needs_max_len:
            longest = parallel.longest(group, q.shape[-2], k.shape[-2], q.device, cu_seqlens, lengths)
        else:  # the borders of a group are those of all processes' tokens
            packing = (None, None) if group is not None else (cu_seqlens, lengths)
            sequences = packed.packing(*packing, q.shape[-2], k.shape[-2], attn_mask)
            longest = max(q.shape[-2], k.shape[-2]) if sequences is None else sequences.longest
        w = _to_device(mechanism.weights(Shape(q.shape[-3], q.shape[-1], max_len=longest)), q)
    with nullcontext() if impl == "auto" else implementation(impl):
        return parallel.run(
            mechanism, (q, k, v), w, group=group, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask,
            dropout=dropout_p, cu_seqlens=cu_seqlens, lengths=lengths, enable_gqa=enable_gqa,
        )  # fmt: skip


def _scaled(mechanism: Attention[Any, Any], q: Tensor, scale: float) -> tuple[Attention[Any, Any], Tensor]:
    """A mechanism and queries whose scores have the factor ``scale``."""
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ValueError(f"scale is a number, the factor on the dot products; got {scale!r}")
    settings = {field.name: field.default for field in fields(mechanism)}  # type: ignore[arg-type]
    if "scale" in settings:
        if getattr(mechanism, "scale") != settings["scale"]:  # noqa: B009
            raise ValueError(f"{mechanism!r} brings a scale of its own: leave out scale={scale!r}")
        return replace(mechanism, scale=scale), q  # type: ignore[type-var]
    if mechanism.traits.approximates != "Softmax":
        raise mechanism.refuse(f"scale={scale!r}", "approximates")
    return mechanism, q * (scale * q.shape[-1] ** 0.5)


def _to_device(w: Any, like: Tensor) -> Any:
    if isinstance(w, Tensor):
        return w.to(like.device, like.dtype if w.is_floating_point() else None)
    if w is None or isinstance(w, nn.Parameter):
        return w
    return rebuild(w, [_to_device(leaf, like) for leaf in w])


__all__ = [
    "absolute_manhattan", "aft_full", "aft_local", "aft_simple", "attention", "bigbird_attention",
    "block_local2d_attention", "block_local_attention", "conv_band", "convolved_attention", "decayed_linear_attention",
    "favor_attention", "favor_plus_attention", "favor_plus_plus_attention", "fourier_mix", "gated_mlp",
    "generalised_attention", "laplacian_manhattan", "linear_attention", "linformer_attention", "local2d_attention",
    "local_attention", "log_attention", "lsh_attention", "manhattan_attention", "optimal_damping", "pooled_attention",
    "relu_attention", "signed_manhattan", "sinkhorn_attention", "softmax_attention", "sortcut_attention",
    "synthesizer_attention", "token_mlp", "vector_manhattan", "wkv_attention",
]  # fmt: skip
