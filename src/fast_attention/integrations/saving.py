"""Saves a swapped Hugging Face model as a folder that transformers reads beside ``fast_attention.integrations``.

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
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from fast_attention import __version__, catalogue, files
from fast_attention.integrations import timm, torch_nn
from fast_attention.integrations.attention import NAME, Swapped, layers_of
from fast_attention.integrations.fresh import BEFORE, SKIPS, SWAPPED
from fast_attention.integrations.modules import swapped_in
from fast_attention.mechanism import Unsupported

FORMAT = "fast-attention swapped model 4"
RECORD = "quantization_config"  # the place in config.json from which transformers calls another library while loading
ARGUMENTS = ("is_main_process", "state_dict", "push_to_hub", "max_shard_size", "variant", "token")  # by position
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
PUSH = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
_original = PreTrainedModel.save_pretrained
_writing: ContextVar[Any] = ContextVar("the model that transformers writes for save_pretrained", default=None)


@wraps(_original)
def save_pretrained(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **settings: Any
) -> None:
    """Transformers' own ``save_pretrained``, which loses no mechanisms of a swapped model or of one inside it.

    ``config.json`` names them, and the hashes of all files. These are written under another name, brought to the disk
    and put in place together, ``config.json`` last. Arguments are transformers' own.

    Raises:
        Unsupported: A swapped model is quantized too, ``distributed_checkpoint=True``, or files would not name all
            mechanisms.
    """
    layers = layers_of(model)
    if _writing.get() is model or not (layers or swapped_in(model)):
        _original(model, save_directory, *args, **settings)
        return
    settings |= dict(zip(ARGUMENTS, args, strict=False))
    if not settings.pop("is_main_process", True):
        return
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers then writes the adapters and nothing else
        _write(model, save_directory, **settings)
        return
    _check_named(model, layers)
    _check_readable(model, layers)
    quantized: Any = getattr(model.config, RECORD, None)
    if quantized is not None:
        method = getattr(quantized.quant_method, "value", quantized.quant_method)
        raise Unsupported(
            f"{type(model).__name__} is quantized ({method}), and a swapped model is saved with weights of its own. "
            "What would work: loading it without quantization before it is swapped"
        )
    if settings.get("distributed_checkpoint"):
        raise Unsupported("distributed_checkpoint=True: a swapped model is saved whole, with a hash of every file")
    push_to_hub = settings.pop("push_to_hub", False)
    hub = {name: settings.pop(name) for name in PUSH if name in settings}
    folder = Path(save_directory)
    with files.atomic_group(folder / "config.json") as config_path:
        _write(model, config_path.parent, **settings)
        weights = sorted(
            path for path in config_path.parent.iterdir() if path.suffix == ".safetensors" or ".index." in path.name
        )
        record: dict[str, Any] = {"quant_method": NAME, "format": FORMAT, "version": __version__}
        of_interface = {
            name: {
                "mechanism": repr(part.bound.mechanism),
                "unchanged": part.unchanged,
                **dataclasses.asdict(part.bound.shape),
            }
            for name, part in layers.items()
        }
        record["layers"] = of_interface | torch_nn.records(model)
        record |= {"skip_padding": True} if SKIPS in vars(model.base_model) else {}
        record["sha256"] = {path.name: files.sha256(path) for path in weights}
        config = json.loads(
            config_path.read_text(encoding="utf-8"),
            object_hook=lambda config: {name: value for name, value in config.items() if name != BEFORE},
        )  # without what it named before the swap, which is of this process
        config = {**config, "attn_implementation": _implementations(model, layers), RECORD: record}
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        v = rf"\.{re.escape(settings['variant'])}" if settings.get("variant") else ""
        pattern = rf"model{v}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{v}\.json"
        for path in folder.iterdir():
            if path.name not in record["sha256"] and re.fullmatch(pattern, path.name):
                config_path.with_name(path.name).touch()  # takes it away
    if push_to_hub:
        model.push_to_hub(hub.pop("repo_id", folder.resolve().name), **hub)


def from_pretrained(
    folder: str | os.PathLike[str], *, architecture: type[PreTrainedModel] | None = None, **settings: Any
) -> Any:
    """See ``fast_attention.from_pretrained``."""
    local = Path(folder) / settings.get("subfolder", "")
    files.settle(local / "config.json")
    if local.is_dir() and not (local / "config.json").exists():
        raise FileNotFoundError(errno.ENOENT, f"{local} holds no swapped model", "config.json")
    hub_settings = {name: settings[name] for name in HUB if name in settings}
    try:
        if local.is_dir():
            files.decoded((local / "config.json").read_text(encoding="utf-8"))  # transformers takes the last of a name
        config: Any = PreTrainedConfig.get_config_dict(folder, **hub_settings)[0]
        if config.get(RECORD, {}).get("quant_method") != NAME:
            raise ValueError("config.json names no mechanisms; transformers loads exact models")
        kind: Any = architecture or getattr(transformers, config["architectures"][0])
        model, info = kind.from_pretrained(folder, output_loading_info=True, **settings)
    except Exception as error:  # whatever damaged files make the libraries raise
        if isinstance(error, OSError) and not local.is_dir():
            raise  # the hub's
        raise ValueError(f"{os.fspath(folder)} holds no sound swapped model: {error}") from error
    if SWAPPED not in model.__dict__:  # config= was of a swapped model
        raise ValueError(f"{os.fspath(folder)} was read by a config that names no mechanisms: leave config= out")
    if problems := {why: sorted(map(str, names)) for why, names in info.items() if names}:
        raise ValueError(f"{os.fspath(folder)}: its weights do not belong to {kind.__name__}: {problems}")
    return model


def _implementations(model: PreTrainedModel, layers: dict[str, Swapped]) -> str | dict[str, str]:
    """Names of attention in config.json: parts without a layer of ours are built with what they called before.

    SAM's layers for images look their class up by that name.
    """
    swapped = {id(getattr(model.get_submodule(name), "config", None)) for name in layers}
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}

    def runs(config: Any) -> bool:
        inner = (getattr(config, name, None) for name in config.sub_configs)
        return id(config) in swapped or any(runs(part) for part in inner if part is not None)

    others = {
        name: vars(config).get(BEFORE, config._attn_implementation)
        for name, config in parts.items()
        if config is not None and not runs(config)
    }
    return {"": NAME, **dict.fromkeys(parts, NAME), **others} if others else NAME


def _write(model: PreTrainedModel, *args: Any, **settings: Any) -> None:
    """Let transformers write what it knows of a model."""
    token = _writing.set(model)
    try:
        type(model).save_pretrained(model, *args, **settings)
    finally:
        _writing.reset(token)


def _check_named(model: PreTrainedModel, layers: dict[str, Swapped]) -> None:
    """Raise ``Unsupported`` where a model's files would not name all mechanisms in it, or name too few to load them."""
    kind = type(model).__name__
    again = "then load_state_dict of the present weights, where they were trained"
    if unnamed := [names[0] for names in swapped_in(model, timm.OURS).values()]:
        raise Unsupported(
            f"{kind}: the files of a model name no mechanisms in timm's layers ({unnamed[0]}). What would work: "
            "torch.save(model.state_dict(), path), which is loaded into a model that was swapped in the same way"
        )
    if not layers:
        name = next(names[0] for names in swapped_in(model).values())
        raise Unsupported(
            f"{kind}: only {name} was swapped, an nn.MultiheadAttention, and a model's files name such a layer beside "
            f"swapped ones of transformers' interface. What would work: swap(model, {{'{name}': ..., "
            f"'*': 'Softmax()'}}) and {again}; or torch.save(model.state_dict(), path), for a model that was swapped "
            "in the same way"
        )
    if model.config._attn_implementation != NAME and SWAPPED not in vars(model):
        parts = (name for name, part in model.named_modules() if SWAPPED in vars(part))
        part = next(parts, next(iter(layers)))
        raise Unsupported(
            f"{kind} was not swapped, but a part of it, {part}: loading these files would run exact attention. What "
            f"would work: swap(model, {{'{part}.*': ...}}) of the whole {kind}, {again}; or saving {part} by itself; "
            f"for exact attention, swap_back of {part}"
        )


def _check_readable(model: PreTrainedModel, layers: dict[str, Swapped]) -> None:
    """Raise ``Unsupported`` where a mechanism is not what its expression gives, as one with a function is not."""
    bounds = [part.bound for part in layers.values()] + [part.attention for part in swapped_in(model, torch_nn.OURS)]
    for mechanism in {bound.mechanism for bound in bounds}:
        if not catalogue.readable(mechanism):
            raise Unsupported(
                f"{type(model).__name__}: files name mechanisms by expressions, and {mechanism!r} cannot be read back. "
                "What would work: a class in place of a function, as docs/guides/your_mechanism.md has it; or "
                "torch.save(model.state_dict(), path), which is loaded into a model that was swapped in the same way"
            )


PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]
