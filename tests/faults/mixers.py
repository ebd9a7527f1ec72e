"""Faults seeded into ``mechanisms/mixers/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("gMLP mixes the future",
          "mechanisms/mixers/gmlp.py", "lower(W, gate) + b[:, None] if is_causal else", "W @ gate + b[:, None] if is_causal else", LAW + "'future and GMLP'"),
    Fault("FNet mirrors the wrong way",
          "mechanisms/mixers/fnet.py", ".flip(-2, -1).roll(1, -2)", ".flip(-1)", "tests/mixers/test_mixers.py -k long"),
    Fault("a triangle's gradient keeps the other half", "mechanisms/mixers/fast.py", "dW[i:j, i:j].tril_()", "pass",
          "tests/mixers/test_mixers.py -k triangle"),
    Fault("later rows of a triangle are forgotten", "mechanisms/mixers/fast.py",
          "d_tokens[:j].addmm_(weights.mT, grad[i:j])", "d_tokens[i:j].addmm_(weights[:, i:].mT, grad[i:j])", "tests/mixers/test_mixers.py -k triangle"),
    Fault("a second sequence overwrites the gradient of the first", "mechanisms/mixers/fast.py",
          "addmm_(grad[i:j], tokens[:j].mT)", "addmm_(grad[i:j], tokens[:j].mT, beta=0.0)", "tests/mixers/test_mixers.py -k triangle"),
    Fault("short sequences are mixed one after another", "mechanisms/mixers/fast.py",
          " or short(x[..., None, :, :])", "",
          "tests/conformance/test_short_sequences.py -k 'as_many_tokens and GMLP-all'"),
    Fault("every sequence is mixed as the first", "mechanisms/mixers/fast.py", "for tokens in flat]", "for tokens in flat[:1].expand_as(flat)]",
          "tests/mixers/test_mixers.py -k product"),
    Fault("the gradient of FNet is the gradient", "mechanisms/mixers/fnet.py", "return (half_spectrum(gradients[0], ortho=ortho),)", "return (gradients[0],)",
          "tests/mixers/test_mixers.py -k long"),
]  # fmt: skip
