"""``fast-attention tasks``: lists what a model can be trained on."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    from fast_attention import tasks
    from fast_attention.lab import inputs
    from fast_attention.lab.tables import Table, show
    from fast_attention.tasks.task import Task


def tasks_command(
    name: Annotated[str | None, typer.Argument(help="A task's name or expression, for all about it.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List what a model can be trained on, with settings, or show all about one task.

    [dim]fast-attention tasks tag[/dim]
    """
    classes = {tasks.kind(each).__name__: each for each in tasks.names()}
    word = name and name.split("(")[0]  # the name, or what stands before the brackets of an expression
    with inputs.refusing():
        kinds = [tasks.kind(classes.get(each, each)) for each in ([word] if word else tasks.names())]
    if as_json:
        print(json.dumps([_described(kind) for kind in kinds], indent=1))
    elif name:
        _detail(kinds[0])
    else:
        show(_table(kinds))
        print('\nSettings: fast-attention tasks NAME. A setting is given in brackets: train "Copy(words=15)"')


def _described(kind: type[Task]) -> dict[str, Any]:
    held = {field.name: None if field.default is MISSING else field.default for field in fields(kind)}  # type: ignore[arg-type]
    return {
        "name": kind.name,
        "class": kind.__name__,
        "about": _first(kind),
        "causal": kind.causal,
        "metric": kind.metric,
        "file": kind.takes or None,
        "file needed": tasks.wants_file(kind),
        "settings": held,
    }


def _usage(kind: type[Task]) -> str:
    if not kind.takes:
        return kind.name
    return f"{kind.name} FILE" if tasks.wants_file(kind) else f"{kind.name} [FILE]"


def _first(kind: type[Task]) -> str:
    """The first sentence of a task's docstring."""
    plain = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("``", "")
    return plain if plain.endswith(".") else f"{plain}."


def _settings(kind: type[Task]) -> list[str]:
    return [
        field.name if field.default is MISSING else f"{field.name}={field.default!r}"
        for field in fields(kind)  # type: ignore[arg-type]
    ]


def _table(kinds: list[type[Task]]) -> Table:
    rows = [[_usage(kind), _first(kind), kind.metric, ", ".join(_settings(kind))] for kind in kinds]
    return Table(("train", "what is to be learnt", "metric", "settings"), rows, left=(1, 2, 3))


def _detail(kind: type[Task]) -> None:
    print(f"{kind.__name__}({', '.join(_settings(kind))})\n\n{inspect.getdoc(kind)}\n")
    order = "a decoder: outputs see the past only" if kind.causal else "an encoder, unless the model is causal"
    for title, words in {"train": _usage(kind), "metric": kind.metric, "model": order}.items():
        print(f"{title + ':':<8}{words}")
