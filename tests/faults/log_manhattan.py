"""Faults seeded into ``mechanisms/log_manhattan/``."""

from tests.faults.fault import ORACLE, Fault

FAULTS = [
    Fault("the sorted form forgets what lies above", "mechanisms/log_manhattan/sorting.py", " - count[..., -1:]",
          "", ORACLE + "Manhattan"),
    Fault("sums stay in sorted order", "mechanisms/log_manhattan/sorting.py", "torch.zeros_like(y).scatter(-1, order, y)", "y",
          ORACLE + "Manhattan"),
    Fault("log attention forgets that keys have gradients of their scores too", "mechanisms/log_manhattan/log_attention.py",
          ".add_(d_scores)", "", "tests/engine/test_chunks.py -k plain"),
    Fault("Manhattan's causal values forget the l of the queries", "mechanisms/log_manhattan/manhattan.py",
          "addcmul_(self.l, d_plain).sub_(first_moment)", "addcmul_(self.l, d_plain)", "tests/engine/test_chunks.py -k plain"),
]  # fmt: skip
