"""The command line itself: which commands there are, how arguments are read, and what is printed when one fails.

Nothing heavy is imported here: a command's libraries are imported once its arguments have been read.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any, NamedTuple

import typer

from fast_attention import __version__
from fast_attention.lab import options, refusals

MANY = ("--mechanism", "--mechanisms", "--lengths")
IMPORT = "--import"
_UsageError: Any = typer.BadParameter.__mro__[1]


class Command(NamedTuple):
    """A command: the module of its function, which is called ``NAME_command``, and its docstring's first line."""

    module: str
    words: str


COMMANDS = {
    "list": Command("listing", "List the mechanisms with what they can do, or show all about one."),
    "advise": Command(
        "advise",
        "Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep "
        "exact.",
    ),
    "compare": Command(
        "commands",
        "Compare mechanisms with exact attention: error on a model's real tensors, time, memory, crossover length.",
    ),
    "check": Command(
        "check",
        "Test an attention or a whole model against the laws: causality, padding, decoding. Exit code 1: one is "
        "broken.",
    ),
    "convert": Command(
        "convert",
        "Make a trained model's attention fast and win its quality back: swap, transfer, choose layers, fine-tune.",
    ),
    "export": Command(
        "export",
        "Export a model with an open batch and length; the file is run at other lengths before it gets its name.",
    ),
}
_CHECKOUT = "in a checkout of the repository"
GONE = {  # commands of before, and what took their place
    "train": f"{_CHECKOUT}, python -m experiments.train",
    "study": f"{_CHECKOUT}, python -m experiments.study",
    "generate": f"{_CHECKOUT}, python -m experiments.generate",
    "tasks": f"{_CHECKOUT}, experiments/tasks.py has the tasks of python -m experiments.train",
    "reproduce": f"{_CHECKOUT}, python -m experiments.reproductions.NAME",
    "bench": f"{_CHECKOUT}, python -m benchmarks.bench",
    "maps": 'the gallery page "attention maps" draws them by fast_attention.attention_rows',
    "--max-bytes": "files of up to 1 GiB are read, unpacked",
    "--transfer-minutes": "fast-attention convert trains a mechanism into a model",
}


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. What cannot be carried out is one line on stderr."""
    first, rest = _split(arguments)
    name = next((word for word in rest if not word.startswith("-")), "")
    gone = name if name in GONE else next((word for word in (w.split("=")[0] for w in rest) if word in GONE), "")
    if gone:
        return refusals.refuse(2, f"{gone} is gone: {GONE[gone]}")
    try:
        app = _app(name or _completed())
        return app(args=[*first, *_repeat(rest)], prog_name="fast-attention", standalone_mode=False) or 0
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "fast-attention"
        return refusals.refuse(2, f"{error.format_message()} (see {command} --help)")
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        known = refusals.refusal(error)
        if known is None:
            raise
        return refusals.refuse(*known)


def _app(asked: str) -> typer.Typer:
    """Build the application: all commands by name and first sentence, the one to run or complete with its options."""
    app = typer.Typer(
        help="Every fast attention mechanism: what it costs, how far it is from exact attention, and what it can do.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_any_command)
    for name, command in COMMANDS.items():
        if name == asked:
            app.command(name)(options.taken(f"fast_attention.lab.{command.module}", f"{name}_command"))
        else:
            app.command(name, help=command.words)(lambda: None)
    return app


def _completed() -> str:
    """The command on the line that a shell asks to complete; its script puts the words into variables."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    asks = "_FAST_ATTENTION_COMPLETE" in os.environ
    return next((word for word in words.split()[1:] if asks and word in COMMANDS), "")


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
