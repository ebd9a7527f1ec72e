"""Peers that take (q, k, v), each (B, H, L, E)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import definitions
from benchmarks.competitors import Peer, Sizes


class Wrapped(nn.Module):
    """A module called in its own way."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        return self.call(self.inner, *inputs, **options)


def performer(*, is_causal: bool, relu: bool = False) -> Callable[[Sizes], Any]:
    def build(sizes: Sizes) -> nn.Module:
        with contextlib.redirect_stdout(io.StringIO()):  # it says which kernel it lacks
            from performer_pytorch import FastAttention

            return FastAttention(sizes.head_dim, nb_features=256, causal=is_causal, generalized_attention=relu)

    return build


def lucid_linear(*, is_causal: bool, bucket: int = 1) -> Callable[[Sizes], Any]:
    def build(sizes: Sizes) -> Callable[..., Tensor]:
        from linear_attention_transformer import linear_attention_transformer as package

        if not is_causal:
            return package.linear_attn
        return lambda q, k, v, **options: package.causal_linear_attn(q, k, v, bucket_size=bucket, **options)

    return build


def local(*, is_causal: bool, exact: bool) -> Callable[[Sizes], Any]:
    def build(sizes: Sizes) -> nn.Module:
        from local_attention import LocalAttention

        made = LocalAttention(
            window_size=128, causal=is_causal, look_backward=1, look_forward=0 if is_causal else 1, autopad=True,
            exact_windowsize=exact, use_rotary_pos_emb=False, dim=None,
        )  # fmt: skip
        return Wrapped(made, lambda inner, q, k, v, mask=None: inner(q, k, v, mask=mask))

    return build


def sinkhorn(*, is_causal: bool) -> Callable[[Sizes], Any]:
    def build(sizes: Sizes) -> nn.Module:
        from sinkhorn_transformer import sinkhorn_transformer as package

        kind = package.SinkhornCausalAttention if is_causal else package.SinkhornAttention
        made = kind(64, sizes.width, sizes.head_dim, sizes.heads, sizes.length)
        return Wrapped(made, lambda inner, q, k, v, mask=None: inner(q, k, v, q_mask=mask, kv_mask=mask))

    return build


def lsh(*, is_causal: bool) -> Callable[[Sizes], Any]:
    def build(sizes: Sizes) -> nn.Module:
        from reformer_pytorch import LSHAttention

        made = LSHAttention(bucket_size=64, n_hashes=4, causal=is_causal)

        def call(inner: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            """Its queries are its keys; heads are folded into the batch."""
            heads = q.shape[1]
            seen = None if mask is None else mask.repeat_interleave(heads, 0)
            out = inner(q.flatten(0, 1), v.flatten(0, 1), input_mask=seen)[0]
            return out.unflatten(0, (-1, heads))

        return Wrapped(made, call)

    return build


def local_truth(*, is_causal: bool, exact: bool) -> Callable[..., Tensor]:
    """Softmax over |i - j| <= 128, or over whole blocks of 128 and their neighbours."""

    def truth(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[-2])
        gap = place[:, None] - place if exact else place[:, None] // 128 - place // 128
        seen = gap.abs() <= (128 if exact else 1)
        seen = seen & (place[:, None] >= place) if is_causal else seen
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return truth


PEERS = [
    Peer("performer-pytorch FAVOR+ 256", "performer-pytorch", "FavorPlus()", performer(is_causal=False),
         note="its eps of 1e-4 outweighs its features at inputs of unit variance",
         truth=definitions.favor(is_causal=False)),
    Peer("performer-pytorch FAVOR+ 256, causal", "performer-pytorch", "FavorPlus()", performer(is_causal=True),
         is_causal=True, truth=definitions.favor(is_causal=True)),
    Peer("performer-pytorch ReLU 256", "performer-pytorch", "FavorPlus()", performer(is_causal=False, relu=True),
         note="ReLU features: cheaper than exponentials, and another kernel", same=False),
    Peer("linear-attention-transformer", "linear-attention-transformer", "LinearAttention()",
         lucid_linear(is_causal=False), truth=definitions.efficient(is_causal=False), mask="kv_mask",
         note="softmax features: another kernel than elu + 1", same=False),
    Peer("linear-attention-transformer, causal", "linear-attention-transformer", "LinearAttention()",
         lucid_linear(is_causal=True), is_causal=True, truth=definitions.efficient(is_causal=True), mask="kv_mask",
         note="exact, blindspot 1; softmax and exp features", same=False),
    Peer("linear-attention-transformer, blindspot 64, causal", "linear-attention-transformer", "LinearAttention()",
         lucid_linear(is_causal=True, bucket=64), is_causal=True, truth=definitions.efficient(is_causal=True),
         mask="kv_mask", note="its default: a query sees none of its own bucket of 64", same=False),
    *(Peer(f"local-attention 128{', exact window' * exact}{', causal' * is_causal}", "local-attention",
           "Local(window=128)", local(is_causal=is_causal, exact=exact), is_causal=is_causal, mask="mask",
           truth=local_truth(is_causal=is_causal, exact=exact),
           note="" if exact else "whole blocks: 129 to 384 keys a query, 1 to 256 causal")
      for is_causal in (False, True) for exact in (False, True)),
    *(Peer(f"sinkhorn-transformer 64{', causal' * is_causal}", "sinkhorn-transformer", "Sinkhorn()",
           sinkhorn(is_causal=is_causal), is_causal=is_causal, mask="mask", order=1.0,
           truth=None if is_causal else definitions.zero_values)
      for is_causal in (False, True)),
    *(Peer(f"reformer-pytorch LSH 64, 4 hashes{', causal' * is_causal}", "reformer-pytorch", "LSH()",
           lsh(is_causal=is_causal), is_causal=is_causal, mask="mask", note="draws new rotations at every call")
      for is_causal in (False, True)),
]  # fmt: skip
