"""Random features block by block, in place, for loops that never hold the features of a whole sequence.

Everything here works on flat heads: tokens (h, n, d), projections (h, m, d), features (h, n, C), in buffers that a
``Scratch`` keeps between blocks. Keys' features are in units of the largest scale so far, or of one not far below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fast_attention.ops.exponential import exp_
from fast_attention.ops.maps.features import Features
from fast_attention.ops.maps.random_features import positive, trigonometric
from fast_attention.ops.scratch import Scratch


class Heads(NamedTuple):
    """What belongs to some heads: rows (..., m, d), and what is added to every exponent (..., 1, C) or None."""

    rows: Tensor
    bias: Tensor | None = None

    def some(self, heads: slice) -> Heads:
        """Those of a few heads."""
        return Heads(self.rows[heads], None if self.bias is None else self.bias[heads])


@dataclass(frozen=True)
class Lift:
    """From tokens to features and back: ``z = d^(-1/4) W x``, then ``kind``, exponents plus a bias.

    A key's scale is ``top + sign ||x||^2 / (2 sqrt d)``: ``top`` is the largest exponent of a positive feature, 0 else.
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
        """Of half the squared norm in the scale."""
        return -1.0 if self.exponential else 1.0

    def width(self, rows: Tensor) -> int:
        """Features of rows (..., m, d)."""
        return rows.shape[-2] * (2 if self.pairs else 1)

    def constant(self, rows: Tensor) -> float:
        """What ``plain`` and ``keys`` leave out of the scale: it is the same for all keys."""
        return -math.log(rows.shape[-2] if self.kind == "sincos" else self.width(rows)) / 2

    def plain(self, x: Tensor, heads: Heads) -> Features:
        """The same features in operations that autograd follows."""
        x = x * x.shape[-1] ** -0.25
        if self.kind == "sincos":
            values, scale = trigonometric(x, heads.rows)
        else:
            values, scale = positive(x, *heads, hyperbolic=self.kind == "hyperbolic")
        assert scale is not None
        return Features(values, scale - self.constant(heads.rows))

    def whole(self, x: Tensor, heads: Heads) -> Features:
        """``plain`` of queries, with what ``plain`` leaves out of both: times ``plain`` of keys it estimates exp."""
        values, scale = self.plain(x, heads)
        assert scale is not None
        return Features(values, scale + 2 * self.constant(heads.rows))

    def raw(self, x: Tensor, heads: Heads, desk: Scratch, name: str) -> tuple[Tensor, Tensor | None]:
        """Exponents, or finished cosines, in a buffer called ``name``, and each token's largest exponent (h, n)."""
        W, bias = heads
        h, n, m = len(x), x.shape[1], W.shape[1]
        z = desk("rows" if self.pairs else name, h, n, m)
        z.baddbmm_(x, W.mT, beta=0, alpha=x.shape[-1] ** -0.25)
        values = desk(name, h, n, 2 * m) if self.pairs else z
        if self.kind == "sincos":
            torch.cos(z, out=values[..., :m])
            torch.sin(z, out=values[..., m:])
            return values, None
        if self.kind == "hyperbolic":
            torch.neg(z, out=values[..., m:])
            values[..., :m] = z
        if bias is not None:
            values.add_(bias)
        return values, values.amax(-1)

    def queries(self, x: Tensor, heads: Heads, desk: Scratch, name: str) -> Tensor:
        """Features up to one factor per query."""
        values, top = self.raw(x, heads, desk, name)
        return values if top is None else exp_(values.sub_(top[..., None]))

    def keys(
        self, x: Tensor, heads: Heads, mask: Tensor | None, desk: Scratch, name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``raw``, the scale of every key (-inf where masked), and half its squared norm with the sign (h, n)."""
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        values, top = self.raw(x, heads, desk, name)
        half = torch.linalg.vecdot(x, x).mul_(self.sign * 0.5 * x.shape[-1] ** -0.5)
        scale = half.clone() if top is None else top.add_(half)
        if mask is not None:
            scale.masked_fill_(~mask, float("-inf"))
            half = half.masked_fill(~mask, float("-inf"))
        return values, scale, half

    def finish(self, values: Tensor, half: Tensor, unit: Tensor) -> Tensor:
        """Keys' features in units of ``e^unit`` (h, 1), in place."""
        shift = (half - unit)[..., None]
        return exp_(values.add_(shift)) if self.exponential else values.mul_(shift.exp_())

    def pull(
        self, d: Tensor, values: Tensor, x: Tensor, heads: Heads, desk: Scratch, out: Tensor, is_key: bool
    ) -> None:
        """The tokens' gradient from that of their features, ``d`` (overwritten), and the features, into ``out``."""
        m = heads.rows.shape[1]
        if self.kind == "sincos":  # the derivative of a cosine is minus the sine
            product = torch.mul(d, values, out=desk("product", *d.shape)) if is_key else d
            d[..., m:].mul_(values[..., :m])
            dz = d[..., m:].sub_(d[..., :m].mul_(values[..., m:]))
        else:
            dz = product = d.mul_(values)
            if self.pairs:
                dz = torch.sub(d[..., :m], d[..., m:], out=desk("rows", *d.shape[:2], m))
        found = torch.bmm(dz, heads.rows).mul_(x.shape[-1] ** -0.25)
        if is_key:
            found.addcmul_(x, product.sum(-1)[..., None], value=self.sign * x.shape[-1] ** -0.5)
        out.copy_(found)
