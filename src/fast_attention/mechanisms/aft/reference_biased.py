"""AFT with biases in plain differentiable operations: ``sum_j exp(s_j + w_ij) v_j``, w shared by all channels.

The weights factor into exp(w_ij) and exp(s_j), so that the sums are products of matrices, not n x n x d tensors. What
does not factor is the log scale: each query has its own largest visible score, and a product with one log scale for all
would underflow for some. Where not all queries see the same keys, these are taken in tiles whose keys every query sees:
the maximum of a tile is nowhere above a query's own. Triangles fall into such squares by halving. Log scales are
constants to autograd: they cancel between numerator and denominator.

Scores and ``values_and_ones``, here x, come from ``reference.terms``. Results are exact as long as biases of one row,
and the 0 outside its window, lie within 80 of each other in float32 (700 in float64); scores may lie anywhere.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.blocks import join, narrow, smaller, split
from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.numerics import at_most
from fast_attention.engine.scan import FLOOR, cummax, prefix_sums, running_max
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.aft.reference import weighted

SIDE = 32  # a causal triangle of n tokens is halved down to triangles of at most this many, these to single tokens


def full(
    bias: Float[Tensor, "length keys"],
    scores: Float[Tensor, "*batch keys weights"],
    values_and_ones: Float[Tensor, "*batch keys sums"],
) -> Float[Tensor, "*batch length sums"]:
    """``sum_j exp(w_ij + s_j) x_j`` over all keys, up to a factor per query and channel; time O(n^2 d)."""
    weights = (bias - bias.detach().amax(-1, keepdim=True)).exp()
    return weights @ weighted(scores, values_and_ones, scores.detach().amax(-2, keepdim=True))


def full_causal(
    bias: Float[Tensor, "length length"],
    scores: Float[Tensor, "*batch length weights"],
    values_and_ones: Float[Tensor, "*batch length sums"],
    *,
    longest: int,
) -> Float[Tensor, "*batch length sums"]:
    """``sum_{j <= i} exp(w_ij + s_j) x_j`` up to a factor per query and channel: half the products of ``full``.

    ``longest`` bounds the length: an exported graph, which may not ask for the length, halves that often.
    """
    length, rounds = bias.shape[-1], 0
    size = longest if exporting() else length
    while SIDE << rounds < size:
        rounds += 1
    count = 1 << rounds
    side = -(-size // count)
    missing = side * count - length
    bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1), FLOOR)
    weights = (bias - bias.detach().amax(-1, keepdim=True)).exp()
    weights = F.pad(weights, (0, missing, 0, missing))
    scale, values_and_ones = (F.pad(x, (0, 0, 0, missing)) for x in (running_max(scores.detach()), values_and_ones))
    scores = F.pad(scores, (0, 0, 0, missing), value=FLOOR)
    corners = _corners(weights[None, None], count)[0]
    blocks = [x.unflatten(-2, (count, side)) for x in (scores, values_and_ones, scale)]
    inside = _triangle(corners, *blocks, size=SIDE, diagonal=True)
    across = _halves(
        weights[None, None], *(x[..., None, :, :] for x in (scores, values_and_ones, scale)), rounds=rounds
    )
    return narrow(inside.flatten(-3, -2) + across[..., 0, :, :], length, axis=-2)


def windowed(
    band: Float[Tensor, "#heads #length taps"],
    scores: Float[Tensor, "*batch heads length weights"],
    values_and_ones: Float[Tensor, "*batch heads length sums"],
    *,
    is_causal: bool,
    strict: bool,
) -> Float[Tensor, "*batch heads length sums"]:
    """``sum_j exp(w_ij + s_j) x_j`` up to a factor per query and channel, w given in a window and 0 outside it.

    ``band[..., i, o]`` is the bias of key ``i + o - taps // 2`` for query i; ``strict`` leaves out the keys outside the
    window. Time O(n taps d), memory O(n (taps + d log taps)), never n x n.
    """
    length, reach = scores.shape[-2], band.shape[-1] // 2
    size = smaller(reach + 1, length)
    band = band[..., reach + 1 - size : reach + (1 if is_causal else size)]
    bias_scale = band.detach().amax(-1, keepdim=True)
    bias_scale = bias_scale if strict else bias_scale.clamp(min=0.0)
    weights = skewed((band - bias_scale).exp(), size, 3 * size, 1)
    scale = _visible_max(scores.detach(), size, is_causal=is_causal, strict=strict)
    blocks = (split(scores, size, value=FLOOR), split(values_and_ones, size), split(scale, size))
    inside = join(_in_window(weights, *blocks, is_causal=is_causal), length)
    if strict:
        return inside
    return inside + _outside(scores, values_and_ones, scale, size, is_causal=is_causal) * (-bias_scale).exp()


def _in_window(weights: Tensor, scores: Tensor, values_and_ones: Tensor, scale: Tensor, *, is_causal: bool) -> Tensor:
    """Blocks of the window's reach: a query sees the end of the block before, its own and the start of the next."""
    size = scores.shape[-2]
    before, inner, after = weights.split(size, -1)
    earlier_keys = (_block_shifted(scores, 1, FLOOR), _block_shifted(values_and_ones, 1), scale)
    sums = _triangle(before.flip(-1, -2), *(x.flip(-2) for x in earlier_keys), size=size, diagonal=False).flip(-2)
    if is_causal:
        return sums + _triangle(inner, scores, values_and_ones, scale, size=size, diagonal=True)
    later_keys = (_block_shifted(scores, -1, FLOOR), _block_shifted(values_and_ones, -1), scale)
    return (
        sums + _square(inner, scores, values_and_ones, scale) + _triangle(after, *later_keys, size=size, diagonal=False)
    )


