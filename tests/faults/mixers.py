"""Faults seeded into ``mechanisms/mixers/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("gMLP mixes the future",
          "mechanisms/mixers/gmlp.py", "lower(W, gate) + b[:, None] if is_causal else", "W @ gate + b[:, None] if is_causal else", LAW + "'future and GMLP'"),
    Fault("FNet mirrors the wrong way",
          "mechanisms/mixers/fnet.py", ".flip(-2, -1).roll(1, -2)", ".flip(-1)", "tests/mixers/test_mixers.py -k long"),
    Fault("FNet mirrors the rows of a long sequence one off", "mechanisms/mixers/fnet.py",
          "mixed[1:, half:] = rows[1:, 1:end].flip(-2, -1)", "mixed[1:, half:] = rows[:-1, 1:end].flip(-2, -1)",
          "tests/mixers/test_mixers.py -k long"),
    Fault("a short FNet transforms its channels alone", "mechanisms/mixers/fnet.py",
          "torch.fft.fft(torch.fft.fft(x, dim=-1, norm=norm), dim=-2, norm=norm).real, ()",
          "torch.fft.fft(x, dim=-1, norm=norm).real, ()", "tests/mixers/test_mixers.py -k long"),
    Fault("a triangle's gradient keeps the other half", "mechanisms/mixers/fast.py", "dW[i:j, i:j].tril_()", "pass",
          "tests/mixers/test_mixers.py -k triangle"),
    Fault("later rows of a triangle are forgotten", "mechanisms/mixers/fast.py",
          "d_tokens[i:j].addmm_(W[j:, i:j].mT, grad[j:])", "pass", "tests/mixers/test_mixers.py -k triangle"),
    Fault("a second sequence overwrites the gradient of the first", "mechanisms/mixers/fast.py",
          "beta=float(b > 0)", "beta=0.0", "tests/mixers/test_mixers.py -k triangle"),
    Fault("a product over tokens forgets the sequences but the last", "mechanisms/mixers/fast.py",
          "beta=float(i > 0)", "beta=0.0", "tests/mixers/test_mixers.py -k product"),
    Fault("short sequences are mixed one after another", "mechanisms/mixers/fast.py",
          "(_affine_plain if short(x[..., None, :, :]) else _AFFINE)", "_AFFINE",
          "tests/conformance/test_short_sequences.py -k 'as_many_tokens and GMLP-all'"),
]  # fmt: skip
