"""Spreads AFT's windows: keys with biases are fetched; each process sends one key that stands for all its others."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fast_attention import checks
from fast_attention.engine.precision import widen
from fast_attention.engine.scan import FLOOR
from fast_attention.mechanisms.aft import reference
from fast_attention.mechanisms.aft.aft_conv import AFTConv
from fast_attention.mechanisms.aft.aft_local import AFTLocal
from fast_attention.parallel import collectives
from fast_attention.parallel.fetching import Ranges, beyond, tokens_sent
from fast_attention.parallel.strategy import Call, Sizes, Strategy
from fast_attention.parallel.windows import fetch_near


def ranges(call: Call) -> Ranges:
    """The keys that have a bias of their own for some query of each process; none where it has no query."""
    reach, keys = _mechanism(call).reach, call.shards.num_keys
    return [
        (max(first - reach, 0), end if call.is_causal else min(end + reach, keys)) if end > first else (first, first)
        for first, end in pairwise(call.shards.starts())
    ]


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, over the keys in its windows and one that stands for all further away."""
    mechanism, shards, near = _mechanism(call), call.shards, ranges(call)
    w = checks.weights(mechanism, call.w, q)
    reference.same_width(mechanism, k, v)
    if isinstance(mechanism, AFTLocal):
        mechanism.within(shards.length, w.band.shape[0])
    k, v, mask = checks.without_masked(k, v, call.key_mask, mechanism.traits.reads)
    near_k, near_v, visible, fetched = fetch_near(call, k, v, near)
    far, received = _far(call, reference.masked_scores(k, mask).double(), v.double(), near)
    near_k, far = _around_the_far_key(near_k, far)
    if q.shape[-2]:
        out = mechanism.attend_part(
            q, near_k, near_v, w, far, start=shards.start, before=shards.start - near[shards.rank][0],
            is_causal=call.is_causal, key_mask=None if visible is None else visible[..., None, :],
        )  # fmt: skip
    else:
        out = torch.zeros_like(q)
    return collectives.with_gradient(collectives.with_gradient(out, received), fetched)


def _mechanism(call: Call) -> AFTLocal | AFTConv:
    assert isinstance(call.mechanism, AFTLocal | AFTConv)
    return call.mechanism


def _strict(call: Call) -> bool:
    return isinstance(call.mechanism, AFTLocal) and call.mechanism.strict


def _parts(call: Call, sender: int, receiver: int, near: Ranges) -> Ranges:
    """The keys of one process that the queries of another see with bias 0."""
    first, end = near[receiver]
    return (
        [] if _strict(call) or first == end else beyond(call.shards, sender, receiver, near, is_causal=call.is_causal)
    )


def _far(call: Call, k: Tensor, v: Tensor, near: Ranges) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One key and its value for all that this process's queries see with bias 0, the tensor of which they are made.

    Keys between two borders of anyone's range are summed once.
    """
    shards, ranks, start = call.shards, range(call.shards.world), call.shards.key_start
    parts = [_parts(call, shards.rank, rank, near) for rank in ranks]
    cuts = sorted({border for part in parts for borders in part for border in borders})
    keys = {(a, b): reference.one_key(*(x[..., a - start : b - start, :] for x in (k, v))) for a, b in pairwise(cuts)}

    def joined(part: Ranges) -> Tensor:
        inside = [key for (a, b), key in keys.items() if any(first <= a and b <= end for first, end in part)]
        return torch.cat(reference.one_key(*(torch.cat(x, -2) for x in zip(*inside, strict=True))), -1)

    one = (*k.shape[:-2], 1, k.shape[-1])
    nothing = torch.cat([k.new_full(one, FLOOR), v.new_zeros(one)], -1)
    size = nothing.numel()
    rows = [x.reshape(-1)[:0] for x in (k, v)] + [joined(part).reshape(-1) for part in parts if part]
    incoming = [size * bool(_parts(call, rank, shards.rank, near)) for rank in ranks]
    received = collectives.all_to_all(torch.cat(rows), [size * bool(part) for part in parts], incoming, shards.group)
    others = received.view(-1, *nothing.shape).unbind()
    far = torch.cat([nothing, *others], -2)
    far_k, far_v = far.split([k.shape[-1], v.shape[-1]], -1)
    return reference.one_key(far_k.double(), far_v.double()), received


def _around_the_far_key(near_k: Tensor, far: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Keys less the far one, which moves no output: the logarithm of many weights would lose digits in float32."""
    key, value = far
    if near_k.dtype == torch.float32:
        shift = key.detach().masked_fill(key <= FLOOR / 2, 0.0).float()
        near_k, key = near_k - shift, key - shift
    return near_k, (key.to(widen(near_k).dtype), value.to(widen(near_k).dtype))


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: near keys and values, with a mask a number for each; a key and a value for the others."""
    shards, near = call.shards, ranges(call)
    heads, others = sizes.batch * sizes.heads, [rank for rank in range(shards.world) if rank != shards.rank]
    receivers = sum(bool(_parts(call, shards.rank, rank, near)) for rank in others)
    pair = sizes.width + sizes.values
    fetched = tokens_sent(near, shards) * (pair + call.masked) * sizes.itemsize
    return heads * (fetched + receivers * pair * 8)  # the far keys are float64


BIASED_WINDOWS = Strategy(
    "neighbours, one far key", "all-to-alls of near keys and values, and of one key for all others", attend, sends
)
