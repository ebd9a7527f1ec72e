"""Faults seeded into sequences over many processes."""

from tests.faults.fault import Fault

FAULTS = [
    Fault("the prefix of states includes the own shard", "parallel/states.py", "gathered[: shards.rank]",
          "gathered[: shards.rank + 1]", "tests/parallel/test_parallel.py -k one_process"),
    Fault("rotary positions begin anew on every process", "nn/positions.py",
          "torch.arange(shards.start, shards.start + shards.queries", "torch.arange(0, shards.queries",
          "tests/parallel/test_modules.py -k rotary"),
    Fault("a shard's convolution begins with zeros", "nn/convolution.py", "recent = fetch(x, [(max(start - before, 0), start)",
          "recent = fetch(x, [(start, start)", "tests/parallel/test_modules.py -k convolution"),
    Fault("different weights on processes are taken", "parallel/attending.py", "if any(row[4:] != rows[0][4:]",
          "if any(row[4:] != row[4:]", "tests/parallel/test_parallel.py -k different_weights"),
    Fault("the nearest of later shards decays most", "parallel/decayed.py", "others[before:][::-1]", "others[before:]",
          "tests/parallel/test_parallel.py -k one_process"),
    Fault("a token's own Manhattan term is that of a masked one", "mechanisms/log_manhattan/manhattan.py",
          "l, *_, diagonal, _ = self._terms(k, v, key_mask)",
          "l, *_, diagonal, _ = self._terms(k, 0.0 * v, key_mask)", "tests/conformance/test_contract.py -k Manhattan"),
    Fault("channel 0 of a spread Fourier transform mirrors itself", "parallel/channels.py",
          "first = int(shards.rank == 0 and mirrored[0] > 0)", "first = 0", "tests/parallel/test_mixers.py -k one_process"),
    Fault("a spread gMLP's small head sees the other processes' future", "parallel/channels.py",
          "end if call.is_causal else call.shards.length", "call.shards.length",
          "tests/parallel/test_mixers.py -k one_process"),
    Fault("a Hybrid's keys beside the fetched ones are in no sum", "parallel/hybrid.py",
          "both = [(first, min(end, low))", "both = [(first, min(end, low - 1))",
          "tests/parallel/test_parallel.py -k one_process"),
    Fault("sink tokens of a shard count from its own first token", "parallel/hybrid.py",
          "sinks.position + shards.key_start", "sinks.position + 0 * shards.key_start",
          "tests/parallel/test_parallel.py -k one_process"),
]  # fmt: skip
