"""Reversible blocks and the chunked feed-forward layer: identities 14 of the specification, and training in a group."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fast_attention import TokenMixer
from fast_attention.nn import ChunkedFeedForward, Reversible, ReversibleSequence
from tests.cases import KINDS, some_keys
from tests.parallel import spread


class Mix(nn.Module):
    """F as in a transformer: norm, mixer, dropout."""

    def __init__(self, width: int, mechanism: Any, dropout: float) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), TokenMixer(width, 2, mechanism, max_len=32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        return self.dropout(self.mixer(self.norm(x), is_causal=is_causal, key_mask=key_mask))


def sequence(
    depth: int, device: Any, mechanism: Any = "Softmax", *, width: int = 8, dropout: float = 0.0, chunks: int = 1
) -> ReversibleSequence:
    torch.manual_seed(9)
    blocks = []
    for _ in range(depth):
        g = nn.Sequential(nn.LayerNorm(width), ChunkedFeedForward(width, 12, chunks=chunks, dropout=dropout))
        blocks.append(Reversible(Mix(width, mechanism, dropout), g))
    return ReversibleSequence(blocks).to(device, torch.float64)


def ordinary(blocks: ReversibleSequence, x: Tensor, **options: Any) -> Tensor:
    """The same sum with the graph that autograd builds by itself."""
    y1 = y2 = x
    for block in blocks.blocks:
        y1, y2 = block(y1, y2, **options)
    return (y1 + y2) / 2


def gradients(module: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    torch.manual_seed(2)
    probe = torch.randn(out.shape, dtype=out.dtype).to(out.device)
    leaves = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return list(torch.autograd.grad((out * probe).sum(), leaves, allow_unused=True, materialize_grads=True))


def tokens(device: Any, *shape: int, width: int = 8) -> Tensor:
    return torch.randn(*shape, width, dtype=torch.float64).to(device).requires_grad_()


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_gradients_are_those_of_the_ordinary_graph(mechanism: Any, device: torch.device) -> None:
    """14: to 1e-10, with dropout, masks, random features and hashes replayed."""
    blocks, x = sequence(3, device, mechanism, dropout=0.3, chunks=2), tokens(device, 2, 7)
    options: list[Any] = [{"is_causal": is_causal, "key_mask": None} for is_causal in mechanism.traits.modes]
    if mechanism.traits.padding:
        options.append({"is_causal": mechanism.traits.modes[0], "key_mask": some_keys(2, 7, device)})
    for option in options:
        torch.manual_seed(1)
        plain = ordinary(blocks, x, **option)
        torch.manual_seed(1)
        ours = blocks(x, **option)
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        for mine, reference in zip(gradients(blocks, x, ours), gradients(blocks, x, plain), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_inverse(mechanism: Any, device: torch.device) -> None:
    """14: 7e-16 in float64 per layer."""
    (block,) = sequence(1, device, mechanism).blocks
    x1, x2 = tokens(device, 2, 7), tokens(device, 2, 7)
    order = {"is_causal": mechanism.traits.modes[0]}
    back = block.inverse(*block(x1, x2, **order), **order)
    for got, wanted in zip(back, (x1, x2), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


def test_shapes_alone_go_through_both_passes() -> None:
    """On the meta device, where operations of a training step are counted before there is memory for it."""
    blocks = sequence(2, "meta", dropout=0.5)
    x = torch.zeros(2, 6, 8, dtype=torch.float64, device="meta", requires_grad=True)
    blocks(x).sum().backward()
    assert all(parameter.grad is not None for parameter in (x, *blocks.parameters()))


def test_the_generators_go_on_as_if_nothing_had_been_replayed(device: torch.device) -> None:
    blocks, x = sequence(2, device, dropout=0.3), tokens(device, 2, 5)
    out = blocks(x)
    torch.manual_seed(4)
    torch.randn(3, device=device)
    out.sum().backward()
    after = torch.randn(3, device=device), torch.randn(3)
    torch.manual_seed(4)
    torch.randn(3, device=device)
    torch.testing.assert_close(after, (torch.randn(3, device=device), torch.randn(3)), rtol=0, atol=0)


def test_autocast_is_replayed(device: torch.device) -> None:
    blocks, x = sequence(2, device).float(), tokens(device, 2, 6).detach().float().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        ours, plain = blocks(x), ordinary(blocks, x)
        inside = gradients(blocks, x, blocks(x))  # a backward pass under autocast is nobody's wish, but happens
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    exact = gradients(blocks, x, ordinary(blocks, x))
    for mine, same, reference, wide in zip(
        gradients(blocks, x, ours), inside, gradients(blocks, x, plain), exact, strict=True
    ):
        # The rebuilt inputs differ by a rounding: the same error against float32, not the same bits.
        torch.testing.assert_close(mine, reference, rtol=0.05, atol=0.05 * float(wide.abs().max()) + 1e-3)
        torch.testing.assert_close(same, mine, rtol=0, atol=0)


def test_weights_cast_without_a_graph_are_not_kept(device: torch.device) -> None:
    """Autocast keeps what it has cast: a copy made inside our pass, without a graph, must not serve others."""
    blocks, x = sequence(1, device).float(), tokens(device, 2, 6).detach().float()
    with torch.autocast(device.type, torch.bfloat16):
        blocks(x)
        shared = blocks.blocks[0].f.mixer.in_proj
        shared(x).sum().backward()
    assert shared.weight.grad is not None


def test_frozen_shared_and_absent_gradients(device: torch.device) -> None:
    blocks, x = sequence(3, device), tokens(device, 2, 5)
    blocks.blocks[2].f = blocks.blocks[0].f
    blocks.blocks[1].g[1].widen = blocks.blocks[0].g[1].widen
    blocks.blocks[1].f.requires_grad_(False)
    for mine, reference in zip(gradients(blocks, x, blocks(x)), gradients(blocks, x, ordinary(blocks, x)), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
    blocks(x.detach()).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in blocks.parameters())
    blocks.requires_grad_(False)
    assert not blocks(x.detach()).requires_grad
    (through,) = torch.autograd.grad(blocks(x).sum(), x)
    torch.testing.assert_close(through, torch.autograd.grad(ordinary(blocks, x).sum(), x)[0])


def test_hooks_on_parameters_hear_one_gradient(device: torch.device) -> None:
    blocks, x = sequence(2, device), tokens(device, 2, 5)
    heard: list[Tensor] = []
    weight = blocks.blocks[0].f.mixer.in_proj.weight
    expected = torch.autograd.grad(ordinary(blocks, x).sum(), weight)[0]
    weight.register_hook(lambda gradient: heard.append(gradient) or 2 * gradient)
    blocks(x).sum().backward()
    torch.testing.assert_close(heard, [expected])
    torch.testing.assert_close(weight.grad, 2 * expected)


def test_a_changed_weight_is_noticed(device: torch.device) -> None:
    """As in the ordinary graph: rebuilding with weights after a step would be silently wrong."""
    blocks, x = sequence(2, device), tokens(device, 2, 5)
    out = blocks(x)
    with torch.no_grad():
        blocks.blocks[0].f.mixer.in_proj.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_and_only_once_differentiable(device: torch.device) -> None:
    blocks, x = sequence(2, device, dropout=0.3), tokens(device, 2, 5)
    out = blocks(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, x, retain_graph=True), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out, x, create_graph=True)


# ------------------------------------------------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """The most bytes alive at once in storages made under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def peak(blocks: ReversibleSequence, x: Tensor, run: Any) -> int:
    blocks.zero_grad()
    gc.collect()
    if x.is_cuda:
        run(blocks, x).sum().backward()  # the libraries take their workspaces once
        blocks.zero_grad()
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        run(blocks, x).sum().backward()
        return torch.cuda.max_memory_allocated(x.device) - before
    with Peak() as mode:
        run(blocks, x).sum().backward()
    return mode.most


