"""Generates tokens from a decoder, one at a time: greedy, sampled or by beam search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast_attention import decoding
from fast_attention.nn.models import Model
from fast_attention.value import Value, at_least


@dataclass(frozen=True, repr=False)
class Sampling(Value):
    """How the next token is chosen.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Only the k likeliest tokens; 0 for all.
        top_p: Only the likeliest tokens that together have this probability.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        at_least(self, "temperature", self.temperature, 0.0)
        at_least(self, "top_k", self.top_k, 0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"Sampling(top_p={self.top_p!r}): top_p must be above 0 and at most 1")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token (B,) for each row of logits (B, V)."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, torch.finfo(logits.dtype).tiny)
        if self.top_k:
            threshold = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        if self.top_p < 1.0:
            ranked, order = logits.sort(-1, descending=True)
            probabilities = ranked.softmax(-1)
            excluded = probabilities.cumsum(-1) - probabilities >= self.top_p
            excluded[..., 0] = False
            masked = torch.zeros_like(excluded).scatter(-1, order, excluded)
            logits = logits.masked_fill(masked, float("-inf"))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[..., 0]


class _Decoder:
    """Feeds tokens to a model: with its decoding state or, where a mechanism cannot stream, with all tokens so far."""

    def __init__(self, model: Model) -> None:
        self.model, self.state, self.past = model, None, None

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after the last of the tokens (B, N), without dropout; the modules' modes stay as they are."""
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            return self._logits(tokens)
        finally:
            for module in training:
                module.training = True

    def _logits(self, tokens: Tensor) -> Tensor:
        if self.model.streams:
            logits, self.state = self.model.decode(tokens, self.state)
            return logits[:, -1]
        self.past = tokens if self.past is None else torch.cat([self.past, tokens], -1)
        return self.model(self.past)[:, -1]

    def select(self, index: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        if self.state is not None:
            self.state = decoding.select(self.state, index)
        if self.past is not None:
            self.past = self.past[index]


def stream(
    model: Model, prompts: Sequence[Sequence[int]], *, sampling: Sampling = Sampling(temperature=0.0), seed: int = 0
) -> Iterator[list[int | None]]:
    """Yield new tokens without end, one per prompt at a time; None for a prompt that is still being read.

    Prompts of unequal lengths are one batch without padding: where a longer prompt has tokens left, these are read
    instead of chosen ones. So every mechanism gives what it gives for one prompt alone.
    """
    (reader, generator), position = _start(model, prompts, seed), len(min(prompts, key=len))
    logits = reader.read(torch.tensor([list(prompt[:position]) for prompt in prompts], device=_device(model)))
    while True:
        chosen = sampling.choose(logits, generator).tolist()
        reading = [position < len(prompt) for prompt in prompts]
        tokens = [p[position] if more else c for p, c, more in zip(prompts, chosen, reading, strict=True)]
        yield [None if more else c for c, more in zip(chosen, reading, strict=True)]
        position += 1
        logits = reader.read(torch.tensor(tokens, device=_device(model))[:, None])


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 64,
    sampling: Sampling = Sampling(temperature=0.0),
    beams: int = 1,
    stop: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        model: A decoder (``config.causal``).
        prompts: Lists of tokens, of any lengths of at least one.
        new_tokens: Tokens to add to each.
        sampling: How tokens are chosen; the likeliest by default.
        beams: Beam width; above 1 the likeliest sequence of the search is returned and ``sampling`` is not used.
        stop: A token that ends a sequence (and is its last).
        seed: For sampling.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: The model is no decoder, a prompt is empty, or the tokens exceed what the model is built for.
    """
    at_least(Sampling, "new_tokens", new_tokens, 1)
    if beams > 1:
        return [_search(model, prompt, new_tokens, beams, stop) for prompt in prompts]
    results: list[list[int]] = [[] for _ in prompts]
    for step_tokens in stream(model, prompts, sampling=sampling, seed=seed):
        for continuation, token in zip(results, step_tokens, strict=True):
            if token is not None and len(continuation) < new_tokens and not (continuation and continuation[-1] == stop):
                continuation.append(token)
        if all(
            len(continuation) == new_tokens or (continuation and continuation[-1] == stop) for continuation in results
        ):
            return results
    raise AssertionError("a stream never ends")


@torch.no_grad()
def _search(model: Model, prompt: Sequence[int], new_tokens: int, beams: int, stop: int | None) -> list[int]:
    """The likeliest continuation by beam search; finished ones compete by their probability, whatever their length."""
    reader, _ = _start(model, [prompt], 0)
    scores = reader.read(torch.tensor([list(prompt)], device=_device(model))).log_softmax(-1)
    sequences: list[list[int]] = [[]]
    finished: list[tuple[float, list[int]]] = []
    active: list[tuple[float, int, list[int]]] = []
    for step in range(new_tokens):
        top = scores.flatten().topk(min(2 * beams, scores.numel()))
        rows, tokens = top.indices // scores.shape[-1], top.indices % scores.shape[-1]
        active = []
        for score, row, token in zip(top.values.tolist(), rows.tolist(), tokens.tolist(), strict=True):
            sequence = [*sequences[row], token]
            if token == stop:
                finished.append((score, sequence))
            elif len(active) < beams:
                active.append((score, row, sequence))
        sequences = [sequence for _, _, sequence in active]
        best = max((score for score, _ in finished), default=float("-inf"))
        if not active or step == new_tokens - 1 or best >= active[0][0]:
            break
        reader.select(torch.tensor([row for _, row, _ in active], device=scores.device))
        total = torch.tensor([score for score, _, _ in active], device=scores.device)[:, None]
        newest = torch.tensor([[sequence[-1]] for sequence in sequences], device=scores.device)
        scores = total + reader.read(newest).log_softmax(-1)
    finished += [(score, sequence) for score, _, sequence in active]
    return max(finished, key=lambda pair: pair[0])[1]


def _start(model: Model, prompts: Sequence[Sequence[int]], seed: int) -> tuple[_Decoder, Any]:
    if not model.config.causal or model.config.head != "tokens":
        raise ValueError("generate needs a decoder: ModelConfig(causal=True, head='tokens')")
    if not prompts or not all(prompts):
        raise ValueError("generate needs prompts of at least one token each")
    return _Decoder(model), torch.Generator(_device(model)).manual_seed(seed)


def _device(model: Model) -> torch.device:
    return model.embedding.weight.device  # of a quantized model the head's weight is no tensor
