"""``fast-attention list``: the mechanisms with what they can do, or all about one."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    from fast_attention import catalogue
    from fast_attention.known_names import known
    from fast_attention.lab import inputs, tables, verdicts
    from fast_attention.mechanism import Mixer


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="A mechanism, ours or as a paper calls it (Performer), for all about it.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the mechanisms with what they can do, or show all about one."""
    meant = known(name) if name else None
    if meant and not as_json:
        print(f"{meant}\n")
    if name:
        chosen = inputs.mechanisms([meant.write if meant else catalogue.own_name(name) or name])
    else:
        chosen = [catalogue.default(each) for each in catalogue.names()]
    if as_json:
        print(json.dumps([_as_json(mechanism) for mechanism in chosen], indent=1))
    elif name:
        for mechanism in chosen:
            _detail(mechanism)
    else:
        tables.show(_catalogue(chosen))
        print("\nOther names (Performer, Longformer, Mamba ...): fast-attention list NAME")


def _catalogue(chosen: list[Any]) -> tables.Table:
    """The mechanisms with what they can do."""
    rows = []
    for mechanism in chosen:
        traits = mechanism.traits
        weights = "learned" if traits.learned else "random" if traits.random else "-"
        yes = ["yes" if granted else "-" for granted in (traits.causal, traits.padding, traits.cross)]
        does = [traits.cost, traits.inputs, *yes, traits.memory or "-"]
        rows.append([type(mechanism).__name__, *does, weights, traits.paper])
    heads = ["mechanism", "cost", "reads", "causal", "padding", "cross", "decodes", "weights", "source"]
    return tables.Table(heads, rows, left=range(1, len(heads)))


def _as_json(mechanism: Any) -> dict[str, Any]:
    """A mechanism for JSON."""
    values = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
    plain = int | float | str | None
    return {
        "name": type(mechanism).__name__,
        "expression": repr(mechanism),
        "kind": "mixer" if isinstance(mechanism, Mixer) else "attention",
        "settings": {key: value if isinstance(value, plain) else repr(value) for key, value in values.items()},
        "traits": asdict(mechanism.traits),
    }


def _detail(mechanism: Any) -> None:
    """Print all about a mechanism."""
    traits = mechanism.traits
    print(f"{mechanism!r}\n\n{inspect.getdoc(type(mechanism))}\n")
    rows = {"formula": traits.formula, "source": traits.paper, "cost": traits.cost, "error": verdicts.kind(mechanism)}
    rows["settings"] = ", ".join(f"{f.name}={getattr(mechanism, f.name)!r}" for f in fields(mechanism)) or "none"
    rows["cannot"] = ", ".join(verdicts.cannot(mechanism)) or "-"
    declared = {key: value for key, value in asdict(traits).items() if key not in (*rows, "paper")}
    rows["traits"] = ", ".join(f"{key}={value!r}" for key, value in declared.items())
    for title, words in rows.items():
        print(f"{title + ':':<10}{words}")
