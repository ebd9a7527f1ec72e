"""Do chunks find more after the model has read what stands around them? Late chunks beside chunks encoded alone.

    apt-get download perl-doc git-doc debian-policy manpages manpages-dev
    for each in *.deb; do dpkg -x $each out/debian; done
    python -m benchmarks.late_chunks --root out/debian --out out/late-chunks.json

Passages are cut out of real documents, manuals of Debian packages, that are longer than the model reads at once. For
each way of making vectors of a document: how often the nearest document is the passage's own, and the processor's
seconds for all documents. The ways take turns, document by document, on one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.manuals import PACKAGES, Manual, manuals
from experiments.arguments import Arguments
from fast_attention import files, late_chunks
from fast_attention.conversion.goals import pooled
from fast_attention.lab import environment, loading, records
from fast_attention.lab.tables import Table, counted, show
from fast_attention.lab.texts import TextChunks

SHORTEST, LONGEST = 1_000, 3_000  # tokens of a document
PASSAGE, EACH = 100, 3  # tokens of a passage, and how many are cut out of a document
SMALL, LARGE = 128, 256  # tokens of a chunk
READS = 512  # tokens that the model reads at once
LATE, ALONE, CUT = "late chunks", "chunks encoded alone", "first 512 tokens"
NEAREST, MEAN, ONE = "nearest counts", "mean", "one vector"


class Held(NamedTuple):
    """A document without some passages of it, and these."""

    document: str
    passages: list[str]


def held_out(text: str, tokenizer: Any, generator: torch.Generator) -> Held:
    """Cut passages out of a document, one anywhere in each equal part of it."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    part, rest, passages, begin = len(offsets) // EACH, [], [], 0
    for number in range(EACH):
        first = number * part + int(torch.randint(part - PASSAGE, (), generator=generator))
        start, end = offsets[first][0], offsets[first + PASSAGE - 1][1]
        passages.append(text[start:end])
        rest.append(text[begin:start])
        begin = end
    return Held("\n".join([*rest, text[begin:]]), passages)


def merged(vectors: Tensor, counts: Sequence[int]) -> Tensor:
    """Means of chunks twice as large, from those of small ones: the same pass serves every size."""
    weights = torch.tensor(counts, dtype=vectors.dtype)[:, None]
    pairs = [each.sum(0) for each in torch.cat([vectors * weights, weights], 1).split(2)]
    return torch.stack([each[:-1] / each[-1] for each in pairs])


class Reader:
    """Makes vectors of documents.

    Args:
        model: An encoder.
        tokenizer: The model's.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.passages = model, tokenizer, TextChunks(tokenizer)

    def late(self, text: str) -> dict[int, Tensor]:
        """The vectors of late chunks, by their size: one pass for both."""
        found = late_chunks(self.model, text, SMALL, tokenizer=self.tokenizer)
        return {SMALL: found.vectors, LARGE: merged(found.vectors, [len(each.tokens) for each in found])}

    def alone(self, text: str, size: int) -> dict[int, Tensor]:
        """The vectors of chunks that are encoded alone, with special tokens of their own."""
        ids = self._ids(text)
        return {size: self._encoded([ids[i : i + size] for i in range(0, len(ids), size)])}

    def cut(self, text: str) -> dict[int, Tensor]:
        """The vector of as many of the first tokens as the model reads."""
        return {READS: self._encoded([self._ids(text)[: self.passages.content(READS)]])}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @torch.no_grad()
    def _encoded(self, rows: list[list[int]]) -> Tensor:
        batch = self.passages.batch(rows)
        return pooled(self.model(**batch).last_hidden_state, batch["attention_mask"].bool())


def measure(reader: Reader, held: Sequence[Held], step: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for every way: how well its vectors find the documents, and the processor's seconds that they took."""
    runs: dict[tuple[str, int], Callable[[str], dict[int, Tensor]]] = {
        (LATE, 0): reader.late,
        (ALONE, SMALL): lambda text: reader.alone(text, SMALL),
        (ALONE, LARGE): lambda text: reader.alone(text, LARGE),
        (CUT, READS): reader.cut,
    }
    vectors: dict[tuple[str, int], list[Tensor]] = {}
    seconds: dict[tuple[str, int], float] = {}
    for each in held:
        step("documents")
        for (way, _), run in runs.items():
            started = time.process_time()
            made = run(each.document)
            took = time.process_time() - started
            for size, chunks in made.items():
                seconds[way, size] = seconds.get((way, size), 0.0) + took
                vectors.setdefault((way, size), []).append(F.normalize(chunks, dim=-1))
    passages = torch.cat([reader.cut(passage)[READS] for each in held for passage in each.passages])
    owners = torch.arange(len(held)).repeat_interleave(EACH)
    found: dict[tuple[str, int, str], Tensor] = {}
    for (way, size), documents in vectors.items():
        if way == CUT:
            found[way, size, ONE] = ranks(passages, documents, owners)
        else:
            found[way, size, NEAREST] = ranks(passages, documents, owners)
            found[way, size, MEAN] = ranks(passages, [each.mean(0, keepdim=True) for each in documents], owners)
    return [row(each, found, seconds[each[:2]]) for each in found]


