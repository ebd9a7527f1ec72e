"""Prepares a model for export with an open batch and open lengths, and compares the file with the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from fast_attention import exporting
from fast_attention.integrations.probing import probe_inputs
from fast_attention.lab import inputs
from fast_attention.lab.inputs import InputError
from fast_attention.lab.refusals import first_line
from fast_attention.lab.tables import Table, Value
from fast_attention.mechanism import Unsupported
from fast_attention.nn.positions import first_position

LENGTHS = (2, 5, 16, 37, 64, 100, 300)
ROWS = 1024  # the largest batch of an exported program


class OpenModel(NamedTuple):
    """A model whose ``forward`` takes tensors by name and returns one tensor."""

    module: nn.Module
    draw: Callable[[int, int], dict[str, Tensor]]  # batch, tokens -> inputs, the first of several rows padded
    open_sizes: dict[str, dict[int, Any]]
    longest: int | None  # tokens; None: it knows no limit
    tokens: bool  # whether it reads tokens, of which there may be any number


class _FirstOutput(nn.Module):
    """The first output of a model, logits or last vectors, whose inputs are named as torch.export needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None, pixel_values: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids,
                 "pixel_values": pixel_values}  # fmt: skip
        return self.model(**{name: x for name, x in named.items() if x is not None}, **self.options)[0]


def opened(model: Any) -> OpenModel:
    """A model of transformers, in float32 and evaluation mode.

    Raises:
        Unsupported: It reads neither tokens nor pixels, or one token at most.
    """
    model = model.float().eval()
    probe = {name: x for name, x in probe_inputs(model).items() if isinstance(x, Tensor)}
    batch = Dim("batch", min=1, max=ROWS)
    if "pixel_values" in probe:
        shape = probe["pixel_values"].shape[1:]

        def pixels(rows: int, length: int) -> dict[str, Tensor]:
            return {"pixel_values": torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))}

        return OpenModel(_FirstOutput(model), pixels, {"pixel_values": {0: batch}}, None, False)
    config = model.config.get_text_config()
    longest, vocabulary = getattr(config, "max_position_embeddings", None), config.vocab_size
    longest = None if longest is None else int(longest) - first_position(model)
    if longest is not None and longest < 2:
        raise Unsupported(f"{type(model).__name__} takes {longest} tokens at most: no length can be left open")
    names = ["input_ids", *["attention_mask"] * ("attention_mask" in inspect.signature(model.forward).parameters)]
    sizes = {name: {0: batch, 1: Dim("length", min=2, max=longest)} for name in names}
    if "decoder_input_ids" in probe:
        sizes["decoder_input_ids"] = {0: batch, 1: Dim("target_length", min=2, max=longest)}

    def draw(rows: int, length: int) -> dict[str, Tensor]:
        shorter = max(2, length // 2 + 1)
        inputs = {name: _numbers(rows, shorter if "decoder" in name else length, vocabulary) for name in sizes}
        if "attention_mask" in inputs:
            mask = torch.ones(rows, length, dtype=torch.long)
            mask[: int(rows > 1), length - length // 3 :] = 0  # of several rows the first is padded
            inputs["attention_mask"] = mask
        return inputs

    return OpenModel(_FirstOutput(model), draw, sizes, longest, True)


def _numbers(batch: int, length: int, kinds: int) -> Tensor:
    """Token numbers; those below 5 stand for padding and the like in most vocabularies."""
    generator = torch.Generator().manual_seed(batch * 4096 + length)
    return torch.randint(min(5, kinds - 1), kinds, (batch, length), generator=generator)


def refuse(path: Path, suffix: str, as_onnx: bool, opset: int | None) -> None:
    """Refuse options that contradict each other, and an export to ONNX without its packages."""
    if path.suffix != suffix:
        other = "give --onnx" if path.suffix == ".onnx" else f"name a file that ends in {suffix}"
        raise InputError(f"--out {path}: {other}")
    if path.is_dir():
        raise InputError(f"--out {path}: a folder has that name: name a file")
    if opset is not None and not as_onnx:
        raise InputError("--opset is ONNX's: give --onnx too")
    for module in ("onnx", "onnxscript", "onnxruntime") if as_onnx else ():
        inputs.need(module, "onnx", "export --onnx")


def trials(model: OpenModel, draft: Path, watch: Callable[[str], None]) -> list[tuple[int, int, float]]:
    """Batches, tokens and the difference of file and model, at batches of 1, 2, 3, 1 ... and every length it takes."""
    try:
        run = exporting.load(draft)
    except Exception as error:  # in onnxruntime's own types
        raise InputError(f"{draft.name} cannot be run, perhaps for its --opset: {first_line(error)}") from error
    lengths = [n for n in LENGTHS if model.longest is None or n <= model.longest] if model.tokens else [0, 0, 0]
    done = []
    for i, length in enumerate(lengths):
        watch(f"checking {length:,} tokens")
        example = model.draw(1 + i % 3, length)
        with torch.no_grad():
            expected = model.module(**example)
        done.append((1 + i % 3, length, exporting.difference(expected, run(example)[0])))
    return done


def table(trials: list[tuple[int, int, float]], tokens: bool, tolerance: float) -> Table:
    """The trials as a table."""
    rows = []
    for batch, length, difference in trials:
        shown = Value(f"{difference:.1e}", "fast" if difference <= tolerance else "broken")
        rows.append([str(batch), *[str(length)] * tokens, shown])
    heads = ["batch", *["tokens"] * tokens, f"difference (at most {tolerance:.0e} of the largest output)"]
    return Table(heads, rows)
