"""LSH attention: buckets, chunks of slots, decoding."""
