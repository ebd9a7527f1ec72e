"""Saves and loads the checkpoint of a conversion: one file with its hash, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fast_attention import files

Stage = Literal["transfer", "choice", "fine-tune", "done"]
STAGES: tuple[Stage, ...] = ("transfer", "choice", "fine-tune", "done")
FORMAT = b"fast-attention conversion 1\n"


@dataclass
class Progress:
    """The present stage of a conversion, how far it has come, and the result so far."""

    stage: Stage = "transfer"
    step: int = 0
    seconds: float = 0.0
    batches: int = 0  # used so far, over all stages
    loss: float | None = None  # of training, a running mean
    result: dict[str, Any] = field(default_factory=dict)


def identity(original: Any, settings: Any, *, mechanism: str, exact_up_to: Any, **others: Any) -> dict[str, str]:
    """What a conversion is of, by name: one with another model, mechanism or settings cannot resume from its file."""
    return {
        "model": f"{type(original).__name__} of {sum(p.numel() for p in original.parameters()):,} parameters",
        "weights": fingerprint(original),
        "mechanism": mechanism + ("" if exact_up_to is None else f", exact up to {exact_up_to}"),
        **{name: repr(value) for name, value in others.items()},
        "settings": repr(settings),
    }


def fingerprint(model: Any) -> str:
    """Some digits that tell the weights of models apart: of one class and size, or before and after a training."""
    digest = hashlib.sha256()
    for name, x in model.state_dict().items():
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def path_of(checkpoint: str | os.PathLike[str] | None, *, resume: bool) -> Path | None:
    """The file that ``convert`` was given for its checkpoints.

    Raises:
        ValueError: It is a folder, or there is none and the conversion is to be resumed.
    """
    if checkpoint is None:
        if resume:
            raise ValueError("resume=True needs the file to continue from: give checkpoint=...")
        return None
    if Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint={os.fspath(checkpoint)!r} is a folder: name a file, such as one in it")
    return Path(checkpoint)


def save(
    path: Path, identity: dict[str, str], progress: Progress, tensors: dict[str, Any], optimiser: dict[str, Any] | None
) -> None:
    """Write a checkpoint, preceded by its SHA-256.

    Args:
        path: The file.
        identity: Model, mechanism and settings, by name; a conversion with others cannot resume from the file.
        progress: How far the conversion has come.
        tensors: The model's state.
        optimiser: The optimiser's state, within a stage.
    """
    buffer = io.BytesIO()
    fields = asdict(progress)
    fields["told"] = fields.pop("result")  # the key of format 1
    torch.save({"of": identity, "place": fields, "tensors": tensors, "optimiser": optimiser}, buffer)
    data = buffer.getbuffer()
    with files.atomic(path) as partial, partial.open("wb") as handle:
        handle.write(FORMAT + hashlib.sha256(data).digest())
        handle.write(data)


def load(
    path: str | os.PathLike[str], identity: dict[str, str]
) -> tuple[Progress, dict[str, Any], dict[str, Any] | None]:
    """Read what ``save`` wrote: progress, model's and optimiser's state.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or of another conversion; the message says what differs.
        Newer: A later version of this library wrote it.
    """
    content = Path(path).read_bytes()
    start = len(FORMAT) + hashlib.sha256().digest_size
    try:
        first = content[:100].partition(b"\n")[0].decode(errors="replace")
        files.readable({"format": first}, FORMAT.decode().strip(), f"the checkpoint {os.fspath(path)}")
        if hashlib.sha256(content[start:]).digest() != content[len(FORMAT) : start]:
            raise ValueError("changed")
    except files.Newer:
        raise
    except ValueError as error:
        raise ValueError(f"the checkpoint {os.fspath(path)} is damaged: --restart begins anew") from error
    stored = torch.load(io.BytesIO(content[start:]), weights_only=True)
    for name, value in identity.items():
        if (other := stored["of"].get(name)) != value:
            remedy = ": give the model as it was before that conversion" if name == "weights" else ""
            raise ValueError(f"{os.fspath(path)} is of a conversion with {name} {other}, not {value}{remedy}")
    fields = stored["place"]
    return Progress(result=fields.pop("told"), **fields), stored["tensors"], stored["optimiser"]
