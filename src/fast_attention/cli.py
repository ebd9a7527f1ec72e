"""The command ``fast-attention``: one line and exit code 2 for what cannot be had, never a traceback."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (a law is broken), 2 (bad input) or 130 (interrupted)."""
    try:
        from fast_attention.lab import commands
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fast_attention"):
            raise
        message = f"the command line needs {error.name}: pip install 'fast-attention[lab]'"
        print(f"fast-attention: {message}", file=sys.stderr)
        sys.exit(2)
    sys.exit(commands.run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
