"""``fast-attention check-model``: a whole model, from anywhere, against the laws."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fast_attention import conformance
from fast_attention.integrations import from_pretrained, swap
from fast_attention.lab import inputs, tables
from fast_attention.lab.capture import quiet_transformers
from fast_attention.lab.inputs import InputError
from fast_attention.mechanism import Unsupported
from fast_attention.nn import saving


def load(folder: Path, *, headed: bool = False) -> Any:
    """A model of this library, a swapped one, or one of transformers' own, by what lies in its folder.

    Args:
        folder: The model's folder.
        headed: Load one of transformers' as the class that it was saved from, whatever its head returns; otherwise
            language models with their head, and of all others what lies below it.

    Raises:
        InputError: There is none, or it cannot be loaded.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("format") == saving.FORMAT:
            return saving.load(folder)
        transformers = quiet_transformers("loading a model")
        if (folder / "fast_attention.json").exists():
            return from_pretrained(folder)
        names = config.get("architectures") or []
        decodes = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
        kind = transformers.AutoModelForCausalLM if decodes else transformers.AutoModel
        if headed and names:
            kind = getattr(transformers, names[0], kind)
        return kind.from_pretrained(folder, local_files_only=True).eval()
    except FileNotFoundError as error:
        raise InputError(f"{folder}: {error.strerror}: {Path(error.filename or '').name}") from error
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: {error}") from error


def check_model_command(
    folder: Annotated[Path, typer.Argument(help="A model's folder: transformers', ours, or a swapped one.")],
    mechanism: Annotated[str | None, typer.Option(help="Swap this in before.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Test a whole model against the laws; a broken one names the layer. Exit code 1: one is broken."""
    model = load(folder)
    try:
        if mechanism is not None:
            print(swap(model, inputs.mechanisms([mechanism])[0]), file=sys.stderr)
        found = conformance.check_model(model.to(inputs.device(device)))
    except (ValueError, Unsupported) as error:
        raise InputError(str(error)) from error
    return told(found, as_json)


def told(found: conformance.Report, as_json: bool) -> int:
    """Print what the laws found; the exit code."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in found.findings], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(tables.laws(found))
    return 1 if found.broken else 0
