"""Faults seeded into ``gpu/``, found in Triton's interpreter."""

from tests.faults.fault import Fault

TESTS = "tests/gpu/test_linear.py -k "

FAULTS = [
    Fault(
        "a kernel's queries see one key of the future",
        "gpu/reading.py",
        "tl.arange(0, BT)[None, :] > first + tl",
        "tl.arange(0, BT)[None, :] > 1 + first + tl",
        TESTS + "every_configuration",
    ),
    Fault(
        "a kernel's chunk is among the sums before it",
        "gpu/sums.py",
        "        tl.store(where, carry, mask=inside)\n        carry += added\n",
        "        carry += added\n        tl.store(where, carry, mask=inside)\n",
        TESTS + "every_configuration",
    ),
    Fault(
        "kernels keep states in sixteen bits",
        "gpu/sums.py",
        "+ values[None, :], products, mask=inside)",
        "+ values[None, :], products.to(tl.bfloat16).to(tl.float32), mask=inside)",
        TESTS + "every_configuration",
    ),
    Fault(
        "a kernel reads the token behind the last one",
        "gpu/tiles.py",
        "        return rows < length\n",
        "        return rows <= length\n",
        TESTS + "every_configuration",
    ),
    Fault(
        "padded columns have features",
        "gpu/tiles.py",
        "[:, None] * stride + columns[None, :], mask=inside, other=0.0)\n    return tl.where(inside, feature(x.to(tl.float32), offset, MAP), 0.0)",
        "[:, None] * stride + columns[None, :], mask=inside, other=0.0)\n    return feature(x.to(tl.float32), offset, MAP)",
        TESTS + "every_configuration",
    ),
    Fault(
        "kernels read hidden tokens",
        "gpu/tiles.py",
        "tl.load(visible + rows, mask=rows < length, other=0) != 0",
        "rows < length",
        TESTS + "hidden",
    ),
    Fault(
        "a kernel forgets the denominator's gradient",
        "gpu/gradients.py",
        "tl.where(later, 0.0, pairs + weights)",
        "tl.where(later, 0.0, pairs)",
        TESTS + "every_configuration",
    ),
    Fault(
        "a kernel does not divide what comes from above",
        "gpu/gradients.py",
        "grad = turned(GRAD, gt, other, length, e, E, GRAD, 0.0, NONE, False, BT, BE) * factors",
        "grad = turned(GRAD, gt, other, length, e, E, GRAD, 0.0, NONE, False, BT, BE)",
        TESTS + "every_configuration",
    ),
    Fault(
        "a kernel's keys learn from queries before them",
        "gpu/gradients.py",
        "tl.dot(tl.where(earlier, 0.0, pairs), grad",
        "tl.dot(pairs, grad",
        TESTS + "every_configuration",
    ),
    Fault(
        "sums behind a chunk are taken from the front",
        "gpu/sums.py",
        "chunks - 1 - step if REVERSED else step",
        "step",
        TESTS + "every_configuration",
    ),
    Fault(
        "kernels forget the first state",
        "gpu/launching.py",
        "HAS_FIRST=first is not None",
        "HAS_FIRST=False",
        TESTS + "behind_a_state",
    ),
    Fault(
        "a kernel's error passes the self-check",
        "gpu/self_check.py",
        "if not error <= LARGEST[dtype]:",
        "if error > 1.0:",
        "tests/gpu/test_self_check.py -k wrong",
    ),
    Fault(
        "a kernel that was asked for need not run",
        "engine/dispatch.py",
        '    if name == "triton" and not any(',
        "    if False and not any(",
        TESTS + "refused",
    ),
]
