"""Describes attention scores as a sum of products, tables and outer products, of which any tile can be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine.blocks import narrow
from fast_attention.engine.heads import by_head


class Scores(NamedTuple):
    """The summands of the scores of query i for key j. A None is no summand; sizes before the last two broadcast.

    Q (..., H, L, r) and K (..., H, S, r): their products. R (..., H, L, S): a table, times ``share`` (H,) if given.
    X (..., H, L, a) and Y (..., H, L, b): ``X_i,(j // b) Y_i,(j mod b)``.
    """

    Q: Tensor | None = None
    K: Tensor | None = None
    R: Tensor | None = None
    share: Tensor | None = None
    X: Tensor | None = None
    Y: Tensor | None = None

    def length(self) -> int:
        """Queries."""
        return next(x for x in (self.Q, self.R, self.X) if x is not None).shape[-2]

    def whole(self, keys: int) -> Float[Tensor, "*batch heads length keys"]:
        """All scores at once."""
        parts = []
        if self.Q is not None and self.K is not None:
            parts.append(by_head(self.Q, self.K.mT))
        if self.R is not None:
            parts.append(_weighed(self.R, self.share))
        if self.X is not None and self.Y is not None:
            outer = (self.X[..., :, None] * self.Y[..., None, :]).flatten(-2)
            parts.append(narrow(outer, keys, axis=-1))
        return sum(parts[1:], parts[0])

    def of(self, b: int, heads: slice, rows: slice, keys: slice) -> Scores:
        """The summands of one sequence and of some heads, for some queries and keys."""

        def part(x: Tensor | None, *at: slice) -> Tensor | None:
            return None if x is None else x[b if len(x) > 1 else 0, heads if x.shape[1] > 1 else slice(None), *at]

        share = None if self.share is None else self.share[heads]
        Q, X, Y = (part(x, rows) for x in (self.Q, self.X, self.Y))
        return Scores(Q, part(self.K, keys), part(self.R, rows, keys), share, X, Y)


def mixed(parts: Sequence[Scores], shares: Float[Tensor, "heads parts"], keys: int) -> Scores:
    """Add several scores, each times its fraction by head: products are laid side by side and become one.

    One table and one outer product stay as they are; further ones are added into the table.
    """
    Q, K, R, share, X, Y = [], [], None, None, None, None
    for part, share_of_part in zip(parts, shares.unbind(-1), strict=True):
        column = share_of_part[:, None, None]
        if part.Q is not None and part.K is not None:
            Q.append(part.Q * column)
            K.append(part.K)
        if part.R is not None:
            R, share = (part.R, share_of_part) if R is None else (_weighed(R, share) + part.R * column, None)
        if part.X is not None:
            if X is None:
                X, Y = part.X * column, part.Y
            else:
                R, share = _weighed(R, share) + Scores(X=part.X * column, Y=part.Y).whole(keys), None
    return Scores(_concat_parts(Q), _concat_parts(K), R, share, X, Y)


def _weighed(R: Tensor | None, share: Tensor | None) -> Tensor | float:
    if R is None:
        return 0.0
    return R if share is None else R * share[:, None, None]


def _concat_parts(parts: list[Tensor]) -> Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    sizes = torch.broadcast_shapes(*(x.shape[:-1] for x in parts))
    return torch.cat([x.expand(*sizes, x.shape[-1]) for x in parts], -1)


def spread(slope: Tensor, part: Scores, grads: Scores, keys: slice) -> None:
    """Add the gradients of a block's summands, ``slope`` being that of its scores."""
    if grads.Q is not None and part.K is not None:
        grads.Q.baddbmm_(slope, part.K)
    if grads.K is not None and part.Q is not None:
        grads.K.mT.baddbmm_(part.Q.mT, slope)
    if grads.R is not None:
        share: Tensor = slope.new_ones(()) if part.share is None else part.share[:, None, None]
        grads.R.addcmul_(slope, share)
    if grads.share is not None and part.R is not None:
        grads.share.add_((slope * part.R).sum((1, 2)))
    if part.X is not None and part.Y is not None:
        a, b = part.X.shape[-1], part.Y.shape[-1]
        whole = pad(slope, (keys.start, a * b - keys.stop)).unflatten(-1, (a, b))
        if grads.X is not None:
            grads.X.add_((whole * part.Y[..., None, :]).sum(-1))
        if grads.Y is not None:
            grads.Y.add_((whole * part.X[..., :, None]).sum(-2))
