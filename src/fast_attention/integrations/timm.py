"""Swaps the attention of timm's vision transformers: ViT, DeiT and all others that are made of its ``Attention``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.integrations.modules import exchange, replace_module
from fast_attention.integrations.report import UNNAMED, Layer, dropout_note, no_queries
from fast_attention.mechanism import Attention, Mechanism, Shape
from fast_attention.nn.bound import Bound

BEFORE = "_before_swap"  # where a swapped layer keeps timm's module, which shares its parts
PARTS = ("norm", "gate")  # that only newer releases of timm have


class VisionAttention(nn.Module):
    """timm's ``Attention`` with any mechanism: the same submodules under the same names, and ``attention``.

    Args:
        old: timm's module; its submodules are shared, not copied.
        mechanism: What attends.
        max_len: The longest sequence, for mechanisms with ``traits.bounded``.
    """

    qkv: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def __init__(self, old: Any, mechanism: Mechanism[Any, Any], max_len: int) -> None:
        super().__init__()
        for name, child in old.named_children():
            self.add_module(name, child)
        shape = Shape(old.num_heads, old.head_dim, max_len if mechanism.traits.bounded else 0)
        self.attention = Bound(mechanism, shape).to(old.qkv.weight).train(old.training)
        # timm's fused attention has a scale of its own and does not read the module's
        self.factor = 1.0 if old.fused_attn else old.scale * old.head_dim**0.5
        self.training = old.training
        self.__dict__[BEFORE] = old

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens (B, N, E) to tokens (B, N, E), as timm's module.

        Args:
            x: Tokens.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (B, H, N, N).
            is_causal: Token i sees tokens up to i.

        Raises:
            Unsupported: The mechanism cannot do what was asked, such as a mask that is none of whole tokens.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.attention.shape.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
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


def swap(model: nn.Module, wanted: Any, max_len: int | None) -> tuple[Layer, ...]:
    """Replace every attention of timm's that ``wanted`` names; weights are shared, names stay.

    Raises:
        Unsupported: No layer can be swapped.
    """
    return exchange(
        model, wanted, _is_attention, lambda name, module, mechanism: _plan(name, module, mechanism, max_len)
    )


def swap_back(model: nn.Module) -> bool:
    """Undo ``swap``: put timm's modules back, with the present weights; whether there were any to undo."""
    swapped = [(name, module) for name, module in model.named_modules() if isinstance(module, VisionAttention)]
    for name, module in swapped:
        old = module.__dict__[BEFORE]
        for child, part in module.named_children():
            if child in old._modules:
                setattr(old, child, part)
        old.training = module.training
        replace_module(model, name, old)
    return bool(swapped)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is one of timm's attentions, which all have ``fused_attn``."""
    return type(module).__module__.startswith("timm.") and isinstance(getattr(module, "fused_attn", None), bool)


def _plan(
    name: str, module: Any, mechanism: Mechanism[Any, Any] | None, max_len: int | None
) -> tuple[Layer, VisionAttention | None]:
    """The report of a layer, and its new module; None where it stays."""
    kind, heads = type(module).__name__, getattr(module, "num_heads", 1)
    library = sys.modules.get("timm.models.vision_transformer")
    is_plain = library is not None and type(module) is library.Attention
    width = module.head_dim if is_plain else 0
    reason = UNNAMED if mechanism is None else ""
    if mechanism is not None and not isinstance(mechanism, Attention):
        reason = no_queries(mechanism)
    elif not is_plain:
        reason = f"{type(module).__module__}.{kind} is not the attention of timm's plain vision transformer"
    if mechanism is None or reason:
        return Layer(
            name, kind, heads, width, False, "Softmax()" if is_plain else "its own", reason, replaced=False
        ), None
    new, note = VisionAttention(module, mechanism, max_len or 0), ""
    if module.attn_drop.p and not mechanism.traits.mask:
        note = dropout_note(module.attn_drop.p)
    learned = sum(p.numel() for p in new.attention.parameters())
    return Layer(name, kind, heads, width, False, repr(mechanism), note, True, learned), new


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
