"""Saves a swapped Hugging Face model as a folder that transformers itself reads once ``fast_attention`` was imported.

transformers writes the folder; ``config.json`` also gets the mechanism of each layer and the SHA-256 of every file of
weights. It names an attention implementation that transformers does not know: where this library was not imported,
loading fails instead of silently running exact attention on weights that were trained for another.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from fast_attention import __version__, files
from fast_attention.integrations import unpadding
from fast_attention.integrations.attention import NAME
from fast_attention.integrations.swapped import Swapped, layers_of
from fast_attention.mechanism import Unsupported

FORMAT = "fast-attention swapped model 2"
RECORD = "quantization_config"  # the place in config.json from which transformers calls another library while loading
OLD_WEIGHTS = "fast_attention.safetensors"  # the weights of folders written before the first release
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
PUSH = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    **settings: Any,
) -> None:
    """Write a swapped model by transformers' own ``save_pretrained``, its mechanisms and hashes in ``config.json``.

    All files are written under another name, brought to the disk and put in place together, ``config.json`` last.

    Args:
        model: The model. After a swap this is also its own ``save_pretrained``.
        save_directory: Where to.
        is_main_process: False writes nothing.
        state_dict: Other weights than the model's present ones.
        push_to_hub: Call ``model.push_to_hub(repo_id or the folder's name)`` afterwards.
        settings: Further arguments of transformers' ``save_pretrained``, such as ``max_shard_size`` and ``variant``.

    Raises:
        ValueError: The model is not swapped.
        Unsupported: It is quantized too, or ``distributed_checkpoint=True``.
    """
    layers = layers_of(model)
    if not is_main_process:
        return
    if not layers:
        raise ValueError(f"{type(model).__name__} is not swapped: save it by its own save_pretrained")
    write = type(model).save_pretrained
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers then writes the adapters and nothing else
        write(model, save_directory, state_dict=state_dict, push_to_hub=push_to_hub, **settings)
        return
    _check(model, settings)
    hub = {name: settings.pop(name) for name in PUSH if name in settings}
    folder = Path(save_directory)
    with files.atomic_group(folder / "config.json") as config_path:
        write(model, config_path.parent, state_dict=state_dict, **settings)
        weights = sorted(
            path for path in config_path.parent.iterdir() if path.suffix == ".safetensors" or ".index." in path.name
        )
        record = {"quant_method": NAME, "format": FORMAT, "version": __version__, "layers": _layer_records(layers)}
        record |= {"skip_padding": True} if unpadding.skips(model) else {}
        record["sha256"] = {path.name: files.sha256(path) for path in weights}
        config = json.loads(config_path.read_text(encoding="utf-8"))
        config = {**config, "attn_implementation": NAME, RECORD: record}
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    pattern = _weights_pattern(settings.get("variant"))
    for path in folder.iterdir():
        if path.name not in record["sha256"] and re.fullmatch(pattern, path.name):
            path.unlink()
    if push_to_hub:
        model.push_to_hub(hub.pop("repo_id", folder.resolve().name), **hub)


def from_pretrained(
    folder: str | os.PathLike[str], *, architecture: type[PreTrainedModel] | None = None, **settings: Any
) -> Any:
    """See ``fast_attention.from_pretrained``."""
    local = Path(folder) / settings.get("subfolder", "")
    if local.is_dir() and (local / OLD_WEIGHTS).exists():
        raise ValueError(f"{local} was written before the first release, in another form: save its model again")
    if local.is_dir() and not (local / "config.json").exists():
        raise FileNotFoundError(errno.ENOENT, f"{local} holds no swapped model", "config.json")
    hub_settings = {name: settings[name] for name in HUB if name in settings}
    try:
        config: Any = PreTrainedConfig.get_config_dict(folder, **hub_settings)[0]
        if config.get(RECORD, {}).get("quant_method") != NAME:
            raise ValueError("config.json names no mechanisms; transformers loads exact models")
        kind: Any = architecture or getattr(transformers, config["architectures"][0])
        model, info = kind.from_pretrained(folder, output_loading_info=True, **settings)
    except Exception as error:  # whatever damaged files make the libraries raise
        if isinstance(error, OSError) and not local.is_dir():
            raise  # the hub's
        raise ValueError(f"{os.fspath(folder)} holds no sound swapped model: {error}") from error
    if problems := {why: sorted(map(str, names)) for why, names in info.items() if names}:
        raise ValueError(f"{os.fspath(folder)}: its weights do not belong to {kind.__name__}: {problems}")
    return model


def _check(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    quantized: Any = getattr(model.config, RECORD, None)
    if quantized is not None:
        method = getattr(quantized.quant_method, "value", quantized.quant_method)
        raise Unsupported(
            f"{type(model).__name__} is quantized ({method}), and a swapped model is saved with weights of its own. "
            "What would work: loading it without quantization before it is swapped"
        )
    if settings.get("distributed_checkpoint"):
        raise Unsupported("distributed_checkpoint=True: a swapped model is saved whole, with a hash of every file")


def _layer_records(layers: dict[str, Swapped]) -> dict[str, Any]:
    """The mechanism of each attention module and the shape of its weights."""
    return {
        name: {"mechanism": repr(part.bound.mechanism), **dataclasses.asdict(part.bound.shape), "kept": part.kept}
        for name, part in layers.items()
    }


def _weights_pattern(variant: str | None) -> str:
    """A regular expression for the names under which transformers writes weights."""
    v = rf"\.{re.escape(variant)}" if variant else ""
    return rf"model{v}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{v}\.json"
