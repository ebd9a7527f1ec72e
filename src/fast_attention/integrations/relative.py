"""Position scores of a model's layers as the ``bias`` of mechanisms, with the model's weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.biases.bias import (
    ALiBi,
    Bias,
    BiasMixin,
    BucketWeights,
    RelativeWeights,
    T5Buckets,
    TransformerXL,
    alibi_slopes,
)
from fast_attention.integrations.modules import original_class
from fast_attention.mechanism import Mechanism, Shape
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.nn.bound import Bound
from fast_attention.refusals import loaded

T5_LIKE = ("T5Attention", "MT5Attention", "UMT5Attention", "SwitchTransformersAttention", "Pop2PianoAttention")
TABLE = "relative_attention_bias"  # what it is called in those that have one
CONFORMERS = {  # kinds of attention modules, and their u, their v and the map of their sinusoids
    "Wav2Vec2ConformerSelfAttention": ("pos_bias_u", "pos_bias_v", "linear_pos"),
    "Wav2Vec2BertSelfAttention": ("pos_bias_u", "pos_bias_v", "linear_pos"),
    "ParakeetEncoderAttention": ("bias_u", "bias_v", "relative_k_proj"),
}
DROPPED = "dropout_positions"  # of a config: how many of the sinusoids' numbers are dropped in training
NOTHING = torch.zeros(())  # in place of a position bias that need not be computed


@dataclass(frozen=True)
class Positions:
    """Position scores of one layer.

    Args:
        bias: As a setting of mechanisms; None: nothing, as in T5's cross attention.
        whose: The model's weights, in words, for the report.
        holder: The module that has them.
        read: From it, the weights as the bias takes them.
        by_token: Positions are counted over the tokens that are there, not over all of the row.
    """

    bias: Bias | None
    whose: str = ""
    holder: nn.Module | None = None
    read: Callable[[Any], Any] = tuple
    by_token: bool = False

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        """T5's own bias of all pairs of queries (B, H, L, E), the last of the keys (B, H, S, E)."""
        kind: Any = original_class(type(self.holder))  # type: ignore[arg-type]
        queries, keys = q.shape[-2], k.shape[-2]
        return kind.compute_bias(self.holder, queries, keys, device=q.device, past_seen_tokens=keys - queries)


class Tied(Bound):
    """A mechanism whose bias has the model's weights, which are read at every call; others are its own.

    Args:
        mechanism: With the bias in it.
        shape: Its heads.
        positions: Of the layer.
    """

    def __init__(self, mechanism: Mechanism[Any, Any], shape: Shape, positions: Positions) -> None:
        super().__init__(mechanism, shape)
        self.positions = positions
        assert positions.bias is not None
        self._kind = type(positions.bias.weights(shape))
        for name in [*self._parameters]:
            if name.rpartition("_")[2] in self._kind._fields:
                del self._parameters[name]

    def _assemble(self, names: Any) -> Any:
        return self.positions.read(self.positions.holder) if type(names) is self._kind else super()._assemble(names)


def of(model: nn.Module, name: str) -> Positions | None:
    """Position scores of the attention module of that name; None where that is not known here."""
    module: Any = model.get_submodule(name)
    if type(module).__name__ in T5_LIKE:
        first = re.sub(r"\bblock\.\d+\.", "block.0.", name)  # whose table all layers share
        first = name if TABLE in module._modules else first
        return _buckets(model.get_submodule(first), first)
    parts = CONFORMERS.get(type(module).__name__, ())
    is_plain = getattr(module, "num_key_value_groups", 1) == 1  # as many heads of keys, and distances read as they are
    if parts and is_plain and getattr(module, parts[0], None) is not None and not getattr(module.config, DROPPED, 0.0):
        width = getattr(module, parts[-1]).in_features
        return Positions(TransformerXL(width), f"its {', '.join(parts)}", module, _distances)
    if (read := getattr(module, "slopes", None)) is not None:
        slopes = tuple(read(torch.device("cpu")).tolist())
        paper = alibi_slopes(len(slopes))
        is_paper = max(abs(a - b) for a, b in zip(slopes, paper, strict=True)) < 1e-7
        return Positions(ALiBi() if is_paper else ALiBi(slopes), "its slopes", by_token=module.by_token)
    return None


