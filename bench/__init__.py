"""Measurements of Sightline, each a ratio or a bar, each from one run, written to `bench/results/`."""
