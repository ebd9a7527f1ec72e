"""Masked language modelling of proteins; no validation protein shares a 15-mer with a training one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from fast_attention import data
from fast_attention.tasks.lengths import chosen, padded
from fast_attention.tasks.task import IGNORED, Batch, Split, Task, digest, random_for
from fast_attention.value import at_least

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
UNKNOWN, MASK, PAD = 20, 21, 22  # UNKNOWN: X and every letter beyond the twenty; never asked for
KINDS = 23
KMER = 15
MULTIPLIER = 6364136223846793005  # odd; products are taken modulo 2^64
MAX_UNKNOWN, MAX_NUCLEIC = 0.2, 0.95  # largest fractions of unknown letters, and of A, C, G, T and N, in a file
CODES = torch.full((256,), UNKNOWN, dtype=torch.uint8)
CODES[torch.tensor([ord(letter) for letter in LETTERS])] = torch.arange(UNKNOWN, dtype=torch.uint8)


@dataclass(frozen=True, repr=False)
class ProteinMLM(Task):
    """Predict masked residues: 15 % are targets, of which 80 % are replaced by the mask token, 10 % by another residue
    and 10 % left as they are (Devlin et al. 2018, arXiv 1810.04805, section 3.1).

    Longer proteins are cut at a random position in training, at the start in validation.

    Args:
        fasta: A FASTA file, plain or gzipped; ``"sample"`` for the shipped proteins; or the name of an installed
            Debian package, such as ``"mmseqs2-examples"``: all proteins that it brought.
        context: The most residues of a protein in a sequence.
        share: The fraction of the proteins that are candidates for validation.
        split: ``"homology"``: a candidate that shares 15 residues in a row with a training protein is left out;
            ``"random"`` keeps all, which makes scores look better than they are.
        seed: For the split, the order and the masks.
        shortest: Proteins of fewer residues are left out; at least 15.
    """

    fasta: str = "sample"
    context: int = 512
    share: float = 0.1
    split: str = "homology"
    seed: int = 0
    shortest: int = KMER

    name = "protein-mlm"
    reads = "residues"
    metric = "nats"
    takes = "fasta"

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 8)
        at_least(self, "shortest", self.shortest, KMER)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"ProteinMLM(share={self.share!r}): share must lie between 0 and 1")
        if self.split not in ("homology", "random"):
            raise ValueError(f"ProteinMLM(split={self.split!r}): split must be 'homology' or 'random'")

    @property
    def vocab_size(self) -> int:
        """Residues, the unknown one, the mask token and padding."""
        return KINDS

    @property
    def length(self) -> int:
        """The most tokens of a sequence."""
        return self.context

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Proteins of about equal length, padded to the longest."""
        proteins = sides(self)[0 if split == "train" else 1]
        generator = random_for(self, split, "batch", index)
        rows = [
            _crop(proteins[i], self.context, generator if split == "train" else None)
            for i in chosen(self, split, index, size, _lengths(self, split))
        ]
        tokens, key_mask = padded(rows, PAD)
        inputs, targets = masked(tokens, generator)
        return Batch(inputs, targets, key_mask)

    def baselines(self) -> dict[str, float]:
        """Nats per validation residue: by residue counts, by neighbours, by the protein's composition.

        The first three see nothing of a target residue. A model does: one in five is not masked, and half of those are
        unchanged. The last baseline uses that too; a better score shows knowledge of proteins.
        """
        return dict(_baselines(self))

    def describe(self) -> dict[str, str]:
        """Proteins, residues and digest of each side."""
        return {
            name: f"{len(side):,} proteins, {sum(map(len, side)):,} residues, SHA-256 {digest(*side)}"
            for name, side in zip(("training", "validation"), sides(self), strict=True)
        }


def encoded(sequence: str) -> UInt8[Tensor, "residues"]:
    """The tokens of a sequence of residue letters."""
    return CODES[torch.frombuffer(bytearray(sequence, "ascii"), dtype=torch.uint8).long()]


