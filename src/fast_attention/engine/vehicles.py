"""What computes each mechanism on a GPU, in one table: ``explain`` reads it, and the documentation."""

from __future__ import annotations

KERNELS = "kernels of this library, in Triton"
FUSED = "torch's fused attention"
FLEX = "torch's FlexAttention in 16 bits; else torch's fused attention over blocks of queries with the keys they see"
SORTED = "torch's FlexAttention in 16 bits, tokens sorted by bucket; else products of torch, chunk by chunk"
BLOCKS = "torch's fused attention over blocks of queries with the keys they see"
SCORES = "products of all pairs, and elementwise operations"
PLAIN = "products and elementwise operations of torch, chunk by chunk"
SUMS = "elementwise operations and running sums of torch"
NEAR_FAR = "torch's FlexAttention in 16 bits for near keys, products block by block for far ones; else products for all"
FOURIER = "torch's FFT"
TOKENS = "products over all tokens"
PARTS = "what its parts run by"

VEHICLES = {
    "Softmax": FUSED,
    "ReLUAttention": SCORES,
    "LogAttention": SUMS,
    "Manhattan": SUMS,
    "LinearAttention": KERNELS,
    "DecayedLinearAttention": KERNELS,
    "LogLinearAttention": PLAIN,
    "Favor": PLAIN,
    "FavorPlus": KERNELS,
    "FavorPlusPlus": KERNELS,
    "LearnedFeatures": KERNELS,
    "T2R": KERNELS,
    "CosFormer": KERNELS,
    "Linformer": FUSED,
    "Nystrom": FUSED,
    "Local": FLEX,
    "BlockLocal": FLEX,
    "Local2d": BLOCKS,
    "BlockLocal2d": BLOCKS,
    "BigBird": FLEX,
    "Selected": FLEX,
    "LSH": SORTED,
    "Sinkhorn": BLOCKS,
    "SortCut": FUSED,
    "DenseSynthesizer": SCORES,
    "RandomSynthesizer": SCORES,
    "FactorizedDenseSynthesizer": SCORES,
    "FactorizedRandomSynthesizer": SCORES,
    "MixtureSynthesizer": SCORES,
    "AFTFull": SCORES,
    "AFTLocal": PLAIN,
    "AFTSimple": KERNELS,
    "AFTConv": PLAIN,
    "WKV": PLAIN,
    "FNet": FOURIER,
    "GMLP": TOKENS,
    "MLPMixer": TOKENS,
    "Hybrid": NEAR_FAR,
    "ByLength": PARTS,
    "Adapted": PARTS,
}
