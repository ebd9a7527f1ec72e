"""``fast-attention check``: an attention or a whole model, from anywhere, against the laws."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_attention.lab import options
from fast_attention.lab.options import KINDS, at_work

if TYPE_CHECKING or at_work():
    from fast_attention import conformance
    from fast_attention.integrations import swap
    from fast_attention.known_names import known
    from fast_attention.lab import inputs, loading, own, tables
    from fast_attention.lab.inputs import InputError
    from fast_attention.mechanism import Unsupported
    from fast_attention.nn.models import Model


def check_command(
    subject: Annotated[
        str,
        typer.Argument(help=f"A mechanism; package.module:factory for a third-party attention; or a model: {KINDS}."),
    ],
    mechanism: Annotated[str | None, typer.Option(help="Of a model: swap this in before.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: options.AsJson = False,
) -> int:
    """Test an attention or a whole model against the laws: causality, padding, decoding. Exit code 1: one is broken.

    Of a model, a broken law names the layer.

    [dim]fast-attention check "FavorPlus(num_features=64)"[/dim]
    [dim]fast-attention check MODEL_DIR --mechanism LinearAttention[/dim]
    """
    where = inputs.device(device)
    try:
        if _is_attention(subject):
            if mechanism is not None:
                raise InputError(f"--mechanism is swapped into a model, and {subject} is none")
            sys.path.insert(0, os.getcwd())
            found = conformance.check(conformance.resolve(subject), device=str(where))
        else:
            model = loading.load(subject)
            if mechanism is not None:
                wanted = inputs.mechanisms([mechanism])[0]
                done = own.exchange(model, wanted) if isinstance(model, Model) else swap(model, wanted)
                print(done, file=sys.stderr)
            found = conformance.check_model(model.to(where))
    except (ValueError, Unsupported) as error:
        raise InputError(str(error)) from error
    if as_json:
        print(json.dumps([asdict(finding) for finding in found.findings], indent=1))
    else:
        tables.show(_laws(found))
    return 1 if found.broken else 0


def _is_attention(subject: str) -> bool:
    """Whether this means a mechanism, which begins with a capital, or a factory; what lies here is a model."""
    name = subject.split("(")[0].strip()
    named = name.isidentifier() and (name[0].isupper() or known(name) is not None)
    return not Path(subject).exists() and (":" in subject or named)


def _laws(found: conformance.Report) -> tables.Table:
    """What conformance found, law by law."""
    kinds, rows = {"kept": "fast", "broken": "broken", "not claimed": "pale"}, []
    for each in found.findings:
        sizes = ["", ""] if each.status == "not claimed" else [f"{each.size:.1e}", f"{each.limit:.0e}"]
        rows.append([each.law, tables.Value(each.status, kinds[each.status]), *sizes, each.detail])
    return tables.Table(["law", "found", "size", "limit", "detail"], rows, left=(1, 4), title=found.subject)
