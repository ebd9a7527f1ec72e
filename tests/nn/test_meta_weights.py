"""Modules made on the meta device, whose weights ``to_empty`` leaves as memory happens to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast_attention import MultiheadAttention, TokenMixer, catalogue

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


@pytest.mark.parametrize("widths", [{}, {"kdim": 8, "vdim": 4}])
def test_reset_parameters_draws_the_projections_again(widths: dict[str, int]) -> None:
    torch.manual_seed(3)
    layer = MultiheadAttention(16, 2, add_bias_kv=True, **widths)
    empty = MultiheadAttention(16, 2, add_bias_kv=True, **widths, device="meta").to_empty(device="cpu")
    for tensor in empty.state_dict().values():
        tensor.fill_(-7)
    torch.manual_seed(3)
    empty.out_proj.reset_parameters()  # drawn first, as torch does
    empty.reset_parameters()
    for name, tensor in layer.state_dict().items():
        if name != "out_proj.bias":  # zero in the layer, drawn by a Linear of itself
            torch.testing.assert_close(empty.state_dict()[name], tensor, rtol=0, atol=0)


def test_fsdp_s_loop_over_modules_leaves_nothing_as_it_was() -> None:
    layer = MultiheadAttention(16, 2, mechanism="FavorPlus(num_features=4)", device="meta").to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(-7)
    for module in layer.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()  # type: ignore[operator]
    assert not any(bool((tensor == -7).any()) for tensor in layer.state_dict().values())
