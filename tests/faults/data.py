"""Faults seeded into ``data/``."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("the limit for files does not count what gzip hides", "data/reading.py",
          "return _all(file, os.fspath(path))\n\n\ndef too_long", "return file.read()\n\n\ndef too_long",
          "tests/lab/test_failures.py -k bombs"),
]  # fmt: skip
