"""Log attention and Manhattan: sums of logarithms and of their differences."""
