"""The command line itself: which commands there are, how arguments are read, and what is said when one fails.

Nothing heavy is imported here: what a command needs is, once it is to be carried out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextvars import copy_context
from typing import Annotated, Any, NamedTuple

import typer

from fast_attention import __version__
from fast_attention.lab import options, refusals

MANY = ("--mechanism", "--mechanisms", "--lengths", "--memory-lengths")
EVERYWHERE = "--max-bytes"
HELP = ("-h", "--help")
LONGEST = 2000  # characters of what is said when a command fails
_UsageError: Any = typer.BadParameter.__mro__[1]


class Command(NamedTuple):
    """Where a command's function stands, and the first sentence of what it says of itself."""

    module: str
    function: str
    words: str


COMMANDS = {
    "compare": Command(
        "commands",
        "compare_command",
        "Compare mechanisms with exact attention: error on a model's real tensors, time, memory, crossover length.",
    ),
    "bench": Command(
        "bench.command",
        "bench_command",
        "Time, memory and percent of the machine's limits, beside exact attention and published packages.",
    ),
    "train": Command(
        "learning.train",
        "train_command",
        "Train a small model of any mechanism; SIGTERM and Ctrl-C save and end it, --resume goes on to the bit.",
    ),
    "tasks": Command(
        "learning.listing",
        "tasks_command",
        "List what a model can be trained on, with settings, or tell all about one task.",
    ),
    "generate": Command(
        "learning.generate",
        "generate_command",
        "Let a trained decoder continue a prompt, token by token as they come.",
    ),
    "study": Command(
        "study.command",
        "study_command",
        "Train several mechanisms on one task: what each learns, how fast, in how much memory.",
    ),
    "convert": Command(
        "converting.command",
        "convert_command",
        "Make a trained model's attention fast and win its quality back: swap, transfer, choose layers, fine-tune.",
    ),
    "maps": Command(
        "maps.command",
        "maps_command",
        "Draw every head's attention map before and after a mechanism is put in, and say how far apart they are.",
    ),
    "export": Command(
        "export",
        "export_command",
        "Export a model with an open batch and length; the file is run at other lengths before it gets its name.",
    ),
    "advise": Command(
        "advice.command",
        "advise_command",
        "Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep "
        "exact.",
    ),
    "list": Command("commands", "list_command", "List the mechanisms with what they can do, or tell all about one."),
    "check": Command(
        "check",
        "check_command",
        "Test an attention or a whole model against the laws: causality, padding, decoding. Exit code 1: one is "
        "broken.",
    ),
}


def prepare(arguments: list[str]) -> None:
    """Import what the command that is asked for needs, unless it is only asked what it takes, or cannot be read."""
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
    """Run one command; the exit code. What cannot be had is said in one line on stderr."""
    try:
        app, words = _app(arguments), _repeat(_ahead(arguments))
        return copy_context().run(app, args=words, prog_name="fast-attention", standalone_mode=False) or 0
    except _UsageError as error:
        return refuse(2, f"{error.format_message()} (see fast-attention --help)")
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        known = refusals.told(error)
        if known is None:
            raise
        return refuse(*known)


def refuse(code: int, message: str) -> int:
    """Say why, if there is anything to say; the exit code."""
    words = " ".join(message.split())
    if len(words) > LONGEST:  # it holds what was given, at any length
        words = f"{words[: LONGEST // 2]} ... {words[-LONGEST // 2 :]}"
    if words:
        print(f"fast-attention: {words}", file=sys.stderr)
    return code


def _app(arguments: list[str]) -> typer.Typer:
    """All commands by name and first sentence; the one that is asked for with all it takes."""
    asked = _asked(arguments)
    app = typer.Typer(
        help="Every fast attention mechanism: what it costs, how far it is from exact attention, and what it can do.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": [*HELP]},
    )
    app.callback()(_any_command)
    for name, command in COMMANDS.items():
        if name == asked:
            app.command(name)(options.taken(_module(command), command.function))
        else:
            app.command(name, help=command.words)(lambda: None)
    return app


def _asked(arguments: list[str]) -> str:
    return next((word for word in _ahead(arguments) if word in COMMANDS), "")


def load(command: Command) -> Callable[..., Any]:
    """A command's function."""
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


def _any_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_version, is_eager=True)
    ] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="The most to read of a file or folder, unpacked. Default: 2**30.", callback=_limit),
    ] = None,
) -> None:
    """What all commands share."""


def _ahead(arguments: list[str]) -> list[str]:
    """What belongs to all commands stands before the command, wherever it was written."""
    first, rest, given = [], [], iter(arguments)
    for word in given:
        is_first = word.split("=")[0] == EVERYWHERE
        (first if is_first else rest).append(word)
        if word == EVERYWHERE:
            first += [value for value in [next(given, None)] if value is not None]
    return [*first, *rest]


def _repeat(arguments: list[str]) -> list[str]:
    """``--lengths 128 256`` as ``--lengths 128 --lengths 256``: these take every value up to the next option."""
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
