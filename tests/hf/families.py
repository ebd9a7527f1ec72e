"""Tiny models of every family that exact speed-ups are tested on, by transformers' own configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY, WINDOW = 99, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING: dict[str, Any] = {**GROUPED, "sliding_window": WINDOW}
MIXED: dict[str, Any] = {**SLIDING, "layer_types": KINDS}
MODERNBERT: dict[str, Any] = {
    "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 3, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": SLIDING,
    "Ministral": MIXED,
    "Phi3": SLIDING,
    "Qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3": {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Gemma2": {**MIXED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**MIXED, "query_pre_attn_scalar": 4},
    "Gemma4Text": {**MIXED, "global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY,
                   "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    "Cohere2": MIXED,
    "Olmo3": MIXED,
    "GptOss": {**MIXED, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Llama4Text": {**GROUPED, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
                   "no_rope_layers": [1, 0, 1]},
    "Starcoder2": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "SmolLM3": {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 1]},
    "Llama": GROUPED,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 128},
    "ettin-decoder": {**MODERNBERT, "num_hidden_layers": 4, "global_rope_theta": 160e3, "local_rope_theta": 160e3},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "ModernBert": MODERNBERT,
    "granite-embedding-r2": {**MODERNBERT, "num_hidden_layers": 4, "global_rope_theta": 80e3, "local_rope_theta": 10e3},
    "gte-modernbert": {**MODERNBERT, "num_hidden_layers": 4, "global_rope_theta": 160e3, "local_rope_theta": 10e3},
    "nomic-modernbert": {**MODERNBERT, "num_hidden_layers": 4, "position_embedding_type": "absolute"},
    "ettin-encoder": {**MODERNBERT, "num_hidden_layers": 4, "global_rope_theta": 160e3, "local_rope_theta": 160e3},
    "Bert": {}, "Roberta": {"max_position_embeddings": 140}, "XLMRoberta": {"max_position_embeddings": 140},
    "MPNet": {}, "Electra": {"embedding_size": 32}, "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, "Albert": {"embedding_size": 16},
    "NomicBert": {}, "EuroBert": GROUPED,
}  # fmt: skip
EMBEDDERS = {"Gemma3Text": {**DECODERS["Gemma3Text"], "use_bidirectional_attention": True}}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "T5": {}, "MT5": {}, "UMT5": {}, "SwitchTransformers": {"num_experts": 2},
    "ByT5": {"vocab_size": 384, "num_layers": 3, "num_decoder_layers": 1, "relative_attention_num_buckets": 32,
             "relative_attention_max_distance": 128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}  # fmt: skip
CLASSES = {  # of published models that are another family by configuration, in the older words of the files on the hub
    "granite-embedding-r2": "ModernBert", "gte-modernbert": "ModernBert", "nomic-modernbert": "ModernBert",
    "ettin-encoder": "ModernBert", "ettin-decoder": "ModernBertDecoder", "ByT5": "T5",
}  # fmt: skip


def config_of(name: str, **settings: Any) -> Any:
    """A tiny configuration of a family."""
    kind = getattr(transformers, f"{CLASSES.get(name, name)}Config")
    if name in SEQ2SEQ:
        return kind(**{**T5, **SEQ2SEQ[name], **settings})
    own = {**DECODERS, **ENCODERS}[name]
    return kind(**{**SIZES, **own, **settings})


def decoder(name: str, **settings: Any) -> Any:
    """A tiny causal model of a family, in evaluation."""
    torch.manual_seed(3)
    return spread(transformers.AutoModelForCausalLM.from_config(config_of(name, **settings)).eval())


def encoder(name: str, **settings: Any) -> Any:
    """A tiny encoder of a family, in evaluation."""
    torch.manual_seed(3)
    return spread(transformers.AutoModel.from_config(config_of(name, **settings)).eval())


def spread(model: Any) -> Any:
    """The model with weights that are not nearly zero, so that attention is not nearly uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model
