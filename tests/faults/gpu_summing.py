"""Faults seeded into kernels of scores that are sums, and into what calls them, found in Triton's interpreter."""

from tests.faults.fault import Fault

SUMMING = "tests/gpu/test_summing.py -k "

FAULTS = [
    Fault(
        "a query reads sums of its whole tile",
        "gpu/summing/kernels.py",
        "return values[None, :] + tl.cumsum(v, 0), weighted,",
        "return values[None, :] + tl.sum(v, 0)[None, :] + 0 * v, weighted,",
        SUMMING + "every_configuration",
    ),
    Fault(
        "hidden keys are counted",
        "gpu/summing/kernels.py",
        "count + tl.sum(shown.to(tl.float32), 0)",
        "count + shown.shape[0]",
        SUMMING + "every_configuration",
    ),
    Fault(
        "keys' scores forget that they stand in the divisor too",
        "gpu/summing/gradients.py",
        "to_scores -= tl.sum(share * out, 0)",
        "to_scores -= 0.0",
        SUMMING + "every_configuration",
    ),
    Fault(
        "values learn from a tile's queries in the wrong order",
        "gpu/summing/gradients.py",
        "* BT - 1 - tl.arange(0, BT)",
        "* BT - BT + tl.arange(0, BT)",
        SUMMING + "every_configuration",
    ),
    Fault(
        "sums of scores go on from one packed sequence to the next",
        "gpu/sums.py",
        "if PACKED and not REVERSED:",
        "if False:",
        SUMMING + "begin_anew",
    ),
    Fault(
        "Manhattan's anchor is each part's own",
        "mechanisms/log_manhattan/manhattan_gpu.py",
        "reference.anchored(l, diagonal, key_mask, state)",
        "reference.anchored(l, diagonal, key_mask)",
        SUMMING + "behind_sums",
    ),
]
