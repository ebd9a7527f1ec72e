"""The command line itself: which commands there are, how arguments are read, and what is printed when one fails.

Nothing heavy is imported here: what a command needs is, once it is to be carried out.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fast_attention import __version__
from fast_attention.lab import options, refusals

MANY = ("--mechanism", "--mechanisms", "--lengths", "--memory-lengths")
ANY_COMMAND = ("--max-bytes", "--import")
HELP = ("-h", "--help")
LONGEST = 2000  # characters of the message when a command fails
_UsageError: Any = typer.BadParameter.__mro__[1]


class Command(NamedTuple):
    """The module and the name of a command's function."""

    module: str
    function: str

    @property
    def words(self) -> str:
        """The first line of the function's docstring, read without importing its module."""
        source = Path(__file__).parent.joinpath(*self.module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        return next((ast.get_docstring(node) or "").split("\n")[0] for node in functions if node.name == self.function)


MODULES = {
    "compare": "compare", "bench": "bench.command", "train": "learning.train", "tasks": "learning.listing",
    "generate": "learning.generate", "study": "study.command", "convert": "converting.command",
    "export": "export", "advise": "advice.command", "list": "commands", "check": "check",
    "reproduce": "reproducing.command",
}  # fmt: skip
COMMANDS = {name: Command(module, f"{name}_command") for name, module in MODULES.items()}


def prepare(arguments: list[str]) -> None:
    """Import what a command needs, unless only its help is wanted or its arguments cannot be read."""
    if (name := _asked(arguments)) in COMMANDS and not {*HELP} & {*arguments} and _readable(name, arguments):
        load(COMMANDS[name])


def _readable(name: str, arguments: list[str]) -> bool:
    words, group = _repeat(_ahead(arguments)), typer.main.get_group(_app(arguments))
    try:
        group.commands[name].make_context(name, words[words.index(name) + 1 :])
    except _UsageError:
        return False  # ``run`` says why
    return True


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. What cannot be carried out is one line on stderr."""
    try:
        app, words = _app(_to_complete() or arguments), _repeat(_ahead(arguments))
        return copy_context().run(app, args=words, prog_name="fast-attention", standalone_mode=False) or 0
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "fast-attention"
        return refuse(2, f"{error.format_message()} (see {command} --help)")
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        known = refusals.refusal(error)
        if known is None:
            raise
        return refuse(*known)


def refuse(code: int, message: str) -> int:
    """Print why, if there is a message, and return the exit code."""
    words = " ".join(message.split())
    if len(words) > LONGEST:  # it holds what was given, at any length
        words = f"{words[: LONGEST // 2]} ... {words[-LONGEST // 2 :]}"
    if words:
        print(f"fast-attention: {words}", file=sys.stderr)
    return code


def _app(arguments: list[str]) -> typer.Typer:
    """Build the application: all commands by name and first sentence, the one to run or complete with its options."""
    asked = _asked(arguments or _completed())
    app = typer.Typer(
        help="Every fast attention mechanism: what it costs, how far it is from exact attention, and what it can do.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": [*HELP]},
    )
    app.callback()(_any_command)
    for name, command in COMMANDS.items():
        if name == asked:
            app.command(name)(options.taken(_module(command), command.function))
        else:
            app.command(name, help=None if asked else command.words)(lambda: None)
    return app


def _to_complete() -> list[str]:
    """Get the words on a shell's line, if a shell asks what may come next: its script puts them into variables."""
    if "_FAST_ATTENTION_COMPLETE" not in os.environ:
        return []
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


def _asked(arguments: list[str]) -> str:
    return next((word for word in _ahead(arguments) if word in COMMANDS), "")


def _completed() -> list[str]:
    """The words of a command line that a shell asks to complete; none where it asks nothing."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return words.split() if "_FAST_ATTENTION_COMPLETE" in os.environ else []


def load(command: Command) -> Callable[..., Any]:
    """Import a command's function."""
    return options.load(_module(command), command.function)


def _module(command: Command) -> str:
    return f"fast_attention.lab.{command.module}"


def _version(asked: bool) -> None:
    if asked:
        print(f"fast-attention {__version__}")
        raise typer.Exit


def _limit(size: int | None) -> None:
    if size is not None:
        importlib.import_module("fast_attention.data.reading").LIMIT.set(size)


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
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="The most to read of a file or folder, unpacked. Default: 2**30.", callback=_limit),
    ] = None,
    modules: Annotated[
        list[str],
        typer.Option(
            "--import", metavar="MODULE", help="A module whose classes expressions may name.", callback=_import
        ),
    ] = [],  # noqa: B006
) -> None:
    """The options of all commands."""


def _ahead(arguments: list[str]) -> list[str]:
    """Put the options of all commands before the command, wherever they were written."""
    first, rest, given = [], [], iter(arguments)
    for word in given:
        is_first = word.split("=")[0] in ANY_COMMAND
        (first if is_first else rest).append(word)
        if word in ANY_COMMAND:
            first += [value for value in [next(given, None)] if value is not None]
    return [*first, *rest]


def _repeat(arguments: list[str]) -> list[str]:
    """Write ``--lengths 128 256`` as ``--lengths 128 --lengths 256``: these take every value up to an option."""
    given, option, fresh = [], "", False
    for word in arguments:
        if word.startswith("--"):
            option = word if word in MANY else ""
            fresh = True
        elif option and not fresh:
            given.append(option)
        given.append(word)
        fresh = word == option
    return given
