"""Masked language modelling of proteins, split so that no validation protein shares a 15-mer with a training one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fast_attention import data
from fast_attention.ops.value import at_least
from fast_attention.tasks.task import IGNORED, Batch, Split, Task, random_for

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
UNKNOWN, MASK, PAD = 20, 21, 22  # UNKNOWN: X and every letter beyond the twenty; never asked for
KMER = 15
POOL = 64  # batches whose sequences are sorted by length together, so that little is padding


@dataclass(frozen=True, repr=False)
class ProteinMLM(Task):
    """Tell hidden residues from the rest of the protein: 15 % are asked for, of which 80 % are hidden by a mark, 10 %
    replaced by another residue and 10 % left as they are (Devlin et al. 2018, arXiv 1810.04805, section 3.1).

    Longer proteins are cut at a random place in training, at the start in validation.

    Args:
        fasta: A FASTA file, plain or gzipped; ``"sample"`` for the shipped proteins.
        context: The longest stretch of a protein.
        share: Of the proteins that are candidates for validation.
        split: ``"homology"``: a candidate that shares 15 residues in a row with a training protein is left out of both
            sides; ``"random"`` keeps all, and flatters.
        seed: For the split, the order and the masks.
    """

    fasta: str = "sample"
    context: int = 512
    share: float = 0.1
    split: str = "homology"
    seed: int = 0

    name = "protein-mlm"
    metric = "nats"

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 8)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"ProteinMLM(share={self.share!r}): share must lie between 0 and 1")
        if self.split not in ("homology", "random"):
            raise ValueError(f"ProteinMLM(split={self.split!r}): split must be 'homology' or 'random'")

    @property
    def vocab_size(self) -> int:
        """Residues, the unknown one, the mark and padding."""
        return 23

    @property
    def length(self) -> int:
        """The longest stretch."""
        return self.context

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Proteins of about equal length, padded to the longest."""
        chosen = self._chosen(split, index, size)
        generator = random_for(self, split, "batch", index)
        stretches = [_cut(protein, self.context, generator if split == "train" else None) for protein in chosen]
        longest = max(len(stretch) for stretch in stretches)
        tokens = torch.full((size, longest), PAD)
        for row, stretch in zip(tokens, stretches, strict=True):
            row[: len(stretch)] = stretch
        hidden, targets = masked(tokens, generator)
        return Batch(hidden, targets, tokens != PAD)

    def _chosen(self, split: Split, index: int, size: int) -> list[Tensor]:
        proteins = sides(self)[0 if split == "train" else 1]
        pool, place = divmod(index, POOL)
        source = random_for(self, split, "pool", pool)
        wanted = min(POOL * size, max(len(proteins), size))
        order = torch.cat(
            [torch.randperm(len(proteins), generator=source) for _ in range(-(-wanted // len(proteins)))]
        )[:wanted]
        ranked = sorted(order.tolist(), key=lambda i: min(len(proteins[i]), self.context))
        groups = [ranked[at : at + size] for at in range(0, len(ranked) - size + 1, size)]
        which = torch.randperm(len(groups), generator=source)[place % len(groups)]
        return [proteins[i] for i in groups[int(which)]]

    def baselines(self) -> dict[str, float]:
        """Nats per residue of the validation side: by residue counts, by neighbours, by the protein's composition."""
        return dict(_baselines(self))


def encoded(sequence: str) -> Tensor:
    """Residue letters as whole numbers."""
    return torch.tensor([LETTERS.find(letter) % (UNKNOWN + 1) for letter in sequence])


def masked(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, L) with 15 % of the residues asked for, and the targets; at least one in each sequence."""
    usual = tokens < UNKNOWN
    draw = torch.rand(tokens.shape, generator=generator).masked_fill(~usual, 2.0)
    asked = (draw < 0.15) | ((draw == draw.amin(-1, keepdim=True)) & usual)
    how = torch.rand(tokens.shape, generator=generator)
    other = torch.randint(UNKNOWN, tokens.shape, generator=generator)
    hidden = torch.where(asked & (how < 0.8), MASK, tokens)
    hidden = torch.where(asked & (how >= 0.9), other, hidden)
    return hidden, torch.where(asked, tokens, IGNORED)


def _cut(protein: Tensor, context: int, generator: torch.Generator | None) -> Tensor:
    spare = max(len(protein) - context, 0)
    start = int(torch.randint(spare + 1, (1,), generator=generator)) if generator is not None else 0
    return protein[start : start + context]


@lru_cache(maxsize=4)
def sides(task: ProteinMLM) -> tuple[list[Tensor], list[Tensor]]:
    """Training and validation proteins."""
    found = data.proteins() if task.fasta == "sample" else data.read_fasta(task.fasta)
    sequences = sorted({protein.sequence for protein in found if len(protein.sequence) >= KMER})
    if len(sequences) < 2:
        raise ValueError(f"{task.fasta} holds {len(sequences)} different proteins of {KMER} residues or more: too few")
    order = torch.randperm(len(sequences), generator=random_for("split", task.seed, task.fasta)).tolist()
    count = min(max(1, round(task.share * len(sequences))), len(sequences) - 1)
    candidates, train = ([sequences[i] for i in part] for part in (order[:count], order[count:]))
    if task.split == "homology":
        known = {sequence[i : i + KMER] for sequence in train for i in range(len(sequence) - KMER + 1)}
        candidates = [
            s for s in candidates if not any(s[i : i + KMER] in known for i in range(len(s) - KMER + 1))
        ]  # fmt: skip
        if not candidates:
            raise ValueError(f"{task.fasta}: every validation protein shares {KMER} residues with a training one")
    return [encoded(s) for s in train], [encoded(s) for s in candidates]


@lru_cache(maxsize=4)
def _baselines(task: ProteinMLM) -> tuple[tuple[str, float], ...]:
    train, valid = ([x[: task.context].tolist() for x in side] for side in sides(task))
    single: Counter[int] = Counter(r for protein in train for r in protein if r < UNKNOWN)
    both: dict[tuple[int, int], Counter[int]] = {}
    for protein in train:
        for left, here, right in zip(protein, protein[1:], protein[2:], strict=False):
            if here < UNKNOWN:
                both.setdefault((left, right), Counter())[here] += 1
    total = sum(single.values())
    share = {r: (single[r] + 1) / (total + UNKNOWN) for r in range(UNKNOWN)}
    sums, number = dict.fromkeys(("residue counts", "both neighbours", "the protein's own composition"), 0.0), 0
    for protein in valid:
        own: Counter[int] = Counter(r for r in protein if r < UNKNOWN)
        size = sum(own.values())
        for i, here in enumerate(protein):
            if here >= UNKNOWN:
                continue
            number += 1
            near = both.get((protein[i - 1], protein[i + 1]), Counter()) if 0 < i < len(protein) - 1 else Counter()
            sums["residue counts"] -= math.log(share[here])
            sums["both neighbours"] -= math.log((near[here] + 50 * share[here]) / (sum(near.values()) + 50))
            sums["the protein's own composition"] -= math.log((own[here] - 1 + 200 * share[here]) / (size - 1 + 200))
    return tuple((name, value / number) for name, value in sums.items())
