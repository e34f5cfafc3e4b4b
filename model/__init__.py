"""Attention models in PyTorch: layers, training, evaluation and slow reference decoding."""
