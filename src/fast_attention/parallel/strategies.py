"""Which strategy serves a mechanism: the one table, which calls, ``explain`` and ``bench`` read."""

from __future__ import annotations

from typing import Any

from fast_attention.mechanism import Attention, Mixer, Unsupported
from fast_attention.mechanisms.aft.aft_conv import AFTConv
from fast_attention.mechanisms.aft.aft_local import AFTLocal
from fast_attention.mechanisms.hybrid.adapted import Adapted
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.mechanisms.hybrid.hybrid import Hybrid
from fast_attention.mechanisms.linear.cosformer import CosFormer
from fast_attention.mechanisms.linear.decayed import DecayedLinearAttention
from fast_attention.mechanisms.mixers.fnet import FNet
from fast_attention.mechanisms.mixers.gmlp import GMLP
from fast_attention.mechanisms.mixers.mlp_mixer import MLPMixer
from fast_attention.mechanisms.sparse.bigbird import BigBird
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.mechanisms.sparse.selected import Selected
from fast_attention.parallel import reductions
from fast_attention.parallel.adapted import adapted
from fast_attention.parallel.aft import BIASED_WINDOWS
from fast_attention.parallel.bigbird import BLOCKS
from fast_attention.parallel.by_length import by_length
from fast_attention.parallel.channels import FOURIER, GATE, TOKEN_MLP
from fast_attention.parallel.decayed import DECAYED
from fast_attention.parallel.heads import HEADS
from fast_attention.parallel.hybrid import HYBRID
from fast_attention.parallel.states import STATES
from fast_attention.parallel.strategy import Strategy
from fast_attention.parallel.windows import WINDOWS

MIXERS: dict[type[Mixer[Any, Any]], Strategy] = {FNet: FOURIER, GMLP: GATE, MLPMixer: TOKEN_MLP}


def strategy(mechanism: Attention[Any, Any] | Mixer[Any, Any], is_causal: bool) -> Strategy:
    """How calls of a mechanism are spread over processes.

    Raises:
        Unsupported: It is a mixer that is none of ours.
    """
    if isinstance(mechanism, Mixer):
        if type(mechanism) not in MIXERS:
            names = ", ".join(f"{each.__name__}()" for each in MIXERS)
            raise Unsupported(f"{mechanism!r} is not spread over processes. What would work: {names}")
        return MIXERS[type(mechanism)]
    if isinstance(mechanism, Adapted):
        return adapted(strategy(mechanism.mechanism, is_causal))
    if isinstance(mechanism, ByLength):
        return by_length(strategy(mechanism.short, is_causal), strategy(mechanism.long, is_causal))
    if isinstance(mechanism, Hybrid) and not isinstance(mechanism.near, Selected):
        return HYBRID if mechanism.near.is_plain else HEADS
    if reductions.serves(mechanism):
        return reductions.SLOTS
    if isinstance(mechanism, Local | BlockLocal):
        return WINDOWS
    if isinstance(mechanism, BigBird):
        return BLOCKS if mechanism.is_plain else HEADS
    if isinstance(mechanism, AFTLocal | AFTConv):
        return BIASED_WINDOWS
    if mechanism.traits.memory != "constant" or getattr(mechanism, "clamp", None):
        return HEADS  # of Favor's clamp, states hold the keys' largest norm without a gradient
    if not is_causal and isinstance(mechanism, DecayedLinearAttention):
        return DECAYED
    if not is_causal and isinstance(mechanism, CosFormer):
        return HEADS  # what a query reads from a state depends on where it stands
    return STATES
