"""Opens what ``convert`` converts: a model of transformers with a text, or a run of ``train`` with its task."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fast_attention import tasks
from fast_attention.conversion import Chunks
from fast_attention.conversion.goals import is_language_model
from fast_attention.conversion.teachers import Teacher
from fast_attention.integrations import extend
from fast_attention.lab import capture, corpus, inputs, loading, texts
from fast_attention.lab.converting.reading import Reading
from fast_attention.lab.converting.record import Converted
from fast_attention.lab.inputs import InputError
from fast_attention.lab.loading import ModelFolder
from fast_attention.nn import saving
from fast_attention.nn.models import ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training import run_folder, steps
from fast_attention.training.loop import ORDER
from fast_attention.training.settings import TrainingSettings

LONGEST = 512  # tokens of a passage, unless --length says more
SHORTEST = 32  # tokens of a passage of a text
TEACHERS = ("original", "chunks")
LENGTHS = (512, 2048, 8192)  # where time and memory are measured
LIKENESS = (
    "2 - the mean cosine of the sentence embeddings (mean pooled) to the original's: the original's loss is 1, and a "
    "budget of 1.02 asks for a cosine of 0.98"
)


class ModelAndData(Protocol):
    """A model and its batches."""

    model: Any
    held_out: dict[str, list[Any]]  # by what they are
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

    def teacher(self, name: str) -> Teacher:
        """What the model learns from, by the option's word."""
        ...

    def save(self, out: Path) -> None:
        """The model into a folder from which every command opens it."""
        ...


class Data(NamedTuple):
    """What to learn on, as a user chose it."""

    texts: list[str] | None  # files, or names of what this machine has
    judge: str | None  # one more, which is never trained on
    fasta: str | None
    length: int | None  # tokens of a passage
    size: int | None  # passages of a batch
    positions: int | None  # tokens that a Hugging Face model is extended to read; None: as many as it does
    seed: int  # for the order of passages


def opened(name: str, device: torch.device, data: Data, out: Path) -> ModelAndData:
    """Open a model with what it learns on.

    Args:
        name: What ``loading.find`` knows.
        device: Where it computes.
        data: What to learn on.
        out: The folder for the results.

    Raises:
        InputError: There is no such model, it cannot be read with, or the results would replace it.
    """
    source = loading.find(name)
    folder = source.folder.resolve()
    if out.resolve() in (folder, folder.parent if folder.name == run_folder.MODEL else folder):
        raise InputError(f"--out {out} is the folder of the model itself: name another")
    if (out / run_folder.MODEL / saving.SETTINGS).exists():
        raise InputError(f"--out {out} holds a run of train: name another folder")
    if source.ours and data.positions is not None:
        raise InputError(
            f"--positions {data.positions}: {name} is a model of this library: train it with a longer context"
        )
    return (Run if source.ours else Pretrained)(source, device, data)


class Pretrained:
    """A model of transformers with a text, or proteins."""

    def __init__(self, source: ModelFolder, device: torch.device, data: Data) -> None:
        self.name, self.device, self.tokenizer = source.name, device, loading.tokenizer(source.name)
        self.wanted, self.extension = data.positions, ""
        self.own_positions = 0
        self.model = self.original()
        self.positions = capture.context(self.model.config, self.tokenizer)
        if data.length is not None and self.positions is not None and data.length > self.positions:
            raise InputError(
                f"--length {data.length}: the model reads {self.positions} tokens at most; --positions {data.length} "
                "lets it read more"
            )
        self.length = data.length or min(LONGEST, self.positions or LONGEST)
        self.read = _reading(data, self.tokenizer, self.length)
        self.batch, self.held_out, self.choosing = self.read.batch, self.read.groups, self.read.choosing
        self.lengths: list[int] = [*LENGTHS]

    def original(self) -> Any:
        """The model, with more positions where they were asked for."""
        model = loading.load(self.name).float().to(self.device)
        self.own_positions = capture.context(model.config, loading.tokenizer(self.name)) or 0
        if self.wanted is not None:
            with inputs.refusing(where=f"--positions {self.wanted}: "):
                self.extension = str(extend(model, self.wanted, tokenizer=self.tokenizer))
        return model

    def meta(self) -> dict[str, Any]:
        """What is recorded of the text."""
        return {
            "text": self.read.name,
            "texts": [corpus.facts for corpus in self.read.corpora],
            "judge": None if self.read.judge is None else self.read.judge.facts,
            "batch_size": self.read.size,
            "length": self.length,
            "passages": sum(len(batch["input_ids"]) for group in self.held_out.values() for batch in group),
            "bits_per_byte_of_a_nat": self.read.tokens_per_byte / math.log(2),
            "loss": "nats per token" if is_language_model(self.model) else LIKENESS,
            "positions": self.extension,
            "opened_by": "fast_attention.from_pretrained",
            "transformers": inputs.need("transformers", "hf", "converting a model").__version__,
        }

    def teacher(self, name: str) -> Teacher:
        """The original whole, or in chunks of as many tokens as it was trained to read."""
        _check_teacher(name, TEACHERS)
        if name == "original":
            return name
        tokens = min(self.own_positions or LONGEST, LONGEST)
        return Chunks(tokens, len(self.read.passages.before), len(self.read.passages.behind))

    def save(self, out: Path) -> None:
        """Save the model with its tokenizer."""
        self.model.save_pretrained(out)
        self.tokenizer.save_pretrained(out)


