"""``ChunkedFeedForward``: the position-wise layer, in chunks to save memory (Kitaev et al. 2020, section 3)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from fast_attention import checks
from fast_attention.engine import blocks
from fast_attention.engine.tracing import exporting, symbolic, unrepeatable
from fast_attention.nn.reversible import named_tensors, unchanged
from fast_attention.value import at_least


class ChunkedFeedForward(nn.Module):
    """``W2 dropout(activation(W1 x + b1)) + b2`` for each token by itself, in ``chunks`` chunks of the sequence.

    Only one chunk of the widened tokens is held at a time: memory for them falls to 1 / ``chunks``, in training too,
    where each chunk is computed again in the backward pass (arXiv 2001.04451). The outputs are the same. Under
    ``torch.func``, forward-mode derivatives and ``parametrize.cached()`` all are held.

    Args:
        embed_dim: Width E of the tokens.
        hidden_dim: Width in between; None means ``4 * embed_dim``.
        chunks: Number of chunks; it need not divide the length.
        activation: Applied to the widened tokens, entry by entry.
        dropout: Probability of dropping a widened entry while training.
        bias: Whether both maps have biases.
        device: Where the parameters are made.
        dtype: Type of the parameters.

    Raises:
        Unsupported: In a training pass in chunks: the layer changes its buffers, as ``spectral_norm`` does.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        *,
        chunks: int = 1,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        for setting, size in (("embed_dim", embed_dim), ("hidden_dim", hidden_dim), ("chunks", chunks)):
            at_least(self, setting, size, 1)
        checks.probability(dropout)
        if not callable(activation):
            raise TypeError(
                f"activation is a function of a tensor, such as torch.nn.functional.relu; got {activation!r}"
            )
        self.widen = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.narrow = nn.Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.activation, self.dropout, self.chunks = activation, dropout, chunks

    def forward(self, x: Float[Tensor, "*batch length embed"]) -> Float[Tensor, "*batch length embed"]:
        """Tokens (..., L, E) to tokens (..., L, E)."""
        checks.tokens(x, self.widen.in_features)
        if self.chunks == 1:
            return self._chunk(x)
        # Chunk i holds tokens i, i + chunks, ...: each is computed alone, and these shapes export at any length.
        parts = blocks.split(x, self.chunks).unbind(-2)
        if torch.is_grad_enabled() and not exporting() and not unrepeatable():
            random = self.training and self.dropout > 0.0
            chunk = self._chunk if symbolic() else functools.partial(self._chunk_of, list(named_tensors(self)))
            recomputed = functools.partial(checkpoint, chunk, use_reentrant=False, preserve_rng_state=random)
            with nullcontext() if symbolic() else unchanged(self):
                out = [recomputed(part) for part in parts]
        else:
            out = [self._chunk(part) for part in parts]
        return blocks.join(torch.stack(out, -2), x.shape[-2])

    def _chunk(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.activation(self.widen(x)), self.dropout, self.training)
        return self.narrow(hidden)

    def _chunk_of(self, weights: list[tuple[str, Tensor]], x: Tensor) -> Tensor:
        """A chunk with the weights that the forward pass had: ``functional_call`` has put back the module's own."""
        present = named_tensors(self)
        if all(current is before for (_, current), (_, before) in zip(present, weights, strict=True)):
            return self._chunk(x)
        with _reparametrize_module(self, dict(weights)):
            return self._chunk(x)

    def extra_repr(self) -> str:
        """Settings that the parameters do not show."""
        return f"chunks={self.chunks}, dropout={self.dropout}"
