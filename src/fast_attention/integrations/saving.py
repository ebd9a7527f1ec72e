"""A swapped Hugging Face model as a folder, which no library but this one takes for an ordinary model.

The weights do not lie under the name that transformers looks for: where this library is absent, loading fails instead
of quietly running exact attention on weights that were trained for another.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from fast_attention import __version__, catalogue, files
from fast_attention.integrations.attention import layers_of

RECORD, WEIGHTS = "fast_attention.json", "fast_attention.safetensors"
FORMAT = "fast-attention swapped model 1"


def save_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a swapped model: transformers' config, all weights and buffers, and which layer runs what.

    Args:
        model: The model. After a swap this is also its own ``save_pretrained``.
        folder: Where to.
        is_main_process: Only then anything is written.
        state_dict: Other weights than the model's present ones.

    Raises:
        ValueError: The model is not swapped.
    """
    from safetensors.torch import save_file

    layers = layers_of(model)
    if not is_main_process:
        return
    if not layers:
        raise ValueError(f"{type(model).__name__} is not swapped: save it by its own save_pretrained")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with files.whole(folder / WEIGHTS) as partial:
        save_file(
            _tensors(model.state_dict() if state_dict is None else state_dict), partial, metadata={"format": "pt"}
        )
    model.config.save_pretrained(folder)
    record = {
        "format": FORMAT,
        "version": __version__,
        "architecture": type(model).__name__,
        "layers": {name: repr(part.bound.mechanism) for name, part in layers.items() if not part.kept},
        "max_len": max(part.bound.shape.max_len for part in layers.values()),
    }
    files.write(folder / RECORD, json.dumps(record, indent=1) + "\n")


def from_pretrained(folder: str | os.PathLike[str], *, architecture: type[PreTrainedModel] | None = None) -> Any:
    """See ``fast_attention.from_pretrained``."""
    from safetensors.torch import load_file

    from fast_attention.integrations import hugging_face

    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r}")
        kind: Any = architecture or getattr(transformers, record["architecture"])
        model = kind(AutoConfig.from_pretrained(folder))
        tensors = load_file(folder / WEIGHTS)
        wanted: Any = {name: catalogue.parse(text) for name, text in record["layers"].items()}
        model.to(next(x.dtype for x in tensors.values() if x.is_floating_point()))
        hugging_face.swap(model, wanted, record["max_len"] or None)
        missing, strange = model.load_state_dict(tensors, strict=False)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(folder)} holds no sound swapped model: {error}") from error
    model.tie_weights()
    absent = sorted({*missing} - {*_tied(model)})
    if absent or strange:
        raise ValueError(f"{os.fspath(folder)}: weights are missing ({absent}) or belong to another model ({strange})")
    return model.eval()


def _tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights and buffers, those that several names share once."""
    seen: dict[Any, str] = {}
    found = {}
    for name, x in state.items():
        place = (x.data_ptr(), x.shape, x.stride()) if x.numel() else name
        if seen.setdefault(place, name) == name:
            found[name] = x.contiguous()
    return found


def _tied(model: PreTrainedModel) -> list[str]:
    """The names that share their weights with one before."""
    state = model.state_dict()
    return sorted({*state} - {*_tensors(state)})
