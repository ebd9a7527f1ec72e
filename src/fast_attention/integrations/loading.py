"""Makes transformers' own ``from_pretrained`` read swapped models: mechanisms are put in before the weights are loaded.

It registers as a quantizer, by the name that ``config.json`` gives under ``quantization_config``: transformers' hook
for changing modules before loading. Nothing is quantized; shards, ``dtype``, ``device_map`` and the hub stay
transformers' business. It is imported while transformers imports its models: what needs those is imported in functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fast_attention import catalogue, files
from fast_attention.integrations import fresh
from fast_attention.integrations.modules import NAME
from fast_attention.mechanism import Shape


@register_quantization_config(NAME)
class Record(QuantizationConfigMixin):
    """The entry of ``config.json`` about a swapped model.

    Raises:
        ValueError: It was written in another format, as by a newer version, or is incomplete.
    """

    def __init__(self, **record: Any) -> None:
        from fast_attention.integrations.saving import FORMAT  # and the attention's name is known from here on

        files.readable(record, FORMAT, "the model")
        if missing := {"layers", "sha256"} - {*record}:
            raise ValueError(f"config.json lacks the {' and '.join(sorted(missing))} of a swapped model")
        self.quant_method: Any = NAME
        self.layers, self.sha256 = record["layers"], record["sha256"]
        self.skip_padding = bool(record.get("skip_padding", False))


@register_quantizer(NAME)
class Restoring(HfQuantizer):
    """The steps before and after transformers loads a swapped model's weights."""

    quantization_config: Any

    def __init__(self, quantization_config: Any, **settings: Any) -> None:
        super().__init__(quantization_config, **settings)
        self.pre_quantized = False  # weights are of the dtype that was asked for

    def is_serializable(self) -> Any:
        """It can be saved."""
        return True

    @property
    def is_trainable(self) -> Any:
        """It can be trained."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **settings: Any
    ) -> None:
        """Compare the files with their hashes, and put the mechanisms in."""
        from fast_attention.integrations import hugging_face, modules, torch_nn

        implementation = model.config._attn_implementation
        if model not in fresh.RENEWED:
            raise ValueError(
                f"config.json names mechanisms for {type(model).__name__}, whose weights were trained for them, and "
                f"attn_implementation={implementation!r} would run other attention: leave that out, and call "
                "fast_attention.swap_back(model) for exact attention"
            )
        verify(checkpoint_files or (), self.quantization_config.sha256)
        modules.exchange_classes(model, exact=False)
        layers = _present(model, self.quantization_config.layers)
        of_torch = {name: settings for name, settings in layers.items() if "module" in settings}
        with _drawing():
            interfaced = {name: _layer(model, name, **layers[name]) for name in layers if name not in of_torch}
            hugging_face.restore(model, interfaced)
            torch_nn.restore(model, of_torch)
        self.sizes = {name: x.shape for name, x in model.state_dict().items()}

    def postprocess_model(self, model: Any, **settings: Any) -> Any:
        """Complete the swap, and raise unless sizes agree and all weights of the mechanisms were loaded."""
        from fast_attention.integrations import forward_pass, modules
        from fast_attention.integrations.attention import CHILD

        skip_padding = self.quantization_config.skip_padding
        self.remove_quantization_config(model)
        del model.is_quantized
        forward_pass.enter_calls(model)
        model.__dict__[fresh.SWAPPED] = ""  # no exact model has a name
        tensors = model.state_dict(keep_vars=True)
        mismatched = [f"{name} {tuple(x.shape)} for {tuple(self.sizes[name])}" for name, x in tensors.items()
                  if x.shape != self.sizes.get(name, x.shape)]  # fmt: skip
        if mismatched:  # of which transformers 5.5 tells nothing
            raise ValueError(f"sizes mismatch between the weights and {type(model).__name__}: {', '.join(mismatched)}")
        starts = tuple(f"{name}.attention." for names in modules.swapped_in(model).values() for name in names)
        mechanism_tensors = [
            (name, x) for name, x in tensors.items() if f".{CHILD}." in name or name.startswith(starts)
        ]
        missing = [name for name, x in mechanism_tensors if not getattr(x, "_is_hf_initialized", x.is_meta)]
        if missing:
            raise ValueError(f"weights of the mechanisms are missing: {', '.join(missing)}")
        forward_pass.set_skipping(model, skip_padding)
        return model


def verify(paths: Sequence[str], digests: dict[str, str]) -> None:
    """Compare files of weights, and their index file, with the hashes that were saved.

    Raises:
        ValueError: A file was cut short or changed, or is not among those that were saved. It is named.
    """
    folder = Path(paths[0]).parent if paths else Path()
    lists = [folder / name for name in digests if ".index." in name and len(paths) > 1]
    for path in [*map(Path, paths), *(path for path in lists if path.exists())]:
        if path.name not in digests:
            raise ValueError(f"{path} does not belong to the model that config.json names: {', '.join(digests)} do")
        files.verify(path, digests[path.name])


def _present(model: Any, layers: dict[str, Any]) -> dict[str, Any]:
    """Saved entries of each layer, by the name of the attention module in this model.

    Names are matched with and without the prefix that a model with a head puts before those of its base model.
    """
    modules, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    candidates = [layers, {prefix + name: x for name, x in layers.items()}]
    candidates.append({name.removeprefix(prefix): x for name, x in layers.items()})
    best = max(candidates, key=lambda names: len(modules.intersection(names)))
    if not modules.intersection(best):
        raise ValueError(f"{type(model).__name__} has none of the layers that config.json names: {', '.join(layers)}")
    return {name: settings for name, settings in best.items() if name in modules}


@contextmanager
def _drawing() -> Iterator[None]:
    """Draw weights on the CPU in float32, and set generators back: transformers loads on "meta" in another dtype."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def _layer(model: nn.Module, name: str, *, mechanism: str, unchanged: bool, **shape: int) -> Any:
    """A layer's mechanism, its weights drawn and not yet loaded."""
    from fast_attention.integrations import relative
    from fast_attention.integrations.attention import Swapped

    parameter = next(model.get_submodule(name).parameters())
    positions = relative.of(model, name)
    bound = relative.bound(catalogue.parse(mechanism), Shape(**shape), positions)
    return Swapped(bound.to(device=parameter.device, dtype=parameter.dtype), unchanged=unchanged, positions=positions)


fresh.guard()
