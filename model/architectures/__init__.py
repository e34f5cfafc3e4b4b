"""Architectures: Transformer, recurrent encoder-decoder, causal model and classifier."""
