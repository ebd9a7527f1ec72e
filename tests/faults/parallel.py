"""Faults seeded into sequences over many processes."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("the prefix of states includes the own shard", "parallel/attending.py", "gathered[: dist.get_rank(group)]]",
          "gathered[: dist.get_rank(group) + 1]]", "tests/parallel/test_parallel.py -k one_process"),
    Fault("different weights on processes are taken", "parallel/attending.py", "if any(shard[3:] != shards[0][3:] for",
          "if any(shard[3:] != shard[3:] for", "tests/parallel/test_parallel.py -k different_weights"),
]  # fmt: skip
