"""Training on devices that know no float64, as Apple's ``mps``: sums are widened on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fast_attention.nn.models import Model
from fast_attention.tasks.bytes import ByteLM
from fast_attention.training import by_position, steps
from fast_attention.training.loop import train
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings


class Narrow(TorchFunctionMode):
    """Refuses to make numbers of float64 on a named device, and to widen any by ``double``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_device = kwargs.get("device") is not None and kwargs.get("dtype") is torch.float64
        assert not on_device, func
        assert func is not Tensor.double
        return func(*args, **kwargs)


def test_training_makes_no_float64_on_its_device(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"so it is, " * 100)
    task = ByteLM(path=str(tmp_path / "text"), context=8)
    config = steps.config_for(task, width=8, heads=2, layers=1, positions="none")
    settings = TrainingSettings(steps=2, batch_size=2, accumulate=2, evaluation_batches=1, log_every=1)
    with Narrow():
        assert train(task, config, settings, tmp_path / "run").step == 2
        by_position.loss_by_position(Model(config), task, settings, Group(0, 1, torch.device("cpu")))
