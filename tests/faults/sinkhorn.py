"""Faults seeded into ``mechanisms/sinkhorn/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("sinkhorn's causal sorting sees its own block", "mechanisms/sinkhorn/transport.py", "(place < place[:, None])",
          "(place <= place[:, None])", LAW + "'future and Sinkhorn'"),
    Fault("sinkhorn's summary holds the whole block", "mechanisms/sinkhorn/transport.py", ".cumsum(-2) + keys[..., 0, :]",
          ".cumsum(-2) + keys.sum(-2)", LAW + "'future and Sinkhorn'"),
    Fault("a tile's first block sees an empty sorted one", "mechanisms/sinkhorn/sorted_tiles.py", "first + start == 0:",
          "first + start < 0:", "tests/sinkhorn/test_sinkhorn.py"),
    Fault("tiles overwrite what earlier blocks got", "mechanisms/sinkhorn/sorted_tiles.py", "beta=0.0 if last else 1.0", "beta=0.0",
          "tests/sinkhorn/test_sinkhorn.py -k tiles"),
    Fault("a permutation's gradient is the keys' alone", "mechanisms/sinkhorn/sorted_tiles.py", "own, last=last, beta=1.0",
          "own, last=last, beta=0.0", "tests/sinkhorn/test_sinkhorn.py -k tiles"),
    Fault("balancing by factors leaves out the rows", "mechanisms/sinkhorn/transport.py", "rows = 1 / (S @ columns.mT)",
          "rows = 1 / (S @ torch.ones_like(columns).mT)", "tests/sinkhorn/test_sinkhorn.py -k factors"),
]  # fmt: skip
