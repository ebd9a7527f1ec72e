"""Faults seeded into ``mechanisms/lsh/``."""

from tests.faults.fault import LAW, ORACLE, Fault

FAULTS = [
    Fault("a key counts once per round", "mechanisms/lsh/rounds.py", "r if self.rules.distinct else 0", "0", ORACLE + "LSH"),
    Fault("chunks are counted along the whole sequence",
          "mechanisms/lsh/rounds.py", "ranked=rules.ranked, across", "ranked=False, across", LAW + "'future and LSH'"),
    Fault("the largest score is not taken off", "mechanisms/lsh/rounds.py", "if self.log_scale is not None:", "if self.log_scale is False:",
          "tests/lsh/test_hash_attention.py"),
    Fault("empty slots count in the gradient", "mechanisms/lsh/fast.py", "g.mul_(valid)", "pass",
          "tests/lsh/test_hash_attention.py"),
    Fault("the neighbouring chunk is the next", "mechanisms/lsh/layout.py", "Block(a * size, size, n))\n", "Block(b * size, size, n))\n",
          "tests/lsh/test_hash_attention.py"),
    Fault("a narrow last chunk follows another group", "mechanisms/lsh/layout.py", "(first[full_chunks - 1] + ends[g])",
          "first[full_chunks - 1]", "tests/lsh/test_hash_attention.py"),
    Fault("the neighbouring chunk of a long row is the next", "mechanisms/lsh/layout.py", "Block(a * size, size, n - 1))",
          "Block((a + 1) * size, size, n - 1))", "tests/lsh/test_hash_attention.py -k sorted"),
    Fault("a neighbour's product replaces a chunk's own", "mechanisms/lsh/rounds.py", "beta=0.0 if first else 1.0",
          "beta=0.0", "tests/lsh/test_hash_attention.py"),
    Fault("a full log is written into chunks that older states hold", "mechanisms/lsh/state.py", "if not owned:", "if False:",
          "tests/lsh/test_lsh.py -k log"),
    Fault("tokens of the log do not count in their bucket", "mechanisms/lsh/state.py", "rank = filled + order[..., -1:]",
          "rank = filled", "tests/lsh/test_lsh.py -k log"),
    Fault("a token of the log counts once per round", "mechanisms/lsh/state.py", "times.clamp_(max=1)", "times",
          "tests/lsh/test_lsh.py -k log"),
    Fault("a key's length keeps its gradient", "mechanisms/lsh/fast.py", ".addcmul_(along, lanes.k, value=-1.0)", "",
          "tests/lsh/test_hash_attention.py"),
    Fault("a family asks for the device by itself", "mechanisms/lsh/fast.py", "if why := dispatch.obstacle(q, v):",
          'if why := "" if q.is_cpu else "another device":', "tests/engine/test_dispatch.py -k by_itself"),
]  # fmt: skip
