"""``fast-attention check``: runs the laws on an attention or a whole model, from anywhere."""

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
    from fast_attention import catalogue, conformance
    from fast_attention.integrations import swap
    from fast_attention.lab import inputs, loading, tables
    from fast_attention.lab.inputs import InputError


def check_command(
    target: Annotated[
        str,
        typer.Argument(help=f"A mechanism; package.module:factory for a third-party attention; or a model: {KINDS}."),
    ],
    mechanism: Annotated[str | None, typer.Option(help="Of a model: swap this in before.")] = None,
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
) -> int:
    """Test an attention or a whole model against the laws: causality, padding, decoding. Exit code 1: one is broken.

    Of a model, a broken law names the layer.

    [dim]fast-attention check "FavorPlus(num_features=64)"[/dim]
    [dim]fast-attention check MODEL_DIR --mechanism LinearAttention[/dim]
    """
    where = inputs.device(device)
    with inputs.refusing():
        if _is_attention(target):
            if mechanism is not None:
                raise InputError(f"--mechanism is swapped into a model, and {target} is none")
            sys.path.insert(0, os.getcwd())
            report = conformance.check(conformance.resolve(target), device=str(where))
        else:
            model = loading.load(target)
            if mechanism is not None:
                print(swap(model, inputs.mechanism(mechanism)), file=sys.stderr)
            report = conformance.check_model(model.to(where))
    if as_json:
        print(json.dumps([asdict(finding) for finding in report.findings], indent=1))
    else:
        tables.show(_laws(report))
    return 1 if report.broken else 0


def _is_attention(target: str) -> bool:
    """Whether a name means a mechanism, which begins with a capital, or a factory; a path that exists is a model."""
    name = target.split("(")[0].strip()
    named = (name.isidentifier() and name[0].isupper()) or catalogue.elsewhere(name) != ""
    return not Path(target).exists() and (":" in target or named)


def _laws(report: conformance.LawReport) -> tables.Table:
    """Results of conformance, law by law."""
    kinds, rows = {"kept": "fast", "broken": "broken", "not claimed": "pale"}, []
    for each in report.findings:
        sizes = ["", ""] if each.status == "not claimed" else [f"{each.size:.1e}", f"{each.limit:.0e}"]
        rows.append([each.law, tables.Value(each.status, kinds[each.status]), *sizes, each.detail])
    return tables.Table(["law", "found", "size", "limit", "detail"], rows, left=(1, 4), title=report.subject)
