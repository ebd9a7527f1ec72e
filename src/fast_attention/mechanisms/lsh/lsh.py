"""LSH attention, the Reformer's (Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451): only tokens of like hash meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, masks
from fast_attention.engine.numerics import bounded
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.lsh import gpu
from fast_attention.mechanisms.lsh.fast import hashed_attention
from fast_attention.mechanisms.lsh.reference import SHORTEST, Rules, buckets
from fast_attention.mechanisms.lsh.state import LOG, HashMemory, flushed, remember, step
from fast_attention.value import at_least, one_of

Layout = Literal["ranked", "sorted"]


def lsh_attention(
    q: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length values"],
    rotations: Float[Tensor, "heads rounds width halves"],
    *,
    num_buckets: int | tuple[int, ...] = 32,
    bucket_size: int = 64,
    layout: Layout = "ranked",
    attend_across_buckets: bool = False,
    correct_duplicates: bool = True,
    scale: float = 1.0,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``sum_j exp(s_ij) v_j / sum_j exp(s_ij)`` over the union of all rounds' sets P_i (arXiv 2001.04451, Eq. 2-6).

    Queries are keys: ``s_ij = scale q_i . q_j / |q_j|``. Each round hashes every token to a bucket
    ``h(x) = argmax [x R; -x R]``; P_i holds the tokens of i's bucket in i's chunk and the chunk before, i itself only
    where nothing else is left (the paper subtracts 1e5 on the diagonal, which comes to the same). The union counts a
    key once, as the paper's ``- log N_ij`` does (appendix A); with ``correct_duplicates=False`` once per round.
    See ``LSH`` for ``layout``. A masked token neither is seen nor gets an output other than zero.

    Raises:
        ValueError: ``layout="sorted"`` with ``is_causal``, or ``layout="ranked"`` with ``attend_across_buckets``.
    """
    ranked, sizes = layout == "ranked", _sizes(num_buckets)
    if is_causal and not ranked:
        raise ValueError('layout="sorted" is not causal: later tokens move the chunks of earlier ones; use "ranked"')
    if ranked and attend_across_buckets:
        raise ValueError('layout="ranked" has chunks of one bucket only: attend_across_buckets needs layout="sorted"')
    rules = Rules(
        math.prod(sizes), bucket_size, ranked, attend_across_buckets, is_causal, correct_duplicates, float(scale)
    )
    rounded = None if gpu.obstacle(q, v, rotations.shape[1]) else q.dtype
    return _hashed(q, v, rotations, sizes, rules, key_mask, rounded)


@in_float32
def _hashed(
    q: Tensor, v: Tensor, rotations: Tensor, sizes: tuple[int, ...], rules: Rules, key_mask: Tensor | None,
    rounded: torch.dtype | None,
) -> Tensor:  # fmt: skip
    q = masks.drop(q, key_mask)  # a masked token's row is a key too
    bucket = buckets(q, rotations, sizes)
    if key_mask is not None:
        bucket = torch.where(key_mask[..., None, :], bucket, rules.number)
    if rounded is None:
        out = hashed_attention(q, v, bucket.int(), **vars(rules))
    else:
        out = gpu.hashed_softmax(q, masks.drop(v, key_mask), bucket.int(), rules=rules, dtype=rounded)
    return out if key_mask is None else out.masked_fill(~key_mask[..., None], 0.0)


def _sizes(num_buckets: int | tuple[int, ...]) -> tuple[int, ...]:
    return num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)


