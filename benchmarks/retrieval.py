"""Which document does a passage belong to: the passage is cut out of it, and all are told apart by their embeddings.

    apt-get download perl-doc git-doc debian-policy manpages manpages-dev
    for each in *.deb; do dpkg -x $each out/debian; done
    python -m benchmarks.retrieval --root out/debian --threads 1 --out out/retrieval.json

Real documents of 2,000 to 8,000 tokens that no model here was trained on: manuals of Debian packages. For each way of
making one vector of a long document: recall at 1 and the mean reciprocal rank (MRR) of the right document by cosine.
"""

from __future__ import annotations

import argparse
import copy
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
from fast_attention import extend, files, swap
from fast_attention.conversion.goals import pooled
from fast_attention.lab import environment, loading, records
from fast_attention.lab.tables import Table, counted, show
from fast_attention.lab.texts import TextChunks

SHORTEST, LONGEST = 2_000, 8_000  # tokens of a document
PASSAGE = 200  # tokens of the passage that is cut out
CHUNK, POSITIONS = 512, 8192
SAME = ("documents", "tokens", "seed", "passage", "precision")  # of two runs that share a record
MECHANISMS = (
    "Hybrid(near=BlockLocal(), far=LearnedFeatures(num_features=32))",
    "BlockLocal(block_size=256)",
)
MEAN = "mean of the 512-token chunks"
Embed = Callable[[list[int]], Tensor]  # token numbers to one vector, or several (n, D)


class Pair(NamedTuple):
    """A document without a passage of it, and that passage, as token numbers."""

    document: list[int]
    passage: list[int]


class Ranks(NamedTuple):
    """How well passages find their documents."""

    recall: float  # fraction of passages whose document comes first
    mrr: float  # mean of 1 / rank


def pairs(documents: Sequence[list[int]], seed: int) -> list[Pair]:
    """Cut a passage out of every document, anywhere in it."""
    generator, made = torch.Generator().manual_seed(seed), []
    for ids in documents:
        start = int(torch.randint(len(ids) - PASSAGE, (), generator=generator))
        made.append(Pair(ids[:start] + ids[start + PASSAGE :], ids[start : start + PASSAGE]))
    return made


def ranks(passages: Tensor, documents: Sequence[Tensor]) -> Ranks:
    """Rank the documents by the cosine of their nearest vector; ties count against the right one.

    Args:
        passages: (n, D), number i of document i.
        documents: Each one vector (1, D), or several.
    """
    passages = F.normalize(passages, dim=-1)
    scores = torch.stack([(passages @ F.normalize(each, dim=-1).T).amax(1) for each in documents], 1)
    rank = (scores >= scores.diagonal()[:, None]).sum(1)
    return Ranks(float((rank == 1).float().mean()), float((1 / rank).mean()))


