"""Layers that compute again in the backward pass do so with the weights of the forward pass, or build a whole graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, parametrize

from fast_attention import TokenMixer, Unsupported
from fast_attention.nn import ChunkedFeedForward, Reversible, ReversibleSequence
from tests.parallel import spread


def reversible(mechanism: str = "FavorPlus(num_features=4)") -> nn.Module:
    torch.manual_seed(3)
    pairs = [Reversible(TokenMixer(8, 2, mechanism), ChunkedFeedForward(8, 12, chunks=2)) for _ in range(2)]
    return ReversibleSequence(pairs).double()


def chunked() -> nn.Module:
    torch.manual_seed(3)
    return ChunkedFeedForward(8, 12, chunks=3, activation=nn.PReLU()).double()


LAYERS = pytest.mark.parametrize("made", [reversible, chunked], ids=["reversible", "chunked"])
Layer = Callable[[], nn.Module]


def whole(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer computes, with the graph that autograd builds by itself."""
    if isinstance(layer, ChunkedFeedForward):
        return layer.narrow(layer.activation(layer.widen(x)))  # type: ignore[operator]
    y1 = y2 = x
    for block in layer.blocks:  # type: ignore[union-attr]
        y1 = y1 + block.f(y2)
        y2 = y2 + whole(block.g, y1)
    return (y1 + y2) / 2


def tokens(device: torch.device) -> Tensor:
    return torch.randn(2, 7, 8, dtype=torch.float64, device=device)


@LAYERS
def test_functional_call_trains_the_weights_it_was_given(made: Layer, device: torch.device) -> None:
    layer, x = made().to(device), tokens(device)
    given = {name: torch.randn_like(p, requires_grad=True) / 4 for name, p in layer.named_parameters()}
    buffers = {name: torch.randn_like(b) for name, b in layer.named_buffers()}
    other = made().to(device)
    other.load_state_dict(given | buffers)
    mine = torch.autograd.grad(functional_call(layer, given | buffers, (x,)).square().sum(), list(given.values()))
    expected = torch.autograd.grad(whole(other, x).square().sum(), list(other.parameters()))
    for one, two in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own rules of derivatives forwards
@LAYERS
def test_function_transforms_and_derivatives_forwards(made: Layer, device: torch.device) -> None:
    layer, x = made().to(device), tokens(device)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x,)).square().sum()

    weights = {name: p.detach() for name, p in layer.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    expected = torch.autograd.grad(whole(layer, x).square().sum(), list(layer.parameters()))
    for one, two in zip(each.values(), expected, strict=True):
        torch.testing.assert_close(one.sum(0), two)
    tangent = torch.randn_like(x)
    forwards = jvp(lambda x: whole(layer, x), (x,), (tangent,))[1]
    torch.testing.assert_close(jvp(layer, (x,), (tangent,))[1], forwards)
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, forwards)
    x = x[0, :3]
    torch.testing.assert_close(jacrev(layer)(x), jacrev(lambda x: whole(layer, x))(x))
    second = hessian(lambda x: whole(layer, x).square().sum())(x)
    torch.testing.assert_close(hessian(lambda x: layer(x).square().sum())(x), second)


@LAYERS
def test_cached_parametrizations_learn(made: Layer, device: torch.device) -> None:
    layer, x = made().to(device), tokens(device)
    for module in list(layer.modules()):
        if isinstance(module, nn.Linear):
            parametrizations.weight_norm(module)
    expected = torch.autograd.grad(whole(layer, x).sum(), list(layer.parameters()))
    with parametrize.cached():
        mine = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    for one, two in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, two)


def test_hooks_of_a_block_are_heard_in_training(device: torch.device) -> None:
    layer, x = reversible().to(device), tokens(device)
    heard: list[tuple[int, ...]] = []
    layer.blocks[1].register_forward_hook(lambda _, streams, out: heard.append(tuple(out[0].shape)))  # type: ignore[index]
    layer(x).sum().backward()
    assert heard == [(2, 7, 8)]


@pytest.mark.parametrize(
    "change", [parametrizations.spectral_norm, lambda _: nn.BatchNorm1d(7)], ids=["spectral", "batch"]
)
def test_buffers_that_training_changes_are_refused(change: Any, device: torch.device) -> None:
    g = nn.Sequential(change(nn.Linear(8, 8)))
    layer = ReversibleSequence([Reversible(TokenMixer(8, 2), g)]).to(device, torch.float64)
    x = tokens(device)
    with pytest.raises(Unsupported, match=r"blocks\.0\.g\.0.* is changed by the training pass.*\.eval\(\)"):
        layer(x)
    g.eval()
    layer(x).sum().backward()


def member(rank: int, folder: str) -> None:
    """One of two processes whose blocks are sharded in several ways."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    gradients = []
    for parts in (["blocks.0", "blocks.1"], ["blocks.0.f", "blocks.0.g", "blocks.1.f", "blocks.1.g"], []):
        layer = reversible()
        for part in [*parts, ""]:
            fully_shard(layer.get_submodule(part))
        layer(batch(rank)).square().mean().backward()
        gradients.append([p.grad.full_tensor() for p in layer.parameters()])  # type: ignore[union-attr]
    torch.save(gradients, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def batch(rank: int) -> Tensor:
    return torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def test_blocks_sharded_by_fsdp2() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spread(member, (folder,), 2)
        gradients = torch.load(Path(folder) / "0.pt")
    layer = reversible()
    whole(layer, torch.cat([batch(0), batch(1)])).square().mean().backward()
    for mine in gradients:
        for one, parameter in zip(mine, layer.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_chunked_layer_refuses_what_changes_its_weights() -> None:
    layer = ChunkedFeedForward(8, 12, chunks=3).double()
    parametrizations.spectral_norm(layer.widen)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"widen\.parametrizations.* is changed by the training pass.*weight_norm"):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer.eval()
    expected = layer.narrow(layer.activation(layer.widen(x)))
    torch.testing.assert_close(layer(x), expected)
    weight = layer.widen.parametrizations.weight.original  # type: ignore[union-attr]
    mine, whole_graph = (torch.autograd.grad(y.square().sum(), weight)[0] for y in (layer(x), expected))
    torch.testing.assert_close(mine, whole_graph)
