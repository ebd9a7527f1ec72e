"""LSH attention, the Reformer's (Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451): only tokens of like hash meet.

Decodes among hashed tokens: caches the last two chunks of every bucket and round, and a log of the latest tokens.

The chunks are large and the same for many tokens; what the latest tokens would change in them is in a short log, so
that a token copies the log only. A full log is written into a copy of the chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, trace
from fast_attention.engine.numerics import clamp
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import replaced
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.lsh import gpu
from fast_attention.mechanisms.lsh.compiled import buckets, hashed_attention
from fast_attention.mechanisms.lsh.reference import SHORTEST, Rules, Tokens, ranks
from fast_attention.traits import SORTED
from fast_attention.value import at_least

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
        ValueError: ``layout="sorted"`` with ``is_causal``, or settings that ``LSH`` refuses.
    """
    if is_causal and layout == "sorted":
        raise ValueError('layout="sorted" is not causal: later tokens move the chunks of earlier ones; use "ranked"')
    m = LSH(rotations.shape[1], num_buckets, bucket_size, layout, attend_across_buckets, correct_duplicates, scale)
    return m.attend(q, q, v, Rotations(rotations), is_causal=is_causal, key_mask=key_mask)


@in_float32
def _hashed(
    q: Tensor, v: Tensor, rotations: Tensor, m: LSH, is_causal: bool, key_mask: Tensor | None,
    rounded: torch.dtype | None,
) -> Tensor:  # fmt: skip
    sizes = _sizes(m.num_buckets)
    number, ranked, scale = math.prod(sizes), m.layout == "ranked", float(m.scale)
    rules = Rules(number, m.bucket_size, ranked, m.attend_across_buckets, is_causal, m.correct_duplicates, scale)
    q = masks.drop(q, key_mask)  # a masked token's row is a key too
    bucket = buckets(q, rotations, sizes, number)
    if key_mask is not None:
        bucket = torch.where(key_mask[..., None, :], bucket, number)
    if rounded is None:
        out = hashed_attention(q, v, bucket.int(), **vars(rules))
    else:
        out = gpu.hashed_softmax(q, masks.drop(v, key_mask), bucket.int(), rules=rules, dtype=rounded)
    return out if key_mask is None else out.masked_fill(~key_mask[..., None], 0.0)


def _sizes(num_buckets: int | tuple[int, ...]) -> tuple[int, ...]:
    return num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)


LOG = 64  # tokens: a copy of the chunks (68 MB by default) then costs a token 1 MB, and the log at most 0.3


class HashMemory(NamedTuple):
    """Last 2 m tokens of every round and bucket; the token of rank r in its bucket is in slot r mod 2 m."""

    k: Tensor  # (..., H, rounds, buckets, 2 m, E)
    v: Tensor  # (..., H, rounds, buckets, 2 m, Ev)
    position: Tensor  # (..., H, rounds, buckets, 2 m): of the tokens; -1 is an empty slot
    filled: Tensor  # (..., H, rounds, buckets): how many tokens each bucket has had
    length: Tensor  # (): how many tokens there have been up to the log
    log_k: Tensor  # (..., H, LOG, E): the tokens since, in the first rows
    log_v: Tensor  # (..., H, LOG, Ev)
    log_bucket: Tensor  # (..., H, rounds, LOG); the number of buckets where masked or not written yet
    logged: Tensor  # (): how many rows are written


def remember(k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], *, number: int, size: int) -> HashMemory:
    """The memory after the first tokens, with buckets (..., H, rounds, L); bucket ``number`` holds what is masked."""
    batch_shape, slots = bucket.shape[:-1], 2 * size
    empty = HashMemory(
        k.new_zeros(*batch_shape, number, slots, k.shape[-1]), v.new_zeros(*batch_shape, number, slots, v.shape[-1]),
        bucket.new_full((*batch_shape, number, slots), -1), bucket.new_zeros(*batch_shape, number),
        bucket.new_zeros(()),
        k.new_zeros(*batch_shape[:-1], LOG, k.shape[-1]), v.new_zeros(*batch_shape[:-1], LOG, v.shape[-1]),
        bucket.new_full((*batch_shape, LOG), number), bucket.new_zeros(()),
    )  # fmt: skip
    return _written(empty, k, v, bucket)


