"""Saves and loads the finished stages of a conversion: one file with its hash, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_attention import files
from fast_attention.conversion.outcome import Conversion

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
