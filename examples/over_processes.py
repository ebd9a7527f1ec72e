"""One sequence over several processes: ``torchrun --nproc-per-node 4 examples/over_processes.py``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from fast_attention import TokenMixer, attention
from fast_attention.parallel import counted, parallelize

if "RANK" in os.environ:
    dist.init_process_group("gloo")  # "nccl" on GPUs
else:  # without torchrun: one process
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

# Each process has its own tokens of one long sequence, and gets their outputs.
q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
with counted() as traffic:
    out = attention(q, k, v, "LinearAttention", is_causal=True, group=dist.group.WORLD)
assert out.shape == q.shape  # those of this process's queries
print(f"process {rank} of {world}: {tuple(out.shape)}, {traffic.bytes:,} bytes sent to others")

# A module, or a whole model, on every process the same weights: seeded alike.
torch.manual_seed(0)
mixer = parallelize(TokenMixer(64, 8, "FavorPlus(num_features=32)", rotary=True), dist.group.WORLD)
x = torch.randn(1, 1000 + rank, 64)  # shards may differ in length
mixer(x, is_causal=True).sum().backward()
share = mixer.in_proj.weight.grad
assert share is not None
print(f"process {rank}: its share of the gradients, which are to be summed: {share.norm():.3f}")
dist.destroy_process_group()
