"""`fuzz`: a test of hypothesis' that counts its inputs by class and tries more of them in `make fuzz`."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

TRIED: Counter[str] = Counter()  # inputs tried, by class
FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))


def fuzz(kind: str, *, examples: int = 20, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on inputs drawn from ``strategies``.

    Args:
        kind: The class of inputs, in the words of the table that ``make fuzz`` prints.
        examples: How many inputs ``make test`` tries; ``make fuzz`` tries ten times as many a round.
        strategies: Hypothesis' strategies for the test's arguments; other arguments are pytest's.
    """

    def made(test: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **drawn: Any) -> None:
            TRIED[kind] += 1
            test(*args, **drawn)

        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(counted, name, getattr(test, name))
        counted.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        bounded = settings(
            max_examples=examples * FACTOR,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        )
        return seed(SEED)(bounded(given(**strategies)(counted)))

    return made
