"""Faults seeded into ``mechanisms/aft/``."""

from tests.faults.fault import LAW, Fault

FAULTS = [
    Fault("pools merge without rescaling", "mechanisms/aft/reference.py", "(pool.log_scale - log_scale).exp()", "torch.ones_like(log_scale)",
          LAW + "'combine and AFTSimple'"),
    Fault("a chunk of AFT-simple forgets to rescale its past", "mechanisms/aft/fast_causal.py",
          "carry = sums.accumulate_(carry * _decay(before, scale))", "carry = sums.accumulate_(carry)",
          "tests/aft/test_aft_paths.py -k test_simple"),
    Fault("AFT-simple's gradient forgets what later chunks read", "mechanisms/aft/fast_causal.py",
          "d_carry = d_sums.accumulate_(d_carry, backwards=True)",
          "d_carry = d_sums.accumulate_(0 * d_carry, backwards=True)",
          "tests/aft/test_aft_paths.py -k test_simple"),
    Fault("few tokens of AFT-simple keep one log scale whatever the keys", "mechanisms/aft/fast.py",
          "amax() <= RANGE)", "amax() <= 1e9)", "tests/aft/test_aft_paths.py -k few_tokens"),
    Fault("the gradient of few tokens sums the past", "mechanisms/aft/fast.py",
          "d_sums.flip(-2).cumsum(-2).flip(-2)", "d_sums.cumsum(-2)", "tests/aft/test_aft_paths.py -k few_tokens"),
    Fault("AFT-full's causal diagonal is lost", "mechanisms/aft/fast_full.py", "weights[:, at.start :].tril_()",
          "weights[:, at.start :].tril_(-1)", "tests/aft/test_aft_paths.py -k test_full"),
    Fault("AFT's far blocks are counted from one block too near", "mechanisms/aft/window_blocks.py",
          "total[:, reach + 1 :] += sums[:, :count]", "total[:, reach + 1 :] += sums[:, 1 : count + 1]",
          "tests/aft/test_aft_paths.py -k test_windows"),
    Fault("the gradients of AFT's gates forget their slope", "mechanisms/aft/fast.py",
          "dq.neg_().add_(1.0).mul_(out)", "dq.mul_(out)", "tests/aft/test_aft_paths.py -k test_full"),
    Fault("AFT's weights have no gradient of the denominators", "mechanisms/aft/fast.py",
          ".add_(d_denominators).mul_(weights)", ".mul_(weights)", "tests/aft/test_aft_paths.py -k test_windows"),
]  # fmt: skip
