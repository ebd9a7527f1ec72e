"""Masked language modelling of proteins, split so that no validation protein shares a 15-mer with a training one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from fast_attention import data
from fast_attention.tasks.lengths import chosen, padded
from fast_attention.tasks.task import IGNORED, Batch, Split, Task, digest, random_for
from fast_attention.value import at_least

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
UNKNOWN, MASK, PAD = 20, 21, 22  # UNKNOWN: X and every letter beyond the twenty; never asked for
KINDS = 23
KMER = 15
MULTIPLIER = 6364136223846793005  # odd; products are taken modulo 2^64
STRANGE, NUCLEIC = 0.2, 0.95  # shares of letters beyond the twenty, and of A, C, G, T and N, that are no proteins
CODES = torch.full((256,), UNKNOWN, dtype=torch.uint8)
CODES[torch.tensor([ord(letter) for letter in LETTERS])] = torch.arange(UNKNOWN, dtype=torch.uint8)


@dataclass(frozen=True, repr=False)
class ProteinMLM(Task):
    """Tell hidden residues from the rest of the protein: 15 % are asked for, of which 80 % are hidden by a mark, 10 %
    replaced by another residue and 10 % left as they are (Devlin et al. 2018, arXiv 1810.04805, section 3.1).

    Longer proteins are cut at a random position in training, at the start in validation.

    Args:
        fasta: A FASTA file, plain or gzipped; ``"sample"`` for the shipped proteins; or the name of an installed
            Debian package, such as ``"mmseqs2-examples"``: all proteins that it brought.
        context: The most residues of a protein in a sequence.
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
    reads = "residues"
    metric = "nats"
    takes = "fasta"

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 8)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"ProteinMLM(share={self.share!r}): share must lie between 0 and 1")
        if self.split not in ("homology", "random"):
            raise ValueError(f"ProteinMLM(split={self.split!r}): split must be 'homology' or 'random'")

    @property
    def vocab_size(self) -> int:
        """Residues, the unknown one, the mark and padding."""
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
            _cut(proteins[i], self.context, generator if split == "train" else None)
            for i in chosen(self, split, index, size, _lengths(self, split))
        ]
        tokens, key_mask = padded(rows, PAD)
        hidden, targets = masked(tokens, generator)
        return Batch(hidden, targets, key_mask)

    def baselines(self) -> dict[str, float]:
        """Nats per residue of the validation side: by residue counts, by neighbours, by the protein's composition.

        The first three see nothing of a residue that is asked for, which a model does: one in five is not hidden, and
        half of those are what they should be. The last one knows that too; what is better has learnt about proteins.
        """
        return dict(_baselines(self))

    def describe(self) -> dict[str, str]:
        """Proteins, residues and digest of each side."""
        return {
            name: f"{len(side):,} proteins, {sum(map(len, side)):,} residues, SHA-256 {digest(*side)}"
            for name, side in zip(("training", "validation"), sides(self), strict=True)
        }


def encoded(sequence: str) -> UInt8[Tensor, "residues"]:
    """Residue letters as whole numbers."""
    return CODES[torch.frombuffer(bytearray(sequence, "ascii"), dtype=torch.uint8).long()]


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
    """Training and validation proteins.

    Raises:
        ValueError: The file cannot be read (``FastaError`` names the line), holds no proteins or too few of them.
    """
    sequences = _sequences(task.fasta)
    order = torch.randperm(len(sequences), generator=random_for("split", task.seed, task.fasta)).tolist()
    count = min(max(1, round(task.share * len(sequences))), len(sequences) - 1)
    candidates, train = ([encoded(sequences[i]) for i in part] for part in (order[:count], order[count:]))
    if task.split == "homology":
        candidates = unrelated(candidates, train)
        if not candidates:
            raise ValueError(f"{task.fasta}: every validation protein shares {KMER} residues with a training one")
    return train, candidates


def _sequences(fasta: str) -> list[str]:
    """The different proteins of a file that are long enough, in alphabetical order."""
    try:
        found = {protein.sequence for protein in data.read_proteins(fasta)}
    except OSError as error:
        raise ValueError(f"{fasta}: {error.strerror or error}") from error
    counts: Counter[str] = Counter()
    for sequence in found:
        counts.update(sequence)
    total = counts.total()
    strange = {letter: count for letter, count in counts.items() if letter not in LETTERS}
    if sum(strange.values()) > STRANGE * total:
        worst = max(strange, key=strange.__getitem__)
        part = sum(strange.values()) / total
        raise ValueError(f"{fasta}: {part:.0%} of the letters are no amino acids, {worst!r} above all: not proteins?")
    if sum(counts[letter] for letter in "ACGTN") > NUCLEIC * total:
        raise ValueError(f"{fasta}: nearly all letters are A, C, G, T or N: DNA, not proteins")
    sequences = sorted(sequence for sequence in found if len(sequence) >= KMER and not {*sequence} <= {*strange})
    if len(sequences) < 2:
        raise ValueError(f"{fasta} holds {len(sequences)} different proteins of {KMER} residues or more: too few")
    return sequences