def saved(run: Any, blocks: ReversibleSequence, x: Tensor) -> int:
    """Bytes kept for the backward pass, parameters apart."""
    own, kept = {p.untyped_storage().data_ptr() for p in blocks.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(blocks, x)
    size = sum(kept.values())
    del out
    return size


def by_module(blocks: ReversibleSequence, x: Tensor) -> Tensor:
    return blocks(x)


def test_memory_does_not_depend_on_depth(device: torch.device) -> None:
    """14: what is kept, and what is alive at most, at 2 and at 12 layers."""
    x = tokens(device, 2, 1024)
    shallow, deep = sequence(2, device, dropout=0.1), sequence(12, device, dropout=0.1)
    assert saved(by_module, deep, x) == saved(by_module, shallow, x) == 2 * x.numel() * x.element_size()
    assert saved(ordinary, deep, x) > 5 * saved(ordinary, shallow, x)
    # What grows are the gradients of the parameters and the states of the generators: 5 kB a function on a CPU.
    assert peak(deep, x, by_module) < 1.1 * peak(shallow, x, by_module)
    assert peak(deep, x, ordinary) > 3 * peak(shallow, x, ordinary)


# ------------------------------------------------------------------------------------------------- chunked feed-forward


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 11, 20])
def test_chunks_change_nothing(chunks: int, device: torch.device) -> None:
    """14: the same outputs and gradients for every number of chunks, dividing the length or not."""
    torch.manual_seed(3)
    layer = ChunkedFeedForward(8, 24, chunks=chunks).to(device, torch.float64)
    x = tokens(device, 2, 11)
    plain = layer.narrow(nn.functional.gelu(layer.widen(x)))
    out = layer(x)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(gradients(layer, x, out), gradients(layer, x, plain), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain, rtol=1e-12, atol=1e-12)


