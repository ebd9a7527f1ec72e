"""Attends over one sequence whose tokens are spread over processes, by torch.distributed."""

from fast_attention.parallel.attending import attend as attend
from fast_attention.parallel.attending import decode as decode
from fast_attention.parallel.attending import longest as longest
from fast_attention.parallel.attending import run as run
from fast_attention.parallel.attending import strategy as strategy
from fast_attention.parallel.collectives import counted as counted
from fast_attention.parallel.shards import Shards as Shards
from fast_attention.parallel.shards import shards as shards
from fast_attention.parallel.spreading import Spread as Spread
from fast_attention.parallel.spreading import parallelize as parallelize