@in_float32
def _advance(
    q: Tensor, v: Tensor, rotations: Tensor, memory: HashMemory | None, m: LSH, key_mask: Tensor | None
) -> tuple[Tensor, HashMemory]:
    q = bounded(masks.drop(q, key_mask))
    sizes, keys = _sizes(m.num_buckets), F.normalize(q, dim=-1, eps=SHORTEST)
    bucket, number = buckets(q, rotations, sizes), math.prod(sizes)
    visible = torch.ones(1, q.shape[-2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    if memory is None:
        out = m._attend(q, v, rotations, True, key_mask)
        bucket = torch.where(visible[..., None, :], bucket, number)
        return out, remember(keys, v, bucket, number=number, size=m.bucket_size)
    outs, owned = [], False  # a state is a value: the caller's stays as it is
    rows = (x.split(1, -2) for x in (m.scale * q, keys, v))
    dispatch.record("token by token", "two chunks of each bucket and a log of the latest tokens are read", log=LOG)
    for q1, k1, v1, bucket1, visible1 in zip(*rows, bucket.split(1, -1), visible.split(1, -1), strict=True):
        out, memory = step(q1, k1, v1, bucket1, visible1, memory, distinct=m.correct_duplicates)
        outs.append(out)
        if int(memory.logged) == LOG:
            memory, owned = flushed(memory, owned=owned), True
    return torch.cat(outs, -2), memory


class Rotations(NamedTuple):
    """Gaussian rotations (H, rounds, E, half the number of buckets) that hash the tokens."""

    rotations: Tensor


_TRAITS = Traits(
    paper="Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451",
    formula="softmax over j near i in a bucket of h(x) = argmax [x R; -x R] of q_i q_j^T / |q_j|, times v",
    cost="n log n + h n (b d + h b)",
    order=1.0,
    reads="qv",
    causal=True,
    padding=True,
    rotary=True,
    memory="window",
    random=True,
)


@dataclass(frozen=True, repr=False)
class LSH(Attention[Rotations, HashMemory]):
    """Attention among tokens of like hash: a token sees the near ones of its bucket. Queries are keys; k is ignored.

    ``layout="ranked"`` (ours) splits a bucket into chunks by the rank of a token among the earlier ones of its bucket,
    so nothing later can move anything earlier, and decoding needs two chunks per bucket and round.
    ``layout="sorted"`` is the published one: the whole sequence is sorted by bucket and position and split into chunks.
    Masking later positions does not make that causal: a later token in an earlier bucket shifts every chunk border
    after it (4 to 5 % rms of the earlier outputs moved in reformer-pytorch and in transformers), so it is refused with
    is_causal=True. Neither lets the first chunk see the last, as the published codes do.

    Args:
        num_hashes: Rounds of hashing, whose sets are united.
        num_buckets: Buckets per round, even; a tuple of even factors hashes once per factor. About tokens / bucket_size
            serves well, but it never follows the length by itself: a token's bucket must not depend on what follows.
        bucket_size: Tokens per chunk; a token sees its chunk and the one before.
        layout: "ranked" or "sorted".
        attend_across_buckets: A chunk of several buckets is seen whole (``layout="sorted"`` only).
        correct_duplicates: Count a key once that several rounds reach (the paper's N_ij), not once per round (trax).
        scale: Factor on the logits q_i . q_j / ``|q_j|``; the keys' length 1 already takes the place of 1/sqrt(width).
    """

    num_hashes: int = 4
    num_buckets: int | tuple[int, ...] = 32
    bucket_size: int = 64
    layout: Layout = "ranked"
    attend_across_buckets: bool = False
    correct_duplicates: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "num_hashes", self.num_hashes, 1)
        at_least(self, "bucket_size", self.bucket_size, 1)
        one_of(self, "layout", self.layout, Layout)
        sizes = _sizes(self.num_buckets)
        if not sizes or any(size < 2 or size % 2 for size in sizes):
            raise ValueError(
                f"LSH(num_buckets={self.num_buckets!r}): num_buckets must be even, each factor of a tuple too"
            )
        if self.layout == "ranked" and self.attend_across_buckets:
            raise ValueError(f"{self!r}: chunks of layout='ranked' hold one bucket each; use layout='sorted'")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """The published layout is not causal and cannot stream."""
        return _TRAITS if self.layout == "ranked" else replace(_TRAITS, causal=False, memory=None)

    def weights(self, shape: Shape) -> Rotations:
        """Draw the rotations."""
        halves = sum(_sizes(self.num_buckets)) // 2
        return Rotations(torch.randn(shape.heads, self.num_hashes, shape.head_dim, halves))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Rotations, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Attend among the hashed queries; ``k`` is ignored."""
        return self._attend(q, v, w.rotations, is_causal, key_mask)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Rotations, state: HashMemory | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, HashMemory]:
        """Attend to the first tokens all at once, then token by token; ``k`` is ignored."""
        return _advance(q, v, w.rotations, state, self, key_mask)

    def _attend(self, q: Tensor, v: Tensor, rotations: Tensor, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        return lsh_attention(
            q, v, rotations, num_buckets=self.num_buckets, bucket_size=self.bucket_size, layout=self.layout,
            attend_across_buckets=self.attend_across_buckets, correct_duplicates=self.correct_duplicates,
            scale=self.scale, is_causal=is_causal, key_mask=key_mask,
        )  # fmt: skip
