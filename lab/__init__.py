"""Experiments and measurements beside the product; no part of the wheel."""
