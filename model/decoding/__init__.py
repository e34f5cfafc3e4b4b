"""Slow reference implementations of decoding, which the tests compare faster decoders with."""
