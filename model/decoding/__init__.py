"""Slow reference implementations of decoding, and decoding of batches, which is compared with them."""
