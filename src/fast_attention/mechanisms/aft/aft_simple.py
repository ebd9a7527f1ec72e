"""AFT-simple (Zhai et al. 2021): every channel pools the values by its own keys, gated by the query.

``sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)``. Causal sums have one log scale for all tokens where no key lies
far above the first that is visible (``fast``), and else one for each (``reference.running``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import masks, operation, trace
from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.chunks import RunningSum, chunks_of, first_visible
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Fast, NotServed, Operation, Tensors, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu import calls, self_check
from fast_attention.gpu.calls import Chunks
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.aft import fast, kernels, reference
from fast_attention.mechanisms.aft.reference import Pool, last_rows, same_width
from fast_attention.traits import KERNELS


def hidden(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values, at ``FLOOR`` and zero where masked."""
    return reference.masked_scores(k, key_mask), masks.drop(v, key_mask)


def mean_of_all(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """AFT-simple over all visible keys."""
    k, v = hidden(k, v, key_mask)
    return q.sigmoid() * reference.mean(reference.pooled(k, reference.with_ones(k, v)).sums, v.shape[-1])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (k, v), any_masked = hidden(k, v, key_mask), key_mask is not None
    scale, size = fast.log_scale(k), fast.chunk_length(k)
    if size >= k.shape[-2]:
        e = (k - scale).exp_()
        denominator = e.sum(-2, keepdim=True)
        mean = e.mul_(v).sum(-2, keepdim=True)
    else:
        mean, denominator = _sums(k, v, scale, size)
    denominator = fast.safe(denominator, any_masked=any_masked)
    mean = mean.div_(denominator)
    if q.shape[-2] <= (size := fast.chunk_length(q)):
        return q.sigmoid().mul_(mean), (scale, denominator, mean) if keep else ()
    out = torch.empty_like(q)
    for at in chunks_of(size, q.shape[-2]):
        torch.sigmoid(q[..., at, :], out=out[..., at, :]).mul_(mean)
    return out, (scale, denominator, mean) if keep else ()


def _sums(k: Tensor, v: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numerators and denominators."""
    e = k.new_empty(*k.shape[:-2], size, k.shape[-1])
    numerator, denominator = RunningSum(), RunningSum()
    for at in chunks_of(size, k.shape[-2]):
        weights = exp_(torch.sub(k[..., at, :], scale, out=e[..., : at.stop - at.start, :]))
        denominator.add(weights)
        numerator.add(weights.mul_(v[..., at, :]))
    return numerator.row(k), denominator.row(k)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Tensors:
    (q, k, v, key_mask), (scale, denominator, mean), (g,) = inputs, saved, gradients
    k, v = hidden(k, v, key_mask)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    total = torch.zeros_like(mean, dtype=torch.float64)
    for at in chunks_of(fast.chunk_length(q), q.shape[-2]):
        gates, rows = torch.sigmoid(q[..., at, :]), dq[..., at, :]
        total += torch.mul(gates, g[..., at, :], out=rows).sum(-2, keepdim=True)
        rows.mul_(mean).mul_(gates.neg_().add_(1.0))  # out = gates * mean
    factor = total.to(k.dtype) / denominator
    for at in chunks_of(fast.chunk_length(k), k.shape[-2]):
        weights = exp_(torch.sub(k[..., at, :], scale, out=dv[..., at, :])).mul_(factor)
        torch.sub(v[..., at, :], mean, out=dk[..., at, :]).mul_(weights)
    return dq, masks.drop(dk, key_mask), masks.drop(dv, key_mask), None


TOKENS = 64  # of a chunk of packed sequences, in kernels
WIDEST = 1 << 16  # channels: any number, which a program takes a few of


def gpu_serves(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
    """Why kernels cannot compute this call; empty where they can."""
    why = operation.gpu_unsupported_reason(q, k, v, widest=WIDEST)
    return why or self_check.unsupported_reason(kernels.check(), q, v, masked=key_mask is not None)


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Outputs (..., L, C): see ``aft_simple``."""
    return calls.run(kernels.kernel_set(), q, k, v, key_mask, is_causal=is_causal)


noncausal = Operation(
    mean_of_all,
    cpu=Fast(
        _forward, _backward, path="sums over all keys, chunk by chunk", why="every query sees the same keys"
    ),
    cuda=Fast(partial(attend_on_gpu, is_causal=False), None, serves=gpu_serves, halves=True),
    compute=torch.float32,
    path="sums over all keys",
)  # fmt: skip


def running_means(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Causal AFT-simple for queries that end where the keys end; zeros before the first key."""
    queries, (k, v) = last_rows(q, k.shape[-2]), hidden(k, v, key_mask)
    return last_rows(_gated(queries, k, v), q.shape[-2])


def _gated(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.sigmoid() * reference.mean(reference.running(k, reference.with_ones(k, v)).sums, v.shape[-1])


_GROUPS = Operation(_gated, cpu=Fast(fast.forward, fast.backward))


def _grouped(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    queries, (k, v) = last_rows(q, k.shape[-2]), hidden(k, v, key_mask)
    scale, first = fast.log_scale(k), first_visible(k.detach(), key_mask)
    if bool((scale - first.masked_fill(first < FLOOR / 2, float("inf")) > fast.RANGE).any()):
        raise NotServed("a key lies far above the first")
    trace.record("prefix sums over groups of tokens side by side", "causal", group=fast.GROUP)
    return last_rows(_GROUPS(queries, k, v, None, None, key_mask, scale), q.shape[-2])


causal = Operation(
    running_means,
    cpu=Fast(_grouped, None),
    cuda=Fast(partial(attend_on_gpu, is_causal=True), None, serves=gpu_serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path="running sums with a log scale for every token",
)


def aft_simple(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys width"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length width"]:
    """``sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)``, channel by channel (arXiv 2105.14103, Eq. 5).

    The sums run over the keys that query i may see. Exact for keys of any size: every sum is divided by the exponential
    of a running maximum. A query that sees nothing gets zeros.
    """
    return (causal if is_causal else noncausal)(q, k, v, key_mask)


@dataclass(frozen=True, repr=False)
class AFTSimple(Attention[tuple[()], Pool]):
    """AFT without position biases: the values' mean weighted by exp(key), one for all queries, gated by each.

    Every query weighs a key the same; what is lost is the interaction of content with position. Keys, queries and
    values must have the same width.
    """

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)",
        cost="n d",
        complexity_exponent=1.0,
        gpu=KERNELS,
        causal=True,
        padding=True,
        cross=True,
        memory="constant",
        matrix=False,  # a matrix for each channel
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``aft_simple``."""
        same_width(self, k, v)
        return aft_simple(q, k, v, is_causal=is_causal, key_mask=key_mask)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Causal, by kernels: every sequence begins a chunk, and pools with it."""
        same_width(self, k, v)
        if not is_causal or gpu_serves(q, k, v, key_mask):
            return None
        parts = Chunks.of(lengths, TOKENS, q.device)
        kernel_set = kernels.kernel_set(parts.begins)
        q, k, v = (parts.spread(x) for x in (q, k, v))
        return parts.gathered(calls.run(kernel_set, q, k, v, parts.visible(key_mask), is_causal=True))

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Pool | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Pool]:
        """Outputs of new tokens, and the pool of all keys up to the last."""
        same_width(self, k, v)
        if why := gpu_serves(q, k, v, key_mask):
            operation.log_fallback(q, why)
            return self._advance(q, k, v, w, state, key_mask=key_mask)
        first = None if state is None else torch.cat([state.sums, state.log_scale], -1)[..., 0, :]
        out, last = calls.advance(kernels.kernel_set(), q, k, v, key_mask, first, decodes=calls.steps(q, k, v, first))
        sums, log_scale = last[..., None, :].split([2 * k.shape[-1], k.shape[-1]], -1)
        return out, Pool(log_scale, sums)

    @in_chunks
    @in_float32
    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Pool | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Pool]:
        scores, values_and_ones = reference.terms(k, v, key_mask)
        if not symbolic() and k.shape[-2] == 1:
            trace.record("one key added to the sums", "decoding token by token")
            row = Pool(scores, values_and_ones)
            row = row if state is None else reference.combined(state, row)
            return q.sigmoid() * reference.mean(row.sums, v.shape[-1]), row
        rows = reference.running(*reference.prepended(state, scores, values_and_ones))
        out = q.sigmoid() * reference.mean(rows.sums[..., 1:, :], v.shape[-1])
        return out, Pool(rows.log_scale[..., -1:, :], rows.sums[..., -1:, :])

    @summed_in_chunks
    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: tuple[()], *, key_mask: Tensor | None = None) -> Pool:
        """The pool of the keys of a chunk."""
        return reference.pooled(*reference.terms(k, v, key_mask))

    def merge_states(self, earlier: Pool, later: Pool) -> Pool:
        """The pool of two neighbouring chunks."""
        return reference.combined(earlier, later)
