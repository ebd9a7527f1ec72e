"""One sequence over several processes, spawned once for each file."""

from __future__ import annotations

import os

import torch.distributed as dist


def leave() -> None:
    """End this process when all are done: an ordinary exit was seen to abort, rarely, while threads of gloo end."""
    dist.barrier()
    os._exit(0)
