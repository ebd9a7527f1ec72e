"""Log attention and the Manhattan "Fast Attention": sums of scores instead of products."""
