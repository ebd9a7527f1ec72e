"""Exponential random features of tokens, each with one log scale, in few passes over memory and by their own gradient.

They serve sums in which products of features stand beside other weights, as in Hybrid.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.bounds import MOST, bounded
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.exponential import LOG2E
from fast_attention.feature_maps.feature_map import Features

LARGE = 25.0  # the logarithm of a token's largest feature from which on it goes to the log scale


def token_features(
    x: Float[Tensor, "*batch n width"], rows: Tensor, bias: Tensor | None, *, hyperbolic: bool, factor: float
) -> Features:
    """``exp(w . x / d^(1/4) - ||x||^2 / (2 sqrt(d)) + bias + factor)`` for rows w, and for -w if ``hyperbolic``."""
    return Features(*_FEATURES(x, rows, bias, hyperbolic=hyperbolic, factor=factor))


def _plain(x: Tensor, rows: Tensor, bias: Tensor | None, *, hyperbolic: bool, factor: float) -> tuple[Tensor, Tensor]:
    x = bounded(x) * x.shape[-1] ** -0.25
    logs = x @ (torch.cat([rows, -rows], -2) if hyperbolic else rows).mT
    logs = logs if bias is None else logs + bias
    top = logs.detach().amax(-1)
    shift = top.masked_fill(top.abs() <= LARGE, 0.0)
    return (logs - shift[..., None]).exp(), shift - x.square().sum(-1) / 2 + factor


def _forward(
    x: Tensor, rows: Tensor, bias: Tensor | None, *, keep: bool, hyperbolic: bool, factor: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    width, number = x.shape[-1], rows.shape[-2]
    scaled = (rows * (LOG2E * width**-0.25)).mT
    if hyperbolic and bias is None:
        z = x @ scaled
        values = z.new_empty(*z.shape[:-1], 2 * number)
    else:
        values = z = x @ (torch.cat([scaled, -scaled], -1) if hyperbolic else scaled)
        z = z if bias is None else z.add_(bias, alpha=LOG2E)
    log_scale = torch.linalg.vector_norm(x, dim=-1).square_().mul_(-0.5 * width**-0.5).add_(factor)
    if not _in_range(z, log_scale, hyperbolic):
        return _plain(x, rows, bias, hyperbolic=hyperbolic, factor=factor), ()
    if values is z:
        return (values.exp2_(), log_scale), ()
    torch.exp2(z, out=values[..., :number])  # torch's exp into every other run of numbers takes four times as long
    torch.reciprocal(values[..., :number], out=values[..., number:])
    return (values, log_scale), ()


def _in_range(z: Tensor, log_scale: Tensor, hyperbolic: bool) -> bool:
    """Whether no token's largest logarithm (of base two in ``z``) is above ``LARGE`` in size, and none was bounded."""
    top = None if hyperbolic else z.amax(-1)
    least, most = (z.amin(), z.amax()) if top is None else top.aminmax()
    limit = LARGE * LOG2E
    return -limit <= float(least) and float(most) <= limit and float(log_scale.amin()) > -MOST


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: Tensors, gradients: tuple[Tensor, ...],
    *, hyperbolic: bool, factor: float,
) -> Tensors:  # fmt: skip
    (x, rows, bias), (values, log_scale) = inputs, outputs
    d_logs, d_log_scale = gradients[0] * values, gradients[1]
    d_bias = None if bias is None or not bias.requires_grad else d_logs.sum_to_size(bias.shape)
    number, width = rows.shape[-2], x.shape[-1]
    dz = torch.sub(d_logs[..., :number], d_logs[..., number:]) if hyperbolic else d_logs
    dx = (dz @ (rows * width**-0.25)).addcmul_(x, d_log_scale[..., None], value=-(width**-0.5))
    if not float(log_scale.amin()) > -MOST:  # slope 0 beyond the bound
        dx = dx.masked_fill(x.abs() > MOST, 0.0)
    d_rows = (dz.mT @ x * width**-0.25).sum_to_size(rows.shape) if rows.requires_grad else None
    return dx, d_rows, d_bias


_FEATURES = CustomGradient(_plain, _forward, _backward)