def masked(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask tokens (B, L): the model's inputs, and targets at 15 % of the residues, at least one in each sequence."""
    known = tokens < UNKNOWN
    draw = torch.rand(tokens.shape, generator=generator).masked_fill(~known, 2.0)
    is_target = (draw < 0.15) | ((draw == draw.amin(-1, keepdim=True)) & known)
    kind = torch.rand(tokens.shape, generator=generator)
    other = torch.randint(UNKNOWN, tokens.shape, generator=generator)
    inputs = torch.where(is_target & (kind < 0.8), MASK, tokens)
    inputs = torch.where(is_target & (kind >= 0.9), other, inputs)
    return inputs, torch.where(is_target, tokens, IGNORED)


def _crop(protein: Tensor, context: int, generator: torch.Generator | None) -> Tensor:
    excess = max(len(protein) - context, 0)
    start = int(torch.randint(excess + 1, (1,), generator=generator)) if generator is not None else 0
    return protein[start : start + context]


@lru_cache(maxsize=4)
def sides(task: ProteinMLM) -> tuple[list[Tensor], list[Tensor]]:
    """Training and validation proteins.

    Raises:
        ValueError: The file cannot be read (``FastaError`` names the line), holds no proteins or too few of them.
    """
    sequences = _sequences(task.fasta, task.shortest)
    source = "" if Path(task.fasta).exists() else task.fasta  # a file's split is the same wherever it lies
    order = torch.randperm(len(sequences), generator=random_for("split", task.seed, source)).tolist()
    count = min(max(1, round(task.share * len(sequences))), len(sequences) - 1)
    candidates, train = ([encoded(sequences[i]) for i in part] for part in (order[:count], order[count:]))
    if task.split == "homology":
        candidates = unrelated(candidates, train)
        if not candidates:
            raise ValueError(f"{task.fasta}: every validation protein shares {KMER} residues with a training one")
    return train, candidates


def _sequences(fasta: str, shortest: int) -> list[str]:
    """The different proteins of a file of at least ``shortest`` residues, in alphabetical order."""
    try:
        distinct = {protein.sequence for protein in data.read_proteins(fasta)}
    except OSError as error:
        raise ValueError(f"{fasta}: {error.strerror or error}") from error
    counts: Counter[str] = Counter()
    for text in distinct:
        counts.update(text)
    total = counts.total()
    unknown = {letter: count for letter, count in counts.items() if letter not in LETTERS}
    if sum(unknown.values()) > MAX_UNKNOWN * total:
        commonest = max(unknown, key=unknown.__getitem__)
        fraction = sum(unknown.values()) / total
        most = f"{fraction:.0%} of the letters are no amino acids, {commonest!r} above all"
        raise ValueError(f"{fasta}: {most}: not proteins?")
    if sum(counts[letter] for letter in "ACGTN") > MAX_NUCLEIC * total:
        raise ValueError(f"{fasta}: nearly all letters are A, C, G, T or N: DNA, not proteins")
    sequences = sorted(text for text in distinct if len(text) >= shortest and not {*text} <= {*unknown})
    if len(sequences) < 2:
        raise ValueError(f"{fasta} holds {len(sequences)} different proteins of {shortest} residues or more: too few")
    return sequences


def unrelated(candidates: list[Tensor], train: list[Tensor]) -> list[Tensor]:
    """The candidates that share no 15 known residues in a row with a training protein.

    15-mers are compared by hashes of 64 bits; if two different ones ever agree, a candidate too many is left out.
    """
    codes, is_known = _kmers(candidates)
    train_codes, train_known = _kmers(train)
    shared = torch.isin(codes, train_codes[train_known].unique()) & is_known
    protein_of = torch.repeat_interleave(torch.tensor([len(protein) + 1 for protein in candidates]))[: len(shared)]
    related = {*protein_of[shared].tolist()}
    return [protein for i, protein in enumerate(candidates) if i not in related]


def _kmers(proteins: list[Tensor]) -> tuple[Int[Tensor, "starts"], Bool[Tensor, "starts"]]:
    """Hashes of every 15 residues in a row of all proteins, and whether all 15 are known residues of one protein."""
    text = joined(proteins)
    count = len(text) - KMER + 1
    codes, is_known = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
    for i in range(KMER):
        residue = text[i : i + count]
        codes = codes * MULTIPLIER + residue
        is_known &= residue < UNKNOWN
    return codes, is_known


def joined(proteins: list[Tensor]) -> UInt8[Tensor, "line"]:
    """All proteins concatenated, with a separator after each."""
    end = torch.tensor([PAD], dtype=torch.uint8)
    return torch.cat([piece for protein in proteins for piece in (protein, end)])


@lru_cache(maxsize=8)
def _lengths(task: ProteinMLM, split: Split) -> tuple[int, ...]:
    return tuple(min(len(protein), task.context) for protein in sides(task)[0 if split == "train" else 1])


@lru_cache(maxsize=4)
def _baselines(task: ProteinMLM) -> tuple[tuple[str, float], ...]:
    train, valid = ([protein[: task.context] for protein in side] for side in sides(task))
    train_line, valid_line = joined(train).long(), joined(valid).long()
    counts = torch.bincount(train_line, minlength=KINDS)[:UNKNOWN].double() + 1
    frequencies = torch.cat([counts / counts.sum(), torch.ones(KINDS - UNKNOWN)])
    is_known = valid_line < UNKNOWN
    by_counts = frequencies[valid_line]

    trigram_counts = torch.bincount(_trigrams(train_line), minlength=KINDS**3).double()
    trigrams = _trigrams(valid_line)
    context_counts = trigram_counts.view(KINDS, KINDS, KINDS)[:, :, :UNKNOWN].sum(-1).flatten()[trigrams // KINDS]
    by_neighbours = (trigram_counts[trigrams] + 50 * by_counts) / (context_counts + 50)

    protein_of = torch.repeat_interleave(torch.tensor([len(protein) + 1 for protein in valid]))
    cells = protein_of * KINDS + valid_line
    protein_counts = torch.bincount(cells, minlength=len(valid) * KINDS).double()
    protein_sizes = protein_counts.view(-1, KINDS)[:, :UNKNOWN].sum(-1)[protein_of]
    by_composition = (protein_counts[cells] - 1 + 200 * by_counts) / (protein_sizes - 1 + 200)
    guesses = {"residue counts": by_counts, "both neighbours": by_neighbours}
    guesses["the protein's own composition"] = by_composition
    nats = {name: -p[is_known].log().mean().item() for name, p in guesses.items()}
    targets = valid_line[is_known]
    others = protein_counts.view(-1, KINDS)[protein_of[is_known], :UNKNOWN] - F.one_hot(targets, UNKNOWN)
    by_composition = (others + 200 * frequencies[:UNKNOWN]) / (others.sum(-1, keepdim=True) + 200)
    nats["its composition and what stands there"] = _informed_nats(by_composition, targets)
    return tuple(nats.items())


def _informed_nats(p: Float[Tensor, "residues kinds"], targets: Int[Tensor, "residues"]) -> float:
    """Nats per target residue of a guess that also uses the residue s in the input at its position.

    Of ten targets eight are masked, one is replaced by s and one is s itself: given s, the target is y with a
    probability in proportion to ``p_y (1/2 [y = s] + 1/40)``. The expectation over all s is taken.
    """
    unchanged, other = 0.5, 0.5 / UNKNOWN
    right = p.gather(1, targets[:, None])
    losses = -(right * other / (unchanged * p + other)).log()  # for each residue s
    unchanged_loss = -(right * (unchanged + other) / (unchanged * right + other)).log()
    replaced_loss = (losses.sum(-1, keepdim=True) - losses.gather(1, targets[:, None]) + unchanged_loss) / UNKNOWN
    return (0.8 * -right.log() + 0.1 * unchanged_loss + 0.1 * replaced_loss).mean().item()


def _trigrams(line: Int[Tensor, "line"]) -> Int[Tensor, "line"]:
    """Left neighbour, right neighbour and residue as one number, at every position, cyclically."""
    return (line.roll(1) * KINDS + line.roll(-1)) * KINDS + line
