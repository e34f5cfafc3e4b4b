"""Layers: attention in all its forms, embeddings and the layers of a Transformer."""
