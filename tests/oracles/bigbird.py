"""BigBird (arXiv 2007.14062): the set of keys of every query as a union of sets, then softmax over it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.biases import score

WORD = 2**32


def _mix(x: int) -> int:
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B % WORD
    return (x >> 16) ^ x


def random_blocks(seed: int, block: int, allowed: list[int], r: int) -> set[int]:
    """Floyd's algorithm (Bentley 1987): ``min(r, len(allowed))`` distinct members, drawn from a hash."""
    chosen: list[int] = []
    for draw in range(r):
        last = len(allowed) - r + draw
        if last < 0:
            continue
        pick = _mix(_mix(_mix(seed) ^ block) ^ draw) % (last + 1)
        chosen.append(last if pick in chosen else pick)
    assert len(set(chosen)) == min(r, len(allowed))
    return {allowed[pick] for pick in chosen}


def visible(m: Any, length: int, seen: list[bool], seed: int, is_causal: bool) -> list[set[int]]:
    """The keys of every query before the key mask acts. The first ``m.num_global_tokens`` tokens are ETC's."""
    g, b = m.num_global_tokens, m.block_size
    half = m.window_blocks // 2
    extra = math.ceil(g / b)  # numbers that the blocks of global tokens take
    block_of = [t // b if t < g else extra + (t - g) // b for t in range(length)]
    ends = [t + 1 for t in range(length) if seen[t]]
    total = extra + math.ceil((ends[-1] - g) / b) if ends and ends[-1] > g else extra
    if is_causal:
        total = block_of[-1] + 1
    first = set(range(extra + math.ceil(m.num_global_blocks / 2)))
    last = set() if is_causal else {total - 1 - j for j in range(m.num_global_blocks // 2)}
    rows = []
    for t in range(length):
        i = block_of[t]
        window = set(range(i - half, i + half + 1))
        stop = i if is_causal else total
        allowed = [c for c in range(stop) if c not in first | last | window]
        blocks = first | last | window | random_blocks(seed, i, allowed, m.num_random_blocks)
        keys = {j for j in range(length) if i in first | last or block_of[j] in blocks}
        rows.append({j for j in keys if j <= t or not is_causal})
    return rows


def bigbird(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length = len(q)
    seen = [key_mask is None or bool(key_mask[j]) for j in range(length)]
    scale = 1 / math.sqrt(q.shape[1]) if m.scale is None else m.scale
    rows = []
    for i, keys in enumerate(visible(m, length, seen, int(w.seeds[head]), is_causal)):
        keys = sorted(j for j in keys if seen[j])
        if not keys:
            rows.append(torch.zeros(v.shape[1], dtype=v.dtype, device=v.device) + 0 * q[i].sum())
            continue
        biases = w.bias.bias if m.sinks else w.bias
        terms = [score(m.bias, biases, q[i], k[j], j - i, head=head, scale=scale) for j in keys]
        scores = torch.stack(terms)
        weights = (scores - scores.max().detach()).exp()
        total = weights.sum()
        if m.sinks:  # a score more in the normaliser, whose value is zero
            total = total + (w.bias.sinks[head] - scores.max().detach()).exp()
        rows.append(sum(weights[n] * v[j] for n, j in enumerate(keys)) / total)
    return torch.stack(rows)


ORACLES = {"BigBird": bigbird}
VARIANTS = [
    "BigBird(block_size=2)",
    "BigBird(block_size=1, window_blocks=1, num_random_blocks=4)",
    "BigBird(block_size=3, window_blocks=1, num_random_blocks=1, num_global_blocks=1)",
    "BigBird(block_size=2, num_random_blocks=0, num_global_blocks=0)",
    "BigBird(block_size=1, window_blocks=1, num_random_blocks=2, num_global_blocks=5)",
    "BigBird(block_size=2, window_blocks=1, num_random_blocks=1, num_global_blocks=0, num_global_tokens=3)",
    "BigBird(block_size=2, num_random_blocks=0, num_global_tokens=1, scale=1.0)",
    "BigBird(block_size=2, num_random_blocks=1, bias=T5Buckets(num_buckets=6, max_distance=8))",
    "BigBird(block_size=2, num_random_blocks=1, sinks=True)",
    "BigBird(block_size=2, num_random_blocks=1, num_global_tokens=1, bias=ALiBi(), sinks=True)",
]