def _outside(scores: Tensor, values_and_ones: Tensor, scale: Tensor, size: int, *, is_causal: bool) -> Tensor:
    """The sums over all keys ``size`` or more positions away."""
    length, terms = scores.shape[-2], weighted(scores, values_and_ones, scale)
    padding = (0, 0, size, 0)
    if is_causal:
        decay = at_most(F.pad(scale, padding)[..., :length, :] - scale, 0.0).exp()
        return F.pad(decayed_sums(terms, scale), padding)[..., :length, :] * spread(decay, values_and_ones.shape[-1])
    before = F.pad(prefix_sums(terms), padding)[..., :length, :]
    return before + F.pad(prefix_sums(terms.flip(-2)), padding)[..., :length, :].flip(-2)


def _triangle(
    weights: Tensor, scores: Tensor, values_and_ones: Tensor, scale: Tensor, *, size: int, diagonal: bool
) -> Tensor:
    """``sum_{c < a} W_ac exp(s_c - scale_a) x_c`` in blocks (..., heads, n, side, E); c = a too with ``diagonal``.

    ``weights`` (heads, n, side, side), where a size of 1 serves all; side is at most ``size``.
    """
    side, rounds = scores.shape[-2], (int(size) - 1).bit_length()
    missing = (1 << rounds) - side
    weights = F.pad(weights, (0, missing, 0, missing))
    scores, values_and_ones, scale = (
        F.pad(x, (0, 0, 0, missing), value=z) for x, z in ((scores, FLOOR), (values_and_ones, 0.0), (scale, 0.0))
    )
    sums = _halves(weights, scores, values_and_ones, scale, rounds=rounds)
    if diagonal:
        terms = spread(at_most(scores - scale, 0.0).exp(), values_and_ones.shape[-1]) * values_and_ones
        sums = sums + weights.diagonal(0, -2, -1)[..., None] * terms
    return sums[..., :side, :]


