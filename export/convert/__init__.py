"""Conversion of float32 bundles to smaller ones, and measures of the loss."""
