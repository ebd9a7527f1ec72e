"""The strategies over two GPUs, joined by NCCL, give what one GPU gives; ``make gpu`` runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.parallel import LENGTHS, leave
from tests.parallel.test_parallel import TRIED, compare


def process(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    dist.init_process_group("nccl", f"file://{folder}/meet", rank=rank, world_size=2, device_id=device)
    results: dict[str, Any] = {}
    for mechanism in TRIED:
        for is_causal in mechanism.traits.modes:
            found = compare(mechanism, LENGTHS[2], LENGTHS[2], is_causal, masked=True, device=device)
            results[f"{mechanism!r} {is_causal}"] = found
    leave(results, folder)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins two GPUs or more, and fewer are at hand")
def test_strategies_over_two_gpus(tmp_path: Path) -> None:
    mp.spawn(process, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    wrong = {key: value for rank in (0, 1) for key, value in torch.load(tmp_path / str(rank)).items() if value}
    assert not wrong, wrong
