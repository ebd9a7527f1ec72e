"""The settings of a conversion, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fast_attention.value import Value, at_least, is_seed, one_of

Precision = Literal["float32", "bfloat16"]
Train = Literal["mechanism", "model"]


@dataclass(frozen=True, repr=False)
class ConversionSettings(Value):
    """The settings of a conversion: what is trained, for how long, at which learning rates.

    Args:
        train: ``"mechanism"`` trains the mechanisms' own weights only: inputs that exact attention serves give what
            they gave, to the bit. ``"model"`` trains all weights: it may gain more on texts like those of the training
            and lose on others and on short inputs.
        minutes: Time for transfer and fine-tune together, without measurements; 0 for no limit but ``steps``.
        steps: Training steps in each of the two; 0 for no limit but ``minutes``.
        share: The transfer's fraction of the minutes; 0 or 1 leaves one of the two out.
        lr_maps: The highest learning rate of the mechanisms' own weights in the transfer.
        lr_projections: The highest one of the attention modules' projections in the transfer; 0 does not train them.
        lr: The highest one of all weights in the fine-tune. The mechanisms' own get ten times as much.
        warmup: Fraction of each of the two in which the rate rises; then it falls to zero along a cosine.
        weight_decay: AdamW's, in the fine-tune, on matrices.
        clip: The largest norm of a gradient in the fine-tune; 0 for no limit.
        precision: ``"bfloat16"`` trains under autocast. Weights, updates and all figures stay in float32.
        seed: For the mechanisms' weights.
    """

    train: Train = "mechanism"
    minutes: float = 10.0
    steps: int = 0
    share: float = 0.2
    lr_maps: float = 2e-2
    lr_projections: float = 2e-3
    lr: float = 1e-4
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, "steps", self.steps, 0)
        is_seed(self, "seed", self.seed)
        for name in ("minutes", "share", "lr_maps", "lr_projections", "lr", "warmup", "weight_decay", "clip"):
            at_least(self, name, getattr(self, name), 0.0)
        one_of(self, "precision", self.precision, Precision)
        one_of(self, "train", self.train, Train)
        for name, limit in (("share", 1.0), ("warmup", 0.99)):
            if getattr(self, name) > limit:
                raise ValueError(f"{self!r}: {name} is a fraction, at most {limit:g}")
        if not self.steps and not self.minutes:
            raise ValueError("ConversionSettings(minutes=0.0, steps=0): give one of them, or conversion has no end")

    def done(self, fraction: float, step: int, seconds: float) -> float:
        """The finished part of a stage with ``fraction`` of the minutes: by steps or by time, whichever is further."""
        if not fraction:
            return 1.0
        by_steps = step / self.steps if self.steps else 0.0
        return max(by_steps, seconds / (60 * self.minutes * fraction) if self.minutes else 0.0)

    def pace(self, fraction: float, step: int, seconds: float) -> float:
        """The learning rate of a step of a stage, as a fraction of the highest."""
        by_steps = (step + 1) / (self.steps + 1) if self.steps else 0.0
        done = min(max(self.done(fraction, step, seconds), by_steps), 1.0)
        if done < self.warmup:
            return done / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))
