"""AFT-simple (Zhai et al. 2021): every channel pools the values by its own keys, gated by the query."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import operation, trace
from fast_attention.engine.advancing import in_chunks, summed_in_chunks
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.aft import fast, reference
from fast_attention.mechanisms.aft.reference import Pool, same_width
from fast_attention.traits import KERNELS


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
    return (fast.causal if is_causal else fast.noncausal)(q, k, v, key_mask)


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
        if not is_causal or fast.gpu_serves(q, k, v, key_mask):
            return None
        return fast.packed_on_gpu(q, k, v, lengths, key_mask)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: Pool | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Pool]:
        """Outputs of new tokens, and the pool of all keys up to the last."""
        same_width(self, k, v)
        if why := fast.gpu_serves(q, k, v, key_mask):
            operation.log_fallback(q, why)
            return self._advance(q, k, v, w, state, key_mask=key_mask)
        return fast.advance_on_gpu(q, k, v, key_mask, state)

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
