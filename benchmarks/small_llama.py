"""A small Llama of the Python standard library's sources, trained here, to be converted afterwards.

``python -m benchmarks.small_llama --minutes 8 --out out/small-llama`` leaves a folder of transformers, its tokenizer
(byte pairs of the training side), and ``unseen.txt``: files that it never saw, for ``fast-attention convert --text``.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.arguments import Arguments
from experiments.tasks import ByteLM, text_sides
from fast_attention import files
from fast_attention.lab.measure import useful_threads
from fast_attention.lab.tables import measured

PIECE = 1 << 16  # bytes that the tokenizer takes at once
BATCH, TOP, WARMUP = 8, 2e-3, 0.05


def tokenizer_of(text: bytes, size: int) -> Any:
    """Byte pairs of the text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>"],
        show_progress=False,
    )
    made.train_from_iterator(_pieces(text), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


def _pieces(text: bytes) -> list[str]:
    return [text[i : i + PIECE].decode("utf-8", "replace") for i in range(0, len(text), PIECE)]


def model_of(size: int, context: int) -> LlamaForCausalLM:
    """Four layers of eight heads of width 32: 3.4 million weights beside the embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
            max_position_embeddings=context, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
            eos_token_id=None,
        )
    )  # fmt: skip


def train(model: LlamaForCausalLM, tokens: torch.Tensor, context: int, minutes: float) -> float:
    """AdamW under bfloat16 autocast, one cosine of the learning rate; nats per token at the end."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=TOP, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draws, start, loss = torch.Generator().manual_seed(0), time.monotonic(), math.nan
    with measured() as (update, _):
        while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
            rise = min(done / WARMUP, 1.0)
            for group in optimiser.param_groups:
                group["lr"] = TOP * rise * 0.5 * (1 + math.cos(math.pi * done))
            starts = torch.randint(len(tokens) - context, (BATCH,), generator=draws)
            batch = tokens[starts[:, None] + torch.arange(context)]
            with torch.autocast("cpu", torch.bfloat16):
                found = model(input_ids=batch, labels=batch, use_cache=False).loss
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            loss = float(found.detach()) if math.isnan(loss) else 0.98 * loss + 0.02 * float(found.detach())
            update(f"{loss:.3f} nats per token", done)
    return loss


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--longest", type=int, default=8192, help="Positions that the saved model admits.")
    parser.add_argument("--out", type=Path, default=Path("out/small-llama"))
    asked = parser.parse_args()
    torch.set_num_threads(useful_threads())
    torch.manual_seed(0)
    seen, unseen = (side.numpy().tobytes() for side in text_sides(ByteLM(share=0.15)))
    tokenizer = tokenizer_of(seen, asked.vocabulary)
    numbers = tokenizer(_pieces(seen), verbose=False)["input_ids"]
    tokens = torch.tensor([number for piece in numbers for number in piece])
    model = model_of(len(tokenizer), asked.longest)
    print(f"{len(seen):,} bytes, {len(tokens):,} tokens; {sum(p.numel() for p in model.parameters()):,} weights")
    loss = train(model, tokens, asked.context, asked.minutes)
    model.eval().save_pretrained(asked.out)
    tokenizer.save_pretrained(asked.out)
    files.write(asked.out / "unseen.txt", unseen.decode("utf-8", "replace"))
    print(f"{loss:.3f} nats per token on average of the last batches; {asked.out} holds the model")


if __name__ == "__main__":
    main()
