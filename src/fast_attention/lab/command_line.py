"""The command line itself: how arguments are read, and what is printed when a command fails."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fast_attention import __version__
from fast_attention.lab import refusals
from fast_attention.lab.commands import COMMANDS

MANY = ("--mechanism", "--mechanisms", "--lengths")
IMPORT = "--import"
_UsageError: Any = typer.BadParameter.__mro__[1]


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. What cannot be carried out is one line on stderr."""
    first, rest = _split(arguments)
    try:
        return _app()(args=[*first, *_repeat(rest)], prog_name="fast-attention", standalone_mode=False) or 0
    except _UsageError as error:
        command_path = error.ctx.command_path if error.ctx else "fast-attention"
        return refusals.refuse(2, f"{error.format_message()} (see {command_path} --help)")
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        known = refusals.refusal(error)
        if known is None:
            raise
        return refusals.refuse(*known)


class _Command(TyperCommand):
    """A command whose options are given once each, but for those that take several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that is given twice, of which only one would count."""
        order: list[Any] = self.make_parser(ctx).parse_args([*args])[2]
        for option in order:
            if order.count(option) > 1 and not getattr(option, "multiple", True):
                names = [*option.opts, *option.secondary_opts]
                given = [_value(args, i) for i, word in enumerate(args) if word.split("=")[0] in names]
                raise typer.BadParameter(f"it is given twice, {' and '.join(given)}: leave one out", ctx, option)
        return super().parse_args(ctx, args)


def _value(args: list[str], i: int) -> str:
    """Value of an option's word, or the word itself where it is a flag."""
    name, has_value, value = args[i].partition("=")
    following = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else name
    return value if has_value else following


def _app() -> typer.Typer:
    """Build the application of all commands; none of their libraries is imported for that."""
    app = typer.Typer(
        help="Every fast attention mechanism: what it costs, how far it is from exact attention, and what it can do.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_any_command)
    for name, command in COMMANDS.items():
        app.command(name, cls=_Command)(command)
    return app


def _version(asked: bool) -> None:
    if asked:
        print(f"fast-attention {__version__}")
        raise typer.Exit


def _import(modules: list[str]) -> None:
    if modules and os.getcwd() not in sys.path:  # as ``python -m`` has it
        sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module does
            raise typer.BadParameter(f"{name}: {type(error).__name__}: {error}") from error


def _any_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_version, is_eager=True)
    ] = False,
    modules: Annotated[
        list[str],
        typer.Option(IMPORT, metavar="MODULE", help="A module whose classes expressions may name.", callback=_import),
    ] = [],  # noqa: B006
) -> None:
    """The options of all commands."""


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of all commands, wherever they were written, and the rest."""
    first, rest, words = [], [], iter(arguments)
    for word in words:
        (first if word.split("=")[0] == IMPORT else rest).append(word)
        if word == IMPORT:
            first += [value for value in [next(words, None)] if value is not None]
    return first, rest


def _repeat(arguments: list[str]) -> list[str]:
    """Write ``--lengths 128 256`` as ``--lengths 128 --lengths 256``: these take every value up to an option."""
    written, option, fresh = [], "", False
    for word in arguments:
        if word.startswith("--"):
            option = word if word in MANY else ""
            fresh = True
        elif option and not fresh:
            written.append(option)
        written.append(word)
        fresh = word == option
    return written
