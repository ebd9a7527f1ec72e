"""The laws for whole models of tokens: what must not move an output, and which layer breaks a law.

Between two runs that a law wants equal, the layer to blame is the first whose outputs moved at positions where its
inputs had not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import cache_argument
from fast_attention.conformance.finding import Breaches, Law, all_moved, claims, law, moved, rounding
from fast_attention.conformance.independence import UNSEEN, unseen
from fast_attention.conformance.robustness import difference_in_step
from fast_attention.conformance.under_test import with_gradients
from fast_attention.nn.bound import Bound
from fast_attention.nn.positions import first_position

LENGTH = 21  # no multiple of any block; a model that reads fewer tokens is given what it reads


@dataclass(frozen=True)
class ModelUnderTest:
    """A model as the laws call it."""

    name: str  # in reports
    module: nn.Module  # in evaluation mode
    run: Callable[[Tensor, Tensor | None], Tensor]  # tokens (B, L), key_mask (B, L) or None -> outputs (B, L, ...)
    vocab_size: int
    causal: bool  # whether later tokens must not move earlier outputs
    packed: Callable[[Tensor, Tensor], Tensor] | None = None  # tokens (1, L), position_ids (1, L) -> outputs
    step: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None  # tokens (B, 1), state or None -> outputs, state
    masks: bool = True  # whether ``run`` takes a ``key_mask``
    length: int = LENGTH  # tokens of a sequence
    padded_step: Callable[[Tensor, Any, Tensor], tuple[Tensor, Any]] | None = None  # with the key mask of all so far

    @property
    def padding(self) -> int:
        """The number of padding tokens in a padded sequence."""
        return 2 * self.length // 5

    def draw(self, seed: int = 0, rows: int = 2) -> Tensor:
        """Random token numbers (rows, L) without the first few, which often mean padding and the like."""
        first = min(8, self.vocab_size // 2)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(first, self.vocab_size, (rows, self.length), generator=generator)
        return tokens.to(next(self.module.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        return next(self.module.parameters()).dtype


LayerTensors = dict[str, tuple[list[Tensor], list[Tensor]]]


@contextmanager
def _recorded_layers(model: nn.Module, length: int) -> Iterator[LayerTensors]:
    """Record inputs and outputs (B, L, ...) of every layer that works token by token, in the order of completion."""
    record: LayerTensors = {}

    def tensors(values: Any) -> list[Tensor]:
        values = values if isinstance(values, tuple | list) else [values]
        return [x.detach() for x in values if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[1] == length]

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            inputs, outputs = tensors([*args, *kwargs.values()]), tensors(out)
            if outputs and inputs and name not in record:
                record[name] = (inputs, outputs)

        return keep

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if name:
                hooks.enter_context(layer.register_forward_hook(hook(name), with_kwargs=True))
        yield record


def _blamed(before: LayerTensors, after: LayerTensors, keep: Callable[[Tensor], Tensor], limit: float) -> str:
    """The first layer whose outputs moved though its inputs had not; ``keep`` selects the positions that must stay."""
    for name in before:
        if name not in after:
            continue
        (inputs, outputs), (inputs2, outputs2) = before[name], after[name]
        if len(inputs) != len(inputs2) or len(outputs) != len(outputs2):
            continue
        inputs_agree = all_moved(map(keep, inputs2), map(keep, inputs)) <= limit
        if inputs_agree and all_moved(map(keep, outputs2), map(keep, outputs)) > limit:
            return f"first moved in {name}"
    return ""


def _compared(
    subject: ModelUnderTest, one: Any, other: Any, keep: Callable[[Tensor], Tensor], detail: str = ""
) -> Breaches:
    """The breach of two calls of ``run`` that must agree at the positions that ``keep`` selects."""
    with _recorded_layers(subject.module, subject.length) as before:
        first = subject.run(*one)
    with _recorded_layers(subject.module, subject.length) as after:
        second = subject.run(*other)
    limit = rounding(subject.dtype)
    size = moved(keep(second), keep(first))
    blamed = _blamed(before, after, keep, limit) if not size <= limit else ""
    yield size, "; ".join(x for x in (detail, blamed) if x)


@law("the future never moves the past")
def future(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Replacing later tokens leaves earlier outputs alone."""
    claims(subject.causal, "not causal")
    tokens, half = subject.draw(), subject.length // 2
    other = torch.cat([tokens[:, :half], subject.draw(1)[:, half:]], 1)
    yield from _compared(subject, (tokens, None), (other, None), lambda x: x[:, :half])


