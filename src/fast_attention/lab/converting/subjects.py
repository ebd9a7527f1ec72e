"""What ``convert`` is given: a model, and what it learns on. Of transformers, with a text; or a run of ``train``."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fast_attention import tasks
from fast_attention.conversion.goals import is_language_model
from fast_attention.integrations import extend
from fast_attention.lab import capture, corpus, inputs, loading
from fast_attention.lab.converting.reading import Reading
from fast_attention.lab.converting.record import RECORD, Converted
from fast_attention.lab.inputs import InputError
from fast_attention.lab.loading import Place
from fast_attention.mechanism import Unsupported
from fast_attention.nn import saving
from fast_attention.nn.models import ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training import standing, steps
from fast_attention.training.loop import ORDER
from fast_attention.training.settings import TrainingSettings

LONGEST = 512  # tokens of a passage, unless --length says more
LENGTHS = (512, 2048, 8192)  # where time and memory are measured
LIKENESS = (
    "2 - the mean cosine of the sentence embeddings (mean pooled) to the original's: the original's loss is 1, and a "
    "budget of 1.02 asks for a cosine of 0.98"
)


class ModelAndData(Protocol):
    """A model and its batches."""

    model: Any
    held_out: list[Any]
    choosing: list[Any]
    positions: int | None  # how many a Hugging Face model knows; None: any
    extension: str  # how it came to know more of them, or nothing
    lengths: list[int]  # where time and memory are best measured

    def batch(self, number: int) -> Any:
        """Batch number i to train on."""
        ...

    def original(self) -> Any:
        """The model as it was opened."""
        ...

    def meta(self) -> dict[str, Any]:
        """For the record: what was learnt on, in which units."""
        ...

    def save(self, out: Path) -> None:
        """The model into a folder from which every command opens it."""
        ...


def opened(
    name: str, device: torch.device, *, text: str | None, fasta: str | None, length: int | None, size: int | None,
    positions: int | None, seed: int, out: Path,
) -> ModelAndData:  # fmt: skip
    """The model of that name.

    Args:
        name: What ``loading.find`` knows.
        device: Where it computes.
        text: A file to learn on.
        fasta: A file of proteins to learn on.
        length: Tokens of a passage.
        size: Passages of a batch.
        positions: Tokens that a Hugging Face model is extended to read; None: as many as it does.
        seed: For their order.
        out: Where the results will lie.

    Raises:
        InputError: There is no such model, it cannot be read with, or the results would take its place.
    """
    place = loading.find(name)
    own = place.folder.resolve()
    if out.resolve() in (own, own.parent if own.name == standing.MODEL else own):
        raise InputError(f"--out {out} is the folder of the model itself: name another")
    if (out / standing.MODEL / saving.SETTINGS).exists():
        raise InputError(f"--out {out} holds a run of train: name another folder")
    if not place.ours:
        return Pretrained(place, device, text, fasta, length, size, positions, seed)
    if positions is not None:
        raise InputError(f"--positions {positions}: {name} is a model of this library: train it with a longer context")
    return Run(place, device, text, fasta, length, size, seed)


class Pretrained:
    """A model of transformers with a text, or proteins."""

    def __init__(
        self, place: Place, device: torch.device, text: str | None, fasta: str | None, length: int | None,
        size: int | None, positions: int | None, seed: int,
    ) -> None:  # fmt: skip
        self.name, self.device, self.tokenizer = place.name, device, loading.tokenizer(place.name)
        self.wanted, self.extension = positions, ""
        self.model = self.original()
        self.positions = capture.context(self.model.config, self.tokenizer)
        if length is not None and self.positions is not None and length > self.positions:
            raise InputError(
                f"--length {length}: the model reads {self.positions} tokens at most; --positions {length} lets it "
                "read more"
            )
        self.length = length or min(LONGEST, self.positions or LONGEST)
        self.read = Reading(corpus.read(text, fasta), self.tokenizer, self.length, size or 1, seed)
        self.batch, self.held_out, self.choosing = self.read.batch, self.read.held_out, self.read.choosing
        self.lengths: list[int] = [*LENGTHS]

    def original(self) -> Any:
        """With more positions, where they were asked for."""
        model = loading.load(self.name).float().to(self.device)
        if self.wanted is not None:
            try:
                self.extension = str(extend(model, self.wanted, tokenizer=self.tokenizer))
            except (Unsupported, ValueError) as error:
                raise InputError(f"--positions {self.wanted}: {error}") from error
        return model

    def meta(self) -> dict[str, Any]:
        """The text."""
        return {
            "text": self.read.corpus.name,
            "batch_size": self.read.size,
            "length": self.length,
            "passages": sum(len(batch["input_ids"]) for batch in self.held_out),
            "bits_per_byte_of_a_nat": self.read.tokens_per_byte / math.log(2),
            "loss": "nats per token" if is_language_model(self.model) else LIKENESS,
            "positions": self.extension,
            "opened_by": "fast_attention.from_pretrained",
            "transformers": inputs.need("transformers", "hf", "converting a model").__version__,
        }

    def save(self, out: Path) -> None:
        """With its tokenizer."""
        self.model.save_pretrained(out)
        self.tokenizer.save_pretrained(out)


class Run:
    """A run of ``train`` with its task, or a shipped model with one that it can read."""

    positions: int | None = None
    extension = ""

    def __init__(
        self, place: Place, device: torch.device, text: str | None, fasta: str | None, length: int | None,
        size: int | None, seed: int,
    ) -> None:  # fmt: skip
        self.name, self.device = place.name, device
        self.model = self.original()
        config = self.model.config
        task, known = _learnt(place, config)
        self.task, self.size, self.seed = _changed(place, task, text, fasta, length), size or known.batch_size, seed
        steps.check(self.task, config)
        count = known.evaluation_batches
        batches = [self.task.batch("valid", i, self.size) for i in range(2 * count)]
        self.held_out, self.choosing = batches[:count], batches[count:]
        longest = config.longest
        self.lengths: list[int] = [n for n in LENGTHS if longest is None or n < longest]
        self.lengths += [] if longest is None else [longest]

    def original(self) -> Any:
        """Of the run."""
        return loading.load(self.name).float().to(self.device)

    def batch(self, number: int) -> tasks.Batch:
        """Another seed has other batches."""
        return self.task.batch("train", self.seed * ORDER + number, self.size)

    def meta(self) -> dict[str, Any]:
        """The task."""
        bits = self.task.metric == "bits per byte"
        return {
            "text": repr(self.task),
            "task": repr(self.task),
            "batch_size": self.size,
            "evaluation_batches": len(self.held_out),
            "length": self.task.length,
            "passages": sum(len(batch.tokens) for batch in self.held_out),
            "bits_per_byte_of_a_nat": 1 / math.log(2) if bits else None,
            "loss": "nats per target of the task",
            "opened_by": "fast_attention.nn.saving.load",
            "transformers": None,
        }

    def save(self, out: Path) -> None:
        """As ``train`` saves a model."""
        saving.save(self.model, out)


def _learnt(place: Place, config: ModelConfig) -> tuple[Task, TrainingSettings]:
    """What a model was trained on, and how: as its run says, or the report of its conversion; else what it can read."""
    folder = place.folder.parent if place.folder.name == standing.MODEL else place.folder
    if (run := standing.of(folder, lambda words: None)) is not None:
        return tasks.parse(run.task), TrainingSettings(**run.settings)
    meta = Converted.read(folder / RECORD).meta if (folder / RECORD).exists() else {}
    if "task" in meta:
        known = {name: meta[name] for name in ("batch_size", "evaluation_batches")}
        return tasks.parse(meta["task"]), TrainingSettings(**known)
    if config.reads == "residues" and not config.causal:
        return tasks.ProteinMLM(context=min(LONGEST, config.longest or LONGEST)), TrainingSettings()
    if config.reads == "bytes" and config.causal:
        return tasks.ByteLM(context=min(LONGEST, config.longest or LONGEST)), TrainingSettings()
    raise InputError(
        f"{place.name}: nothing says which task it learnt, and what it reads is neither bytes nor residues: give the "
        "folder of the run, with its checkpoints"
    )


def _changed(place: Place, task: Task, text: str | None, fasta: str | None, length: int | None) -> Task:
    """The task on another file, or with another length."""
    other: dict[str, Any] = {}
    for option, file, reads in (("--text", text, "bytes"), ("--fasta", fasta, "residues")):
        if file is not None and task.reads != reads:
            raise InputError(f"{option} {file}: {place.name} learns {task!r}, which reads no {reads}")
        if file is not None:
            other[task.takes] = file
    if length is not None and "context" not in [field.name for field in fields(task)]:  # type: ignore[arg-type]
        raise InputError(f"--length {length}: {task!r} has sequences of a length of its own")
    return replace(task, **other, **({} if length is None else {"context": length}))  # type: ignore[type-var]
