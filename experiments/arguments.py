"""Command lines of experiments and benchmarks, whose options are given once each."""

from __future__ import annotations

import argparse
from typing import Any


class _Once(argparse.Action):
    """Store a value; an option that is given twice, of which only one would count, is an error."""

    _seen: tuple[argparse.Namespace, Any] | None = None  # what is being filled, and what stood there first

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        shown = values if self.nargs != 0 else option
        if option is not None and self._seen is not None and self._seen[0] is namespace:
            parser.error(f"{option} is given twice, {self._seen[1]} and {shown}: leave one out")
        self._seen = namespace, shown
        self._store(parser, namespace, values, option)

    def _store(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any) -> None:
        setattr(namespace, self.dest, values)


class YesNo(_Once, argparse.BooleanOptionalAction):
    """``--name`` or ``--no-name``."""

    def _store(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any) -> None:
        argparse.BooleanOptionalAction.__call__(self, parser, namespace, values, option)


class Arguments(argparse.ArgumentParser):
    """A command line that refuses an option that is given twice; ``argparse`` takes the last one in silence."""

    def __init__(self, *args: Any, **about: Any) -> None:
        super().__init__(*args, **about)
        for name in (None, "store"):
            self.register("action", name, _Once)
