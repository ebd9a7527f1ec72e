"""WKV (RWKV-4, Peng et al. 2023): AFT whose keys decay with distance, channel by channel, but for the token's own.

``WKV`` in chunks on a CPU, with its gradient: prefix sums that decay, over groups of tokens side by side.

One log scale serves a call, the largest key of every channel, where no key lies far below it: the token before a query
has decayed by nothing, so that every denominator is an ordinary number. Row t of all groups of ``GROUP`` tokens is
contiguous: the groups are walked once for their sums, then, from the sums before each, for what every token reads.

The gradient of w takes no product of pairs: weights are of degree 0 in numerators and denominators together, so that
what a decay moves between two tokens is the gradient of the keys before them (``_decay_vjp``).

What ``WKV`` computes, in plain differentiable operations: pools of keys that decay, token by token, as a monoid.

``y_t = e^{-w} y_{t-1} + e^{k_t} v_t``, and the same of ones, read before token t is in it. With c_t visible tokens up
to t, the sum is AFT's of the keys ``k_t + c_t w``, times ``e^{-c_t w}``, which cancels between numerator and
denominator. In float64, where ``c_t w`` of millions of tokens loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import masks, trace
from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.decay import sums_before
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Fast, NotServed, Operation, like_queries
from fast_attention.engine.precision import in_float32, widen
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast, reference
from fast_attention.mechanisms.aft.reference import Pool, same_width
from fast_attention.traits import PLAIN

GROUP = 16


class WKVState(NamedTuple):
    """Sums over all keys so far, ``exp(log_scale)`` times ``sums``, and the decay over all of them."""

    log_scale: Float[Tensor, "*batch 1 width"]
    sums: Float[Tensor, "*batch 1 sums"]  # numerators, then denominators
    log_decay: Float[Tensor, "*batch 1 width"]


def counts(k: Float[Tensor, "*batch keys width"], key_mask: Bool[Tensor, "*#batch2 keys"] | None) -> Tensor:
    """The visible tokens up to each, (..., S, 1), in float64."""
    visible = torch.ones_like(k[..., 0], dtype=torch.float64)
    visible = visible if key_mask is None else visible.masked_fill(~key_mask, 0.0)
    return visible.cumsum(-1)[..., None]


def streamed(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: WKVState | None, key_mask: Tensor | None
) -> tuple[Tensor, WKVState]:
    """The means (..., L, D) that new tokens read behind ``state``, and the state after them.

    ``decay`` w and ``bonus`` u are (heads, 1, D). A masked token adds nothing, nothing decays at it, and it reads what
    is there.
    """
    count = counts(k, key_mask)
    scores, values_and_ones = reference.terms(k.double() + count * decay, v.double(), key_mask)
    pool = None if state is None else Pool(state.log_scale.double(), state.sums.double())
    rows = reference.running(*reference.prepended(pool, scores, values_and_ones))
    before = Pool(rows.log_scale[..., :-1, :], rows.sums[..., :-1, :])
    read = reference.combined(before, Pool(scores + (bonus - decay), values_and_ones))
    log_decay = -count[..., -1:, :] * decay
    log_scale = rows.log_scale[..., -1:, :] + log_decay
    if state is not None:
        log_decay = log_decay + state.log_decay
    after = WKVState(log_scale, rows.sums[..., -1:, :], log_decay)
    return reference.mean(read.sums, v.shape[-1]).to(v.dtype), WKVState(*(x.to(v.dtype) for x in after))


def summarise(k: Tensor, v: Tensor, decay: Tensor, key_mask: Tensor | None) -> WKVState:
    """The state after some tokens that nothing precedes."""
    count = counts(k, key_mask)
    pool = reference.pooled(*reference.terms(k.double() + count * decay, v.double(), key_mask))
    log_decay = -count[..., -1:, :] * decay
    return WKVState(*(x.to(v.dtype) for x in (pool.log_scale + log_decay, pool.sums, log_decay)))


def combine(earlier: WKVState, later: WKVState) -> WKVState:
    """The state of neighbouring tokens; associative."""
    pool = reference.combined(
        Pool(earlier.log_scale + later.log_decay, earlier.sums), Pool(later.log_scale, later.sums)
    )
    return WKVState(*pool, earlier.log_decay + later.log_decay)


def one(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: WKVState, key_mask: Tensor | None
) -> tuple[Tensor, WKVState]:
    """``streamed`` of one token: two sums of a state and a key."""
    scores, values_and_ones = reference.terms(k, v, key_mask)
    read = reference.combined(Pool(*state[:2]), Pool(scores + bonus, values_and_ones))
    log_decay = -decay * reference.visible_ones(k, key_mask)
    return reference.mean(read.sums, v.shape[-1]), combine(state, WKVState(scores, values_and_ones, log_decay))


LARGEST = 15.0  # of a bonus, either way, that sums in one log scale bear


class Groups(NamedTuple):
    """The tokens of a chunk, in groups of ``size`` side by side, and by how much they decay."""

    at: slice
    size: int
    decays: list[Tensor]  # of row t of all groups, (..., groups, 2 D) or one that serves all of them
    over_group: Tensor  # (..., groups, 2 D)
    visible: Tensor  # 1 or 0 (..., groups, size)

    @property
    def later(self) -> Tensor:
        """The visible tokens of a group behind each."""
        return self.visible.flip(-1).cumsum(-1).flip(-1) - self.visible


def _groups_of(k: Tensor, decay: Tensor, mask: Tensor | None) -> list[Groups]:
    length, size = k.shape[-2], fast.chunk_length(k, GROUP)
    grouped = length // GROUP * GROUP
    places = [*chunks_of(size, grouped), *([slice(grouped, length)] if grouped < length else [])]
    logs, cuts = -torch.cat([decay, decay], -1), []
    for at in places:
        group = min(GROUP, at.stop - at.start)
        sizes = *k.shape[:-2], (at.stop - at.start) // group, logs.shape[-1]
        if mask is not None:
            visible = mask[..., at].unflatten(-1, (-1, group)).to(k.dtype)
            decays = [(one[..., None] * logs).exp().expand(sizes) for one in visible.unbind(-1)]
            cuts.append(Groups(at, group, decays, (visible.sum(-1)[..., None] * logs).exp().expand(sizes), visible))
        elif cuts and cuts[-1].over_group.shape == sizes and cuts[-1].size == group:
            cuts.append(cuts[-1]._replace(at=at))
        else:
            decays = [logs.exp().expand(sizes).contiguous()] * group
            cuts.append(Groups(at, group, decays, (group * logs).exp().expand(sizes), k.new_ones(sizes[-2], group)))
    return cuts


def _rows(like: Tensor, groups: Groups, width: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Memory for a chunk: row t of all groups (..., groups, width), each contiguous, and the order of the tokens."""
    count = (groups.at.stop - groups.at.start) // groups.size
    rows = like.new_empty(groups.size, *like.shape[:-2], count, width)
    return rows.unbind(0), rows.movedim(0, -2)