class Run:
    """A run of ``train`` with its task, or a shipped model with one that it can read."""

    positions: int | None = None
    extension = ""

    def __init__(self, source: ModelFolder, device: torch.device, data: Data) -> None:
        self.name, self.device = source.name, device
        self.model = self.original()
        config = self.model.config
        task, known = _learnt(source, config)
        self.task, self.size, self.seed = _changed(source, task, data), data.size or known.batch_size, data.seed
        steps.check(self.task, config)
        count = known.evaluation_batches
        batches = [self.task.batch("valid", i, self.size) for i in range(2 * count)]
        self.held_out, self.choosing = {"validation": batches[:count]}, batches[count:]
        longest = config.longest
        self.lengths: list[int] = [n for n in LENGTHS if longest is None or n < longest]
        self.lengths += [] if longest is None else [longest]

    def original(self) -> Any:
        """The model of the run."""
        return loading.load(self.name).float().to(self.device)

    def batch(self, number: int) -> tasks.Batch:
        """Batch number i of the task; another seed has other batches."""
        return self.task.batch("train", self.seed * ORDER + number, self.size)

    def meta(self) -> dict[str, Any]:
        """What is recorded of the task."""
        bits = self.task.metric == "bits per byte"
        return {
            "text": repr(self.task),
            "task": repr(self.task),
            "batch_size": self.size,
            "evaluation_batches": len(self.held_out["validation"]),
            "length": self.task.length,
            "passages": sum(len(batch.tokens) for batch in self.held_out["validation"]),
            "bits_per_byte_of_a_nat": 1 / math.log(2) if bits else None,
            "loss": "nats per target of the task",
            "opened_by": "fast_attention.nn.saving.load",
            "transformers": None,
        }

    def teacher(self, name: str) -> Teacher:
        """The model itself."""
        _check_teacher(name, TEACHERS[:1])
        return "original"

    def save(self, out: Path) -> None:
        """Save the model as ``train`` does."""
        saving.save(self.model, out)


def _check_teacher(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise InputError(f"--teacher {name}: this model learns from {' or '.join(known)}")


def _reading(data: Data, tokenizer: Any, length: int) -> Reading:
    """Texts in passages of mixed lengths, judged by another one; or proteins, judged by the last of them."""
    if data.fasta is None:
        trained, judge = texts.read(data.texts, data.judge)
        return Reading(trained, tokenizer, length, data.size or 1, data.seed, shortest=SHORTEST, judge=judge)
    if data.texts or data.judge:
        raise InputError(f"give {'--text' if data.texts else '--judge'} or --fasta, not both")
    return Reading([corpus.read(fasta=data.fasta)], tokenizer, length, data.size or 1, data.seed)


def _learnt(source: ModelFolder, config: ModelConfig) -> tuple[Task, TrainingSettings]:
    """What a model was trained on, and how: as its run says, or the report of its conversion; else what it can read."""
    folder = source.folder.parent if source.folder.name == run_folder.MODEL else source.folder
    if (run := run_folder.of(folder, lambda words: None)) is not None:
        return tasks.parse(run.task), TrainingSettings(**run.settings)
    path = folder / Converted.data
    meta = Converted.read(path).meta if path.exists() else {}
    if "task" in meta:
        known = {name: meta[name] for name in ("batch_size", "evaluation_batches")}
        return tasks.parse(meta["task"]), TrainingSettings(**known)
    if config.reads == "residues" and not config.causal:
        return tasks.ProteinMLM(context=min(LONGEST, config.longest or LONGEST)), TrainingSettings()
    if config.reads == "bytes" and config.causal:
        return tasks.ByteLM(context=min(LONGEST, config.longest or LONGEST)), TrainingSettings()
    raise InputError(
        f"{source.name}: nothing says which task it learnt, and what it reads is neither bytes nor residues: give the "
        "folder of the run, with its checkpoints"
    )


def _changed(source: ModelFolder, task: Task, data: Data) -> Task:
    """The task on another file, or with another length."""
    if data.judge is not None:
        raise InputError(f"--judge {data.judge}: {source.name} is judged by the validation side of its own task")
    if data.texts is not None and len(data.texts) > 1:
        raise InputError(f"--text {data.texts[1]}: {source.name} learns {task!r}, which reads one file")
    other: dict[str, Any] = {}
    for option, file, reads in (
        ("--text", data.texts[0] if data.texts else None, "bytes"),
        ("--fasta", data.fasta, "residues"),
    ):
        if file is not None and task.reads != reads:
            raise InputError(f"{option} {file}: {source.name} learns {task!r}, which reads no {reads}")
        if file is not None:
            other[task.takes] = file
    if data.length is not None and "context" not in [field.name for field in fields(task)]:  # type: ignore[arg-type]
        raise InputError(f"--length {data.length}: {task!r} has sequences of a length of its own")
    return replace(task, **other, **({} if data.length is None else {"context": data.length}))  # type: ignore[type-var]
