"""Slow reference implementations of decoding, and decoding of batches, compared with them."""
