"""LSH attention of short sequences: one product of all tokens, masked by who meets whom in any round."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.masks import masked_softmax
from fast_attention.mechanisms.lsh.reference import SHORTEST, Codes, Rules, Tokens, arrange

SHORT = 256  # tokens up to which sorting them costs more than it saves
PAIRS = 2**24  # of all lanes, beyond which scores would take more than 64 MiB


def serves(q: Tensor) -> bool:
    """Whether all pairs are few enough."""
    return q.shape[-2] <= SHORT and q[..., 0].numel() * q.shape[-2] <= PAIRS


def dense_softmax(q: Tokens, v: Tokens, bucket: Codes, *, rules: Rules) -> Tokens:
    """``reference.hashed_softmax`` over all pairs, in operations that autograd follows."""
    often = meetings(bucket, rules)
    met = often > 0
    scores = (rules.scale * q) @ F.normalize(q, dim=-1, eps=SHORTEST).mT
    if not rules.distinct:
        scores = scores + often.clamp(min=1).to(scores.dtype).log()
    return torch.where(met.any(-1, keepdim=True), masked_softmax(scores, met) @ v, v)


@torch.no_grad()
def meetings(bucket: Codes, rules: Rules) -> Tensor:
    """In how many rounds query i reaches key j (..., L, L); what masked queries reach means nothing."""
    code = arrange(bucket, number=rules.number, size=rules.size, ranked=rules.ranked, across=rules.across).code.short()
    often = sum(((each[..., :, None] - each[..., None, :]) & ~1 == 0).byte() for each in code.unbind(-2))
    assert isinstance(often, Tensor)
    if rules.is_causal:
        return often.tril_(-1)
    often.diagonal(dim1=-2, dim2=-1).zero_()
    return often
