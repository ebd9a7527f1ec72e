"""Rotary positions, with the scalings of transformers; where learned positions begin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.packed import Packing
from fast_attention.parallel.shards import Shards, local
from fast_attention.value import Value, at_least

RopeType = Literal["default", "linear", "dynamic", "yarn"]


def _rates(base: float | Tensor, width: int, device: torch.device) -> Float[Tensor, "pairs"]:
    """The angle from one position to the next for each pair of channels, ((width + 1) // 2,), in float64."""
    fractions = torch.arange(0, width, 2, device=device, dtype=torch.float64) / width
    return torch.exp(-fractions * (base.log() if isinstance(base, Tensor) else math.log(base)))


@dataclass(frozen=True, repr=False)
class Rotary(Value):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 34): channel pairs rotated in proportion to the position.

    The settings are those of transformers' ``rope_parameters``, under the same names: ``Rotary(**rope_parameters)``.

    Args:
        rope_theta: The base: pair i of n rotates by ``rope_theta ** (-i / n)`` from one position to the next.
        rope_type: How sequences longer than in training are read. ``"default"``: as they are. ``"linear"``: all
            positions divided by ``factor`` (Chen et al. 2023, arXiv 2306.15595). ``"dynamic"``: NTK-aware, a base that
            grows with the sequence beyond ``original_max_position_embeddings``; earlier outputs then change with the
            length, and decoding ends there. ``"yarn"``: slow pairs divided, fast ones left (Peng et al. 2023, arXiv
            2309.00071).
        factor: How many times longer sequences may be.
        original_max_position_embeddings: The longest sequence of training, for ``"dynamic"`` and ``"yarn"``.
        beta_fast: Turns in the longest sequence of training from which on ``"yarn"`` leaves a pair as it is.
        beta_slow: Turns up to which ``"yarn"`` divides it.
        attention_factor: What ``"yarn"`` multiplies queries and keys by; None for ``0.1 log(factor) + 1``.
    """

    rope_theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        at_least(self, "rope_theta", self.rope_theta, 0.0)
        if self.rope_theta <= 1.0:
            raise ValueError(f"{self!r}: rope_theta must be above 1")
        at_least(self, "factor", self.factor, 1.0)
        at_least(self, "original_max_position_embeddings", self.original_max_position_embeddings, 0)
        at_least(self, "beta_slow", self.beta_slow, 0.0)
        at_least(self, "beta_fast", self.beta_fast, float(self.beta_slow))
        if self.attention_factor is not None and not self.attention_factor > 0.0:
            raise ValueError(f"{self!r}: attention_factor must be above 0, or None")
        if self.rope_type in ("dynamic", "yarn") and not self.original_max_position_embeddings:
            raise ValueError(f"{self!r} needs original_max_position_embeddings, the longest sequence of training")
        if self.rope_type == "default" and self.factor != 1.0:
            raise ValueError(f"{self!r}: factor needs a rope_type: 'linear', 'dynamic' or 'yarn'")

    def sin_cos(self, positions: Int[Tensor, "*batch length"], width: int) -> tuple[Tensor, Tensor]:
        """Sines and cosines at positions (L) or (..., L), for heads of ``width``: (..., 1, L, width / 2).

        Angles are computed in float64: float32 is too coarse for positions in the millions.
        """
        positions = positions.cpu() if positions.device.type == "mps" else positions  # which knows no float64
        rates, size = self._rates(positions, width)
        angles = positions[..., None, :, None] * rates
        return angles.sin() * size, angles.cos() * size

    def check_decoding(self, positions: Int[Tensor, "*batch tokens"]) -> None:
        """Raise ``Unsupported`` where new tokens would change the rotation of the keys before them."""
        trained = self.original_max_position_embeddings
        if self.rope_type == "dynamic" and positions.numel() and int(positions.max()) >= trained:
            raise Unsupported(
                f"{self!r} cannot decode token {int(positions.max()) + 1}: beyond {trained} every new token "
                "changes the rotation of all keys. What would work: rope_type 'yarn' or 'linear', or one pass over all"
            )

    def _rates(self, positions: Tensor, width: int) -> tuple[Tensor, float]:
        rates, trained = _rates(self.rope_theta, width, positions.device), self.original_max_position_embeddings
        if self.rope_type == "linear":
            return rates / self.factor, 1.0
        if self.rope_type == "dynamic" and positions.numel():
            excess = ((positions.max() + 1) / trained).double().clamp(min=1.0)
            base = self.rope_theta * (self.factor * excess - self.factor + 1) ** (width / max(width - 2, 1))
            return _rates(base, width, positions.device), 1.0
        if self.rope_type != "yarn":
            return rates, 1.0
        low, high = (self._pair_of(turns, width) for turns in (self.beta_fast, self.beta_slow))
        first, last = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        pairs = torch.arange(width // 2, device=positions.device, dtype=torch.float64)
        slow = ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        size = 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor
        return rates * (1 - slow) + rates / self.factor * slow, size

    def _pair_of(self, turns: float, width: int) -> float:
        """The pair that makes ``turns`` turns in the longest sequence of training (arXiv 2309.00071, Eq. 17 on)."""
        ratio = self.original_max_position_embeddings / (2 * math.pi * max(turns, 1e-9))
        return width * math.log(ratio) / (2 * math.log(self.rope_theta))


def rotate_by(
    x: Float[Tensor, "*batch length width"], sin_cos: tuple[Tensor, Tensor]
) -> Float[Tensor, "*batch length width"]:
    """Queries or keys with channels i and i + width / 2 rotated by the angles of these sines and cosines."""
    sine, cosine = (wave.to(x) for wave in sin_cos)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def rotary_for(mechanism: Mechanism[Any, Any], rotary: bool | Rotary, width: int) -> Rotary | None:
    """The rotary positions of a module's heads of ``width``.

    Raises:
        Unsupported: ``traits.rotary`` denies them.
        ValueError: The width is odd.
    """
    if not isinstance(rotary, bool | Rotary):
        raise ValueError(f"rotary is True, False or a Rotary(...); got {rotary!r}")
    if rotary is False:
        return None
    if not mechanism.traits.rotary:
        raise mechanism.refuse("rotary positions", "rotary")
    if width % 2:
        raise ValueError(f"rotary positions rotate pairs of channels; the heads' width {width} is odd")
    return Rotary() if rotary is True else rotary


def check_positions(
    positions: Tensor, name: str, batch_shape: tuple[int, ...], length: int
) -> Int[Tensor, "*batch length"]:
    """A caller's positions (L) or (..., L), as they are.

    Raises:
        TypeError: They are no tensor.
        ValueError: They are no whole numbers, or of another shape.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of whole numbers; got {type(positions).__name__}")
    shape = tuple(positions.shape)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers, the position of each token; got {positions.dtype}")
    if shape != (length,) and shape != (*batch_shape, length):
        raise ValueError(
            f"{name} has shape {shape}; it must be {(*batch_shape, length)} or {(length,)}: a position for each token"
        )
    return positions