class Embedder:
    """Vectors by the mean of a model's last hidden states.

    Args:
        model: An encoder.
        passages: Puts the tokenizer's marks around tokens.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast.
    """

    def __init__(self, model: Any, passages: TextChunks, precision: str) -> None:
        self.model, self.passages, self.low = model, passages, precision == "bfloat16"

    @torch.no_grad()
    def whole(self, ids: list[int]) -> Tensor:
        """One vector (1, D) of all tokens at once."""
        return self._embed([ids])

    @torch.no_grad()
    def cut(self, ids: list[int]) -> Tensor:
        """One vector (1, D) of the first 512 tokens."""
        return self._embed([ids[: self.passages.content(CHUNK)]])

    @torch.no_grad()
    def chunks(self, ids: list[int]) -> Tensor:
        """A vector of unit length for every 512 tokens (n, D)."""
        content = self.passages.content(CHUNK)
        return F.normalize(self._embed([ids[i : i + content] for i in range(0, len(ids), content)]), dim=-1)

    def _embed(self, rows: list[list[int]]) -> Tensor:
        batch = self.passages.batch(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            hidden = self.model(**batch).last_hidden_state
        return pooled(hidden.float(), batch["attention_mask"].bool())


class Way(NamedTuple):
    """A way to embed a document and a passage; its vectors may be used in several."""

    document: Embed
    passage: Embed
    uses: dict[str, Callable[[Tensor], Tensor]]


def ways(asked: argparse.Namespace, passages: TextChunks) -> list[Way]:
    """What is compared, the cheapest first."""
    original = loading.load(loading.default_model()).float()
    plain = Embedder(original, passages, asked.precision)
    made = [
        Way(plain.cut, plain.whole, {"original, cut to 512 tokens": _itself}),
        Way(plain.chunks, plain.whole, {MEAN: _mean, "best of the 512-token chunks, a vector each": _itself}),
    ]
    for folder in asked.model:
        whole = Embedder(loading.load(folder).float(), passages, asked.precision).whole
        made.append(Way(whole, whole, {f"converted: {Path(folder).name}": _itself}))
    extended = copy.deepcopy(original)
    extend(extended, POSITIONS)
    for mechanism in asked.mechanisms:
        torch.manual_seed(0)
        swap(swapped := copy.deepcopy(extended), mechanism)
        name = f"extended, untrained {mechanism}"
        made.append(Way(Embedder(swapped, passages, asked.precision).whole, plain.whole, {name: _itself}))
    if asked.exact:
        name, whole = "extended, exact", Embedder(extended, passages, asked.precision).whole
        made.append(Way(whole, plain.whole, {name: _itself}))
    return made


def _itself(vectors: Tensor) -> Tensor:
    return vectors


def _mean(vectors: Tensor) -> Tensor:
    return vectors.mean(0, keepdim=True)


def measure(way: Way, held: Sequence[Pair], step: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for every use of one way: how well its vectors find the documents, and how long they took."""
    began, documents = time.perf_counter(), []
    for pair in held:
        step(next(iter(way.uses)))
        documents.append(way.document(pair.document))
    speed = sum(len(pair.document) for pair in held) / (time.perf_counter() - began)
    passages, rows = torch.cat([way.passage(pair.passage) for pair in held]), []
    for name, use in way.uses.items():
        recall, mrr = ranks(passages, [*map(use, documents)])
        rows.append(
            {"way": name, "documents": len(held), "recall_at_1": recall, "mrr": mrr, "tokens_per_second": speed}
        )
    return rows


def resumed(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier run of the same documents left.

    Raises:
        SystemExit: It was a run of others.
    """
    parts = records.opened(path.read_text(encoding="utf-8"), "retrieval", str(path))
    for name in SAME:
        if parts["meta"][name] != about[name]:
            raise SystemExit(f"{path} has {name} {parts['meta'][name]}, and this run {about[name]}")
    return parts["rows"]


def table(made: Sequence[dict[str, Any]]) -> Table:
    """What the terminal shows."""
    heads = ["one vector of a document", "documents", "recall at 1", "MRR", "tokens per second"]
    cells = [
        [row["way"], f"{row['documents']}", f"{row['recall_at_1']:.3f}", f"{row['mrr']:.3f}",
         f"{row['tokens_per_second']:,.0f}"]
        for row in made
    ]  # fmt: skip
    return Table(heads, cells)


def meta(read: Sequence[Manual], held: Sequence[Pair], asked: argparse.Namespace) -> dict[str, Any]:
    """What a record says of the run."""
    lengths = sorted(len(pair.document) for pair in held)
    return {
        "status": "running", "command": ["python", "-m", "benchmarks.retrieval", *sys.argv[1:]],
        "started": environment.timestamp(),
        "model": "all-MiniLM-L6-v2", "seed": asked.seed, "passage": PASSAGE, "precision": asked.precision,
        "documents": len(held), "tokens": {"least": lengths[0], "median": lengths[len(lengths) // 2],
        "most": lengths[-1], "all": sum(lengths)},
        "sources": [
            {"package": name, "licence": PACKAGES[name].licence,
             "documents": sum(each.package == name for each in read)} for name in PACKAGES
        ],
        "sha256": records.checksum({f"{each.package} {each.name}": each.text for each in read}),
        **environment.environment(torch.device("cpu")),
    }  # fmt: skip


def main() -> None:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/"), help="Where the Debian packages are unpacked.")
    parser.add_argument("--documents", type=int, default=300, help="How many are told apart.")
    parser.add_argument("--exact", action="store_true", help="Also exact attention with extended positions: slow.")
    parser.add_argument("--mechanisms", nargs="*", default=[*MECHANISMS], help="Swapped in, untrained.")
    parser.add_argument("--model", nargs="*", default=[], help="Folders of converted models.")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/retrieval.json"))
    parser.add_argument("--resume", action="store_true", help="Add what the record at --out does not have.")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tokenizer = loading.tokenizer(loading.default_model())
    passages = TextChunks(tokenizer)
    read = manuals(asked.root, tokenizer, SHORTEST, LONGEST, asked.documents)
    held = pairs(
        [tokenizer(each.text, add_special_tokens=False, verbose=False)["input_ids"] for each in read], asked.seed
    )
    chosen, about = ways(asked, passages), meta(read, held, asked)
    made = resumed(asked.out, about) if asked.resume and asked.out.exists() else []
    known = {row["way"] for row in made}
    chosen = [way for way in chosen if not {*way.uses} <= known]
    with counted(len(chosen) * len(held)) as step:
        for way in chosen:
            made += measure(way, held, step)
            _write(asked.out, about, made)
    about |= {"status": "complete", "finished": environment.timestamp()}
    _write(asked.out, about, made)
    show(table(made), f"Record: {asked.out}")


def _write(path: Path, about: dict[str, Any], made: list[dict[str, Any]]) -> None:
    files.write(path, records.sealed("retrieval", {"meta": about, "rows": made}) + "\n")


if __name__ == "__main__":
    main()