@law("the past is seen", 0.0)
def past(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Replacing all earlier tokens moves the last output."""
    tokens = subject.draw()
    other = torch.cat([subject.draw(1)[:, :-1], tokens[:, -1:]], 1)
    yield unseen(subject.run(other, None)[:, -1], subject.run(tokens, None)[:, -1]), UNSEEN


def _inert(subject: ModelUnderTest, visible: Tensor, detail: str) -> Breaches:
    claims(subject.masks, "takes no key_mask")
    tokens = subject.draw()
    visible = visible.to(tokens.device)
    other = torch.where(visible, tokens, subject.draw(1))
    yield from _compared(subject, (tokens, visible), (other, visible), lambda x: x[visible], detail)


@law("padding behind is inert")
def padding_behind(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Replacing masked tokens at the end moves no visible token's output."""
    length = subject.length
    yield from _inert(
        subject, torch.arange(length) < torch.tensor([[length], [length - subject.padding]]), "right padding"
    )


@law("padding before is inert")
def padding_before(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Replacing masked tokens at the start moves no visible token's output."""
    yield from _inert(subject, torch.arange(subject.length) >= torch.tensor([[0], [subject.padding]]), "left padding")


@law("padded is like shorter")
def shorter(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """A padded sequence gives what the shorter one gives alone."""
    claims(subject.masks, "takes no key_mask")
    tokens, keep = subject.draw(), subject.length - subject.padding
    visible = (torch.arange(subject.length) < keep).expand(2, -1).to(tokens.device)
    alone = subject.run(tokens[:, :keep], None)
    yield moved(subject.run(tokens, visible)[:, :keep], alone), ""


@law("padded in front is like shorter")
def front(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """A sequence padded in front gives what it gives alone, beside one that is not padded; in steps too."""
    claims(subject.masks, "takes no key_mask")
    tokens, hidden = subject.draw(), subject.padding
    visible = (torch.arange(subject.length) >= torch.tensor([[hidden], [0]])).to(tokens.device)
    alone, whole = subject.run(tokens[:1, hidden:], None), subject.run(tokens[1:], None)
    outs = {"at once": subject.run(tokens, visible)}
    if subject.padded_step is not None:
        state, steps = None, []
        for start, end in pairwise((0, *range(subject.length - 4, subject.length + 1))):
            out, state = subject.padded_step(tokens[:, start:end], state, visible[:, :end])
            steps.append(out)
        outs["in steps"] = torch.cat(steps, 1)
    for how, x in outs.items():
        yield max(moved(x[:1, hidden:], alone), moved(x[1:], whole)), how


@law("sequences of a batch do not meet")
def batch(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Replacing the second sequence leaves the outputs of the first alone."""
    tokens = subject.draw()
    other = torch.cat([tokens[:1], subject.draw(1)[1:]])
    yield from _compared(subject, (tokens, None), (other, None), lambda x: x[:1])


@law("packed sequences do not meet")
def packed(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Two sequences in one row, each with positions from 0, give what they give alone."""
    run_packed: Any = subject.packed
    claims(run_packed, "takes no position_ids")
    tokens, half = subject.draw(rows=1), subject.length * 3 // 7
    positions = torch.cat([torch.arange(half), torch.arange(subject.length - half)])[None].to(tokens.device)
    alone = torch.cat([subject.run(sequence, None) for sequence in (tokens[:, :half], tokens[:, half:])], 1)
    yield moved(run_packed(tokens, positions), alone), ""


@law("step by step is all at once")
def decoding(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Decoding token by token with the model's cache gives the outputs of one pass."""
    step: Any = subject.step
    claims(step, "keeps no cache")
    tokens = subject.draw()
    with _recorded_layers(subject.module, subject.length) as record_at_once:
        before = subject.run(tokens, None)
    outputs, records, state = [], [], None
    for i in range(subject.length):
        with _recorded_layers(subject.module, 1) as record:
            out, state = step(tokens[:, i : i + 1], state)
        outputs.append(out)
        records.append(record)
    limit = rounding(subject.dtype)
    size = moved(torch.cat(outputs, 1), before)
    yield size, "" if size <= limit else _blamed(record_at_once, _joined(records), lambda x: x, limit)


def _joined(records: list[LayerTensors]) -> LayerTensors:
    """The records of single tokens, concatenated to one of the whole sequence."""
    names = [name for name in records[0] if all(name in record for record in records)]

    def joined(name: str, part: int) -> list[Tensor]:
        return [torch.cat(tensors, 1) for tensors in zip(*(record[name][part] for record in records), strict=True)]

    return {name: (joined(name, 0), joined(name, 1)) for name in names}


@law("threads")
def threads(subject: ModelUnderTest, device: str = "cpu") -> Breaches:
    """Forward passes, gradients and steps of decoding in three threads give what they give one after another."""

    def call(seed: int) -> tuple[Tensor, ...]:
        tokens = subject.draw(seed, rows=1 + seed)
        return with_gradients(lambda: subject.run(tokens, None), (), subject.module)

    def steps(seed: int) -> tuple[Tensor, ...]:
        assert subject.step is not None
        tokens, outputs, state = subject.draw(seed, rows=1 + seed), [], None
        for i in range(min(4, subject.length)):
            out, state = subject.step(tokens[:, i : i + 1], state)
            outputs.append(out)
        return tuple(outputs)

    for kind in (call,) if subject.step is None else (call, steps):
        yield difference_in_step([partial(kind, seed) for seed in range(3)], subject.module), kind.__name__


LAWS: tuple[Law, ...] = (future, past, padding_behind, padding_before, shorter, front, batch, packed, decoding, threads)


def of(model: nn.Module, *, causal: bool | None = None, length: int = LENGTH) -> ModelUnderTest:
    """Describe a Hugging Face model of tokens, or any module whose ``forward`` takes tokens (B, L).

    Raises:
        ValueError: It is neither.
    """
    config: Any = getattr(model, "config", None)
    streams = all(part.mechanism.traits.memory for part in model.modules() if isinstance(part, Bound))
    if causal is not None:
        return _plain(model, causal, length, streams)
    if getattr(model, "main_input_name", "") != "input_ids" or config is None or config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__}: give a model of transformers that reads tokens on one side, or say causal=True "
            "or False for a module of your own whose forward takes tokens (B, L) and, perhaps, a key_mask"
        )
    parameters = inspect.signature(model.forward).parameters
    cache = cache_argument.name_of(model.forward) or ""
    decodes = bool(cache) and bool(getattr(model, "can_generate", lambda: False)())
    no_cache: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}

    first = 0 if decodes else first_position(model)

    def outputs(result: Any) -> Tensor:
        return result["logits"] if "logits" in result else result["last_hidden_state"]

    def masked(mask: Tensor | None, count: int) -> dict[str, Tensor]:
        """The mask as the model takes it, and the last tokens' positions as ``generate`` counts them behind padding."""
        if mask is None:
            return {}
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0) + first
        more = {"position_ids": positions[:, -count:]} if "position_ids" in parameters else {}
        return {"attention_mask": mask.long(), **more}

    def run_(tokens: Tensor, mask: Tensor | None) -> Tensor:
        return outputs(model(input_ids=tokens, **masked(mask, tokens.shape[1]), **no_cache))

    def packed_(tokens: Tensor, positions: Tensor) -> Tensor:
        return outputs(model(input_ids=tokens, position_ids=positions, **no_cache))

    def step_(tokens: Tensor, state: Any, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        result = model(input_ids=tokens, **masked(mask, tokens.shape[1]), **{cache: state}, use_cache=True)
        return outputs(result), result[cache]

    steps = decodes and streams
    return ModelUnderTest(
        type(model).__name__, model, run_, config.get_text_config().vocab_size, decodes,
        packed_ if decodes and "position_ids" in parameters else None, step_ if steps else None,
        padded_step=step_ if steps else None,
    )  # fmt: skip


def _plain(model: nn.Module, causal: bool, length: int, streams: bool) -> ModelUnderTest:
    """Describe a module by its ``forward(tokens, key_mask)``, its first embedding and its ``decode``, if it has one."""
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    if not sizes:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Embedding: it reads no tokens")
    masks, step = "key_mask" in inspect.signature(model.forward).parameters, getattr(model, "decode", None)

    def run(tokens: Tensor, mask: Tensor | None) -> Tensor:
        out = model(tokens) if mask is None else model(tokens, key_mask=mask)
        if not isinstance(out, Tensor) or out.shape[:2] != tokens.shape:
            raise ValueError(f"{type(model).__name__} gives no output for each token: one tensor (B, L, ...) is needed")
        return out

    step = step if causal and streams else None
    return ModelUnderTest(type(model).__name__, model, run, sizes[0], causal, None, step, masks, length)
