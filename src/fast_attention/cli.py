"""The command ``fast-attention``: errors are one line and an exit code, never a traceback."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

from fast_attention import extras
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
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_default = is_default and threading.current_thread() is threading.main_thread()
    try:
        if is_default:  # libraries that are interrupted half way are of no more use
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        from fast_attention.lab import command_line

        keep_memory()
        command_line.prepare(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "fast_attention":
            raise
        print(f"fast-attention: the command line needs {missing}: {extras.install('lab')}", file=sys.stderr)
        return 2
    except (ImportError, MemoryError, OSError) as error:
        print(f"fast-attention: a library cannot be loaded: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return command_line.run(arguments)


if __name__ == "__main__":
    main()
