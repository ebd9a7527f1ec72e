"""AFT-local (Zhai et al. 2021, section 3.2): biases in a window only, learned per position.

A block of ``size`` queries is one product with the keys of its block and the neighbouring ones (``reach`` tokens on
both sides, or before it only), weights exp(w) in the window and 1 around it; blocks further away come in by their
sums. Nothing is subtracted, so that no bias cancels. All queries share one log scale per channel
(``one_scale_is_enough``); others take ``reference_biased.windowed``.

Tensors are (group, tokens, ..., width): one group holds all heads where they share the biases, position by position,
and each head is a group where they do not, with one row of biases for all positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import masks, trace
from fast_attention.engine.blocks import narrow
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.heads import short
from fast_attention.engine.operation import Fast, NotServed, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast, reference, reference_biased
from fast_attention.mechanisms.aft.reference import same_width
from fast_attention.traits import PLAIN
from fast_attention.value import at_least

NUMBERS = 1 << 19  # sums worked on at a time


class Plan(NamedTuple):
    """Sizes of a call; settings of an operation."""

    shared: bool  # one group of all heads
    size: int  # queries per block
    reach: int  # tokens before a block that its product takes in, a multiple of ``size``
    is_causal: bool
    strict: bool
    any_masked: bool

    @property
    def keys(self) -> int:
        """Keys per block of queries."""
        return self.size + self.reach * (1 if self.is_causal else 2)


class PaddedRows:
    """Memory (group, reach + blocks * size + reach, ..., 2 D): a row for each token, and zeros around them."""

    def __init__(self, like: Tensor, plan: Plan) -> None:
        tokens = grouped(like, plan)
        length, reach = tokens.shape[1], plan.reach
        self.count = -(-length // plan.size)
        rows = self.count * plan.size + 2 * reach
        self.all = like.new_empty(len(tokens), rows, *tokens.shape[2:-1], 2 * like.shape[-1])
        self.all[:, :reach].zero_()
        self.all[:, reach + length :].zero_()
        self.tokens = self.all[:, reach : reach + length]
        flat = self.all.flatten(2)
        self.width = flat.shape[-1]
        self.blocks = flat.unflatten(1, (-1, plan.size))
        self.inner = self.blocks[:, (first := reach // plan.size) : first + self.count]  # those of the tokens
        steps = (rows * self.width, plan.size * self.width, self.width, 1)
        self.windows = flat.as_strided((len(tokens), self.count, plan.keys, self.width), steps)


def grouped(x: Tensor, plan: Plan) -> Tensor:
    """(..., heads, L, D) as (1, L, ..., heads, D) or (heads, L, ..., D)."""
    return x.movedim(-2, 0)[None] if plan.shared else x.movedim((-3, -2), (0, 1))


def far(sums: Tensor, reach: int, *, before: bool, after: bool) -> Tensor:
    """For every block, what ``sums`` (group, blocks, width) add up to more than ``reach`` blocks before or after."""
    total = torch.zeros_like(sums, dtype=torch.float64)
    count = max(sums.shape[1] - reach - 1, 0)
    if before:
        total[:, reach + 1 :] += sums[:, :count].mT.double().cumsum(-1).mT
    if after:
        total[:, :count] += sums[:, reach + 1 :].flip(1).mT.double().cumsum(-1).mT.flip(1)
    return total.to(sums.dtype)


def block_weights(band: Tensor, plan: Plan) -> Float[Tensor, "groups #blocks size keys"]:
    """The weights of every block: exp(w) in the window of each query, and 1, or 0, around it; one serves equal rows."""
    reach = band.shape[-1] // 2
    taps = (band[..., : reach + 1] if plan.is_causal else band).exp()
    around = 0.0 if plan.strict else 1.0
    weights = reference_biased.skewed(taps, plan.size, plan.keys, plan.reach - reach, around)
    return weights.tril(plan.reach) if plan.is_causal else weights


RANGE = 30.0  # keys may rise by this, and biases lie this far from 0: sums stay above exp(-60)


Place = tuple[int, slice]  # a group, and some of its blocks or tokens


def _chunks(
    terms: PaddedRows, weights: Tensor, plan: Plan
) -> Iterator[tuple[Place, Place, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Walk over chunks of blocks: each has about ``NUMBERS`` sums and lies in one group.

    Yields the blocks and their tokens, weights (blocks, size, keys), memory for sums (blocks, size, width) that all
    chunks share, and the rows of the tokens in it.
    """
    places = chunks_of(max(1, NUMBERS // (plan.size * terms.width)), terms.count)
    memory, sizes = terms.all.new_empty(places[0].stop, plan.size, terms.width), (-1, *terms.all.shape[2:])
    weights, length = weights.expand(-1, terms.count, -1, -1), terms.tokens.shape[1]
    for group in range(len(terms.all)):
        for at in places:
            tokens = slice(at.start * plan.size, min(at.stop * plan.size, length))
            sums = memory[: at.stop - at.start]
            yield (group, at), (group, tokens), weights[group, at], sums, sums.view(sizes)[: tokens.stop - tokens.start]


def _terms(k: Tensor, v: Tensor, plan: Plan) -> PaddedRows:
    terms = PaddedRows(k, plan)
    fast.weigh(grouped(k, plan), grouped(v, plan), grouped(fast.log_scale(k), plan), terms.tokens)
    return terms


def _forward(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, weights: Tensor, *, keep: bool, plan: Plan
) -> tuple[Tensor, tuple[Tensor, ...]]:
    terms, out = _terms(k, v, plan), torch.empty_like(q)
    saved = (torch.empty_like(q),) if keep else ()
    around = None  # for each block the sums over the blocks outside its products
    if not plan.strict:
        around = far(terms.inner.sum(2), plan.reach // plan.size, before=True, after=not plan.is_causal)
    queries, outputs, *denominators = (grouped(x, plan) for x in (q, out, *saved))
    for blocks, tokens, own, sums, rows in _chunks(terms, weights, plan):
        torch.bmm(own, terms.windows[blocks], out=sums)
        if around is not None:
            sums.add_(around[blocks][:, None])
        divisors = fast.gate(queries[tokens], rows, outputs[tokens], any_masked=plan.any_masked)
        for each in denominators:
            each[tokens] = divisors
    return out, saved


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, plan: Plan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, _, weights), d_inputs = inputs, [torch.empty_like(x) for x in inputs[:3]]
    terms, d_terms = _terms(k, v, plan), PaddedRows(k, plan)
    d_terms.all.zero_()
    d_weights = torch.zeros_like(weights) if weights.requires_grad else None
    sides = [grouped(x, plan) for x in (q, gradients[0], outputs[0], saved[0], d_inputs[0])]
    totals = k.new_empty(len(terms.all), terms.count, terms.width)
    for blocks, tokens, own, d_sums, rows in _chunks(terms, weights, plan):
        d_sums[-1].zero_()  # which may have rows behind the last token
        fast.gate_vjp(*(x[tokens] for x in sides), d_sums=rows)
        torch.sum(d_sums, 1, out=totals[blocks])
        group, at = blocks
        for i, columns in enumerate(own.split(plan.size, -1)):  # the blocks of keys that the products took in
            d_terms.blocks[group, at.start + i : at.stop + i].baddbmm_(columns.mT, d_sums)
        if d_weights is not None:
            d_own = d_sums @ terms.windows[blocks].mT
            if weights.shape[1] > 1:
                d_weights[blocks] = d_own
            else:
                d_weights[group, 0] += d_own.sum(0)
    if not plan.strict:
        reach = plan.reach // plan.size
        d_terms.inner.add_(far(totals, reach, before=not plan.is_causal, after=True)[:, :, None])
    values, dk, dv = (grouped(x, plan) for x in (v, *d_inputs[1:]))
    fast.weigh_vjp(values, terms.tokens[..., v.shape[-1] :], d_terms.tokens, dk, dv)
    return *d_inputs, None, d_weights


def _plain(q: Tensor, k: Tensor, v: Tensor, band: Tensor, weights: Tensor, *, plan: Plan) -> Tensor:
    settings = {"is_causal": plan.is_causal, "strict": plan.strict, "any_masked": plan.any_masked}
    return window_sums(q, k, v, band, **settings)


_FAST = Fast(_forward, _backward)
_BLOCKS = Operation(_plain, cpu=_FAST, cuda=_FAST)  # the reference reads the band, the others the weights made of it


def one_scale_is_enough(k: Tensor, band: Tensor, plan: Plan) -> bool:
    """Whether one log scale per channel serves every query, and the biases need none beside it."""
    fits = band.detach().abs().amax() <= RANGE
    if plan.is_causal or plan.strict:
        low = fast.smallest(k) if plan.any_masked else k.amin(-2) if plan.strict else k[..., 0, :]
        fits = fits & ((k.amax(-2) - low).amax() <= RANGE)
    return bool(fits)


def window_sums(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, *, is_causal: bool, strict: bool, any_masked: bool
) -> Tensor:
    """AFT with biases in a window: ``band`` as in ``reference_biased.windowed``; masked keys at ``scan.FLOOR``."""
    sums = reference_biased.windowed(band, k, reference.with_ones(k, v), is_causal=is_causal, strict=strict)
    return q.sigmoid() * reference.mean(sums, v.shape[-1])


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, band: Tensor, **settings: bool) -> Tensor:
    length, heads, reach = k.shape[-2], k.shape[-3], band.shape[-1] // 2
    shared = band.shape[0] == 1 and (band.shape[1] > 1 or heads > 1)
    size = next((size for size in (16, 32) if reach <= size), 64)
    if short(q, k, v):  # padding to whole blocks, and a block on each side of them, would be most of the work
        size = -(-length // -(-length // size))
    near = min(reach, length - 1)
    plan = Plan(shared, size, -(-near // size) * size, **settings)
    if not (shared or band.shape[1] == 1):
        raise NotServed("every head has biases of its own for every position: blocks could share them neither way")
    if not one_scale_is_enough(k, band, plan):
        raise NotServed("keys or biases lie too far apart for one log scale")
    why = "all heads share each position's biases" if plan.shared else "a head's biases are the same at all positions"
    trace.record("products of blocks of queries with their neighbours", why, block=plan.size, keys=plan.keys)
    band = band[..., reach - near : reach + near + 1]
    return _BLOCKS(q, k, v, band, block_weights(band, plan), plan=plan)


windowed = Operation(
    window_sums,
    cpu=Fast(_in_blocks, None),
    cuda=Fast(_in_blocks, None, serves=lambda *tensors, **settings: "traced" if symbolic() else ""),
    empty=like_queries,
    path="triangles of products by halving",
    sizes=lambda q, k, v, band, **settings: {"window": band.shape[-1] // 2 + 1},
)


@in_float32
def aft_local(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length width"],
    band: Float[Tensor, "#heads2 #length2 taps"],
    *,
    strict: bool = False,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch heads length width"]:
    """``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)`` with ``w_ij = 0`` outside a window.

    arXiv 2105.14103, Eq. 4. ``band`` (heads or 1, length or 1, taps), taps odd: ``band[h, i, o]`` is the bias of key
    ``i + o - taps // 2``; keys further away have bias 0, or are masked with ``strict`` (a different and, in
    the paper, a worse model). Time O(length taps width). A query that sees nothing gets zeros.
    """
    if band.shape[-1] % 2 == 0:
        raise ValueError(f"band has shape {tuple(band.shape)}: its last size, the taps, must be odd")
    k, v = reference.masked_scores(k, key_mask), masks.drop(v, key_mask)
    any_masked = key_mask is not None
    return windowed(q, k, v, band, is_causal=is_causal, strict=strict, any_masked=any_masked)


class Band(NamedTuple):
    """A bias for every position and every key less than a window away, for all heads and channels."""

    band: Float[Tensor, "max_len taps"]


class WindowState(NamedTuple):
    """State for decoding: the last ``window - 1`` keys, and in front of them the pool of all earlier ones as a key."""

    scores: Float[Tensor, "*batch window width"]
    values_and_ones: Float[Tensor, "*batch window sums"]
    position: Int[Tensor, ""]  # tokens so far


class Banded(Attention[Any, WindowState]):
    """AFT with biases for nearby pairs of positions; keys further away are seen with bias 0, or not if ``strict``."""

    strict = False

    @abstractmethod
    def band(self, w: Any, length: int, state: WindowState | None = None) -> Tensor:
        """The biases (heads or 1, length or 1, taps) of so many tokens behind a state."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``aft_local`` with the learned biases."""
        same_width(self, k, v)
        band = self.band(w, k.shape[-2])
        return aft_local(q, k, v, band, strict=self.strict, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: WindowState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Outputs of new tokens, and the last keys with the pool of all earlier ones."""
        same_width(self, k, v)
        length, band = k.shape[-2], self.band(w, k.shape[-2], state)
        window = band.shape[-1] // 2 + 1
        scores, values_and_ones = reference.terms(k, v, key_mask)
        if state is None:
            start = (0, 0, window, 0)
            scores, values_and_ones = F.pad(scores, start, value=FLOOR), F.pad(values_and_ones, start)
            position = torch.zeros((), dtype=torch.long, device=k.device)
        else:
            pairs, position = zip(state, (scores, values_and_ones), strict=False), state.position
            scores, values_and_ones = (torch.cat(pair, -2) for pair in pairs)
        if not symbolic() and length == 1:
            trace.record("one token against its window", "decoding token by token", window=window)
            biases, first = (band[..., :window], 1) if self.strict else (F.pad(band[..., :window], (1, 0)), 0)
            sums = reference.pooled(scores[..., first:, :] + biases.mT, values_and_ones[..., first:, :]).sums
        else:
            if band.shape[-2] > 1:
                band = F.pad(band, (0, 0, window, 0))
            sums = reference_biased.windowed(band, scores, values_and_ones, is_causal=True, strict=self.strict)
            sums = sums[..., window:, :]
        past = reference.pooled(scores[..., : length + 1, :], values_and_ones[..., : length + 1, :])
        scores, values_and_ones = (x[..., length + 1 :, :] for x in (scores, values_and_ones))
        scores, values_and_ones = reference.prepended(past, scores, values_and_ones)
        return q.sigmoid() * reference.mean(sums, v.shape[-1]), WindowState(scores, values_and_ones, position + length)


@dataclass(frozen=True, repr=False)
class AFTLocal(Banded):
    """AFT with learned biases for nearby pairs of positions; keys further away are seen with bias 0.

    Keys, queries and values must have the same width.

    Args:
        window: Tokens i and j have a learned bias where ``|i - j| < window`` (1: the diagonal only).
        strict: Do not see tokens outside the window at all.
    """

    window: int = 32
    strict: bool = False

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij), w_ij = 0 for |i - j| >= w",
        cost="n w d",
        complexity_exponent=1.0,
        gpu=PLAIN,
        causal=True,
        padding=True,
        memory="window",
        positions="absolute",
        needs_max_len=True,
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "window", self.window, 1, nothing="AFTSimple()")

    def weights(self, shape: Shape) -> Band:
        """Biases from N(0, 0.01^2)."""
        return Band(nn.Parameter(0.01 * torch.randn(shape.max_len, 2 * self.window - 1)))

    def heads_of(self, w: Band) -> None:
        """None: the biases are those of all heads, however many."""

    def band(self, w: Band, length: int, state: WindowState | None = None) -> Tensor:
        """The rows of the tokens' positions."""
        start = 0 if state is None else int(state.position)
        self.within(start + length, w.band.shape[0])
        return narrow(w.band, length, axis=0, start=start)[None]
