"""Faults seeded into sequences over many processes."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("the prefix of states includes the own shard", "parallel/states.py", "gathered[: shards.rank]",
          "gathered[: shards.rank + 1]", "tests/parallel/test_parallel.py -k one_process"),
    Fault("different weights on processes are taken", "parallel/attending.py", "if any(row[4:] != rows[0][4:]",
          "if any(row[4:] != row[4:]", "tests/parallel/test_parallel.py -k different_weights"),
]  # fmt: skip
