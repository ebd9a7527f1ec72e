"""``fast-attention generate``."""

from __future__ import annotations

import codecs
import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer

from fast_attention import catalogue
from fast_attention.lab import inputs
from fast_attention.lab.inputs import InputError
from fast_attention.lab.learning.train import refused
from fast_attention.nn import generation, saving
from fast_attention.nn.generation import Sampling
from fast_attention.nn.models import Model


def generate_command(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a model's.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text; for models of other tokens, numbers such as '3 1 2'.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to add. Default: 200, or what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens with this probability together.")] = 1.0,
    beams: Annotated[int, typer.Option(min=1, help="Follow so many sequences and print the likeliest.")] = 1,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
) -> int:
    """Let a trained decoder go on from a prompt, token by token as they come.

    [dim]fast-attention generate out/byte-lm --prompt "def main(" --tokens 300[/dim]
    """
    with refused():
        where = folder / "model" if (folder / "model").is_dir() else folder
        model = saving.load(where, inputs.device(device))
        text = model.config.reads == "bytes"
        given = _read(model, prompt, text)
        count = _count(model, len(given), tokens)
        sampling = Sampling(temperature, top_k, top_p)
        write = _Text() if text else _Numbers()
        if beams > 1:
            for token in generation.generate(model, [given], new_tokens=count, beams=beams)[0]:
                write.token(token)
        else:
            for (token,) in itertools.islice(generation.stream(model, [given], sampling=sampling, seed=seed), count):
                write.token(token or 0)
        print()
    return 0


def _read(model: Model, prompt: str | None, text: bool) -> list[int]:
    """The prompt as tokens; a model of text begins at a new line."""
    if text:
        return list((prompt or "\n").encode())
    size = model.config.vocab_size
    words = (prompt or "").replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) < size for word in words):
        found = f"--prompt {prompt}" if prompt else "--prompt is missing"
        raise InputError(f"{found}: this model reads numbers from 0 to {size - 1}, such as --prompt '1 0 1'")
    return [int(word) for word in words]


def _count(model: Model, given: int, tokens: int | None) -> int:
    """How many tokens to add: the model never reads the last one."""
    bounded = any(catalogue.parse(name).traits.bounded for name in model.config.mechanisms)
    if not bounded and model.config.positions != "learned":
        return tokens or 200
    room = model.config.max_len - given + 1
    if room < 1 or (tokens or 0) > room:
        what = f"--tokens {tokens}" if room >= 1 else "--prompt"
        raise InputError(f"{what}: the model reads {model.config.max_len} tokens and the prompt has {given}")
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
