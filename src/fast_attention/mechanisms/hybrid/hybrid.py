"""Hybrid attention: exact softmax over near keys, a linear estimate of the far remainder, one normaliser.

The window with a linear remainder is that of LoLCATs (Zhang et al. 2024, arXiv 2410.10254); first tokens kept exact are
the attention sinks of StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

Where near keys are those of chosen blocks, the others enter as the sums of whole blocks, as in SLA (Zhang et al. 2025,
arXiv 2509.24006) and SPLA (arXiv 2601.22379), which subtracts the chosen blocks from the sums of all. Here the sums of
the others are added up, by a matrix of zeros and ones between blocks of queries and of keys: subtracting leaves only
rounding where the chosen blocks hold nearly all of the weight, and the far part may then even be negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.biases import sinks as learned_sinks
from fast_attention.biases.bias import Bias, TransformerXL
from fast_attention.engine import trace
from fast_attention.engine.blocks import count, join, split, split_mask, split_row
from fast_attention.engine.kv_cache import KVCache, append, last
from fast_attention.engine.offsets import Positions
from fast_attention.engine.precision import in_float32, widen
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import replaced, symbolic, traced
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.hybrid import compiled, gpu, reference
from fast_attention.mechanisms.hybrid.reference import FarSums, SinkTokens, attend_near, block_sums
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.favor_plus import FavorPlus
from fast_attention.mechanisms.linear.kernelised import Kernelised, per_token
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.reference import masked_keys
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.gathered import take
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.mechanisms.sparse.selected import Selected, of_blocks
from fast_attention.traits import NEAR_FAR
from fast_attention.value import at_least


class HybridState(NamedTuple):
    """State of decoding: the sums of far keys, the keys of the window, the first keys (at positions below 0)."""

    far: LinearState
    near: KVCache
    sinks: SinkTokens


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, w: Any, learned_sinks: Tensor | None, near: Selected, far: Kernelised[Any],
    sinks: SinkTokens, others: Tensor, *, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Outputs over the blocks that each block of queries chose, the sink tokens, and the sums of all other blocks.

    The exponentials of ``learned_sinks`` (H,) add to normalisers.
    """
    size, (phi_q, phi_k) = near.block_size, per_token(far.maps(w))
    table = of_blocks(q, k, key_mask, size=size, topk=near.topk)
    sinks = SinkTokens(sinks.k[..., None, :, :], sinks.v[..., None, :, :], sinks.position[..., None, :])
    queries, keys = phi_q(q), masked_keys(phi_k, k, others)
    row = None if queries.log_scale is None else split_row(queries.log_scale, size)
    of_queries = Features(split(queries.values, size), row)
    sums = block_sums(keys, v, start=0, block=size, number=count(k.shape[-2], size))
    sums = _sums_of_others(sums, table)
    chosen, visible = table.clamp(min=0), split_mask(others, size)
    visible = visible.expand(*k.shape[:-2], *visible.shape[-2:])[..., None]
    visible = ((table >= 0)[..., None] & take(visible, chosen)[..., 0]).flatten(-2)
    near_k, near_v = (take(split(x, size), chosen).flatten(-3, -2) for x in (k, v))
    learned = None if learned_sinks is None else learned_sinks[:, None]
    tokens, unknown = (split(q, size), near_k, near_v, ~visible[..., None, :]), ~sinks.present[..., None, :]
    out = attend_near(*tokens, sinks, unknown, of_queries, sums, None, learned)
    return join(out, q.shape[-2])


def _sums_of_others(blocks: FarSums, table: Tensor) -> FarSums:
    """For every block of queries the sums of all blocks of keys that ``table`` (..., blocks, choices) does not name."""
    number = blocks.log_scale.shape[-1]
    numbers = torch.arange(number, device=table.device)
    named = (table[..., None] == numbers).any(-2)
    scales = blocks.log_scale[..., None, :].masked_fill(named, float("-inf"))
    largest = scales.detach().amax(-1).clamp(min=FLOOR)
    weights = (scales - largest[..., None]).exp()
    return FarSums((weights @ blocks.sums.flatten(-2)).unflatten(-1, blocks.sums.shape[-2:]), largest)


