"""Shows what mechanisms can do, all about one, and what the laws found."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from fast_attention.lab import verdicts
from fast_attention.lab.tables import Table, Value
from fast_attention.mechanism import Mixer

if TYPE_CHECKING:
    from fast_attention.conformance import LawReport


def table(chosen: list[Any]) -> Table:
    """The mechanisms with what they can do."""
    rows = []
    for mechanism in chosen:
        traits = mechanism.traits
        weights = "learned" if traits.learned else "random" if traits.random else "-"
        yes = ["yes" if granted else "-" for granted in (traits.causal, traits.padding, traits.cross)]
        does = [traits.cost, traits.inputs, *yes, traits.memory or "-"]
        rows.append([type(mechanism).__name__, *does, weights, traits.paper])
    heads = ["mechanism", "cost", "reads", "causal", "padding", "cross", "decodes", "weights", "source"]
    return Table(heads, rows, left=range(1, len(heads)))


def as_json(mechanism: Any) -> dict[str, Any]:
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


def detail(mechanism: Any) -> str:
    """All about a mechanism."""
    traits = mechanism.traits
    rows = {"formula": traits.formula, "source": traits.paper, "cost": traits.cost, "error": verdicts.kind(mechanism)}
    rows["settings"] = ", ".join(f"{f.name}={getattr(mechanism, f.name)!r}" for f in fields(mechanism)) or "none"
    rows["cannot"] = ", ".join(verdicts.cannot(mechanism)) or "-"
    declared = {key: value for key, value in asdict(traits).items() if key not in (*rows, "paper")}
    rows["traits"] = ", ".join(f"{key}={value!r}" for key, value in declared.items())
    lines = [f"{title + ':':<10}{words}" for title, words in rows.items()]
    return "\n".join([f"{mechanism!r}\n\n{inspect.getdoc(type(mechanism))}\n", *lines])


def laws(report: LawReport) -> Table:
    """Findings, law by law."""
    kinds, rows = {"kept": "fast", "broken": "broken", "not claimed": "pale"}, []
    for each in report.findings:
        sizes = ["", ""] if each.status == "not claimed" else [f"{each.size:.1e}", f"{each.limit:.0e}"]
        rows.append([each.law, Value(each.status, kinds[each.status]), *sizes, each.detail])
    return Table(["law", "found", "size", "limit", "detail"], rows, left=(1, 4), title=report.subject)
