"""ABC, attention with bounded-memory control (Peng et al. 2022): tokens are written into a fixed number of slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.advancing import summed_in_chunks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.random_features import draw
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.landmarks import slots
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.value import at_least


class Control(NamedTuple):
    """The rows of every head by which a key says how much of its token is written into each slot; learned."""

    rows: Float[Tensor, "heads slots width"]


@dataclass(frozen=True, repr=False)
class ABC(Attention[Control, LinearState]):
    """Softmax attention to slots: ``softmax(q K~^T / sqrt(d)) V~`` with ``K~_s = sum_j phi_js k_j``, ``V~`` alike.

    ``phi_js = exp(w_s . k_j) / sum_j' exp(w_s . k_j')`` with w_s trained, the form that the paper calls ABC-MLP: there
    x_j, the token itself, stands for k_j. Causal, every query sees the slots as of its own position, with sums over
    the tokens up to there; the state is of constant size.

    Args:
        num_slots: Slots of a head, at least 1.
    """

    num_slots: int = 64

    traits = Traits(
        paper="Peng et al. 2022, arXiv 2110.02488",
        formula="softmax(q K~^T / sqrt(d)) V~, K~ = softmax(W k^T) k and V~ = softmax(W k^T) v with W learned",
        cost="n r d",
        order=1.0,
        causal=True,
        padding=True,
        cross=True,
        memory="constant",
        learned=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "num_slots", self.num_slots, 1)

    def weights(self, shape: Shape) -> Control:
        """Rows of length about 1, so that slots begin as different means."""
        return Control(nn.Parameter(draw(shape.heads, self.num_slots, shape.head_dim) * shape.head_dim**-0.5))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Control, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Read all slots at the end of the keys, or at each query's position, aligned to the bottom right."""
        if not is_causal:
            dispatch.record("sums over all tokens", "every query reads the same slots")
            return self.read_summary(q, k, v, w, self.summary(k, v, w, key_mask=key_mask), key_mask=key_mask)
        extra = k.shape[-2] - q.shape[-2]
        if extra == 0:
            return self.advance(q, k, v, w, None, key_mask=key_mask)[0]
        if extra < 0:  # the first queries see nothing
            out = self.attend(q[..., -extra:, :], k, v, w, is_causal=True, key_mask=key_mask)
            return F.pad(out, (0, 0, -extra, 0))
        masks = (None, None) if key_mask is None else (key_mask[..., :extra], key_mask[..., extra:])
        state = self.summary(k[..., :extra, :], v[..., :extra, :], w, key_mask=masks[0])
        return self.advance(q, k[..., extra:, :], v[..., extra:, :], w, state, key_mask=masks[1])[0]

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Control, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the new tokens, and what all tokens have written."""
        return slots.advance(q * q.shape[-1] ** -0.5, k, v, w.rows, key_mask, state)

    @summed_in_chunks
    @in_float32
    def summary(self, k: Tensor, v: Tensor, w: Control, *, key_mask: Tensor | None = None) -> LinearState:
        """What some tokens write into the slots."""
        return slots.summarise(k, v, w.rows, key_mask)

    def merged(self, earlier: LinearState, later: LinearState) -> LinearState:
        """What two neighbouring chunks write."""
        return linear_state.combine(earlier, later)

    @in_float32
    def read_summary(
        self, q: Tensor, k: Tensor, v: Tensor, w: Control, state: LinearState, *, key_mask: Tensor | None
    ) -> Tensor:
        """Outputs of queries that see all slots as they are."""
        return slots.read(q * q.shape[-1] ** -0.5, state)
