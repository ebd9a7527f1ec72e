"""Modules of mechanisms: weights bound to a shape, multi-head attention, token mixers, reversible layers."""

from fast_attention.nn.feedforward import ChunkedFeedForward as ChunkedFeedForward
from fast_attention.nn.reversible import Reversible as Reversible
from fast_attention.nn.reversible import ReversibleSequence as ReversibleSequence
