"""Time, memory and outputs of whole models before and after ``swap(model)``.

``python -m benchmarks.whole_models`` takes about eight minutes of one quiet core. Two copies of a model run in turns,
one of them swapped. A figure is the median of the pairs' ratios; above 1 the swapped model takes less. All weights are
random, except MiniLM's. One thread is timed by processor time, several by wall time. Peak memory is counted: the most
bytes of tensors at once, beyond weights and inputs.

    python -m benchmarks.whole_models --cases t5 longformer --lengths 4096 --pairs 3
    python -m benchmarks.whole_models --threads 2 --out out/whole-models-2.json
    python benchmarks/keep.py out/whole-models.json whole-models     # into records/
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from experiments import data
from experiments.arguments import Arguments
from fast_attention import extend, files, keep_memory, swap
from fast_attention.counting import peak_bytes
from fast_attention.lab import environment, loading, records
from fast_attention.lab.tables import Table, Value, say, show

WORDS = 512  # in the vocabulary of models with random weights
TEXTS, LEAST, TOGETHER = 32, 16, 8  # of the mixed batch: texts, tokens of the shortest, texts of a sorted batch

Run = Callable[[], list[Tensor]]
Models = tuple[Any, Any]  # as transformers made it, and swapped
Sides = tuple[Run, ...]  # the same of both; they return what is compared
Lengths = Callable[[int], list[int]]  # from the longest text's length to those of all


# Models


def wide(**own: Any) -> dict[str, Any]:
    """The settings that models with random weights share, and a model's own."""
    return {
        "vocab_size": WORDS, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **own,
    }  # fmt: skip


def causal(**own: Any) -> dict[str, Any]:
    """The same of decoders: a window of 512 tokens, two heads of keys, no cache."""
    grouped = {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 512, "use_cache": False}
    return wide(intermediate_size=1024, **grouped, **own)


def modernbert(positions: int) -> Any:
    """ModernBERT as wide as Ettin 32M, with 6 layers: four of them see 64 tokens on each side."""
    from transformers import ModernBertConfig, ModernBertModel

    own = {"intermediate_size": 576, "local_attention": 128, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertModel(ModernBertConfig(**wide(**own, max_position_embeddings=max(positions, 8192))))


def gemma3(positions: int) -> Any:
    """Gemma 3 with 6 layers: five of them see the last 512 tokens."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    return Gemma3TextModel(Gemma3TextConfig(**causal(query_pre_attn_scalar=64, max_position_embeddings=positions)))


def llama(positions: int) -> Any:
    """Llama with 6 layers: all of them see all tokens before."""
    from transformers import LlamaConfig, LlamaModel

    settings = causal(max_position_embeddings=positions)
    del settings["sliding_window"]
    return LlamaModel(LlamaConfig(**settings))


def mistral(positions: int) -> Any:
    """Mistral with 6 layers: all of them see the last 512 tokens."""
    from transformers import MistralConfig, MistralModel

    return MistralModel(MistralConfig(**causal(max_position_embeddings=positions)))


def t5(positions: int) -> Any:
    """The encoder of T5 small, whose positions reach any length."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=WORDS, dropout_rate=0.0))


def longformer(positions: int) -> Any:
    """Longformer with 6 layers: all of them see 128 tokens on each side."""
    from transformers import LongformerConfig, LongformerModel

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    own = {"intermediate_size": 1536, "attention_window": 256, "max_position_embeddings": positions + 258}
    return LongformerModel(LongformerConfig(**wide(**own, **dropout)))


def minilm(positions: int) -> Any:
    """The pretrained MiniLM of the ``demo`` extra, extended where it has fewer positions."""
    model: Any = loading.load(loading.default_model()).float()
    if positions > model.config.max_position_embeddings:
        extend(model, positions)
    return model


# What is timed: of each pair of models and length a call for either


def forward(models: Models, length: int) -> Sides:
    """A forward pass of one text."""
    given = one_text(length)
    return tuple(functools.partial(hidden, model, given) for model in models)


def training(models: Models, length: int) -> Sides:
    """A step of fine-tuning: forward, backward, AdamW. What is compared are the gradients."""
    given, target = one_text(length), torch.randn(length, models[0].config.hidden_size)

    def steps(model: Any) -> Run:
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6)

        def step() -> list[Tensor]:
            optimizer.zero_grad()
            (model(**given).last_hidden_state * target).mean().backward()
            optimizer.step()
            return [p.grad for p in model.parameters() if p.grad is not None]

        return step

    return tuple(map(steps, models))


def attention(models: Models, length: int) -> Sides:
    """The first layer's self-attention with its projections, on what the model gives it."""

    def layers(model: Any) -> Run:
        layer, calls = model.encoder.layer[0].attention.self, []
        hook = layer.register_forward_pre_hook(lambda _, args, given: calls.append((args, given)), with_kwargs=True)
        hidden(model, one_text(length))
        hook.remove()
        args, given = calls[0]

        @torch.no_grad()
        def run() -> list[Tensor]:
            return [layer(*args, **given)[0]]

        return run

    return tuple(map(layers, models))