def test_chunks_save_memory(device: torch.device) -> None:
    x = tokens(device, 2, 96)

    def most(chunks: int, run: Any) -> int:
        torch.manual_seed(3)
        layer: Any = ChunkedFeedForward(8, 512, chunks=chunks).to(device, torch.float64)
        return peak(layer, x, run)

    def evaluated(layer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = layer(x)
        return out + 0 * x

    widened = 2 * 96 * 512 * 8  # bytes of the widened tokens
    weights = 2 * 8 * 512 * 8 + 512 * 8 + 64
    for run, copies in ((by_module, 2), (evaluated, 1)):
        assert most(1, run) > copies * widened
        assert most(8, run) < 4 * widened / 8 + 3 * weights + 20 * x.numel() * 8


def test_chunks_settings_and_dropout(device: torch.device) -> None:
    with pytest.raises(ValueError, match="chunks=0"):
        ChunkedFeedForward(8, chunks=0)
    layer = ChunkedFeedForward(8, chunks=3, activation=torch.relu, dropout=0.5, bias=False).to(device, torch.float64)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "widen.weight": (32, 8), "narrow.weight": (8, 32),
    }  # fmt: skip
    x = tokens(device, 2, 6)
    torch.manual_seed(1)
    out = layer(x)
    torch.manual_seed(1)
    hidden = [nn.functional.dropout(layer.widen(part).relu(), 0.5) for part in x.view(2, 2, 3, 8).unbind(2)]
    plain = torch.stack([layer.narrow(part) for part in hidden], 2).view(2, 6, 8)
    torch.testing.assert_close(out, plain)
    for mine, reference in zip(gradients(layer, x, out), gradients(layer, x, plain), strict=True):
        torch.testing.assert_close(mine, reference)
    torch.testing.assert_close(layer.eval()(x), layer.narrow(layer.widen(x).relu()))


# ------------------------------------------------------------------------------------------------ compilers and groups


@pytest.mark.filterwarnings("ignore")  # dynamo reads .grad of what is no leaf when it breaks a graph
def test_compiled_training_is_eager_training(device: torch.device) -> None:
    torch._dynamo.reset()
    blocks, x = sequence(2, device, dropout=0.3, chunks=2), tokens(device, 2, 5)
    torch.manual_seed(1)
    expected = gradients(blocks, x, blocks(x, is_causal=True))
    torch.manual_seed(1)
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph.code)
        return graph.forward

    out = torch.compile(blocks, backend=backend)(x, is_causal=True)
    for mine, reference in zip(gradients(blocks, x, out), expected, strict=True):
        torch.testing.assert_close(mine, reference)
    # A compiled dropout draws other numbers than the eager one that replays it.
    assert compiled
    assert not any(word in code for code in compiled for word in ("dropout", "linear"))


def test_evaluation_compiles_and_exports(device: torch.device) -> None:
    torch._dynamo.reset()
    blocks = sequence(2, device, chunks=2).eval()
    x, y = tokens(device, 2, 6).detach(), tokens(device, 2, 11).detach()
    with torch.no_grad():
        compiled = torch.compile(blocks, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, is_causal=True), blocks(x, is_causal=True))
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(blocks, (x,), dynamic_shapes={"x": {1: length}}).module()
    torch.testing.assert_close(exported(y), blocks(y))


def batch(rank: int) -> Tensor:
    return torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def member(rank: int, folder: str) -> None:
    """One of two processes that train the same blocks, each on its own batch."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    blocks = sequence(3, "cpu", chunks=2)
    together = DistributedDataParallel(blocks, find_unused_parameters=False)
    for _ in range(2):  # DDP lays out its buckets anew after the first pass
        blocks.zero_grad()
        together(batch(rank), is_causal=True).square().mean().backward()
    torch.save([parameter.grad for parameter in blocks.parameters()], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel() -> None:
    """Two processes, gradients averaged by torch's DDP: those of one process with both batches."""
    with tempfile.TemporaryDirectory() as folder:
        spread(member, (folder,), 2)
        both = [torch.load(Path(folder) / f"{rank}.pt") for rank in (0, 1)]
    blocks = sequence(3, "cpu", chunks=2)
    ordinary(blocks, torch.cat([batch(0), batch(1)]), is_causal=True).square().mean().backward()
    for one, other, parameter in zip(*both, blocks.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, parameter.grad, rtol=1e-10, atol=1e-12)
