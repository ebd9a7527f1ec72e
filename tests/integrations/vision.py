"""timm's vision transformer where timm can be imported; elsewhere a twin: its attention written after timm 1.0.31.

timm needs a torchvision that fits torch, which few environments of a CPU torch have. The twin has the parts, names,
arguments and single steps of timm's attention, and stands where a swap looks for timm's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TwinAttention(nn.Module):
    """``timm.layers.Attention``."""

    def __init__(
        self, dim: int, num_heads: int = 8, *, qkv_bias: bool = False, qk_norm: bool = False, scale_norm: bool = False,
        gated: bool = False, attn_drop: float = 0.0, proj_drop: float = 0.0, norm_layer: Any = nn.LayerNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(dim) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=qkv_bias) if gated else None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal)
        else:
            scores = q * self.scale @ k.transpose(-2, -1)
            if is_causal:
                scores = scores + torch.full((N, N), float("-inf")).triu(1)
            elif attn_mask is not None:
                bias = attn_mask
                if attn_mask.dtype == torch.bool:
                    bias = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, float("-inf"))
                scores = scores + bias
            out = self.attn_drop(scores.softmax(-1)) @ v
        out = self.norm(out.transpose(1, 2).reshape(B, N, C))
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class TwinBlock(nn.Module):
    def __init__(self, dim: int, attn: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), attn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class TwinTransformer(nn.Module):
    """What the tests need of timm's ``VisionTransformer``: patches, and a token before them."""

    layer: Any = TwinAttention

    def __init__(
        self, *, img_size: int, patch_size: int, embed_dim: int, depth: int, num_heads: int, num_classes: int,
        qkv_bias: bool = True, qk_norm: bool = False, scale_attn_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch_embed: Any = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        side = img_size // patch_size
        self.patch_embed.grid_size, self.num_prefix_tokens = (side, side), 1
        self.places = nn.Parameter(torch.randn(1, side**2 + 1, embed_dim))
        how = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "scale_norm": scale_attn_norm}
        self.blocks = nn.Sequential(
            *(TwinBlock(embed_dim, self.layer(embed_dim, num_heads, **how)) for _ in range(depth))
        )
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.patch_embed(x).flatten(2).mT, (0, 0, 1, 0)) + self.places
        return self.head(self.blocks(x)[:, 0])


class TwinBeit(TwinTransformer):
    """A model of timm's with an attention of its own."""

    layer = type("Attention", (TwinAttention,), {"__module__": "timm.models.beit"})


class TwinEva(nn.Module):
    """``timm.models.eva.EvaAttention``: rotary positions, and biases beside the projection but none of keys."""

    q_bias: Any
    k_bias: Any
    v_bias: Any

    def __init__(
        self, dim: int, num_heads: int = 8, *, qkv_bias: bool = True, qkv_fused: bool = True,
        num_prefix_tokens: int = 1, attn_drop: float = 0.0, norm_layer: Any = None, qk_norm: bool = False,
        scale_norm: bool = True, rotate_half: bool = False, gated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, dim // num_heads, num_heads
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.num_prefix_tokens, self.rotate_half = num_prefix_tokens, rotate_half
        self._projections(dim, qkv_bias, qkv_fused)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(attn_drop), nn.Linear(dim, dim), nn.Dropout(0.0)
        self.norm = norm_layer(dim) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=qkv_bias) if gated else None

    def _projections(self, dim: int, bias: bool, fused: bool) -> None:
        self.qkv = nn.Linear(dim, 3 * dim, bias=False) if fused else None
        if fused and bias:
            self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
            self.register_buffer("k_bias", torch.zeros(dim), persistent=False)
        else:
            self.q_bias = self.k_bias = self.v_bias = None
        if not fused:
            self.q_proj, self.v_proj = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
            self.k_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        B, N, C = x.shape
        if self.qkv is not None:
            bias = self.qkv.bias if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
            projected = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        else:
            projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.reshape(B, N, -1, self.head_dim).transpose(1, 2) for t in projected)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self._turned(q, rope), self._turned(k, rope)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        dropout = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal)
        out = self.norm(out.transpose(1, 2).reshape(B, N, C))
        return self.proj_drop(self.proj(out if self.gate is None else out * self.gate(x).sigmoid()))

    def _turned(self, x: Tensor, rope: Tensor) -> Tensor:
        prefix, grid = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        sines, cosines = rope.chunk(2, -1)
        other = torch.empty_like(grid)
        if self.rotate_half:
            half = self.head_dim // 2
            other[..., :half], other[..., half:] = -grid[..., half:], grid[..., :half]
        else:
            other[..., ::2], other[..., 1::2] = -grid[..., 1::2], grid[..., ::2]
        return torch.cat((prefix, grid * cosines + other * sines), 2)


class TwinRope(TwinEva):
    """``timm.layers.attention.AttentionRope``: projections of the usual kind, and perhaps fewer heads of keys."""

    def __init__(self, dim: int, num_heads: int = 8, *, num_kv_heads: int | None = None, **how: Any) -> None:
        self._fewer = num_kv_heads or num_heads
        super().__init__(dim, num_heads, **how)
        self.num_kv_heads = self._fewer

    def _projections(self, dim: int, bias: bool, fused: bool) -> None:
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias) if fused else None
        self.q_bias = None
        if not fused:
            self.q_proj = nn.Linear(dim, dim, bias=bias)
            self.k_proj = nn.Linear(dim, self._fewer * self.head_dim, bias=bias)
            self.v_proj = nn.Linear(dim, self._fewer * self.head_dim, bias=bias)


TwinAttention.__module__, TwinAttention.__name__ = "timm.layers.attention", "Attention"
TwinEva.__module__, TwinEva.__name__ = "timm.models.eva", "EvaAttention"
TwinRope.__module__, TwinRope.__name__ = "timm.layers.attention", "AttentionRope"
try:
    import timm

    Attention, VisionTransformer, Beit = timm.layers.Attention, timm.models.VisionTransformer, timm.models.Beit
    EvaAttention, AttentionRope = timm.models.eva.EvaAttention, timm.layers.AttentionRope
    PLACES: dict[str, ModuleType] = {}
except (ImportError, RuntimeError):  # not there, or beside a torchvision that does not fit torch
    Attention, VisionTransformer, Beit = TwinAttention, TwinTransformer, TwinBeit
    EvaAttention, AttentionRope = TwinEva, TwinRope
    KINDS = {
        "timm.models.vision_transformer": ("Attention", TwinAttention),
        "timm.models.eva": ("EvaAttention", TwinEva),
        "timm.layers.attention": ("AttentionRope", TwinRope),
    }
    PLACES = {place: ModuleType(place) for place in KINDS}  # of sys.modules, where a swap looks
    for place, (name, kind) in KINDS.items():
        setattr(PLACES[place], name, kind)
