"""No gradient hangs on what torch takes for the slope of ``clamp`` at its bound: 1 up to 2.14, 0 from 2.15 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fast_attention import Attention
from fast_attention.engine.numerics import at_most, no_less
from fast_attention.engine.operation import Operation
from tests.cases import SETTINGS, bind

CLAMPS = {torch.clamp, torch.clamp_min, torch.clamp_max, Tensor.clamp, Tensor.clamp_min, Tensor.clamp_max}


class Slope(TorchFunctionMode):
    """``clamp`` with a slope of our choice at its bounds."""

    def __init__(self, slope: int) -> None:
        super().__init__()
        self.slope = slope

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in CLAMPS or not out.is_floating_point():
            return out
        for bound in (*args[1:], *(kwargs or {}).values()):
            if bound is not None:
                out = torch.where(args[0] == bound, args[0] if self.slope else out.detach(), out)
        return out


def inputs(mechanism: Any, length: int) -> list[Tensor]:
    """Gaussian, with tokens that stand twice, a zero and a largest one at the end: ties wherever units are maxima."""
    torch.manual_seed(0)
    count, shape = (3, (1, 2, length, 8)) if isinstance(mechanism, Attention) else (1, (1, length, 16))
    found = [torch.randn(shape, dtype=torch.float64) for _ in range(count)]
    for x in found:
        x[..., 3, :] = x[..., 2, :]
        x[..., 5, :] = 0.0
        x[..., -1, :] = x.amax(-2)
    return [x.requires_grad_() for x in found]


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_do_not_hang_on_the_slope_at_a_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operation, "__call__", lambda self, *tensors, **settings: self.reference(*tensors, **settings))
    for mechanism, is_causal in ((m, is_causal) for m in SETTINGS[name] for is_causal in m.traits.modes):
        bound, given = bind(mechanism), inputs(mechanism, 21)
        weights = [*given, *bound.parameters()]
        found = []
        for slope in (0, 1):
            with Slope(slope):
                out = bound(*given, is_causal=is_causal)
                found.append(torch.autograd.grad(out.square().sum(), weights, allow_unused=True))
        for low, high in zip(*found, strict=True):
            if low is not None:
                torch.testing.assert_close(low, high, rtol=1e-10, atol=1e-10, msg=lambda m: f"{mechanism!r}: {m}")


def test_a_bound_has_slope_one_at_itself() -> None:
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, float("nan")], requires_grad=True)
    for made, expected, slope in (
        (at_most(x, 0.0), x.detach().clamp(max=0.0), [1.0, 1.0, 1.0, 0.0, 1.0]),
        (no_less(x, -1.0), x.detach().clamp(min=-1.0), [0.0, 1.0, 1.0, 1.0, 1.0]),
    ):
        torch.testing.assert_close(made.detach(), expected, equal_nan=True)
        assert torch.autograd.grad(made.sum(), x)[0].tolist() == slope
