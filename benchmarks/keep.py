"""Copy a finished record to records/DATE-bench.json after making sure that it names no host, user or folder of here."""

from __future__ import annotations

import getpass
import json
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def keep(source: Path, folder: Path, suffix: str = "bench") -> Path:
    """The path of the copy, numbered where the day has one already; ``ValueError`` where it would tell too much."""
    text = source.read_text(encoding="utf-8")
    held = json.loads(text)
    if held["meta"]["status"] != "complete":
        raise ValueError(f"{source} is {held['meta']['status']}: only complete records are kept")
    told = [secret for secret in secrets() if secret in text]
    if told:
        raise ValueError(f"{source} names {told[0]!r}: run the benchmark with relative paths")
    date = held["meta"]["started"][:10]
    names = (f"{date}-{suffix}{'' if number == 1 else f'-{number}'}.json" for number in range(1, 1000))
    path = next(folder / name for name in names if not (folder / name).exists())
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def secrets() -> list[str]:
    """What a record must not hold: the host's name and the folders of this machine."""
    host = socket.gethostname()
    found = [str(ROOT), str(Path.home()), str(Path.cwd()), sys.prefix]
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    names = [name for name in (host, f"/{user}/") if len(name) > 3]
    return [text for text in [*names, *found] if len(text) > 3]


if __name__ == "__main__":
    try:
        print(f"Record: {keep(Path(sys.argv[1]), ROOT / 'records', *sys.argv[2:]).relative_to(ROOT)}")
    except ValueError as problem:
        sys.exit(f"benchmarks: {problem}")
