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
        self.patches = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.places = nn.Parameter(torch.randn(1, (img_size // patch_size) ** 2 + 1, embed_dim))
        how = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "scale_norm": scale_attn_norm}
        self.blocks = nn.Sequential(
            *(TwinBlock(embed_dim, self.layer(embed_dim, num_heads, **how)) for _ in range(depth))
        )
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.patches(x).flatten(2).mT, (0, 0, 1, 0)) + self.places
        return self.head(self.blocks(x)[:, 0])


class TwinBeit(TwinTransformer):
    """A model of timm's with an attention of its own."""

    layer = type("Attention", (TwinAttention,), {"__module__": "timm.models.beit"})


TwinAttention.__module__, TwinAttention.__name__ = "timm.layers.attention", "Attention"
try:
    import timm

    Attention, VisionTransformer, Beit = timm.layers.Attention, timm.models.VisionTransformer, timm.models.Beit
    PLACES: dict[str, ModuleType] = {}
except (ImportError, RuntimeError):  # not there, or beside a torchvision that does not fit torch
    Attention, VisionTransformer, Beit = TwinAttention, TwinTransformer, TwinBeit
    stand_in: Any = ModuleType("timm.models.vision_transformer")
    stand_in.Attention = TwinAttention
    PLACES = {"timm.models.vision_transformer": stand_in}  # of sys.modules, where a swap looks
