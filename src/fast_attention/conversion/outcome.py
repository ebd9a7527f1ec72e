"""The outcome of a conversion, measured after every stage, and the file that keeps its finished stages."""

from __future__ import annotations

import hashlib
import io
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_attention import files

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
    """Write the file: its format, its SHA-256 and what follows.

    Args:
        path: The file.
        of: Model, mechanism and settings, by name; a conversion with others cannot resume from the file.
        result: What was measured so far.
        finished: The model's state after the last finished stage.
        best: The state after the best one.
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