def ranks(passages: Tensor, documents: Sequence[Tensor], owners: Tensor) -> Tensor:
    """The rank of each passage's own document by the cosine of its nearest vector; ties count against it."""
    passages = F.normalize(passages, dim=-1)
    scores = torch.stack([(passages @ F.normalize(each, dim=-1).T).amax(1) for each in documents], 1)
    return (scores >= scores.gather(1, owners[:, None])).sum(1)


def row(key: tuple[str, int, str], found: dict[tuple[str, int, str], Tensor], seconds: float) -> dict[str, Any]:
    """A row of the record; of late chunks also the passages that chunks encoded alone do not find, and the reverse."""
    way, size, use = key
    own, other = found[key] == 1, found.get((ALONE, size, use), found[key]) == 1
    pairs = {"gained": int((own & ~other).sum()), "lost": int((other & ~own).sum())} if way == LATE else {}
    return {
        "way": way, "chunk": size, "use": use, "recall_at_1": float(own.float().mean()),
        "mrr": float((1 / found[key]).mean()), **pairs, "seconds": seconds,
    }  # fmt: skip


def meta(read: Sequence[Manual], held: Sequence[Held], lengths: list[int], asked: argparse.Namespace) -> dict[str, Any]:
    """What a record says of the run."""
    return {
        "status": "complete", "command": ["python", "-m", "benchmarks.late_chunks", *sys.argv[1:]],
        "started": environment.timestamp(), "model": "all-MiniLM-L6-v2", "seed": asked.seed, "precision": "float32",
        "documents": len(held), "passages": EACH * len(held), "passage": PASSAGE, "reads": READS,
        "tokens": {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1], "all": sum(lengths)},
        "sources": [
            {"package": name, "licence": PACKAGES[name].licence,
             "documents": sum(each.package == name for each in read)} for name in PACKAGES
        ],
        "sha256": records.checksum({f"{each.package} {each.name}": each.text for each in read}),
        **environment.environment(torch.device("cpu")),
    }  # fmt: skip


def main() -> None:
    """Print the table and write the record."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/"), help="Where the Debian packages are unpacked.")
    parser.add_argument("--documents", type=int, default=150, help="How many are told apart.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/late-chunks.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the processor's time is that of one
    tokenizer = loading.tokenizer(loading.default_model())
    reader = Reader(loading.load(loading.default_model()).float(), tokenizer)
    read = manuals(asked.root, tokenizer, SHORTEST, LONGEST, asked.documents)
    generator = torch.Generator().manual_seed(asked.seed)
    held = [held_out(each.text, tokenizer, generator) for each in read]
    lengths = sorted(len(tokenizer(each.document, verbose=False)["input_ids"]) for each in held)
    about = meta(read, held, lengths, asked)
    with counted(len(held)) as step:
        rows = measure(reader, held, step)
    about["finished"] = environment.timestamp()
    files.write(asked.out, records.sealed("late chunks", {"meta": about, "rows": rows}) + "\n")
    heads = ["a document becomes", "tokens", "of these", "recall at 1", "MRR", "gained, lost", "seconds"]
    cells = [
        [row["way"], f"{row['chunk']}", row["use"], f"{row['recall_at_1']:.3f}", f"{row['mrr']:.3f}",
         f"{row['gained']}, {row['lost']}" if "gained" in row else "", f"{row['seconds']:.0f}"]
        for row in rows
    ]  # fmt: skip
    show(Table(heads, cells, left=[2]), f"Record: {asked.out}")


if __name__ == "__main__":
    main()
