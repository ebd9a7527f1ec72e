"""Fast attention by Manhattan distance (source 000, Eq. 11-12), pair by pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracles.log import positive


def manhattan(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    tokens = len(k)
    if m.key_dim == 1:
        k = k.mean(1, keepdim=True)
    if key_mask is not None:  # a key is its own token's reference too: a masked token enters with a key of zeros
        k = torch.where(key_mask[:, None], k, torch.zeros_like(k))
    h = positive(m, k)
    l = torch.log(h)
    rows = []
    for i in range(tokens):
        seen = [j for j in range(tokens) if (not is_causal or j <= i) and (key_mask is None or bool(key_mask[j]))]
        if not seen:
            rows.append(0 * (q[i].sum() + k.sum() + v.sum(0)))
            continue
        here = i if m.reference == "self" else seen[0]
        own = h[here] if key_mask is None or bool(key_mask[here]) else torch.zeros_like(h[here])
        weights = []
        for j in seen:
            difference = l[j] - l[here]
            if m.distance == "signed":
                weights.append(difference)
            elif m.distance == "l1":
                weights.append(torch.abs(difference))
            else:
                weights.append(torch.exp(-torch.abs(difference) / m.temperature))
        if m.distance == "laplacian":
            own = torch.zeros_like(own)
        related = sum(a * v[j] for a, j in zip(weights, seen, strict=True))
        if m.normalize == "none":
            out = own * v[here] + related
        elif m.normalize == "mean":
            out = own * v[here] + related / len(seen)
        else:
            total = torch.abs(own) + sum(torch.abs(a) for a in weights)
            out = (own * v[here] + related) / torch.where(total == 0, torch.ones_like(total), total)
        if m.query_dim == 1:
            out = out / (1 + torch.exp(-q[i].mean()))
        elif m.query_dim is None:
            out = out / (1 + torch.exp(-q[i]))
        rows.append(out)
    return torch.stack(rows)


ORACLES = {"Manhattan": manhattan}
VARIANTS = [
    "Manhattan(normalize='none')",
    "Manhattan(normalize='l1')",
    "Manhattan(normalize='none', reference='first', key_dim=1)",
    "Manhattan(reference='first', query_dim=None)",
    "Manhattan(query_dim=1, feature_map=PositiveElu())",
    "Manhattan(query_dim=None, feature_map=PositiveExp())",
    "Manhattan(key_dim=1, query_dim=1, feature_map=PositiveRelu(eps=0.1))",
    "Manhattan(distance='l1')",
    "Manhattan(distance='l1', normalize='none', key_dim=1)",
    "Manhattan(distance='l1', normalize='l1', query_dim=None)",
    "Manhattan(distance='laplacian', normalize='l1')",
    "Manhattan(distance='laplacian', temperature=0.3, query_dim=1)",
    "Manhattan(distance='laplacian', normalize='none', key_dim=1, temperature=2.0)",
    "Manhattan(distance='laplacian', normalize='l1', key_dim=1)",
]
