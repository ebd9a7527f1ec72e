"""Linformer (Wang et al. 2020): keys and values are projected from n tokens to k slots, and queries attend to slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.ops import masks
from fast_attention.ops.blocks import split, split_mask
from fast_attention.ops.pooling import pool_max, pool_mean, slots
from fast_attention.ops.precision import in_float32
from fast_attention.ops.value import Value, at_least, one_of

Sharing = Literal["none", "headwise", "key-value", "layerwise"]
KeyMask = Bool[Tensor, "*#batch2 keys"] | None


@in_float32
def linformer_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    E: Float[Tensor, "*#heads slots limit"],
    F: Float[Tensor, "*#heads slots limit"] | None = None,
    *,
    key_mask: KeyMask = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(Q (E K)^T / sqrt(d)) (F V)`` (arXiv 2006.04768, Eq. 7); F is E where not given.

    A sequence shorter than the projections uses their first columns. Masked keys and values enter as zeros; no slot
    is masked, since every slot holds a little of every token.
    """
    E = E[..., : k.shape[-2]]
    F = E if F is None else F[..., : k.shape[-2]]
    return _attend(q, E @ masks.drop(k, key_mask), F @ masks.drop(v, key_mask), None)


@in_float32
def pooled_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    rank: int,
    pool: Literal["mean", "max"] = "mean",
    key_mask: KeyMask = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention with every key and value replaced by the mean (or maximum) of its slot.

    The tokens that may be seen are cut into ``rank`` neighbouring slots whose sizes differ by at most one, so any
    length works and masked tokens leave no trace. A slot counts once for each of its tokens, which cancels where
    ``rank`` divides the length (arXiv 2006.04768, section 4, "general projections", has that case only).
    """
    reduce = {"mean": pool_mean, "max": pool_max}[pool]
    index, filled = slots(k.shape[-2], rank, key_mask, q.device)
    count = filled.sum(-1).to(q.dtype).log()
    return _attend(q, reduce(k, index, filled), reduce(v, index, filled), count[..., None, :])


@in_float32
def convolved_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    E: Float[Tensor, "*#heads stride"],
    F: Float[Tensor, "*#heads stride"],
    *,
    key_mask: KeyMask = None,
) -> Float[Tensor, "*batch length values"]:
    """Linformer with ``E``, ``F`` as kernels that slide over the tokens by their own length (arXiv 2006.04768, section 4).

    Masked tokens enter as zeros; a slot of masked tokens only is not attended to.
    """
    stride = E.shape[-1]
    keys = torch.einsum("...hsbe,hb->...hse", split(masks.drop(k, key_mask), stride), E)
    values = torch.einsum("...hsbe,hb->...hse", split(masks.drop(v, key_mask), stride), F)
    if key_mask is None:
        return _attend(q, keys, values, None)
    return _attend(q, keys, values, split_mask(key_mask, stride).any(-1)[..., None, :])


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    mask = None if mask is None else mask.expand(*q.shape[:-1], keys.shape[-2])
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
