"""LSH attention (Reformer, arXiv 2001.04451): the sets of section 2 and the rounds of appendix A, written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def bucket_of(x: Tensor, rotation: Tensor, num_buckets: int | tuple[int, ...]) -> int:
    """h(x) = argmax([xR; -xR]); several factors make h1 + b1 h2 + ..."""
    sizes = num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)
    bucket, stride, start = 0, 1, 0
    for size in sizes:
        turned = [float((x.detach() * rotation[:, start + c]).sum()) for c in range(size // 2)]
        both = turned + [-y for y in turned]
        bucket += stride * max(range(size), key=lambda c: both[c])
        stride, start = stride * size, start + size // 2
    return bucket


def reachable(m: Any, buckets: list[int], seen: list[bool], is_causal: bool) -> list[set[int]]:
    """The keys of every query in one round, itself included; a token that may not be seen has none."""
    tokens = [t for t in range(len(buckets)) if seen[t]]
    chunk: dict[int, int] = {}
    if m.layout == "ranked":
        for t in tokens:
            earlier = [s for s in tokens if s < t and buckets[s] == buckets[t]]
            chunk[t] = len(earlier) // m.bucket_size
    else:
        for place, t in enumerate(sorted(tokens, key=lambda t: (buckets[t], t))):
            chunk[t] = place // m.bucket_size
    rows: list[set[int]] = [set() for _ in buckets]
    for i in tokens:
        for j in tokens:
            near = chunk[j] in (chunk[i], chunk[i] - 1)
            same = buckets[i] == buckets[j] or m.attend_across_buckets
            if near and same and not (is_causal and j > i):
                rows[i].add(j)
    return rows


def lsh(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length, rounds = len(q), w.rotations.shape[1]
    seen = [key_mask is None or bool(key_mask[j]) for j in range(length)]
    keys = [x / x.square().sum().sqrt() for x in q]
    sets = []
    for r in range(rounds):
        buckets = [bucket_of(x, w.rotations[head, r], m.num_buckets) for x in q]
        sets.append(reachable(m, buckets, seen, is_causal))
    rows = []
    for i in range(length):
        if not seen[i]:
            rows.append(torch.zeros_like(v[i]) + 0 * q[i].sum())
            continue
        outputs, z = [], []
        for r in range(rounds):
            inside = sorted(sets[r][i])
            logits = []
            for j in inside:
                often = sum(j in sets[other][i] for other in range(rounds)) if m.correct_duplicates else 1
                logits.append(m.scale * (q[i] * keys[j]).sum() - (1e5 if i == j else 0.0) - math.log(often))
            s = torch.stack(logits)
            z.append(s.logsumexp(0))
            outputs.append(sum((s[n] - z[-1]).exp() * v[j] for n, j in enumerate(inside)))
        total = torch.stack(z).logsumexp(0)
        rows.append(sum((z[r] - total).exp() * outputs[r] for r in range(rounds)))
    return torch.stack(rows)


ORACLES = {"LSH": lsh}
VARIANTS = [
    "LSH(num_hashes=3, num_buckets=2, bucket_size=2)",
    "LSH(num_hashes=2, num_buckets=4, bucket_size=1, scale=0.5)",
    "LSH(num_hashes=2, num_buckets=2, bucket_size=3, correct_duplicates=False)",
    "LSH(num_hashes=1, num_buckets=(2, 4), bucket_size=4)",
    "LSH(num_hashes=2, num_buckets=2, bucket_size=2, layout='sorted')",
    "LSH(num_hashes=3, num_buckets=4, bucket_size=3, layout='sorted', attend_across_buckets=True)",
]
