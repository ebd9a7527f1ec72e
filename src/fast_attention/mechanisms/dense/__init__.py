"""Attention with all pairs in the open: softmax, ReLU, Linformer and the Synthesizers."""
