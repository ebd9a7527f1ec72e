"""Spreads Hybrid: near keys are fetched from where they are, sums of far ones sent, sink tokens gathered.

Every process sends each other one the sums over those of its keys that are not near there, one state, and sees the
same sink tokens; then its queries are computed as those of one process are, under one normaliser.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention import checks
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.mechanisms.hybrid.hybrid import Hybrid, HybridState
from fast_attention.mechanisms.hybrid.sink_tokens import MISSING, SinkTokens
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.parallel import collectives, states
from fast_attention.parallel.fetching import Ranges, beyond, fetch, tokens_sent
from fast_attention.parallel.strategy import Call, Sizes, Strategy
from fast_attention.parallel.windows import ranges as ranges_of


class Tokens(NamedTuple):
    """This process's keys and values, one masked token where it has none, and who sees them: (..., 1, S)."""

    k: Tensor
    v: Tensor
    visible: Tensor

    def some(self, first: int, end: int) -> Tokens:
        """Those from number ``first`` up to ``end``."""
        k, v = (x[..., first:end, :] for x in self[:2])
        return Tokens(k, v, self.visible[..., first:end])


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, over its near keys, the sums of all others that it may see, and the sink tokens."""
    mechanism, shards = _mechanism(call), call.shards
    w, ranges = checks.weights(mechanism, call.w, q), ranges_of(call, _mechanism(call).window)
    k, v, mask = checks.without_masked(k, v, call.key_mask, "kv")
    tokens = Tokens(k, v, append(None, k, v, mask).visible)
    if not k.shape[-2]:
        k_one, v_one = states.one_token(k), states.one_token(v)
        tokens = Tokens(k_one, v_one, append(None, k_one, v_one, None).visible.logical_not())
    sinks, gathered = _sink_tokens(call, tokens)
    summed = tokens._replace(visible=tokens.visible & ~_among(sinks, tokens.visible, shards.key_start))
    far, received = _far(call, summed, w, ranges)
    near, fetched = _near(call, tokens._replace(k=k, v=v), sinks, ranges)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    if q.shape[-2]:
        first, low = shards.start + shards.num_keys - shards.length, ranges[shards.rank][0]
        last = first + q.shape[-2] - 1
        late = sinks.position > last if call.is_causal else torch.zeros_like(sinks.present)
        position = (sinks.position - low).masked_fill(late, MISSING)
        state = HybridState(far, near, sinks._replace(position=position))
        out = mechanism.attend_within(q, w, state, start=first - low, is_causal=call.is_causal)
    for each in (gathered, received, fetched):
        out = out if each is None else collectives.with_gradient(out, each)
    return out


def _mechanism(call: Call) -> Hybrid:
    assert isinstance(call.mechanism, Hybrid)
    return call.mechanism


def _sink_tokens(call: Call, tokens: Tokens) -> tuple[SinkTokens, Tensor | None]:
    """The sink tokens of the whole sequence, at their positions in it, and the tensor of which they are made.

    They are the first and last of the first and last visible keys of every shard.
    """
    mechanism, shards, width = _mechanism(call), call.shards, tokens.k.shape[-1]
    number = {"first": mechanism.first, "last": 0 if call.is_causal else mechanism.last}
    sinks, _ = SinkTokens.of(*tokens, **number)
    if not sum(number.values()):
        return sinks, None
    position = torch.where(sinks.present, sinks.position + shards.key_start, MISSING)
    position = collectives.all_gather(position, shards.group).movedim(0, -2).flatten(-2)
    gathered = collectives.all_gather(torch.cat(sinks[:2], -1), shards.group)
    k, v = gathered.movedim(0, -3).flatten(-3, -2).split([width, gathered.shape[-1] - width], -1)
    chosen, _ = SinkTokens.of(k, v, position < MISSING, **number)
    index = chosen.position.clamp(max=position.shape[-1] - 1)
    return chosen._replace(position=torch.where(chosen.present, position.gather(-1, index), MISSING)), gathered


def _among(sinks: SinkTokens, like: Tensor, first: int) -> Tensor:
    """Which of the keys from position ``first`` on, as many as ``like`` (..., 1, S) has, are sink tokens."""
    position = torch.arange(first, first + like.shape[-1], device=like.device)
    return (position[:, None] == sinks.position[..., None, :]).any(-1)


def _far(call: Call, tokens: Tokens, w: Any, ranges: Ranges) -> tuple[LinearState, Tensor]:
    """The sums of all far keys that this process's queries may see, and the tensor of which they are made."""
    mechanism, shards, ranks = _mechanism(call), call.shards, range(call.shards.world)
    empty = mechanism.far_state(*tokens.some(0, 1)[:2], torch.zeros_like(tokens.visible[..., :1]), w)
    parts = [beyond(shards, shards.rank, rank, ranges, is_causal=call.is_causal) for rank in ranks]
    cuts = sorted({border for part in parts for borders in part for border in borders})
    start = shards.key_start
    sums = [(a, b, mechanism.far_state(*tokens.some(a - start, b - start), w)) for a, b in pairwise(cuts)]

    def total(part: list[tuple[int, int]]) -> LinearState:
        inside = [state for a, b, state in sums if any(first <= a and b <= end for first, end in part)]
        return reduce(linear_state.combine, inside)

    size = states.packed(empty).numel()
    rows = [x.reshape(-1)[:0].to(empty.kv.dtype) for x in (*tokens[:2], *states.leaves(w))]
    rows += [states.packed(total(part)) for part in parts if part]
    outgoing = [size * bool(part) for part in parts]
    incoming = [size * bool(beyond(shards, rank, shards.rank, ranges, is_causal=call.is_causal)) for rank in ranks]
    received = collectives.all_to_all(torch.cat(rows), outgoing, incoming, shards.group)
    others = [states.unpacked(empty, row) for row in received.view(-1, size)]
    return reduce(linear_state.combine, others, empty), received


