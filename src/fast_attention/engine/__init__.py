"""Parts of every family's passes: chunks, sums, masks, precision, gradients, dispatch."""
