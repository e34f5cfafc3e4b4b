"""Scheduling and decoding: rows of named tensors, no architecture, no socket."""