def _written(memory: HashMemory, k: Tensor, v: Tensor, bucket: Tensor) -> HashMemory:
    """Write new tokens into the chunks, in place; bucket ``number`` holds what is masked."""
    number, slots = memory.position.shape[-2:]
    ascending, order = bucket.sort(dim=-1, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, ranks(ascending))
    added = torch.zeros_like(bucket[..., :1]).expand(*bucket.shape[:-1], number + 1)
    added = added.scatter_add(-1, bucket, torch.ones_like(bucket))
    bucket_or_last = bucket.clamp(max=number - 1)
    saved = (bucket < number) & (rank >= added.gather(-1, bucket) - slots)  # the last token of a slot
    slot = bucket_or_last * slots + (rank + memory.filled.gather(-1, bucket_or_last)) % slots
    lanes = torch.arange(slot[..., 0].numel(), device=slot.device).view(*slot.shape[:-1], 1)
    where = (slot + lanes * (number * slots))[saved]
    position = torch.arange(bucket.shape[-1], device=bucket.device) + memory.length
    for chunks, new in zip(memory[:3], (k[..., None, :, :], v[..., None, :, :], position[:, None]), strict=True):
        width = chunks.shape[-1] if chunks.ndim > memory.position.ndim else 1
        new = new.expand(*bucket.shape, width)[saved]
        chunks.view(-1, width).index_copy_(0, where, new)
    filled, length = memory.filled + added[..., :-1], memory.length + bucket.shape[-1]
    return replaced(memory, filled=filled, length=length)


def flushed(memory: HashMemory, *, owned: bool) -> HashMemory:
    """Write the log into the chunks and empty it; in place where they are ``owned``: no other state holds them."""
    count = int(memory.logged)
    if not owned:
        k, v, position = (x.clone(memory_format=torch.contiguous_format) for x in memory[:3])
        memory = replaced(memory, k=k, v=v, position=position)
    k, v, bucket = memory.log_k[..., :count, :], memory.log_v[..., :count, :], memory.log_bucket[..., :count]
    memory = _written(memory, k, v, bucket)
    empty = torch.full_like(memory.log_bucket, memory.position.shape[-2])
    return replaced(memory, log_bucket=empty, logged=torch.zeros_like(memory.logged))


