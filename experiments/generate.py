"""Lets a trained decoder continue a prompt, token by token as they come.

python -m experiments.train "ByteLM(context=256)" --mechanism WKV --minutes 5 --out out/bytes
python -m experiments.generate out/bytes/model --prompt "def main(" --tokens 300
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import sys

from experiments import models
from experiments.arguments import Arguments


def main(arguments: list[str] | None = None) -> int:
    """Print the continuation: text of a model of bytes, numbers of another."""
    about = argparse.RawDescriptionHelpFormatter
    parser = Arguments("experiments.generate", description=__doc__, formatter_class=about)
    parser.add_argument("model", help="the folder of a model: model in the folder of a run")
    parser.add_argument("--prompt", default="", help="text; for models of other tokens, numbers such as '3 1 2'")
    parser.add_argument("--tokens", type=int, default=200, help="how many (default: 200, or what the model reads)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens; 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest with this probability together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        model = models.load(options.model)
        text = model.config.reads == "bytes"
        prompt = list((options.prompt or "\n").encode()) if text else [int(word) for word in options.prompt.split()]
        if not all(0 <= token < model.config.vocab_size for token in prompt):
            raise ValueError(f"--prompt: this model reads numbers from 0 to {model.config.vocab_size - 1}")
        most = options.tokens if model.config.longest is None else model.config.longest + 1 - len(prompt)
        if most < 1:
            raise ValueError(f"--prompt has {len(prompt)} tokens and the model reads {model.config.longest}")
        how = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter as soon as it is complete
        stream = models.stream(model, [prompt], seed=options.seed, **how)
        for (token,) in itertools.islice(stream, min(options.tokens, most)):
            print(decoder.decode(bytes([token or 0])) if text else token, end="" if text else " ", flush=True)
    except (ValueError, OSError) as error:
        print(f"experiments.generate: {error}", file=sys.stderr)
        return 2
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
