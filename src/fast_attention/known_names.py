"""A table of names that papers and libraries use for attentions, with the expression of ours for each."""

from __future__ import annotations

import re
from typing import NamedTuple


class Known(NamedTuple):
    """A name from a paper or a library.

    Args:
        name: The usual name, with variants after commas.
        write: Our expression for it, or the nearest one.
        exact: Whether it is the same mathematics.
        note: Differences or remarks; may be empty.
    """

    name: str
    write: str
    exact: bool = True
    note: str = ""

    @property
    def names(self) -> list[str]:
        """The usual name and its variants."""
        return self.name.split(", ")

    def __str__(self) -> str:
        text = f"{self.names[0]}: {self.write}" if self.exact else f"{self.names[0]}: not here; nearest is {self.write}"
        return f"{text} ({self.note})" if self.note else text


KNOWN = (
    Known("FlashAttention, flash_attention_2, SDPA, memory-efficient attention, PagedAttention", "Softmax()",
          note="exact, by torch's fused kernel"),
    Known("exact attention, full attention, vanilla attention, dot-product attention, scaled dot-product attention, "
          "Transformer, Transformers, self-attention, multi-head attention, multi-head self-attention, MHA, MHSA, "
          "cross-attention", "Softmax()",
          note="any mechanism serves several heads: MultiheadAttention(..., mechanism=...)"),
    Known("grouped-query attention, GQA, multi-query attention, MQA", "Softmax()",
          note="with fewer heads of keys: MultiheadAttention(..., num_kv_heads=...)"),
    Known("Linear Transformer, Linear Transformers, Transformers are RNNs", "LinearAttention()"),
    Known("Performer, FAVOR+, positive random features", "FavorPlus()",
          note="its ReLU kernel: FavorPlus(kernel=Relu()); its first version: Favor()"),
    Known("Random Feature Attention, RFA", "Favor()", note="RFA also scales queries and keys to length one"),
    Known("Chefs' Random Tables, CRT, FAVOR++", "FavorPlusPlus()"),
    Known("Fast Attention", "Manhattan()", note="its logarithms alone: LogAttention(); Performer's FAVOR: Favor()"),
    Known("Hedgehog", "LearnedFeatures()"),
    Known("Transformer-to-RNN, finetuning pretrained transformers into RNNs", "T2R()"),
    Known("LoLCATs", "Hybrid(far=LearnedFeatures())"),
    Known("Based", "LinearAttention(feature_map=Taylor())", note="Based alternates it with layers of Local()"),
    Known("Efficient Attention", "LinearAttention(feature_map=SoftmaxMap())", False,
          "there softmax of the keys runs over the sequence"),
    Known("DPFP, deterministic parameter-free projection", "LinearAttention(feature_map=DPFP())"),
    Known("RetNet, Retention, Lightning Attention", "DecayedLinearAttention(feature_map=Identity(), normalize=False)",
          note="turn queries and keys by Rotary; RetNet's group normalisation is yours to add"),
    Known("Gated Linear Attention, GLA",
          "DecayedLinearAttention(feature_map=Identity(), gate='channel', normalize=False)",
          note="gates from a full matrix of each head, not of low rank; GLA's output gate and normalisation are yours"),
    Known("log-linear Mamba-2, log-linear Gated DeltaNet", "LogLinearAttention()", False,
          "without the gates that decay its states"),
    Known("mLSTM, xLSTM", "DecayedLinearAttention(gate='token')", False, "a decay for a token, without its input gate"),
    Known("DeltaNet, Gated DeltaNet", "DecayedLinearAttention(gate='token')", False,
          "a constant state that forgets, without the delta rule"),
    Known("Mamba, Mamba-2, S4, S5, H3, state space model, SSM", "DecayedLinearAttention(gate='token')", False,
          "no state-space models here: a constant state that forgets, too"),
    Known("RWKV-4, RWKV, WKV operator, Receptance Weighted Key Value", "WKV()",
          note="RWKV-4's; later versions keep a matrix for each head: DecayedLinearAttention(gate='token') is nearest"),
    Known("Hyena, long convolution", "GMLP(toeplitz=True)", False, "a gate on weights of distance, learned one by one"),
    Known("Attention Free Transformer, AFT", "AFTFull()", note="also AFTSimple(), AFTLocal(), AFTConv()"),
    Known("Reformer, locality-sensitive hashing", "LSH()",
          note="its reversible layers: Reversible"),
    Known("Routing Transformer, Clustered Attention, SMYRF", "LSH()", False, "buckets by hashing instead of k-means"),
    Known("Longformer, sliding window, sliding window attention, window attention, banded attention, Mistral",
          "Local(window=128)", note="128 keys on each side; Longformer's global tokens: BigBird(num_global_tokens=1)"),
    Known("dilated sliding window, dilated attention", "Local(window=64, dilation=4)"),
    Known("LongNet", "Local(window=64, dilation=(1, 4, 16))", False,
          "rates by heads, in windows that slide, where LongNet has segments"),
    Known("Sparse Transformer, strided attention", "BigBird()", False,
          "all earlier multiples of one stride l: Local(window=..., dilation=l)"),
    Known("MoBA, Mixture of Block Attention, FlashMoBA", "Selected(block_size=64, topk=8)",
          note="every query chooses for itself where causal; noncausal, blocks of queries choose"),
    Known("SLA, Sparse-Linear Attention, SPLA", "Hybrid(near=Selected())", False,
          "by top k of blocks instead of a share, and one normaliser for both parts in place of a trained projection"),
    Known("Native Sparse Attention, NSA, DeepSeek Sparse Attention, DSA", "Selected()", False,
          "chosen blocks alone, without trained compression"),
    Known("ETC, Extended Transformer Construction", "BigBird(num_global_tokens=1)", False,
          "its relative positions are a table of another kind: BigBird(bias=T5Buckets()) has T5's"),
    Known("Transformer-XL, segment recurrence", "BlockLocal(before=1, after=0, bias=TransformerXL())", False,
          "a block sees itself and the one before it, in one pass"),
    Known("attention with linear biases, BLOOM, MPT", "Softmax(bias=ALiBi())", note="in a window: Local(bias=ALiBi())"),
    Known("T5, relative position bias", "Softmax(bias=T5Buckets())", note="T5 gives no scale: Softmax(scale=1.0, ...)"),
    Known("NATTEN, neighborhood attention, neighbourhood attention, Neighborhood Attention Transformer, NAT",
          "Local2d(64, 64, window=7)", note="height and width of the grid, row by row; its kernel_size is window"),
    Known("DiNAT, dilated neighborhood attention, Dilated Neighborhood Attention Transformer",
          "Local2d(64, 64, window=7, dilation=4)"),
    Known("Swin, Swin Transformer, shifted window attention, SwinV2", "BlockLocal2d(56, 56)", False,
          "without its bias of relative positions; the layers in between: BlockLocal2d(56, 56, shift=3)"),
    Known("ViTDet, SAM, Segment Anything", "BlockLocal2d(64, 64, block_size=14)", False,
          "without its bias of relative positions; pad the image to whole blocks for its own borders"),
    Known("gpt-oss, learned sinks, attention sink logits", "Softmax(sinks=True)",
          note="also Local, BlockLocal, BigBird, Selected, Local2d, Hybrid(near=BlockLocal(sinks=True))"),
    Known("StreamingLLM, attention sinks", "Hybrid(first=4)", False,
          "exact first tokens and window too; what lies between is estimated, not dropped"),
    Known("Nystromformer", "Nystrom()", note="Nystromformer adds a depthwise convolution of the values to it"),
    Known("LARA, linear randomized attention", "FavorPlus()", False,
          "random features too, drawn around zero; landmarks of neighbours: Nystrom()"),
    Known("Agent, Agent Attention, Agent Transformer", "Nystrom()", False,
          "by way of means of neighbours too, of queries and of keys"),
    Known("ABC, Attention with Bounded-memory Control, ABC-MLP", "Linformer()", False,
          "slots are written by position; causal with a state of constant size: LearnedFeatures()"),
    Known("Gated Slot Attention, GSA", "DecayedLinearAttention(gate='token')", False,
          "a constant state that forgets, read in one pass instead of two"),
    Known("Perceiver, Set Transformer, latent attention", "Linformer()", False,
          "few queries can attend by any mechanism whose traits grant cross"),
    Known("Sparse Sinkhorn Attention", "Sinkhorn()"),
    Known("SortCut Sinkhorn", "SortCut()"),
    Known("Synthesizer", "DenseSynthesizer()",
          note="also RandomSynthesizer(), MixtureSynthesizer() and the factorized ones"),
    Known("Fourier Transformer, Fourier mixing", "FNet()"),
    Known("Mixer", "MLPMixer()"),
    Known("aMLP", "GMLP(attention_dim=64)"),
    Known("Primer, squared ReLU attention", "ReLUAttention(power=2)"),
    Known("ReLUFormer, Rectified Linear Attention, ReLA", "ReLUAttention()", False, "ReLA normalises by a gated norm"),
)  # fmt: skip


