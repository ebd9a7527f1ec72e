"""``fast-attention generate``: continues a prompt with a trained decoder."""

from __future__ import annotations

import codecs
import itertools
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import MODEL, at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention.lab import inputs, loading
    from fast_attention.lab.capture import context
    from fast_attention.lab.inputs import InputError
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
    seed: options.Seed = 0,
    device: options.Device = "cpu",
) -> int:
    """Let a trained decoder continue a prompt, token by token as they come.

    [dim]fast-attention generate out/byte-lm --prompt "def main(" --tokens 300[/dim]
    """
    with inputs.refusing(TypeError):
        sampling = Sampling(temperature, top_k, top_p)
        model = loading.load(name, head="saved").to(inputs.device(device))
        if isinstance(model, Model):
            _own_model(model, prompt, tokens, sampling, beams, seed)
        else:
            _transformers(name, model, prompt, tokens, sampling, beams, seed)
        print()
    return 0


def _own_model(model: Model, prompt: str | None, tokens: int | None, sampling: Sampling, beams: int, seed: int) -> None:
    """Generate with a model of this library."""
    text = model.config.reads == "bytes"
    given = list((prompt or "\n").encode()) if text else _numbers(prompt, model.config.vocab_size)
    count = _count(len(given), tokens, model.config.longest)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # of bytes: a letter as soon as it is complete
    if beams > 1:
        new = iter(generation.generate(model, [given], new_tokens=count, beams=beams)[0])
    else:
        stream = generation.stream(model, [given], sampling=sampling, seed=seed)
        new = (token or 0 for (token,) in itertools.islice(stream, count))
    for token in new:
        print(decoder.decode(bytes([token])) if text else f"{token} ", end="", flush=True)


def _transformers(
    name: str, model: Any, prompt: str | None, tokens: int | None, sampling: Sampling, beams: int, seed: int
) -> None:
    """Generate with a decoder of transformers, swapped or not: by its own ``generate``."""
    from transformers import TextStreamer

    if not model.can_generate():
        raise InputError(f"{name}: {type(model).__name__} is no language model that continues a prompt")
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
        output = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, **chosen)[0]
    if beams > 1:
        new = output if model.config.is_encoder_decoder else output[given.shape[1] :]
        print(words.decode(new, skip_special_tokens=True), end="")


def _numbers(prompt: str | None, size: int) -> list[int]:
    """The prompt of a model of other tokens than text."""
    words = (prompt or "").replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) < size for word in words):
        given = f"--prompt {prompt}" if prompt else "--prompt is missing"
        raise InputError(f"{given}: this model reads numbers from 0 to {size - 1}, such as --prompt '1 0 1'")
    return [int(word) for word in words]


def _count(given: int, tokens: int | None, longest: int | None) -> int:
    """The number of new tokens: the model never reads the last one."""
    if longest is None:
        return tokens or 200
    most = longest - given + 1
    if most < 1 or (tokens or 0) > most:
        what = f"--tokens {tokens}" if most >= 1 else "--prompt"
        raise InputError(f"{what}: the model reads {longest} tokens and the prompt has {given}")
    return tokens or min(200, most)