class HybridWeights(NamedTuple):
    """The weights of the far part, and those of the near part's bias and sinks."""

    far: Any
    near: Any


@dataclass(frozen=True, repr=False)
class Hybrid(Attention[Any, HybridState]):
    """Exact weights for near keys and for the first and last ones, estimated weights for all others, one normaliser.

    ``out_i = sum_j a_ij v_j / sum_j a_ij`` with ``a_ij = exp(q_i . k_j / sqrt(d))`` where query i sees key j through
    ``near`` or key j is one of the first and last keys (sink tokens), and ``a_ij = phi_q(q_i) . phi_k(k_j)`` with the
    feature maps of ``far`` for the others that query i may see. A ``far`` that estimates or learns softmax has weights
    of the size of the exact ones; the kernels of ``LinearAttention``, such as elu + 1, have a size of their own. A
    window over everything is softmax.

    Args:
        near: The neighbouring blocks. ``Selected`` takes the blocks that matter most, and is not causal here. Its
            ``scale`` serves both parts; its ``bias`` acts on near keys that are no sink tokens.
        far: The linear attention whose maps estimate the rest; its ``eps`` is not used. Its weights are those of this
            mechanism.
        first: Visible keys at the beginning that every query weighs exactly.
        last: Visible keys at the end that every query weighs exactly; none where causal.
    """

    near: BlockLocal | Selected = BlockLocal()  # noqa: RUF009
    far: Kernelised[Any] = FavorPlus()  # noqa: RUF009
    first: int = 1
    last: int = 1

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """The far part decides whether weights are trained or drawn; chosen blocks are not causal."""
        return self._traits

    _traits = Traits(paper="", formula="", cost="", complexity_exponent=1.0)  # of each value, set when it is made

    def __post_init__(self) -> None:
        """Check the settings."""
        message = f"Hybrid(near={self.near!r}, far={self.far!r})"
        if isinstance(self.near, Local):
            size = max(*self.near.sides, 1)
            raise ValueError(
                f"{message}: a sliding window beside a far part is gone. What would work: "
                f"near=BlockLocal(block_size={size}), which sees every key that this window sees, and more"
            )
        if not isinstance(self.near, BlockLocal | Selected):
            raise ValueError(f"{message}: near must be BlockLocal() or Selected()")
        if isinstance(self.bias, TransformerXL):
            raise ValueError(f"{message}: near takes ALiBi() or T5Buckets(), as far keys meet no vectors of positions")
        if not isinstance(self.far, Kernelised):
            raise ValueError(f"{message}: far must be linear: LinearAttention, FavorPlus or LearnedFeatures")
        if self.far.signed:
            raise ValueError(
                f"{message}: far may give negative weights, and their sum with the exact ones could be zero: take "
                "FavorPlus() or a feature map that is never negative"
            )
        at_least(self, "first", self.first, 0)
        at_least(self, "last", self.last, 0)
        object.__setattr__(self, "_traits", _declared(self.near, self.far.traits))

    @property
    def needs_weights(self) -> bool:
        """Whether ``far``, or the bias or the sinks of ``near`` need weights."""
        return self.far.needs_weights or self.near.needs_weights

    def weights(self, shape: Shape) -> Any:
        """The weights of ``far``; with a learned bias or sinks those of both parts."""
        far = self.far.weights(shape)
        return HybridWeights(far, self.near.weights(shape)) if self.near.needs_weights else far

    def heads_of(self, w: Any) -> int | None:
        """The heads that a learned bias or sinks, or else ``far``, have weights for."""
        return self.near.heads_of(w.near) if self.near.needs_weights else self.far.heads_of(w)

    @property
    def takes_sinks(self) -> bool:
        """Whether another module may hold the sinks' scores, as ``near`` has none of its own."""
        return self.near.takes_sinks

    def with_sinks(self, sinks: Tensor, w: Any) -> tuple[Any, Any]:
        """The sinks are those of ``near``."""
        far, near = w if self.near.needs_weights else (w, ())
        mechanism, near = self.near.with_sinks(sinks, near)
        changed: Any = self
        return replace(changed, near=mechanism), HybridWeights(far, near)

    def parts(self, w: Any, q: Tensor) -> tuple[Any, Positions | None, Tensor | None]:
        """The weights of ``far``, the bias of ``near`` and its sinks' scores."""
        far, near = w if self.near.needs_weights else (w, ())
        bias = None if self.bias is None else self.window.positions(q, near, self.near.scale)[1]
        return far, bias, self.near.sinks_of(near)

    def calibrated(self, q: Tensor, k: Tensor, w: Any, *, key_mask: Tensor | None = None) -> Any:
        """The weights of ``far`` suited to these queries and keys."""
        far = self.far.calibrated(self.scaled(q), k, self.parts(w, q)[0], key_mask=key_mask)
        return w._replace(far=far) if self.near.needs_weights else far

    def scaled(self, q: Tensor) -> Tensor:
        """Queries whose products, over the root of the width, are those of the near part."""
        return q if self.near.scale is None else q * (self.near.scale * math.sqrt(q.shape[-1]))

    @property
    def window(self) -> BlockLocal:
        """``near`` where it goes by positions; where it is chosen, nothing asks."""
        assert not isinstance(self.near, Selected)
        return self.near

    @property
    def bias(self) -> Bias | None:
        """Numbers that scores of near keys gain by their distance."""
        return None if isinstance(self.near, Selected) else self.near.bias

    def _from_core(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, key_mask: Tensor | None, *, is_causal: bool
    ) -> Tensor | str:
        """Outputs of the compiled core, or why it gives none."""
        if isinstance(self.near, Selected):
            return "chosen blocks"
        far, bias, learned = self.parts(w, q)
        maps = None if traced() else self.far.core_map(far)
        if (why := compiled.unsupported_reason(q, k, v, maps)) or maps is None:
            return why
        visible = append(None, k, v, key_mask).visible
        sinks, others = SinkTokens.positions(visible, first=self.first, last=0 if is_causal else self.last)
        q = q if self.near.scale is None else self.scaled(widen(q))
        places: Any = {"is_causal": is_causal, "bias": bias, "learned": learned}
        return compiled.attend(q, k, v, key_mask, others, sinks, self.near, maps, **places).to(v.dtype)

    def _attend_reference(
        self, q: Tensor, near: KVCache, sinks: SinkTokens, w: Any, *, start: int, is_causal: bool,
        far: LinearState | None = None, near_part: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The reference, of queries from position ``start`` on."""
        q, (far_w, bias, learned) = self.scaled(q), self.parts(w, q)
        maps, places = per_token(self.far.maps(far_w)), {"start": start, "is_causal": is_causal}
        return reference.attend(
            q, *near, sinks, self.window, maps, **places, earlier=far, bias=bias, learned_sinks=learned,
            near_part=near_part,
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Near and far keys under one normaliser, or exact attention where the near part covers everything."""
        sizes = q.shape[-2], k.shape[-2]
        if not symbolic() and self.bias is None and self.near.covers(*sizes, is_causal=is_causal):
            if trace.asked():
                trace.record("exact attention", f"{self.near!r} covers everything")
            near: Any = w.near if self.near.needs_weights else ()
            visible: Any = {"is_causal": is_causal, "key_mask": key_mask}
            return softmax_attention(q, k, v, **visible, scale=self.near.scale, sinks=self.near.sinks_of(near))
        near_part = gpu.near_part(self.near, q, k, v, key_mask, is_causal=is_causal)
        if near_part is not None:
            return self._plain(q, k, v, w, is_causal=is_causal, key_mask=key_mask, near_part=near_part)
        out = self._from_core(q, k, v, w, key_mask, is_causal=is_causal)
        if isinstance(out, Tensor):
            return out
        if isinstance(self.near, Selected):
            trace.record("chosen blocks exact, the others as sums of features", f"{self.near!r} leaves blocks out")
        else:
            trace.record("near keys exact, far ones as sums of features", f"{self.near!r} leaves keys out; {out}")
        return self._plain(q, k, v, w, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def _plain(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None,
        near_part: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """By the reference."""
        visible = append(None, k, v, key_mask).visible
        sinks, others = SinkTokens.of(k, v, visible, first=self.first, last=0 if is_causal else self.last)
        if isinstance(self.near, Selected):
            (far_w, _, learned), parts = self.parts(w, q), (self.near, self.far, sinks, others)
            return attend_chosen(self.scaled(q), k, v, far_w, learned, *parts, key_mask=key_mask)
        return self._attend_reference(
            q, KVCache(k, v, others), sinks, w, start=k.shape[-2] - q.shape[-2], is_causal=is_causal,
            near_part=near_part,
        )  # fmt: skip

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: HybridState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, HybridState]:
        """Attend to sink tokens, sums of far keys, near and new tokens; keys that leave ``near`` join the sums."""
        prompt = state is None and q.shape[-2] > 1
        out = self._from_core(q, k, v, w, key_mask, is_causal=True) if prompt else None
        return self._advance(q, k, v, w, state, out if isinstance(out, Tensor) else None, key_mask=key_mask)

    @in_float32
    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: HybridState | None, out: Tensor | None, *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, HybridState]:  # fmt: skip
        phi = per_token(self.far.maps(self.parts(w, q)[0]))[1]
        before = 0 if state is None else state.sinks.present.sum(-1, keepdim=True)
        visible = append(None, k, v, key_mask).visible
        sinks, others = SinkTokens.of(k, v, visible, first=self.first, last=0, before=before)
        far = linear_state.empty(phi(k[..., :1, :]), v) if state is None else state.far
        near = append(None if state is None else state.near, k, v, others)
        start, keys = near.k.shape[-2] - k.shape[-2], near.k.shape[-2]
        sinks = replaced(sinks, position=sinks.position + start)
        if state is not None:
            sinks = state.sinks.append(sinks, self.first)
        if out is None:
            out = self._attend_reference(q, near, sinks, w, start=start, is_causal=True, far=far)
        if leaving := self.window.leaving(keys):
            features = masked_keys(phi, near.k[..., :leaving, :], near.visible[..., :leaving])
            far = linear_state.combine(far, linear_state.summarise(features, near.v[..., :leaving, :]))
        sinks = replaced(sinks, position=sinks.position.masked_fill(sinks.present, -1))
        return out, HybridState(far, last(near, keys - leaving), sinks)


def _declared(near: BlockLocal | Selected, far: Traits) -> Traits:
    """The far part decides what is approximated, and whether weights are trained or drawn; a bias or sinks are learned.

    Blocks of queries choose by their means, which hold what comes after the first of them: not causal.
    """
    bias = None if isinstance(near, Selected) else near.bias
    traits = Traits(
        paper="Zhang et al. 2024, arXiv 2410.10254 (window, linear remainder); Xiao et al. 2023, arXiv 2309.17453",
        formula="softmax over near, first and last keys, phi(q_i) . phi(k_j) for the others, one normaliser",
        cost="n (w + m) d",
        complexity_exponent=1.0,
        gpu=NEAR_FAR,
        causal=True,
        padding=True,
        cross=True,
        rotary=far.rotary,
        memory="window",
        positions="absolute",
        random=far.random,
        learned=far.learned or (bias is not None and bias.learned),
        approximates=far.approximates if bias is None else None,
    )
    if isinstance(near, Selected):
        traits = replace(
            traits,
            paper="Zhang et al. 2025, arXiv 2509.24006 (chosen blocks, linear remainder); SPLA, arXiv 2601.22379",
            formula=traits.formula.replace("near", "chosen blocks"),
            cost="n (b c + m) d + (n / b)^2 m d",
            complexity_exponent=2.0,
            causal=False,
            cross=False,
            memory=None,
        )
    return learned_sinks.learned(traits) if near.sinks else traits
