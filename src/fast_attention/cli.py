"""The command ``fast-attention``: errors are one line and an exit code, never a traceback."""

from __future__ import annotations

import io
import os
import sys

from fast_attention.allocator import keep_memory


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    It exits with 0; 1 (a law is broken, or something went wrong: no memory, a full disk, nobody reads the output);
    2 (bad input) or 130 (interrupted).
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding lacks
    code = _run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"fast-attention: standard output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
        code = code or 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    from fast_attention.lab import refusals

    try:
        with refusals.importing():
            from fast_attention.lab import command_line
    except (refusals.InputError, refusals.Failed) as error:
        return refusals.refuse(*refusals.refusal(error) or (1, ""))
    keep_memory()
    return command_line.run(arguments)
