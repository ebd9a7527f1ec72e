"""Where a conversion stands, as one file: there whole or not at all, and refused where it is not what was written."""

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
class Place:
    """The stage that is under way, what lies behind in it, and what was found out so far."""

    stage: Stage = "transfer"
    step: int = 0
    seconds: float = 0.0
    batches: int = 0  # used so far, over all stages
    loss: float | None = None  # of training, a running mean
    told: dict[str, Any] = field(default_factory=dict)


def save(
    path: Path, of: dict[str, str], place: Place, tensors: dict[str, Any], optimiser: dict[str, Any] | None
) -> None:
    """Write a checkpoint, with its SHA-256 before it.

    Args:
        path: The file.
        of: What the conversion is of; another cannot go on with it.
        place: Where it stands.
        tensors: The model's state.
        optimiser: The optimiser's, within a stage.
    """
    buffer = io.BytesIO()
    torch.save({"of": of, "place": asdict(place), "tensors": tensors, "optimiser": optimiser}, buffer)
    data = buffer.getbuffer()
    with files.whole(path) as partial, partial.open("wb") as handle:
        handle.write(FORMAT + hashlib.sha256(data).digest())
        handle.write(data)


def load(path: str | os.PathLike[str], of: dict[str, str]) -> tuple[Place, dict[str, Any], dict[str, Any] | None]:
    """What ``save`` wrote: place, model's and optimiser's state.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or of another conversion; the message says what differs.
        Newer: A later version of this library wrote it.
    """
    text = Path(path).read_bytes()
    start = len(FORMAT) + hashlib.sha256().digest_size
    try:
        first = text[:100].partition(b"\n")[0].decode(errors="replace")
        files.readable({"format": first}, FORMAT.decode().strip(), f"the checkpoint {os.fspath(path)}")
        if hashlib.sha256(text[start:]).digest() != text[len(FORMAT) : start]:
            raise ValueError("changed")
    except files.Newer:
        raise
    except ValueError as error:
        raise ValueError(f"the checkpoint {os.fspath(path)} is damaged: --restart begins anew") from error
    held = torch.load(io.BytesIO(text[start:]), weights_only=True)
    for what, value in of.items():
        if held["of"].get(what) != value:
            theirs = held["of"].get(what)
            raise ValueError(f"{os.fspath(path)} is of a conversion with {what} {theirs}, not {value}")
    return Place(**held["place"]), held["tensors"], held["optimiser"]
