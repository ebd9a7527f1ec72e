"""Saves a model as a folder: ``config.json`` and ``model.safetensors``, written whole or not at all, with their hashes.

The hashes are needed: safetensors reads flipped bits without an error, and a changed setting makes another model.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_attention import __version__, catalogue, files
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.nn.token_mixer import TokenMixer

FORMAT = "fast-attention model 1"
SETTINGS, WEIGHTS = "config.json", "model.safetensors"


def save(model: Model, folder: str | os.PathLike[str]) -> None:
    """Write a model: its settings with the expression of each mechanism, and all weights and buffers.

    A process that is killed meanwhile leaves the old model or the new one.

    Raises:
        Unsupported: A mechanism is not what its expression gives, as one with a function in it is not.
    """
    for module in model.modules():
        if isinstance(module, TokenMixer):
            check_readable(module.mechanism)
    write(model.present_config(), model.state_dict(), folder)


def write(config: ModelConfig, tensors: dict[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Write a model that is given as its settings and its state."""
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    if config.tied and config.head == "tokens":
        head, embedding = (tensors[name].view(torch.uint8) for name in ("out.weight", "embedding.weight"))
        if not torch.equal(head, embedding):  # load_state_dict(assign=True) and the like part them
            raise ValueError(
                "the weights of model.out are no longer those of model.embedding, as ModelConfig(tied=True) has them: "
                "set model.out.weight = model.embedding.weight before training, or build the model with tied=False"
            )
        del tensors["out.weight"]
    settings = {"format": FORMAT, "version": __version__, **asdict(config)}
    with files.atomic_group(folder / SETTINGS) as partial:
        weights = partial.with_name(WEIGHTS)
        save_file(tensors, weights)
        settings["sha256"] = {SETTINGS: _digest(settings), WEIGHTS: files.sha256(weights)}
        partial.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def check_readable(mechanism: Mechanism[Any, Any]) -> None:
    """Raise ``Unsupported`` for a mechanism that no file can name: with a function, or a class named like ours."""
    if not catalogue.readable(mechanism):
        raise Unsupported(
            f"a model's settings name {mechanism!r}, which does not give it back. What would work: a class in place of "
            "a function, of a name that this library does not use"
        )


def load(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> Model:
    """The model that ``save`` wrote, in evaluation mode, equal to the bit and in its dtypes, random features too.

    Raises:
        FileNotFoundError: The folder holds no model.
        ValueError: Its files do not belong together or are damaged.
    """
    config, tensors = read(folder)
    try:
        with torch.random.fork_rng(devices=[]):
            model = Model(config)
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            x.data = x.data.to(tensors[name].dtype)
        model.load_state_dict(tensors)
    except Exception as error:
        raise ValueError(f"{os.fspath(folder)} holds no sound model: {error}") from error
    return model.to(device).eval()


def read(folder: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The settings and the state that ``write`` wrote.

    Raises:
        FileNotFoundError: The folder holds no model.
        ValueError: Its files are damaged.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        files.settle(folder / SETTINGS)
        settings = files.decoded((folder / SETTINGS).read_text())
        files.readable(settings, FORMAT, os.fspath(folder))
        digests = settings.pop("sha256", {})
        files.verify(folder / WEIGHTS, digests.get(WEIGHTS))
        config = ModelConfig(**{name: x for name, x in settings.items() if name not in ("format", "version")})
        tensors = load_file(folder / WEIGHTS)
        if config.tied and config.head == "tokens":
            tensors["out.weight"] = tensors["embedding.weight"]
        _check_sizes(config, tensors)
        if _digest(settings) != digests.get(SETTINGS):
            raise ValueError(f"{SETTINGS} is not what was written: train or save the model with other settings instead")
    except files.Newer:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{os.fspath(folder)} holds no model: {error.filename} is missing") from error
    except Exception as error:
        raise ValueError(f"{os.fspath(folder)} holds no sound model: {error}") from error
    return config, tensors


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _check_sizes(config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Refuse settings that ask for other weights than there are, before any memory is taken for them."""
    if config.layers > len(tensors):
        raise ValueError(f"config.json asks for {config.layers:,} layers, and there are {len(tensors)} tensors")
    with torch.device("meta"):
        expected = Model(config).state_dict()
    for name in sorted({*expected} | {*tensors}):
        needed, stored = (tuple(x[name].shape) if name in x else None for x in (expected, tensors))
        if needed != stored:
            raise ValueError(f"by config.json {name} has sizes {needed}, and the weights have {stored}")