def padded(models: Models, length: int, lengths: Lengths | None = None) -> Sides:
    """32 texts in one padded batch."""
    texts = prose((lengths or mixed)(length))
    return tuple(functools.partial(read, model, texts, TEXTS) for model in models)


def sorted_batches(models: Models, length: int, lengths: Lengths | None = None) -> Sides:
    """32 texts, for the original in batches of 8 by length, for the swapped model in one padded batch."""
    texts, (original, swapped) = prose((lengths or mixed)(length)), models
    return functools.partial(read, original, texts, TOGETHER), functools.partial(read, swapped, texts, TEXTS)


def one_text(length: int) -> dict[str, Any]:
    """Token numbers drawn at random."""
    return {"input_ids": torch.randint(3, WORDS, (1, length), generator=torch.Generator().manual_seed(0))}


@torch.no_grad()
def hidden(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """The last hidden states."""
    return [model(**given).last_hidden_state]


def mixed(longest: int) -> list[int]:
    """The lengths of 32 texts from 16 tokens on, each longer by the same factor."""
    shortest = min(LEAST, longest)
    return [round(shortest * (longest / shortest) ** (number / (TEXTS - 1))) for number in range(TEXTS)]


def even(longest: int) -> list[int]:
    """The lengths of 32 texts from 16 tokens on, each longer by as many tokens."""
    shortest = min(LEAST, longest)
    return [round(shortest + (longest - shortest) * number / (TEXTS - 1)) for number in range(TEXTS)]


def prose(lengths: Sequence[int]) -> list[Tensor]:
    """Token numbers of English texts of these lengths, as MiniLM's tokenizer has them."""
    tokenizer = loading.tokenizer(loading.default_model())
    ids = torch.tensor(tokenizer(data.text(), add_special_tokens=False, verbose=False)["input_ids"])
    first, last = (torch.tensor([number]) for number in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    inner = [length - 2 for length in lengths]
    return [torch.cat([first, piece, last]) for piece in ids[: sum(inner)].split(inner)]


def batched(texts: list[Tensor]) -> dict[str, Tensor]:
    """Texts as a padded batch."""
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": pad_sequence(texts, batch_first=True), "attention_mask": mask}


@torch.no_grad()
def read(model: Any, texts: list[Tensor], together: int) -> list[Tensor]:
    """The last hidden states of all texts, so many of them in a padded batch."""
    found: list[Tensor] = []
    for start in range(0, len(texts), together):
        given = batched(texts[start : start + together])
        found.append(model(**given).last_hidden_state[given["attention_mask"].bool()])
    return [torch.cat(found)]


WORK: dict[str, Callable[[Models, int], Sides]] = {
    "forward": forward, "peak memory": forward, "attention module": attention, "one padded batch": padded,
    "batches of 8 by length": sorted_batches, "training": training,
    "one padded batch, even lengths": functools.partial(padded, lengths=even),
    "batches of 8 by length, even lengths": functools.partial(sorted_batches, lengths=even),
}  # fmt: skip


class Case(NamedTuple):
    """A model, and the figures that are asked for: what is timed, tokens, how many times less swap(model) takes."""

    build: Callable[[int], Any]  # from the number of positions
    asked: dict[str, dict[int, float | None]]  # None: measured for the picture


CASES = {
    "modernbert": Case(modernbert, {
        "forward": {128: 0.98, 512: 1.0, 1024: 1.35, 2048: 1.75, 4096: 2.25, 8192: 2.7, 32768: 2.9},
        "training": {1024: 1.3, 4096: 2.1, 8192: 2.6},
    }),
    "gemma3": Case(gemma3, {
        "forward": {512: None, 1024: None, 2048: None, 4096: 2.2, 8192: None, 16384: 4.0},
    }),
    "llama": Case(llama, {"forward": {512: None, 1024: None, 2048: None, 4096: None, 8192: None}}),
    "mistral": Case(mistral, {"forward": {4096: 2.3, 16384: 6.0}}),
    "t5": Case(t5, {"forward": {1024: None, 2048: 2.7, 4096: 2.9, 8192: None}, "peak memory": {2048: 3.0, 4096: 3.0}}),
    "minilm": Case(minilm, {
        "one padded batch": {512: 2.7}, "batches of 8 by length": {512: 1.2},
        "one padded batch, even lengths": {512: None}, "batches of 8 by length, even lengths": {512: None},
    }),
    "longformer": Case(longformer, {
        "forward": {4096: 1.35}, "attention module": {4096: 2.0}, "peak memory": {4096: 2.0}, "training": {4096: 1.3},
    }),
}  # fmt: skip


# Measuring


def measured(sides: Sides, pairs: int, patience: float) -> dict[str, Any]:
    """Seconds of both in turns, the median of their ratios, and how far their results are apart.

    The first pair, which pays for set-up, counts only where fewer than three fit into ``patience`` seconds.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: tuple[list[float], list[float]] = ([], [])
    began, apart = time.perf_counter(), math.nan
    for number in range(pairs):
        if number and time.perf_counter() - began > patience:
            break
        results: list[list[Tensor]] = [[], []]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            start = clock()
            results[side] = sides[side]()
            seconds[side].append(clock() - start)
        apart = apart if number else difference(*results)
    kept = [each[1:] if len(each) > 2 else each for each in seconds]
    ratios = [old / new for old, new in zip(*kept, strict=True)]
    return {
        "seconds": statistics.median(kept[0]), "swapped_seconds": statistics.median(kept[1]), "pairs": len(ratios),
        "times": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "difference": apart,
    }  # fmt: skip


def counted(sides: Sides) -> dict[str, Any]:
    """Peak bytes of both, and their ratio."""
    old, new = map(peak_bytes, sides)
    return {"bytes": old, "swapped_bytes": new, "times": old / new}


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference over the largest value."""
    apart = max(float((x - y).abs().max()) for x, y in zip(expected, found, strict=True))
    return apart / max(float(x.abs().max()) for x in expected)


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each figure, with the one that was asked for beside it."""
    cells = []
    for row in rows:
        took = [f"{row[name] / 2**20:,.0f} MiB" if "bytes" in name else f"{row[name]:.3f} s"
                for name in ("seconds", "swapped_seconds", "bytes", "swapped_bytes") if name in row]  # fmt: skip
        spread = f"{row['least']:.2f} to {row['most']:.2f}, {row['pairs']}" if "pairs" in row else "counted"
        apart = f"{row['difference']:.0e}" if "difference" in row else "-"
        asked = f"{row['asked']:g}" if row["asked"] else "-"
        named = Value(f"{row['times']:.2f}", "slow" if row["asked"] and row["times"] < row["asked"] else "")
        cells.append([row["case"], row["what"], f"{row['length']:,}", *took, named, asked, spread, apart])
    heads = ["model", "what", "tokens", "transformers", "swap(model)", "times", "asked", "pairs", "difference"]
    return Table(heads, cells, left=[1])


def main(arguments: list[str] | None = None) -> None:
    """Print the table and write the record."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="Models; all if not given.")
    parser.add_argument("--work", nargs="+", choices=WORK, default=[*WORK], help="What is timed; all if not given.")
    parser.add_argument("--lengths", type=int, nargs="+", help="Tokens; those with asked figures if not given.")
    parser.add_argument("--pairs", type=int, default=25, help="At most so many for each figure.")
    parser.add_argument("--patience", type=float, default=6.0, help="Seconds after which no further pair begins.")
    parser.add_argument("--threads", type=int, default=1, help="1: processor time; more: wall time.")
    parser.add_argument("--keep-memory", action="store_true", help="Keep freed memory (fast_attention.keep_memory).")
    parser.add_argument("--out", type=Path, default=Path("out/whole-models.json"), help="The record.")
    asked = parser.parse_args(arguments)
    if asked.keep_memory:
        keep_memory(None)
    torch.set_num_threads(asked.threads)
    loading.quiet_transformers("the benchmark")
    command = ["python", "-m", "benchmarks.whole_models", *(arguments if arguments is not None else sys.argv[1:])]
    meta = {"status": "running", "command": command, "started": environment.timestamp()}
    meta |= environment.environment(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    reports: dict[str, str] = {}

    def write(**changes: Any) -> None:
        parts = {"meta": meta | changes, "rows": rows, "reports": reports}
        files.write(asked.out, records.sealed("whole models", parts) + "\n")

    for name in asked.cases:
        case = CASES[name]
        work = {what: asked.lengths or [*figures] for what, figures in case.asked.items() if what in asked.work}
        if not work:
            continue
        torch.manual_seed(0)
        original = case.build(max(n for lengths in work.values() for n in lengths)).eval()
        changed = copy.deepcopy(original)
        reports[name] = str(swap(changed))
        for what, lengths in work.items():
            for length in lengths:
                sides = WORK[what]((original, changed), length)
                took = counted(sides) if what == "peak memory" else measured(sides, asked.pairs, asked.patience)
                figure = case.asked[what].get(length)
                rows.append({"case": name, "what": what, "length": length, **took, "asked": figure})
                say(f"{name}, {what}, {length:,} tokens: {took['times']:.2f} times (asked {figure or '-'})")
                write()
    finished = {"status": "complete", "finished": environment.timestamp()}
    write(**finished, load_average_after=environment.load_average())
    show(table(rows), f"Record: {asked.out}")


if __name__ == "__main__":
    main()
