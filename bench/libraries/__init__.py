"""Decoders without a server, each in a process of its own that is told over a pipe what to decode."""
