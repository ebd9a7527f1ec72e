"""``Projections``: the parameters of ``torch.nn.MultiheadAttention``, under its names and drawn in its order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Projections(nn.Module):
    """The base of ``MultiheadAttention``: what tokens are projected by."""

    embed_dim: int
    kdim: int
    vdim: int
    num_kv_heads: int
    head_dim: int
    _qkv_same_embed_dim: bool
    in_proj_weight: Tensor | None
    q_proj_weight: Any  # a Parameter where in_proj_weight is None, and None where it is not
    k_proj_weight: Any
    v_proj_weight: Any
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

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
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def reset_parameters(self) -> None:
        """Draw this layer's own weights again, in place: what ``to_empty`` left of a module on the meta device.

        Those of ``out_proj`` and of ``attention`` are reset by these.
        """
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
        for weight in (self.bias_k, self.bias_v):
            if weight is not None:
                nn.init.xavier_normal_(weight)
