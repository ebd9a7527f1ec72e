"""Mixers of whole tokens: FNet, gMLP and MLP-Mixer."""
