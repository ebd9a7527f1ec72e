"""What every family's passes are made of: chunks, sums, masks, precision, gradients, dispatch."""
