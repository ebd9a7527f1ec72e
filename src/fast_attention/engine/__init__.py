"""Parts of every family's passes: operations, chunks, sums, masks, precision, gradients."""
