"""Attention models in PyTorch: layers, training, evaluation, slow reference decoding. Nothing of serving."""
