"""The page of contents: every public name and where it stands. ``import fast_attention`` looks names up here."""
# ruff: noqa: I001

from typing import TYPE_CHECKING

from fast_attention.mechanism import Attention as Attention, Mixer as Mixer
from fast_attention.mechanism import Shape as Shape, Traits as Traits, Unsupported as Unsupported

from fast_attention.allocator import keep_memory as keep_memory

from fast_attention.mechanisms import Softmax as Softmax, ReLUAttention as ReLUAttention
from fast_attention.mechanisms import LogAttention as LogAttention, Manhattan as Manhattan
from fast_attention.mechanisms import LinearAttention as LinearAttention
from fast_attention.mechanisms import DecayedLinearAttention as DecayedLinearAttention
from fast_attention.mechanisms import Favor as Favor, FavorPlus as FavorPlus
from fast_attention.mechanisms import FavorPlusPlus as FavorPlusPlus, LearnedFeatures as LearnedFeatures
from fast_attention.mechanisms import T2R as T2R, CosFormer as CosFormer
from fast_attention.mechanisms import Linformer as Linformer
from fast_attention.mechanisms import Nystrom as Nystrom
from fast_attention.mechanisms.dense import projections as projections
from fast_attention.mechanisms import Local as Local, BlockLocal as BlockLocal, BigBird as BigBird, LSH as LSH
from fast_attention.mechanisms import ALiBi as ALiBi, T5Buckets as T5Buckets, TransformerXL as TransformerXL
from fast_attention.mechanisms import Selected as Selected
from fast_attention.mechanisms import Local2d as Local2d, BlockLocal2d as BlockLocal2d
from fast_attention.mechanisms import Sinkhorn as Sinkhorn, SortCut as SortCut
from fast_attention.mechanisms import DenseSynthesizer as DenseSynthesizer, RandomSynthesizer as RandomSynthesizer
from fast_attention.mechanisms import FactorizedDenseSynthesizer as FactorizedDenseSynthesizer
from fast_attention.mechanisms import FactorizedRandomSynthesizer as FactorizedRandomSynthesizer
from fast_attention.mechanisms import MixtureSynthesizer as MixtureSynthesizer
from fast_attention.mechanisms import AFTFull as AFTFull, AFTLocal as AFTLocal
from fast_attention.mechanisms import AFTSimple as AFTSimple, AFTConv as AFTConv, WKV as WKV
from fast_attention.mechanisms import FNet as FNet, GMLP as GMLP, MLPMixer as MLPMixer
from fast_attention.mechanisms.hybrid.hybrid import Hybrid as Hybrid
from fast_attention.mechanisms.hybrid.by_length import ByLength as ByLength
from fast_attention.mechanisms.hybrid.adapted import Adapted as Adapted
from fast_attention.feature_maps import features as features

from fast_attention import catalogue as catalogue
from fast_attention.functional import attention as attention
from fast_attention.attention_maps import attention_rows as attention_rows

from fast_attention.nn.bound import Bound as Bound
from fast_attention.nn.positions import Rotary as Rotary
from fast_attention.nn.multihead import MultiheadAttention as MultiheadAttention
from fast_attention.nn.token_mixer import TokenMixer as TokenMixer

from fast_attention.explanation import explain as explain
from fast_attention import conformance as conformance

# These are imported when they are asked for: importing them registers swapped models with transformers.
if TYPE_CHECKING:
    from fast_attention.integrations import extend as extend, swap as swap, swap_back as swap_back
    from fast_attention.integrations import from_pretrained as from_pretrained, late_chunks as late_chunks
    from fast_attention.conversion import convert as convert
LATER = {"extend": "integrations", "swap": "integrations", "swap_back": "integrations",
         "from_pretrained": "integrations", "late_chunks": "integrations", "convert": "conversion"}  # fmt: skip
