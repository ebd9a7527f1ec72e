"""Says whether the compiled core serves, and builds it: ``python -m fast_attention.core build``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fast_attention.core import FILE, building, found, native_width, unavailable


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fast_attention.core",
        description="Says whether the compiled core serves, or builds it with the system's C++ compiler.",
    )
    commands = parser.add_subparsers(dest="command")
    build = commands.add_parser("build", help="compile the core, unless it is up to date")
    build.add_argument("--into", type=Path, metavar="DIR", help="the folder of the file (default: the package's)")
    build.add_argument(
        "--widths",
        choices=["native", "all"],
        default="native",
        help="vectors of this machine's processor (default), or of every processor of this platform",
    )
    build.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer and UBSan, into build/sanitized unless --into says otherwise",
    )
    options = parser.parse_args()
    if options.command is None:
        return say()
    folder = options.into or (Path("build/sanitized") if options.sanitize else FILE.parent)
    return make(folder / FILE.name, options.widths, options.sanitize)


def say() -> int:
    """Print which file serves, or why none does."""
    if reason := unavailable():
        print(f"the compiled core does not serve: {reason}")
        return 1
    print(f"the compiled core serves: vectors of {found().width} numbers, {found().file}")
    return 0


def make(file: Path, widths: str, sanitize: bool) -> int:
    """Build the core unless the file is up to date, and print one line that says what happened."""
    start = time.monotonic()
    try:
        chosen = building.ALL if widths == "all" else tuple(sorted({min(building.ALL), native_width()}))
        if building.up_to_date(file, chosen):
            print(f"the compiled core is up to date: {file}")
            return 0
        building.build(file, chosen, sanitize)
    except building.NotBuilt as error:
        if error.output:
            print(error.output, file=sys.stderr)
        print(f"the compiled core was not built: {error}. The reference runs in its place")
        return 1
    vectors = ", ".join(str(width) for width in chosen)
    seconds, size = time.monotonic() - start, file.stat().st_size / 1000
    print(f"built the compiled core in {seconds:.0f} s: {file}, {size:.0f} KB, vectors of {vectors} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
