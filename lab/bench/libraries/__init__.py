"""Decoders without a server, each in its own process that receives its tasks over a pipe."""
