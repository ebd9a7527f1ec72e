"""One sequence over the workers of Ray Train: ``pip install "ray[train]"``, then ``python examples/ray_train.py``."""

from __future__ import annotations

import math
from typing import Any

import ray.train  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from ray.train import ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.nn.functional import cross_entropy

from fast_attention import TokenMixer
from fast_attention.parallel import parallelize


def train_loop(settings: dict[str, Any]) -> None:
    """What every worker runs: its tokens of one sequence, and the sum of all workers' shares of the gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and the same sequence everywhere
    layers = nn.ModuleList([nn.Embedding(16, 64), TokenMixer(64, 4, "LinearAttention"), nn.Linear(64, 16)])
    embedding, mixer, head = model = parallelize(layers, dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    sequence = torch.arange(settings["tokens"] + 1)[None] % 16
    mine = sequence[:, :-1].chunk(world, 1)[rank]
    targets = sequence[:, 1:].chunk(world, 1)[rank]
    for step in range(settings["steps"]):
        optimizer.zero_grad()
        x = embedding(mine)
        logits = head(x + mixer(x, is_causal=True))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / settings["tokens"]
        loss.backward()
        for weight in model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        ray.train.report({"step": step, "loss": whole.item()})
        if rank == 0:
            print(f"step {step}: loss {whole:.3f}", flush=True)
        assert step > 0 or abs(whole.item() - math.log(16)) < 1


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"tokens": 1024, "steps": 5, "lr": 1e-3},
        torch_config=TorchConfig(backend="gloo"),  # "nccl" on GPUs
        scaling_config=ScalingConfig(num_workers=2),
    )
    result = trainer.fit()
    assert result.error is None
    print("Trained; results are in", result.path)
