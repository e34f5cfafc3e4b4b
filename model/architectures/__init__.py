"""Architectures: the Transformer, the recurrent encoder-decoder, the causal model and the classifier."""
