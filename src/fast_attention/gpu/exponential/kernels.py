"""The kernels of exponential features as ``Forms``, and decoding, which has no gradient, as a torch operation."""

from __future__ import annotations

from torch import Tensor

from fast_attention.gpu.exponential.operations import ROWS, TOKENS, feature_read, feature_scan, feature_sums
from fast_attention.gpu.forms import Forms
from fast_attention.gpu.registering import as_bytes, contiguous, empty, operation


def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, query_rows: Tensor, key_rows: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    from fast_attention.gpu.exponential.decoding import step
    from fast_attention.gpu.exponential.launching import Weights

    weights = Weights(query_rows, key_rows, bias, trained=False)
    q, k, v = contiguous(q, k, v)
    return step(q, k, v, as_bytes(key_mask, k), state.contiguous(), weights)


feature_step = operation(
    "feature_step", f"{TOKENS}, Tensor state, {ROWS}", "(Tensor, Tensor)", _step,
    lambda q, k, v, mask, state, *x: (q.new_empty((*q.shape[:-1], v.shape[-1])), *empty(state)),
)  # fmt: skip


def forms(
    query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, keep: bool, trained: bool, begins: Tensor | None = None
) -> Forms:
    """The kernels with one projection; ``begins``: of packed sequences, causal."""
    rows = query_rows, key_rows, bias, begins
    return Forms(
        lambda q, k, v, mask, first: feature_scan(q, k, v, mask, first, *rows, keep, trained)[:2],
        lambda k, v, mask: feature_sums(k, v, mask, key_rows, bias, trained),
        lambda q, sums: feature_read(q, sums, query_rows, bias, keep, trained)[0],
        lambda q, k, v, mask, state: feature_step(q, k, v, mask, state, query_rows, key_rows, bias),
    )
