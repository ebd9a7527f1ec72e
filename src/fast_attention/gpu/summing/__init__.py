"""Kernels of attention whose scores are sums, a query's number and a key's, channel by channel: tile after tile."""
