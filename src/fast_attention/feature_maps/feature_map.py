"""Feature maps: values that turn (..., n, d) into (..., n, C)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import numerics
from fast_attention.engine.tracing import traced
from fast_attention.value import Value


class Features(NamedTuple):
    """Features with a common factor per token taken out: ``phi(x_i) = exp(log_scale_i) * values_i``.

    ``log_scale`` None stands for zeros. It keeps exponentials finite: the largest exponent goes there and never
    through ``exp``.
    """

    values: Float[Tensor, "*batch n C"]
    log_scale: Float[Tensor, "*batch n"] | None = None

    @property
    def free(self) -> Tensor:
        """Features of queries, without the factor that every normaliser cancels."""
        return self.values

    def per_token(self) -> Features:
        """Features over the largest one of the tokens where sums of them would overflow; unchanged elsewhere."""
        factor = numerics.factor(self.values, 2.0**28, rows=True)
        if self.log_scale is not None or (not traced() and bool((factor == 1.0).all())):
            return self
        return Features(self.values * factor, -factor[..., 0].log())


class Logs(NamedTuple):
    """Positive features by their logarithms: ``phi(x_i)_c = exp(logs_ic)``, none of which need fit into a number.

    A feature may be far below a token's largest one and yet be the one that meets the other token's: so the log
    scale of a sum is chosen feature by feature, from the keys, and the largest term of a query is always one.
    """

    logs: Float[Tensor, "*batch n C"]

    @property
    def log_scale(self) -> Float[Tensor, "*batch n C"]:
        """The logarithms, which are all scale."""
        return self.logs

    @property
    def free(self) -> Logs:
        """Features of queries: the scale of their largest term comes with the keys."""
        return self

    def per_token(self) -> Features:
        """Over each token's largest feature, where one scale is enough."""
        log_scale = self.logs.detach().amax(-1)
        return Features((self.logs - log_scale[..., None]).exp_(), log_scale)


Map = Callable[[Tensor], Features | Logs]


class FeatureMap(Value, ABC):
    """A feature map; linear attention applies the same one to queries and keys.

    To use your own, subclass it as a ``@dataclass(frozen=True, repr=False)`` with a ``__call__`` (it then prints,
    compares and hashes by its settings), or hand over a plain function, which is wrapped in ``Custom``. A map of
    exponentials overrides ``features`` as well, so that large inputs stay finite, and one with negative products
    ``phi(x) . phi(y)`` says so by ``signed``.
    """

    signed: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n C"]:
        """The features of every row of ``x``."""

    def features(self, x: Float[Tensor, "*batch n d"]) -> Features | Logs:
        """The features with their scale apart; the same numbers as the call."""
        return Features(self(x))


class Elementwise(FeatureMap, ABC):
    """A map that takes every number by itself, C = d."""
