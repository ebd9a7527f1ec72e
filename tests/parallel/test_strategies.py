"""One mechanism of each strategy over two processes: what seeded faults are looked for with, in a few seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fast_attention import catalogue
from fast_attention.parallel import states
from tests.parallel import leave
from tests.parallel.test_parallel import compare, draws

NAMES = (
    "LinearAttention()", "FavorPlus(num_features=5)", "Manhattan()", "DecayedLinearAttention()", "Local(window=3)",
    "BlockLocal(block_size=4)", "Hybrid(near=Local(window=2), far=FavorPlus(num_features=5))", "Linformer(rank=5)",
    "Linformer(rank=5, projection=MeanPool())", "Linformer(rank=7, projection=Convolution())",
    "BigBird(block_size=2)", "BigBird(block_size=2, num_global_blocks=0, num_global_tokens=3)",
    "ByLength(long=Local(window=4), above=8)", "AFTFull()", "AFTLocal(window=3)",
    "AFTConv(kernel_size=3)", "Softmax(bias=ALiBi())", "Local(window=3, bias=TransformerXL(width=4))",
    "Hybrid(near=Local(window=2, bias=T5Buckets()), far=FavorPlus(num_features=5))",
    "Local(window=2, dilation=(3, 1))", "Adapted(mechanism=Local(window=3), rank=2)",
)  # fmt: skip


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    results: dict[str, Any] = {}
    for name in NAMES:
        mechanism = catalogue.parse(name)
        for is_causal in [False, True] if mechanism.traits.causal else [False]:
            results[f"{name} {is_causal}"] = compare(mechanism, rank, 2, is_causal, masked=True)
    states.LONG = 1  # states are sent while others are summed
    for name in (*NAMES, "DecayedLinearAttention(gate='learned')", "AFTSimple()", "LogAttention()"):
        mechanism = catalogue.parse(name)
        if mechanism.traits.memory == "constant":
            results[f"{name}, in halves"] = compare(mechanism, rank, 2, is_causal=True, masked=mechanism.traits.padding)
    results["draws"] = "" if "different weights" in draws(rank) else "different weights are taken"
    torch.save(results, f"{folder}/{rank}")
    leave()


def test_strategies_give_what_one_process_gives(tmp_path: Path) -> None:
    mp.spawn(process, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    wrong = {key: value for rank in (0, 1) for key, value in torch.load(tmp_path / str(rank)).items() if value}
    assert not wrong, wrong
