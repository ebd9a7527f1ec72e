"""Faults seeded into ``mechanisms/mixers/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("gMLP mixes the future",
          "mechanisms/mixers/gmlp.py", "lower(W, gate) + b[:, None] if is_causal else", "W @ gate + b[:, None] if is_causal else", LAW + "'future and GMLP'"),
    Fault("FNet mirrors the wrong way",
          "mechanisms/mixers/fnet.py", ".flip(-2, -1).roll(1, -2)", ".flip(-1)", "tests/mixers/test_mixers.py -k long"),
    Fault("FNet mirrors the rows of a long sequence one off", "mechanisms/mixers/fnet.py",
          "y[1:, half:] = rows[1:, 1:rest].flip(-2, -1)", "y[1:, half:] = rows[:-1, 1:rest].flip(-2, -1)",
          "tests/mixers/test_mixers.py -k long"),
    Fault("a short FNet transforms its channels alone", "mechanisms/mixers/fnet.py",
          "torch.fft.fft(torch.fft.fft(x, dim=-1, norm=norm), dim=-2, norm=norm).real, ()",
          "torch.fft.fft(x, dim=-1, norm=norm).real, ()", "tests/mixers/test_mixers.py -k long"),
]  # fmt: skip
