"""The laws for a whole model, anybody's: what must not move an output, and which layer lets it.

Between two runs that a law wants alike, the layer to blame is the first whose outputs moved at places where its inputs
had not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conformance.finding import Finding, Law, judged, law, moved, rounding, unclaimed
from fast_attention.conformance.threads import differ
from fast_attention.nn.models import Model

LENGTH = 21  # no multiple of any block; a model that reads fewer tokens is given what it reads


@dataclass(frozen=True)
class Whole:
    """A model as the laws call it.

    Args:
        name: What it is called.
        module: The model, in evaluation mode.
        run: ``(tokens (B, L), key_mask (B, L) or None) -> outputs (B, L, ...)``.
        vocab_size: Kinds of tokens.
        causal: Whether later tokens must not move earlier outputs.
        packed: The same with ``position_ids`` (1, L) that begin anew; None where the model takes none.
        step: ``(tokens (B, 1), state or None) -> outputs, state`` with the model's own cache; None where it keeps none.
        length: Tokens of a sequence, L.
    """

    name: str
    module: nn.Module
    run: Callable[[Tensor, Tensor | None], Tensor]
    vocab_size: int
    causal: bool
    packed: Callable[[Tensor, Tensor], Tensor] | None = None
    step: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None
    length: int = LENGTH

    @property
    def padding(self) -> int:
        """Places of a sequence that are masked where some are."""
        return 2 * self.length // 5

    def draw(self, seed: int = 0, rows: int = 2) -> Tensor:
        """Token numbers (rows, L) that stand for words: the first few often mean padding and the like."""
        first = min(8, self.vocab_size // 2)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(first, self.vocab_size, (rows, self.length), generator=generator)
        return tokens.to(next(self.module.parameters()).device)

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return next(self.module.parameters()).dtype


Trace = dict[str, tuple[list[Tensor], list[Tensor]]]


@contextmanager
def _traced(model: nn.Module, length: int) -> Iterator[Trace]:
    """Inputs and outputs (B, L, ...) of every layer that works token by token, in the order in which they end."""
    found: Trace = {}

    def tensors(values: Any) -> list[Tensor]:
        values = values if isinstance(values, tuple | list) else [values]
        return [x.detach() for x in values if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[1] == length]

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given, made = tensors([*args, *kwargs.values()]), tensors(out)
            if made and given and name not in found:
                found[name] = (given, made)

        return keep

    handles = [part.register_forward_hook(hook(name), with_kwargs=True) for name, part in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _blamed(before: Trace, after: Trace, keep: Callable[[Tensor], Tensor], limit: float) -> str:
    """The first layer whose outputs moved though its inputs had not; ``keep`` takes the places that must stay."""
    for name in before:
        if name not in after:
            continue
        (given, made), (given2, made2) = before[name], after[name]
        if len(given) != len(given2) or len(made) != len(made2):
            continue
        still = all(moved(keep(b), keep(a)) <= limit for a, b in zip(given, given2, strict=True))
        if still and any(moved(keep(b), keep(a)) > limit for a, b in zip(made, made2, strict=True)):
            return f"first moved in {name}"
    return ""


def _compared(subject: Whole, one: Any, other: Any, keep: Callable[[Tensor], Tensor], detail: str = "") -> Finding:
    """Two calls of ``run`` that must agree where ``keep`` looks."""
    with _traced(subject.module, subject.length) as before:
        first = subject.run(*one)
    with _traced(subject.module, subject.length) as after:
        second = subject.run(*other)
    limit = rounding(subject.dtype)
    size = moved(keep(second), keep(first))
    blamed = _blamed(before, after, keep, limit) if not size <= limit else ""
    return judged(size, limit, "; ".join(x for x in (detail, blamed) if x))


@law("the future never moves the past")
def future(subject: Whole, device: str = "cpu") -> Finding:
    """Later tokens are others: earlier outputs stay."""
    if not subject.causal:
        return unclaimed("not causal")
    tokens, cut = subject.draw(), subject.length // 2
    other = torch.cat([tokens[:, :cut], subject.draw(1)[:, cut:]], 1)
    return _compared(subject, (tokens, None), (other, None), lambda x: x[:, :cut])


@law("the past is seen")
def past(subject: Whole, device: str = "cpu") -> Finding:
    """All tokens before it are others: the last output moves."""
    tokens = subject.draw()
    other = torch.cat([subject.draw(1)[:, :-1], tokens[:, -1:]], 1)
    size = moved(subject.run(other, None)[:, -1], subject.run(tokens, None)[:, -1])
    return Finding("kept" if size > 1e-6 else "broken", size, 1e-6, "smallest change that counts as seeing")


def _inert(subject: Whole, seen: Tensor, detail: str) -> Finding:
    tokens = subject.draw()
    seen = seen.to(tokens.device)
    other = torch.where(seen, tokens, subject.draw(1))
    return _compared(subject, (tokens, seen), (other, seen), lambda x: x[seen], detail)


@law("padding behind is inert")
def padding_behind(subject: Whole, device: str = "cpu") -> Finding:
    """Whatever stands in masked places at the end, no output of a token moves."""
    length = subject.length
    return _inert(subject, torch.arange(length) < torch.tensor([[length], [length - subject.padding]]), "right padding")


@law("padding before is inert")
def padding_before(subject: Whole, device: str = "cpu") -> Finding:
    """Whatever stands in masked places at the start, no output of a token moves."""
    return _inert(subject, torch.arange(subject.length) >= torch.tensor([[0], [subject.padding]]), "left padding")


@law("padded is like shorter")
def shorter(subject: Whole, device: str = "cpu") -> Finding:
    """A padded sequence gives what the shorter one gives alone."""
    tokens, keep = subject.draw(), subject.length - subject.padding
    seen = (torch.arange(subject.length) < keep).expand(2, -1).to(tokens.device)
    alone = subject.run(tokens[:, :keep], None)
    return judged(moved(subject.run(tokens, seen)[:, :keep], alone), rounding(subject.dtype))


@law("sequences of a batch do not meet")
def batch(subject: Whole, device: str = "cpu") -> Finding:
    """Another second sequence: the outputs of the first stay."""
    tokens = subject.draw()
    other = torch.cat([tokens[:1], subject.draw(1)[1:]])
    return _compared(subject, (tokens, None), (other, None), lambda x: x[:1])


@law("packed sequences do not meet")
def packed(subject: Whole, device: str = "cpu") -> Finding:
    """Two sequences in one row, with positions that begin anew, give what they give alone."""
    if subject.packed is None:
        return unclaimed("takes no position_ids")
    tokens, cut = subject.draw(rows=1), subject.length * 3 // 7
    places = torch.cat([torch.arange(cut), torch.arange(subject.length - cut)])[None].to(tokens.device)
    alone = torch.cat([subject.run(part, None) for part in (tokens[:, :cut], tokens[:, cut:])], 1)
    return judged(moved(subject.packed(tokens, places), alone), rounding(subject.dtype))


@law("step by step is all at once")
def decoding(subject: Whole, device: str = "cpu") -> Finding:
    """Token by token with the model's cache: the same outputs."""
    if subject.step is None:
        return unclaimed("keeps no cache")
    tokens = subject.draw()
    with _traced(subject.module, subject.length) as whole:
        before = subject.run(tokens, None)
    made, traces, state = [], [], None
    for i in range(subject.length):
        with _traced(subject.module, 1) as trace:
            out, state = subject.step(tokens[:, i : i + 1], state)
        made.append(out)
        traces.append(trace)
    limit = rounding(subject.dtype)
    size = moved(torch.cat(made, 1), before)
    blamed = "" if size <= limit else _blamed(whole, _joined(traces), lambda x: x, limit)
    return judged(size, limit, blamed)


