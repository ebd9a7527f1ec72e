"""``MultiheadAttention``: ``torch.nn.MultiheadAttention`` with any attention mechanism inside."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.ops import masks


class Seen(NamedTuple):
    """What may be seen, in this library's sense: three arguments of ``Bound.forward``."""

    is_causal: bool
    key_mask: Tensor | None
    attn_mask: Tensor | None


class MultiheadAttention(nn.Module):
    """A drop-in for ``torch.nn.MultiheadAttention``: its arguments, masks, results, initial values and checkpoint names.

    With ``Softmax()`` it computes what torch's module computes, but for queries that may see nothing: those get zeros
    here and NaN there. Also works as ``self_attn`` or ``multihead_attn`` of torch's transformer layers, in training and
    in evaluation: torch's fused encoder path, which would bypass any replacement, stands aside for the hook set here.

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
        max_len: Longest sequence, for mechanisms with ``traits.bounded``.

    Raises:
        Unsupported: The mechanism is a mixer, or cannot take appended keys.
        ValueError: ``num_heads`` does not divide ``embed_dim``, or ``max_len`` is missing.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: Mechanism[Any, Any] | str = "Softmax",
        max_len: int = 0,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self._build_projections(bias, add_bias_kv, device, dtype)
        self.attention = self._bind(catalogue.parse(mechanism), max_len).to(device=device, dtype=dtype)
        # A hook is torch's own sign that a module must really be called: its layers then take no fused short cut.
        self.register_forward_pre_hook(_stand_aside)

    def _build_projections(self, bias: bool, bias_kv: bool, device: Any, dtype: torch.dtype | None) -> None:
        """Parameters under torch's names, drawn in torch's order, so that equal seeds give equal values."""
        width, made = self.embed_dim, {"device": device, "dtype": dtype}
        self.out_proj = nn.Linear(width, width, bias=bias, **made)
        sizes = {"q_proj_weight": width, "k_proj_weight": self.kdim, "v_proj_weight": self.vdim}
        packed = self._qkv_same_embed_dim
        drawn = {"in_proj_weight": (3 * width, width)} if packed else {name: (width, n) for name, n in sizes.items()}
        for name in ("in_proj_weight", *sizes):
            parameter = nn.Parameter(torch.empty(drawn[name], **made)) if name in drawn else None
            self.register_parameter(name, parameter)
            if parameter is not None:
                nn.init.xavier_uniform_(parameter)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.zeros(3 * width, **made)) if bias else None)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, width, **made)) if bias_kv else None)
        if bias_kv:
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)

    def _bind(self, mechanism: Attention[Any, Any] | Any, max_len: int) -> Bound:
        if not isinstance(mechanism, Attention):
            raise Unsupported(f"{mechanism!r} mixes whole tokens and takes no queries: use TokenMixer")
        if self.appended and not mechanism.traits.cross:
            raise mechanism.refuse("add_bias_kv or add_zero_attn (more keys than queries)", "cross")
        longest = max_len + self.appended if max_len else 0
        return Bound(mechanism, Shape(self.num_heads, self.head_dim, longest))

    @property
    def appended(self) -> int:
        """Number of keys appended by ``add_bias_kv`` and ``add_zero_attn``."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

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
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with torch's arguments: in both masks True (or -inf) means *ignore*.

        Args:
            query: (L, E), (N, L, E) with ``batch_first``, else (L, N, E).
            key: The same with S tokens of width ``kdim``.
            value: The same with S tokens of width ``vdim``.
            key_padding_mask: (S) or (N, S), boolean or additive. ``torch.compile`` cannot read values: there an
                additive one may hold 0 and -inf only, and anything else fails at run time.
            need_weights: Whether to return the attention matrix (mechanisms with ``traits.matrix``).
            attn_mask: (L, S) or (N * num_heads, L, S), boolean or additive. One that equals the causal mask counts as
                ``is_causal=True``; any other needs ``traits.mask``.
            average_attn_weights: Whether the attention matrix is averaged over heads.
            is_causal: Without ``attn_mask``: query i sees keys up to i + S - L. Beside an ``attn_mask`` it is a hint
                and the mask decides, except in ``torch.compile``, where the hint is believed if L = S.

        Returns:
            Outputs in the shape of ``query``, and the attention matrix (N, L, S), (N, num_heads, L, S) if not averaged,
            without N for unbatched inputs; or None.

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes do not fit.
        """
        if query.is_nested:
            return self._nested(query, key, value, need_weights, average_attn_weights, is_causal)
        self._check(query, key, value)
        batched, same = query.dim() == 3, query is key and key is value
        query, key, value = (self._batch_major(x) for x in (query, key, value))
        q, k, v = self._project(query, query if same else key, query if same else value)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        seen = self._seen(q, k, attn_mask, key_padding_mask, is_causal)
        if self.appended:
            k, v, seen = self._append(k, v, seen)
        out, weights = self._attend(q, k, v, seen, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_major(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reads = self.attention.mechanism.traits.reads
        if self.in_proj_weight is not None and query is key and key is value and reads == "qkv":
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            packed = self.in_proj_weight
            w = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
            b = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            v = F.linear(value, w[2], b[2])
            # What the mechanism never reads is not computed: anything of the right length stands in for it.
            k = F.linear(key, w[1], b[1]) if "k" in reads else v
            q = F.linear(query, w[0], b[0]) if "q" in reads else query.to(v.dtype)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _seen(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, padding_mask: Tensor | None, is_causal: bool
    ) -> Seen:
        """torch's masks, turned round: here and nowhere else."""
        mechanism, (batch, heads, length, _), keys = self.attention.mechanism, q.shape, k.shape[-2]
        if attn_mask is not None:
            allowed = ((length, keys), (batch * heads, length, keys))
            _check_mask("attn_mask", attn_mask, allowed)
            is_causal = _is_causal(attn_mask, is_causal)
            if is_causal and (mechanism.traits.causal or not mechanism.traits.mask):
                attn_mask = None
            else:
                is_causal = False
                attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
                attn_mask = attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask
        if padding_mask is None:
            return Seen(is_causal, None, attn_mask)
        _check_mask("key_padding_mask", padding_mask, ((batch, keys),))
        if padding_mask.dtype == torch.bool:
            return Seen(is_causal, ~padding_mask, attn_mask)
        key_mask = padding_mask != float("-inf")
        bias = padding_mask.masked_fill(~key_mask, 0.0)
        if torch.compiler.is_compiling():
            torch._assert_async((bias == 0).all(), "key_padding_mask must hold 0 and -inf only where it is compiled")
        elif bool(bias.any()):
            if not mechanism.traits.mask:
                raise mechanism.refuse("a key_padding_mask with values other than 0 and -inf", "mask")
            attn_mask = masks.merge(bias[:, None, None], None, q.dtype) + _additive(attn_mask, q)
        return Seen(is_causal, key_mask, attn_mask)

    def _append(self, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Seen]:
        """The learned key and value, then those of zeros, behind the sequence; every query may see them."""
        raise NotImplementedError