def _near(call: Call, tokens: Tokens, sinks: SinkTokens, ranges: Ranges) -> tuple[KVCache, Tensor]:
    """The keys around this process's queries, visible but for sink tokens, and the tensor of which they are made."""
    low, high = ranges[call.shards.rank]
    fetched = fetch(torch.cat(_columns(call, tokens), -1), ranges, call.shards)
    sizes = [tokens.k.shape[-1], tokens.v.shape[-1], 1][: 3 if call.masked else 2]
    k, v, *mask = fetched.split(sizes, -1)
    visible = torch.ones_like(tokens.visible[..., :1]).expand(*tokens.visible.shape[:-1], high - low)
    if mask:
        visible = mask[0][..., :1, :, 0].detach() > 0.5
    if high == low:  # one masked token
        k, v = states.one_token(k), states.one_token(v)
        visible = torch.zeros_like(tokens.visible[..., :1])
    return KVCache(k, v, visible & ~_among(sinks, visible, low)), fetched


def _columns(call: Call, tokens: Tokens) -> list[Tensor]:
    """What is fetched of a key: with a mask whether it is visible, for every head."""
    k, v, visible = tokens
    if not call.masked:
        return [k, v]
    rows = visible[..., : k.shape[-2]].expand(*k.shape[:-1]).to(k.dtype)
    return [k, v, rows[..., None]]


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: sink tokens and their positions, one state to each process for which keys are far, near keys."""
    mechanism, shards, ranges = _mechanism(call), call.shards, ranges_of(call, _mechanism(call).window)
    others = [rank for rank in range(shards.world) if rank != shards.rank]
    heads, pair = sizes.batch * sizes.heads, sizes.width + sizes.values
    sinks = mechanism.first + (0 if call.is_causal else mechanism.last)
    gathered = len(others) * sinks * (8 * sizes.batch + heads * pair * sizes.itemsize)
    receivers = sum(bool(beyond(shards, shards.rank, rank, ranges, is_causal=call.is_causal)) for rank in others)
    near = tokens_sent(ranges, shards) * heads * (pair + call.masked) * sizes.itemsize
    return gathered + receivers * _bytes_of_state(call, sizes) + near


def _bytes_of_state(call: Call, sizes: Sizes) -> int:
    dtype = {2: torch.float32, 4: torch.float32, 8: torch.float64}[sizes.itemsize]
    like = next(iter(states.leaves(call.w)), torch.empty(0))
    k, v = (torch.zeros(sizes.batch, sizes.heads, 1, n, dtype=dtype, device=like.device)
            for n in (sizes.width, sizes.values))  # fmt: skip
    with torch.no_grad():
        flat = states.packed(_mechanism(call).far_state(k, v, torch.ones_like(k[..., :1, :, 0]).bool(), call.w))
    return flat.numel() * flat.element_size()


HYBRID = Strategy(
    "near keys, far states", "all-gathers of sink tokens, all-to-alls of far states and of near keys", attend, sends
)
