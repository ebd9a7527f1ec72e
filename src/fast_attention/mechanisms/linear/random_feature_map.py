"""Random feature maps in place, chunk by chunk: features are never held for a whole sequence.

Everything here works on flat heads: tokens (h, n, d), projections (h, m, d), features (h, n, C), in a ``Workspace``.
Keys' features are divided by ``e^log_scale`` of the largest so far, or of one not far below it: each exponential by one
of its own, so that no query's largest term vanishes; cosines, which share a key's scale, by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.numerics import exp_
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.feature_maps.random_features import positive, trigonometric


class Heads(NamedTuple):
    """The weights of some heads: rows (..., m, d), what is added to every exponent (..., 1, C), and the keys' own rows
    where they are not those of the queries; also the gradients of all these.
    """

    rows: Tensor
    bias: Tensor | None = None
    key_rows: Tensor | None = None

    @property
    def keys(self) -> Heads:
        """As the keys use them."""
        return self if self.key_rows is None else Heads(self.key_rows, self.bias)

    @property
    def trained(self) -> bool:
        """Whether a gradient of one of them is wanted."""
        return any(x is not None and x.requires_grad for x in self)

    def some(self, heads: slice) -> Heads:
        """The weights of a few heads."""
        return self.mapped(lambda x: x[heads])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Heads:
        """``function`` of each tensor."""
        bias, key_rows = (None if x is None else function(x) for x in self[1:])
        return Heads(function(self.rows), bias, key_rows)


@dataclass(frozen=True)
class RandomFeatureMap:
    """From tokens to features and back: ``z = d^(-1/4) W x``, then ``kind``, exponents plus a bias.

    A key's logarithms are ``z + sign ||x||^2 / (2 sqrt d)``; cosines have but the second part.
    """

    kind: Literal["positive", "hyperbolic", "sincos"]

    @property
    def pairs(self) -> bool:
        """Whether each row makes two features."""
        return self.kind != "positive"

    @property
    def exponential(self) -> bool:
        """Whether features are exponentials."""
        return self.kind != "sincos"

    @property
    def sign(self) -> float:
        """The sign of half the squared norm in the scale."""
        return -1.0 if self.exponential else 1.0

    def width(self, rows: Tensor) -> int:
        """Features of rows (..., m, d)."""
        return rows.shape[-2] * (2 if self.pairs else 1)

    def first_log_scale(self, like: Tensor, count: int, rows: Tensor) -> Tensor:
        """The log scales of ``count`` heads before the first key: (h, 1, C), or (h, 1, 1) for cosines."""
        return like.new_full((count, 1, self.width(rows) if self.exponential else 1), FLOOR)

    def plain(self, x: Tensor, heads: Heads, factor: float = 0.0) -> Features | Logs:
        """Features of keys, times ``e^factor``, in operations that autograd follows."""
        x = x * x.shape[-1] ** -0.25
        if self.exponential:
            return positive(x, heads.rows, heads.bias, hyperbolic=self.kind == "hyperbolic", factor=factor)
        values, scale = trigonometric(x, heads.rows)
        assert scale is not None
        return Features(values, scale + (math.log(heads.rows.shape[-2]) / 2 + factor))

    def unbiased(self, x: Tensor, heads: Heads) -> Features | Logs:
        """``plain`` of queries, with what ``plain`` leaves out of both: times ``plain`` of keys it estimates exp."""
        count = self.width(heads.rows) if self.exponential else heads.rows.shape[-2]
        return self.plain(x, heads, -math.log(count))

    def raw(
        self, x: Tensor, heads: Heads, workspace: Workspace, name: str, log_scale: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Exponents plus ``log_scale`` (h, 1, C), or finished cosines, in the workspace as ``name``."""
        W, bias = heads.rows, heads.bias
        h, n, m = len(x), x.shape[1], W.shape[1]
        z = workspace("rows" if self.pairs else name, h, n, m)
        added = bias if log_scale is None else log_scale if bias is None else log_scale + bias
        if added is None or self.pairs:
            z.baddbmm_(x, W.mT, beta=0, alpha=x.shape[-1] ** -0.25)
        else:  # the product begins with it
            return torch.baddbmm(added, x, W.mT, alpha=x.shape[-1] ** -0.25, out=z)
        values = workspace(name, h, n, 2 * m) if self.pairs else z
        if self.kind == "sincos":
            torch.cos(z, out=values[..., :m])
            torch.sin(z, out=values[..., m:])
            return values
        if self.kind == "hyperbolic":
            torch.neg(z, out=values[..., m:])
            values[..., :m] = z
        return values if added is None else values.add_(added)

    def queries(self, x: Tensor, heads: Heads, log_scale: Tensor, workspace: Workspace) -> Tensor:
        """Features up to one factor per query, for keys that are divided by ``e^log_scale`` (h, 1, C)."""
        values = self.raw(x, heads, workspace, "queries", log_scale if self.exponential else None)
        if not self.exponential:
            return values
        return exp_(values.sub_(values.amax(-1, keepdim=True)))

    def keys(self, x: Tensor, heads: Heads, masked: Tensor | None, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Logarithms of features, or finished cosines, and half the squared norm with its sign (h, n, 1); masked: -inf.

        ``masked`` is (h, n, 1).
        """
        if masked is not None:
            x = x.masked_fill(masked, 0.0)
        values = self.raw(x, heads, workspace, "keys")
        half = torch.linalg.vecdot(x, x).mul_(self.sign * 0.5 * x.shape[-1] ** -0.5)[..., None]
        if masked is not None:
            half.masked_fill_(masked, float("-inf"))
        return (values.add_(half) if self.exponential else values), half

    def finish(self, values: Tensor, half: Tensor, log_scale: Tensor) -> Tensor:
        """Keys' features over ``e^log_scale`` (h, 1, C), in place."""
        return exp_(values.sub_(log_scale)) if self.exponential else values.mul_((half - log_scale).exp_())

    def vjp(
        self, d: Tensor, values: Tensor, x: Tensor, heads: Heads, workspace: Workspace, out: Tensor, is_key: bool,
        d_heads: Heads | None = None,
    ) -> None:  # fmt: skip
        """Write the tokens' gradient, given that of their features, ``d`` (overwritten), and the features; that of rows
        and bias is added to ``d_heads``.
        """
        m, scale = heads.rows.shape[1], x.shape[-1] ** -0.25
        if self.kind == "sincos":  # the derivative of a cosine is minus the sine
            product = torch.mul(d, values, out=workspace("product", *d.shape)) if is_key else d
            d[..., m:].mul_(values[..., :m])
            dz = d[..., m:].sub_(d[..., :m].mul_(values[..., m:]))
        else:
            dz = product = d.mul_(values)
            if self.pairs:
                dz = torch.sub(d[..., :m], d[..., m:], out=workspace("rows", *d.shape[:2], m))
        if d_heads is not None:
            d_heads.rows.baddbmm_(dz.mT, x, alpha=scale)
            if d_heads.bias is not None:
                d_heads.bias.add_(product.sum(1, keepdim=True))
        dx = torch.bmm(dz, heads.rows).mul_(scale)
        if is_key:
            dx.addcmul_(x, product.sum(-1)[..., None], value=self.sign * x.shape[-1] ** -0.5)
        out.copy_(dx)
