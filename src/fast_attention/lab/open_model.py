"""Prepares a model for export with an open batch and open lengths: what it reads, and examples of any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from fast_attention.nn.bound import Bound
from fast_attention.nn.models import Model

ROWS = 1024  # the largest batch of an exported program


class OpenModel(NamedTuple):
    """A model whose ``forward`` takes tensors by name and returns one tensor."""

    module: nn.Module
    draw: Callable[[int, int], dict[str, Tensor]]  # batch, tokens -> inputs, the first of several rows padded
    open_sizes: dict[str, dict[int, Any]]
    longest: int | None  # tokens; None: it knows no limit
    tokens: bool  # whether it reads tokens, of which there may be any number


class _First(nn.Module):
    """The first of a model's outputs: logits, or the tokens' last vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.caches = "use_cache" in inspect.signature(model.forward).parameters

    def first(self, inputs: dict[str, Tensor | None]) -> Tensor:
        """Call the model without a cache, and without inputs that are None."""
        given = {name: x for name, x in inputs.items() if x is not None}
        return self.model(**given, use_cache=False)[0] if self.caches else self.model(**given)[0]


class _OfTokens(_First):
    """The first output of a model of tokens, whose inputs are named as torch.export needs them."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        return self.first(dict(zip(names, (input_ids, attention_mask, decoder_input_ids), strict=True)))


class _OfPixels(_First):
    """The first output of a model of pictures."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.first({"pixel_values": pixel_values})


def opened(model: nn.Module) -> OpenModel:
    """A model of this library or of transformers, in float32 and evaluation mode.

    Raises:
        Unsupported: It reads neither tokens nor pixels.
    """
    model = model.float().eval()
    return _library_model(model) if isinstance(model, Model) else _hugging_face(model)


def _library_model(model: Model) -> OpenModel:
    config = model.config
    mechanisms = [part.mechanism for part in model.modules() if isinstance(part, Bound)]
    names = ["tokens", *["key_mask"] * all(m.traits.padding for m in mechanisms)]

    def draw(batch: int, length: int) -> dict[str, Tensor]:
        inputs = {"tokens": _numbers(batch, length, config.vocab_size), "key_mask": _mask(batch, length)}
        return {name: inputs[name] for name in names}

    sizes = {0: _batch(), 1: _length("length", config.longest)}
    return OpenModel(model, draw, dict.fromkeys(names, sizes), config.longest, True)


def _hugging_face(model: Any) -> OpenModel:
    from fast_attention.integrations.probing import probe_inputs

    probe = {name: x for name, x in probe_inputs(model).items() if isinstance(x, Tensor)}
    batch, known = _batch(), inspect.signature(model.forward).parameters
    if "pixel_values" in probe:
        shape = probe["pixel_values"].shape[1:]

        def pixels(rows: int, length: int) -> dict[str, Tensor]:
            return {"pixel_values": torch.randn(rows, *shape, generator=_generator(rows))}

        return OpenModel(_OfPixels(model), pixels, {"pixel_values": {0: batch}}, None, False)
    config = model.config.get_text_config()
    longest, vocabulary = _longest(model), config.vocab_size
    sizes = {name: {0: batch, 1: _length("length", longest)} for name in ("input_ids", "attention_mask")}
    if "attention_mask" not in known:
        del sizes["attention_mask"]
    if "decoder_input_ids" in probe:
        sizes["decoder_input_ids"] = {0: batch, 1: _length("target_length", longest)}

    def draw(rows: int, length: int) -> dict[str, Tensor]:
        inputs = {name: _numbers(rows, length, vocabulary) for name in sizes}
        if "decoder_input_ids" in inputs:
            inputs["decoder_input_ids"] = _numbers(rows, max(2, length // 2 + 1), vocabulary)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = _mask(rows, length).long()
        return inputs

    return OpenModel(_OfTokens(model), draw, sizes, longest, True)


def _longest(model: nn.Module) -> int | None:
    """Tokens that a transformers model takes: the rows of a table less those that it keeps for padding."""
    config: Any = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    kept = [part.padding_idx + 1 for part in tables if isinstance(part, nn.Embedding) and part.padding_idx is not None]
    return None if positions is None else int(positions) - max(kept, default=0)


def _batch() -> Any:
    return Dim("batch", min=1, max=ROWS)


def _length(name: str, longest: int | None) -> Any:
    return Dim(name, min=2) if longest is None else Dim(name, min=2, max=longest)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _numbers(batch: int, length: int, kinds: int) -> Tensor:
    least = min(5, kinds - 1)  # numbers below stand for padding and the like in most vocabularies
    return torch.randint(least, kinds, (batch, length), generator=_generator(batch * 4096 + length))


def _mask(batch: int, length: int) -> Tensor:
    """The last third of the first of several rows is padding."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    if batch > 1:
        mask[0, length - length // 3 :] = False
    return mask
