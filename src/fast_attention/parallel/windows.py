"""Spreads windows: every process fetches the keys and values that its queries see on its neighbours, and no others.

Gradients go home the way the keys came. Where a shard is shorter than the window, several neighbours send.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import checks
from fast_attention.mechanisms.hybrid.ranges import near_range
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.parallel import collectives
from fast_attention.parallel.fetching import Ranges, fetch, tokens_sent
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def ranges(call: Call, near: Local | BlockLocal) -> Ranges:
    """The keys that are near some query of each process, by positions in the whole sequence."""
    shards = call.shards
    behind = shards.num_keys - shards.length  # the last query stands at the last key
    queries = pairwise(start + behind for start in shards.starts(keys=False))
    return [near_range(near, each, shards.num_keys, is_causal=call.is_causal) for each in queries]


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, over its keys and its neighbours'."""
    mechanism, shards = call.mechanism, call.shards
    assert isinstance(mechanism, Local | BlockLocal)
    needed = ranges(call, mechanism)
    near_k, near_v, key_mask, fetched = fetch_near(call, k, v, needed)
    length, end = q.shape[-2], shards.start + q.shape[-2] + shards.num_keys - shards.length
    behind = max(needed[shards.rank][1] - end, 0)  # keys behind the last query, at which rows of zeros stand
    queries, weights = F.pad(q, (0, 0, 0, behind)), checks.weights(mechanism, call.w, q)
    out = mechanism(queries, near_k, near_v, weights, is_causal=call.is_causal, key_mask=key_mask)
    return collectives.with_gradient(out[..., :length, :], fetched)


def fetch_near(call: Call, k: Tensor, v: Tensor, needed: Ranges) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Keys and values in this process's range, which of them are visible (..., S), the tensor they are parts of."""
    columns = [k, v]
    if call.key_mask is not None:
        rows = call.key_mask[..., None, :].expand(*k.shape[:-1]).to(k.dtype)
        columns.append(rows[..., None])
    fetched = fetch(torch.cat(columns, -1), needed, call.shards)
    near_k, near_v, *mask = fetched.split([x.shape[-1] for x in columns], -1)
    return near_k, near_v, mask[0][..., 0, :, 0].detach() > 0.5 if mask else None, fetched


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: keys and values that are near others' queries, with a mask a number for each."""
    mechanism = call.mechanism
    assert isinstance(mechanism, Local | BlockLocal)
    numbers = sizes.batch * sizes.heads * (sizes.width + sizes.values + call.masked)
    return tokens_sent(ranges(call, mechanism), call.shards) * numbers * sizes.itemsize


WINDOWS = Strategy("neighbours", "one all-to-all of the keys and values near the borders of shards", attend, sends)
