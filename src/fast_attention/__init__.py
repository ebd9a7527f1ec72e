"""fast-attention: every fast attention mechanism, as a value you can trust, swap in and choose with open eyes."""

__version__ = "0.1.0"

from fast_attention import catalogue as catalogue
from fast_attention import functional as functional
from fast_attention.functional import attention as attention
from fast_attention.mechanism import Attention as Attention
from fast_attention.mechanism import Mixer as Mixer
from fast_attention.mechanism import Shape as Shape
from fast_attention.mechanism import Traits as Traits
from fast_attention.mechanism import Unsupported as Unsupported
from fast_attention.mechanisms import *  # noqa: F403
from fast_attention.nn.bound import Bound as Bound
from fast_attention.nn.feedforward import ChunkedFeedForward as ChunkedFeedForward
from fast_attention.nn.multihead import MultiheadAttention as MultiheadAttention
from fast_attention.nn.reversible import Reversible as Reversible
from fast_attention.nn.reversible import ReversibleSequence as ReversibleSequence
from fast_attention.nn.token_mixer import TokenMixer as TokenMixer
