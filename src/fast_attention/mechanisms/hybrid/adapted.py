"""Attention adapted: low-rank deltas of queries, keys and values in front of any mechanism, trained where it runs.

A pretrained model's projections suit exact attention. What another mechanism would have them changed to is learnt in
weights of its own, so that the projections, and all that is computed by exact attention, stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fast_attention.engine import operation
from fast_attention.engine.heads import by_head
from fast_attention.mechanism import Attention, Mixer, Shape, Traits
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.traits import PARTS
from fast_attention.value import at_least

Adapts = Literal["qkv", "qk", "kv", "qv", "q", "k", "v"]


class Delta(NamedTuple):
    """The two factors of one delta; ``up`` begins at zero."""

    down: Float[Tensor, "heads width rank"]
    up: Float[Tensor, "heads rank width"]


class Deltas(NamedTuple):
    """Changes of queries, keys and values, None where they stay as they are, and the weights of the mechanism."""

    q: Delta | None
    k: Delta | None
    v: Delta | None
    inner: Any


@dataclass(frozen=True, repr=False)
class Adapted(Attention[Deltas, Any]):
    """A mechanism whose queries, keys and values get a trained low-rank delta, head by head: ``x + (x D) U``.

    The factors U begin at zero, so that nothing changes before training. Deltas of low rank are LoRA's (Hu et al. 2021,
    arXiv 2106.09685), here of each head's projected tokens: with a projection W they are ``W + W D U``, and belong to
    the mechanism. In ``ByLength`` they act only where the long form runs.

    Args:
        mechanism: Any attention.
        rank: The rank of each delta, from 1 to the heads' width.
        adapts: Which of q, k and v get one. Behind rotary positions only ``"v"``: queries and keys that were rotated
            may not be mapped, or their product depends on more than the distance.
    """

    mechanism: Attention[Any, Any] = Local()  # noqa: RUF009
    rank: int = 4
    adapts: Adapts = "qkv"

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: ``mechanism`` is no attention, or the others are out of range.
        """
        if not isinstance(self.mechanism, Attention):
            takes = "mixes whole tokens" if isinstance(self.mechanism, Mixer) else "is no attention"
            raise ValueError(
                f"Adapted(mechanism={self.mechanism!r}): {self.mechanism!r} {takes}; give one such as Local()"
            )
        at_least(self, "rank", self.rank, 1, nothing=self.mechanism)
        if not set(self.adapts) & set(inputs := self.mechanism.traits.inputs):
            raise ValueError(f"{self!r}: {self.mechanism!r} reads {inputs} only, so that nothing would be adapted")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of the mechanism, with weights to train; the output is no matrix times v where v is mapped."""
        inner = self.mechanism.traits
        return replace(
            inner,
            paper=f"{inner.paper}; Hu et al. 2021, arXiv 2106.09685",
            formula=f"{self.mechanism!r} of x + (x D) U for x in {self.adapts}, U begins at zero",
            cost=f"{inner.cost} + n d r",
            gpu=PARTS,
            mask=False,
            rotary=inner.rotary and self.adapts == "v",
            matrix=inner.matrix and "v" not in self.adapts,
            learned=True,
            approximates=None,
        )

    def weights(self, shape: Shape) -> Deltas:
        """Deltas that change nothing yet, and the mechanism's weights."""
        if self.rank > shape.head_dim:
            raise ValueError(f"{self!r}: a rank above the heads' width, {shape.head_dim}, adds nothing")
        deltas = {name: self._delta(shape) for name in self.adapts if name in self.mechanism.traits.inputs}
        return Deltas(deltas.get("q"), deltas.get("k"), deltas.get("v"), self.mechanism.weights(shape))

    def _delta(self, shape: Shape) -> Delta:
        down = torch.randn(shape.heads, shape.head_dim, self.rank) / math.sqrt(shape.head_dim)
        return Delta(nn.Parameter(down), nn.Parameter(torch.zeros(shape.heads, self.rank, shape.head_dim)))

    def heads_of(self, w: Deltas) -> int:
        """The heads of any of the deltas."""
        return next(len(delta.up) for delta in w[:3] if delta is not None)

    def redrawn(self, w: Deltas, shape: Shape) -> Deltas:
        """The mechanism's random tensors drawn again."""
        return w._replace(inner=self.mechanism.redrawn(w.inner, shape))

    def calibrated(self, q: Tensor, k: Tensor, w: Deltas, *, key_mask: Tensor | None = None) -> Deltas:
        """The mechanism's weights suited to the adapted queries and keys."""
        inner = self.mechanism.calibrated(_moved(q, w.q), _moved(k, w.k), w.inner, key_mask=key_mask)
        return w._replace(inner=inner)

    def adapted(self, q: Tensor, k: Tensor, v: Tensor, w: Deltas) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with their deltas, as the mechanism gets them."""
        return _moved(q, w.q), _moved(k, w.k), _moved(v, w.v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Deltas, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """The mechanism of the adapted tokens."""
        q, k, v = self.adapted(q, k, v, w)
        return self.mechanism.attend(q, k, v, w.inner, is_causal=is_causal, key_mask=key_mask)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Deltas, state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The mechanism's next step, of the adapted tokens."""
        q, k, v = self.adapted(q, k, v, w)
        return self.mechanism.advance(q, k, v, w.inner, state, key_mask=key_mask)

    def parts_by_states(self, is_causal: bool) -> bool:
        """Whether the mechanism combines states."""
        return self.mechanism.parts_by_states(is_causal)

    def summarise_keys(self, k: Tensor, v: Tensor, w: Deltas, *, key_mask: Tensor | None) -> Any:
        """The mechanism's state of the adapted tokens."""
        return self.mechanism.summarise_keys(_moved(k, w.k), _moved(v, w.v), w.inner, key_mask=key_mask)

    def merge_states(self, earlier: Any, later: Any) -> Any:
        """Combine two states by the mechanism."""
        return self.mechanism.merge_states(earlier, later)

    def read_summary(
        self, q: Tensor, k: Tensor, v: Tensor, w: Deltas, state: Any, *, key_mask: Tensor | None
    ) -> Tensor:
        """Read adapted queries from a state of adapted keys."""
        q, k, v = self.adapted(q, k, v, w)
        return self.mechanism.read_summary(q, k, v, w.inner, state, key_mask=key_mask)


def _moved(x: Tensor, delta: Delta | None) -> Tensor:
    """``x + (x D) U``; where nothing is rounded to fewer digits as ``x (I + D U)``, which reads the tokens once."""
    if delta is None:
        return x
    down, up = (each.to(x.dtype) for each in delta)
    if x.shape[-1] != down.shape[-2]:  # values may be of any width where nothing is added to them
        raise ValueError(
            f"the last size of v is {x.shape[-1]} and the deltas are for width {down.shape[-2]}: give values of the "
            "heads' width, or leave them as they are by adapts='qk'"
        )
    if operation.has_cpu_path(x) and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu"):
        return by_head(x, torch.baddbmm(torch.eye(down.shape[-2], dtype=x.dtype, device=x.device), down, up))
    return x + by_head(by_head(x, down), up).to(x.dtype)
