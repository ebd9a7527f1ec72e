"""Every mechanism, untrained, in a real encoder: what it does to the model's sentences, and what it costs.

``python -m benchmarks.real_model --out records/DATE-costs.json`` swaps each into the MiniLM of the ``demo`` extra (or
another encoder), compares its sentence embeddings with the original's on passages, and times all of them in turn.
``docs/build.py`` draws docs/costs.md from the record.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fast_attention
from benchmarks import costs
from experiments import data
from experiments.arguments import Arguments
from fast_attention import catalogue, files
from fast_attention.conversion import goals
from fast_attention.lab import capture, environment, loading, records
from fast_attention.lab.texts import Corpus, TextChunks, spread

VARIANTS = ("FavorPlus(num_features=1024)", "Local(window=64)", "Linformer(rank=128)")


def swapped(original: Any, text: str, longest: int) -> tuple[Any, str]:
    """A copy of the model with a mechanism in it and nothing, or None and why not."""
    model = copy.deepcopy(original)
    torch.manual_seed(0)
    try:
        report = fast_attention.swap(model, text, max_len=longest)
    except (fast_attention.Unsupported, ValueError) as error:
        return None, str(error)
    kept = sorted({layer.why for layer in report.unchanged})
    return model, f"{len(report.unchanged)} layers stay exact: {'; '.join(kept)}" if kept else ""


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--model", type=Path, help="A folder; without it the MiniLM of the demo.")
    parser.add_argument("--mechanisms", nargs="+", default=[*(f"{name}()" for name in catalogue.names()), *VARIANTS])
    parser.add_argument("--length", type=int, default=480, help="Tokens of a passage.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096], help="Where time is taken.")
    parser.add_argument("--out", type=Path, required=True, help="The record.")
    asked = parser.parse_args()
    started, folder = time.strftime("%Y-%m-%dT%H:%M:%S%z"), asked.model or Path(loading.default_model())
    import transformers

    original = loading.load(folder).float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    reader, goal = TextChunks(tokenizer), goals.HiddenStates()
    text = reader.document(Corpus("the Jargon File", (("the Jargon File", data.text()),)))
    passages = reader.batches(spread(reader.split(text, asked.length), 48), 2)
    held, models = goal.prepare(original, passages), {"original": original}
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("swapping") as status:
        for text in asked.mechanisms:
            status.update(text)
            mechanism = catalogue.parse(text)
            model, said = swapped(original, text, max(asked.lengths))
            rows.append({"mechanism": repr(mechanism), "learned": mechanism.traits.learned, "note": said})
            if model is not None:
                rows[-1] |= goals.measure(goal, model, {"": held})[0]
                models[repr(mechanism)] = model
        layers = [*fast_attention.integrations.attention.layers_of(models["Softmax()"])]
        context = capture.context(original.config, tokenizer)
        found = costs.measure(models, layers, asked.lengths, context, status.update)
    meta = {
        "status": "complete", "command": sys.argv[1:], "started": started,
        "model": f"{type(original).__name__}, {sum(p.numel() for p in original.parameters()):,} parameters",
        "passages": sum(len(each.batch["input_ids"]) for each in held), "length": asked.length,
        "transformers": transformers.__version__, **environment.environment(torch.device("cpu")),
    }  # fmt: skip
    files.write(asked.out, records.sealed("costs", {"meta": meta, "rows": rows, "prices": found}) + "\n")
    for row in rows:
        print(f"{row['mechanism']:60} {row.get('sentence_cosine', float('nan')):7.4f}  {row['note'][:90]}")


if __name__ == "__main__":
    main()
