"""Faults seeded into ``mechanisms/log_manhattan/``."""

from tests.faults.fault import ORACLE, Fault

FAULTS = [
    Fault("the sorted form forgets what lies above", "mechanisms/log_manhattan/sorted_passes.py", ".sub_(count[..., -1:] / 2)",
          "", ORACLE + "Manhattan"),
    Fault("the slope of the sorted form takes the values' part alone", "mechanisms/log_manhattan/sorted_passes.py",
          "slope.addcmul_(xo, other)", "slope", "tests/engine/test_chunks.py -k sorted"),
    Fault("log attention's backward pass carries nothing over", "mechanisms/log_manhattan/additive_passes.py",
          "total.carry_(sent, backwards=True)", "accumulate_(sent, backwards=True)",
          "tests/engine/test_chunks.py -k plain"),
    Fault("log attention's backward pass sums anew in every stretch", "mechanisms/log_manhattan/additive_passes.py",
          "sums[..., :1, :] += rows[..., place : place + 1, : sums.shape[-1]]", "pass",
          "tests/engine/test_chunks.py -k plain"),
    Fault("Manhattan's values forget the tokens' own l", "mechanisms/log_manhattan/difference_passes.py",
          "dv[..., now, :].sub_(sent[..., width:])", "pass", "tests/engine/test_chunks.py -k plain"),
]  # fmt: skip
