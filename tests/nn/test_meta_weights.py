"""Modules made on the meta device, whose weights ``to_empty`` leaves as memory happens to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast_attention import TokenMixer, catalogue

EVERY: list[Any] = [catalogue.default(name) for name in catalogue.names()]


@pytest.mark.parametrize("mechanism", EVERY, ids=repr)
def test_reset_parameters_draws_what_a_module_made_at_once_has(mechanism: Any) -> None:
    torch.manual_seed(3)
    mixer = TokenMixer(16, 2, mechanism, max_len=32)
    empty = TokenMixer(16, 2, mechanism, max_len=32, device="meta").to_empty(device="cpu")
    for tensor in empty.state_dict().values():
        tensor.fill_(-7)
    torch.manual_seed(3)
    for module in empty.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
    torch.testing.assert_close(empty.state_dict(), mixer.state_dict(), rtol=0, atol=0)