def step(
    q: Tokens, k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], visible: Bool[Tensor, "..."], memory: HashMemory,
    *, distinct: bool,
) -> tuple[Tensor, HashMemory]:  # fmt: skip
    """The output (..., H, 1, Ev) of the next token, with buckets (..., H, rounds, 1), and the memory with it logged."""
    batch_shape, (number, slots) = bucket.shape[:-1], memory.position.shape[-2:]
    lane = (torch.arange(batch_shape.numel(), device=q.device).view(*batch_shape, 1) * number + bucket).flatten()
    same_bucket = memory.log_bucket == bucket  # (..., H, rounds, LOG)
    filled, order = memory.filled.gather(-1, bucket), same_bucket.cumsum(-1)
    rank = filled + order[..., -1:]
    first = (rank // (slots // 2) - 1) * (slots // 2)  # the rank from which tokens are reached
    keys, values, position = (
        x.flatten(0, len(batch_shape)).index_select(0, lane).unflatten(0, batch_shape) for x in memory[:3]
    )
    rank_of_slot = filled - 1 - (filled - 1 - torch.arange(slots, device=q.device)) % slots
    reached = (position >= 0) & (rank_of_slot >= first)
    recent = same_bucket & (filled + order - 1 >= first)
    times = recent.sum(-2)[..., None, :]  # (..., H, 1, LOG): in how many rounds
    if distinct:
        reached, times = reached & ~_in_earlier_slot(position, reached), times.clamp_(max=1)
    reached = torch.cat([reached.flatten(-2)[..., None, :], times > 0], -1)
    log_scores = q @ memory.log_k.mT + times.to(q.dtype).log()
    weights = masks.masked_softmax(torch.cat([q @ keys.flatten(-3, -2).mT, log_scores], -1), reached)
    in_chunks, in_log = weights.split([weights.shape[-1] - LOG, LOG], -1)
    out = in_chunks @ values.flatten(-3, -2) + in_log @ memory.log_v
    out = torch.where(reached.any(-1, keepdim=True), out, v).masked_fill(~visible[..., None], 0.0)
    return out, _logged(memory, k, v, torch.where(visible[..., None, :], bucket, number), visible)


def _logged(memory: HashMemory, k: Tensor, v: Tensor, bucket: Tensor, visible: Tensor) -> HashMemory:
    """Append one token to the log, a masked one as zeros."""
    at = memory.logged.view(1)
    k, v = (masks.drop(x, visible) for x in (k, v))
    return replaced(
        memory, log_k=memory.log_k.index_copy(-2, at, k), log_v=memory.log_v.index_copy(-2, at, v),
        log_bucket=memory.log_bucket.index_copy(-1, at, bucket), logged=memory.logged + 1,
    )  # fmt: skip


def _in_earlier_slot(position: Tensor, reached: Tensor) -> Tensor:
    """Which of the slots (..., rounds, 2 m) hold a token that an earlier slot holds too."""
    flat = position.masked_fill(~reached, -1).flatten(-2)
    ordered, order = flat.sort(dim=-1, stable=True)
    first = torch.zeros_like(ordered[..., :1], dtype=torch.bool)
    repeated = torch.cat([first, ordered[..., 1:] == ordered[..., :-1]], -1)
    return torch.zeros_like(repeated).scatter(-1, order, repeated).view_as(position)


class Rotations(NamedTuple):
    """Gaussian rotations (H, rounds, E, half the number of buckets) that hash the tokens."""

    rotations: Tensor


_TRAITS = Traits(
    paper="Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451",
    formula="softmax over j near i in a bucket of h(x) = argmax [x R; -x R] of q_i q_j^T / |q_j|, times v",
    cost="n log n + h n (b d + h b)",
    complexity_exponent=1.0,
    gpu=SORTED,
    inputs="qv",
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
        rounded = None if gpu.unsupported_reason(q, v, self.num_hashes) else q.dtype
        return _hashed(q, v, w.rotations, self, is_causal, key_mask, rounded)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Rotations, state: HashMemory | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, HashMemory]:
        """Attend to the first tokens all at once, then token by token; ``k`` is ignored."""
        q = clamp(masks.drop(q, key_mask))
        sizes, keys = _sizes(self.num_buckets), F.normalize(q, dim=-1, eps=SHORTEST)
        number = math.prod(sizes)
        bucket = buckets(q, w.rotations, sizes, number).long()
        visible = torch.ones(1, q.shape[-2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        if state is None:
            out = self.attend(q, q, v, w, is_causal=True, key_mask=key_mask)
            bucket = torch.where(visible[..., None, :], bucket, number)
            return out, remember(keys, v, bucket, number=number, size=self.bucket_size)
        outs, owned = [], False  # a state is a value: the caller's stays as it is
        rows = (x.split(1, -2) for x in (self.scale * q, keys, v))
        trace.record("token by token", "two chunks of each bucket and a log of the latest tokens are read", log=LOG)
        for q1, k1, v1, bucket1, visible1 in zip(*rows, bucket.split(1, -1), visible.split(1, -1), strict=True):
            out, state = step(q1, k1, v1, bucket1, visible1, state, distinct=self.correct_duplicates)
            outs.append(out)
            if int(state.logged) == LOG:
                state, owned = flushed(state, owned=owned), True
        return torch.cat(outs, -2), state
