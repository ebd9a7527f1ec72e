"""``swap(model)`` beside what people do instead to speed up an encoder on a CPU: tokens per second, and outputs.

``python -m benchmarks.instead`` takes about eight minutes of one quiet core. Six ways run in turns on the same texts:
transformers in float32, ``swap(model)``, ONNX Runtime in float32 and with int8 weights, torch's dynamic int8 alone and
with ``swap(model)``. Times are processor time of one thread. Outputs are the last hidden states: their largest
difference from those of transformers in float32, over the largest value, and the mean cosine of a token. MiniLM is
pretrained, with ``extend`` beyond 512 tokens. ModernBERT has random weights.

    python -m benchmarks.instead --cases modernbert --lengths 128 2048
    python benchmarks/keep.py out/instead.json instead     # into records/
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.whole_models import TEXTS, WORDS, batched, difference, minilm, mixed, modernbert, prose
from experiments.arguments import Arguments
from fast_attention import files, swap
from fast_attention.lab import environment, loading, measure, records
from fast_attention.lab.tables import Table, say, show

LONGEST = 512  # tokens of the mixed batch's longest text
SCORES = 7  # tensors of all pairs that ONNX Runtime holds at once, at most
LARGE = 2**30  # bytes of scores from which on it gives memory back, so that two sessions need not fit together
ORIGINAL = "transformers, float32"

Way = Callable[[dict[str, Tensor]], Tensor]  # from a padded batch to its last hidden states


class Hidden(nn.Module):
    """A model that returns its last hidden states and nothing else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def in_torch(model: Any) -> Way:
    """The model itself."""

    @torch.no_grad()
    def run(given: dict[str, Tensor]) -> Tensor:
        return model(**given).last_hidden_state

    return run


def in_onnx(file: Path, heads: int) -> Way:
    """An ONNX file in ONNX Runtime, by one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    frugal = onnxruntime.RunOptions()
    frugal.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def run(given: dict[str, Tensor]) -> Tensor:
        chosen = frugal if scores(given, heads) > LARGE else None
        return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in given.items()}, chosen)[0])

    return run


def exported(model: Any, file: Path) -> None:
    """Write the model as an ONNX file, both sizes of a batch left open."""
    texts, length = torch.export.Dim("texts"), torch.export.Dim("length")
    example = batched([torch.arange(3, 259), torch.arange(3, 103)])
    sizes = {name: {0: texts, 1: length} for name in example}
    torch.onnx.export(
        Hidden(copy.deepcopy(model)), (), file, kwargs=example, dynamo=True, verbose=False, external_data=False,
        input_names=[*example], output_names=["hidden"], dynamic_shapes=sizes,
    )  # fmt: skip


def ways(model: Any, folder: Path) -> dict[str, Way]:
    """Every way of running a model, by name."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole, small = folder / "model.onnx", folder / "int8.onnx"
    exported(model, whole)
    quantize_dynamic(whole, small, weight_type=QuantType.QInt8)
    swap(swapped := copy.deepcopy(model))
    heads = model.config.num_attention_heads
    return {
        ORIGINAL: in_torch(model),
        "swap(model)": in_torch(swapped),
        "ONNX Runtime, float32": in_onnx(whole, heads),
        "ONNX Runtime, int8": in_onnx(small, heads),
        "torch, dynamic int8": in_torch(int8(model)),
        "torch, dynamic int8, swap(model)": in_torch(int8(swapped)),
    }


