"""One mechanism of each strategy over two processes: what seeded faults are looked for with, in a few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fast_attention import catalogue
from fast_attention.parallel import states
from tests.parallel import leave, spread, wrong
from tests.parallel.test_parallel import compare, draws

NAMES = (
    "LinearAttention()", "FavorPlus(num_features=5)", "Manhattan()", "DecayedLinearAttention()", "Local(window=3)",
    "BlockLocal(block_size=4)", "Hybrid(near=Local(window=2), far=FavorPlus(num_features=5))", "Linformer(rank=5)",
    "Linformer(rank=5, projection=MeanPool())", "Linformer(rank=7, projection=Convolution())",
    "BigBird(block_size=2)", "BigBird(block_size=2, num_global_blocks=0, num_global_tokens=3)",
    "ByLength(long=Local(window=4), above=8)", "AFTFull()", "AFTLocal(window=3)",
    "AFTConv(kernel_size=3)", "CosFormer()", "Softmax(bias=ALiBi())", "Local(window=3, bias=TransformerXL(width=4))",
    "Hybrid(near=Local(window=2, bias=T5Buckets()), far=FavorPlus(num_features=5))",
    "Local(window=2, dilation=(3, 1))", "Adapted(mechanism=Local(window=3), rank=2)",
)  # fmt: skip


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    results: dict[str, str] = {}
    for name, found in comparisons(rank):
        results[name] = found
        if wrong(found):
            break
    torch.save(results, f"{folder}/{rank}")
    leave()


def comparisons(rank: int) -> Iterator[tuple[str, str]]:
    """What is compared, and what differs; empty for nothing."""
    yield "draws", "" if "different weights" in draws(rank) else "different weights are taken"
    for name in NAMES:
        mechanism = catalogue.parse(name)
        for is_causal in mechanism.traits.modes:
            yield f"{name} {is_causal}", compare(mechanism, rank, 2, is_causal, masked=True)
    states.LONG = 1  # states are sent while others are summed
    for name in (*NAMES, "DecayedLinearAttention(gate='learned')", "AFTSimple()", "LogAttention()"):
        mechanism = catalogue.parse(name)
        if mechanism.traits.memory == "constant":
            yield f"{name}, in halves", compare(mechanism, rank, 2, is_causal=True, masked=mechanism.traits.padding)


def test_strategies_give_what_one_process_gives(tmp_path: Path) -> None:
    spread(process, (str(tmp_path),), 2)
    told = {key: value for rank in (0, 1) for key, value in torch.load(tmp_path / str(rank)).items() if value}
    assert not told, told
