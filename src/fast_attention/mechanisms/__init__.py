"""Every mechanism, one file each, in the order of the catalogue. A new one is exported by one line here."""
# ruff: noqa: I001

from fast_attention.mechanisms.softmax import Softmax as Softmax
from fast_attention.mechanisms.relu import ReLUAttention as ReLUAttention
from fast_attention.mechanisms.log import LogAttention as LogAttention
from fast_attention.mechanisms.manhattan import Manhattan as Manhattan
from fast_attention.mechanisms.linear import LinearAttention as LinearAttention
from fast_attention.mechanisms.favor import Favor as Favor
from fast_attention.mechanisms.favor_plus import FavorPlus as FavorPlus
from fast_attention.mechanisms.favor_plus_plus import FavorPlusPlus as FavorPlusPlus
from fast_attention.mechanisms.learned_features import LearnedFeatures as LearnedFeatures
from fast_attention.mechanisms.linformer import Linformer as Linformer
from fast_attention.mechanisms.local import Local as Local
from fast_attention.mechanisms.local import BlockLocal as BlockLocal
from fast_attention.mechanisms.bigbird import BigBird as BigBird
from fast_attention.mechanisms.lsh import LSH as LSH
from fast_attention.mechanisms.sinkhorn import Sinkhorn as Sinkhorn
from fast_attention.mechanisms.sinkhorn import SortCut as SortCut
from fast_attention.mechanisms.synthesizer import DenseSynthesizer as DenseSynthesizer
from fast_attention.mechanisms.synthesizer import RandomSynthesizer as RandomSynthesizer
from fast_attention.mechanisms.synthesizer import FactorizedDenseSynthesizer as FactorizedDenseSynthesizer
from fast_attention.mechanisms.synthesizer import FactorizedRandomSynthesizer as FactorizedRandomSynthesizer
from fast_attention.mechanisms.synthesizer import MixtureSynthesizer as MixtureSynthesizer
from fast_attention.mechanisms.aft import AFTFull as AFTFull
from fast_attention.mechanisms.aft_local import AFTLocal as AFTLocal
from fast_attention.mechanisms.aft import AFTSimple as AFTSimple
from fast_attention.mechanisms.aft_local import AFTConv as AFTConv
from fast_attention.mechanisms.fnet import FNet as FNet
from fast_attention.mechanisms.gmlp import GMLP as GMLP
from fast_attention.mechanisms.mlp_mixer import MLPMixer as MLPMixer

# Settings that are mathematics are values of their own.
from fast_attention.mechanisms.linformer import LearnedProjection as LearnedProjection
from fast_attention.mechanisms.linformer import MeanPool as MeanPool
from fast_attention.mechanisms.linformer import MaxPool as MaxPool
from fast_attention.mechanisms.linformer import Convolution as Convolution
from fast_attention.mechanisms.synthesizer import DotProduct as DotProduct
from fast_attention.ops.maps.positive import PositiveElu as PositiveElu
from fast_attention.ops.maps.positive import PositiveExp as PositiveExp
from fast_attention.ops.maps.positive import PositiveRelu as PositiveRelu
from fast_attention.ops.maps.positive import PositiveSoftplus as PositiveSoftplus

__all__ = [
    "AFTConv", "AFTFull", "AFTLocal", "AFTSimple", "BigBird", "BlockLocal", "Convolution", "DenseSynthesizer",
    "DotProduct", "FNet", "FactorizedDenseSynthesizer", "FactorizedRandomSynthesizer", "Favor", "FavorPlus",
    "FavorPlusPlus", "GMLP", "LSH", "LearnedFeatures", "LearnedProjection", "LinearAttention", "Linformer", "Local",
    "LogAttention", "MLPMixer", "Manhattan", "MaxPool", "MeanPool", "MixtureSynthesizer", "PositiveElu",
    "PositiveExp", "PositiveRelu", "PositiveSoftplus", "RandomSynthesizer", "ReLUAttention", "Sinkhorn", "Softmax",
    "SortCut",
]  # fmt: skip
