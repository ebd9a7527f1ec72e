"""Modules of mechanisms: weights bound to a shape, multi-head attention, token mixers, positions, whole models."""