def _joined(traces: list[Trace]) -> Trace:
    """One token after the other as if they had come at once."""
    names = [name for name in traces[0] if all(name in trace for trace in traces)]
    return {
        name: (
            [torch.cat(parts, 1) for parts in zip(*(trace[name][0] for trace in traces), strict=True)],
            [torch.cat(parts, 1) for parts in zip(*(trace[name][1] for trace in traces), strict=True)],
        )
        for name in names
    }


@law("threads")
def threads(subject: Whole, device: str = "cpu") -> Finding:
    """Forward passes, gradients and steps of decoding in three threads give what they give one after another."""
    weights = [p for p in subject.module.parameters() if p.requires_grad]

    def call(seed: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = subject.run(subject.draw(seed, rows=1 + seed), None)
            probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
            slopes = torch.autograd.grad((out * probe).sum(), weights, allow_unused=True, materialize_grads=True)
        return out.detach(), *slopes

    def steps(seed: int) -> tuple[Tensor, ...]:
        assert subject.step is not None
        tokens, made, state = subject.draw(seed, rows=1 + seed), [], None
        for i in range(min(4, subject.length)):
            out, state = subject.step(tokens[:, i : i + 1], state)
            made.append(out)
        return tuple(made)

    size = differ([lambda seed=seed: call(seed) for seed in range(3)], subject.module)
    if subject.step is not None:
        size = max(size, differ([lambda seed=seed: steps(seed) for seed in range(3)], subject.module))
    return judged(size, rounding(subject.dtype), "forward, gradients" + ", steps" * (subject.step is not None))


LAWS: tuple[Law, ...] = (future, past, padding_behind, padding_before, shorter, batch, packed, decoding, threads)


def of(model: nn.Module) -> Whole:
    """How the laws call a Hugging Face model of tokens, or one of this library's ``nn.models.Model``.

    Raises:
        ValueError: It is neither.
    """
    config: Any = getattr(model, "config", None)
    if isinstance(model, Model):
        tokens = model.config.head == "tokens"  # classes have one output for all tokens, whose vectors are judged
        step = model.decode if tokens and model.config.causal and model.streams else None
        run: Any = model if tokens else model.hidden
        length = min(LENGTH, model.config.longest or LENGTH)
        return Whole(type(model).__name__, model, run, config.vocab_size, config.causal, None, step, length)
    if getattr(model, "main_input_name", "") != "input_ids" or config is None or config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__}: give a model that reads tokens on one side, from transformers or ours"
        )
    known = inspect.signature(model.forward).parameters
    decodes = "past_key_values" in known and bool(getattr(model, "can_generate", lambda: False)())
    off: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}

    def outputs(found: Any) -> Tensor:
        return found["logits"] if "logits" in found else found["last_hidden_state"]

    def run_(tokens: Tensor, mask: Tensor | None) -> Tensor:
        given = {} if mask is None else {"attention_mask": mask.long()}
        if mask is not None and decodes and "position_ids" in known:  # as generate counts behind padding
            given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
        return outputs(model(input_ids=tokens, **given, **off))

    def packed_(tokens: Tensor, places: Tensor) -> Tensor:
        return outputs(model(input_ids=tokens, position_ids=places, **off))

    def step_(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        found = model(input_ids=tokens, past_key_values=state, use_cache=True)
        return outputs(found), found["past_key_values"]

    return Whole(
        type(model).__name__, model, run_, config.get_text_config().vocab_size, decodes,
        packed_ if decodes and "position_ids" in known else None, step_ if decodes else None,
    )  # fmt: skip
