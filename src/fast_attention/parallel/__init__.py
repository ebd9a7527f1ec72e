"""Attends over one sequence whose tokens are spread over processes, by torch.distributed."""

from fast_attention.parallel.attending import attend as attend
