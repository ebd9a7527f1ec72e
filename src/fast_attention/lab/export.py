"""``fast-attention export``: writes a model for ONNX Runtime or torch.export, checked at other lengths first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fast_attention import files
from fast_attention.lab.options import MODEL, at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention import exporting
    from fast_attention.lab import inputs, loading, progress
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.open_model import OpenModel, opened
    from fast_attention.lab.refusals import first_line
    from fast_attention.lab.tables import Table, Value, show
    from fast_attention.mechanism import Unsupported

TOLERANCE = 1e-4  # of the largest output: float32 through a dozen layers, summed in another order
LENGTHS = (2, 5, 16, 37, 64, 100, 300)
TRACED = 24


class Trial(NamedTuple):
    """One batch through the model and through the file."""

    batch: int
    length: int
    difference: float


class Disagreement(Exception):
    """Raised where the file computes something else than the model."""


def export_command(
    name: Annotated[str, MODEL],
    as_onnx: Annotated[bool, typer.Option("--onnx", help="For ONNX Runtime; otherwise for torch.export.load.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file. Default: model.onnx or model.pt2 in the model's folder, or here.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help=f"Tokens of the example that is traced. Default: {TRACED} or less.")
    ] = None,
    opset: Annotated[int | None, typer.Option(min=18, help="Version of ONNX's operators. Default: torch's.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference from the model, as a fraction of its largest output.")
    ] = TOLERANCE,
) -> int:
    """Export a model with an open batch and length; the file is run at other lengths before it gets its name.

    It is written in float32, and nothing is written where it disagrees with the model (exit code 1).
    """
    suffix = ".onnx" if as_onnx else ".pt2"
    path = (Path(name) if Path(name).is_dir() else Path()) / f"model{suffix}" if out is None else out
    _refuse(path, suffix, as_onnx, opset)
    try:
        model = opened(loading.load(name, head="saved"))
        length = min(TRACED, model.longest or TRACED) if length is None else length
        if model.longest is not None and length > model.longest:
            raise InputError(f"--length {length}: the model takes at most {model.longest} tokens")
        with files.atomic_group(path) as draft, progress.counted(1 + len(LENGTHS)) as watch:
            watch("tracing")
            if as_onnx:
                exporting.onnx(model.module, model.draw(2, length), draft, model.open_sizes, opset=opset)
            else:
                exporting.save(model.module, model.draw(2, length), draft, model.open_sizes)
            trials = _trials(model, draft, watch)
            show(_differences(trials, model.tokens, tolerance))
            if max(trial.difference for trial in trials) > tolerance:
                raise Disagreement
    except Disagreement:
        print(f"fast-attention: the file disagrees with the model; {path} was not written", file=sys.stderr)
        return 1
    except Unsupported as error:
        raise InputError(str(error)) from error
    print(f"{path}: reads {', '.join(model.open_sizes)}; {path.stat().st_size / 1e6:,.1f} MB")
    return 0


def _refuse(path: Path, suffix: str, as_onnx: bool, opset: int | None) -> None:
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


def _trials(model: OpenModel, draft: Path, watch: Callable[[str], None]) -> list[Trial]:
    """Compare the file with the model, at batches of 1, 2, 3, 1 ... and at every length the model takes."""
    try:
        run = exporting.load(draft)
    except Exception as error:  # in onnxruntime's own types
        raise InputError(f"{draft.name} cannot be run, perhaps for its --opset: {first_line(error)}") from error
    lengths = [n for n in LENGTHS if model.longest is None or n <= model.longest] if model.tokens else [0, 0, 0]
    trials = []
    for i, length in enumerate(lengths):
        watch(f"checking {length:,} tokens")
        example = model.draw(1 + i % 3, length)
        with torch.no_grad():
            expected = model.module(**example)
        trials.append(Trial(1 + i % 3, length, exporting.difference(expected, run(example)[0])))
    return trials


def _differences(trials: list[Trial], tokens: bool, tolerance: float) -> Table:
    """The trials as a table."""
    rows = []
    for trial in trials:
        difference = Value(f"{trial.difference:.1e}", "fast" if trial.difference <= tolerance else "broken")
        rows.append([str(trial.batch), *[str(trial.length)] * tokens, difference])
    heads = ["batch", *["tokens"] * tokens, f"difference (at most {tolerance:.0e} of the largest output)"]
    return Table(heads, rows)
