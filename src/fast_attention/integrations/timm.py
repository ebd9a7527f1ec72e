"""Swaps the attention of timm's vision transformers: ViT, DeiT, EVA, DINOv3 and all others made of the same modules."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.integrations.modules import take_over
from fast_attention.integrations.report import dropout_note
from fast_attention.mechanism import Mechanism, Shape
from fast_attention.mechanisms.sparse.grid import InGrid
from fast_attention.nn.bound import Bound

PARTS = ("norm", "gate")  # that only newer releases of timm have
BIASES = ("q_bias", "k_bias", "v_bias")  # of EVA's, parameters and a buffer beside one projection
ATTENTIONS = (  # whose arithmetic is that of ``VisionAttention``
    ("timm.models.vision_transformer", "Attention"),
    ("timm.layers.attention", "AttentionRope"),
    ("timm.models.eva", "EvaAttention"),
)


class VisionAttention(nn.Module):
    """timm's ``Attention``, ``EvaAttention`` or ``AttentionRope`` with any mechanism, ``attention``.

    The submodules are the same under the same names.

    Args:
        old: timm's module; its submodules are shared, not copied.
        mechanism: What attends.
        max_len: The longest sequence, for mechanisms with ``traits.needs_max_len``.
    """

    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def __init__(self, old: Any, mechanism: Mechanism[Any, Any], max_len: int) -> None:
        super().__init__()
        take_over(self, old)
        shape = Shape(old.num_heads, old.head_dim, max_len if mechanism.traits.needs_max_len else 0)
        self.attention = Bound(mechanism, shape).to(old.proj.weight).train(old.training)
        # timm's fused attention has a scale of its own and does not read the module's
        self.factor = 1.0 if old.fused_attn else old.scale * old.head_dim**0.5
        self.prefix, self.halves = getattr(old, "num_prefix_tokens", 0), getattr(old, "rotate_half", False)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, rope: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, N, E) to tokens (B, N, E), as timm's module.

        Args:
            x: Tokens.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (B, H, N, N).
            is_causal: Token i sees tokens up to i.
            rope: Sines and cosines (..., N - prefix, 2 * head_dim) by which queries and keys behind the prefix tokens
                are rotated; the modules without rotary positions have none.

        Raises:
            Unsupported: The mechanism cannot do what was asked, such as a mask that is none of whole tokens.
        """
        q, k, v = self._projected(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (_rotated(t, rope, self.prefix, halves=self.halves).to(v.dtype) for t in (q, k))
        k, v = (t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        q = q if abs(self.factor - 1) < 1e-6 else q * self.factor
        takes_masks = self.attention.mechanism.traits.mask
        dropout = self.attn_drop.p if self.training and takes_masks else 0.0
        visible_tokens = None if attn_mask is None or takes_masks else _tokens(attn_mask, len(x), x.shape[1])
        if visible_tokens is not None:
            out = self.attention(q, k, v, is_causal=is_causal, key_mask=visible_tokens[1])
            out = out.masked_fill(~visible_tokens[0][:, None, :, None], 0.0)
        else:
            out = self.attention(q, k, v, is_causal=is_causal, attn_mask=attn_mask, dropout=dropout)
        norm, gate = (self._modules.get(name) for name in PARTS)
        out = out.transpose(1, 2).flatten(2)
        out = out if norm is None else norm(out)
        return self.proj_drop(self.proj(out if gate is None else out * gate(x).sigmoid()))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, heads, N, head_dim); of keys and values there may be fewer heads."""
        if (qkv := self._modules.get("qkv")) is not None:
            projected = qkv(x)
            biases = [getattr(self, name, None) for name in BIASES]
            if biases[0] is not None:
                projected = projected + torch.cat([b for b in biases if b is not None])
            q, k, v = projected.chunk(3, -1)
        else:
            q, k, v = (self.get_submodule(name)(x) for name in ("q_proj", "k_proj", "v_proj"))
        width = self.attention.shape.head_dim
        q, k, v = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in (q, k, v))
        return q, k, v


OURS = VisionAttention


def _rotated(x: Tensor, rope: Tensor, prefix: int, *, halves: bool) -> Tensor:
    """Queries or keys (B, H, N, E) behind the prefix rotated by ``rope``: pairs of neighbours, or of the two halves."""
    grid = x[:, :, prefix:]
    if halves:
        first, second = grid.chunk(2, -1)
        partners = torch.cat((-second, first), -1)
    else:
        partners = torch.stack((-grid[..., 1::2], grid[..., ::2]), -1).flatten(-2)
    sines, cosines = rope.chunk(2, -1)
    return torch.cat((x[:, :, :prefix], (grid * cosines + partners * sines).to(x.dtype)), 2)


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one of timm's attentions, which all have ``fused_attn``."""
    return type(module).__module__.startswith("timm.") and isinstance(getattr(module, "fused_attn", None), bool)


def sizes(module: Any) -> tuple[int, int, str]:
    """Heads, the width of one, and what the module runs, as far as its class is known."""
    is_known = _is_known(module)
    return getattr(module, "num_heads", 1), module.head_dim if is_known else 0, "Softmax()" if is_known else "its own"


def unsupported_reason(model: nn.Module, name: str, module: nn.Module, mechanism: Mechanism[Any, Any]) -> str:
    """The reason why a mechanism cannot serve a layer; empty if it can."""
    if not _is_known(module):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        return f"{kind} is not the attention of timm's plain vision transformer, EVA or DINOv3"
    return _other_grid(model, name, mechanism) if isinstance(mechanism, InGrid) else ""


def replacement(
    name: str, module: Any, mechanism: Mechanism[Any, Any], max_len: int
) -> tuple[VisionAttention, list[str]]:
    """The module that runs a mechanism in place of timm's, with its parts, and remarks for the report."""
    dropout = module.attn_drop.p
    remarks = [dropout_note(dropout)] if dropout and not mechanism.traits.mask else []
    return VisionAttention(module, mechanism, max_len), remarks


def _is_known(module: nn.Module) -> bool:
    """Whether ``VisionAttention`` computes what the module does."""
    kinds = [getattr(sys.modules.get(module_name), name, None) for module_name, name in ATTENTIONS]
    return type(module) in kinds


def _other_grid(model: nn.Module, name: str, mechanism: InGrid) -> str:
    """How the tokens of a layer's model, where it says which, are laid out otherwise than the mechanism has them."""
    while name:
        name = name.rpartition(".")[0]
        owner: Any = model.get_submodule(name)
        grid = getattr(getattr(owner, "patch_embed", None), "grid_size", None)
        if isinstance(grid, tuple):
            prefix, is_open = getattr(owner, "num_prefix_tokens", 0), getattr(owner, "dynamic_img_size", False)
            fits = is_open or (mechanism.height in (None, grid[0]) and mechanism.width == grid[1])
            sizes = f"height={grid[0]}, width={grid[1]}, num_prefix_tokens={prefix}"
            return "" if fits and mechanism.num_prefix_tokens == prefix else f"the model's tokens are a grid of {sizes}"
    return ""


def _tokens(mask: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor] | None:
    """A mask of whole tokens as queries (B, N) that see anything and keys (B, N) that may be seen; else None.

    A compiled graph, which cannot read values, assumes such a mask and fails at run time where it is another.
    """
    visible = mask if mask.dtype == torch.bool else mask == 0
    separable = True if mask.dtype == torch.bool else (visible | (mask <= torch.finfo(mask.dtype).min)).all()
    visible = visible.expand(torch.broadcast_shapes(visible.shape, (batch, 1, length, length)))
    queries, keys = visible.any(-1, keepdim=True), visible.any(-2, keepdim=True)
    separable = separable & (visible == (queries & keys)).all()
    if visible.shape[1] > 1 or not (torch.compiler.is_compiling() or bool(separable)):
        return None
    if torch.compiler.is_compiling():
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            separable,
            "an attn_mask that says more than which tokens are there, in a compiled swapped model. What would work: "
            "such a mask, or a mechanism that takes every mask, as Softmax or ReLUAttention",
        )
    return queries[:, 0, :, 0], keys[:, 0, 0]
