"""What every family's passes are made of: operations, chunks, sums, masks, precision, gradients."""
