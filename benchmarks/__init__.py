"""Developer's tools: ours beside exact attention and published packages, trees beside trees, whole models."""
