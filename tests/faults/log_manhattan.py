"""Faults seeded into ``mechanisms/log_manhattan/``."""

from tests.faults.fault import ORACLE, Fault

FAULTS = [
    Fault("the sorted form forgets what lies above", "mechanisms/log_manhattan/sorting.py", " - count[..., -1:]",
          "", ORACLE + "Manhattan"),
    Fault("sums stay in sorted order", "mechanisms/log_manhattan/sorting.py", "torch.zeros_like(y).scatter(-1, order, y)", "y",
          ORACLE + "Manhattan"),
    Fault("log attention forgets that keys have gradients of their scores too", "mechanisms/log_manhattan/sums.py",
          "slopes.add_(d_scores) if d_scores.shape[-1] else slopes", "slopes", "tests/engine/test_chunks.py -k plain"),
    Fault("Manhattan's values forget the l of the queries", "mechanisms/log_manhattan/sums.py",
          "torch.addcmul(d_plain, b, d_weighted, out=dx[..., at, :])", "torch.mul(b, d_weighted, out=dx[..., at, :])", "tests/engine/test_chunks.py -k plain"),
    Fault("the gradients of sums over keys carry nothing over", "mechanisms/log_manhattan/sums.py",
          "total.carry_(d_sums, backwards=True)", "accumulate_(d_sums, backwards=True)",
          "tests/engine/test_chunks.py -k plain"),
    Fault("the backward pass sums keys anew in every chunk", "mechanisms/log_manhattan/sums.py",
          "rows[..., :1, :] += sums[..., i : i + 1, : rows.shape[-1]]", "pass",
          "tests/engine/test_chunks.py -k plain"),
]  # fmt: skip
