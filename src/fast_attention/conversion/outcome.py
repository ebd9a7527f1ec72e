"""A conversion's settings, its outcome after every stage, and the file that keeps its finished stages."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fast_attention import files
from fast_attention.value import Value, at_least, is_seed

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


Figures = dict[str, float]  # "loss" is the one by which stages are compared
STAGES = ("swapped", "transferred", "tuned")
TRAINED = "trained text"  # how the names of groups begin that are of a source of the training passages


class Diverged(ArithmeticError):
    """Raised by ``convert`` when the training loss is NaN or infinite. A lower ``lr`` is the usual remedy."""


@dataclass
class Conversion:
    """The outcome of a conversion. Layers are named as in ``model.named_modules()``.

    Figures and errors are of the held-out batches, under ``"original"``, ``"swapped"`` (before any training),
    ``"transferred"`` and ``"tuned"``. The model has the weights of the ``best`` of the last three. The figure ``loss``
    is nats per token of a language model. Of any other model it is 2 - the mean cosine of the sentence embeddings to
    those that are asked for.
    """

    goal: str
    mechanism: str
    layers: list[str]  # all attention layers
    kept: dict[str, str]  # those that stayed exact, each with the reason
    figures: dict[str, Figures] = field(default_factory=dict)
    by_group: dict[str, dict[str, Figures]] = field(default_factory=dict)  # of each group that was held out
    exact_up_to: int | None = None  # tokens up to which exact attention serves
    best: str = ""  # the stage whose weights the model has
    steps: int = 0  # of training, in all finished stages
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # of each layer's output, over its variance
    status: str = "running"  # "complete" or "interrupted" in the end

    def held_out_loss(self, stage: str) -> float:
        """The loss by which stages are compared: the mean over the groups of texts that are not trained on."""
        groups = self.by_group.get(stage, {"": self.figures[stage]})
        others = [each["loss"] for name, each in groups.items() if not name.startswith(TRAINED)]
        losses = others or [each["loss"] for each in groups.values()]
        return sum(losses) / len(losses)

    @property
    def converted(self) -> list[str]:
        """The layers that run the mechanism."""
        return [name for name in self.layers if name not in self.kept]


FORMAT = b"fast-attention conversion 2\n"
State = dict[str, Tensor]


def fingerprint(model: Any) -> str:
    """Some digits that tell the weights of models apart: of one class and size, or before and after a training."""
    digest = hashlib.sha256()
    for name, x in model.state_dict().items():
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def save(path: Path, of: dict[str, str], result: Conversion, finished: State, best: State) -> None:
    """Write the file: its format, its SHA-256, what was measured, the model's states after the last and the best stage.

    ``of`` are model, mechanism and settings, by name; a conversion with others cannot resume from the file.
    """
    buffer = io.BytesIO()
    torch.save({"of": of, "result": asdict(result), "finished": finished, "best": best}, buffer)
    data = buffer.getbuffer()
    with files.atomic(path) as partial, partial.open("wb") as handle:
        handle.write(FORMAT + hashlib.sha256(data).digest())
        handle.write(data)


def load(path: Path, of: dict[str, str]) -> tuple[Conversion, State, State]:
    """Read what ``save`` wrote: result, last finished and best state.

    Raises:
        ValueError: It is damaged, of another version, or of another conversion; the message says what differs.
    """
    content, start = path.read_bytes(), len(FORMAT) + hashlib.sha256().digest_size
    if content[:start] != FORMAT + hashlib.sha256(content[start:]).digest():
        what = "is damaged" if content.startswith(FORMAT) else "is of another version of this library"
        raise ValueError(f"the checkpoint {path} {what}: begin anew (--restart)")
    stored = torch.load(io.BytesIO(content[start:]), weights_only=True)
    for name, value in of.items():
        if (other := stored["of"].get(name)) != value:
            remedy = ": give the model as it was before that conversion" if name == "weights" else ""
            raise ValueError(f"{path} is of a conversion with {name} {other}, not {value}{remedy}")
    return Conversion(**stored["result"]), stored["finished"], stored["best"]
