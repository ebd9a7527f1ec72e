"""Converts a pretrained model to fast attention: swap, attention transfer, choice of exact layers, fine-tune."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fast_attention.conversion.outcome import Conversion as Conversion
from fast_attention.conversion.settings import ConversionSettings as ConversionSettings
from fast_attention.conversion.teachers import Chunks as Chunks
from fast_attention.conversion.teachers import Teacher
from fast_attention.integrations.crossover import ExactUpTo
from fast_attention.mechanism import Mechanism

BatchOf = Callable[[int], Any]
Watch = Callable[[dict[str, Any]], None]


def convert(
    model: Any,
    mechanism: Mechanism[Any, Any] | str,
    batches: BatchOf,
    held_out: Sequence[Any] | Mapping[str, Sequence[Any]],
    *,
    settings: ConversionSettings | None = None,
    keep: Sequence[int] = (),
    budget: float | None = None,
    choosing: Sequence[Any] = (),
    exact_up_to: ExactUpTo | None = "auto",
    teacher: Teacher = "original",
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    watch: Watch = lambda line: None,
) -> Conversion:
    """Give a trained model another attention, in place, and train it until it is near the original.

    Attention transfer first: every layer learns to give the original layer's output on the original's inputs (squared
    error). Then all is tuned together: a model that ``train`` made on the loss of its task, a decoder with a head of
    tokens on the loss of its text, any other model on the teacher's hidden states and on the cosine of the embeddings.
    What is trained are the mechanisms' own weights; with ``settings.train="model"`` also the projections in the
    transfer, and all weights but the input embeddings in the end. The model stays in evaluation mode; nothing is
    dropped. It gets the weights of the stage that was best on ``held_out``, the untrained swap among them; groups whose
    names begin with "trained text" do not count there. Where anything is raised, by ``batches`` or ``watch``
    too, it gets its own attention and its weights of before back.

    Args:
        model: A Hugging Face model, encoder or decoder, or a ``fast_attention.nn.models.Model``.
        mechanism: What to run in every layer that is not kept.
        batches: Batch number i, the same for the same number: tensors by name, as a Hugging Face model's forward takes
            them, or a ``fast_attention.tasks.Batch`` for a model of this library, as ``task.batch`` gives it. A
            language model predicts ``labels`` where there are some, -100 for none, and ``input_ids`` else.
        held_out: Batches that ``batches`` never gives: all reported figures are of these. Or groups of them by name,
            such as ``{"short": [...], "other text, 2048": [...]}``: each gets figures of its own, too.
        settings: Time, rates, seed.
        keep: Numbers of layers that stay as they are, counted from 0 in the order of the model.
        budget: Before the fine-tune, leave as few layers as they were as a greedy search needs for a loss of at most
            this multiple of the original's. A language model's loss is in nats per token, that of a model of this
            library in nats per target; any other model's is 2 - the mean cosine of its sentence embeddings to the
            original's, so that 1.02 asks for a cosine of 0.98.
        choosing: Held-out batches for that choice and for the loss with each layer put back; ``held_out`` if empty.
        exact_up_to: Run exact attention in the converted layers for queries that see at most so many tokens;
            ``"auto"`` measures from which length on the mechanism is faster on this machine, at the layers' own heads
            and widths, and stays within a chunk of a teacher that reads chunks, or is None where a layer was trained
            with another mechanism than exact attention; None: never. The mechanism learns from long and short passages
            alike; all figures are with it.
            With ``settings.train="mechanism"`` a Hugging Face model gives for short inputs what it gave, to the bit.
        teacher: Of encoders that give embeddings: ``"original"`` reads every text whole, by exact attention;
            ``Chunks(tokens=512)`` in chunks, whose mean is the embedding that is asked for. There is no transfer then,
            for which every layer would need the whole.
        checkpoint: A file to which the state is written from time to time, whole or not at all.
        resume: Continue from that file, if it exists. With ``settings.steps`` and no minutes, the result equals that of
            an uninterrupted run to the bit.
        watch: Called with a line (a dictionary) for every step and every measurement.

    Returns:
        What was measured: before, in between and after. SIGINT, SIGTERM and SIGUSR1 end it early, status
        ``"interrupted"``, with a checkpoint written and a model that can be used.

    Raises:
        Unsupported: No layer can run the mechanism, the model is of another library or both encoder and decoder, or
            nothing but the original's layers keeps the budget.
        TypeError: ``settings`` are none.
        ValueError: ``keep`` names no layer, the batches or the budget cannot be used, or the checkpoint is damaged or
            another conversion's, or ``exact_up_to`` is neither a number from 1 on nor ``"auto"``.
    """
    from fast_attention.conversion import converting

    settings = ConversionSettings() if settings is None else settings
    if not isinstance(settings, ConversionSettings):
        raise TypeError(f"settings are ConversionSettings(...); got {settings!r}")
    return converting.run(
        model, mechanism, batches, held_out, settings=settings, keep=keep, budget=budget,
        choosing=choosing, exact_up_to=exact_up_to, teacher=teacher, checkpoint=checkpoint, resume=resume, watch=watch,
    )  # fmt: skip


__all__ = [
    "Chunks", "Conversion", "ConversionSettings", "convert",
]  # fmt: skip