def _halves(weights: Tensor, scores: Tensor, values_and_ones: Tensor, scale: Tensor, *, rounds: int) -> Tensor:
    """Sums that right halves gather from left halves, of blocks cut into 2, 4 ... ``2^rounds`` parts."""
    sums = torch.zeros_like(values_and_ones)
    for depth in range(rounds):
        left, right = (
            [x.unflatten(-2, (2 << depth, -1))[..., i::2, :, :] for x in (scores, values_and_ones, scale)]
            for i in (0, 1)
        )
        corners = _corners(weights, 2 << depth, below=True)
        right_sums = _square(corners, left[0], left[1], right[2])
        sums = sums + torch.stack([torch.zeros_like(right_sums), right_sums], -3).flatten(-4, -2)
    return sums


def _square(weights: Tensor, scores: Tensor, values_and_ones: Tensor, scale: Tensor) -> Tensor:
    """``sum_c W_ac exp(s_c - scale_a) x_c`` over square tiles, whose maximum serves every query."""
    tile_scale = scores.detach().amax(-2, keepdim=True)
    decay = spread(at_most(tile_scale - scale, 0.0).exp(), values_and_ones.shape[-1])
    terms = weighted(scores, values_and_ones, tile_scale)
    if exporting():  # of folded axes only the last, the blocks, can be proved to unfold again
        first, second = (-3, -4) if weights.ndim == 5 else (-3, -3)
        return (weights.transpose(first, second) @ terms.transpose(first, second)).transpose(first, second) * decay
    # a product that broadcasts would copy the weights for every sequence
    blocks = "hnac,...hncd->...hnad" if weights.ndim == 4 else "hnpac,...hnpcd->...hnpad"
    return torch.einsum(blocks, weights, terms) * decay


def _corners(weights: Tensor, count: int, *, below: bool = False) -> Tensor:
    """The ``count`` blocks on the diagonal (..., count, b, b), or every other one of those ``below`` it."""
    blocks = weights.unflatten(-1, (count, -1)).unflatten(-3, (count, -1))
    if below:
        blocks = blocks[..., 1::2, :, ::2, :]
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)


def skewed(band: Tensor, size: int, keys: int, shift: int, around: float = 0.0) -> Tensor:
    """Rows of a band (heads, L or 1, taps) in blocks (heads, n or 1, size, keys): row a starts at column a + ``shift``.

    What is not in the band is ``around``: a row has one column more, then all are read in rows one column shorter.
    """
    rows = band.expand(-1, size, -1)[:, None] if band.shape[-2] == 1 else split(band, size)
    flat = F.pad(rows, (shift, keys + 1 - shift - rows.shape[-1]), value=around).flatten(-2)
    return flat[..., : size * keys].unflatten(-1, (size, keys))


def _visible_max(scores: Tensor, size: int, *, is_causal: bool, strict: bool) -> Tensor:
    """The largest score that each query sees."""
    if not strict:
        return running_max(scores) if is_causal else scores.amax(-2, keepdim=True).expand_as(scores)
    blocks = split(scores, size, value=FLOOR)
    rest = F.pad(cummax(blocks.flip(-2))[..., :-1, :], (0, 0, 1, 0), value=FLOOR).flip(-2)
    first = cummax(blocks)
    scale = torch.maximum(_block_shifted(rest, 1, FLOOR), first if is_causal else first[..., -1:, :])
    if not is_causal:
        start = F.pad(first[..., :-1, :], (0, 0, 1, 0), value=FLOOR)
        scale = torch.maximum(scale, _block_shifted(start, -1, FLOOR))
    return join(scale, scores.shape[-2])


def _block_shifted(blocks: Tensor, by: int, value: float = 0.0) -> Tensor:
    """Block n - ``by`` in place of block n (``by`` 1 or -1)."""
    if by > 0:
        return F.pad(blocks, (0, 0, 0, 0, 1, 0), value=value)[..., :-1, :, :]
    return F.pad(blocks, (0, 0, 0, 0, 0, 1), value=value)[..., 1:, :, :]
