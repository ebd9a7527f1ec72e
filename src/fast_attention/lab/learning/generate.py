"""``fast-attention generate``."""

from __future__ import annotations

import codecs
import itertools
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab.options import MODEL, SEED, at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention.lab import inputs, loading
    from fast_attention.lab.capture import context
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.learning.train import refused
    from fast_attention.nn import generation
    from fast_attention.nn.generation import Sampling
    from fast_attention.nn.models import Model


def generate_command(
    name: Annotated[str, MODEL],
    prompt: Annotated[
        str | None, typer.Option(help="Text; for models of other tokens, numbers such as '3 1 2'.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Max new tokens. Default: 200, or what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens with this probability together.")] = 1.0,
    beams: Annotated[int, typer.Option(min=1, help="Beam width: the likeliest sequence is printed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=SEED, help="For sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
) -> int:
    """Let a trained decoder continue a prompt, token by token as they come.

    [dim]fast-attention generate out/byte-lm --prompt "def main(" --tokens 300[/dim]
    """
    with refused():
        sampling = Sampling(temperature, top_k, top_p)
        model = loading.load(name, head="saved").to(inputs.device(device))
        if isinstance(model, Model):
            _ours(model, prompt, tokens, sampling, beams, seed)
        else:
            _theirs(name, model, prompt, tokens, sampling, beams, seed)
        print()
    return 0


def _ours(model: Model, prompt: str | None, tokens: int | None, sampling: Sampling, beams: int, seed: int) -> None:
    text = model.config.reads == "bytes"
    given = list((prompt or "\n").encode()) if text else _numbers(prompt, model.config.vocab_size)
    count = _count(len(given), tokens, model.config.longest)
    write = _Text() if text else _Numbers()
    if beams > 1:
        for token in generation.generate(model, [given], new_tokens=count, beams=beams)[0]:
            write.token(token)
    else:
        for (token,) in itertools.islice(generation.stream(model, [given], sampling=sampling, seed=seed), count):
            write.token(token or 0)


def _theirs(
    name: str, model: Any, prompt: str | None, tokens: int | None, sampling: Sampling, beams: int, seed: int
) -> None:
    """A decoder of transformers, swapped or not: by its own ``generate``."""
    from transformers import TextStreamer

    if not model.can_generate():
        raise InputError(f"{name}: {type(model).__name__} is no language model that goes on from a prompt")
    words = loading.tokenizer(name)
    given = words(prompt or words.bos_token or "\n", return_tensors="pt")["input_ids"].to(model.device)
    count = _count(given.shape[1], tokens, None if model.config.is_encoder_decoder else context(model.config, words))
    chosen: dict[str, Any] = {"num_beams": beams, "do_sample": False}
    if beams == 1:
        chosen["streamer"] = TextStreamer(
            words, skip_prompt=not model.config.is_encoder_decoder, skip_special_tokens=True
        )
        if sampling.temperature:
            chosen |= {"do_sample": True, **asdict(sampling)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, **chosen)[0]
    if beams > 1:
        new = made if model.config.is_encoder_decoder else made[given.shape[1] :]
        print(words.decode(new, skip_special_tokens=True), end="")


def _numbers(prompt: str | None, size: int) -> list[int]:
    """The prompt of a model of other tokens than text."""
    words = (prompt or "").replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) < size for word in words):
        found = f"--prompt {prompt}" if prompt else "--prompt is missing"
        raise InputError(f"{found}: this model reads numbers from 0 to {size - 1}, such as --prompt '1 0 1'")
    return [int(word) for word in words]


def _count(given: int, tokens: int | None, longest: int | None) -> int:
    """How many tokens to add: the model never reads the last one."""
    if longest is None:
        return tokens or 200
    room = longest - given + 1
    if room < 1 or (tokens or 0) > room:
        what = f"--tokens {tokens}" if room >= 1 else "--prompt"
        raise InputError(f"{what}: the model reads {longest} tokens and the prompt has {given}")
    return tokens or min(200, room)


class _Numbers:
    """Tokens printed as numbers."""

    def token(self, token: int) -> None:
        """Print one."""
        print(token, end=" ", flush=True)


class _Text:
    """Bytes printed as text, a letter as soon as it is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def token(self, token: int) -> None:
        """Print one."""
        sys.stdout.write(self._decoder.decode(bytes([token])))
        sys.stdout.flush()
