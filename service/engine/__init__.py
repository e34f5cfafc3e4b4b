"""Scheduling and decoding, independent of model architectures and of HTTP."""
