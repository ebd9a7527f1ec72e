"""Faults seeded into ``mechanisms/sparse/``."""

from tests.faults.fault import LAW, ORACLE, Fault

FAULTS = [
    Fault("the window is one key short", "engine/masks.py", "distance >= -left", "distance > -left", ORACLE + "Local"),
    Fault("decoding forgets the oldest key of the window", "mechanisms/sparse/local.py", "return out, last(near, left)",
          "return out, last(near, left - 1)", LAW + "'decode and Local'"),
    Fault("a block drawn twice counts twice", "mechanisms/sparse/reference.py",
          "return (table >= 0) & ~", "return (table >= 0) | ~", ORACLE + "BigBird"),
    Fault("global rows give nothing to their queries", "mechanisms/sparse/gathered.py",
          "dq[..., last:, :] = d_rows[..., :first, :], d_rows[..., first:, :]",
          "dq[..., last:, :] = 0.0, 0.0", "tests/sparse/test_tiles.py -k global"),
    Fault("a window over most keys begins one key late", "mechanisms/sparse/local.py", "masks.band(length, keys - length, 0, left=left",
          "masks.band(length, keys - length, 0, left=left - 1", "tests/sparse/test_tiles.py -k most_keys"),
    Fault("a block after the chunks is left out", "mechanisms/sparse/banded.py", "range(inner + each * number, count)",
          "range(inner + each * number + 1, count)", "tests/sparse/test_tiles.py"),
    Fault("a tile at the edge forgets how much was cut off", "mechanisms/sparse/banded.py",
          "Span(low + left, visible", "Span(low, visible", "tests/sparse/test_tiles.py"),
    Fault("a causal block sees its own future", "mechanisms/sparse/gathered.py",
          "dtype=torch.bool).tril()",
          "dtype=torch.bool).tril(1)", "tests/sparse/test_tiles.py"),
    Fault("the last block of keys has no end", "mechanisms/sparse/gathered.py",
          "visible[:, end, self.length % self.size :] = False",
          "pass", "tests/sparse/test_tiles.py"),
    Fault("what the compiler takes as one operation is refused while it records", "mechanisms/sparse/banded.py",
          "    if attn_mask is None and dropout == 0.0:", "    if attn_mask is None and dropout == 0.0 and not dispatch.obstacle(q):",
          "tests/engine/test_dispatch.py -k 'one_operation and Local'"),
]  # fmt: skip