def int8(model: Any) -> Any:
    """A copy of the model whose linear maps have int8 weights and round their inputs to int8."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def texts_of(name: str, lengths: list[int]) -> list[Tensor]:
    """Texts of these lengths; for random weights the same numbers within their small vocabulary."""
    texts = prose(lengths)
    return texts if name == "minilm" else [3 + text % (WORDS - 3) for text in texts]


def scores(given: dict[str, Tensor], heads: int) -> int:
    """Bytes of the scores of all pairs that ONNX Runtime holds at once."""
    texts, length = given["input_ids"].shape
    return SCORES * 4 * texts * heads * length**2


def too_large(way: str, given: dict[str, Tensor], heads: int) -> str:
    """Why a batch is not run, or nothing."""
    needed = scores(given, heads) if way.startswith("ONNX") else 0
    fits = needed < measure.memory_at_hand(torch.device("cpu"))
    return "" if fits else f"scores of all pairs would take up to {needed / 2**30:.0f} GiB"


def measured(runs: dict[str, Way], given: dict[str, Tensor], rounds: int, patience: float) -> dict[str, dict[str, Any]]:
    """Median seconds of every way in turns, and how far its outputs are from the original's.

    The first round, which pays for set-up, counts only where fewer than three fit into ``patience`` seconds.
    """
    is_token = given["attention_mask"].bool()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    apart: dict[str, dict[str, float]] = {}
    began, expected = time.perf_counter(), torch.empty(0)
    for number in range(rounds):
        if number and time.perf_counter() - began > patience:
            break
        for name, run in runs.items():
            start = time.process_time()
            rows = run(given)
            seconds[name].append(time.process_time() - start)
            if number == 0:
                rows = rows[is_token]
                expected = rows if name == ORIGINAL else expected
                cosine = float(F.cosine_similarity(expected.double(), rows.double(), dim=-1).mean())
                apart[name] = {"difference": difference([expected], [rows]), "cosine": cosine}
    kept = {name: each[1:] if len(each) > 2 else each for name, each in seconds.items()}
    tokens = int(is_token.sum())
    return {
        name: {"seconds": (median := statistics.median(each)), "tokens_per_second": tokens / median,
               "rounds": len(each), **apart[name]}
        for name, each in kept.items()
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each model and way: tokens per second by text, and the worst of its outputs."""
    columns = [*dict.fromkeys(row["texts"] for row in rows)]
    cells = []
    for case, way in dict.fromkeys((row["case"], row["way"]) for row in rows):
        own = {row["texts"]: row for row in rows if (row["case"], row["way"]) == (case, way)}
        ran = [row for row in own.values() if not row["note"]]
        speeds = [f"{own[name]['tokens_per_second']:,.0f}" if own[name] in ran else "-" for name in columns]
        worst = [f"{max(row['difference'] for row in ran):.0e}", f"{min(row['cosine'] for row in ran):.4f}"]
        cells.append([case, way, *speeds, *(worst if ran else ["-", "-"])])
    return Table(["tokens per second", "", *columns, "difference", "cosine"], cells, left=[1])


def main(arguments: list[str] | None = None) -> None:
    """Print the table and write the record."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    built = {"minilm": minilm, "modernbert": modernbert}
    parser.add_argument("--cases", nargs="+", choices=built, default=[*built], help="Models; both if not given.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192], help="Tokens of one text.")
    parser.add_argument("--longest", type=int, default=LONGEST, help="Tokens of the mixed batch's longest text.")
    parser.add_argument("--rounds", type=int, default=9, help="At most so many for each text.")
    parser.add_argument("--patience", type=float, default=10.0, help="Seconds after which no further round begins.")
    parser.add_argument("--out", type=Path, default=Path("out/instead.json"), help="The record.")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loading.quiet_transformers("the benchmark")
    warnings.simplefilter("ignore")  # of the export, and that torch's quantization moves to another package
    logging.disable(logging.WARNING)
    command = ["python", "-m", "benchmarks.instead", *(arguments if arguments is not None else sys.argv[1:])]
    meta = {"status": "running", "command": command, "started": environment.timestamp()}
    meta |= environment.environment(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    batches = {f"{TEXTS} texts": mixed(asked.longest)} | {f"{n:,} tokens": [n] for n in sorted(asked.lengths)}
    for case in asked.cases:
        torch.manual_seed(0)
        model = built[case](max(asked.longest, *asked.lengths)).eval()
        with tempfile.TemporaryDirectory() as folder:
            say(f"{case}: writing and quantizing")
            runs = ways(model, Path(folder))
            for words, lengths in batches.items():
                given = batched(texts_of(case, lengths))
                notes = {way: too_large(way, given, model.config.num_attention_heads) for way in runs}
                able = {way: run for way, run in runs.items() if not notes[way]}
                found = measured(able, given, asked.rounds, asked.patience)
                for way in runs:
                    row = {"case": case, "way": way, "texts": words, "tokens": sum(lengths), "note": notes[way]}
                    rows.append(row | found.get(way, {}))
                say(f"{case}, {words}: " + ", ".join(f"{way} {row['seconds']:.3f} s" for way, row in found.items()))
                files.write(asked.out, records.sealed("instead", {"meta": meta, "rows": rows}) + "\n")
    meta |= {"status": "complete", "finished": environment.timestamp()}
    meta |= {"load_average_after": environment.load_average()}
    files.write(asked.out, records.sealed("instead", {"meta": meta, "rows": rows}) + "\n")
    notes = {f"{row['case']}, {row['way']}, {row['texts']}: {row['note']}" for row in rows if row["note"]}
    show(table(rows), *sorted(notes), f"Record: {asked.out}")


if __name__ == "__main__":
    main()