def unrelated(candidates: list[Tensor], train: list[Tensor]) -> list[Tensor]:
    """The candidates that share no 15 known residues in a row with a training protein.

    Stretches are compared by a number of 64 bits; should two different ones ever agree, a candidate too many goes.
    """
    codes, usable = _stretches(candidates)
    known, counted = _stretches(train)
    shared = torch.isin(codes, known[counted].unique()) & usable
    owners = torch.repeat_interleave(torch.tensor([len(protein) + 1 for protein in candidates]))[: len(shared)]
    bad = {*owners[shared].tolist()}
    return [protein for i, protein in enumerate(candidates) if i not in bad]


def _stretches(proteins: list[Tensor]) -> tuple[Int[Tensor, "starts"], Bool[Tensor, "starts"]]:
    """A number for every 15 residues in a row of all proteins, and whether it is of known residues of one protein."""
    line = joined(proteins)
    count = len(line) - KMER + 1
    codes, usable = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
    for i in range(KMER):
        here = line[i : i + count]
        codes = codes * MULTIPLIER + here
        usable &= here < UNKNOWN
    return codes, usable


def joined(proteins: list[Tensor]) -> UInt8[Tensor, "line"]:
    """All proteins in a row, a separator behind each."""
    end = torch.tensor([PAD], dtype=torch.uint8)
    return torch.cat([part for protein in proteins for part in (protein, end)])


@lru_cache(maxsize=8)
def _lengths(task: ProteinMLM, split: Split) -> tuple[int, ...]:
    return tuple(min(len(protein), task.context) for protein in sides(task)[0 if split == "train" else 1])


@lru_cache(maxsize=4)
def _baselines(task: ProteinMLM) -> tuple[tuple[str, float], ...]:
    train, valid = ([protein[: task.context] for protein in side] for side in sides(task))
    line, asked = joined(train).long(), joined(valid).long()
    single = torch.bincount(line, minlength=KINDS)[:UNKNOWN].double() + 1
    share = torch.cat([single / single.sum(), torch.ones(KINDS - UNKNOWN)])
    here = asked < UNKNOWN
    plain = share[asked]

    table = torch.bincount(_threes(line), minlength=KINDS**3).double()
    threes = _threes(asked)
    around = table.view(KINDS, KINDS, KINDS)[:, :, :UNKNOWN].sum(-1).flatten()[threes // KINDS]
    near = (table[threes] + 50 * plain) / (around + 50)

    owner = torch.repeat_interleave(torch.tensor([len(protein) + 1 for protein in valid]))
    cells = owner * KINDS + asked
    own = torch.bincount(cells, minlength=len(valid) * KINDS).double()
    size = own.view(-1, KINDS)[:, :UNKNOWN].sum(-1)[owner]
    mixed = (own[cells] - 1 + 200 * plain) / (size - 1 + 200)
    found = {"residue counts": plain, "both neighbours": near, "the protein's own composition": mixed}
    nats = {name: -chance[here].log().mean().item() for name, chance in found.items()}
    truth = asked[here]
    others = own.view(-1, KINDS)[owner[here], :UNKNOWN] - torch.nn.functional.one_hot(truth, UNKNOWN)
    mixed = (others + 200 * share[:UNKNOWN]) / (others.sum(-1, keepdim=True) + 200)
    nats["its composition and what stands there"] = _shown(mixed, truth)
    return tuple(nats.items())


def _shown(chance: Float[Tensor, "residues kinds"], truth: Int[Tensor, "residues"]) -> float:
    """Nats per residue that is asked for, of a guess that also reads what stands in its place.

    Of ten that are asked for, eight are hidden, one is another residue s and one itself: where s stands, the residue is
    y with a probability in proportion to ``chance_y (1/2 [y = s] + 1/40)``. The expectation over all s is taken.
    """
    kept, other = 0.5, 0.5 / UNKNOWN
    right = chance.gather(1, truth[:, None])
    wrong = -(right * other / (kept * chance + other)).log()  # by the residue that stands there
    itself = -(right * (kept + other) / (kept * right + other)).log()
    replaced = (wrong.sum(-1, keepdim=True) - wrong.gather(1, truth[:, None]) + itself) / UNKNOWN
    return (0.8 * -right.log() + 0.1 * itself + 0.1 * replaced).mean().item()


def _threes(line: Int[Tensor, "line"]) -> Int[Tensor, "line"]:
    """Left neighbour, right neighbour and the residue itself as one number; the ends count as neighbours too."""
    return (line.roll(1) * KINDS + line.roll(-1)) * KINDS + line
