"""cosFormer (Qin et al. 2022): linear attention whose weights fall with the distance like a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Features
from fast_attention.left_padding import keys_to_front
from fast_attention.mechanism import Attention, Shape
from fast_attention.mechanisms.linear import linear_state, reference, sums
from fast_attention.mechanisms.linear.kernelised import TRAITS
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.value import at_least


class Positions(NamedTuple):
    """Where tokens can stand: M positions, for which a quarter of a turn has room."""

    positions: Int[Tensor, " max_len"]

    @property
    def number(self) -> int:
        """M."""
        return int(self.positions.shape[0])  # a tensor within torch.jit.trace

    def reweighted(self, x: Tensor, start: int | Tensor = 0) -> Float[Tensor, "*batch n features"]:
        """``[relu(x_i) cos(a i), relu(x_i) sin(a i)]``, ``a = pi / 2M``, of tokens at i = ``start`` and on."""
        angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device) + start
        angles = angles[:, None] * (math.pi / 2 / self.number)
        x = x.relu()
        return torch.cat([x * angles.cos(), x * angles.sin()], -1)


class CosFormerState(NamedTuple):
    """Sums over turned keys, of which the first stands at position 0; the true ones are ``exp(log_scale)`` times them.

    ``angle`` is that of the next token; its position and M are not known apart where states combine.
    """

    kv: Float[Tensor, "*batch features values"]
    k: Float[Tensor, "*batch features"]
    log_scale: Float[Tensor, "*batch 1"]
    angle: Float[Tensor, "*batch 1"]

    @classmethod
    def after(cls, sums: LinearState, position: int | Tensor, w: Positions) -> CosFormerState:
        """The state before the token at ``position``."""
        return cls(*sums, torch.zeros_like(sums.log_scale) + position * (math.pi / 2 / w.number))

    def position(self, w: Positions) -> int | Tensor:
        """Position of the next token; a tensor where numbers are unknown."""
        angle = self.angle.detach().flatten()[0]
        if symbolic():
            return (angle * (2 / math.pi * w.number)).round()
        return round(float(angle) * 2 / math.pi * w.number)

    def rotated(self, angle: Tensor) -> LinearState:
        """The sums as they are where all keys are turned further by ``angle``."""
        cos, sin = angle.cos(), angle.sin()
        kv_cos, kv_sin = self.kv.chunk(2, -2)
        k_cos, k_sin = self.k.chunk(2, -1)
        k = torch.cat([k_cos * cos - k_sin * sin, k_sin * cos + k_cos * sin], -1)
        cos, sin = cos[..., None], sin[..., None]
        kv = torch.cat([kv_cos * cos - kv_sin * sin, kv_sin * cos + kv_cos * sin], -2)
        return LinearState(kv, k, self.log_scale)


@dataclass(frozen=True, repr=False)
class CosFormer(Attention[Positions, CosFormerState]):
    """Linear attention of ReLU features with weights that fall from 1 to 0 over a distance of M = ``max_len`` tokens.

    ``cos(a - b) = cos a cos b + sin a sin b`` makes it linear attention of twice as many features. The paper takes the
    length of the longest sequence at hand for M; here it is the ``max_len`` of the weights, so that neither tokens to
    come nor padding change it. Longer sequences are refused: their weights would be negative. Causal calls with fewer
    queries than keys take the queries for the last of the sequence; other cross attention starts both at position 0.

    Args:
        eps: Added to the denominators, at least 0. A query without a feature above zero gets zeros.
    """

    eps: float = 1e-6

    traits = replace(
        TRAITS,
        paper="Qin et al. 2022, arXiv 2202.08791",
        formula="linear attention, relu(q_i) . relu(k_j) cos(pi (i - j) / 2M)",
        cost="n d^2",
        needs_max_len=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "eps", self.eps, 0.0)

    def weights(self, shape: Shape) -> Positions:
        """``max_len`` positions."""
        return Positions(torch.arange(shape.max_len))

    def heads_of(self, w: Positions) -> None:
        """None: all heads have the same positions."""

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Positions, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Linear attention of turned queries and keys."""
        self.within(q.shape[-2], w.number)
        self.within(k.shape[-2], w.number)
        if key_mask is not None and not is_causal and q.shape[-2] != k.shape[-2]:  # both begin at position 0
            k, v, key_mask = keys_to_front(k, v, key_mask)
        start = int(k.shape[-2] - q.shape[-2]) if is_causal else 0  # a tensor in torch.jit.trace
        q, k = w.reweighted(q, start), w.reweighted(k)
        return sums.of_map(sums.PLAIN, q, k, v, key_mask, eps=self.eps, is_causal=is_causal)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Positions, state: CosFormerState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, CosFormerState]:
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        start = 0 if state is None else state.position(w)
        end = start + k.shape[-2]
        if isinstance(start, Tensor):
            refusal = f"{self!r} was built for at most max_len={w.number} tokens"
            torch.ops.aten._assert_async.msg(end <= w.number, refusal)
        else:
            self.within(start + k.shape[-2], w.number)
        q, k = w.reweighted(q, start), w.reweighted(k, start)
        out, after = sums.advance_map(sums.PLAIN, q, k, v, key_mask, state, eps=self.eps)
        return out, CosFormerState.after(after, end, w)

    @in_float32
    def summarise_keys(self, k: Tensor, v: Tensor, w: Positions, *, key_mask: Tensor | None = None) -> CosFormerState:
        """The sums over some tokens, of which the first stands at position 0."""
        self.within(k.shape[-2], w.number)
        keys = reference.masked_keys(lambda x: Features(w.reweighted(x)), k, key_mask)
        return CosFormerState.after(reference.summarised(keys, v), k.shape[-2], w)

    def merge_states(self, earlier: CosFormerState, later: CosFormerState) -> CosFormerState:
        """The sums over two neighbouring chunks: the later one's stand behind the earlier one's."""
        total = linear_state.combine(LinearState(*earlier[:3]), later.rotated(earlier.angle))
        return CosFormerState(*total, earlier.angle + later.angle)

    def read_summary(
        self, q: Tensor, k: Tensor, v: Tensor, w: Positions, state: CosFormerState, *, key_mask: Tensor | None
    ) -> Tensor:
        """Outputs of queries that stand at position 0 and on, as in a noncausal call."""
        return super().read_summary(q, k, v, w, state._replace(angle=torch.zeros_like(state.angle)), key_mask=key_mask)
