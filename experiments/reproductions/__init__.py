"""Figures and tables of papers, measured here: ``python -m experiments.reproductions.performer --out out/performer``.

Each script stands alone: the paper's numbers, what is measured, which of the paper's statements that bears out, and the
picture. It writes ``reproduction.json`` and ``NAME.svg`` into its folder; docs/reproductions.md shows the records kept.
"""

NAMES = ("performer", "capacity", "spectrum", "duplication", "recall", "mixers", "leaks", "cab", "decoding")
