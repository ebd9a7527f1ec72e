"""``MultiheadAttention``: ``torch.nn.MultiheadAttention`` with any attention mechanism inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import catalogue, checks
from fast_attention.engine import heads
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.nn import torch_masks
from fast_attention.nn.bound import Bound
from fast_attention.nn.positions import Rotary, positions_of, rotary_for, rotate_both
from fast_attention.nn.torch_masks import Masks
from fast_attention.packed import CuSeqlens, Lengths, Packing, packing
from fast_attention.parallel.shards import shards
from fast_attention.parallel.spreading import Spread


class MultiheadAttention(Spread, nn.Module):
    """A drop-in replacement of ``torch.nn.MultiheadAttention``: its arguments, masks, results and checkpoint names.

    With ``Softmax()`` it computes what torch's module computes, but for queries that may see nothing: those get zeros
    here and NaN there. It also serves as attention of torch's transformer layers, in training and in evaluation:
    their fused path, which would bypass any replacement, is switched off by a hook set here.

    Checkpoints: the names are torch's; the mechanism's own weights, where it has any, are called ``attention.*``. A
    checkpoint of torch's module has none of those: load it with ``strict=False`` and find only them in
    ``missing_keys``. All three projections exist, whatever the mechanism reads (``TokenMixer`` builds only those read).

    Args:
        embed_dim: Width of the tokens, all heads together.
        num_heads: Number of heads; must divide ``embed_dim``.
        dropout: Probability of dropping an attention weight while training (mechanisms with ``traits.mask``).
        bias: Whether the projections have biases.
        add_bias_kv: Append one learned key and value to the sequence (mechanisms with ``traits.cross``).
        add_zero_attn: Append one key and value of zeros to the sequence (mechanisms with ``traits.cross``).
        kdim: Width of the keys; None means ``embed_dim``.
        vdim: Width of the values; None means ``embed_dim``.
        batch_first: Whether batches are (N, L, E) rather than (L, N, E).
        device: Where the parameters are made.
        dtype: Type of the parameters.
        mechanism: An attention, or its name or repr.
        max_len: Longest sequence, for mechanisms with ``traits.needs_max_len``.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads`` (grouped queries); None means ``num_heads``.
            Each serves as many queries' heads in a row (``enable_gqa`` of ``fast_attention.attention``).
        rotary: Rotate queries and keys by their positions (mechanisms with ``traits.rotary``): True for
            ``nn.positions.Rotary()``, or one with another base or scaling.

    Raises:
        Unsupported: The mechanism is a mixer, or cannot take appended keys, dropout or rotary positions.
        ValueError: ``num_heads`` does not divide ``embed_dim``, ``num_kv_heads`` not ``num_heads``, or ``max_len`` is
            missing.
    """

    def __init__(
        self,
        embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        *, mechanism: Mechanism[Any, Any] | str = "Softmax", max_len: int = 0, num_kv_heads: int | None = None,
        rotary: bool | Rotary = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, heads.width(embed_dim, num_heads)
        self.num_kv_heads = heads.grouped(num_heads, num_kv_heads)
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.appended = int(add_bias_kv) + int(add_zero_attn)
        self._build(bias, add_bias_kv, device, dtype)
        self.attention = self._bind(catalogue.parse(mechanism), max_len, rotary).to(device=device, dtype=dtype)
        # torch's layers take no fused short cut around a module that has a hook.
        self.register_forward_pre_hook(_do_nothing)

    def _build(self, bias: bool, bias_kv: bool, device: Any, dtype: torch.dtype | None) -> None:
        """The parameters, drawn in torch's order, so that equal seeds give equal values."""
        width, packed, grouped = self.embed_dim, self._qkv_same_embed_dim, self.num_kv_heads * self.head_dim

        def empty(needed: bool, *size: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*size, device=device, dtype=dtype)) if needed else None

        self.out_proj = nn.Linear(width, width, bias=bias, device=device, dtype=dtype)
        self.in_proj_weight = empty(packed, width + 2 * grouped, width)
        self.q_proj_weight = empty(not packed, width, width)
        self.k_proj_weight = empty(not packed, grouped, self.kdim)
        self.v_proj_weight = empty(not packed, grouped, self.vdim)
        self.in_proj_bias = empty(bias, width + 2 * grouped)
        self.bias_k, self.bias_v = empty(bias_kv, 1, 1, grouped), empty(bias_kv, 1, 1, grouped)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this layer's own weights again, in place: what ``to_empty`` left of a module on the meta device.

        Those of ``out_proj`` and of ``attention`` are reset by these; the bias of ``out_proj`` becomes zero here.
        """
        draw: Any = nn.MultiheadAttention._reset_parameters
        draw(self)

    def _bind(self, mechanism: Mechanism[Any, Any], max_len: int, rotary: bool | Rotary) -> Bound:
        if not isinstance(mechanism, Attention):
            raise Unsupported(f"{mechanism!r} mixes whole tokens and takes no queries: use TokenMixer")
        if self.appended and not mechanism.traits.cross:
            raise mechanism.refuse("add_bias_kv or add_zero_attn (more keys than queries)", "cross")
        checks.probability(self.dropout)
        if self.dropout and not mechanism.traits.mask:
            raise mechanism.refuse(f"attention dropout (dropout={self.dropout!r}; build it with dropout=0.0)", "mask")
        self.rotary = rotary_for(mechanism, rotary, self.head_dim)
        if self.rotary is not None and self.appended:
            raise ValueError("add_bias_kv and add_zero_attn append keys that have no position: leave rotary=False")
        shape = Shape(self.num_heads, self.head_dim, max_len + self.appended if max_len else 0)
        return Bound(mechanism, shape)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
        lengths: Lengths | None = None,
        group: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with torch's arguments: in both masks True (or -inf) means *ignore*.

        Args:
            query: (L, E), or (N, L, E) with ``batch_first``, else (L, N, E).
            key: The same with S tokens of width ``kdim``.
            value: The same with S tokens of width ``vdim``.
            key_padding_mask: (S) or (N, S), boolean or additive (0 and -inf; other values need ``traits.mask``).
            need_weights: Whether to return the attention matrix (mechanisms with ``traits.matrix``).
            attn_mask: (L, S) or (N * num_heads, L, S), boolean or additive. One that equals the causal mask counts as
                ``is_causal=True``; any other needs ``traits.mask``.
            average_attn_weights: Whether the attention matrix is averaged over heads.
            is_causal: Without ``attn_mask``: query i sees keys up to i + S - L. Beside an ``attn_mask`` it is a hint
                and the mask decides, except in compiled code, where the hint is believed if L = S.
            positions: With ``rotary``: positions of the queries, (L) or (N, L); None for S - L, S - L + 1, ...: the
                last query has the last key's position.
            key_positions: Those of the keys, (S) or (N, S); None for 0, 1, ..., or for ``positions`` where L = S.
            cu_seqlens: The L tokens are several sequences one after another, which do not see each other: where each
                begins and the last one ends, or a pair for queries and keys, as in ``fast_attention.attention``. Rotary
                positions begin anew in each. Goes with ``need_weights=False`` and without ``attn_mask``.
            lengths: Instead of it the number of tokens of each sequence, or a pair.
            group: The processes whose tokens together are the sequence, as in ``fast_attention.attention``; goes with
                ``need_weights=False``.

        Returns:
            Outputs in the shape of ``query``, and the attention matrix (N, L, S), or (N, num_heads, L, S) if not
            averaged, without N for unbatched inputs; or None.

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes do not fit.
        """
        key_is_query, one_tensor = query is key, query is key and key is value
        if isinstance(query, Tensor) and query.is_nested:
            unmasked = one_tensor and attn_mask is None and key_padding_mask is None
            unmasked = unmasked and all(x is None for x in (positions, key_positions, cu_seqlens, lengths))
            return self._nested(query, unmasked, need_weights, average_attn_weights, is_causal)
        self._check(query, key, value)
        group = self.group_of(group)
        batched = query.dim() == 3
        query, key, value = (self._batch_major(x) for x in (query, key, value))
        key, value = query if key_is_query else key, query if one_tensor else value
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        q, k, v = self._project(*torch_masks.zero_padding(query, key, value, key_padding_mask))
        if group is not None and (need_weights or self.appended):
            what = "attention matrix: pass need_weights=False" if need_weights else "place for appended keys"
            raise Unsupported(f"over several processes there is no {what}")
        spread = None if group is None else shards(group, q.shape[-2], k.shape[-2], q.device)
        tokens = (q.shape[-2], k.shape[-2]) if spread is None else (spread.length, spread.num_keys)
        sequences = packing(cu_seqlens, lengths, *tokens, attn_mask)
        if sequences is not None and need_weights:
            raise ValueError("packed sequences have no attention matrix in common: pass need_weights=False")
        if sequences is not None and self.appended:
            raise Unsupported("add_bias_kv and add_zero_attn append keys to one sequence, not to packed ones")
        if self.rotary is not None and positions is None and key_positions is None:
            positions, key_positions = positions_of(self.rotary, sequences, spread, q.device)
        q, k = rotate_both(self.rotary, q, k, positions, key_positions)
        mechanism = self.attention.mechanism
        visible = torch_masks.convert(q, k.shape[-2], attn_mask, key_padding_mask, is_causal, mechanism)
        if self.appended:
            visible = torch_masks.append_keys(visible, q.shape[-2], k.shape[-2], self.appended, like=q)
            k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)
        out, weights = self._attend(q, k, v, visible, need_weights, sequences, group)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_major(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        inputs, packed, bias = self.attention.mechanism.traits.inputs, self.in_proj_weight, self.in_proj_bias
        widths = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        if packed is not None and query is key and key is value and inputs == "qkv":
            parts = F.linear(query, packed, bias).split(widths, -1)
        else:
            b_q, b_k, b_v = (None, None, None) if bias is None else bias.split(widths)
            separate: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            w_q, w_k, w_v = separate if packed is None else packed.split(widths)
            v = F.linear(value, w_v, b_v)
            # What the mechanism never reads is not computed: anything of the right length stands in for it.
            k = F.linear(key, w_k, b_k) if "k" in inputs else v
            q = F.linear(query, w_q, b_q) if "q" in inputs else query.to(v.dtype)
            parts = (q, k, v)
        return tuple(x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in parts)

    def _append(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """The sequence (N, H, S, E) with the learned key or value and then one of zeros appended."""
        if learned is not None:
            row = learned.to(x.dtype).view(1, self.num_kv_heads, 1, self.head_dim)
            x = torch.cat([x, row.expand(x.shape[0], -1, -1, -1)], -2)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Masks, need_weights: bool, sequences: Packing | None, group: Any
    ) -> tuple[Tensor, Tensor | None]:
        mechanism, width, weights = self.attention.mechanism, v.shape[-1], None
        if need_weights:
            if not mechanism.traits.matrix:
                raise mechanism.refuse("need_weights=True (pass need_weights=False)", "matrix")
            # A [v, I] = [A v, A]: outputs and matrix of one pass, hence of the same dropped weights.
            identity = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
            v = torch.cat([v, identity.expand(*v.shape[:-1], -1)], -1)
        lengths = None if sequences is None else (sequences.queries, sequences.keys)
        dropout = self.dropout if self.training else 0.0
        options: Any = {**visible._asdict(), "dropout": dropout, "lengths": lengths, "enable_gqa": True, "group": group}
        out = self.attention(q, k, v, **options)
        if need_weights:
            out, weights = out[..., :width], out[..., width:]
        return self.out_proj(out.transpose(1, 2).flatten(-2)), weights

    def _nested(self, x: Tensor, plain: bool, *options: bool) -> tuple[Tensor, Tensor | None]:
        """Attend in a nested tensor, into which torch's ``TransformerEncoder`` packs padded batches in evaluation."""
        if not plain or not self.batch_first:
            raise ValueError(
                "nested tensors are taken as query = key = value, with batch_first=True, without masks and cu_seqlens"
            )
        need_weights, average, is_causal = options
        padded, lengths = x.to_padded_tensor(0.0), [len(row) for row in x.unbind()]
        ends = torch.tensor(lengths, device=x.device)[:, None]
        ignored = torch.arange(padded.shape[1], device=x.device) >= ends
        out, weights = self.forward(padded, padded, padded, ignored, need_weights, None, average, is_causal)
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(out, lengths, strict=True)]), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        checks.tensors(query=query, key=key, value=value)
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            raise ValueError(f"query, key and value must be all (tokens, width) or all batched; got {shapes}")
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise ValueError(f"{name} has width {x.shape[-1]} and this module was built for {width}")

    def extra_repr(self) -> str:
        """The sizes, grouped heads and rotary positions."""
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return sizes + grouped + ("" if self.rotary is None else f", rotary={self.rotary!r}")


def _do_nothing(module: nn.Module, inputs: Any) -> None:
    """The hook that keeps torch's layers from their fused path."""
