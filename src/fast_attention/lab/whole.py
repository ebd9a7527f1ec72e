"""``fast-attention check-model``: a whole model, from anywhere, against the laws."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fast_attention.lab.options import MODEL, at_work

if TYPE_CHECKING or at_work():
    from fast_attention import conformance
    from fast_attention.integrations import swap
    from fast_attention.lab import inputs, loading, own, tables
    from fast_attention.lab.inputs import InputError
    from fast_attention.mechanism import Unsupported
    from fast_attention.nn.models import Model


def check_model_command(
    name: Annotated[str, MODEL],
    mechanism: Annotated[str | None, typer.Option(help="Swap this in before.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Test a whole model against the laws; a broken one names the layer. Exit code 1: one is broken."""
    model = loading.load(name)
    try:
        if mechanism is not None:
            wanted = inputs.mechanisms([mechanism])[0]
            done = own.exchange(model, wanted) if isinstance(model, Model) else swap(model, wanted)
            print(done, file=sys.stderr)
        found = conformance.check_model(model.to(inputs.device(device)))
    except (ValueError, Unsupported) as error:
        raise InputError(str(error)) from error
    return told(found, as_json)


def told(found: conformance.Report, as_json: bool) -> int:
    """Print what the laws found; the exit code."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in found.findings], indent=1))
    else:
        tables.show(_laws(found))
    return 1 if found.broken else 0


def _laws(found: conformance.Report) -> tables.Table:
    """What conformance found, law by law."""
    kinds, rows = {"kept": "fast", "broken": "broken", "not claimed": "pale"}, []
    for each in found.findings:
        sizes = ["", ""] if each.status == "not claimed" else [f"{each.size:.1e}", f"{each.limit:.0e}"]
        rows.append([each.law, tables.Value(each.status, kinds[each.status]), *sizes, each.detail])
    return tables.Table(["law", "found", "size", "limit", "detail"], rows, left=(1, 4), title=found.subject)