def _totals(rows: tuple[Tensor, ...], decays: list[Tensor]) -> Tensor:
    """Sums that every group adds to those behind it."""
    total = rows[0].clone()
    for row, decay in zip(rows[1:], decays[1:], strict=True):
        torch.addcmul(row, total, decay, out=total)
    return total


def _read(rows: tuple[Tensor, ...], decays: list[Tensor], before: Tensor, bonus: Tensor) -> Tensor:
    """Every row becomes the sum before it plus ``bonus`` times itself; returns the sums behind the last."""
    total, other = before.clone(), torch.empty_like(before)
    bonus = bonus.expand_as(total).contiguous()
    for row, decay in zip(rows, decays, strict=True):
        torch.addcmul(row, total, decay, out=other)
        torch.addcmul(total, row, bonus, out=row)
        total, other = other, total
    return total


def gated_reads(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, mask: Tensor | None, scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``sigmoid(q)`` times what tokens read of those up to them; ``decay`` and ``bonus`` (heads, 1, D)."""
    return q.sigmoid() * streamed(k, v, decay, bonus, None, mask)[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, mask: Tensor | None, scale: Tensor, *, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    width, out, saved = v.shape[-1], torch.empty_like(q), []
    carry, gain = k.new_zeros(*k.shape[:-2], 1, 2 * width), torch.cat([bonus, bonus], -1).exp()
    for groups in _groups_of(k, decay, mask):
        rows, tokens = _rows(k, groups, 2 * width)
        queries, keys, values, results = (x[..., groups.at, :].unflatten(-2, (-1, groups.size)) for x in (q, k, v, out))
        fast.weigh(keys, values, scale[..., None, :], tokens)
        before = sums_before(_totals(rows, groups.decays), groups.over_group, carry)
        before, carry = before[..., :-1, :], before[..., -1:, :]
        _read(rows, groups.decays, before, gain)
        fast.gate(queries, tokens, results, any_masked=mask is not None)
        saved.append(before)
    return out, (torch.cat(saved, -2),) if keep else ()


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    (q, k, v, decay, bonus, mask, scale), (sums,) = inputs, saved
    d_inputs = [torch.empty_like(x) for x in (q, k, v)]
    d_carry, gain = torch.zeros_like(sums[..., :1, :]), bonus.exp()
    d_decay, d_bonus = (torch.zeros_like(scale, dtype=torch.float64) for _ in range(2))
    last = sums.shape[-2]
    for groups in reversed(_groups_of(k, decay, mask)):
        rows = (x[..., groups.at, :] for x in (q, k, v, *gradients, *outputs, *d_inputs))
        tokens = [x.unflatten(-2, (-1, groups.size)) for x in rows]
        first = last - tokens[0].shape[-3]
        before, last = sums[..., first:last, :], first
        d_carry, d_gain, d_states = _chunk_vjp(
            tokens, groups, before, d_carry, scale, gain, any_masked=mask is not None
        )
        d_bonus += d_gain
        d_decay -= d_gain + _decay_vjp(tokens[6], groups, d_states * before)
    learned = (x.sum_to_size(decay.shape).to(decay.dtype) for x in (d_decay, d_bonus))
    return *d_inputs, *learned, None, None


def _chunk_vjp(
    tokens: list[Tensor], groups: Groups, before: Tensor, d_carry: Tensor, scale: Tensor, gain: Tensor, *,
    any_masked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fill the gradients of a chunk; returns those of the sums before it, of the bonus, and of the groups' sums."""
    q, k, v, g, out, dq, dk, dv = tokens
    width = v.shape[-1]
    denominators, in_order = _rows(scale, groups, width)
    weights = exp_(torch.sub(k, scale[..., None, :], out=dv))
    in_order.copy_(weights)
    halves = [x[..., :width] for x in groups.decays]
    _read(denominators, halves, before[..., width:], gain)
    d_rows, d_sums = _rows(scale, groups, 2 * width)
    fast.gate_vjp(q, g, out, fast.safe(in_order, any_masked=any_masked), dq, d_sums)
    d_numerators, d_denominators = d_sums.split(width, -1)
    d_gain = torch.addcmul(d_denominators, d_numerators, v, out=dk).mul_(weights).flatten(-3, -2).sum(-2, keepdim=True)
    backwards, decays = d_rows[::-1], groups.decays[::-1]
    later = sums_before(_totals(backwards, decays).flip(-2), groups.over_group.flip(-2), d_carry)[..., :-1, :].flip(-2)
    d_states = _read(backwards, decays, later, torch.cat([gain, gain], -1))
    fast.weigh_vjp(v, weights, d_sums, dk, dv)
    return d_states[..., :1, :], d_gain * gain, d_states


def _decay_vjp(dk: Tensor, groups: Groups, products: Tensor) -> Tensor:
    """Gradient of the decay from the sums before the tokens of a chunk, added up over its visible tokens.

    ``products`` (..., groups, 2 D) is that before each group. A token changes it by the gradient of its key.
    """
    starts = sum(products.split(dk.shape[-1], -1))
    visible = groups.visible.sum(-1)[..., None, :] @ starts
    return visible + groups.later.flatten(-2)[..., None, :] @ dk.flatten(-3, -2)


_GROUPS = Operation(gated_reads, cpu=Fast(_forward, _backward))


def _grouped(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, key_mask: Tensor | None) -> Tensor:
    keys = reference.masked_scores(k, key_mask)
    scale, least = fast.log_scale(keys.detach()), keys.amin(-2) if key_mask is None else fast.smallest(keys)
    if bool((scale[..., 0, :] - least > fast.RANGE).any()) or bool((bonus.abs() > LARGEST).any()):
        raise NotServed("a key lies far below another, or a bonus is large")
    trace.record("prefix sums over groups of tokens side by side", "causal", group=GROUP)
    return _GROUPS(q, keys, masks.drop(v, key_mask), decay, bonus, key_mask, scale)


causal = Operation(
    gated_reads, cpu=Fast(_grouped, None), compute=torch.float32, empty=like_queries, path="a log scale for every token"
)


def wkv_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length width"],
    decay: Float[Tensor, "heads width"],
    bonus: Float[Tensor, "heads width"],
    *,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch heads length width"]:
    """``sigmoid(q_t) (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + u} v_t) / (the same of ones)``, in each channel.

    RWKV-4's time mixing (arXiv 2305.13048, Eq. 16), causal as it is; ``decay`` w is at least 0, ``bonus`` u any number.
    Exact for keys of any size. A masked token is as if it were not there: it is not summed and nothing decays at it. A
    query that sees nothing gets zeros. Time and memory O(length width).
    """
    return causal(q, k, v, decay[:, None], bonus[:, None], key_mask)


class ChannelDecays(NamedTuple):
    """For every channel the logarithm of w, by which it decays a token, and the bonus u of the token itself."""

    log_decay: Float[Tensor, "heads width"]
    bonus: Float[Tensor, "heads width"]

    def of_heads(self) -> tuple[Float[Tensor, "heads 1 width"], Float[Tensor, "heads 1 width"]]:
        """w and u."""
        return self.log_decay.exp()[:, None], self.bonus[:, None]


@dataclass(frozen=True, repr=False)
class WKV(Attention[ChannelDecays, WKVState]):
    """Causal AFT whose bias falls by a learned w with every token of distance, and is a learned u for the token itself.

    The gate is part of it, as in ``AFTSimple``: queries are RWKV-4's receptance r, and outputs
    ``sigmoid(r_t) * wkv_t``, which the paper's output projection then takes. Its token shift and channel mixing are
    layers around it. w is the exponential of what is trained: RWKV-4's ``time_decay``; u is its ``time_first``. Both
    start as in its first layer, over the channels of all heads. Keys, queries and values must have the same width.
    """

    traits = Traits(
        paper="Peng et al. 2023, arXiv 2305.13048",
        formula="sigmoid(q_t) * (sum_{i<t} exp(k_i - (t-1-i) w) v_i + exp(k_t + u) v_t) / (the same of ones)",
        cost="n d",
        complexity_exponent=1.0,
        gpu=PLAIN,
        causal=True,
        bidirectional=False,
        padding=True,
        memory="constant",
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def weights(self, shape: Shape) -> ChannelDecays:
        """Channels from slow to fast, ``log w`` from -5 to 3; u about log 0.3, by turns 0.5 more and less."""
        channel = torch.arange(shape.width)
        log_decay = 8.0 * (channel / max(shape.width - 1, 1)) ** 0.7 - 5.0
        bonus = math.log(0.3) + ((channel + 1) % 3 - 1) * 0.5
        sizes = shape.heads, shape.head_dim
        return ChannelDecays(nn.Parameter(log_decay.view(sizes)), nn.Parameter(bonus.view(sizes)))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``wkv_attention`` with the learned numbers."""
        same_width(self, k, v)
        return causal(q, k, v, *widen(w).of_heads(), key_mask)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, state: WKVState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WKVState]:
        """Outputs of new tokens, and the sums over all keys up to the last."""
        same_width(self, k, v)
        return self._advance(q, k, v, w, state, key_mask=key_mask)

    @in_chunks
    @in_float32
    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: ChannelDecays, state: WKVState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WKVState]:
        if state is not None and not symbolic() and k.shape[-2] == 1:
            trace.record("one key added to the sums", "decoding token by token")
            mean, state = one(k, v, *w.of_heads(), state, key_mask)
        else:
            mean, state = streamed(k, v, *w.of_heads(), state, key_mask)
        return q.sigmoid() * mean, state

    @summed_in_chunks
    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: ChannelDecays, *, key_mask: Tensor | None = None) -> WKVState:
        """The sums over the keys of a chunk."""
        return summarise(k, v, w.of_heads()[0], key_mask)

    def merge_states(self, earlier: WKVState, later: WKVState) -> WKVState:
        """The sums over two neighbouring chunks."""
        return combine(earlier, later)