def rotate_both(
    rotary: Rotary | None, q: Tensor, k: Tensor, at: Tensor | None, keys_at: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries (N, H, L, E) and keys (N, H, S, E) rotated by their positions, where a module has rotary positions.

    Queries are ``at`` (L) or (N, L), or else at S - L, S - L + 1, ...; keys at (S) or (N, S), or else at 0, 1, ..., or
    where the queries are if L = S.

    Raises:
        ValueError: Positions are given and not used, of one side alone where L != S, or of another shape.
    """
    batch, length, keys = q.shape[0], q.shape[-2], k.shape[-2]
    if rotary is None:
        if at is not None or keys_at is not None:
            raise ValueError("positions are given and this module has no use for them: build it with rotary=True")
        return q, k
    if length != keys and (at is None) != (keys_at is None):
        raise ValueError(f"give both: positions of the {length} queries and key_positions of the {keys} keys")
    if at is None and keys_at is None:
        at = torch.arange(keys - length, keys, device=q.device)
        keys_at = at if length == keys else torch.arange(keys, device=q.device)
    at, keys_at = keys_at if at is None else at, at if keys_at is None else keys_at
    assert at is not None
    assert keys_at is not None
    check_positions(at, "positions", (batch,), length)
    check_positions(keys_at, "key_positions", (batch,), keys)
    if at is keys_at:
        sin_cos = rotary.sin_cos(at, q.shape[-1])
        return rotate_by(q, sin_cos), rotate_by(k, sin_cos)
    # All angles in one call: a scaling may depend on the largest position of all.
    positions = [x.expand(batch, -1) for x in (at, keys_at)] if at.ndim != keys_at.ndim else [at, keys_at]
    sine, cosine = (x.split((length, keys), -2) for x in rotary.sin_cos(torch.cat(positions, -1), q.shape[-1]))
    return rotate_by(q, (sine[0], cosine[0])), rotate_by(k, (sine[1], cosine[1]))


def positions_of(
    rotary: Rotary, sequences: Packing | None, shards: Shards | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The positions of this process's queries and keys where a caller gives none; None for those from 0 on.

    Each packed sequence has its own, and the last query has the last key's.

    Raises:
        Unsupported: The rotation depends on the length, which is beyond that of training, and other tokens are packed
            with those of a sequence, or other processes hold some.
    """
    if sequences is None and shards is None:
        return None, None
    longest = sequences.longest if sequences is not None else shards.length if shards is not None else 0
    if rotary.rope_type == "dynamic" and longest > rotary.original_max_position_embeddings:
        why = "packed ones together: one has" if sequences is not None else "a process holds a part of one: it has"
        instead = "one call for each sequence" if sequences is not None else "positions= of your own"
        raise Unsupported(
            f"{rotary!r} rotates each sequence by its length, and {why} {longest} tokens. What would work: rope_type "
            f"'yarn' or 'linear', or {instead}"
        )
    if sequences is None:
        assert shards is not None
        sequences = Packing((shards.length,), (shards.num_keys,))
    ends = zip(sequences.queries, sequences.keys, strict=True)
    empty = torch.arange(0, device=device)
    at = torch.cat([empty, *(torch.arange(keys - length, keys, device=device) for length, keys in ends)])
    is_self = sequences.queries == sequences.keys
    keys_at = at if is_self else torch.cat([empty, *(torch.arange(n, device=device) for n in sequences.keys)])
    if shards is None:
        return at, keys_at
    queries = local(at, shards.queries, shards.rank, -1)
    return queries, queries if is_self else local(keys_at, shards.keys, shards.rank, -1)


def first_position(model: nn.Module) -> int:
    """The number that learned positions begin with: in models of RoBERTa's kind behind that of padding, else 0."""
    tables: list[Any] = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    return max((part.padding_idx + 1 for part in tables if getattr(part, "padding_idx", None) is not None), default=0)
