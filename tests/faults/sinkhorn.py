"""Faults seeded into ``mechanisms/sinkhorn/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("sinkhorn's causal sorting sees its own block", "mechanisms/sinkhorn/sorting.py",
          "(position < position[:, None])", "(position <= position[:, None])", LAW + "'of_a_setting and Sinkhorn'"),
    Fault("sinkhorn's summary holds the whole block", "mechanisms/sinkhorn/sorting.py", ".cumsum(-2) + keys[..., 0, :]",
          ".cumsum(-2) + keys.sum(-2)", LAW + "'of_a_setting and Sinkhorn'"),
    Fault("a tile's first block sees an empty sorted one", "mechanisms/sinkhorn/sinkhorn.py", "not is_causal or start + block > 0:", "True:",
          "tests/sinkhorn/test_sinkhorn.py -k long_sequences"),
    Fault("sorted blocks are read where the block before them stands", "mechanisms/sinkhorn/sinkhorn.py",
          "rows, own, other = list[list[int]](), list[list[int]](), keys - length", "rows, own, other = list[list[int]](), list[list[int]](), keys - length - size",
          "tests/sinkhorn/test_sinkhorn.py -k long_sequences"),
    Fault("balancing by factors leaves out the rows", "mechanisms/sinkhorn/sorting.py", "rows = 1 / (S @ columns.mT)",
          "rows = 1 / (S @ torch.ones_like(columns).mT)", "tests/sinkhorn/test_sinkhorn.py -k factors"),
    Fault("every short sequence is padded to a block", "mechanisms/sinkhorn/sinkhorn.py",
          "return min(block_size, k.shape[-2]) if short(k) else block_size", "return block_size",
          "tests/conformance/test_short_sequences.py -k 'as_many_tokens and Sinkhorn-all'"),
    Fault("new tokens of many sequences see their block from its start", "mechanisms/sinkhorn/sinkhorn.py",
          "[first_row : first_row + rows]", "[:rows]",
          "tests/conformance/test_short_sequences.py -k steps_of"),
]  # fmt: skip
