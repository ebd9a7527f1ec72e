"""Faults seeded into ``mechanisms/aft/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("pools merge without rescaling", "mechanisms/aft/pool.py", "(pool.top - top).exp()", "torch.ones_like(top)",
          LAW + "'combine and AFTSimple'"),
    Fault("a segment of AFT-simple forgets to rescale its past", "mechanisms/aft/prefix_pool.py",
          "carry = sums.sum_up(carry * torch.cat([(old - top).exp()] * 2, -1))", "carry = sums.sum_up(carry)",
          "tests/aft/test_aft_paths.py -k test_simple"),
    Fault("AFT-simple's gradient forgets what later segments owe", "mechanisms/aft/prefix_pool.py",
          "owed = owing.sum_up(owed, backwards=True)", "owed = owing.sum_up(0 * owed, backwards=True)",
          "tests/aft/test_aft_paths.py -k test_simple"),
    Fault("few tokens of AFT-simple keep one unit whatever the keys", "mechanisms/aft/prefix_short.py",
          "amax() <= RANGE)", "amax() <= 1e9)", "tests/aft/test_aft_paths.py -k few_tokens"),
    Fault("the gradient of few tokens sums the past", "mechanisms/aft/prefix_short.py",
          "terms.flip(-2).cumsum(-2).flip(-2)", "terms.cumsum(-2)", "tests/aft/test_aft_paths.py -k few_tokens"),
    Fault("AFT-full's causal diagonal is lost", "mechanisms/aft/bias_products.py", "weights[:, now.start :].tril_()",
          "weights[:, now.start :].tril_(-1)", "tests/aft/test_aft_paths.py -k test_full"),
    Fault("AFT's far blocks are counted from one block too near", "mechanisms/aft/window_blocks.py",
          "total[:, reach + 1 :] += sums[:, :count]", "total[:, reach + 1 :] += sums[:, 1 : count + 1]",
          "tests/aft/test_aft_paths.py -k test_windows"),
]  # fmt: skip
