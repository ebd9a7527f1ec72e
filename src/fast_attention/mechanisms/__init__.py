"""Every mechanism, a room for each family, in the order of the catalogue. A new one is exported by one line here."""
# ruff: noqa: I001

from fast_attention.mechanisms.dense.softmax import Softmax as Softmax
from fast_attention.mechanisms.dense.relu import ReLUAttention as ReLUAttention
from fast_attention.mechanisms.log_manhattan.log_attention import LogAttention as LogAttention
from fast_attention.mechanisms.log_manhattan.manhattan import Manhattan as Manhattan
from fast_attention.mechanisms.linear.linear_attention import LinearAttention as LinearAttention
from fast_attention.mechanisms.linear.decayed import DecayedLinearAttention as DecayedLinearAttention
from fast_attention.mechanisms.linear.favor import Favor as Favor
from fast_attention.mechanisms.linear.favor_plus import FavorPlus as FavorPlus
from fast_attention.mechanisms.linear.favor_plus_plus import FavorPlusPlus as FavorPlusPlus
from fast_attention.mechanisms.linear.learned_features import LearnedFeatures as LearnedFeatures
from fast_attention.mechanisms.linear.learned_features import T2R as T2R
from fast_attention.mechanisms.linear.cosformer import CosFormer as CosFormer
from fast_attention.mechanisms.dense.linformer import Linformer as Linformer
from fast_attention.mechanisms.dense.nystrom import Nystrom as Nystrom
from fast_attention.mechanisms.sparse.local import Local as Local
from fast_attention.mechanisms.sparse.block_local import BlockLocal as BlockLocal
from fast_attention.mechanisms.sparse.local2d import Local2d as Local2d
from fast_attention.mechanisms.sparse.local2d import BlockLocal2d as BlockLocal2d
from fast_attention.mechanisms.sparse.bigbird import BigBird as BigBird
from fast_attention.mechanisms.sparse.selected import Selected as Selected
from fast_attention.mechanisms.lsh.lsh import LSH as LSH
from fast_attention.mechanisms.sinkhorn.sinkhorn import Sinkhorn as Sinkhorn
from fast_attention.mechanisms.sinkhorn.sinkhorn import SortCut as SortCut
from fast_attention.mechanisms.dense.synthesizer import DenseSynthesizer as DenseSynthesizer
from fast_attention.mechanisms.dense.synthesizer import RandomSynthesizer as RandomSynthesizer
from fast_attention.mechanisms.dense.synthesizer import FactorizedDenseSynthesizer as FactorizedDenseSynthesizer
from fast_attention.mechanisms.dense.synthesizer import FactorizedRandomSynthesizer as FactorizedRandomSynthesizer
from fast_attention.mechanisms.dense.synthesizer import MixtureSynthesizer as MixtureSynthesizer
from fast_attention.mechanisms.aft.aft_full import AFTFull as AFTFull
from fast_attention.mechanisms.aft.aft_local import AFTLocal as AFTLocal
from fast_attention.mechanisms.aft.aft_simple import AFTSimple as AFTSimple
from fast_attention.mechanisms.aft.aft_conv import AFTConv as AFTConv
from fast_attention.mechanisms.aft.wkv import WKV as WKV
from fast_attention.mechanisms.mixers.fnet import FNet as FNet
from fast_attention.mechanisms.mixers.gmlp import GMLP as GMLP
from fast_attention.mechanisms.mixers.mlp_mixer import MLPMixer as MLPMixer
from fast_attention.mechanisms.hybrid.hybrid import Hybrid as Hybrid
from fast_attention.mechanisms.hybrid.by_length import ByLength as ByLength
from fast_attention.mechanisms.hybrid.adapted import Adapted as Adapted

# Settings that are mathematics are values of their own.
from fast_attention.biases.bias import ALiBi as ALiBi
from fast_attention.biases.bias import T5Buckets as T5Buckets
from fast_attention.biases.bias import TransformerXL as TransformerXL
from fast_attention.mechanisms.dense.synthesizer import DotProduct as DotProduct
from fast_attention.feature_maps.positive import PositiveElu as PositiveElu
from fast_attention.feature_maps.positive import PositiveExp as PositiveExp
from fast_attention.feature_maps.positive import PositiveRelu as PositiveRelu
from fast_attention.feature_maps.positive import PositiveSoftplus as PositiveSoftplus

__all__ = [
    "AFTConv", "AFTFull", "AFTLocal", "AFTSimple", "ALiBi", "Adapted", "BigBird", "BlockLocal",
    "BlockLocal2d", "ByLength", "CosFormer", "DecayedLinearAttention", "DenseSynthesizer", "DotProduct", "FNet",
    "FactorizedDenseSynthesizer", "FactorizedRandomSynthesizer", "Favor", "FavorPlus", "FavorPlusPlus", "GMLP",
    "Hybrid", "LSH", "LearnedFeatures", "LinearAttention", "Linformer", "Local", "Local2d", "LogAttention",
    "MLPMixer", "Manhattan", "MixtureSynthesizer", "Nystrom", "PositiveElu", "PositiveExp",
    "PositiveRelu", "PositiveSoftplus", "RandomSynthesizer", "ReLUAttention", "Selected", "Sinkhorn", "Softmax",
    "SortCut", "T2R", "T5Buckets", "TransformerXL", "WKV",
]  # fmt: skip