def simple(name: str) -> str:
    """A name without case, spaces, hyphens and accents."""
    return re.sub(r"[^a-z0-9+']", "", name.lower().replace("ö", "o"))


def forms(name: str) -> tuple[str, ...]:
    """A simple name; without words that say what kind of thing it is, such as "attention"; and in the singular.

    None of a text that is no name, such as a call.
    """
    whole = simple(name)
    return () if re.search(r"[^\w\s+'-]", name) else (whole, _bare(whole), _bare(whole.removesuffix("s")))


def _bare(name: str) -> str:
    kind = "(attention|self|multihead|transformers?|layer|mechanism|distance|model|network)+$"
    return re.sub("^(causal|multihead)(?=.)", "", re.sub(kind, "", name) or name)


_BY_NAME = {simple(name): known for known in KNOWN for name in known.names}


def known(text: str) -> Known | None:
    """The entry for a name (settings in brackets are ignored), or None.

    "Performers", "Performer attention" and "performer" are the Performer.
    """
    return next((_BY_NAME[form] for form in forms(text.split("(")[0]) if form in _BY_NAME), None)


def refuse_changed(written: str) -> None:
    """Raise a ``ValueError`` if expressions of an earlier version mean something else today.

    ``Hybrid()`` without ``near`` was a sliding window of 64 keys; it is whole blocks now.
    """
    if re.search(r"Hybrid\((?!near=)", written):
        raise ValueError(
            "it names a Hybrid without near=, which was a sliding window, near=Local(window=64), and is gone; today it "
            "means near=BlockLocal(). What would work: commit 02d9f59 of fast-attention, or a model converted anew"
        )
