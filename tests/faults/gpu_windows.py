"""Faults of the kernels that compute AFT with biases in a window, and of Hybrid on a GPU."""

from tests.faults.fault import Fault

HYBRID = "tests/gpu/test_hybrid.py -k "
WINDOWED = "tests/gpu/test_windowed.py -k "

FAULTS = [
    Fault(
        "a window's kernel leaves sums at a smaller scale",
        "gpu/windowed/tiles.py",
        "one = one * old + tl.dot(",
        "one = one + tl.dot(",
        WINDOWED + "every_configuration",
    ),
    Fault(
        "a window of biases is a key too wide",
        "gpu/windowed/tiles.py",
        "(i - j <= reach)",
        "(i - j <= reach + 1)",
        WINDOWED + "every_configuration",
    ),
    Fault(
        "a pool before a window has a tile of it",
        "gpu/windowed/kernels.py",
        "far_pool(BEFORE, block - around - 1,",
        "far_pool(BEFORE, block - around,",
        WINDOWED + "every_configuration",
    ),
    Fault(
        "pools of tiles are kept in sixteen bits",
        "gpu/windowed/kernels.py",
        "tl.sum(e * first, 0), mask=inside)",
        "tl.sum(e * first, 0).to(tl.float16).to(tl.float32), mask=inside)",
        WINDOWED + "every_configuration",
    ),
    Fault(
        "keys of a tile far apart share a scale",
        "gpu/windowed/tiles.py",
        "SLACK = tl.constexpr(60.0)",
        "SLACK = tl.constexpr(1e9)",
        WINDOWED + "far_apart",
    ),
    Fault(
        "pools of queries forget the largest bias",
        "gpu/windowed/gradients.py",
        "x - shift, FLOOR)",
        "x, FLOOR)",
        WINDOWED + "every_configuration",
    ),
    Fault(
        "far keys of a span are near ones too",
        "mechanisms/hybrid/gpu.py",
        "hidden = sight.near[:, columns] | ",
        "hidden = ",
        HYBRID + "plain_form",
    ),
    Fault(
        "a sink token that is near counts twice",
        "mechanisms/hybrid/gpu.py",
        "(apart <= sides[1])",
        "(apart < 0 * sides[1])",
        HYBRID + "plain_form",
    ),
    Fault(
        "far sums are read at another scale",
        "mechanisms/hybrid/gpu.py",
        "log() + outside.log_scale[..., None, None]",
        "log()",
        HYBRID + "plain_form",
    ),
]
