"""Peers that take whole tokens (B, L, E) and project them to queries, keys and values themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.competitors import Peer, Sizes
from fast_attention.nn.token_mixer import TokenMixer


def linformer(sizes: Sizes) -> nn.Module:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(sizes.width, sizes.length, k=256, heads=sizes.heads)


def aft(name: str) -> Callable[[Sizes], nn.Module]:
    def build(sizes: Sizes) -> nn.Module:
        import aft_pytorch

        return getattr(aft_pytorch, name)(max_seqlen=sizes.length, dim=sizes.width, hidden_dim=sizes.width)

    return build


class LabmlLocal(nn.Module):
    """labml-nn's AFTLocal: sequence first, and a mask that must be given."""

    def __init__(self, sizes: Sizes, is_causal: bool) -> None:
        super().__init__()
        from labml_nn.transformers.aft import AFTLocal

        self.inner = AFTLocal(sizes.width, sizes.length, 128)
        mask = torch.ones(sizes.length, sizes.length, 1, dtype=torch.bool)
        self.register_buffer("mask", mask.squeeze(-1).tril()[..., None] if is_causal else mask)

    def forward(self, x: Tensor) -> Tensor:
        x, length = x.transpose(0, 1), x.shape[1]
        out = self.inner(query=x, key=x, value=x, mask=self.mask[:length, :length])
        return out.transpose(0, 1)


class WithOutput(nn.Module):
    """A self-attention of transformers with the output projection that its model puts behind it."""

    def __init__(self, inner: nn.Module, width: int, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.out, self.call = inner, nn.Linear(width, width), call

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.call(self.inner, x))


def bigbird(sizes: Sizes) -> nn.Module:
    from transformers import BigBirdConfig
    from transformers.models.big_bird import modeling_big_bird as package

    config = BigBirdConfig(
        hidden_size=sizes.width, num_attention_heads=sizes.heads, block_size=64, num_random_blocks=3,
        max_position_embeddings=sizes.length, attention_type="block_sparse",
    )  # fmt: skip

    def call(inner: nn.Module, x: Tensor) -> Tensor:
        seen = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
        blocked, band, rows, columns = package.BigBirdModel.create_masks_for_block_sparse_attn(seen, 64)
        return inner(x, band, rows, columns, blocked, blocked)[0]

    return WithOutput(package.BigBirdBlockSparseAttention(config, seed=0), sizes.width, call)


def reformer(name: str, *, is_causal: bool) -> Callable[[Sizes], nn.Module]:
    def build(sizes: Sizes) -> nn.Module:
        from transformers import ReformerConfig
        from transformers.models.reformer import modeling_reformer as package

        config = ReformerConfig(
            hidden_size=sizes.width, num_attention_heads=sizes.heads, attention_head_size=sizes.head_dim,
            lsh_attn_chunk_length=64, local_attn_chunk_length=128, num_hashes=4, is_decoder=is_causal,
            num_buckets=max(2, 2 * sizes.length // 64 // 2), max_position_embeddings=sizes.length,
            lsh_num_chunks_before=1, lsh_num_chunks_after=0, local_num_chunks_before=1,
            local_num_chunks_after=0 if is_causal else 1, axial_pos_embds=False,
            lsh_attention_probs_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        inner = getattr(package, name)(config, layer_idx=0)
        return WithOutput(inner, sizes.width, lambda inner, x: inner(x).hidden_states)

    return build


def simple_truth(made: Any, x: Tensor) -> Tensor:
    """Our AFTSimple in float64 between the peer's own projections."""
    return _between(made, x, "AFTSimple()", 0)


def full_truth(made: Any, x: Tensor) -> Tensor:
    """Our AFTFull in float64 with the peer's biases, between the peer's own projections."""
    return _between(made, x, "AFTFull()", x.shape[1])


def _between(made: Any, x: Tensor, spelling: str, max_len: int) -> Tensor:
    made = made.double()
    ours = TokenMixer(x.shape[-1], 1, spelling, max_len=max_len, dtype=torch.float64)
    maps = [made.to_q, made.to_k, made.to_v]
    ours.in_proj.weight.data = torch.cat([m.weight.data for m in maps])
    ours.in_proj.bias.data = torch.cat([m.bias.data for m in maps])
    ours.out_proj.load_state_dict(made.project.state_dict())
    for parameter in ours.attention.parameters():
        parameter.data = made.wbias.data.expand_as(parameter).clone()
    out = ours(x)
    made.float()
    return out


PEERS = [
    Peer("linformer 256", "linformer", "Linformer(rank=256)", linformer, "module", mask="mask"),
    Peer("aft-pytorch simple", "aft-pytorch", "AFTSimple()", aft("AFTSimple"), "module", truth=simple_truth),
    Peer("aft-pytorch full", "aft-pytorch", "AFTFull()", aft("AFTFull"), "module", truth=full_truth, order=2.0),
    *(Peer(f"labml-nn AFT local 128{', causal' * is_causal}", "labml-nn", "AFTLocal(window=128)",
           lambda sizes, c=is_causal: LabmlLocal(sizes, c), "module", is_causal=is_causal, order=2.0)
      for is_causal in (False, True)),
    Peer("transformers BigBird 64, 3 random", "transformers", "BigBird()", bigbird, "module",
         note="timed in training mode: in evaluation its random blocks all point at block 0"),
    *(Peer(f"transformers Reformer LSH 64, 4 hashes{', causal' * is_causal}", "transformers", "LSH()",
           reformer("LSHSelfAttention", is_causal=is_causal), "module", is_causal=is_causal,
           note="draws new rotations at every call")
      for is_causal in (False, True)),
    *(Peer(f"transformers Reformer local 128{', causal' * is_causal}", "transformers", "Local(window=128)",
           reformer("LocalSelfAttention", is_causal=is_causal), "module", is_causal=is_causal,
           note="whole blocks: up to 384 keys a query, 256 causal")
      for is_causal in (False, True)),
]  # fmt: skip