def _buckets(holder: Any, name: str) -> Positions:
    if TABLE not in holder._modules:
        return Positions(None)
    bias = T5Buckets(
        holder.relative_attention_num_buckets, holder.relative_attention_max_distance,
        bidirectional=not holder.is_decoder,
    )  # fmt: skip
    whose = "its" if type(holder).__name__ == "UMT5Attention" else name  # which shares none among layers
    return Positions(bias, f"{whose} {TABLE}", holder, _table)


def _table(holder: Any) -> BucketWeights:
    return BucketWeights(holder.relative_attention_bias.weight.T)


def _distances(holder: Any) -> RelativeWeights:
    """The weights of a Conformer's layer. Its sines and cosines alternate; ours are sines, then cosines."""
    u, v, project = (getattr(holder, part) for part in CONFORMERS[type(holder).__name__])
    by_head = project.weight.unflatten(0, (len(u), -1)).unflatten(-1, (-1, 2))
    return RelativeWeights(u, v, by_head.permute(0, 3, 2, 1).flatten(1, 2))


def carries(mechanism: Any) -> bool:
    """Whether a mechanism has a bias."""
    if isinstance(mechanism, ByLength):
        return carries(mechanism.short) or carries(mechanism.long)
    return isinstance(mechanism, BiasMixin) and mechanism.bias is not None


def with_bias(mechanism: Any, bias: Bias | None) -> Any:
    """The mechanism with this bias, or without any; None where it takes none."""
    if isinstance(mechanism, ByLength):
        short, long = with_bias(mechanism.short, bias), with_bias(mechanism.long, bias)
        return None if short is None or long is None else replace(mechanism, short=short, long=long)
    changed: Any = mechanism  # a dataclass
    return replace(changed, bias=bias) if isinstance(mechanism, BiasMixin) else None


def unsupported_reason(mechanism: Any, extra: tuple[str, ...], positions: Positions | None) -> str:
    """The reason why a mechanism cannot serve a layer whose scores get these extra arguments; empty if it can."""
    added = [name for name in extra if name != "position_bias"]
    if positions is None:
        added = [*extra]
    elif positions.bias is not None:
        if carries(mechanism):
            return f"the layer has positions of its own in its scores, {positions.bias!r}: leave the bias out"
        added += [repr(positions.bias)] if with_bias(mechanism, positions.bias) is None else []
    if not added or (mechanism.traits.mask and {*extra} <= {"position_bias"}):
        return ""
    takers = ", ".join(f"{kind.__name__}()" for kind in loaded(BiasMixin))
    if unknown := [name for name in extra if name != "position_bias"]:
        return f"the layer changes its scores by {', '.join(unknown)}, which no mechanism does: it keeps its attention"
    return (
        f"the layer adds {', '.join(added)} to its scores, which {mechanism!r} does not form (traits.mask). What would "
        f"work: {takers}"
    )


def notes(mechanism: Any, extra: tuple[str, ...], positions: Positions | None) -> list[str]:
    """Remarks on a layer for the report: whose the bias is, or that it is a mask of every pair."""
    if positions is not None and (positions.bias is None or carries(mechanism)):
        return [f"the bias is the model's own: {positions.whose}"] if positions.bias is not None else []
    is_masked = "position_bias" in extra or positions is not None
    return ["it takes the position_bias as a mask of every pair"] if is_masked else []


def serves(mechanism: Any, positions: Positions | None) -> bool:
    """Whether a mechanism in a layer makes what positions add, so that the model need not."""
    return positions is not None and (positions.bias is None or carries(mechanism))


def bound(mechanism: Any, shape: Shape, positions: Positions | None) -> Bound:
    """The mechanism for a layer, its bias tied to the model's weights where it has some."""
    if positions is not None and positions.holder is not None and carries(mechanism):
        return Tied(mechanism, shape, positions)
    return Bound(mechanism, shape)
